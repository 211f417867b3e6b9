"""Choice of a layout: published step times, the other modules, and the chart's promises."""

from dataclasses import replace

import pytest
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardlab import memory, pipeline, ranks, sequence_parallel, tensor_parallel, zero
from shardlab.common.shapes import PRESETS, Config
from shardlab.gpt import model
from shardtools import strategy
from shardtools.strategy import MACHINES, TECHNIQUES, Layout, Plan

GPT3, A100 = PRESETS["gpt-3-175b"], MACHINES["a100"]
few = settings(max_examples=8, deadline=None)


def make_gpt(layers: int, hidden: int, heads: int, seq: int = 2048) -> Config:
    return Config(vocab=51_200, seq=seq, layers=layers, heads=heads, hidden=hidden)


def paper_flops(config: Config, batch: int) -> float:
    """Narayanan et al. 2021 (arXiv 2104.04473), section 5.1: operations with recomputation."""
    s, h, layers = config.seq, config.hidden, config.layers
    inner = 1 + s / (6 * h) + config.vocab / (16 * layers * h)
    return 96 * batch * s * layers * h**2 * inner


# Narayanan et al. 2021, Table 1: layers, hidden, heads; batch, micro-batch, t, p, d; chunks (from
# the scripts in Megatron-LM's repository), all with full recomputation.
TABLE_1 = [
    (24, 2304, 24, 512, 16, 1, 1, 32, 1),
    (36, 4096, 32, 512, 16, 4, 1, 32, 1),
    (48, 8192, 64, 1536, 4, 8, 2, 32, 1),
    (80, 12_288, 96, 2304, 2, 8, 8, 24, 2),
    (128, 25_600, 160, 3072, 1, 8, 64, 6, 1),
]


def test_operations_are_those_of_the_paper() -> None:
    for layers, hidden, heads, batch, b, t, p, d, chunks in TABLE_1:
        config = make_gpt(layers, hidden, heads)
        work = strategy.count_flops(config, batch * 2048, recompute="full", causal=False)
        assert work == pytest.approx(paper_flops(config, batch), rel=1e-9)
        layout = Layout(d, t, p, micro_batch=b, microbatches=batch // d // b, recompute="full")
        if chunks > 1:
            layout = replace(layout, schedule="interleaved", chunks=chunks)
        assert memory.estimate_step(config, layout, device="gpu").peak < 80e9  # these jobs ran


def test_days_of_training() -> None:
    """Narayanan et al. 2021, section 5.1: 34 days for GPT-3, 84 for a trillion parameters."""
    assert round(strategy.training_days(175e9, 300e9, 1024, 140e12)) == 34
    assert strategy.training_days(1e12, 450e9, 3072, 163e12) == pytest.approx(84, rel=0.01)


def test_traffic_of_zero_is_that_of_its_paper() -> None:
    """Rajbhandari et al. 2020 (arXiv 1910.02054), section 7: twice, twice, twice, three times P."""
    params, d = 6_400, 64
    sent = [sum(strategy.zero_traffic(params, z, d, 1, 1, 1).values()) for z in range(4)]
    share = params * (d - 1) // d
    assert sent == [2 * share, 2 * share, 2 * share, 3 * share]
    m = 8
    sent = [sum(strategy.zero_traffic(params, z, d, m, 1, 1).values()) for z in range(4)]
    assert sent == [2 * share, 2 * share, (m + 1) * share, 3 * m * share]
    assert strategy.zero_traffic(7, 2, 1, 5) == {"gradients": 0, "weights": 0}


def predict_zero_traffic() -> list[dict[str, int]]:
    """Return a rank's bytes sent by stage, of two ranks and three micro-batches."""
    found = []
    for stage in (1, 2, 3):
        options = {"units": []} if stage == 3 else {}
        sharded = zero.shard_module(model.GPT(PRESETS["nano"]), dist.group.WORLD, stage, **options)
        found.append(zero.predict_sent_bytes(sharded, backwards=3))
    return found


def test_traffic_of_zero_is_that_of_the_module() -> None:
    """In float32; without units, stage 3 keeps the gathered weights from forward to backward."""
    params = memory.count_parameters(PRESETS["nano"])
    for stage, found in zip((1, 2, 3), ranks.run(predict_zero_traffic, 2)[0], strict=True):
        sent = strategy.zero_traffic(params, stage, 2, 3, weight=4, gradient=4)
        weights = sent["weights"] / (2 if stage == 3 else 1)
        assert found == {
            "gradients": pytest.approx(sent["gradients"], rel=1e-3),  # padding
            "parameters": pytest.approx(weights, rel=1e-3),
        }


def test_tensor_seconds_are_the_bytes_that_tensor_parallelism_counts() -> None:
    config, layout = PRESETS["micro"], Layout(tp=4, micro_batch=2, microbatches=3)
    found = strategy.compute_floor(config, A100, layout).tensor
    sent = tensor_parallel.predict_sent_bytes(config, 4, 2, config.seq, itemsize=2)
    sent = (sent["forward"] + sent["backward"]) * 2 * config.layers / (2 * config.layers + 1)
    assert found * A100.node_bandwidth == pytest.approx(3 * tensor_parallel.bytes_on_wire(sent, 4))
    edges = sequence_parallel.predict_edge_bytes(
        config, 2, config.seq, 4, itemsize=2, keep_entered=True
    )
    blocks = (edges["forward"] + edges["backward"]) * 2 * config.layers / (2 * config.layers + 1)
    assert found * A100.node_bandwidth == pytest.approx(3 * blocks)


@pytest.mark.parametrize(("p", "m", "chunks"), [(2, 2, 1), (4, 4, 1), (4, 8, 1), (4, 8, 2)])
def test_the_bubble_is_that_of_the_simulated_schedule(p: int, m: int, chunks: int) -> None:
    config = replace(PRESETS["micro"], layers=8)
    name = "1f1b" if chunks == 1 else "interleaved"
    layout = Layout(pp=p, microbatches=m, schedule=name, chunks=chunks)
    found = strategy.compute_floor(config, A100, layout)
    timeline = pipeline.simulate(pipeline.make_schedule(name, p, m, chunks))
    share = found.bubble / (found.arithmetic + found.bubble)
    assert share == pytest.approx(timeline.bubble)


def test_gpt3_on_64_gpus() -> None:
    """t 8, p 4, d 2: copies alone do not fit into 80 GB; ZeRO-1 fits, and sends no more bytes."""
    layouts = [Layout(2, 8, 4, zero, microbatches=256, sequence_parallel=True) for zero in range(4)]
    assert {(x.world_size, x.global_batch) for x in layouts} == {(64, 512)}
    peaks = [memory.estimate_step(GPT3, x, device="gpu").peak / 1e9 for x in layouts]
    assert peaks == pytest.approx([109.6, 65.5, 60.0, 55.9], abs=0.05)
    floors = [strategy.compute_floor(GPT3, A100, x) for x in layouts]
    assert floors[0] == floors[1]
    assert floors[2].data == pytest.approx(floors[1].data * 257 / 2)
    assert floors[3].data == pytest.approx(floors[1].data * 3 * 256 / 2)
    assert [f.total for f in floors] == pytest.approx([56.4, 56.4, 56.7, 169.4], abs=0.05)
    whole = replace(layouts[1], sequence_parallel=False)
    needs = memory.estimate_step(GPT3, whole, device="gpu").peak / 1e9
    assert needs == pytest.approx(82.4, abs=0.05)


def test_copies_of_a_node_share_its_links() -> None:
    """An all-reduce of S: 2(n-1)/n S/g through each card, for n nodes of g copies."""
    params = memory.count_parameters(PRESETS["gpt-2"])
    found = strategy.compute_floor(PRESETS["gpt-2"], A100, Layout(dp=128))
    assert found.data * A100.network_bandwidth == pytest.approx(2 * (15 / 16) * 2 * params / 8)
    inside = strategy.compute_floor(PRESETS["gpt-2"], A100, Layout(dp=8)).data
    assert inside == pytest.approx(2 * (7 / 8) * 2 * params / A100.node_bandwidth, rel=1e-6)


# The chart's promises. A model, GPUs, and a step; machines from a small card to a large one.
JOBS = st.tuples(
    st.sampled_from(["gpt-2", "llama-3-8b", "llama-3-70b", "gpt-3-175b"]),
    st.sampled_from([1, 2, 8, 64, 512]),
    st.sampled_from([64, 512, 1536]),
)


def plan_preset(model: str, gpu: str, gpus: int, batch: int) -> Plan:
    return strategy.plan(PRESETS[model], MACHINES[gpu], gpus, batch)


@few
@given(JOBS, st.sampled_from(sorted(MACHINES)), st.floats(8e9, 160e9))
@example(("llama-3-70b", 512, 64), "b200", 8e9)  # ZeRO-3 within nodes, whose weights come too late
def test_chart_chooses_the_first_technique_that_fits(job, name: str, size: float) -> None:
    model, gpus, batch = job
    machine = replace(MACHINES[name], memory=size, gpus_per_node=8)  # 512 GPUs fill nodes of eight
    found = strategy.plan(PRESETS[model], machine, gpus, batch)
    if not found.feasible:
        with pytest.raises(ValueError, match=f"gpus={gpus}: no layout "):
            strategy.choose_by_chart(found)
        return
    chosen, by_technique = strategy.choose_by_chart(found), strategy.fastest_by_technique(found)
    assert chosen in found.feasible and chosen.reserved <= found.usable_memory == 0.927 * size
    assert list(by_technique) == [name for name in TECHNIQUES if name in by_technique]
    place = TECHNIQUES.index(strategy.find_technique(chosen.layout))
    alone = [one for one in found.feasible if one.layout.cp == 1]
    for one in alone or found.feasible:  # the chart has no context parallelism
        name = strategy.find_technique(one.layout)
        assert by_technique[name].seconds <= one.seconds + 1e-6
        wait = by_technique[name].prediction.seconds  # for weights that ZeRO-3 gathers
        late = by_technique[name].layout.zero == 3 and wait.data > wait.products + wait.attention
        assert TECHNIQUES.index(name) >= place or late


def test_the_chart_by_model_size() -> None:
    jobs = {
        ("gpt-2", "rtx-4090", 8, 512): "d 8",
        ("llama-3-8b", "h100", 64, 512): "d 64, ZeRO-2",
        ("llama-3-70b", "a100", 64, 512): "d 64, ZeRO-3, recompute",
        ("llama-3-8b", "rtx-4090", 8, 512): "d 2 · t 4, ZeRO-2, recompute",
        ("gpt-3-175b", "a100", 64, 64): "d 64, ZeRO-3, recompute",
        ("gpt-3-175b", "a100", 1024, 1536): "d 128 · t 8, ZeRO-2",
    }
    for job, answer in jobs.items():
        assert str(strategy.choose_by_chart(plan_preset(*job)).layout) == answer


def test_gpt3_on_64_gpus_has_one_answer() -> None:
    """The answer of the plan, which command, page and lesson print; the chart's is slower."""
    found = plan_preset("gpt-3-175b", "a100", 64, 64)
    assert str(found.feasible[0].layout) == "d 2 · t 4 · p 8, ZeRO-1, recompute ffn, interleaved 4"
    slower = strategy.choose_by_chart(found).seconds / found.feasible[0].seconds
    assert slower == pytest.approx(1.24, rel=0.01)


def test_chart_avoids_zero_3_on_slow_links() -> None:
    """The plan avoids ZeRO-3 if gathering the weights takes longer than the compute."""
    config, slow = PRESETS["llama-3-70b"], replace(A100, network_bandwidth=0.1e9)
    found = strategy.plan(config, slow, 64, 512)
    parts = strategy.fastest_by_technique(found)["recompute"].prediction.seconds
    assert parts.data > parts.products + parts.attention
    assert strategy.find_technique(strategy.choose_by_chart(found).layout) == "tensor in the node"


def test_oom_advice_counts_states_as_memory_does() -> None:
    # Experts are distributed, and fewer ranks share their states: as `memory` counts them.
    mixed = Layout(8, zero=1, ep=8, micro_batch=64)
    said = strategy.explain_oom(PRESETS["mixtral-8x7b"], A100, mixed)
    found = memory.estimate_step(PRESETS["mixtral-8x7b"], mixed, device="gpu")
    states = found.parameters + found.gradients + found.optimizer
    assert f"{states / 1e9:.1f} GB of it are model states" in said
    assert "99.0 GB of it are model states" in said
