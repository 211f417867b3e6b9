"""Hints to the origin of the first wrong tensor, in words: all HINTS that fit.

A new hint is a function of the `Comparison` that returns a sentence, or "" if it does not fit, and
a row of HINTS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .causes import UNEXPLAINED, format_factors, is_same_factor, is_uniform
from .cross_rank import has_all_children
from .hooks import Key
from .report import describe_key

if TYPE_CHECKING:
    from .comparison import Comparison


def _get_right_keys_before(comparison: Comparison) -> list[Key]:
    """Return the compared tensors of the same phase before the first wrong one."""
    bad, keys, ranks = comparison.report.first_finding.key, comparison.keys, comparison.ranks
    before = [key for key in keys[: keys.index(bad)] if key[:2] == bad[:2]]
    whole = (k for k in before if any(has_all_children(k, comparison.plain, m) for m in ranks))
    return [key for key in whole if key not in comparison.report.skipped]


def _get_backward_factors(comparison: Comparison) -> dict[int, float]:
    step = comparison.report.first_finding.key.step
    return {m.rank: f for m in comparison.ranks for f in m.get_backward_factors(step)}


def _hint_missing_reduction(comparison: Comparison) -> str:
    """Name the first partial sum before the wrong tensor that was not all-reduced."""
    bad, keys = comparison.report.first_finding.key, comparison.keys
    phase = "backward" if bad.phase == "gradient" else bad.phase
    before = keys[: keys.index(bad) + 1]
    sums = [x for x in comparison.partial_sums if x[0][:2] == (bad.step, phase) and x[0] in before]
    # The output of the module that has the parameter.
    output = Key(bad.step, phase, bad.name.rpartition(".")[0])
    added_up = bad.phase == "gradient" and output not in (key for key, _ in sums)
    if not sums or added_up:
        return ""
    key, ranks = sums[0]
    text = f"partial sums of the {describe_key(key)}"
    return f"first error: {text} were not added up over ranks {ranks}"


def _hint_last_right_tensor(comparison: Comparison) -> str:
    """Name the last right tensor before the first wrong output or output gradient."""
    bad = comparison.report.first_finding.key
    right = sorted(_get_right_keys_before(comparison), key=lambda key: bool(key.name))
    if bad.phase not in ("forward", "backward") or not right:
        return ""
    if any(hint(comparison) for hint in (_hint_missing_reduction, _hint_loss, _hint_factors)):
        return ""
    last = f"last right tensor: {describe_key(right[-1])}"
    if bad.phase == "forward":
        return last
    wrong = "a backward, a reduction or an (auxiliary) loss is wrong"
    return f"{last}; between it and the first wrong tensor, {wrong}"


def _hint_stale_weights(comparison: Comparison) -> str:
    bad = comparison.report.first_finding.key
    if bad.phase != "forward" or bad.step <= comparison.ranks[0].first_step:
        return ""
    return (
        "every update of the previous step was right: this step does not use the weights that the "
        "optimizer wrote, or it uses different samples"
    )


def _hint_loss(comparison: Comparison) -> str:
    bad = comparison.report.first_finding.key
    if bad.phase != "backward" or _get_right_keys_before(comparison):
        return ""
    if name := _find_shuffled_output(comparison):
        return (
            f"the rows of the {name} are the plain program's, but their order or number differs: "
            "do both programs use the same batch (sampler, shuffle, seed)?"
        )
    return "every output was right: the loss is wrong (its targets, its mask, or its divisor)"


def _get_first_key(comparison: Comparison, phase: str) -> Key:
    """Return the first tensor of a phase in that step, or the first that could be compared."""
    bad, report = comparison.report.first_finding.key, comparison.report
    keys = [key for key in comparison.keys if key[:2] == (bad.step, phase)]
    return next((key for key in keys if key not in report.skipped), bad)


def _find_shuffled_output(comparison: Comparison) -> str:
    """Name the step's first output if its rows are out of order."""
    first = _get_first_key(comparison, "forward")
    if first.phase != "forward":
        return ""
    calls = (c for m in comparison.ranks for (step, _), c in m.calls.items() if step == first.step)
    places = (call.output_places.get(first.name) for call in calls)
    rows = [place.index[0] for place in places if place and isinstance(place.index[0], Tensor)]
    is_unsorted = any((index[index >= 0].diff() <= 0).any() for index in rows)
    return describe_key(first) if is_unsorted else ""


def _hint_other_finding(comparison: Comparison) -> str:
    """Quote another gradient or update with an explanation, if the first wrong one has none."""
    first, *others = comparison.report.phase_findings
    if not first.message.startswith(UNEXPLAINED):
        return ""
    better = next((f for f in others if not f.message.startswith(UNEXPLAINED)), None)
    return f"and the {describe_key(better.key)} {better.message}" if better else ""


def _hint_clipping(comparison: Comparison) -> str:
    """Say if all wrong gradients of the step are off by one factor for each rank."""
    findings, bad = comparison.report.phase_findings, comparison.report.first_finding.key
    if bad.phase != "gradient" or len(findings) < 3 or not all(f.factors for f in findings):
        return ""
    by_rank: dict[int, float] = {}
    for rank, factor in (x for finding in findings for x in finding.factors.items()):
        if not is_same_factor(by_rank.setdefault(rank, factor), factor):
            return ""
    skipped = comparison.report.skipped
    compared = [k for k in comparison.keys if k[:2] == bad[:2] and k not in skipped]
    which = "all gradients" if len(findings) == len(compared) else "all wrong gradients"
    if is_uniform(by_rank.values()):
        why = " (a different clipping norm, or a different loss?)"
        return f"{which} are off by the same factor{'' if ': ' in findings[0].message else why}"
    return f"{which} are scaled by {format_factors(by_rank)}: did each rank clip by its own norm?"


def _hint_factors(comparison: Comparison) -> str:
    first, factors = comparison.report.first_finding, _get_backward_factors(comparison)
    is_backward = first.key.phase == "backward"
    if first.key.phase == "forward" or is_uniform(factors.values()):
        return ""
    if is_backward and is_uniform(first.factors.values()):
        return ""
    start = f"the {describe_key(_get_first_key(comparison, 'backward'))} is scaled by "
    msg = f"backward began with wrong factors: {start if is_backward else ''}"
    return f"{msg}{format_factors(factors)}; is each loss averaged over the rank's own token count?"


HINTS = (
    _hint_missing_reduction, _hint_last_right_tensor, _hint_stale_weights, _hint_loss,
    _hint_other_finding, _hint_clipping, _hint_factors,
)  # fmt: skip


def collect_hints(comparison: Comparison) -> list[str]:
    """Return the hints to the origin of the first wrong tensor."""
    if comparison.report.is_equal:
        return []
    return [text for hint in HINTS if (text := hint(comparison))]
