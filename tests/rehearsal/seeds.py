"""The test of the test: faults, put one at a time into a copy of the course's code.

    python -m rehearsal.seeds [name ...]      prints a line of JSON for each: its name, the error

Every one is typical of code that has never been on a GPU, or was in this course. The drive that is
named has to find it, for the right reason: `sign` is in its error. Honest code passes the same
drives (`test_rehearsal`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CODE = Path(__file__).parents[2] / "code"


@dataclass(frozen=True)
class Seed:
    """Fault: in `file` of code/, `seeded` replaces `honest`."""

    name: str
    file: str
    honest: str
    seeded: str
    drive: str
    sign: str
    gpus: int = 2


def format_prefix(kind: str) -> str:
    """Return the beginning of a finding of this kind."""
    return f"[rehearsal: {kind}]"


SEEDS = [
    Seed(
        "a mask on the CPU",
        "shardlab/context_parallel/kernel.py",
        "dtype=torch.bool, device=q_BAQD.device).triu(1)",
        "dtype=torch.bool).triu(1)",
        "context_parallel.block",
        format_prefix("devices"),
    ),
    Seed(
        "one bucket is not waited for",
        "shardlab/data_parallel/core.py",
        "for bucket in self.buckets:\n            bucket.wait()\n        self._reset",
        "for bucket in self.buckets[:-1]:\n            bucket.wait()\n        self._reset",
        "contract.data",
        format_prefix("race"),
    ),
    Seed(
        "the host's generator",
        "shardlab/measure/count/speed.py",
        "torch.randn(side, side, device=device).to(dtype)",
        "torch.randn(side, side, device=device, generator=torch.Generator()).to(dtype)",
        "memory.rates",
        format_prefix("generator"),
    ),
    Seed(
        "a device for each rank, whether there is one or not",
        "shardlab/ranks/worker.py",
        "gpu.get_device_module().set_device(local_rank % gpu.get_device_module().device_count())",
        "gpu.get_device_module().set_device(local_rank)",
        "ranks.a_device_for_each",
        format_prefix("ordinal"),
        gpus=1,
    ),
    Seed(
        "a copy to the host that is read too early",
        "shardlab/ranks/p2p.py",
        "return tensor.cpu() if _needs_host_copy(tensor, group) else tensor",
        'return tensor.to("cpu", non_blocking=True) if _needs_host_copy(tensor, group) else tensor',
        "ranks.messages",
        format_prefix("race"),
        gpus=1,
    ),
    Seed(
        "a file that wants a GPU",
        "shardlab/checkpoint/export.py",
        "_write_atomically(path, {name: tensor.cpu() for name, tensor in full.items()})",
        "_write_atomically(path, dict(full))",
        "checkpoint.weights_for_a_machine_without_a_gpu",
        "the file's weights are on",
    ),
    Seed(
        "a list is copied to the GPU at each bucket",
        "shardlab/zero/flat.py",
        "torch.ones(len(self.views), dtype=torch.uint8, device=self.flat.device)",
        "torch.tensor([1] * len(self.views), dtype=torch.uint8, device=self.flat.device)",
        "contract.zero",
        "the host waits at",
    ),
    Seed(
        "under torchrun, outside of a run, cuda:0 for all",
        "shardlab/ranks/__init__.py",
        "read_local_rank(os.environ) % gpus)",
        "read_local_rank(os.environ) % gpus if inside is not None else 0)",
        "ranks.under_torchrun",
        "no line 'process 1 cuda:1'",
    ),
    Seed(
        "tied weights: both ends receive first, in different groups",
        "shardlab/pipeline/core.py",
        "        if peer < self.stage:\n            calls.reverse()",
        "        calls.reverse()",
        "contract.pipeline",
        format_prefix("connection"),
        gpus=4,
    ),
    Seed(
        "a ring in which all send first",
        "shardlab/ranks/p2p.py",
        "dist.batch_isend_irecv(operations) if operations else []",
        "[one.op(one.tensor, one.peer, one.group) for one in reversed(operations)]",
        "collectives.shards",
        format_prefix("connection"),
        gpus=4,
    ),
    Seed(
        "links whose two ends both send first",
        "shardtools/cluster/doctor/pairs.py",
        "ways = [ranks.isend, ranks.irecv] if first else [ranks.irecv, ranks.isend]",
        "ways = [ranks.isend, ranks.irecv]",
        "cluster.check_links",
        format_prefix("connection"),
    ),
    Seed(
        "a link's time that is taken while it works",
        "shardtools/cluster/doctor/pairs.py",
        "return (read_clock(device) - begin) / (2 * times)",
        "return (read_clock(torch.device('cpu')) - begin) / (2 * times)",
        "cluster.check_links",
        format_prefix("clock"),
    ),
]


def _copy(seed: Seed, folder: str) -> None:
    for name in ("shardlab", "shardtools", "shardcourse"):
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CODE / name, f"{folder}/{name}", ignore=left_out)
    path = Path(folder, seed.file)
    text = path.read_text("utf-8")
    assert seed.honest in text, f"{seed.file} does not hold {seed.honest!r}: mend the table"
    path.write_text(text.replace(seed.honest, seed.seeded), "utf-8")


def _try(seed: Seed, folder: str) -> str:
    """Run the drive on the copy, in a fork that has imported torch, and not yet shardlab."""
    from rehearsal import drives, machine

    sys.path.insert(0, folder)
    paths = [str(Path(__file__).parent / "site"), folder]
    os.environ.update(PYTHONPATH=os.pathsep.join(paths), REHEARSE=str(seed.gpus))
    machine.HERE.gpus, machine.HERE.patience = seed.gpus, 4.0
    try:
        _copy(seed, folder)
        topic = seed.drive.partition(".")[0]
        return drives.result(drives.drives(topic)[seed.drive], seed.gpus)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Try all seeds, or the named ones, one after another."""
    import torch  # noqa: F401 - the rehearsal comes with it, and every fork has both

    for seed in SEEDS:
        if sys.argv[1:] and seed.name not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.flush()
            if not (pid := os.fork()):
                print(
                    json.dumps({"name": seed.name, "gpus": seed.gpus, "error": _try(seed, folder)}),
                    flush=True,
                )
                os._exit(0)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
