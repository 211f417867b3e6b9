"""The comparison of a rank's tensors with those of the plain program: the matcher.

Three rules keep an ambiguous match from hiding a mistake:

1. Gradients and updates are strict. The gradient that the optimizer sees, and the
   update that it makes, have the place of the weight itself before the first step, with
   factor 1, on every rank that holds the weight. Weights are equal before any mistake
   can act, so their places are learned from correct values.
2. Outputs and their gradients are lenient, and only locate a mistake: no alarm if every
   gradient of the step is right. An output may have any place, or be a partial sum; in
   backward each rank has one free factor, since it may divide its loss at the end. An
   output's gradient has the place of the output.
3. A weight keeps all places that fit (ones fit many). Later tensors narrow this set.

On each rank a `Matcher` finds the place of each tensor as it comes, by the rule of its
phase, and keeps the tensors that fit nowhere. Two kinds of state carry over:

- `WeightPlaces`: empty until the weight is matched; gradients and updates narrow them;
- `CallState`, one micro-batch of a step: the places of its outputs; the factor of its
  backward, free until the first gradient of an output fixes it; a phase is lost once
  MAX_MISFITS of its tensors fitted nowhere, and then only a few places are tried.

A `comparison.Comparison` of all ranks' matchers finds the first wrong tensor.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from torch import Tensor

from .hooks import Key, Part, Sink
from .noise import Tolerance, fit_factor, get_tolerance, rms
from .places import (
    Place,
    match_equal_rows,
    match_rows,
    propose_permuted,
    propose_pieces,
    propose_places,
)
from .record import Record

FALLBACK_PLACES = 16  # tried to explain a misfit, or once a phase is lost
MAX_MISFITS = 8  # misfits of a phase and call after which the phase is lost
LOOSE_TOLERANCE = 1e-3  # above this tolerance, an output fits at wrong places, too
STRICT_PHASES = "gradient", "update"


@dataclass
class PartMatch:
    """A part on a rank, on torch's meta device unless it fits nowhere."""

    part: Part
    place: Place | None
    factor: float = 1.0  # this rank's factor in backward

    @property
    def is_found(self) -> bool:
        """True if the part was found in the plain run's tensor."""
        return self.part.value.is_meta


@dataclass
class WeightPlaces:
    """The places that a rank's weight may have: all that have fitted so far."""

    places: list[Place] = field(default_factory=list)

    def get_places_for(self, value: Tensor) -> list[Place]:
        """Return the places with as many numbers as `value`."""
        return [p for p in self.places if p.fits_size(value)]


@dataclass
class CallState:
    """The state of one call (micro-batch) of a step's modules on this rank (rule 2)."""

    output_places: dict[str, Place] = field(default_factory=dict)  # by name
    factor: float | None = None  # the factor of backward; None: free
    misfits: Counter[str] = field(default_factory=Counter)  # by phase

    def is_lost(self, phase: str) -> bool:
        """Return True if too many of the phase's tensors fit nowhere."""
        return self.misfits[phase] >= MAX_MISFITS


class Matcher(Sink):
    """A sink on one rank that finds each tensor's place in the plain run's tensor."""

    def __init__(self, plain: Record, rank: int, ranks: int, first_step: int = 0):
        super().__init__()
        self.plain, self.rank, self.ranks = plain, rank, ranks
        self.first_step = first_step  # steps that were taken before a resumed run
        self.weights: dict[tuple[str, int], WeightPlaces] = defaultdict(WeightPlaces)
        self.calls: dict[tuple[int, int], CallState] = defaultdict(CallState)
        self.known_places: dict[tuple, list[Place]] = defaultdict(list)  # by shape
        self.clip_factors: dict[int, float] = {}  # by step
        # Results for the comparison.
        self.matches: dict[Key, list[PartMatch]] = {}
        self.tolerance_used: dict[str, float] = {}  # largest share, by phase

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"plain": None}

    def get_call(self, key: Key, part: Part) -> CallState:
        """Return the state of the part's call in its step."""
        return self.calls[key.step, part.call]

    def get_backward_factors(self, step: int) -> list[float]:
        """Return the backward factors of the step's calls that have fixed one."""
        each = (call.factor for (at, _), call in self.calls.items() if at == step)
        return [factor for factor in each if factor is not None]

    def drop_misfit(self, key: Key) -> bool:
        """Drop an update that fits nowhere; see `Sink.drop_misfit`."""
        key = self.plain.resolve_alias(key)
        has_misfit = any(not match.is_found for match in self.matches.get(key, ()))
        return has_misfit and bool(self.matches.pop(key))

    def receive_part(self, key: Key, part: Part) -> None:
        """Find the part's place; keep its value if it fits nowhere."""
        key = self.plain.resolve_alias(key)
        matches = self.matches.setdefault(key, [])
        place, factor = self.find_place(key, part, len(matches))
        full = self.plain.full_tensor(key)
        if place is not None or full is None or not full.numel():
            part = replace(part, value=part.value.to("meta"))
        else:
            self.get_call(key, part).misfits[key.phase] += 1
            part = replace(part, value=part.value.clone())
        matches.append(PartMatch(part, place, factor))

    def find_place(
        self, key: Key, part: Part, number: int
    ) -> tuple[Place | None, float]:  # fmt: skip
        """Return the place of this part, the `number`-th of its key; and its factor."""
        full = self.plain.full_tensor(key)
        if full is None or not full.numel() or key.phase == "samples":
            return None, 1.0
        tol = get_tolerance(self.plain, key, part.value.dtype)
        if not part.value.numel():
            return next(propose_places(part.value.shape, full.shape)), 1.0
        weight = self.weights[key.name, number]
        if key.phase == "weights":
            return self._place_weight(weight, part, tol), 1.0
        if key.phase in STRICT_PHASES:
            return self._place_strictly(key, weight, part, tol), 1.0
        if self.plain.is_scalar(key):
            return None, 1.0
        if key.phase == "forward":
            return self._place_output(key, part, tol), 1.0
        return self._place_output_gradient(key, part, tol)

    # Weights, gradients and updates: strict

    def _place_weight(
        self, weight: WeightPlaces, part: Part, tol: Tolerance
    ) -> Place | None:  # fmt: skip
        """Keep all places that fit, or only the bitwise-equal ones if there are any."""
        fits: list[tuple[float, Place]] = []
        for each in self._propose_weight_places(part, tol.full):
            errors = ((tol.measure_at(p, part.value), p) for p in each)
            if fits := [(error, p) for error, p in errors if error <= 1]:
                break
        least = min((error for error, _ in fits), default=1.0)
        # Numbers with few bits fit many places: bitwise equal ones come first.
        weight.places = [p for error, p in fits if error == 0.0 or least > 0.0]
        return weight.places[0] if weight.places else None

    def _propose_weight_places(
        self, part: Part, full: Tensor
    ) -> Iterator[Iterable[Place]]:  # fmt: skip
        value = part.value
        cut = propose_places(value.shape, full.shape, self.rank, part.offset)
        is_cut = value.shape != full.shape
        yield chain(cut, propose_pieces(value, full, self.ranks) if is_cut else ())
        yield filter(None, [match_rows(value, full)])

    def _place_strictly(
        self, key: Key, weight: WeightPlaces, part: Part, tol: Tolerance
    ) -> Place | None:
        """Return a place of the weight at which this part fits with factor 1."""
        value, owned = part.value, weight.get_places_for(part.value)
        if part.outside_optimizer or not tol.is_comparable:
            return owned[0] if owned else None
        factor = 1.0
        if part.before_clipping and owned:  # a step has one clipping factor
            free = fit_factor(value.view(owned[0].shape), owned[0].take_from(tol.full))
            factor = self.clip_factors.setdefault(key.step, free)
        fits = [
            p for p in owned if self._fits(key, value.view(p.shape), p, tol, factor)
        ]  # fmt: skip
        if fits:
            weight.places = fits
        return fits[0] if fits else None

    # Outputs and their gradients: lenient

    def _place_output(self, key: Key, part: Part, tol: Tolerance) -> Place | None:
        """Return an output's best place; earlier outputs' places are tried first."""
        value, shape, full = part.value, tuple(part.value.shape), tuple(tol.full.shape)
        known = self.known_places[part.call, shape, full]
        # The likeliest part of the batch has this rank's number, or this call's number.
        first = self.rank if full[:1] == shape[:1] or not part.call else part.call
        in_call = self._propose_places_in_call(key, part, full)
        anywhere = self._propose_places(key, part, full, first)
        place = self._pick_place(key, value, chain(known, in_call, anywhere), tol)
        call = self.get_call(key, part)
        if place is None and not call.is_lost(key.phase):
            permuted = propose_permuted(value, tol.full, self.rank)
            place = self._pick_place(key, value, permuted, tol)
        if place is not None:
            call.output_places[key.name] = place
            if not any(place.is_same(other) for other in known):
                known.append(place)
        return place

    def _propose_places(
        self, key: Key, part: Part, full: tuple[int, ...], first: int
    ) -> Iterator[Place]:
        places = propose_places(part.value.shape, full, first, part.offset)
        is_lost = self.get_call(key, part).is_lost(key.phase)
        return islice(places, FALLBACK_PLACES) if is_lost else places

    def _propose_places_in_call(
        self, key: Key, part: Part, full: tuple[int, ...]
    ) -> Iterator[Place | None]:
        """Yield places within the output of the plain run's call of the same number."""
        calls = list(islice(self.plain.yield_calls(key), part.call + 1))
        if len(self.plain.parts[key]) > 1 and part.call < len(calls):
            shape, begin = calls[part.call]
            known = self.known_places[0, tuple(part.value.shape), tuple(shape)]
            others = propose_places(part.value.shape, shape, self.rank, part.offset)
            for place in chain(known, others):
                yield place.shift_by(begin, full)

    def _pick_place(
        self, key: Key, value: Tensor, places: Iterable[Place | None], tol: Tolerance
    ) -> Place | None:
        """Return the place that fits best; under a tight tolerance, the first one."""
        best, least = None, 1.0
        for place in places:
            if place is None:
                continue
            if (error := tol.measure_at(place, value)) <= least:
                best, least = place, error
                if tol.overall < LOOSE_TOLERANCE:
                    break
        if best is not None and tol.is_comparable:
            self._note_error(key, least)
        return best

    def _place_output_gradient(
        self, key: Key, part: Part, tol: Tolerance
    ) -> tuple[Place | None, float]:
        """Return the place of the output, if known; and this rank's factor."""
        value, call = part.value, self.get_call(key, part)
        output = call.output_places.get(key.name)
        if not tol.is_comparable:
            return output, 1.0
        has_place = output is not None and output.shape == tuple(value.shape)
        places: Iterable[Place] = [output] if has_place else []
        if not places or tol.overall >= LOOSE_TOLERANCE:
            full = tuple(tol.full.shape)
            known = self.known_places[part.call, tuple(value.shape), full]
            others = self._propose_places(key, part, full, self.rank)
            places = chain(places, known, others)
        fixed = call.factor
        tried = [fixed, *self.get_backward_factors(key.step)]
        for place in places:
            free = tried
            if fixed is None:
                free = [fit_factor(value, place.take_from(tol.full))]
            if free == [0.0] and self._fits(key, value, place, tol):  # all zeros
                return place, 1.0
            if factor := self._find_factor(key, part, place, tol, free):
                return place, factor
        if output is not None:
            permuted = self._permute_equal_rows(key, part, output, tol, tried)
            for place, factor in permuted:
                if self._find_factor(key, part, place, tol, [factor]):
                    return place, factor
        return None, 1.0

    def _find_factor(
        self, key: Key, part: Part, place: Place, tol: Tolerance, tried: list[float]
    ) -> float:
        """Return the first factor with which the part fits, and keep it; else 0."""
        for factor in dict.fromkeys(tried):
            if factor and self._fits(key, part.value, place, tol, factor):
                call = self.get_call(key, part)
                call.factor = factor if call.factor is None else call.factor
                return factor
        return 0.0

    def _permute_equal_rows(
        self, key: Key, part: Part, at: Place, tol: Tolerance, tried: list[float | None]
    ) -> Iterator[tuple[Place, float]]:
        """Yield (place, factor) pairs that permute rows of equal outputs to fit.

        at: the place of the output. Unknown factors are estimated from the first rows.
        """
        value, is_lost = part.value, self.get_call(key, part).is_lost(key.phase)
        output = get_tolerance(self.plain, key._replace(phase="forward"), value.dtype)
        if is_lost or at.shape != value.shape or not value.dim():
            return
        outputs = at.take_from(output.full), output.full

        def has_equal_output(p: Place) -> bool:
            return output.measure_error(p.take_from(output.full), outputs[0]) <= 1

        if tried[0] is None:
            both = value, at.take_from(tol.full)
            rows = [x.reshape(-1, x.shape[-1])[:FALLBACK_PLACES] for x in both]
            row_factors = (fit_factor(*pair) for pair in zip(*rows, strict=True))
            tried = [1.0, float(self.ranks), *row_factors]
            for place in propose_places(value.shape, tol.full.shape, self.rank):
                factor = fit_factor(value, place.take_from(tol.full))
                fits = tol.measure_at(place, value, factor) <= 1
                if fits and has_equal_output(place):
                    yield place, factor
        for factor in dict.fromkeys(filter(None, tried)):
            place = match_equal_rows(at, outputs, (value / factor, tol.full))
            if place and has_equal_output(place):
                yield place, factor

    def _fits(
        self, key: Key, value: Tensor, place: Place, tol: Tolerance, factor: float = 1.0
    ) -> bool:
        error = tol.measure_at(place, value, factor)
        if error <= 1:
            self._note_error(key, error)
        return error <= 1

    def _note_error(self, key: Key, error: float) -> None:
        used = self.tolerance_used.get(key.phase, 0.0)
        self.tolerance_used[key.phase] = max(used, error)

    def guess_place(self, key: Key, match: PartMatch, number: int) -> Place | None:
        """Return the most similar place of a part that fits nowhere."""
        value, full = match.part.value, self.plain.full_tensor(key)
        output = self.get_call(key, match.part).output_places.get(key.name)
        if key.phase == "backward" and output is not None and output.fits_size(value):
            return output
        if key.phase in STRICT_PHASES:
            owned = self.weights[key.name, number].get_places_for(value)
            return next(iter(owned), None)
        shape, offset = tuple(value.shape), match.part.offset
        known = self.known_places[match.part.call, shape, tuple(full.shape)]
        places = known or propose_places(shape, full.shape, self.rank, offset)
        return min(
            islice(places, FALLBACK_PLACES),
            key=lambda p: rms(value.double() - p.take_from(full).double()),
            default=None,
        )
