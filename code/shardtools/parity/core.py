"""The comparison of N ranks' tensors with those of one process: the matcher of each rank.

Three rules keep an ambiguous match from hiding a mistake:

1. Gradients and updates ("ends") are strict. The gradient that the optimizer sees, and the update
   that it makes, stand where the weight itself stood before the first step, with factor 1, on every
   rank that holds the weight. Weights are equal before any mistake can act, so their places are
   learned from correct values.
2. Outputs and their gradients ("inside") are lenient, and only locate a mistake: no alarm if every
   gradient of the step is right. An output may stand anywhere, or be a partial sum; in backward
   each rank has one free factor, since it may divide its loss at the end. An output's gradient
   stands where the output did.
3. A weight keeps all places that fit (ones fit many). Later tensors narrow this set.

On each rank a `Matcher` finds the place of each tensor as it comes, by the rule of its phase, and
keeps the tensors that fit nowhere. Two kinds of state carry over from one tensor to the next:

- `Weight`: UNKNOWN until the weight is seen; then its places, which gradients and updates narrow;
- `Call`, one micro-batch of a step: the places of its outputs; the factor of its backward, FREE
  until the first gradient of an output fixes it; a phase is LOST once PATIENCE of its tensors
  fitted nowhere, and then only a few places are tried.

`judge.Judge` combines the matchers of all ranks, and says which tensor is wrong first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from torch import Tensor

from .noise import Tolerance, ratio, rms, tolerance
from .places import Place, by_rows, by_twins, in_any_order, pieces, proposals
from .record import Record
from .recording import Key, Part, Sink

FEW = 16  # proposals that are tried to explain a misfit, or once a phase is lost
PATIENCE = 8  # misfits of a phase and call after which the phase is lost
LOOSE = 1e-3  # above this tolerance, an output fits at wrong places, too
ENDS = "gradient", "update"


@dataclass
class Seen:
    """A part on a rank, on torch's meta device unless it fits nowhere."""

    part: Part
    place: Place | None
    factor: float = 1.0  # this rank's factor in backward

    @property
    def fits(self) -> bool:
        """True if the part was found in the plain run's tensor."""
        return self.part.value.is_meta


@dataclass
class Weight:
    """The places where a rank's weight may stand: all that have fitted so far."""

    places: list[Place] = field(default_factory=list)  # empty: UNKNOWN

    def that_hold(self, value: Tensor) -> list[Place]:
        """Return the places with as many numbers as `value`."""
        return [p for p in self.places if p.holds(value)]


@dataclass
class Call:
    """The state of one call (micro-batch) of a step's modules on this rank (rule 2)."""

    stood: dict[str, Place] = field(default_factory=dict)  # outputs' places, by name
    factor: float | None = None  # the factor of backward; None: FREE
    misfits: Counter[str] = field(default_factory=Counter)  # by phase

    def is_lost(self, phase: str) -> bool:
        """Return True if too many of the phase's tensors fit nowhere."""
        return self.misfits[phase] >= PATIENCE


class Matcher(Sink):
    """A sink on one rank that finds each tensor's place in the plain run's tensor."""

    def __init__(self, plain: Record, rank: int, ranks: int, begins: int = 0):
        super().__init__()
        self.plain, self.rank, self.ranks = plain, rank, ranks
        self.begins = begins  # steps that were taken before a resumed run
        self.weights: dict[tuple[str, int], Weight] = defaultdict(Weight)  # by name and number
        self.calls: dict[tuple[int, int], Call] = defaultdict(Call)  # by step and call
        self.known: dict[tuple, list[Place]] = defaultdict(list)  # outputs', by shape
        self.clipped: dict[int, float] = {}  # clipping factor, by step
        # Results for the judge.
        self.seen: dict[Key, list[Seen]] = {}
        self.worst: dict[str, float] = {}  # by phase

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"plain": None}

    def stood(self, key: Key, call: int) -> Place | None:
        """Return this output's place in this step's call; None if it was not found."""
        return self.calls[key.step, call].stood.get(key.name)

    def factors(self, step: int) -> list[float]:
        """Return the backward factors of the step's calls that have fixed one."""
        each = (call.factor for (at, _), call in self.calls.items() if at == step)
        return [factor for factor in each if factor is not None]

    def forget(self, key: Key) -> bool:
        """Drop an update that fits nowhere; see `Sink.forget`."""
        key = self.plain.name(key)
        unfit = any(not seen.fits for seen in self.seen.get(key, ()))
        return unfit and bool(self.seen.pop(key))

    def see(self, key: Key, part: Part) -> None:
        """Find the part's place; keep its value if it fits nowhere."""
        key = self.plain.name(key)
        seen = self.seen.setdefault(key, [])
        place, factor = self.place(key, part, len(seen))
        whole = self.plain.whole(key)
        if place is not None or whole is None or not whole.numel():
            part = replace(part, value=part.value.to("meta"))
        else:
            self.calls[key.step, part.call].misfits[key.phase] += 1
            part = replace(part, value=part.value.clone())
        seen.append(Seen(part, place, factor))

    def place(self, key: Key, part: Part, number: int) -> tuple[Place | None, float]:
        """Return the place of this part, the `number`-th of its key; and its factor."""
        whole = self.plain.whole(key)
        if whole is None or not whole.numel() or key.phase == "samples":
            return None, 1.0
        near = tolerance(self.plain, key, part.value.dtype)
        if not part.value.numel():
            return next(proposals(part.value.shape, whole.shape)), 1.0
        weight = self.weights[key.name, number]
        if key.phase == "weights":
            return self._weight(weight, part, near), 1.0
        if key.phase in ENDS:
            return self._end(key, weight, part, near), 1.0
        if self.plain.scalar(key):
            return None, 1.0
        if key.phase == "forward":
            return self._output(key, part, near), 1.0
        return self._output_gradient(key, part, near)

    # Weights, gradients and updates: strict

    def _weight(self, weight: Weight, part: Part, near: Tolerance) -> Place | None:
        """Keep all places that fit, or only the bitwise-equal ones if there are any."""
        fits: list[tuple[float, Place]] = []
        for each in self._weight_places(part, near.whole):
            offs = ((near.off(part.value, p.of(near.whole)), p) for p in each)
            if fits := [(off, p) for off, p in offs if off <= 1]:
                break
        least = min((off for off, _ in fits), default=1.0)
        # Numbers with few bits fit many places: bitwise equal ones come first.
        weight.places = [p for off, p in fits if off == 0.0 or least > 0.0]
        return weight.places[0] if weight.places else None

    def _weight_places(self, part: Part, whole: Tensor) -> Iterator[Iterable[Place]]:
        value = part.value
        cut = proposals(value.shape, whole.shape, self.rank, part.start)
        yield chain(cut, pieces(value, whole, self.ranks) if value.shape != whole.shape else ())
        yield filter(None, [by_rows(value, whole)])

    def _end(self, key: Key, weight: Weight, part: Part, near: Tolerance) -> Place | None:
        """Return a place where the weight stood and this part fits with factor 1."""
        owned = weight.that_hold(part.value)
        if part.unread or not near.decides:
            return owned[0] if owned else None
        factor = 1.0
        if part.unclipped and owned:  # a step has one clipping factor
            free = ratio(part.value.view(owned[0].shape), owned[0].of(near.whole))
            factor = self.clipped.setdefault(key.step, free)
        fits = [p for p in owned if self._fits(key, part.value.view(p.shape), p, near, factor)]
        if fits:
            weight.places = fits
        return fits[0] if fits else None

    # Outputs and their gradients: lenient

    def _output(self, key: Key, part: Part, near: Tolerance) -> Place | None:
        """Return an output's best place; earlier outputs' places are tried first."""
        value, shape, whole = part.value, tuple(part.value.shape), tuple(near.whole.shape)
        known = self.known[part.call, shape, whole]
        # The likeliest part of the batch has this rank's number, or this call's number.
        first = self.rank if whole[:1] == shape[:1] or not part.call else part.call
        anywhere = self._proposed(key, part, whole, first)
        place = self._best(
            key, value, chain(known, self._of_call(key, part, whole), anywhere), near
        )
        call = self.calls[key.step, part.call]
        if place is None and not call.is_lost(key.phase):
            place = self._best(key, value, in_any_order(value, near.whole, self.rank), near)
        if place is not None:
            call.stood[key.name] = place
            if not any(place.same(other) for other in known):
                known.append(place)
        return place

    def _proposed(
        self, key: Key, part: Part, whole: tuple[int, ...], first: int
    ) -> Iterator[Place]:
        """Yield all proposed places, or a few if the call is lost already."""
        all_ = proposals(part.value.shape, whole, first, part.start)
        is_lost = self.calls[key.step, part.call].is_lost(key.phase)
        return islice(all_, FEW) if is_lost else all_

    def _of_call(self, key: Key, part: Part, whole: tuple[int, ...]) -> Iterator[Place | None]:
        """Yield places within the output of the plain run's call of the same number."""
        calls = list(islice(self.plain.calls(key), part.call + 1))
        if len(self.plain.parts[key]) > 1 and part.call < len(calls):
            shape, begin = calls[part.call]
            known = self.known[0, tuple(part.value.shape), tuple(shape)]
            for place in chain(known, proposals(part.value.shape, shape, self.rank, part.start)):
                yield place.later(begin, whole)

    def _best(
        self, key: Key, value: Tensor, places: Iterable[Place | None], near: Tolerance
    ) -> Place | None:
        """Return the place that fits best; under a tight tolerance, the first one."""
        best, least = None, 1.0
        for place in places:
            if place is None:
                continue
            if (off := near.off(value, place.of(near.whole))) <= least:
                best, least = place, off
                if near.of_all < LOOSE:
                    break
        if best is not None and near.decides:
            self.worst[key.phase] = max(self.worst.get(key.phase, 0.0), least)
        return best

    def _output_gradient(self, key: Key, part: Part, near: Tolerance) -> tuple[Place | None, float]:
        """Return the place where the output stood, if known; and this rank's factor."""
        value, shape = part.value, tuple(part.value.shape)
        stood = self.stood(key, part.call)
        if not near.decides:
            return stood, 1.0
        places: Iterable[Place] = [stood] if stood is not None and stood.shape == shape else []
        if not places or near.of_all >= LOOSE:
            whole = tuple(near.whole.shape)
            known = self.known[part.call, shape, whole]
            places = chain(places, known, self._proposed(key, part, whole, self.rank))
        mine = self.calls[key.step, part.call].factor
        tried = [mine, *self.factors(key.step)]
        for place in places:
            free = [ratio(value, place.of(near.whole))] if mine is None else tried
            if free == [0.0] and self._fits(key, value, place, near):  # all zeros
                return place, 1.0
            if factor := self._factor(key, part, place, near, free):
                return place, factor
        twins = self._twins(key, part, stood, near, tried) if stood is not None else ()
        for place, factor in twins:
            if self._factor(key, part, place, near, [factor]):
                return place, factor
        return None, 1.0

    def _factor(
        self, key: Key, part: Part, place: Place, near: Tolerance, tried: list[float]
    ) -> float:
        """Return the first factor with which the part fits, and keep it; else 0."""
        for factor in dict.fromkeys(tried):
            if factor and self._fits(key, part.value, place, near, factor):
                call = self.calls[key.step, part.call]
                call.factor = factor if call.factor is None else call.factor
                return factor
        return 0.0

    def _twins(
        self, key: Key, part: Part, stood: Place, near: Tolerance, tried: list[float | None]
    ) -> Iterator[tuple[Place, float]]:
        """Yield (place, factor) pairs that permute rows of equal outputs to fit.

        Factors that are unknown yet are estimated from the first rows.
        """
        value, lost = part.value, self.calls[key.step, part.call].is_lost(key.phase)
        output = tolerance(self.plain, key._replace(phase="forward"), value.dtype)
        if lost or stood.shape != value.shape or not value.dim():
            return
        alike = lambda p: output.off(p.of(output.whole), stood.of(output.whole)) <= 1  # noqa: E731
        if tried[0] is None:
            rows = [x.reshape(-1, x.shape[-1])[:FEW] for x in (value, stood.of(near.whole))]
            tried = [1.0, float(self.ranks), *(ratio(*pair) for pair in zip(*rows, strict=True))]
            for place in proposals(value.shape, near.whole.shape, self.rank):
                factor = ratio(value, place.of(near.whole))
                if near.off(value, place.of(near.whole), factor) <= 1 and alike(place):
                    yield place, factor
        outputs = stood.of(output.whole), output.whole
        for factor in dict.fromkeys(filter(None, tried)):
            place = by_twins(stood, outputs, (value / factor, near.whole))
            if place and alike(place):
                yield place, factor

    def _fits(
        self, key: Key, value: Tensor, place: Place, near: Tolerance, factor: float = 1.0
    ) -> bool:
        off = near.off(value, place.of(near.whole), factor)
        if off <= 1:
            self.worst[key.phase] = max(self.worst.get(key.phase, 0.0), off)
        return off <= 1

    def guess(self, key: Key, seen: Seen, number: int) -> Place | None:
        """Return the most similar place of a part that fits nowhere."""
        part, whole = seen.part, self.plain.whole(key)
        stood = self.stood(key, part.call)
        if key.phase == "backward" and stood is not None and stood.holds(part.value):
            return stood
        if key.phase in ENDS:
            return next(iter(self.weights[key.name, number].that_hold(part.value)), None)
        known = self.known[part.call, tuple(part.value.shape), tuple(whole.shape)]
        likely = known or proposals(part.value.shape, whole.shape, self.rank, part.start)
        apart = lambda p: rms(part.value.double() - p.of(whole).double())  # noqa: E731
        return min(islice(likely, FEW), key=apart, default=None)
