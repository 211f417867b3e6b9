"""The ledger of tensors against models that are really built and really cut; stages and chunks."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab import experts, memory, pipeline, ranks, sequence_parallel, tensor_parallel
from shardlab.common.shapes import PRESETS, Config
from shardlab.gpt.model import GPT
from shardlab.layout import Layout, ledger, stages, structure
from shardlab.layout.stages import held

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


def on_meta(config: Config) -> GPT:
    with torch.device("meta"):
        return GPT(config)


@pytest.mark.parametrize("config", [*SHAPES.values(), *PRESETS.values()], ids=[*SHAPES, *PRESETS])
def test_names_shapes_order_and_ties_are_the_model_s(config: Config) -> None:
    if config.layers > 12:
        config = replace(config, layers=2, dense_layers=min(1, config.dense_layers))
    model = on_meta(config)
    found = {entry.name: entry for entry in ledger(config)}
    named = dict(model.named_parameters(remove_duplicate=False))
    assert {name: entry.shape for name, entry in found.items()} == {
        name: tuple(p.shape) for name, p in named.items()
    }
    once = [name for name, entry in found.items() if not entry.tied]
    assert once == [name for name, _ in model.named_parameters()]  # in this order lie ZeRO's flats
    for name, entry in found.items():
        assert entry.layer == (int(name.split(".")[1]) if name.startswith("blocks") else None)
        if entry.tied:
            assert named[name] is named[entry.tied]
        if entry.along:  # the size that a degree has to divide
            assert entry.units == getattr(config, entry.along)
            assert entry.shape[entry.tp] % entry.units == 0


def cut(config: Config) -> dict[str, tuple]:
    """What a rank has of a model that is really cut: shape, dimension, its word."""
    model = tensor_parallel.parallelize(GPT(config), dist.group.WORLD)
    found, words = tensor_parallel.cuts(model), tensor_parallel.states.words(model)
    return {n: (tuple(p.shape), found[n], words[n]) for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", [*SHAPES])
def test_a_tensor_group_cuts_what_the_ledger_says(name: str) -> None:
    config = SHAPES[name]
    for mine in ranks.run(cut, 2, config, device="cpu"):
        entries = [entry for entry in ledger(config) if not entry.tied]
        assert list(mine) == [entry.name for entry in entries]
        for entry in entries:
            word = "I" if entry.tp is None else "V"
            assert mine[entry.name] == (entry.local(2), entry.tp, word)


def seen_partly(config: Config) -> list[str]:
    """Names of what a rank has whole, and whose gradient knows its tokens alone."""
    model = tensor_parallel.parallelize(
        GPT(config), dist.group.WORLD, sequence_parallel.ALONG_SEQUENCE
    )
    some = {id(parameter) for parameter in sequence_parallel.seen_partly(model)}
    return [name for name, p in model.named_parameters() if id(p) in some]


@pytest.mark.parametrize("name", ["plain", "untied", "rms", "qk norm", "latent", "latent keys"])
def test_sequence_parallelism_sees_in_parts_what_the_ledger_says(name: str) -> None:
    config = SHAPES[name]
    for mine in ranks.run(seen_partly, 2, config, device="cpu"):
        assert mine == [entry.name for entry in ledger(config) if entry.partly]


def dealt(config: Config) -> dict[str, tuple[int, ...]]:
    model = experts.parallelize(GPT(config), dist.group.WORLD)
    own = {id(parameter) for parameter in experts.own_parameters(model)}
    return {n: (tuple(p.shape), id(p) in own) for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["experts", "mixed"])
def test_experts_are_dealt_out_as_the_ledger_says(name: str) -> None:
    config = SHAPES[name]
    (alone,) = stages(config)
    for rank, mine in enumerate(ranks.run(dealt, 2, config, device="cpu")):
        entries = held(config, alone, 2, rank)
        want = sorted((entry.shape, entry.expert is not None) for entry in entries)
        assert sorted(mine.values()) == want
        assert sum(own for _, own in mine.values()) * 2 == sum(
            entry.expert is not None for entry in ledger(config)
        )


@given(
    st.integers(1, 6), st.integers(1, 12), st.integers(0, 12),
    st.sampled_from(["1f1b", "interleaved", "zb-v"]), st.integers(2, 4),
)  # fmt: skip
def test_every_layer_stands_on_one_stage_where_the_pipeline_has_it(pp, each, dense, name, v):
    v = {"interleaved": v, "zb-v": 2}.get(name, 1) if pp > 1 else 1
    name = name if pp > 1 else "1f1b"
    config = Config(layers=pp * v * each, experts=2, dense_layers=min(dense, pp * v * each - 1))
    found = stages(config, pp, "equal", name, v)
    numbers = sorted(layer for stage in found for chunk in stage.chunks for layer in chunk)
    assert numbers == list(range(config.layers))
    first, model = range(config.dense_layers), structure(config)
    for stage in found:
        *dense, sparse = model.counted(stage.chunks)
        assert sum(dense) == sum(n in first for n in stage.numbers)
        assert sparse == stage.layers - sum(dense)
    if pp > 1:  # parts of the model in the order of the pipeline's own placement
        placement = pipeline.schedule(name, pp, pp, v if name == "interleaved" else None).placement
        for stage, parts in zip(found, placement, strict=True):
            assert [chunk.start // each for chunk in stage.chunks] == list(parts)


@settings(max_examples=60)
@given(
    st.sampled_from([*SHAPES.values()]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
)  # fmt: skip
def test_counts_are_the_ledger_s(config: Config, tp: int, ep: int, pp: int) -> None:
    """Counting by kinds of layer gives what adding up every entry gives."""
    config = replace(config, layers=6)
    if not config.experts:
        ep = 1
    if config.kv_heads == 2 and tp == 4:
        tp = 2
    for stage in stages(config, pp):
        entries = held(config, stage, ep)
        counts = memory.parameters(config, Layout(dp=ep, tp=tp, ep=ep), stage)
        assert sum(counts.values()) == sum(prod(entry.local(tp)) for entry in entries)
        own = sum(entry.elements(tp) for entry in entries if entry.expert is not None)
        assert memory.in_experts(config, Layout(dp=ep, tp=tp, ep=ep), stage) == own
