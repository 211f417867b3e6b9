"""A trial run of a plan: the same layout and kind of model, as small as this machine can train.

Degrees are reduced, widths and layers with them; the layout keeps its axes and their order, ZeRO,
sequence parallelism, recomputation, the pipeline's schedule and micro-batches. So the formulas that
the plan relies on predict what each rank holds and sends, and the run counts it.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from shardlab import mesh, ranks
from shardlab.common.shapes import Config
from shardlab.layout import Layout, Structure, format_layout
from shardlab.layout.structure import require_course_config
from shardlab.mesh.job import Job, measure_rounding, run
from shardtools.commands.mesh import format_results, is_as_predicted

MAX_RANKS = 8  # two ranks on each of three axes of the mesh
STEPS = 5
EVEN_STAGE_RULES = "equal", "megatron"  # rules of `Layout.stages` that work with few layers
HEAD_SIZE, SEQ_LEN, NUM_EXPERTS = 8, 32, 4  # width of a head, tokens of a sequence, experts
# Two orders of up to 512 tokens: 2 sqrt(512) roundings of 2^-24 of a loss of 5.5, and of what steps
# take off it. Rounding may turn AdamW's step, of 1e-3, of a weight with later gradients of 0.01.
ROUNDING_TOLERANCE = 5e-5
# Where a gradient is almost zero, AdamW's step may go anywhere: each run then differs from the
# exact result as one process does. Twice that, with a margin. A mistake is 1e-2 and more.
DRIFT_FACTOR = 3


def shrink_job(
    model: Config | Structure, layout: Layout, max_ranks: int = MAX_RANKS
) -> tuple[Job, list[str]]:
    """Return the job that runs in place of a plan on `max_ranks` ranks, and what it leaves out.

    Raises ValueError for a model that no mesh trains.
    """
    config = require_course_config(model, run=True)
    instead = mesh.find_unsupported(config, layout)
    left_out = [f"{name}={getattr(layout, name)}" for name in instead]
    rule = layout.stages if layout.stages in EVEN_STAGE_RULES else "equal"
    if rule != layout.stages:
        left_out.append(f"stages={layout.stages}")
    degrees = _reduce_degrees({axis: getattr(layout, axis) for axis in mesh.AXES}, max_ranks)
    chunks = min(2, layout.chunks) if degrees["pp"] > 1 else 1
    plain = {
        "chunks": chunks,
        "stages": rule,
        **{name: one.value for name, one in instead.items()},
        **degrees,
        "micro_batch": 1,
        "microbatches": min(layout.microbatches, 2 * degrees["pp"]),
    }
    layout = replace(layout, **plain)
    return Job(_shrink_config(config, layout), layout, STEPS), left_out


def _reduce_degrees(degrees: dict[str, int], max_ranks: int) -> dict[str, int]:
    """Reduce the largest degree to a divisor until their product is at most `max_ranks`."""
    while prod(degrees.values()) > max_ranks:
        axis = max(degrees, key=lambda name: degrees[name])
        size = degrees[axis]
        fewer = next((n for n in range(size // 2, 1, -1) if size % n == 0), min(2, size - 1))
        degrees = {**degrees, axis: fewer}
    return degrees


def _shrink_config(config: Config, layout: Layout) -> Config:
    shared = min(2, config.heads // config.key_value_heads)  # queries that share a key
    narrow = max(2, layout.tp)
    hidden = narrow * shared * HEAD_SIZE

    def scale_width(size: int) -> int:
        return max(1, round(size * hidden / config.hidden / narrow)) * narrow

    experts, latent = min(config.experts, NUM_EXPERTS), config.latent is not None
    groups = 2 if config.expert_groups > 1 else 1
    return replace(
        config,
        vocab=256, seq=SEQ_LEN, dropout=0.0, hidden=hidden, heads=narrow * shared,
        kv_heads=None if latent else narrow,
        layers=2 * layout.pp, ffn=scale_width(config.ffn_width),
        expert_ffn=scale_width(config.expert_width) if experts else None,
        experts=experts, experts_per_token=min(config.experts_per_token, max(1, experts // groups)),
        dense_layers=min(config.dense_layers, 1), expert_groups=groups, groups_per_token=1,
        head=config.head and HEAD_SIZE, window=config.window and min(config.window, SEQ_LEN // 2),
        latent=2 * HEAD_SIZE if latent else None,
        query_latent=config.query_latent and 2 * HEAD_SIZE,
        rotary=HEAD_SIZE // 2 if latent else None, value=config.value and HEAD_SIZE,
    )  # fmt: skip


def run_trial(name: str, model: Config | Structure, layout: Layout) -> tuple[str, bool]:
    """Train a plan at small size; return a report, and True if it is as predicted and equal.

    Raises RuntimeError as `ranks.run` does.
    """
    job, left_out = shrink_job(model, layout, min(MAX_RANKS, ranks.max_world_size()))
    result = run(job)
    gaps = result["differences"]
    same = is_equivalent(gaps) or is_equivalent(gaps, measure_rounding(job))
    lines = [f"The plan for {name}: {layout}", f"Run here: {format_layout(job.layout)}"]
    words = "equal to one process but for rounding" if same else "NOT equal to one process"
    if left_out:
        words += f"; left out, since a mesh does not train it: {', '.join(left_out)}"
    return "\n".join([*lines, "", format_results(job, result), words]), same and is_as_predicted(
        result
    )


def is_equivalent(gaps: dict[str, float], rounding: dict[str, float] | None = None) -> bool:
    """Return True if a job's losses and last gradients equal one process's, up to rounding.

    rounding: gaps of one process to itself in 64 bits, where the usual limit is too narrow.
    """
    own = {name: DRIFT_FACTOR * gap for name, gap in (rounding or {}).items()}
    names = "losses", "gradients"
    return all(gaps[name] <= max(ROUNDING_TOLERANCE, own.get(name, 0.0)) for name in names)
