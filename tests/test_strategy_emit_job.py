"""Whole jobs: their batch files in a real Slurm, their arguments in the engines' own parsers."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run_main
from test_cluster_slurm import get_state, read_losses, wait_for_end, wait_until

from shardlab.common.machines import MACHINES
from shardlab.common.shapes import PRESETS
from shardlab.layout import Layout
from shardlab.train import take_home
from shardtools.cluster import slurm
from shardtools.strategy.emit import Limits, render_job
from shardtools.strategy.emit.job import BATCH_FILE, SITE_FILE, parse_slurm_time
from shardtools.strategy.emit.target import Target

HERE = Path(__file__).parent
MEGATRON, TORCHTITAN = (
    json.loads((HERE / f"strategy_emit_{name}.json").read_text())
    for name in ("megatron", "torchtitan")
)
NEEDS = pytest.mark.skipif(
    bool(slurm.find_missing()), reason=f"Slurm is not installed: {slurm.INSTALL}"
)
LLAMA = PRESETS["llama-3-8b"]
PAIR = replace(MACHINES["a100"], gpus_per_node=2)
ENGINES = "torchtitan", "megatron", "course"
JOB = ["--model", "llama-3-8b", "--gpu", "a100", "--gpus", "16"]


def render_files(engine, layout=None, config=LLAMA, time="00:50:00", **more):
    target = Target(
        engine, config, PAIR, layout or Layout(dp=4, zero=3, microbatches=2), config.seq
    )
    return render_job(target, Limits(time, **more), steps=30, seconds=60.0)


def write_files(texts, folder):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


def find_arguments(text):
    return text[text.index("srun --cpus") : text.index('"$@" &')].replace("\\\n", " ").split()


def test_each_engine_is_told_to_resume_by_arguments_that_it_has():
    given = find_arguments(render_files("megatron")[BATCH_FILE])
    there = {word for word in given if word in MEGATRON["arguments"]}
    wanted = {"--save", "--load", "--save-interval", "--train-iters"}
    assert there == wanted | {"--exit-signal-handler", "--exit-signal"}
    assert "SIGUSR1" in MEGATRON["arguments"]["--exit-signal"]
    assert given[given.index("--save-interval") + 1] == "5"  # a tenth of 50 minutes
    fields = {*TORCHTITAN["fields"], *TORCHTITAN["checkpoint"]}
    given = find_arguments(render_files("torchtitan")[BATCH_FILE])
    given = [word for word in given if word.startswith("--")]
    own = given[given.index("--module") + 2 :]
    assert own and {word[2:].replace("-", "_") for word in own} <= fields
    assert "--checkpoint.enable" in own


def test_the_course_s_script_takes_the_options_of_its_job(tmp_path):
    write_files(texts := render_files("course"), tmp_path)
    assert texts["train.py"] == Path(take_home.__file__).read_text()
    read = 'source ./options.sh; printf "%s\\n" "${options[@]}"'
    said = subprocess.run(["bash", "-c", read], cwd=tmp_path, capture_output=True, text=True)
    given = take_home.parse_options(said.stdout.split())
    assert given.strategy == "fsdp2" and given.seq == 8192, said.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_s_files_are_written_and_a_site_s_lines_are_kept(engine, tmp_path, capsys):
    into = tmp_path / "job"
    ask = ["strategy", "emit", engine, *JOB, "--into", str(into)]
    ask += ["--time", "00:30:00", "--tokens", "1e9"]
    status, out, error = run_main(capsys, *ask)
    assert status == 0, error
    assert "sbatch job.sbatch" in out and all(path.name in out for path in into.iterdir())
    subprocess.run(["bash", "-n", into / BATCH_FILE], check=True)
    text = (into / BATCH_FILE).read_text()
    assert "#SBATCH --time=00:30:00" in text and "#SBATCH --signal=B:USR1@300" in text
    assert re.search("(steps|--train-iters) 239", text)  # of 512 · 8192 tokens
    (into / SITE_FILE).write_text("module load mine\n")
    assert run_main(capsys, *ask)[0] == 0
    assert (into / SITE_FILE).read_text() == "module load mine\n"


@NEEDS
def test_slurm_takes_the_batch_files(tmp_path):
    with slurm.run_cluster(tmp_path / "box", cpus=8) as box:
        for engine in ENGINES:
            folder = write_files(render_files(engine, partition="all"), tmp_path / engine)
            box.run(["sbatch", "--test-only", BATCH_FILE], cwd=folder)
        (tmp_path / "course" / SITE_FILE).unlink()
        submit = ["sbatch", "--parsable", BATCH_FILE]
        number = box.run(submit, cwd=tmp_path / "course").stdout.strip()
        assert wait_for_end(box, number) == "FAILED"
        assert f"no {SITE_FILE} here" in (tmp_path / f"course/train-{number}.err").read_text()


@NEEDS
@pytest.mark.weekly("trains twice; the cluster's own batch files are requeued each day")
def test_a_job_saves_at_the_signal_returns_to_the_queue_and_resumes(tmp_path):
    engine, steps = "course", 300
    nano = replace(PRESETS["nano"], seq=16)
    folder = write_files(render_files(engine, Layout(dp=2, zero=3), nano, "00:10:00"), tmp_path)
    with slurm.run_cluster(tmp_path / "box", 1, cpus=8) as box:
        more = {
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_WAIT_POLICY": "PASSIVE",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(HERE.parent / "code"),
        }
        how = {"cwd": folder, "env": {**box.environment, **more}}
        options = ["--limit", "4000", "--report", "1", "--steps", str(steps), "--every", "100"]
        number = box.run(["sbatch", "--parsable", BATCH_FILE, *options], **how).stdout.strip()
        metrics = folder / "run/metrics.jsonl"
        wait_until(lambda: metrics.exists() and read_losses(folder / "run"))
        box.run(["scancel", "--signal=USR1", "--batch", number])
        wait_until(lambda: get_state(box, number) == "PENDING")
        assert 0 < len(read_losses(folder / "run")) < steps
        wait_until(lambda: not slurm.find_job_processes(box.folder))
        box.run(["scontrol", "update", f"JobId={number}", "StartTime=now"])
        said = folder / f"train-{number}.err"
        assert wait_for_end(box, number) == "COMPLETED", said.read_text()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, steps + 1))


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:00:00", 3600), ("1-2:30", 95_400), ("2-00:30:00", 174_600)]
    + [("soon", 0)],
)
def test_times_are_read_as_slurm_reads_them(time, seconds):
    assert parse_slurm_time(time) == seconds
