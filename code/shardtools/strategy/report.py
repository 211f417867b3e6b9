"""A plan as text and as data: the table, why the first is first, one layout part by part."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from shardlab.layout.text import format_layout
from shardtools.options import format_seq

from .cost import SECONDS_PER_DAY, compute_floor
from .offload import CPU_UPDATES_PER_SECOND, HOST_LINK_SHARE
from .plan import Candidate, Plan
from .rates import Rates

# Median relative error of predicted reserved bytes, on rows that were not fitted:
# lessons/strategy.md, "Predicted and measured steps compared".
MEMORY_ERROR = 0.07
LOW_MFU = 0.25  # MFU below which a layout gets a warning
LINE_WIDTH = 90  # characters of a line on the site's pages
TIME_PARTS = {  # parts of a step's seconds
    "products": "matrix products, on the slowest stage",
    "attention": "attention's core",
    "elementwise": "memory passes of norms, activations and the loss",
    "launches": "the CPU launches kernels more slowly than the GPU computes",
    "tensor": "exposed tensor-parallel collectives",
    "context": "keys and values from the other context-parallel ranks",
    "experts": "all-to-alls that send tokens to experts, and back",
    "bubble": "the pipeline fills and drains",
    "messages": "messages between stages",
    "data": "data-parallel copies wait for gradients and weights",
    "optimizer": "gradient accumulation, weight updates, and work not counted elsewhere",
    "host": "offloaded states: transfers to the host and back, and updates there",
    "retries": "the allocator retries, since memory is short",
}
MEMORY_PARTS = {  # parts of a rank's bytes
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "the optimizer's states",
    "activations": "activations kept for backward",
    "logits": "logits and loss",
    "buffers": "gradients and weights in communication",
    "fragments": "lost to fragmentation between activations",
    "late_buffers": "buffers of collectives that are freed late",
    "overhead": "independent of the layout",
}


def candidate_to_dict(
    plan: Plan, candidate: Candidate, tokens: float | None = None
) -> dict[str, Any]:
    """Return one layout's numbers as a dictionary: bytes, seconds and shares.

    tokens: tokens of the whole training, to add its days and GPU hours.
    """
    layout = candidate.layout
    machine = replace(plan.machine, flops=plan.make_job(layout).flops)
    facts: dict[str, Any] = {
        "layout": str(layout),
        "written": format_layout(layout),
        "fields": asdict(layout),
        "micro_batch": layout.micro_batch,
        "microbatches": layout.microbatches,
        "reserved_bytes": round(candidate.reserved),
        "free_bytes": round(plan.usable_memory - candidate.reserved),
        "seconds": candidate.seconds,
        "floor_seconds": compute_floor(plan.config, machine, layout, plan.seq).total,
        "tokens_per_second": candidate.tokens_per_second,
        "mfu": candidate.mfu,
        "waits_for": describe_longest_wait(candidate),
        "seconds_by_part": dict(vars(candidate.prediction.seconds)),
        "bytes_by_part": {n: round(x) for n, x in vars(candidate.prediction.memory).items()},
        "host_bytes": candidate.prediction.host_bytes,
    }
    if tokens:
        facts["days"] = tokens / candidate.tokens_per_second / SECONDS_PER_DAY
        facts["gpu_hours"] = facts["days"] * 24 * plan.gpus
    return facts


def describe_longest_wait(candidate: Candidate) -> str:
    """Return the part of a step that takes longest, apart from products and attention."""
    parts = vars(candidate.prediction.seconds)
    rest = {name: parts[name] for name in parts if name not in ("products", "attention")}
    most = max(rest, key=lambda name: rest[name])
    return f"{most} {100 * rest[most] / candidate.seconds:.0f} %"


def format_plan(name: str, plan: Plan, top: int, tokens: float | None = None) -> str:
    """Format the `top` best layouts as a table, why the first is first, and rejections."""
    head = ["layout", "b × m", "GB", "free", "s", "tokens/s", "MFU"]
    table = [[*head, *["days", "GPU hours"] * bool(tokens), "waits for"]]
    for candidate in plan.feasible[:top]:
        one = candidate_to_dict(plan, candidate, tokens)
        cells = [one["layout"], f"{one['micro_batch']} × {one['microbatches']}"]
        cells += [f"{one[key] / 1e9:.1f}" for key in ("reserved_bytes", "free_bytes")]
        cells += [f"{one['seconds']:.3g}", f"{one['tokens_per_second']:,.0f}"]
        days = [f"{one['days']:,.1f}", f"{one['gpu_hours']:,.0f}"] if tokens else []
        table.append([*cells, f"{100 * one['mfu']:.0f} %", *days, one["waits_for"]])
    if max(map(len, align_columns(table))) > LINE_WIDTH:  # `--explain` has the longest wait, too
        table = [row[:-1] for row in table]
    best = plan.feasible[0]
    lines = [
        f"{name} of {plan.config.num_params / 1e9:.3g} billion parameters on {plan.gpus} "
        f"{plan.machine.name} ({plan.machine.gpus_per_node} to a node), {plan.batch} sequences "
        f"of {format_seq(plan.seq, plan.config.seq)} in a step; profile {plan.profile.name}: "
        f"{_describe_guesses(plan.rates)}",
        *["", *align_columns(table), ""],
        *[explain_first(plan), *describe_offload(plan, best)],
        summarize_rejections(plan),
        *(f"Warning: {words}." for words in list_warnings(plan, best)),
    ]
    return "\n".join(lines)


def _describe_guesses(rates: Rates) -> str:
    many = sum(rate.origin.startswith("a guess") for rate in rates.by_name.values())
    words = f"{many} of its {len(rates)} rates are guesses" if many else "no rate is a guess"
    return f"{words}; products are known within {100 * rates.by_name['products'].spread:.0f} %"


def align_columns(table: list[list[str]]) -> list[str]:
    """Return rows with columns of one width: text to the left, numbers to the right."""
    head, *body = table
    ranges = range(len(head))
    widths = [max(len(line[k]) for line in table) for k in ranges]
    right = [all(not line[k] or line[k][0].isdigit() for line in body) for k in ranges]
    lines = []
    for row in table:
        columns = zip(row, widths, right, strict=True)
        cells = [text.rjust(n) if number else text.ljust(n) for text, n, number in columns]
        lines.append("  ".join(cells).rstrip())
    return lines


def explain_first(plan: Plan) -> str:
    """Explain why the first layout is first, against the best layout with other degrees."""
    best = plan.feasible[0]
    degrees = _list_degrees(best)
    other = next((one for one in plan.feasible if _list_degrees(one) != degrees), None)
    if other is None:
        return f"{best.layout} is first: no layout with other degrees fits."
    mine, theirs = (vars(x.prediction.seconds) for x in (best, other))
    more = {name: theirs[name] - mine[name] for name in mine}
    most = max(more, key=lambda name: more[name])
    longer = other.seconds / best.seconds - 1
    words = f"First is {best.layout}: the best with other degrees, {other.layout}, takes "
    words += _format_extra(longer)
    if round(longer, 3):
        words += f", mostly because {most} takes {more[most]:.2g} s more ({TIME_PARTS[most]})"
    words += "."
    spread = plan.rates.by_name["products"].spread
    if longer < spread:
        words += f" The rates are uncertain by more ({100 * spread:.0f} %): measure both."
    return words


def _format_extra(share: float) -> str:
    return f"{100 * share:.1f} % longer" if round(share, 3) else "as long"


def describe_offload(plan: Plan, candidate: Candidate) -> list[str]:
    """Describe a layout's use of host memory and its cost in a sentence; [] without offloading."""
    parts, size = candidate.prediction.seconds, candidate.prediction.host_bytes
    if not size:
        return []
    gpus = min(plan.gpus, plan.machine.gpus_per_node)
    link = HOST_LINK_SHARE * plan.machine.host_bandwidth
    what = "the optimizer's states"
    if candidate.layout.offload == "parameters":
        what = f"weights and {what}"
    return [
        f"Offloaded: {what} take {size / 1e9:.1f} GB of host memory for each GPU, "
        f"{gpus * size / 1e9:,.0f} GB on a node of {gpus}; a step waits {parts.host:.3g} s for "
        f"them ({100 * parts.host / parts.total:.0f} %). Assumed: {link / 1e9:.0f} GB/s to and "
        f"from each GPU, whose CPUs update {CPU_UPDATES_PER_SECOND / 1e9:g} billion parameters/s."
    ]


def _list_degrees(candidate: Candidate) -> tuple[int, ...]:
    layout = candidate.layout
    return layout.dp, layout.tp, layout.pp, layout.cp, layout.ep


def summarize_rejections(plan: Plan) -> str:
    """Say how many layouts were tried, and the most common reasons for rejection."""
    tried = len(plan.feasible) + sum(plan.rejections.values())
    words = [f"Of {tried:,} layouts {len(plan.feasible):,} fit."]
    words += [f"{n:,} ruled out: {reason}." for reason, n in plan.rejections.most_common(4)]
    return " ".join(words)


def list_warnings(plan: Plan, candidate: Candidate) -> list[str]:
    """Return sentences that warn of little free memory and of a low MFU."""
    usable, layout = plan.usable_memory, candidate.layout
    warnings, free = [], usable - candidate.reserved
    if free < 0:
        warnings.append(
            f"{layout} needs {-free / 1e9:.1f} GB more than the {usable / 1e9:.1f} GB usable"
        )
    elif free < MEMORY_ERROR * candidate.reserved:
        words = (
            f"{layout} leaves {free / 1e9:.1f} GB free, less than the median error of predicted "
            f"memory ({100 * MEMORY_ERROR:.0f} %, on runs of nanotron)"
        )
        slower = (x for x in plan.feasible if x.seconds >= candidate.seconds)
        roomy = [x for x in slower if usable >= (1 + MEMORY_ERROR) * x.reserved]
        if roomy:
            longer = _format_extra(roomy[0].seconds / candidate.seconds - 1)
            words += f"; the first that leaves more, {roomy[0].layout}, takes {longer}"
        warnings.append(words)
    if candidate.mfu < LOW_MFU:
        warnings.append(
            f"the MFU of {100 * candidate.mfu:.0f} % is below the {100 * LOW_MFU:.0f} % that large "
            f"jobs reach; the longest wait is {describe_longest_wait(candidate)}: try more "
            "sequences in a step, or fewer GPUs"
        )
    return warnings


def plan_to_dict(plan: Plan, best: list[Candidate], tokens: float | None = None) -> dict[str, Any]:
    """Return a plan as plain numbers: its best layouts, and everything that `format_plan` says."""
    return {
        "best": [candidate_to_dict(plan, one, tokens) for one in best],
        "fit": len(plan.feasible),
        "ruled_out": dict(plan.rejections.most_common()),
        "searched": [name for name, why in plan.search_coverage.items() if not why],
        "not_searched": {name: why for name, why in plan.search_coverage.items() if why},
        "warnings": list_warnings(plan, best[0]),
    }


def format_candidate(plan: Plan, candidate: Candidate) -> str:
    """Format one layout's bytes and seconds, part by part, and the origins of its rates."""
    one, layout = candidate_to_dict(plan, candidate), candidate.layout
    floor = "lower bound: the data sheet's rates, all traffic hidden"
    seconds = {**one["seconds_by_part"], "total": one["seconds"], "floor": one["floor_seconds"]}
    sizes = {**one["bytes_by_part"], "total": one["reserved_bytes"], "usable": plan.usable_memory}
    step = [["a step", "s", "%", ""]]
    for name, words in (TIME_PARTS | {"total": "", "floor": floor}).items():
        if part := seconds[name]:
            step.append([name, f"{part:.3f}", f"{100 * part / one['seconds']:.1f}", words])
    rank = [["the fullest rank", "GB", "%", ""]]
    limit = {"total": "reserved", "usable": "with more the allocator retries"}
    for name, words in (MEMORY_PARTS | limit).items():
        if part := sizes[name]:
            share = f"{100 * part / one['reserved_bytes']:.1f}"
            rank.append([name, f"{part / 1e9:.2f}", share, words])
    lines = [
        f"{layout}: {layout.microbatches} micro-batches of {layout.micro_batch}, "
        f"on {layout.world_size} {plan.machine.name}",
        *["", *align_columns(step), "", *align_columns(rank), ""],
        *[*describe_offload(plan, candidate), *_list_origins(plan.rates)],
        *(f"Warning: {words}." for words in list_warnings(plan, candidate)),
    ]
    return "\n".join(lines)


def _list_origins(rates: Rates) -> list[str]:
    origins: dict[str, list[str]] = {}
    for name, rate in sorted(rates.by_name.items(), key=lambda item: item[1].spread):
        origins.setdefault(rate.origin, []).append(f"{name} ± {100 * rate.spread:.0f} %")
    return [f"Rates, {origin}: {', '.join(names)}." for origin, names in origins.items()]
