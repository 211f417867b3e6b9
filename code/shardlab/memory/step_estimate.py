"""Memory of a training step on one rank: states, activations, buffers, and the largest moment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardlab.common.shapes import Config
from shardlab.layout import SINGLE_RANK, Layout, Stage, Structure, get_structure
from shardlab.layout.parameters import ParamInfo
from shardlab.layout.structure import LayerKind

from .activations import Activations, estimate_activations
from .core import OPTIMIZERS, Recipe, States, check_recipe, compute_states
from .counting import count_held, is_matrix, list_layer_entries, list_layer_kinds, resolve_stage
from .units import ceil_div

BUCKET_BYTES = 25 * 2**20  # bytes of a gradient bucket, as in DDP


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank. `host` is in host memory and in none of the sums."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int  # kept for backward, plus temporaries of the loss or a layer
    buffers: int  # tokens, gradient buckets, gathered layers, pipeline messages
    host: int
    moments: dict[str, int]  # bytes held at each moment that can be the peak

    @property
    def total(self) -> int:
        """The sum of these five. Most steps stay below: gradients come as activations are freed."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def peak(self) -> int:
        """The most bytes held at one moment of the step."""
        return max(self.moments.values())


def estimate_step(
    config: Config,
    layout: Layout = SINGLE_RANK,
    seq: int | None = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    *,
    attention: str = "fused",
    device: str = "cpu",
    stage: int | None = None,
) -> Estimate:
    """Predict the bytes that one rank holds in a training step.

    Arguments: see `states`, `activations`. stage: of a pipeline, from 0; None: the one with the
    highest peak. ZeRO shards over ranks with the same weights, or a group of them; experts over
    their copies.

    Buffers: tokens and targets; without ZeRO, DDP's buckets, a copy of the gradients (unless
    gradient_as_bucket_view=True); with ZeRO-1 and 2 one bucket; with ZeRO-3, as in FSDP2, embedding
    and head with two gathered layers and the gradients of one being reduced, or with their own
    gradients; in a pipeline, the messages of one micro-batch: the gradient from which backward
    starts, the next input (one of them at the ends of the pipeline) and the last tensor sent.

    Of several micro-batches, gradients of earlier ones count from the first backward on, an upper
    bound in a pipeline with no more micro-batches than remaining stages.

    The peak assumes an optimizer that steps one parameter at a time (foreach=False). Not included:
    fragmentation, CUDA's context, nccl's buffers; and a CPU's casts in forward with dropout in 16
    bits, which can be the peak if heads are wider than the stream.

    Raises ValueError as `states` and `activations` do.
    """
    recipe = check_recipe(precision, optimizer, shape=True)
    here = resolve_stage(config, layout, stage)
    pp, zero, shards = layout.pp, layout.zero, layout.zero_degree
    how: dict[str, Any] = {"attention": attention, "device": device}
    if stage is None and pp > 1:
        of = partial(estimate_step, config, layout, seq, precision, optimizer, **how)
        return max((of(stage=k) for k in candidate_stages(layout)), key=lambda one: one.peak)
    kept = estimate_activations(config, layout, seq, precision, stage=stage, **how)
    model = get_structure(config)
    mine = count_held(model, layout, here)
    held = mine.total
    matrices = mine.count_muon(layout)
    state = compute_states(held, mine.count_sharded(layout), layout, recipe, optimizer, matrices)
    unit = GatherUnit.from_stage(model, layout, here)
    seq = (config.seq if seq is None else seq) // layout.cp
    tokens = 16 * layout.micro_batch * seq  # tokens and targets, int64
    gathered = unit.gathered_bytes(recipe) if shards > 1 and zero == 3 else 0
    buckets = bucket_bytes(layout, held * recipe.gradients)
    messages = kept.stream * (2 if here.has_embedding or here.has_head else 3) if pp > 1 else 0
    earlier = layout.microbatches > 1
    sharded = zero if shards > 1 else 0
    moments = _moment_bytes(kept, state, recipe, unit, earlier, sharded, shards)
    if held and layout.offload == "none":  # else the optimizer computes in host memory
        entries, muon = _ordered_entries(model, here), optimizer == "muon"
        tensors = [
            e.count_elements(layout.tp if e.expert is None else layout.expert_tp)
            for e in entries
            if not (muon and is_matrix(e))
        ]
        steps = step_temporaries(tensors, recipe, optimizer, shards if zero else 1)
        moments["step"] += max(steps, muon_temporaries(entries, layout, recipe) if muon else 0)
    return Estimate(
        state.parameters,
        state.gradients,
        state.optimizer,
        kept.total,
        tokens + buckets + gathered + messages,
        state.host,
        {name: size + tokens + buckets + messages for name, size in moments.items()},
    )


def candidate_stages(layout: Layout) -> Iterable[int]:
    """Return the candidates for the fullest stage: of equal stages, the ends."""
    return (0, layout.pp - 1) if layout.stages == "equal" else range(layout.pp)


def bucket_bytes(layout: Layout, gradients: int) -> int:
    """Return the bytes of gradients in buckets; 0 with ZeRO-3, where weights are gathered too."""
    if layout.dp * layout.cp == 1 or (layout.zero == 3 and layout.zero_degree > 1):
        return 0
    return gradients if layout.zero == 0 else min(gradients, BUCKET_BYTES)


def _ordered_entries(model: Structure, here: Stage) -> list[ParamInfo]:
    """Return a stage's parameters in the model's order: two layers per kind, one expert."""
    first, *last = model.outer_params
    found = [first] if here.has_embedding else []
    for kind, layers in list_layer_kinds(model, here):
        found += min(2, layers) * [*kind.parameters]
    return found + [e for e in last if here.has_head and not (e.tied_to and here.has_embedding)]


def muon_temporaries(entries: Iterable[ParamInfo], layout: Layout, recipe: Recipe) -> int:
    """Return the bytes that Muon's step needs for its largest matrix, beside the states.

    torch 2.13's Muon has an update as wide as the gradient, and orthogonalizes it in 16 bits: twice
    the matrix, and two or three products of its shorter side. A matrix that ranks share is
    gathered.
    """
    found = 0
    for entry in filter(is_matrix, entries):
        ranks = layout.tp if entry.expert is None else layout.expert_tp
        same = layout.zero_degree if entry.expert is None else layout.expert_zero_degree
        own = ceil_div(entry.count_elements(ranks), same if layout.zero else 1)
        whole, square = entry.count_elements(), min(entry.shape) ** 2
        widened = 4 if recipe.master and recipe.gradients < 4 else 0
        turned = 2 * max(2 * whole + 2 * square, whole + 3 * square)
        found = max(found, (4 + widened) * own + turned)
    return found


def step_temporaries(tensors: list[int], recipe: Recipe, optimizer: str, shards: int = 1) -> int:
    """Return the bytes that the optimizer's step needs beside the states, one parameter at a time.

    tensors: elements of each parameter, in order. Adam holds the root of the second moment and its
    quotient, in float32, and frees the last quotient once the next one exists. With master weights
    it gets one gradient at a time, widened to float32 if it is not stored so.
    """
    tensors = [ceil_div(n, shards) for n in tensors]
    if recipe.master:
        widened = 4 if recipe.gradients < 4 else 0
        return max(tensors) * (widened + (8 if OPTIMIZERS[optimizer] == 2 else 0))
    if OPTIMIZERS[optimizer] < 2 or not tensors:
        return 0
    return max(4 * last + 8 * n for last, n in zip([0, *tensors], tensors, strict=False))


def _moment_bytes(
    kept: Activations,
    state: States,
    recipe: Recipe,
    unit: GatherUnit,
    earlier: bool,
    zero: int,
    dp: int,
) -> dict[str, int]:
    """Return the bytes at each moment that can be the peak, without tokens and buckets.

    A gradient first exists in full, where its weight is used. Then it stays, or from stage 2 on
    only this rank's share. Megatron's float32 gradients exist from the start.
    """
    grad_bytes = min(recipe.compute, recipe.gradients)
    earlier = earlier or (recipe.master > 0 and recipe.gradients > grad_bytes)
    base = state.parameters + state.optimizer + (state.gradients if earlier else 0)
    own = recipe.gradients if grad_bytes == 4 or not recipe.master else grad_bytes
    stays = 0 if earlier or not state.gradients else own  # offloaded ones leave

    def finished_bytes(elements: int) -> int:  # gradients whose backward is over
        return elements * stays if zero < 2 else ceil_div(elements * stays, dp)

    # Stage 3, as in FSDP2: parameters outside of layers stay gathered in backward, their gradients
    # stay until the end, and a layer's reduced gradients until the next layer's exist.
    gather = recipe.compute if zero == 3 else 0
    layer = gather * unit.layer
    alone = unit.first and not unit.tied
    output = unit.root - alone * unit.vocabulary if unit.last else 0
    outer = gather * unit.root + (output * grad_bytes if zero == 3 else finished_bytes(output))
    all_layers = kept.all_layers

    moments = {"loss": base + kept.kept_bytes + kept.loss}
    if kept.gathered_stream:  # sequence parallelism
        moments["leave"] = base + all_layers + kept.forward
    if zero == 3:  # a gathered buffer, and the parameters copied from it
        moments["forward"] = base + 2 * (gather * unit.root + layer) + kept.stream
    if unit.last:
        logits = kept.logits * recipe.compute // 4 + max(kept.stream, kept.input_grad)
        gathered = gather * unit.root + layer
        logits += max(unit.vocabulary * grad_bytes, kept.reordered_stream)
        moments["head"] = base + all_layers + kept.head + logits + gathered
        head = unit.vocabulary * grad_bytes + gathered
        moments["last norm"] = base + all_layers + head + kept.last_norm
    # In its inner backward a layer has the gradient of `down`; at its norm, those of the network.
    here = {"ffn": unit.down, "norm": unit.ffn, "attention": unit.ffn, "end": unit.layer}
    last = kept.layers - 1
    for moment, size in kept.working.items() if kept.layers else ():
        held = base + outer + all_layers + size + here[moment] * grad_bytes + layer
        moments[moment] = max(
            held
            - done * kept.layer
            + finished_bytes(done * unit.layer)
            + (layer if done < last else 0)  # the next layer
            + (recipe.gradients * unit.layer if zero == 3 and done else 0)
            for done in {0, min(1, last), max(0, last - 1), last}
        )
    if unit.first:
        # The embedding's gradient is dense; a tied head's exists already, and their sum is a new
        # tensor.
        dense = unit.vocabulary * grad_bytes
        layers = finished_bytes(kept.layers * unit.layer)
        beside = max(kept.stream, kept.gathered_stream, dense if unit.tied else 0)
        gathering = kept.stream + kept.gathered_stream + kept.reordered_stream
        moments["embedding"] = base + outer + layers + max(dense + beside, gathering)
        if zero == 3:
            whole_root = unit.root * (grad_bytes + recipe.gradients)
            moments["reduce"] = base + layers + kept.stream + whole_root
    moments["step"] = state.total
    return moments


@dataclass(frozen=True)
class GatherUnit:
    """Elements of the units that are gathered and reduced together, and of a layer's gradients."""

    layer: int
    ffn: int  # of these, the feed-forward network
    down: int  # of these, its last matrix
    root: int  # parameters outside of the layers
    vocabulary: int  # the embedding, or the head
    tied: bool
    first: bool
    last: bool

    def gathered_bytes(self, recipe: Recipe) -> int:
        """Return the bytes of whole weights and gradients under ZeRO-3, as in FSDP2.

        Parameters outside of the layers are gathered for the whole backward; with them a layer, the
        next one, and the gradients of one layer, or those of the parameters outside.
        """
        layers = self.layer * (2 * recipe.compute + recipe.gradients)
        return recipe.compute * self.root + max(layers, recipe.gradients * self.root)

    @staticmethod
    def from_stage(model: Structure, layout: Layout, stage: Stage) -> GatherUnit:
        """Return the unit of a rank of `stage`, with a large layer: one with experts, if any."""
        tp = layout.tp

        def count_elements(kind: LayerKind) -> int:
            return sum(n for _, n in list_layer_entries(kind, tp, layout.ep, layout.expert_tp))

        inside = sum(n * count_elements(kind) for kind, n in list_layer_kinds(model, stage))
        kind = max(model.kinds, key=lambda k: (bool(k.routed), count_elements(k)))
        one = list_layer_entries(kind, tp, layout.ep, layout.expert_tp)
        downs = [
            e.count_elements(tp if e.expert is None else layout.expert_tp)
            for e in kind.parameters
            if e.kind == "ffn" and e.tp_dim == 1
        ]
        return GatherUnit(
            count_elements(kind),
            sum(n for e, n in one if e.kind == "ffn" or e.expert is not None),
            # Of the experts one comes first, and the shared ones are small.
            max(downs, default=0),
            count_held(model, layout, stage).total - inside,
            ceil_div(model.vocab, tp) * model.hidden,
            model.tied and stage.has_embedding and stage.has_head,
            stage.has_embedding,
            stage.has_head,
        )
