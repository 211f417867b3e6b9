"""What no mesh can train; what each rank holds and sends, by formula: exact, padding included.

For a rank of stage i, with P elements there after tensor parallelism has cut them, over d copies:

    held           parameters   gradients   optimizer (AdamW)
    no ZeRO        4P           4P          8P
    ZeRO-1         4P           4P          8P/d
    ZeRO-2         4P           4P/d        8P/d
    ZeRO-3         4P/d         4P/d        8P/d

    sent           along        bytes in a step, of B sequences of S tokens in this copy
    tensor         tp           4 all-reduces of 4BSH for each layer, and those at the ends
    pipeline       pp           4BSH to the next stage, 4BSH back; between the ends the tied twin
    data           dp           an all-reduce of 4P, or ZeRO's halves of it

Everything is float32. Shapes: B sequences of a copy, S tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardlab import tensor_parallel
from shardlab.arguments import check_kind, check_whole, given
from shardlab.buckets import MIB, deal
from shardlab.layout import Layout, entries
from shardlab.shapes import Config

SCHEDULES = "gpipe", "1f1b"  # one part on each stage, and whole backwards
LEFT_OUT = {  # what it does not do yet, as it stands in a layout
    "cp": 1, "ep": 1, "replicas": 1, "stages": "equal", "recompute": "none", "offload": "none",
}  # fmt: skip
ITEM = 4  # bytes


def check_cuts(config: Config, layout: Layout, seq: int | None = None) -> None:
    """Raise ValueError for what `Parallel` cannot train; `seq`: tokens of a sequence, if known."""
    check_kind(Layout, layout=layout)
    tensor_parallel.predict.check_degree(config, layout.tp)
    if layout.schedule not in SCHEDULES:
        allowed = " and ".join(SCHEDULES)
        raise ValueError(f"schedule={layout.schedule!r}: allowed in a mesh are {allowed}")
    layout.parts(config)  # refuses stages that the layers do not fill
    for name, only in LEFT_OUT.items():
        if (value := getattr(layout, name)) != only:
            raise ValueError(f"{name}={value!r}: allowed in a mesh is {only!r}")
    if layout.zero > 1 and layout.pp > 1:
        raise ValueError(
            f"zero={layout.zero} with pp={layout.pp}: allowed are 0 and 1, since each micro-batch "
            "would send all gradients anew; 2 and 3 with pp=1"
        )
    check_whole(**given(seq=seq))
    if layout.sequence_parallel and config.experts:
        words = f"allowed with experts={config.experts} is False"
        raise ValueError(f"sequence_parallel=True: {words}")
    if layout.sequence_parallel and seq is not None and seq % layout.tp:
        allowed = f"multiples of {layout.tp}"
        raise ValueError(f"seq={seq}: allowed with sequence parallelism are {allowed}")


@dataclass(frozen=True)
class Shared:
    """Parameters that ZeRO puts side by side: names, elements, and what each copy owns of them."""

    elements: dict[str, int]
    copies: int
    rest: bool = False  # in stage 3: whole from the beginning of forward to the end of backward

    @property
    def shard(self) -> int:
        """Elements of a shard, padding included."""
        return -(-sum(self.elements.values()) // self.copies)

    @property
    def padded(self) -> int:
        """Elements of all shards."""
        return self.shard * self.copies

    def own(self, copy: int) -> dict[str, int]:
        """Elements of each parameter in the shard of `copy`."""
        low, high, end, found = copy * self.shard, (copy + 1) * self.shard, 0, {}
        for name, size in self.elements.items():
            begin, end = end, end + size
            found[name] = max(0, min(end, high) - max(begin, low))
        return found


def shared(config: Config, layout: Layout, stage: int) -> list[Shared]:
    """How a stage's parameters are dealt: without ZeRO each one alone, on every copy whole."""
    there = entries.held(config, layout.parts(config)[stage])
    elements = {entry.name: entry.elements(layout.tp) for entry in there}
    copies = layout.dp
    if layout.zero == 0:
        return [Shared({name: size}, 1) for name, size in elements.items()]
    if layout.zero == 3:
        layers: dict[int | None, dict[str, int]] = {}
        for entry in there:
            layers.setdefault(entry.layer, {})[entry.name] = elements[entry.name]
        return [Shared(inside, copies, layer is None) for layer, inside in layers.items()]
    tensors = {name: torch.empty(size, device="meta") for name, size in elements.items()}
    names = {id(tensor): name for name, tensor in tensors.items()}
    buckets = deal(reversed(tensors.values()), 25 * MIB, MIB)  # as Zero1 does
    return [Shared({names[id(t)]: t.numel() for t in bucket}, copies) for bucket in buckets]


def predicted_states(config: Config, layout: Layout, rank: int) -> dict[str, int]:
    """Bytes of model states on `rank` after a step with AdamW: parameters, gradients, optimizer."""
    check_cuts(config, layout)
    place, zero = layout.place(rank), layout.zero
    found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    for flat in shared(config, layout, place["pp"]):
        copy = place["dp"] if zero else 0
        found["parameters"] += ITEM * (flat.shard if zero == 3 else flat.padded)
        found["gradients"] += ITEM * (flat.shard if zero > 1 else flat.padded)
        found["optimizer"] += 2 * ITEM * sum(flat.own(copy).values())
    return found


def predicted_sent(
    config: Config, layout: Layout, rank: int, seq: int | None = None, batch: int | None = None
) -> dict[str, float]:
    """Bytes that leave `rank` in one `Parallel.step`, along "tp", "pp", "dp", and to its "twin".

    seq: tokens of a sequence, by default the model's longest. batch: sequences of this copy, by
    default what the layout gives each. Collectives as rings send them: an all-reduce of S bytes
    2(n-1)/n S, its halves (n-1)/n S. Of numbers there are some: the batch's size (8 bytes) and the
    loss (4) along dp, the loss along pp; with ZeRO a byte for each parameter.
    """
    check_kind(Config, config=config)
    seq = config.seq if seq is None else seq
    check_cuts(config, layout, seq)
    batch = layout.micro_batch * layout.microbatches if batch is None else batch
    check_whole(batch=batch)
    zero, sequence, microbatches = layout.zero, layout.sequence_parallel, layout.microbatches
    place, (d, p, t) = layout.place(rank), (layout.dp, layout.pp, layout.tp)
    first, last = place["pp"] == 0, place["pp"] == p - 1
    flats = shared(config, layout, place["pp"])
    stream = ITEM * batch * seq * config.hidden  # [B, S, H]
    half = (t - 1) / t * stream
    chosen, part = config.experts_per_token, layout.parts(config)[place["pp"]]
    inside = sum(tensor_parallel.predict.in_layer(config, n, chosen) for n in part.numbers)
    enters, leaves = inside + last, inside + first
    tensor = 2 * half * (enters + leaves) + 2 * (t - 1) / t * last * 3 * ITEM * batch * seq
    if sequence:
        tensor += half * enters  # gathered once more in backward
        copy = place["dp"] if zero else 0
        there = entries.held(config, part)
        partly = {entry.name for entry in there if entry.partly}
        own = [item for flat in flats for item in flat.own(copy).items()]
        tensor += 2 * (t - 1) / t * ITEM * sum(size for name, size in own if name in partly)
    ways = (not first) + (not last)
    along = {
        "tp": tensor if t > 1 else 0.0,
        "pp": ways * stream / (t if sequence else 1) + 2 * (p - 1) / p * ITEM,
        "twin": float(ITEM * config.vocab // t * config.hidden),
    }
    if not config.tied or p == 1 or not (first or last):
        along["twin"] = 0.0
    others = sum(ITEM * (flat.padded - flat.shard) for flat in flats)
    if zero == 0:
        data = 2 * (d - 1) / d * sum(ITEM * flat.padded for flat in flats)
    else:
        sends = microbatches if zero > 1 else 1
        data = sends * (others + 2 * (d - 1) / d * sum(len(flat.elements) for flat in flats))
        gathers = 0
        for flat in flats:
            times = microbatches * (1 if flat.rest else 2) if zero == 3 else 1
            gathers += times * ITEM * (flat.padded - flat.shard)
        data += gathers
    along["dp"] = (data + 2 * (d - 1) / d * (8 + ITEM)) if d > 1 else 0.0
    return along
