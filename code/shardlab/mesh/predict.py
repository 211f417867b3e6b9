"""Layouts that no mesh can train, and exact formulas for the bytes that each rank holds and sends.

For a rank of stage i, with P elements there after tensor parallelism has cut them, over d replicas:

    held           parameters   gradients   optimizer (AdamW)
    no ZeRO        4P           4P          8P
    ZeRO-1         4P           4P          8P/d
    ZeRO-2         4P           4P/d        8P/d
    ZeRO-3         4P/d         4P/d        8P/d

    sent           along        bytes in a step, of B sequences of S tokens in this replica
    tensor         tp           4 all-reduces of 4BSH for each layer, and those at the ends; with
                                recomputation those of forward again, except each layer's last
    pipeline       pp           4BSH to the next part of the model, 4BSH back; between the ends the
                                tied twin
    data           dp           an all-reduce of 4P, or ZeRO's halves of it

All is float32, with padding. Shapes: B sequences of a replica, S tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from shardlab import tensor_parallel
from shardlab.common.shapes import Config
from shardlab.data_parallel.buckets import MIB, deal
from shardlab.layout import Layout, Stage, entries
from shardlab.layout.boxes import Box, stretch, whole
from shardlab.layout.stages import held

SCHEDULES = "naive", "gpipe", "1f1b", "interleaved"  # schedules with whole backwards
ITEM = 4  # bytes per element


class Instead(NamedTuple):
    """The value that `Parallel` uses for an unsupported field of a layout, and the reason."""

    value: Any
    why: str


def left_out(config: Config, layout: Layout) -> dict[str, Instead]:
    """Return the fields of `layout` that no mesh supports, each with the value to use instead.

    `check_cuts` accepts `layout` with all these values, if the model can be cut that way.
    """
    found = {
        name: Instead(only, f": allowed in a mesh is {only!r}")
        for name, only in {"cp": 1, "ep": 1, "etp": None, "replicas": 1, "offload": "none"}.items()
    }
    if layout.schedule not in SCHEDULES:
        found["schedule"] = Instead("1f1b", f": allowed in a mesh are {', '.join(SCHEDULES)}")
        found["chunks"] = Instead(1, ": allowed with schedule='1f1b' is 1")
    if layout.recompute not in ("none", "full"):
        found["recompute"] = Instead("none", ": allowed in a mesh are 'none' and 'full'")
    if layout.zero > 1 and layout.pp > 1:
        why = f" with pp={layout.pp}: allowed are 0 and 1, since each micro-batch "
        why += "would send all gradients anew; 2 and 3 with pp=1"
        found["zero"] = Instead(1, why)
    if config.experts:
        why = f": allowed with experts={config.experts} is False"
        found["sequence_parallel"] = Instead(False, why)
    return {
        name: instead for name, instead in found.items() if getattr(layout, name) != instead.value
    }


def check_cuts(config: Config, layout: Layout, seq: int | None = None) -> None:
    """Raise ValueError if `Parallel` cannot train this; seq: tokens of a sequence, if known."""
    tensor_parallel.predict.check_degree(config, layout.tp)
    for name, instead in left_out(config, layout).items():
        raise ValueError(f"{name}={getattr(layout, name)!r}{instead.why}")
    sizes = layers_of_parts(config, layout)  # raises if the layers do not fill the stages
    if 0 in sizes[1:-1] or not layout.parts(config)[layout.route[-1]].head:
        allowed = (
            f"as many as give each part layers, and the last the head; here parts have {sizes}"
        )
        raise ValueError(f"pp={layout.pp}, chunks={layout.chunks}: allowed are {allowed}")
    if layout.sequence_parallel and seq is not None and seq % layout.tp:
        allowed = f"multiples of {layout.tp}"
        raise ValueError(f"seq={seq}: allowed with sequence parallelism are {allowed}")


def layers_of_parts(config: Config, layout: Layout) -> list[int]:
    """Return the number of layers of each part of the model, in the model's order."""
    stages = layout.parts(config)
    chunks = [iter(stage.chunks) for stage in stages]
    return [len(next(chunks[stage])) for stage in layout.route]


@dataclass(frozen=True)
class Shared:
    """Parameters that ZeRO puts into one flat tensor: names, elements, and each replica's shard."""

    elements: dict[str, int]
    copies: int
    rest: bool = False  # in stage 3: gathered from the start of forward to the end of backward

    @property
    def shard(self) -> int:
        """The elements of a shard, padding included."""
        return -(-sum(self.elements.values()) // self.copies)

    @property
    def padded(self) -> int:
        """The elements of all shards."""
        return self.shard * self.copies

    def spans(self, copy: int) -> dict[str, tuple[int, int]]:
        """Return the range (first, end) of each parameter's elements in the shard of `copy`."""
        low, high, end, found = copy * self.shard, (copy + 1) * self.shard, 0, {}
        for name, size in self.elements.items():
            begin, end = end, end + size
            first, last = (min(max(x - begin, 0), size) for x in (low, high))
            found[name] = first, last
        return found

    def own(self, copy: int) -> dict[str, int]:
        """Return the number of each parameter's elements in the shard of `copy`."""
        return {name: end - first for name, (first, end) in self.spans(copy).items()}


def shared(config: Config, layout: Layout, stage: int) -> list[Shared]:
    """Return a stage's flat tensors; without ZeRO one per parameter, whole on every replica."""
    return [flat for part in _parts(config, layout, stage) for flat in _dealt(config, layout, part)]


def _parts(config: Config, layout: Layout, stage: int) -> list[Stage]:
    """Return one Stage per chunk of a stage, because ZeRO shards each chunk separately."""
    whole = layout.parts(config)[stage]
    last = len(whole.chunks) - 1
    return [
        replace(
            whole, chunks=(c,), embedding=whole.embedding and not n, head=whole.head and n == last
        )
        for n, c in enumerate(whole.chunks)
    ]


def _dealt(config: Config, layout: Layout, part: Stage) -> list[Shared]:
    there = held(config, part)
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
    """Predict the bytes of model states on `rank` after a step with AdamW, by kind."""
    check_cuts(config, layout)
    place, zero = layout.place(rank), layout.zero
    found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    for flat in shared(config, layout, place["pp"]):
        copy = place["dp"] if zero else 0
        found["parameters"] += ITEM * (flat.shard if zero == 3 else flat.padded)
        found["gradients"] += ITEM * (flat.shard if zero > 1 else flat.padded)
        found["optimizer"] += 2 * ITEM * sum(flat.own(copy).values())
    return found


def predicted_pieces(config: Config, layout: Layout, rank: int) -> list[tuple[str, Box]]:
    """Predict the boxes of the model's tensors on `rank`, which `Parallel.pieces` then returns.

    A tied head on its own stage has the embedding's name.
    """
    check_cuts(config, layout)
    place = layout.place(rank)
    boxes = {entry.name: entry.box(place["tp"], layout.tp) for entry in entries.ledger(config)}
    found = []
    for flat in shared(config, layout, place["pp"]):
        for name, span in flat.spans(place["dp"] if layout.zero else 0).items():
            first = "embedding.weight" if config.tied and name == "head.weight" else name
            found += [(first, box) for box in stretch(boxes[name], *span)]
            if name.endswith("router.score.weight"):  # the bias of the choice stands beside it
                found.append((name.replace("score.weight", "bias_E"), whole((config.experts,))))
    return found


def predicted_sent(
    config: Config, layout: Layout, rank: int, seq: int | None = None, batch: int | None = None
) -> dict[str, float]:
    """Predict the bytes that leave `rank` in one `Parallel.step`, by axis and to its "twin".

    seq: tokens of a sequence, by default the model's longest. batch: sequences of this replica, by
    default those of the layout. Collectives are counted as rings: an all-reduce of S bytes sends
    2(n-1)/n S, its halves (n-1)/n S each. Small messages: the batch's size (8 bytes) and the loss
    (4) along dp, the loss along pp; with ZeRO one byte per parameter.
    """
    seq = config.seq if seq is None else seq
    check_cuts(config, layout, seq)
    batch = layout.micro_batch * layout.microbatches if batch is None else batch
    zero, microbatches = layout.zero, layout.microbatches
    place, (d, p, t) = layout.place(rank), (layout.dp, layout.pp, layout.tp)
    flats = shared(config, layout, place["pp"])
    stream = ITEM * batch * seq * config.hidden  # [B, S, H]
    part = layout.parts(config)[place["pp"]]
    copy = place["dp"] if zero else 0
    neighbours = zip(layout.route, layout.route[1:], strict=False)
    ways = sum(pair.count(place["pp"]) for pair in neighbours if pair[0] != pair[1])
    ends = config.tied and part.embedding != part.head
    along = {
        "tp": _inside(config, layout, part, stream, batch * seq) + _weights(config, layout, part),
        "pp": ways * stream / (t if layout.sequence_parallel else 1) + 2 * (p - 1) / p * ITEM,
        "twin": float(ITEM * config.vocab // t * config.hidden) if ends else 0.0,
    }
    if layout.sequence_parallel:  # gradients of whole parameters, from this rank's tokens alone
        partly = {entry.name for entry in held(config, part) if entry.partly}
        own = [item for flat in flats for item in flat.own(copy).items()]
        along["tp"] += 2 * (t - 1) / t * ITEM * sum(size for name, size in own if name in partly)
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


def _inside(config: Config, layout: Layout, part: Stage, stream: int, tokens: int) -> float:
    """Return the bytes that a rank sends in its tensor group, for activations of `stream` bytes.

    Each entry to or exit from a region sends two halves of an all-reduce: with all tokens on each
    rank, both in one direction of the pass; with tokens cut, one in forward and one in backward.
    """
    t, chosen = layout.tp, config.experts_per_token
    half = (t - 1) / t * stream
    inside = sum(tensor_parallel.predict.in_layer(config, n, chosen) for n in part.numbers)
    # The activations that enter an attention may be narrower or wider than the stream.
    numbers = sum(tensor_parallel.predict.entering(config))
    entering = inside + part.layers * (numbers / config.hidden - 1)
    enters, leaves = entering + part.head, inside + part.embedding
    sent = 2 * half * (enters + leaves) + 2 * (t - 1) / t * part.head * 3 * ITEM * tokens
    if layout.sequence_parallel:  # gathered again in backward, except for the keys' positions
        sent += half * (enters - part.layers * (config.rotary or 0) / config.hidden)
    if layout.recompute == "full":
        again = inside
        if not config.dropout:  # backward needs nothing after a dense layer's last sum
            again -= sum(not config.experts or n < config.dense_layers for n in part.numbers)
        sent += half * (entering + again if layout.sequence_parallel else 2 * again)
    return sent


def _weights(config: Config, layout: Layout, part: Stage) -> float:
    """Return the bytes that a rank sends in its tensor group for weight gradients in backward."""
    numbers = sum(tensor_parallel.predict.weights_added(config, layout.tp))
    return 2 * (layout.tp - 1) / layout.tp * ITEM * numbers * part.layers * layout.microbatches
