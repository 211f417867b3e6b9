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

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardlab import tensor_parallel
from shardlab.common.shapes import Config
from shardlab.data_parallel.buckets import MIB, split_into_buckets
from shardlab.layout import Layout, Stage, list_params
from shardlab.layout.boxes import Box, iter_range_boxes, make_full_box
from shardlab.layout.stages import list_stage_params

MESH_SCHEDULES = "naive", "gpipe", "1f1b", "interleaved"  # schedules with whole backwards
ITEMSIZE = 4  # bytes per element


class Replacement(NamedTuple):
    """The value that `Parallel` uses for an unsupported field of a layout, and the reason."""

    value: Any
    reason: str


def find_unsupported(config: Config, layout: Layout) -> dict[str, Replacement]:
    """Return the fields of `layout` that no mesh supports, each with the value to use instead.

    `check_supported` accepts `layout` with all these values, if the model can be cut that way.
    """
    found = {
        name: Replacement(only, f": must be {only!r} in a mesh")
        for name, only in {"cp": 1, "ep": 1, "etp": None, "replicas": 1, "offload": "none"}.items()
    }
    if layout.schedule not in MESH_SCHEDULES:
        why = f": must be one of {', '.join(MESH_SCHEDULES)} in a mesh"
        found["schedule"] = Replacement("1f1b", why)
        found["chunks"] = Replacement(1, ": must be 1 with schedule='1f1b'")
    if layout.recompute not in ("none", "full"):
        found["recompute"] = Replacement("none", ": must be 'none' or 'full' in a mesh")
    if layout.zero > 1 and layout.pp > 1:
        why = f": must be 0 or 1 with pp={layout.pp}, because with 2 or 3 "
        why += "each micro-batch would send all gradients again"
        found["zero"] = Replacement(1, why)
    if config.experts:
        why = f": must be False with experts={config.experts}"
        found["sequence_parallel"] = Replacement(False, why)
    return {name: one for name, one in found.items() if getattr(layout, name) != one.value}


def check_supported(config: Config, layout: Layout, seq: int | None = None) -> None:
    """Raise ValueError if `Parallel` cannot train `layout`; seq: tokens per sequence, if known."""
    tensor_parallel.predict.check_degree(config, layout.tp)
    for name, instead in find_unsupported(config, layout).items():
        raise ValueError(f"{name}={getattr(layout, name)!r}{instead.reason}")
    sizes = count_chunk_layers(config, layout)  # raises if the layers do not fill the stages
    if 0 in sizes[1:-1] or not layout.build_stages(config)[layout.stage_order[-1]].has_head:
        needed = "each part needs layers, and the last one the head"
        degrees = f"pp={layout.pp}, chunks={layout.chunks}"
        raise ValueError(f"{degrees}: {needed}, but the parts have {sizes} layers")
    if layout.sequence_parallel and seq is not None and seq % layout.tp:
        raise ValueError(f"seq={seq}: must be divisible by tp={layout.tp} (sequence parallelism)")


def count_chunk_layers(config: Config, layout: Layout) -> list[int]:
    """Return the number of layers of each part of the model, in the model's order."""
    stages = layout.build_stages(config)
    chunks = [iter(stage.chunks) for stage in stages]
    return [len(next(chunks[stage])) for stage in layout.stage_order]


@dataclass(frozen=True)
class FlatTensor:
    """Parameters that ZeRO puts into one flat tensor: names, elements, and each replica's shard."""

    elements: dict[str, int]
    replicas: int
    is_root: bool = False  # in stage 3: gathered from the start of forward to the end of backward

    @property
    def shard_size(self) -> int:
        """The elements of a shard, padding included."""
        return -(-sum(self.elements.values()) // self.replicas)

    @property
    def padded_size(self) -> int:
        """The elements of all shards."""
        return self.shard_size * self.replicas

    def get_spans(self, replica: int) -> dict[str, tuple[int, int]]:
        """Return the range (first, end) of each parameter's elements in the shard of `replica`."""
        low, high, end, found = replica * self.shard_size, (replica + 1) * self.shard_size, 0, {}
        for name, size in self.elements.items():
            begin, end = end, end + size
            first, last = (min(max(x - begin, 0), size) for x in (low, high))
            found[name] = first, last
        return found

    def count_elements(self, replica: int) -> dict[str, int]:
        """Return the number of each parameter's elements in the shard of `replica`."""
        return {name: end - first for name, (first, end) in self.get_spans(replica).items()}


def list_flat_tensors(config: Config, layout: Layout, stage: int) -> list[FlatTensor]:
    """Return a stage's flat tensors; without ZeRO one per parameter, whole on every replica."""
    chunks = _split_chunks(config, layout, stage)
    return [flat for chunk in chunks for flat in _flatten_chunk(config, layout, chunk)]


def _split_chunks(config: Config, layout: Layout, stage: int) -> list[Stage]:
    """Return one Stage per chunk of a stage, because ZeRO shards each chunk separately."""
    whole = layout.build_stages(config)[stage]
    first, last, chunks = whole.has_embedding, whole.has_head, whole.chunks
    end = len(chunks) - 1
    return [Stage((c,), first and not n, last and n == end) for n, c in enumerate(chunks)]


def _flatten_chunk(config: Config, layout: Layout, part: Stage) -> list[FlatTensor]:
    there = list_stage_params(config, part)
    elements = {entry.name: entry.count_elements(layout.tp) for entry in there}
    copies = layout.dp
    if layout.zero == 0:
        return [FlatTensor({name: size}, 1) for name, size in elements.items()]
    if layout.zero == 3:
        layers: dict[int | None, dict[str, int]] = {}
        for entry in there:
            layers.setdefault(entry.layer, {})[entry.name] = elements[entry.name]
        return [FlatTensor(inside, copies, layer is None) for layer, inside in layers.items()]
    tensors = {name: torch.empty(size, device="meta") for name, size in elements.items()}
    names = {id(tensor): name for name, tensor in tensors.items()}
    buckets = split_into_buckets(reversed(tensors.values()), 25 * MIB, MIB)  # as Zero1 does
    return [FlatTensor({names[id(t)]: t.numel() for t in bucket}, copies) for bucket in buckets]


def predict_state_bytes(config: Config, layout: Layout, rank: int) -> dict[str, int]:
    """Predict the bytes of model states on `rank` after a step with AdamW, by kind."""
    check_supported(config, layout)
    coords, zero = layout.get_coordinates(rank), layout.zero
    found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    for flat in list_flat_tensors(config, layout, coords["pp"]):
        copy = coords["dp"] if zero else 0
        found["parameters"] += ITEMSIZE * (flat.shard_size if zero == 3 else flat.padded_size)
        found["gradients"] += ITEMSIZE * (flat.shard_size if zero > 1 else flat.padded_size)
        found["optimizer"] += 2 * ITEMSIZE * sum(flat.count_elements(copy).values())
    return found


def predict_pieces(config: Config, layout: Layout, rank: int) -> list[tuple[str, Box]]:
    """Predict the boxes of the model's tensors on `rank`, which `Parallel.pieces` then returns.

    A tied head on its own stage has the embedding's name.
    """
    check_supported(config, layout)
    coords = layout.get_coordinates(rank)
    boxes = {entry.name: entry.get_box(coords["tp"], layout.tp) for entry in list_params(config)}
    found = []
    for flat in list_flat_tensors(config, layout, coords["pp"]):
        for name, span in flat.get_spans(coords["dp"] if layout.zero else 0).items():
            first = "embedding.weight" if config.tied and name == "head.weight" else name
            found += [(first, box) for box in iter_range_boxes(boxes[name], *span)]
            if name.endswith("router.score.weight"):  # the router's other tensor
                bias = name.replace("score.weight", "bias_E")
                found.append((bias, make_full_box((config.experts,))))
    return found


def predict_sent_bytes(
    config: Config, layout: Layout, rank: int, seq: int | None = None, batch: int | None = None
) -> dict[str, float]:
    """Predict the bytes that leave `rank` in one `Parallel.step`, by axis and to its "twin".

    seq: tokens of a sequence, by default the model's longest. batch: sequences of this replica, by
    default those of the layout. Collectives are counted as rings: an all-reduce of S bytes sends
    2(n-1)/n S, its halves (n-1)/n S each. Small messages: the batch's size (8 bytes) and the loss
    (4) along dp, the loss along pp; with ZeRO one byte per parameter.
    """
    seq = config.seq if seq is None else seq
    check_supported(config, layout, seq)
    batch = layout.micro_batch * layout.microbatches if batch is None else batch
    zero, microbatches = layout.zero, layout.microbatches
    coords, (d, p, t) = layout.get_coordinates(rank), (layout.dp, layout.pp, layout.tp)
    flats = list_flat_tensors(config, layout, coords["pp"])
    stream = ITEMSIZE * batch * seq * config.hidden  # [B, S, H]
    part = layout.build_stages(config)[coords["pp"]]
    copy = coords["dp"] if zero else 0
    neighbours = zip(layout.stage_order, layout.stage_order[1:], strict=False)
    ways = sum(pair.count(coords["pp"]) for pair in neighbours if pair[0] != pair[1])
    ends = config.tied and part.has_embedding != part.has_head
    along = {
        "tp": _count_activation_bytes(config, layout, part, stream, batch * seq),
        "pp": ways * stream / (t if layout.sequence_parallel else 1) + 2 * (p - 1) / p * ITEMSIZE,
        "twin": float(ITEMSIZE * config.vocab // t * config.hidden) if ends else 0.0,
    }
    along["tp"] += _count_weight_grad_bytes(config, layout, part)
    if layout.sequence_parallel:  # gradients of whole parameters, from this rank's tokens alone
        partial = {entry.name for entry in list_stage_params(config, part) if entry.partial_grad}
        own = [item for flat in flats for item in flat.count_elements(copy).items()]
        elements = sum(size for name, size in own if name in partial)
        along["tp"] += 2 * (t - 1) / t * ITEMSIZE * elements
    others = sum(ITEMSIZE * (flat.padded_size - flat.shard_size) for flat in flats)
    if zero == 0:
        data = 2 * (d - 1) / d * sum(ITEMSIZE * flat.padded_size for flat in flats)
    else:
        sends = microbatches if zero > 1 else 1
        data = sends * (others + 2 * (d - 1) / d * sum(len(flat.elements) for flat in flats))
        gathers = 0
        for flat in flats:
            times = microbatches * (1 if flat.is_root else 2) if zero == 3 else 1
            gathers += times * ITEMSIZE * (flat.padded_size - flat.shard_size)
        data += gathers
    along["dp"] = (data + 2 * (d - 1) / d * (8 + ITEMSIZE)) if d > 1 else 0.0
    return along


def _count_activation_bytes(
    config: Config, layout: Layout, part: Stage, stream: int, tokens: int
) -> float:
    """Return the bytes that a rank sends in its tensor group, for activations of `stream` bytes.

    Each entry to or exit from a region sends two halves of an all-reduce: with all tokens on each
    rank, both in one direction of the pass; with tokens cut, one in forward and one in backward.
    """
    t, chosen = layout.tp, config.experts_per_token
    half = (t - 1) / t * stream
    inside = sum(
        tensor_parallel.predict.count_all_reduces(config, n, chosen) for n in part.layer_indices
    )
    # The activations that enter an attention may be narrower or wider than the stream.
    numbers = sum(tensor_parallel.predict.attention_input_sizes(config))
    entering = inside + part.layers * (numbers / config.hidden - 1)
    enters, leaves = entering + part.has_head, inside + part.has_embedding
    loss = 3 * ITEMSIZE * tokens if part.has_head else 0
    sent = 2 * half * (enters + leaves) + 2 * (t - 1) / t * loss
    if layout.sequence_parallel:  # gathered again in backward, except for the keys' positions
        sent += half * (enters - part.layers * (config.rotary or 0) / config.hidden)
    if layout.recompute == "full":
        again = inside
        if not config.dropout:  # backward needs nothing after a dense layer's last sum
            again -= sum(not config.experts or n < config.dense_layers for n in part.layer_indices)
        sent += half * (entering + again if layout.sequence_parallel else 2 * again)
    return sent


def _count_weight_grad_bytes(config: Config, layout: Layout, part: Stage) -> float:
    numbers = sum(tensor_parallel.predict.summed_weight_sizes(config, layout.tp))
    return 2 * (layout.tp - 1) / layout.tp * ITEMSIZE * numbers * part.layers * layout.microbatches
