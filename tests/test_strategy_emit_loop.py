"""Scripts of jobs for DeepSpeed and FSDP2: stopped by a signal, they go on as if they were not."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from test_strategy_emit import NANO, ROUNDED, alone

from shardlab.common.machines import MACHINES
from shardlab.common.show import ROOT
from shardlab.deepspeed_engine import start
from shardlab.layout import Layout
from shardtools.strategy.emit import Limits, job, loop
from shardtools.strategy.emit.target import Target

HALF = torch.bfloat16, 3e-4  # what the scripts compute with, and their learning rate
PAIR = replace(MACHINES["a100"], per_node=2)
STAGE_3 = Layout(dp=2, zero=3, micro_batch=2, microbatches=2, recompute="full")


def put(engine, layout, folder):
    """Write the job's files; its script."""
    target = Target(engine, NANO, PAIR, layout, NANO.seq)
    for name, text in job(target, Limits(), steps=30, seconds=60.0).items():
        (folder / name).write_text(text)
    return f"train_{engine}.py"


def run(folder, script, steps, stop_at=None):
    """Run the script on two ranks, as torchrun starts them; return what they said.

    stop_at: rank 1 alone gets the signal, once the log has so many steps.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    own |= {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    own |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT / "code")}
    metrics, log = folder / "run/metrics.jsonl", folder / f"{steps}.log"
    ranks = []
    try:
        for number in ("0", "1"):
            with log.open("a") as said:
                ranks += [
                    subprocess.Popen(
                        [sys.executable, script, f"--steps={steps}"],
                        cwd=folder,
                        env=os.environ | own | {"RANK": number, "LOCAL_RANK": number},
                        stdout=said,
                        stderr=said,
                    )
                ]
        while stop_at and not any(rank.poll() for rank in ranks):
            if metrics.exists() and len(metrics.read_text().splitlines()) >= stop_at:
                ranks[1].send_signal(signal.SIGUSR1)
                break
            time.sleep(0.01)
        assert [rank.wait() for rank in ranks] == [0, 0], log.read_text()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return log.read_text()


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_a_script_that_was_stopped_goes_on_as_if_it_was_not(engine, tmp_path, request):
    if engine == "deepspeed" and not request.config.getoption("--whole"):
        pytest.skip("the same loop around another engine: --whole")
    if engine == "deepspeed":
        if not find_spec("deepspeed"):
            pytest.skip("needs DeepSpeed")
        start.prepare()
    script = put(engine, STAGE_3, tmp_path)
    run(tmp_path, script, 10_000, stop_at=2)
    (path,) = loop.saved(tmp_path / "run")
    done = loop.step_of(path)
    assert 2 <= done < 10_000
    assert f"step {done + 2} of {done + 2}" in run(tmp_path, script, done + 2)
    metrics = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in metrics]
    assert [row["step"] for row in rows] == list(range(1, done + 3))
    (plain,) = alone([(STAGE_3, NANO, *HALF, engine == "deepspeed", False, done + 2)])
    # Optimizer states that were lost move the next two losses by 6e-3 and 13e-3 (seen).
    assert [row["loss"] for row in rows] == pytest.approx(plain, abs=ROUNDED)


def test_what_deepspeed_s_script_cannot_do_is_one_clear_error(tmp_path):
    for layout, words in (
        (Layout(dp=2, recompute="selective"), "recompute='selective': with engine='deepspeed'"),
        (Layout(pp=2, microbatches=2), "zero=0: with engine='deepspeed' allowed with pp=2 is 1"),
    ):
        with pytest.raises(ValueError) as caught:
            put("deepspeed", layout, tmp_path)
        assert words in str(caught.value)
