"""The page "Your job": each of its commands runs here, as far as a machine without a GPU can."""

import json
import re
import shlex
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import run_main
from test_strategy_emit import MEGATRON, TORCHTITAN

from shardlab import layout
from shardlab.common import show
from shardlab.common.machines import MACHINES
from shardlab.common.shapes import PRESETS
from shardlab.layout import Layout
from shardlab.train.take_home import Options
from shardtools.strategy import PROFILES, advice, plan_layout
from shardtools.strategy.emit import emit

PAGE = (show.ROOT / "book/your_job.md").read_text("utf-8")
SHELL = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = [line for block in SHELL for line in block.splitlines()]
OURS = [line for line in LINES if "-m shardlab" in line]
PLANS = [line for line in OURS if " strategy " in line]


def split_line(line):
    return shlex.split(line)[3:]  # without python -m shardlab


@pytest.mark.parametrize("line", PLANS, ids=range(len(PLANS)))
def test_the_planner_s_commands_run_and_say_what_the_page_says(
    line, tmp_path, capsys, monkeypatch, request
):
    if "strategy run" in line and not request.config.getoption("--weekly"):
        pytest.skip("starts eight ranks: tests/test_strategy_trial.py starts some each day")
    monkeypatch.chdir(tmp_path)
    status, out, error = run_main(capsys, *split_line(line))
    assert status == 0, error
    if "strategy run" in line:
        assert out.splitlines()[-1].startswith("equal to one process but for rounding")
    if "--layout" in line:
        assert "FullAC.Config()" in out and "needs 65.0 GB more" in out
    if "--into job" in line:
        assert {path.name for path in (tmp_path / "job").iterdir()} == {
            "job.sbatch", "site.sh", "planned.py"
        }  # fmt: skip


def test_the_page_s_layouts_are_those_of_an_engine_and_its_bytes(capsys):
    """Each row of the page's table, for torchtitan; and for the script, as the page suggests."""
    asked = split_line(next(line for line in PLANS if "--tokens" in line)) + ["--json"]
    script = re.search(r"script has no stages.*`(.+)`", PAGE)[1].split()
    script = [*asked[: asked.index("--profile")], *script, "--json"]
    for engine, line in {"torchtitan": asked, "course": script}.items():
        profile = line[line.index("--profile") + 1]
        assert PROFILES[profile].recipe.gradients == 4  # both accumulate in float32
        best = json.loads(run_main(capsys, *line)[1])["best"]
        assert best
        for row in best:
            assert emit(
                engine, PRESETS["llama-3-8b"], MACHINES["a100"], layout.parse_layout(row["written"])
            )


def test_the_other_commands_take_the_options_that_the_page_gives(capsys):
    for line in set(OURS) - set(PLANS):
        given = re.search(r"-m shardlab (\w+(?: watch)?)(.*?)[\"\n]?$", line)
        status, out, _ = run_main(capsys, *given[1].split(), "--help")
        assert status == 0
        assert all(option in out for option in re.findall(r"--[\w-]+", given[2])), line


def test_each_engine_s_name_of_a_remedy_is_one_that_it_has():
    settings = emit(
        "deepspeed", PRESETS["nano"], MACHINES["h100"], Layout(dp=2, zero=3, offload="parameters")
    ) + emit("deepspeed", PRESETS["nano"], MACHINES["h100"], Layout(tp=2))
    settings += emit("deepspeed", PRESETS["nano"], MACHINES["h100"], Layout(pp=2))
    options = {field.name for field in fields(Options)}
    for each in advice.ENGINE_OPTIONS.values():
        for engine, knob in each.items():
            for option in re.findall(r"--([\w.-]+)", knob):
                if engine == "megatron":
                    assert f"--{option}" in MEGATRON["arguments"]
                elif engine == "torchtitan":
                    assert option in TORCHTITAN["fields"]
                else:
                    assert engine == "course" and option in options
            if engine == "deepspeed" and re.fullmatch(r"[\w.]+", knob):
                assert all(f'"{part}"' in settings for part in knob.split(".")), knob
    # A config's pipeline.stages is never read: the program's own class sets the number.
    its = Path(find_spec("deepspeed").origin).parent / "runtime/pipe"
    assert "num_stages" in advice.ENGINE_OPTIONS["twice the stages"]["deepspeed"]
    assert "num_stages=None" in (its / "module.py").read_text("utf-8")
    assert not re.search(r"pipeline\W+stages", (its / "engine.py").read_text("utf-8"))


@pytest.mark.parametrize("engine", ["torchtitan", "megatron", "deepspeed", "course"])
def test_a_remedy_keeps_gpus_and_batch_and_takes_less(engine):
    at = Layout(dp=16, zero=1, micro_batch=2, microbatches=16)
    job = PRESETS["llama-3-8b"], MACHINES["a100"]
    found = plan_layout(*job, at, 8192, PROFILES[engine])
    before = (found.feasible or [found.closest_infeasible])[0].reserved
    listed = advice.list_remedies(found, at)
    assert len(listed) >= 5 and {one.name for one in listed} <= set(advice.ENGINE_OPTIONS)
    for one in listed:
        assert one.reserved < before
        assert (one.layout.world_size, one.layout.global_batch) == (at.world_size, at.global_batch)
    assert [one.seconds for one in listed] == sorted(one.seconds for one in listed)
