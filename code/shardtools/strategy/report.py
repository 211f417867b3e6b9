"""A plan as text and as data: the table, why the first is first, one layout part by part."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from shardlab.layout.words import written

from . import host
from .cost import DAY, floor
from .plan import Plan, Planned
from .rates import Rates

# Median relative error of predicted reserved bytes, on rows that were not fitted:
# lessons/strategy.md, "Predicted beside measured".
MARGIN = 0.07
LITTLE = 0.25  # MFU below which a layout gets a warning
LINE = 90  # characters of a line on the site's pages
PARTS = {  # parts of a step's seconds
    "products": "products of matrices, on the slowest stage",
    "attention": "attention's core",
    "elementwise": "norms, activations, the loss: passes over memory",
    "launches": "the CPU takes longer to launch than the GPU to compute",
    "tensor": "sums inside of the layers that nothing hides",
    "context": "keys and values of a sequence's other ranks",
    "experts": "tokens on their way to experts, and back",
    "bubble": "the pipeline fills and drains",
    "messages": "messages between stages",
    "data": "the copies wait for gradients and weights",
    "optimizer": "gradients added up, weights updated, and what is not counted",
    "host": "states go to the host's memory, are updated there, and come back",
    "retries": "the allocator is short of memory",
}
PIECES = {  # parts of a rank's bytes
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "the optimizer's states",
    "activations": "activations kept for backward",
    "logits": "logits and loss",
    "buffers": "gradients and weights on their way",
    "fragments": "lost between activations by the allocator",
    "late": "buffers that come back late",
    "fixed": "whatever the layout",
}


def row(found: Plan, planned: Planned, tokens: float | None = None) -> dict[str, Any]:
    """Return one layout's numbers as a dictionary: bytes, seconds and shares.

    tokens: tokens of the whole training, to add its days and GPU hours.
    """
    machine = replace(found.machine, flops=found.job(planned.layout).flops)
    told: dict[str, Any] = {
        "layout": str(planned.layout),
        "written": written(planned.layout),
        "fields": asdict(planned.layout),
        "micro_batch": planned.layout.micro_batch,
        "microbatches": planned.layout.microbatches,
        "reserved_bytes": round(planned.reserved),
        "free_bytes": round(found.room - planned.reserved),
        "seconds": planned.seconds,
        "floor_seconds": floor(found.config, machine, planned.layout, found.seq).total,
        "tokens_per_second": planned.tokens,
        "mfu": planned.mfu,
        "waits_for": waits_for(planned),
        "seconds_by_part": dict(vars(planned.prediction.seconds)),
        "bytes_by_part": {n: round(x) for n, x in vars(planned.prediction.memory).items()},
        "host_bytes": planned.prediction.host,
    }
    if tokens:
        told["days"] = tokens / planned.tokens / DAY
        told["gpu_hours"] = told["days"] * 24 * found.gpus
    return told


def waits_for(planned: Planned) -> str:
    """Return the part of a step that takes longest beside products and attention."""
    parts = dict(vars(planned.prediction.seconds))
    rest = {name: parts[name] for name in parts if name not in ("products", "attention")}
    most = max(rest, key=lambda name: rest[name])
    return f"{most} {100 * rest[most] / planned.seconds:.0f} %"


def text(name: str, found: Plan, top: int, tokens: float | None = None) -> str:
    """Format the `top` best layouts as a table, why the first is first, and rejections."""
    head = ["layout", "b × m", "GB", "free", "s", "tokens/s", "MFU"]
    table = [[*head, *["days", "GPU hours"] * bool(tokens), "waits for"]]
    for planned in found.fits[:top]:
        one = row(found, planned, tokens)
        days = [f"{one['days']:,.1f}", f"{one['gpu_hours']:,.0f}"] if tokens else []
        table.append(
            [
                one["layout"],
                f"{one['micro_batch']} × {one['microbatches']}",
                f"{one['reserved_bytes'] / 1e9:.1f}",
                f"{one['free_bytes'] / 1e9:.1f}",
                f"{one['seconds']:.3g}",
                f"{one['tokens_per_second']:,.0f}",
                f"{100 * one['mfu']:.0f} %",
                *days,
                one["waits_for"],
            ]
        )
    if max(map(len, aligned(table))) > LINE:  # a step's largest wait is in `plan --explain`, too
        table = [cells[:-1] for cells in table]
    best = found.fits[0]
    lines = [
        f"{name} of {found.config.total / 1e9:.3g} billion parameters on {found.gpus} "
        f"{found.machine.name} ({found.machine.per_node} to a node), {found.batch} sequences of "
        f"{found.seq:,} tokens in a step; as {found.profile.name} does it: {guessed(found.rates)}",
        *["", *aligned(table), ""],
        *[first(found), *on_host(found, best), ruled(found), searched(found)],
        *(f"Warning: {words}." for words in warnings(found, best)),
    ]
    return "\n".join(lines)


def guessed(rates: Rates) -> str:
    """Say how many rates are guesses."""
    many = sum(rate.origin.startswith("a guess") for rate in rates.all.values())
    return f"{many} of its {len(rates)} rates are guesses" if many else "no rate is a guess"


def aligned(table: list[list[str]]) -> list[str]:
    """Return rows with columns of one width: text to the left, numbers to the right."""
    head, *body = table
    ranges = range(len(head))
    widths = [max(len(line[k]) for line in table) for k in ranges]
    right = [all(not line[k] or line[k][0].isdigit() for line in body) for k in ranges]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in table
    ]


def first(found: Plan) -> str:
    """Explain why the first layout is first, against the best layout with other degrees."""
    best = found.fits[0]
    others = [planned for planned in found.fits[1:] if _kind(planned) != _kind(best)]
    if not others:
        return f"{best.layout} is first: no layout with other degrees fits."
    other = others[0]
    mine, theirs = (vars(x.prediction.seconds) for x in (best, other))
    more = {name: theirs[name] - mine[name] for name in mine}
    most = max(more, key=lambda name: more[name])
    longer = other.seconds / best.seconds - 1
    words = (
        f"First is {best.layout}: the best with other degrees, {other.layout}, takes "
        f"{100 * longer:.1f} % longer, {more[most]:.2g} s more of it for {most} ({PARTS[most]})."
    )
    unsure = found.rates.all["products"].spread
    if longer < unsure:
        words += f" That is less than the rates are sure of ({100 * unsure:.0f} %): measure both."
    return words


def on_host(found: Plan, planned: Planned) -> list[str]:
    """Describe a layout's use of host memory and its cost in a sentence; [] without offloading."""
    parts, size = planned.prediction.seconds, planned.prediction.host
    if not size:
        return []
    here = min(found.gpus, found.machine.per_node)
    link = host.LINK * found.machine.host
    what = "the optimizer's states"
    if planned.layout.offload == "parameters":
        what = f"weights and {what}"
    return [
        f"On the host: {what} take {size / 1e9:.1f} GB of its memory for each GPU, "
        f"{here * size / 1e9:,.0f} GB on a node of {here}; a step waits {parts.host:.3g} s for "
        f"them ({100 * parts.host / parts.total:.0f} %). Assumed: {link / 1e9:.0f} GB/s to and "
        f"from each GPU, and {host.UPDATES / 1e9:g} billion parameters of each updated in a second."
    ]


def _kind(planned: Planned) -> tuple[int, ...]:
    layout = planned.layout
    return layout.dp, layout.tp, layout.pp, layout.cp, layout.ep


def ruled(found: Plan) -> str:
    """Say how many layouts were tried, and the most common reasons for rejection."""
    tried = len(found.fits) + sum(found.ruled.values())
    words = [f"Of {tried:,} tried {len(found.fits):,} fit."]
    words += [f"{n:,} ruled out: {reason}." for reason, n in found.ruled.most_common(4)]
    return " ".join(words)


def searched(found: Plan) -> str:
    """Say which parts of the search space were searched, and why others were not."""
    here = ", ".join(name for name, why in found.searched.items() if not why)
    left = "; ".join(f"{name} ({why})" for name, why in found.searched.items() if why)
    return f"Searched: {here}. Not searched: {left}."


def warnings(found: Plan, planned: Planned) -> list[str]:
    """Warn of little free memory, or of few of the machine's operations, in sentences."""
    said, free = [], found.room - planned.reserved
    if free < 0:
        said.append(
            f"{planned.layout} needs {-free / 1e9:.1f} GB more than the {found.room / 1e9:.1f} GB "
            "that it may take"
        )
    elif free < MARGIN * planned.reserved:
        words = (
            f"{planned.layout} leaves {free / 1e9:.1f} GB free, less than the {100 * MARGIN:.0f} % "
            "by which predicted bytes are off in the median"
        )
        roomy = [x for x in found.fits if found.room - x.reserved >= MARGIN * x.reserved]
        if roomy:
            longer = 100 * (roomy[0].seconds / planned.seconds - 1)
            words += f"; the first that leaves more, {roomy[0].layout}, takes {longer:.1f} % longer"
        said.append(words)
    if planned.mfu < LITTLE:
        said.append(
            f"{100 * planned.mfu:.0f} % of the data sheet's operations are below the "
            f"{100 * LITTLE:.0f} % that large jobs reach: a step waits for "
            f"{waits_for(planned)}; ask for more sequences in a step, or fewer GPUs"
        )
    return said


def data(found: Plan, best: list[Planned], tokens: float | None = None) -> dict[str, Any]:
    """Return a plan as plain numbers: its best layouts, and everything that `text` says."""
    return {
        "best": [row(found, one, tokens) for one in best],
        "fit": len(found.fits),
        "ruled_out": dict(found.ruled.most_common()),
        "searched": [name for name, why in found.searched.items() if not why],
        "not_searched": {name: why for name, why in found.searched.items() if why},
        "warnings": warnings(found, best[0]),
    }


def explained(found: Plan, planned: Planned) -> str:
    """Format one layout's bytes and seconds, part by part, and the origins of its rates."""
    one, layout = row(found, planned), planned.layout
    floors = "no step is faster: the data sheet's rates, all traffic hidden"
    seconds = {**one["seconds_by_part"], "together": one["seconds"], "floor": one["floor_seconds"]}
    sizes = {**one["bytes_by_part"], "together": one["reserved_bytes"], "room": found.room}
    said = PARTS | {"together": "", "floor": floors}
    step = [["a step", "s", "%", ""]]
    for name, words in said.items():
        if part := seconds[name]:
            step.append([name, f"{part:.3f}", f"{100 * part / one['seconds']:.1f}", words])
    said = PIECES | {"together": "reserved", "room": "beyond it the allocator retries"}
    rank = [["the fullest rank", "GB", "%", ""]]
    for name, words in said.items():
        if part := sizes[name]:
            share = f"{100 * part / one['reserved_bytes']:.1f}"
            rank.append([name, f"{part / 1e9:.2f}", share, words])
    lines = [
        f"{layout}: {layout.microbatches} micro-batches of {layout.micro_batch}, "
        f"on {layout.ranks} {found.machine.name}",
        *["", *aligned(step), "", *aligned(rank), ""],
        *[*on_host(found, planned), *_origins(found.rates)],
        *(f"Warning: {words}." for words in warnings(found, planned)),
    ]
    return "\n".join(lines)


def _origins(rates: Rates) -> list[str]:
    """List the rates of each origin, those with the least uncertainty first."""
    origins: dict[str, list[str]] = {}
    for name, rate in sorted(rates.all.items(), key=lambda item: item[1].spread):
        origins.setdefault(rate.origin, []).append(f"{name} ± {100 * rate.spread:.0f} %")
    return [f"Rates, {origin}: {', '.join(names)}." for origin, names in origins.items()]
