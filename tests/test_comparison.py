"""The modules that train five steps with a technique, print bytes, and compare with one process."""

from __future__ import annotations

import math
import runpy
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from shardlab.data_parallel import Bucket
from shardlab.data_parallel.__main__ import train_on_rank
from shardlab.measure import comparison
from shardlab.tensor_parallel import __main__ as feed_forward

MODULES = "collectives", "data_parallel", "memory", "pipeline", "zero"
LARGE = pytest.mark.weekly("537 MB of weights, and a smaller network each day")
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("module", [*MODULES, pytest.param("tensor_parallel", marks=LARGE)])
def test_a_module_equals_one_process(module: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", [module])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"shardlab.{module}", run_name="__main__")
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and ": equal to one process" in printed, printed


def test_a_smaller_feed_forward_network_equals_one_process(monkeypatch: Any) -> None:
    monkeypatch.setattr(feed_forward, "SHAPE", replace(feed_forward.SHAPE, hidden=256, ffn=1024))
    monkeypatch.setattr(sys, "argv", ["tensor_parallel"])
    assert comparison.main(feed_forward.train_on_rank, "network", ["256-1024-256"]) == 0


def test_a_module_trains_on_the_ranks_of_torchrun() -> None:
    command = [sys.executable, *TORCHRUN, "--nproc-per-node=2", "-m", "shardlab.data_parallel"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and ": equal to one process" in done.stdout, done.stderr


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
