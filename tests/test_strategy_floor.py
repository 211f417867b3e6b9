"""The floor is below every measured step, and overlaps all work that can overlap."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardlab import memory
from shardlab.common.shapes import PRESETS
from shardlab.layout import get_structure
from shardtools import strategy
from shardtools.strategy import MACHINES, PROFILES, Layout, load_rates, measured_runs
from shardtools.strategy.rates import DATA_DIR

H100 = MACHINES["h100"]
LLAMA = PRESETS["llama-3-70b"]


def test_floor_is_below_every_run_of_the_sweep() -> None:
    for row in measured_runs.read_rows("rows", DATA_DIR / "sweep.csv"):
        job = measured_runs.row_to_job(row, PROFILES["nanotron"])
        taken, _ = measured_runs.row_to_measurement(row, job)
        assert strategy.compute_floor(job.config, H100, job.layout).total < taken, row


def test_floor_is_below_every_published_step() -> None:
    judged = 0
    for case in measured_runs.read_cases("cases", DATA_DIR / "megatron.json"):
        printed = case["published"]
        taken = printed.get("iter_s") or printed.get("iter_ms", 0) / 1e3
        if "tp" not in case["config"]:
            continue
        job = measured_runs.case_to_job(case["config"], PROFILES["megatron"])
        if not taken and "tflops_per_gpu" in printed:  # SC21's operations count all pairs of tokens
            tokens = job.layout.global_batch * job.seq
            work = strategy.count_flops(job.config, tokens, job.seq, "full", causal=False)
            taken = work / job.layout.world_size / (printed["tflops_per_gpu"] * 1e12)
        if taken:
            judged += 1
            floor = strategy.compute_floor(job.config, job.machine, job.layout, job.seq)
            assert floor.total < taken, case["id"]
    assert judged == 18


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["gpt-2", "llama-3-8b", "llama-3-70b", "mixtral-8x7b", "deepseek-v3"]),
    st.dictionaries(
        st.sampled_from(["window", "chunk", "top_k"]), st.integers(1, 8192), max_size=1
    ),
    st.sampled_from([512, 8192, 131_072, 2**20]),
    st.tuples(*map(st.sampled_from, [(1, 2, 8), (1, 2), (1, 2), (0, 1, 3), (1, 64)])),
    st.sampled_from(["none", "full", "attention", "ffn"]),
    st.sampled_from(sorted(MACHINES)),
    st.sampled_from(["bf16", "fp8", "mxfp8", "nvfp4"]),
    st.sampled_from(sorted(PROFILES)),
    st.sampled_from([1.0, 3.0]),
)
@example(
    "llama-3-8b", {"window": 512}, 131_072, (8, 1, 2, 3, 1), "full", "h100", "bf16", "course", 1
)
@example("llama-3-70b", {}, 512, (8, 1, 1, 0, 64), "none", "b200", "nvfp4", "engines", 1.0)
def test_no_prediction_exceeds_the_data_sheet(
    name, seen, seq, degrees, recompute, gpu, dtype, profile, faster
) -> None:
    """MFU stays below 1, and no step is below its floor, even with rates too high by `faster`."""
    dp, pp, cp, zero, m = degrees
    model, machine, known = get_structure(PRESETS[name]), MACHINES[gpu], load_rates(profile).by_name
    if dtype != "bf16" and not (machine.fp4 if dtype == "nvfp4" else machine.fp8):
        dtype = "bf16"
    kinds = tuple(replace(kind, core=replace(kind.core, **seen)) for kind in model.kinds)
    model = replace(model, kinds=kinds)
    rates = {n: replace(r, value=faster * r.value) for n, r in known.items()
             if n in ("products", "attention", "grouped_matmul")}  # fmt: skip
    rates = strategy.Rates(profile, known | rates)
    at = Layout(dp, 1, pp, zero if pp == 1 else 0, 1, m, recompute, cp=cp, stages="nanotron")
    found = strategy.plan_layout(model, machine, at, seq, PROFILES[profile], rates, dtype)
    one = (found.feasible or [found.closest_infeasible])[0]
    data_sheet = replace(machine, flops=found.make_job(at).flops)
    assert 0 < one.mfu <= 1
    assert strategy.compute_floor(model, data_sheet, at, seq).total <= one.seconds


def test_a_ring_over_full_nodes_leaves_them_on_every_card() -> None:
    """Sixteen ranks of two nodes: eight network cards share the traffic between the nodes."""
    layout = Layout(tp=16, microbatches=8)
    slow = replace(H100, network_bandwidth=1e9)  # eight of these carry 8 GB/s
    config = replace(PRESETS["llama-3-70b"], heads=64, kv_heads=64)
    found = strategy.compute_floor(config, slow, layout).tensor
    stream = 8 * config.seq * config.hidden * 2
    assert found == pytest.approx(4 * config.layers * 2 * 15 / 16 * stream / 8e9)
    inside = strategy.compute_floor(config, slow, replace(layout, tp=8)).tensor
    assert inside == pytest.approx(4 * config.layers * 2 * 7 / 8 * stream / H100.node_bandwidth)


def test_floor_hides_traffic_behind_arithmetic() -> None:
    found = strategy.compute_floor(LLAMA, H100, Layout(tp=8, microbatches=8))
    assert 0 < found.tensor < found.arithmetic == found.total
    slow, layout = replace(H100, node_bandwidth=1e9), Layout(tp=8, microbatches=8)
    wire = strategy.compute_floor(LLAMA, slow, layout)
    assert wire.total == wire.tensor > wire.arithmetic


def test_hsdp_groups_gather_inside_a_node() -> None:
    """HSDP on two nodes of eight: weights stay in the node, gradient shards leave it."""
    every = Layout(16, zero=3, microbatches=4)
    groups = replace(every, replicas=2)
    params = memory.count_parameters(LLAMA)
    inside = 4 * 2 * 3 * params * 7 / 8 / H100.node_bandwidth
    between = 2 * 2 * params / 8 / 2 / H100.network_bandwidth
    found = strategy.compute_floor(LLAMA, H100, groups).data
    assert found == pytest.approx(max(inside, between), rel=1e-3)
    slow = replace(H100, network_bandwidth=1e9)
    floors = [strategy.compute_floor(LLAMA, slow, x).data for x in (groups, every)]
    assert floors[0] < floors[1] / 2
    took = [strategy.predict(LLAMA, slow, x).seconds.data for x in (groups, every)]
    assert took[0] < took[1] / 2
