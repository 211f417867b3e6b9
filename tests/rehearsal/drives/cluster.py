"""The doctor: devices told apart, links by nccl's rules, times that are the GPU's."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile

import torch

from shardlab import ranks
from shardtools.__main__ import main
from shardtools.cluster.doctor import examine, pairs

from .common import on, on_caller, world


class _Alone:
    """A meeting of those who are in a group anyway."""

    def set_step(self, words, waiting=False): ...


@on(1, 2, 4, daily=(2, 4))
def links():
    """Every pair meets once, in rounds that nccl can connect."""
    group, rank, size = world()
    found = pairs.measure(_Alone(), group, ranks.device(), ["here"] * size)
    assert sorted(link["pair"][1] for link in found) == list(range(rank + 1, size))
    assert all(link["latency"] > 0 and link["bandwidth"] > 0 for link in found)
    clock = pairs.clocks(_Alone(), group)
    assert abs(clock["ahead"]) < 5


@on(1, 2)
def one_rank():
    """What a rank finds of its own GPU."""
    device = ranks.device()
    assert examine.speed(device, 1)["flops"] > 0
    found = examine.gpu(device)
    assert found["id"].endswith(str(device.index)) and 0 < found["free"] <= found["total"]
    said, amd = examine.versions(device), os.environ.get("REHEARSE_MAKER") == "amd"
    assert {"hip" if amd else "cuda", "nccl"} <= said.keys()
    assert ("AMD" in found["name"]) is amd and ("cuda" in said) is not amd


@on_caller
@on(1, 2, 4, daily=(1, 2))
def the_command():
    """Two ranks that share a GPU are found; ranks with one of their own have nothing bad."""
    shown = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(shown):
        main(["doctor", "--ranks", "2", "--json", "--folder", folder, "--timeout", "20"])
    _judged(json.loads(shown.getvalue()))


def _judged(found):
    states = {row["check"]: row["state"] for row in found["rows"]}
    shared = torch.cuda.device_count() == 1
    assert states["devices"] == ("bad" if shared else "good"), found["rows"]
    assert states["answers"] == "good", found["rows"]
    assert [link["pair"] for facts in found["facts"] for link in facts["pairs"]] == [[0, 1]]
    # Speeds are those of the host that pretends; what it says of them is no finding.
    others = {k for k, v in states.items() if v == "bad"} - {"devices", "speed", "network"}
    assert not others, found["rows"]
