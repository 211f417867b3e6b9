"""Parameters of a layout, compared with models that are really built and cut; stages; kinds."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from shardlab import experts, memory, pipeline, ranks, sequence_parallel, tensor_parallel
from shardlab.common.machines import MACHINES
from shardlab.common.shapes import PRESETS, Config
from shardlab.gpt.model import GPT
from shardlab.layout import SCHEDULES, Layout, build_stages, get_structure, list_params
from shardlab.layout.stages import list_stage_params
from shardlab.layout.structure import AttentionCore, require_course_config
from shardtools import strategy

GATED = Config(
    96, 16, 3, 4, 32, 2, 48, "swiglu", "rms", False, False,
    experts=4, expert_ffn=24, shared_experts=1, dense_layers=1,
)  # fmt: skip
SHAPES = {
    "plain": Config(96, 16, 2, 4, 32),
    "untied": Config(96, 16, 2, 4, 32, 2, 64, tied=False),
    "rms": Config(96, 16, 2, 4, 32, mlp="swiglu", norm="rms", bias=False),
    "experts": replace(GATED, shared_experts=0, dense_layers=0, bias=True, norm="layer"),
    "mixed": GATED,
}
SHAPES["qk norm"] = replace(SHAPES["rms"], kv_heads=1, head=12, qk_norm=True, window=4)
SHAPES["latent"] = replace(SHAPES["rms"], latent=16, query_latent=20, rotary=4, value=10)
SHAPES["latent keys"] = replace(SHAPES["latent"], query_latent=None, norm="layer")


@pytest.mark.parametrize("config", [*SHAPES.values(), *PRESETS.values()], ids=[*SHAPES, *PRESETS])
def test_names_shapes_order_ties_and_counts_are_the_model_s(config: Config) -> None:
    if config.layers > 12:
        config = replace(config, layers=2, dense_layers=min(1, config.dense_layers))
    with torch.device("meta"):
        model = GPT(config)
    found = {entry.name: entry for entry in list_params(config)}
    named = dict(model.named_parameters(remove_duplicate=False))
    assert {name: entry.shape for name, entry in found.items()} == {
        name: tuple(p.shape) for name, p in named.items()
    }
    once = [name for name, entry in found.items() if not entry.tied_to]
    assert once == [name for name, _ in model.named_parameters()]  # in this order lie ZeRO's flats
    for name, entry in found.items():
        assert entry.layer == (int(name.split(".")[1]) if name.startswith("blocks") else None)
        if entry.tied_to:
            assert named[name] is named[entry.tied_to]
        if entry.size_name:  # the size that a degree has to divide
            assert entry.units == getattr(config, entry.size_name)
            assert entry.shape[entry.tp_dim] % entry.units == 0
    counted = get_structure(config)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert counted.num_params == sum(sizes.values())
    own = sum(size for name, size in sizes.items() if ".experts." in name)  # a token meets a few
    others = config.experts - config.experts_per_token
    assert counted.num_active_params == counted.num_params - own * others // max(1, config.experts)
    assert counted.course_config == require_course_config(counted, run=True) == config


def list_cuts(config: Config) -> dict[str, tuple]:
    """Return a rank's shape, cut dimension and type of each tensor in a really cut model."""
    model = tensor_parallel.parallelize(GPT(config), dist.group.WORLD)
    found, words = (
        tensor_parallel.get_shard_dims(model),
        tensor_parallel.states.get_parameter_types(model),
    )
    return {n: (tuple(p.shape), found[n], words[n]) for n, p in model.named_parameters()}


def seen_partly(config: Config) -> list[str]:
    """Return the replicated parameters whose gradient on a rank covers only the rank's tokens."""
    model = tensor_parallel.parallelize(
        GPT(config), dist.group.WORLD, sequence_parallel.SEQUENCE_SHARDED
    )
    some = {id(parameter) for parameter in sequence_parallel.find_partial_gradients(model)}
    return [name for name, p in model.named_parameters() if id(p) in some]


def list_experts(config: Config) -> dict[str, tuple[int, ...]]:
    """Return a rank's shapes of a model with experts, and whether each is the rank's own."""
    model = experts.parallelize(GPT(config), dist.group.WORLD)
    own = {id(parameter) for parameter in experts.own_parameters(model)}
    return {n: (tuple(p.shape), id(p) in own) for n, p in model.named_parameters()}


def really_cut() -> list[tuple]:
    """Return each shape on this rank, for each way to cut the model."""
    return [
        (list_cuts(c), list_experts(c)) if c.experts else (list_cuts(c), seen_partly(c))
        for c in SHAPES.values()
    ]


def test_models_that_are_really_cut_are_as_the_ledger_says() -> None:
    for rank, found in enumerate(ranks.run(really_cut, 2, device="cpu")):
        for config, (mine, other) in zip(SHAPES.values(), found, strict=True):
            entries = [entry for entry in list_params(config) if not entry.tied_to]
            assert list(mine) == [entry.name for entry in entries]
            for entry in entries:
                word = "I" if entry.tp_dim is None else "V"
                assert mine[entry.name] == (entry.get_local_shape(2), entry.tp_dim, word)
            if not config.experts:
                assert other == [entry.name for entry in list_params(config) if entry.partial_grad]
                continue
            held_here = list_stage_params(config, build_stages(config)[0], 2, rank)
            want = sorted((entry.shape, entry.expert is not None) for entry in held_here)
            assert sorted(other.values()) == want
            own = sum(own for _, own in other.values())
            assert own * 2 == sum(entry.expert is not None for entry in entries)


@given(
    st.integers(1, 6), st.integers(1, 12), st.integers(0, 12),
    st.sampled_from(["1f1b", "interleaved", "zb-v"]), st.integers(2, 4),
)  # fmt: skip
def test_every_layer_stands_on_one_stage_where_the_pipeline_has_it(pp, each, dense, name, v):
    v = {"interleaved": v, "zb-v": 2}.get(name, 1) if pp > 1 else 1
    name = name if pp > 1 else "1f1b"
    config = Config(layers=pp * v * each, experts=2, dense_layers=min(dense, pp * v * each - 1))
    found = build_stages(config, pp, "equal", name, v)
    numbers = sorted(layer for stage in found for layer in stage.layer_indices)
    assert numbers == list(range(config.layers))
    first, model = range(config.dense_layers), get_structure(config)
    for stage in found:
        *dense, sparse = model.count_kinds(stage.chunks)
        assert sum(dense) == sum(n in first for n in stage.layer_indices)
        assert sparse == stage.layers - sum(dense)
    if pp > 1:  # parts of the model in the order of the pipeline's own placement
        placement = pipeline.make_schedule(
            name, pp, pp, v if name == "interleaved" else None
        ).placement
        for stage, parts in zip(found, placement, strict=True):
            assert [chunk.start // each for chunk in stage.chunks] == list(parts)


@settings(max_examples=60)
@given(
    st.sampled_from([*SHAPES.values()]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
)  # fmt: skip
def test_counts_are_the_ledger_s(config: Config, tp: int, ep: int, pp: int) -> None:
    """Counts by kinds of layer equal the sum over all entries."""
    config = replace(config, layers=6)
    if not config.experts:
        ep = 1
    if config.kv_heads == 2 and tp == 4:
        tp = 2
    for stage in build_stages(config, pp):
        entries = list_stage_params(config, stage, ep)
        counts = memory.count_rank_parameters(config, Layout(dp=ep, tp=tp, ep=ep), stage)
        assert sum(counts.values()) == sum(prod(entry.get_local_shape(tp)) for entry in entries)
        own = sum(entry.count_elements(tp) for entry in entries if entry.expert is not None)
        assert memory.count_expert_parameters(config, Layout(dp=ep, tp=tp, ep=ep), stage) == own


# Layers by stage, compared with published cuts; and the micro-batches that a stage keeps.


def make_shape(layers: int, hidden: int = 64, ffn: int = 256, vocab: int = 256) -> Config:
    return Config(vocab, 64, layers, 2, hidden, None, ffn, "swiglu")


# The Ultra-Scale sweep: layers, hidden, width; the layers of its stages.
LLAMA_8B, LLAMA_1B = make_shape(32, 4096, 14_336, 131_072), make_shape(16, 2048, 8192, 131_072)


@pytest.mark.parametrize(
    ("config", "pp", "found"),
    [
        (LLAMA_8B, 2, [18, 14]),
        (LLAMA_8B, 4, [9, 9, 8, 6]),
        # The head weighs as much as four layers, and a stage may end exactly at its share.
        (LLAMA_1B, 2, [10, 6]),
        (LLAMA_1B, 4, [5, 5, 5, 1]),
    ],
)
def test_nanotron_weighs_the_head(config: Config, pp: int, found: list[int]) -> None:
    assert [stage.layers for stage in build_stages(config, pp, "nanotron")] == found


@pytest.mark.parametrize(
    ("layers", "pp", "found"),
    [
        (126, 16, [7, *[8] * 14, 7]),  # Llama 3 405B, section 3.3.2
        (70, 12, [5, *[6] * 10, 5]),  # BLOOM (arXiv 2211.05100), with 12 stages
        (22, 8, [2, *[3] * 6, 2]),  # Qi et al. 2023, Table 3
        (96, 8, [12] * 8),
        (5, 3, [1, 3, 1]),
    ],
)
def test_megatron_counts_the_ends_as_a_layer(layers: int, pp: int, found: list[int]) -> None:
    assert [stage.layers for stage in build_stages(make_shape(layers), pp, "megatron")] == found


@pytest.mark.parametrize("name", SCHEDULES)
@given(st.integers(2, 8), st.integers(1, 40), st.integers(2, 4))
def test_micro_batches_in_flight_are_those_of_the_schedule(name: str, p: int, m: int, v: int):
    chunks = {"interleaved": v, "zb-v": 2}.get(name, 1)
    plan = pipeline.make_schedule(name, p, m, chunks if chunks > 1 else None)
    layout = Layout(pp=p, microbatches=m, schedule=name, chunks=chunks)
    found = [memory.count_in_flight(layout, stage) for stage in range(p)]
    lived = list(pipeline.count_peak_activations(plan))
    if name == "zb-v":  # a bound, which many micro-batches reach
        assert all(n <= most for n, most in zip(lived, found, strict=True))
        assert lived == found or m < 2 * p
    else:
        assert lived == found


# Parts of a model, compared with counted operations.


@pytest.mark.parametrize("name", ["plain", "rms"])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    """Compare forward without a mask: torch's counter knows of no mask."""
    config = replace(SHAPES[name], kv_heads=2)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        GPT(config)(torch.zeros(2, config.seq, dtype=torch.long))
    tokens = 2 * config.seq
    assert 3 * counter.get_total_flops() == strategy.count_flops(config, tokens, causal=False)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(1, 50)),
    st.one_of(st.none(), st.integers(1, 50)),
)
def test_keys_are_those_that_a_mask_shows(seq: int, window: int | None, chunk: int | None) -> None:
    query, key = torch.arange(seq)[:, None], torch.arange(seq)[None]
    seen = key <= query
    if chunk:
        seen &= key // chunk == query // chunk
    elif window:
        seen &= key > query - window
    core = AttentionCore(1, 1, 8, 8, None if chunk else window, chunk)
    assert core.count_keys(seq) == pytest.approx(seen.sum().item() / seq)
    assert core.count_flops(seq, causal=False) == 2 * 16 * seq


def test_a_structure_is_counted_and_planned_as_its_config_is() -> None:
    config, machine = PRESETS["mixtral-8x7b"], MACHINES["h100"]
    model, layout = get_structure(config), Layout(dp=8, tp=4, pp=2, ep=4, zero=1)
    assert memory.count_rank_parameters(model, layout) == memory.count_rank_parameters(
        config, layout
    )
    assert strategy.predict(model, machine, layout) == strategy.predict(config, machine, layout)
    assert strategy.compute_floor(model, machine, layout) == strategy.compute_floor(
        config, machine, layout
    )
