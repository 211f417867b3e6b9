"""The modules that train five steps with a technique, print bytes, and compare with one process."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from shardlab.data_parallel import Bucket
from shardlab.data_parallel.__main__ import train_on_rank
from shardlab.measure import comparison

MODULES = "collectives", "data_parallel", "memory", "pipeline", "tensor_parallel", "zero"
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"


def run_module(*words: str) -> None:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": equal to one process" in done.stdout and "NOT" not in done.stdout


@pytest.mark.parametrize("module", MODULES)
def test_a_module_equals_one_process(module: str) -> None:
    run_module("-m", f"shardlab.{module}")


def test_a_module_trains_on_the_ranks_of_torchrun() -> None:
    run_module(*TORCHRUN, "--nproc-per-node=2", "-m", "shardlab.data_parallel")


def test_gradients_that_are_summed_give_status_1(monkeypatch: Any, capsys: Any) -> None:
    copy = Bucket.copy_gradient
    monkeypatch.setattr(Bucket, "copy_gradient", lambda self, index, _: copy(self, index, 1.0))
    monkeypatch.setattr(sys, "argv", ["data_parallel"])
    assert comparison.main(train_on_rank, "wrapper", ["DataParallel"]) == 1
    assert "NOT equal to one process" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sent", "gap", "passes"),
    [((8, 8), 0.0, True), ((8, 9), 0.0, False), ((8, 8), math.nan, False)],
)
def test_wrong_bytes_and_nan_do_not_pass(sent: Any, gap: float, passes: bool) -> None:
    assert comparison.Comparison({"sent": sent}, gap, tolerance=1.0).passes == passes
