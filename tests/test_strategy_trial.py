"""Trial of a plan: the layout is shrunk for this machine, and equals one process."""

import re
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.common.machines import MACHINES
from shardlab.common.shapes import PRESETS
from shardlab.layout import AXES, Layout, get_structure
from shardlab.mesh.job import measure_rounding, run
from shardtools.__main__ import main
from shardtools.commands.mesh import is_as_predicted
from shardtools.strategy import search_space, trial
from shardtools.strategy.plan import Plan
from shardtools.strategy.profile import PROFILES
from shardtools.strategy.rates import load_rates
from shardtools.strategy.trial import is_equivalent, shrink_job


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([name for name in PRESETS if name not in ("nano", "micro", "mini")]),
    st.sampled_from([1, 2, 8, 24, 64, 96, 1024]),
    st.sampled_from(sorted(PROFILES)),
    st.data(),
)
def test_shrunk_job_keeps_the_layout(model, gpus, profile, data):
    config, machine = PRESETS[model], MACHINES["h100"]
    job = get_structure(config), machine, gpus, 16 * gpus, 32_768
    space = Plan(*job, PROFILES[profile], load_rates(profile))
    base = data.draw(st.sampled_from([*search_space.iter_base_layouts(space, Counter())] or [None]))
    starts = search_space.iter_zero_stages(space, base) if base else []
    tried = [
        replace(start, recompute=how, **fields)
        for start in starts
        for how in search_space.list_recompute_options(space)
        for fields in search_space.iter_batch_shapes(space, base)
    ]
    plan = data.draw(st.sampled_from(tried or [Layout()]))
    job, left_out = shrink_job(config, plan)  # Job refuses layouts that a mesh does not train
    found = job.layout
    assert 1 <= found.world_size <= 8
    for axis in set(AXES) - {"cp"}:  # an axis goes only where a machine has no rank left for it
        wide = getattr(plan, axis)
        assert getattr(found, axis) <= wide and (getattr(found, axis) > 1) == (wide > 1)
    assert found.order == plan.order and found.zero in (plan.zero, 1)
    lost = {word.partition("=")[0] for word in left_out}
    kept = {"recompute", "schedule", "chunks", "sequence_parallel", "stages"} - lost
    if found.pp == 1 or plan.chunks > 2:
        kept.discard("chunks")
    assert all(getattr(found, name) == getattr(plan, name) for name in kept)
    assert not lost & {"schedule", "chunks"} and ("cp" in lost) == (plan.cp > 1)
    assert plan.recompute == "selective" or "recompute" not in lost
    kept = "mlp", "norm", "bias", "tied", "router"
    assert all(getattr(job.config, name) == getattr(config, name) for name in kept)
    assert bool(job.config.experts) == bool(config.experts)


def test_a_plan_is_run_and_equals_one_process(capsys, monkeypatch):
    monkeypatch.setattr(trial, "MAX_RANKS", 4)  # as on two cores
    asks = "--model mixtral-8x7b --gpu h100 --gpus 16 --tp 4 --pp 1 --recompute full"
    assert main(["strategy", "run", *asks.split()]) == 0
    out = capsys.readouterr().out
    assert "held and sent as predicted, to the byte" in out
    last = "equal to one process but for rounding; left out, since a mesh does not train it: "
    assert out.endswith(f"{last}sequence_parallel=True\n")
    ranks = int(re.search(r"^(\d+) ranks: ", out, re.M)[1])
    assert 2 <= ranks <= 4 and len(re.findall(r"^ +\d+  \d \d \d ", out, re.M)) == ranks


def test_trial_detects_mismatches():
    rank = {"held": {"parameters": 8}, "held_predicted": {"parameters": 8},
            "sent": {"tp": 4.0}, "sent_predicted": {"tp": 4.0}}  # fmt: skip
    assert is_as_predicted({"ranks": [rank, rank]})
    assert not is_as_predicted({"ranks": [rank, {**rank, "held": {"parameters": 9}}]})
    assert not is_as_predicted({"ranks": [rank, {**rank, "sent": {"tp": 5.0}}]})
    assert is_equivalent({"losses": 1e-6, "gradients": 1e-7})
    assert not is_equivalent({"losses": 1e-4, "gradients": 1e-7})
    assert not is_equivalent({"losses": 1e-6, "gradients": 1e-4})


def test_trial_measures_rounding_where_it_is_large():
    size = {"hidden": 3072, "heads": 12, "kv_heads": 4, "ffn": 23_040}  # of falcon3-7b
    model = replace(PRESETS["llama-3-8b"], rotary_base=10_000.0, **size)
    job, _ = shrink_job(model, Layout(pp=2, microbatches=4))
    own = measure_rounding(job)
    gaps = run(job)["differences"]
    assert is_equivalent(gaps, own)
    assert not is_equivalent(dict.fromkeys(gaps, 1e-2), own)
