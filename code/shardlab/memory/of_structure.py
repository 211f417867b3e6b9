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

from .activations import in_flight, tokens_of
from .core import check_recipe, states_of
from .counting import by_kind, held_by, placed
from .step import Estimate, Unit, fullest, muon_temporaries, on_the_way
from .units import ceil_div

LOGITS = 3 * 4  # bytes per logit: log-softmax in float32, its gradient and a temporary


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
    """Predict the bytes that one rank holds in a step; arguments as in `estimate`.

    Its only moment is the sum of all parts; with ZeRO-3 or many micro-batches a step stays below.
    For a model that is not planned (`Structure.unsupported_reason`) only the states are counted.
    Raises ValueError as `estimate` does.
    """
    model = get_structure(config)
    recipe = check_recipe(precision, optimizer, shape=True)
    check_one_of(("fused",), attention=attention)
    if stage is None and layout.pp > 1:
        of = partial(estimate_structure, model, layout, seq, precision, optimizer)
        return max((of(stage=k) for k in fullest(layout)), key=lambda one: one.total)
    here = placed(model, layout, stage)
    tokens = tokens_of(model.seq if seq is None else seq, layout) * layout.micro_batch
    mine = held_by(model, layout, here)
    matrices = mine.muon(layout)
    state = states_of(mine.all, mine.shard(layout), layout, recipe, optimizer, matrices)
    if model.unsupported_reason:
        return Estimate(
            state.parameters, state.gradients, state.optimizer, 0, 0, state.host,
            {"states": state.total},
        )  # fmt: skip
    again = parse_recompute(layout.recompute)
    flying = in_flight(layout, layout.pp - 1 if stage is None else stage)
    layers = sum(n * kept(model, kind, layout, again) for kind, n in by_kind(model, here))
    logits = LOGITS * ceil_div(model.vocab, layout.tp) * here.has_head
    stream = recipe.compute * tokens * model.hidden
    activations = round(recipe.compute * tokens * layers * flying) + tokens * logits
    buffers = 16 * tokens + on_the_way(layout, mine.all * recipe.gradients)
    if layout.zero == 3 and layout.zero_degree > 1:
        buffers += Unit.of(model, layout, here).gathered(recipe)
    if optimizer == "muon" and layout.offload == "none":
        entries = (entry for kind, _ in by_kind(model, here) for entry in kind.parameters)
        buffers += muon_temporaries(entries, layout, recipe)
    if layout.pp > 1:
        buffers += stream * (2 if here.has_embedding or here.has_head else 3)
    total = state.total + activations + buffers
    parts = state.parameters, state.gradients, state.optimizer, activations, buffers, state.host
    return Estimate(*parts, moments={"all of it": total})


def kept(model: Structure, kind: LayerKind, layout: Layout, again: frozenset[str]) -> float:
    """Return the elements per token of a micro-batch that a kind of layer keeps on a rank."""
    along = layout.tp if layout.sequence_parallel else 1
    if layout.recompute == "full":
        return model.hidden / along
    norms = kind.stream_elements // 2 if "norms" in again else 0  # the norms' outputs
    tensors = (3 if kind.gated else 2) - ("ffn" in again)
    rows = kind.routed.top_k * kind.routed.input_width if kind.routed else 0
    whole = kind.stream_elements - norms + kind.latent_elements + rows
    return (
        whole / along
        + kind.count_head_elements(layout.tp, again)
        + tensors * kind.active_width / layout.tp
    )
