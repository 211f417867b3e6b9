"""Causes in state that steps hand on, or that checkpoints restore.

Such state is weights, optimizer moments and step counts, the learning rate, and the data's
position. STATE_CAUSES is a table of causes, like `causes.CAUSES`, and is tried first.
"""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from .causes import CAUSES, WrongTensor, format_factors
from .hooks import INITIAL_STEP
from .noise import measure_difference, rms
from .places import propose_places

OPTION_NAMES = {"lr": "learning rate", "step": "step count", "weight_decay": "weight decay"}
UNUSED_OPTIONS = {"initial_lr"}  # optimizer options without effect
MAX_RESIDUAL = 0.02  # relative rest of a fit below which the fit explains the tensor
MAX_DIFFERENCE_RATIO = 0.5  # share of the difference below which another step's tensor explains it
MAX_PLACES = 8  # places of another step's tensor that are tried


def _explain_loaded_weights(case: WrongTensor) -> str:
    if case.key.phase != "weights" or case.key.step == INITIAL_STEP:
        return ""
    for step in sorted(k.step for k in case.plain.parts if k[1:] == case.key[1:]):
        old = case.get_plain_tensor(step=step)
        if all(case.is_close(v.found, v.place.take_from(old).double()) for v in case.wrong_values):
            since = f"step {step + 1}" if step != INITIAL_STEP else "the first step: not loaded?"
            return f"equal the weights before {since}"
    return "differ from the uninterrupted run's weights: not loaded, or loaded from another run?"


def _explain_other_optimizer(case: WrongTensor) -> str:
    wanted = case.plain.parts[case.key][0].optimizer_class
    found = {part.optimizer_class for part in case.get_wrong_parts().values()} - {""}
    if case.key.phase != "update" or not wanted or not found or wanted in found:
        return ""
    made_by = f"optimizer{'s' if len(found) > 1 else ''} {' and '.join(sorted(found))}"
    return f"was made by {made_by}; the plain program uses {wanted}"


def _explain_fresh_optimizer(case: WrongTensor) -> str:
    gradient = case.get_plain_tensor(phase="gradient") if case.key.phase == "update" else None
    if gradient is None:
        return ""
    value = case.wrong_values[0]
    g = value.take_part(gradient)
    weight = case.get_plain_tensor(phase="weights", step=case.key.step or INITIAL_STEP)
    w = None if weight is None else value.take_part(weight)
    for direction, text in (
        (g.sign(), "every element moves by {:.3g} against its gradient, as in Adam's first step"),
        (g, "is -{:.3g} times its gradient, with no momentum term"),
    ):
        factor, rest = _fit_direction(value.found, direction, w)
        if factor < 0 and rest < MAX_RESIDUAL < _fit_direction(value.wanted, direction, w)[1]:
            return text.format(-factor) + ": did the optimizer restart (moments not loaded?)"
    return ""


def _fit_direction(x: Tensor, direction: Tensor, w: Tensor | None) -> tuple[float, float]:
    """Fit x to a multiple of `direction` plus one of `w`; return the first factor, and the rest."""
    columns = torch.stack([t.flatten() for t in (direction, w) if t is not None], 1)
    factors = torch.linalg.lstsq(columns, x.flatten()[:, None]).solution
    rest = rms(x.flatten() - (columns @ factors).flatten()) / max(rms(x), 1e-300)
    return factors[0].item(), rest


def _explain_other_step(case: WrongTensor) -> str:
    """Explain a first output that is much more similar to another step's output."""
    if case.key.phase != "forward":
        return ""
    value, full = case.wrong_values[0], tuple(case.tolerance.full.shape)
    found = value.found
    by_step: dict[int, float] = {}
    for step in sorted({k.step for k in case.plain.parts} - {INITIAL_STEP, case.key.step}):
        other = case.get_plain_tensor(step=step)
        if other is None or other.shape != full:
            continue
        proposals = islice(propose_places(found.shape, full, value.rank), MAX_PLACES)
        parts = (p.take_from(other).double().view(found.shape) for p in (value.place, *proposals))
        by_step[step] = min(measure_difference(found, part, 1.0)[0] for part in parts)
    step = min(by_step, key=by_step.__getitem__, default=0)
    limit = MAX_DIFFERENCE_RATIO * measure_difference(found, value.wanted, 1.0)[0]
    if not by_step or by_step[step] >= limit:
        return ""
    at_start = case.key.step == case.ranks[0].first_step and step == 0
    why = "did the data restart?" if at_start else "does this step use that step's samples?"
    return f"is most similar to step {step + 1}'s value: {why}"


def _explain_random_state(case: WrongTensor) -> str:
    parts = (match.part for m in case.ranks for match in m.matches.get(case.key, ()))
    resumed = case.key.phase == "forward" and case.key.step == case.ranks[0].first_step > 0
    if not resumed or not any(part.used_rng for part in parts):
        return ""
    return "random numbers are drawn here: was the RNG state restored?"


STATE_CAUSES = (
    _explain_loaded_weights, _explain_other_optimizer, _explain_fresh_optimizer,
    _explain_other_step, _explain_random_state,
)  # fmt: skip


def list_changed_options(case: WrongTensor) -> str:
    """List options of an update's optimizer that differ, such as its rate or step count."""
    right = {}
    if not _explain_other_optimizer(case):
        right = case.plain.parts[case.key][0].optimizer_options
    found = {rank: part.optimizer_options for rank, part in case.get_wrong_parts().items()}
    changes = []
    for name in sorted(right.keys() - UNUSED_OPTIONS):
        by_rank = {rank: float(options[name]) for rank, options in found.items() if name in options}
        if any(abs(x - right[name]) > 1e-9 * abs(right[name]) for x in by_rank.values()):
            first, *others = dict.fromkeys(by_rank.values())
            value = format_factors(by_rank) if others else f"{first:.4g}"
            option = OPTION_NAMES.get(name, name)
            changes.append(f"the {option} is {value}, but {right[name]:.4g} in the plain program")
    return "; ".join(changes)


def explain_tensor(case: WrongTensor) -> str:
    """Explain a wrong tensor: wrong state, or a cause; and options that differ."""
    cause = next(text for explain in (*STATE_CAUSES, *CAUSES) if (text := explain(case)))
    return "; ".join(filter(None, (cause, list_changed_options(case))))
