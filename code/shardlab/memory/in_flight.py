"""How many micro-batches a stage of a pipeline keeps at once, by its schedule."""

from __future__ import annotations

from shardlab.layout import Layout

from .units import ceil_div


def in_flight(layout: Layout, stage: int = 0) -> float:
    """Micro-batches, each of all layers of `stage`, that are kept at once.

    1F1B: p - k on stage k, or all m of a step with fewer. Interleaved, counted in chunks, of which
    a stage has v: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, and Korthikanti et al.
    2022, section 4.2.3. Zero-bubble (Qi et al. 2023, arXiv 2401.10241): what the weights' passes
    need stays until they come; for "zb-v" it is a bound, which few micro-batches do not reach.
    """
    pp, m, schedule, chunks = layout.pp, layout.microbatches, layout.schedule, layout.chunks
    if pp == 1 or schedule == "naive":
        return 1
    if schedule == "interleaved":  # in groups of p micro-batches, or of a few more
        group = ceil_div(m, max(1, m // pp))
        ahead = 2 * (pp - 1 - stage) + (chunks - 1) * group
        return min(ahead + 1, chunks * m) / chunks
    most = {"gpipe": m, "zb-h1": pp, "zb-h2": 2 * pp - 1, "zb-v": pp}.get(schedule, pp - stage)
    return min(most, m)


def deferred(layout: Layout, stage: int) -> int:
    """Of those `in_flight`, micro-batches whose weights' passes alone are left.

    They no longer need attention's scores: Qi et al. 2023, section 2.3.
    """
    behind = layout.pp - stage
    ahead = {"zb-h1": behind, "zb-h2": 2 * behind - 1}.get(layout.schedule)
    if layout.pp == 1 or ahead is None:
        return 0
    return int(in_flight(layout, stage)) - min(ahead, layout.microbatches)
