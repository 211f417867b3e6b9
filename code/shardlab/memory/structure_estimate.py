"""Memory of a training step on one rank, for any model with a `Structure`: by kinds of layers.

States are exact. Activations are those that fused kernels keep (flash attention, fused norms,
rotations, gated activations): per token and layer the elements that `LayerKind` lists, 3 F of a
gated network and 2 F of another, and for each chosen expert its input and the same of its width.
Not exact: temporaries beside these, how evenly tokens choose experts, and tensors that unfused code
keeps in addition. `step` counts the course's own model at every moment.
"""

from __future__ import annotations

from functools import partial

from shardlab.common.arguments import check_one_of
from shardlab.common.shapes import Config
from shardlab.layout import SINGLE_RANK, Layout, Structure, get_structure, parse_recompute
from shardlab.layout.structure import LayerKind

from .activations import count_in_flight, count_tokens
from .core import check_recipe, compute_states
from .counting import count_held, list_layer_kinds, resolve_stage
from .step_estimate import Estimate, GatherUnit, bucket_bytes, candidate_stages, muon_temporaries
from .units import ceil_div

BYTES_PER_LOGIT = 3 * 4  # bytes per logit: log-softmax in float32, its gradient and a temporary


def estimate_structure(
    config: Config | Structure,
    layout: Layout = SINGLE_RANK,
    seq: int | None = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    *,
    attention: str = "fused",
    stage: int | None = None,
) -> Estimate:
    """Predict the bytes that one rank holds in a step; arguments as in `estimate_step`.

    Its only moment is the sum of all parts; with ZeRO-3 or many micro-batches a step stays below.
    For a model that is not planned (`Structure.unsupported_reason`) only the states are counted.
    Raises ValueError as `estimate_step` does.
    """
    model = get_structure(config)
    recipe = check_recipe(precision, optimizer, shape=True)
    check_one_of(("fused",), attention=attention)
    if stage is None and layout.pp > 1:
        of = partial(estimate_structure, model, layout, seq, precision, optimizer)
        return max((of(stage=k) for k in candidate_stages(layout)), key=lambda one: one.total)
    here = resolve_stage(model, layout, stage)
    tokens = count_tokens(model.seq if seq is None else seq, layout) * layout.micro_batch
    mine = count_held(model, layout, here)
    shard, matrices = mine.count_sharded(layout), mine.count_muon(layout)
    state = compute_states(mine.total, shard, layout, recipe, optimizer, matrices)
    if model.unsupported_reason:
        return Estimate(
            state.parameters, state.gradients, state.optimizer, 0, 0, state.host,
            {"states": state.total},
        )  # fmt: skip
    in_flight = count_in_flight(layout, layout.pp - 1 if stage is None else stage)
    kinds = list_layer_kinds(model, here)
    layers = sum(n * kept_per_token(model, kind, layout) for kind, n in kinds)
    logits = BYTES_PER_LOGIT * ceil_div(model.vocab, layout.tp) * here.has_head
    stream = recipe.compute * tokens * model.hidden
    activations = round(recipe.compute * tokens * layers * in_flight) + tokens * logits
    buffers = 16 * tokens + bucket_bytes(layout, mine.total * recipe.gradients)
    if layout.zero == 3 and layout.zero_degree > 1:
        buffers += GatherUnit.from_stage(model, layout, here).gathered_bytes(recipe)
    if optimizer == "muon" and layout.offload == "none":
        entries = (entry for kind, _ in kinds for entry in kind.parameters)
        buffers += muon_temporaries(entries, layout, recipe)
    if layout.pp > 1:
        buffers += stream * (2 if here.has_embedding or here.has_head else 3)
    total = state.total + activations + buffers
    parts = state.parameters, state.gradients, state.optimizer, activations, buffers, state.host
    return Estimate(*parts, moments={"all of it": total})


def kept_per_token(model: Structure, kind: LayerKind, layout: Layout) -> float:
    """Return the elements per token of a micro-batch that a kind of layer keeps on a rank."""
    along = layout.tp if layout.sequence_parallel else 1
    if layout.recompute == "full":
        return model.hidden / along
    recomputed = parse_recompute(layout.recompute)
    norms = kind.stream_elements // 2 if "norms" in recomputed else 0  # the norms' outputs
    tensors = (3 if kind.gated else 2) - ("ffn" in recomputed)
    rows = kind.routed.top_k * kind.routed.input_width if kind.routed else 0
    whole = kind.stream_elements - norms + kind.latent_elements + rows
    heads = kind.count_head_elements(layout.tp, recomputed)
    return whole / along + heads + tensors * kind.active_width / layout.tp
