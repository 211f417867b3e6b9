"""How many micro-batches a stage of a pipeline keeps at once, by its schedule."""

from __future__ import annotations

from shardlab.arguments import check_count, check_whole, given
from shardlab.layout.stages import check_schedule

from .units import ceil_div


def in_flight(
    pp: int,
    stage: int = 0,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    chunks: int = 1,
) -> float:
    """Micro-batches, each of all layers of `stage`, that are kept at once; None: many, as p.

    1F1B: p - k on stage k. Interleaved, counted in chunks, of which a stage has v: Narayanan et al.
    2021 (arXiv 2104.04473), section 2.2, and Korthikanti et al. 2022, section 4.2.3. Zero-bubble
    (Qi et al. 2023, arXiv 2401.10241): what the weights' passes need stays until they come; for
    "zb-v" it is a bound, which few micro-batches do not reach.
    """
    check_schedule(pp, schedule, chunks)
    check_whole(0, pp - 1, stage=stage)
    check_count(**given(microbatches=microbatches))
    m = pp if microbatches is None else microbatches
    if pp == 1 or schedule == "naive":
        return 1
    if schedule == "interleaved":  # in groups of p micro-batches, or of a few more
        group = ceil_div(m, max(1, m // pp))
        ahead = 2 * (pp - 1 - stage) + (chunks - 1) * group
        return (min(ahead + 1, chunks * m) if microbatches else ahead + 1) / chunks
    most = {"gpipe": m, "zb-h1": pp, "zb-h2": 2 * pp - 1, "zb-v": pp}.get(schedule, pp - stage)
    return most if microbatches is None else min(most, m)


def deferred(pp: int, stage: int, microbatches: int, schedule: str) -> int:
    """Of those `in_flight`, micro-batches whose weights' passes alone are left.

    They no longer need attention's scores: Qi et al. 2023, section 2.3.
    """
    ahead = {"zb-h1": pp - stage, "zb-h2": 2 * (pp - stage) - 1}.get(schedule)
    if pp == 1 or ahead is None:
        return 0
    return int(in_flight(pp, stage, microbatches, schedule)) - min(ahead, microbatches)
