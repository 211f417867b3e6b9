"""Seventeen steps from one GPU to many, each checked on two real ranks before the next.

    python -m shardlab steps my_train.py

`my_train.py` is a copy of one_gpu.py that you change. Two processes run it as torchrun would, on
the CPU, for six steps on a little text. Hooks in torch record what each process reads, computes,
prints and writes, and compare this with what one_gpu.py does in one process. The steps are checked
in order; for the first one that is missing or wrong, the command prints what it lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardlab import ranks
from shardlab.gpt.model import GPT
from shardlab.train import one_gpu
from shardtools import options

# 47 windows: two steps of 16 an epoch; a sampler that pads to 48 windows makes three steps.
SMALL = {"steps": 6, "every": 3, "limit": 64 * 47 + 1, "sample": 2}
NEAR = 2e-4  # tolerance of numbers that are printed with four digits
SLOW = 0.4  # seconds that a checkpoint takes here, to detect ranks that do not wait for it


@dataclass
class Seen:
    """The actions of one process; its lists have an entry for each step, validation or file."""

    seeds: list[int] = field(default_factory=list)  # arguments of manual_seed
    group: int | None = None  # ranks of the group at the first forward; 0: there was none
    closed: bool = True  # no group is left at the end
    wrapper: str = ""  # "ddp" or "fsdp" at the first optimizer step
    units: int = 0  # number of FSDP2 units
    read: list[list[int]] = field(default_factory=lambda: [[]])  # windows, by their hash
    validated: list[list[int]] = field(default_factory=list)
    saved: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)  # shapes, by name
    written: float = 0.0  # time when the last file was written
    loaded: float = 0.0  # time when the best weights were loaded
    out: str = ""
    error: str = ""  # message with the script's line

    def numbers(self, word: str) -> list[float]:
        """Return the numbers that the script printed after a word, step by step."""
        return [float(x) for x in re.findall(rf"\b{word} ([\d.]+|nan|inf)", self.out)]


def observed(file: str, folder: str) -> Seen:
    """Run a script on a rank as torchrun would, and return what it did."""
    seen, out = Seen(), io.StringIO()
    arguments = [file, *(f"--{k}={v}" for k, v in SMALL.items()), f"--folder={folder}"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(mock.patch.object(sys, "argv", arguments))
        # Two ranks on the CPU, whatever this machine has.
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: False))
        for handle in _watched(seen, stack):
            stack.callback(handle.remove)
        try:
            runpy.run_path(file, run_name="__main__")
        except SystemExit as end:
            seen.error = f"SystemExit: {end.code}" if end.code else ""
        except Exception as error:
            lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
            where = f" (line {lines[-1].lineno})" if lines else ""
            seen.error = " ".join(f"{type(error).__name__}: {error}".split())[:300] + where
    seen.closed = not dist.is_initialized()
    seen.out = out.getvalue()
    return seen


def _watched(seen: Seen, stack: contextlib.ExitStack) -> Iterator[Any]:
    """Record actions from here on; yield the hooks' handles."""
    sow, save, load = torch.manual_seed, torch.save, torch.load

    def seeded(seed: int) -> Any:
        seen.seeds.append(int(seed))
        return sow(seed)

    def forward(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, DistributedDataParallel):
            seen.wrapper = seen.wrapper or "ddp"
        if not isinstance(module, GPT) or not inputs:
            return
        windows = [hash(tuple(row)) for row in inputs[0].tolist()]
        if not module.training:
            seen.validated[-1] += windows
        elif torch.is_grad_enabled():
            if seen.group is None:
                seen.group = dist.get_world_size() if dist.is_initialized() else 0
            seen.units = sum(isinstance(part, FSDPModule) for part in module.modules())
            seen.read[-1] += windows
            seen.validated.append([])

    def step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(isinstance(p, DTensor) for p in parameters):
            seen.wrapper = "fsdp"
        seen.read.append([])

    # Parameters have torch's names, since a script may pass them by name.
    def saving(obj: Any, f: Any, *more: Any, **named: Any) -> None:
        kept = obj if isinstance(obj, dict) else {}
        shapes = {
            name: () if isinstance(t, DTensor) else tuple(t.shape)
            for name, t in kept.items()
            if isinstance(t, Tensor)
        }
        time.sleep(SLOW)
        save(obj, _own(f), *more, **named)
        if (path := _path(f)) is not None:
            seen.saved[path.name], seen.written = shapes, time.monotonic()

    def loading(f: Any, *more: Any, **named: Any) -> Any:
        seen.loaded = time.monotonic()
        return load(_own(f) if seen.saved else f, *more, **named)

    for name, new in (("manual_seed", seeded), ("save", saving), ("load", loading)):
        stack.enter_context(mock.patch.object(torch, name, new))
    yield register_module_forward_pre_hook(forward)
    yield register_optimizer_step_pre_hook(step)


def _path(f: Any) -> Path | None:
    """Return the path of a file that is given by its name or open; None for a buffer in memory."""
    name = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
    return Path(name) if isinstance(name, (str, os.PathLike)) else None


def _own(f: Any) -> Any:
    """Return a path of this rank's own, since all ranks may write one file as yet."""
    rank, path = int(os.environ["RANK"]), _path(f)
    return f if rank == 0 or path is None else Path(f"{path}-of-rank-{rank}")


def _run(file: str, size: int) -> list[Seen]:
    """Run a script on `size` ranks. Raises RankError for a rank that hangs or dies."""
    # As torchrun does, open the store before the ranks start, so that nobody takes its port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    launcher |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": "0"}

    def rank(folder: str) -> Seen:
        dist.destroy_process_group()  # the script makes its own
        os.environ.update(launcher)
        return observed(file, folder)

    with tempfile.TemporaryDirectory(prefix="steps-") as folder:
        how = {"device": "cpu", "timeout": 60, "show": False, "own_processes": True}
        return ranks.run(rank, size, folder, **how)


@cache
def _one() -> Seen:
    """Return what one process does."""
    (seen,) = _run(str(Path(one_gpu.__file__)), 1)
    assert not seen.error, seen.error
    return seen


Judge = Callable[[Seen, list[Seen], str], str]  # (one process, ranks, text) -> what is wrong


def _group(one: Seen, both: list[Seen], text: str) -> str:
    if all(seen.group == len(both) for seen in both):
        return ""
    return "Each process trains alone. `dist.init_process_group()` comes before the call of `main`."


def _closed(one: Seen, both: list[Seen], text: str) -> str:
    if all(seen.closed or seen.error for seen in both):
        return ""
    return "The group is left open. `dist.destroy_process_group()` is the last line, after `main`."


def _device(one: Seen, both: list[Seen], text: str) -> str:
    if "LOCAL_RANK" in text:
        return ""
    return (
        "All ranks of a machine would compute on its first GPU. The number of a rank's own is in "
        "`os.environ['LOCAL_RANK']` (here there is no GPU: this step is judged by your text alone)."
    )


def _seeds(one: Seen, both: list[Seen], text: str) -> str:
    first, last = [s.seeds[0] for s in both], [s.seeds[-1] for s in both]
    if first != [one.seeds[0]] * len(both):
        return (
            f"The ranks make their weights with the seeds {first}, one process with "
            f"{one.seeds[0]}. DDP would hide that, FSDP2 does not: one seed before the model."
        )
    if len(set(last)) < len(both):
        return (
            "All ranks keep the seed of the weights, and would drop the same units. Between the "
            "model and all else: `torch.manual_seed(seed + 1 + rank)`."
        )
    return ""


def _wrapper(one: Seen, both: list[Seen], text: str) -> str:
    if all(seen.wrapper for seen in both):
        return ""
    return (
        "Nothing averages the gradients: each rank trains a model of its own. "
        "`DistributedDataParallel(model)`, on its device already."
    )


def _together(both: list[Seen], step: int) -> list[int]:
    return sorted(window for seen in both for window in seen.read[step])


def _sampler(one: Seen, both: list[Seen], text: str) -> str:
    first = _together(both, 0)
    if len(set(first)) == len(first):
        return ""
    same = len({tuple(sorted(seen.read[0])) for seen in both}) == 1
    return (
        f"In step 1 the ranks read {'the same windows' if same else 'some windows twice'}. A "
        "`DistributedSampler` with the number of ranks, the rank and the seed deals one order to "
        "all; it takes the place of the old sampler."
    )


def _share(one: Seen, both: list[Seen], text: str) -> str:
    found, due = len(_together(both, 0)), len(one.read[0])
    if found == due:
        return ""
    return (
        f"A step reads {found} windows over all ranks, and {due} in one process: a loader's batch "
        "is that of its rank, `batch // world`."
    )


def _dropped(one: Seen, both: list[Seen], text: str) -> str:
    epoch = {window for step in range(3) for window in _together(both, step)}
    if len(epoch) < 47 or sorted(one.read[2]) == _together(both, 2):
        return ""
    return (
        "An epoch has a third step, which one process does not have: the sampler has filled up 47 "
        "windows to 48. Sampler and loader both want `drop_last=True`."
    )


def _epochs(one: Seen, both: list[Seen], text: str) -> str:
    if _together(both, 2) == _together(both, 0):
        return (
            "Epoch 2 has the order of epoch 1. `sampler.set_epoch(epoch)` comes before each "
            "epoch's loop."
        )
    for step in range(SMALL["steps"]):
        if _together(both, step) != sorted(one.read[step]):
            return (
                f"Step {step + 1} reads other windows than one process. The sampler wants the "
                "script's seed, and the epochs count from 0."
            )
    return ""


def _near(found: list[float], due: list[float]) -> bool:
    return len(found) == len(due) and all(
        abs(a - b) < NEAR for a, b in zip(found, due, strict=True)
    )


def _loss(one: Seen, both: list[Seen], text: str) -> str:
    found, due = both[0].numbers("loss"), one.numbers("loss")
    if _near(found, due):
        return ""
    shown = f"{found[0]:.4f}" if found else "nothing"
    if _near([x / len(both) for x in found], due):
        return f"Rank 0 prints the ranks' sum, {shown}: divide it by the ranks."
    return (
        f"Rank 0 prints {shown} for step {SMALL['every']}, and the batch's loss is {due[0]:.4f}. A "
        "rank's own is the loss of its own share: average it over the ranks, without its graph."
    )


def _validates(one: Seen, both: list[Seen], text: str) -> str:
    shares = [set(seen.validated[2]) for seen in both]
    if len(shares[0] & shares[1]) <= 1:  # the sampler repeats one window as padding
        return ""
    return (
        "Each rank validates all windows. `evaluate` gets a `DistributedSampler` of its own, with "
        "`shuffle=False`."
    )


def _once(one: Seen, both: list[Seen], text: str) -> str:
    found, due = both[0].numbers("validation"), one.numbers("validation")
    if _near(found, due):
        return ""
    if len(shares := {tuple(seen.numbers("validation")) for seen in both} - {()}) > 1:
        return (
            f"Ranks print {sorted(x[0] for x in shares)} as the validation loss: each that of its "
            "share. Add up losses and tokens over the ranks, then divide."
        )
    shown = f"{found[0]:.4f}" if found else "nothing"
    return (
        f"The validation loss is {shown}, and {due[0]:.4f} in one process. The sampler repeats "
        "a window, so that all ranks have as many: give it the targets -100, count the others, and "
        "divide the sum of losses by the sum of counts."
    )


def _prints(one: Seen, both: list[Seen], text: str) -> str:
    lines = [line for line in both[1].out.splitlines() if not line.startswith("rank ")]
    if not lines:
        return ""
    return f"Rank 1 prints, too: {lines[0]!r}. One rank is enough; who it is, each may say once."


def _writes(one: Seen, both: list[Seen], text: str) -> str:
    if both[1].saved:
        return f"Rank 1 writes {', '.join(both[1].saved)}, too, to the path of rank 0's."
    names = {name for kept in both[0].saved.values() for name in kept}
    if any(name.startswith("module.") for name in names):
        return (
            "The names in the files begin with `module.`, which fit no plain model: "
            "`model.module.state_dict()`, and the same to load."
        )
    if both[0].wrapper == "ddp" and both[0].saved != one.saved:
        return "What rank 0 writes is not what one process writes: other files, names or shapes."
    return ""


def _waits(one: Seen, both: list[Seen], text: str) -> str:
    if both[1].loaded > both[0].written:
        return ""
    return (
        "Rank 1 asks for `best.pt` while rank 0 still writes. `dist.barrier()` before it is read."
    )


def _shards(one: Seen, both: list[Seen], text: str) -> str:
    if any(seen.wrapper != "fsdp" for seen in both):
        return (
            "DDP keeps all on each rank. In its place `fully_shard(part, mesh=mesh)`, for each "
            "block and then for the model; `init_device_mesh` makes the mesh."
        )
    if both[0].units < 2:
        return "The model is one unit, and is gathered at once: first each block, then the model."
    return ""


def _whole(one: Seen, both: list[Seen], text: str) -> str:
    if both[0].saved != one.saved or any(seen.error for seen in both):
        return (
            "The files do not have what one process writes: a rank's state dict has shards. "
            "`get_model_state_dict` with `full_state_dict=True` gathers them, called by all ranks; "
            "rank 0 writes, and `set_model_state_dict` gives each rank its shards back."
        )
    return ""


STEPS: list[tuple[str, Judge]] = [
    ("a process group", _group),
    ("its end", _closed),
    ("a device for each rank", _device),
    ("seeds", _seeds),
    ("DDP", _wrapper),
    ("a sampler", _sampler),
    ("a share of the batch", _share),
    ("the rest dropped", _dropped),
    ("an order for each epoch", _epochs),
    ("the loss of all ranks", _loss),
    ("validation shared", _validates),
    ("each window counted once", _once),
    ("one rank prints", _prints),
    ("one rank writes", _writes),
    ("the others wait", _waits),
    ("FSDP2", _shards),
    ("whole weights in the files", _whole),
]


DDP, FSDP2 = 15, 17  # number of steps to a complete DDP or FSDP2 script


def progress(file: str | Path, upto: int = FSDP2) -> tuple[int, str]:
    """Return how many steps a script has made, and what is wrong with the next ("" after `upto`).

    Raises ValueError for a file that cannot be read.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"file={str(file)!r}: allowed are scripts, as my_train.py")
    text, one = path.read_text("utf-8"), _one()
    try:
        both = _run(str(path.resolve()), 2)
    except ranks.RankError as error:
        return 0, f"On two ranks the script does not end: {error}"
    ended = next((f" It ended with {s.error}." for s in both if s.error), "")
    for done, (_, judge) in enumerate(STEPS[:upto]):
        try:
            wrong = judge(one, both, text)
        except (IndexError, ValueError):  # the script ended before there was anything to judge
            wrong = "The script does not come so far."
        if wrong:
            return done, wrong + ended
    return upto - bool(ended), ended.strip()


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `steps` to the command line."""
    parser = options.command(commands, "steps", __doc__)
    parser.add_argument("file", help="your copy of code/shardlab/train/one_gpu.py")
    parser.set_defaults(command=_main)


def _main(chosen: argparse.Namespace) -> int:
    done, wrong = progress(chosen.file)
    for number, (title, _) in enumerate(STEPS[:done], 1):
        print(f"✓ {number:2} {title}")
    if wrong:
        title = STEPS[min(done, len(STEPS) - 1)][0]
        print(f"✗ {done + 1:2} {title}: {wrong}")
    return 1 if wrong else 0
