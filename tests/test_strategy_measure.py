"""Rates of this machine: measured in seconds, written to a file, and usable for a plan."""

import json
import time
from pathlib import Path

import pytest
import torch
from commands import run_main
from timing import timing_claims

from shardlab.common.machines import MACHINES, find_machine
from shardlab.common.shapes import PRESETS
from shardlab.gpt.model import GPT, loss
from shardlab.measure.count import speed
from shardtools import strategy
from shardtools.strategy import PROFILES, Layout
from shardtools.strategy.rates import load_rates, read_rates


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA L4", "l4"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GH200 480GB", "gh200"),  # the memory of its CPU
        ("h100-80", "h100"),
        ("rtx4090", "rtx-4090"),
        ("Tesla V100-SXM2-16GB", None),  # half of the memory that the table has
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),  # a MIG slice
        ("", None),
    ],
)
def test_driver_names_map_to_machines(name: str, key: str | None) -> None:
    assert find_machine(name) is (MACHINES[key] if key else None)


def step_seconds(config, batch: int) -> float:
    """Return the seconds of a training step in one process and one thread; the best of five."""
    model = GPT(config)
    adam = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(config.vocab, (batch, config.seq))

    def run_step() -> None:
        loss(model(tokens), tokens).backward()
        adam.step()
        adam.zero_grad()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return speed.measure_seconds(run_step, torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.alone
@pytest.mark.skipif(torch.cuda.is_available(), reason="here the CPU's rates are asked")
def test_rates_of_this_machine_predict_a_step_on_it(capsys, tmp_path: Path) -> None:
    """Within a factor of 2.5, with five tries: two shared cores are never quiet."""
    path = tmp_path / "here.json"
    config, apart = PRESETS["micro"], []
    for _ in range(5):
        begin = time.perf_counter()
        status, out, err = run_main(capsys, "strategy", "fit", "--rates", str(path))
        assert status == 0 and not err and "measured on this CPU" in out
        assert time.perf_counter() - begin < 60
        rates = read_rates(path)
        assert set(rates) == set(load_rates("course")) and rates.machine.name == "CPU"
        layout = Layout(micro_batch=8)
        found = strategy.predict(config, rates.machine, layout, PROFILES["course"], rates)
        apart.append(found.seconds.total / step_seconds(config, 8))
        if 0.4 < apart[-1] < 2.5:
            break
    else:
        with timing_claims():
            raise AssertionError(f"predicted over measured: {apart}")
    status, out, _ = run_main(
        capsys, "strategy", "plan", "--model", "micro", "--rates", str(path), "--gpus", "1",
        "--batch", "8", "--json",
    )  # fmt: skip
    assert status == 0 and json.loads(out)["best"][0]["layout"] == "d 1"
