"""Check a training script against the seventeen steps from one GPU to many.

    python -m shardlab steps my_train.py

`my_train.py` is your modified copy of one_gpu.py. Two processes run it as torchrun would, on the
CPU, for six training steps on a short text. Hooks in torch record which data each process reads,
and what it computes, prints and writes; the command compares that with one_gpu.py in one process.
The steps are checked in order, and the command says how to make the first that is missing.
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
SCRIPT_OPTIONS = {"steps": 6, "every": 3, "limit": 64 * 47 + 1, "sample": 2}
PRINT_TOLERANCE = 2e-4  # tolerance of numbers that are printed with four digits
SAVE_SECONDS = 0.4  # seconds that a checkpoint takes here, to detect ranks that do not wait for it


@dataclass
class RunRecord:
    """The recorded actions of one process; lists have an entry for each step or validation."""

    seeds: list[int] = field(default_factory=list)  # arguments of manual_seed
    group_size: int | None = None  # world size at the first forward; 0: no process group
    group_closed: bool = True  # the process group was destroyed at the end
    wrapper: str = ""  # "ddp" or "fsdp" at the first optimizer step
    fsdp_units: int = 0
    read_windows: list[list[int]] = field(default_factory=lambda: [[]])  # hashes of the windows
    validated_windows: list[list[int]] = field(default_factory=list)
    saved_shapes: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)  # by file
    last_save_time: float = 0.0  # time when the last file was written
    best_load_time: float = 0.0  # time when the best weights were loaded
    stdout: str = ""
    error: str = ""  # message with the script's line

    def parse_numbers(self, word: str) -> list[float]:
        """Return the numbers that the script printed after a word."""
        return [float(x) for x in re.findall(rf"\b{word} ([\d.]+|nan|inf)", self.stdout)]


def observe_script(file: str, folder: str) -> RunRecord:
    """Run a script on this rank as torchrun would, and record its actions."""
    seen, out = RunRecord(), io.StringIO()
    arguments = [file, *(f"--{k}={v}" for k, v in SCRIPT_OPTIONS.items()), f"--folder={folder}"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(mock.patch.object(sys, "argv", arguments))
        # Two ranks on the CPU, whatever this machine has.
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: False))
        for handle in _install_hooks(seen, stack):
            stack.callback(handle.remove)
        try:
            runpy.run_path(file, run_name="__main__")
        except SystemExit as end:
            seen.error = f"SystemExit: {end.code}" if end.code else ""
        except Exception as error:
            lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
            where = f" (line {lines[-1].lineno})" if lines else ""
            seen.error = " ".join(f"{type(error).__name__}: {error}".split())[:300] + where
    seen.group_closed = not dist.is_initialized()
    seen.stdout = out.getvalue()
    return seen


def _install_hooks(seen: RunRecord, stack: contextlib.ExitStack) -> Iterator[Any]:
    manual_seed, save, load = torch.manual_seed, torch.save, torch.load

    def record_seed(seed: int) -> Any:
        seen.seeds.append(int(seed))
        return manual_seed(seed)

    def record_forward(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, DistributedDataParallel):
            seen.wrapper = seen.wrapper or "ddp"
        if not isinstance(module, GPT) or not inputs:
            return
        windows = [hash(tuple(row)) for row in inputs[0].tolist()]
        if not module.training:
            seen.validated_windows[-1] += windows
        elif torch.is_grad_enabled():
            if seen.group_size is None:
                seen.group_size = dist.get_world_size() if dist.is_initialized() else 0
            seen.fsdp_units = sum(isinstance(part, FSDPModule) for part in module.modules())
            seen.read_windows[-1] += windows
            seen.validated_windows.append([])

    def record_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(isinstance(p, DTensor) for p in parameters):
            seen.wrapper = "fsdp"
        seen.read_windows.append([])

    # A script may pass these arguments by torch's names.
    def record_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        tensors = obj if isinstance(obj, dict) else {}
        shapes = {
            name: () if isinstance(t, DTensor) else tuple(t.shape)
            for name, t in tensors.items()
            if isinstance(t, Tensor)
        }
        time.sleep(SAVE_SECONDS)
        save(obj, _get_rank_path(f), *args, **kwargs)
        if (path := _get_path(f)) is not None:
            seen.saved_shapes[path.name], seen.last_save_time = shapes, time.monotonic()

    def record_load(f: Any, *args: Any, **kwargs: Any) -> Any:
        seen.best_load_time = time.monotonic()
        return load(_get_rank_path(f) if seen.saved_shapes else f, *args, **kwargs)

    for name, new in (("manual_seed", record_seed), ("save", record_save), ("load", record_load)):
        stack.enter_context(mock.patch.object(torch, name, new))
    yield register_module_forward_pre_hook(record_forward)
    yield register_optimizer_step_pre_hook(record_step)


def _get_path(f: Any) -> Path | None:
    """Return the path of a file, given by its name or open; None for a buffer in memory."""
    name = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
    return Path(name) if isinstance(name, (str, os.PathLike)) else None


def _get_rank_path(f: Any) -> Any:
    rank, path = int(os.environ["RANK"]), _get_path(f)
    return f if rank == 0 or path is None else Path(f"{path}-of-rank-{rank}")


def _run_script(file: str, size: int) -> list[RunRecord]:
    """Run a script on `size` ranks. Raises RankError for a rank that hangs or dies."""
    # As torchrun does, open the store before the ranks start, so that nobody takes its port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": "0"}

    def run_on_rank(folder: str) -> RunRecord:
        dist.destroy_process_group()  # the script makes its own
        os.environ.update(environment)
        return observe_script(file, folder)

    with tempfile.TemporaryDirectory(prefix="steps-") as folder:
        options = {"device": "cpu", "timeout": 60, "show": False, "own_processes": True}
        return ranks.run(run_on_rank, size, folder, **options)


@cache
def _run_reference() -> RunRecord:
    (seen,) = _run_script(str(Path(one_gpu.__file__)), 1)
    assert not seen.error, seen.error
    return seen


# Arguments: the record of one process, the records of both ranks, and the source. Returns an error.
Check = Callable[[RunRecord, list[RunRecord], str], str]


def _check_group(reference: RunRecord, runs: list[RunRecord], source: str) -> str:
    if all(seen.group_size == len(runs) for seen in runs):
        return ""
    return "Each process trains alone. Call `dist.init_process_group()` before `main`."


def _check_group_closed(reference: RunRecord, runs: list[RunRecord], source: str) -> str:
    if all(seen.group_closed or seen.error for seen in runs):
        return ""
    return "The process group is left open. Call `dist.destroy_process_group()` after `main`."


def _check_device(reference: RunRecord, runs: list[RunRecord], source: str) -> str:
    if "LOCAL_RANK" in source:
        return ""
    return (
        "All ranks of a machine would compute on its first GPU. Each rank's GPU number is in "
        "`os.environ['LOCAL_RANK']` (without a GPU here, only your source is checked)."
    )


def _check_seeds(reference: RunRecord, runs: list[RunRecord], source: str) -> str:
    first, last = [s.seeds[0] for s in runs], [s.seeds[-1] for s in runs]
    if first != [reference.seeds[0]] * len(runs):
        return (
            f"The ranks initialize the weights with the seeds {first}, one process with "
            f"{reference.seeds[0]}. DDP hides it, FSDP2 does not: use one seed before the model."
        )
    if len(set(last)) < len(runs):
        return (
            "All ranks keep the seed of the weights, so dropout would drop the same units on all. "
            "After the model is made, call `torch.manual_seed(seed + 1 + rank)`."
        )
    return ""


def _check_wrapper(reference: RunRecord, runs: list[RunRecord], source: str) -> str:
    if all(seen.wrapper for seen in runs):
        return ""
    return (
        "Nothing averages the gradients: each rank trains its own model. "
        "Wrap it in `DistributedDataParallel(model)`, after it is on its device."
    )


def _collect_windows(runs: list[RunRecord], step: int) -> list[int]:
    return sorted(window for seen in runs for window in seen.read_windows[step])


def _check_sampler(reference: RunRecord, runs: list[RunRecord], source: str) -> str:
    first = _collect_windows(runs, 0)
    if len(set(first)) == len(first):
        return ""
    same = len({tuple(sorted(seen.read_windows[0])) for seen in runs}) == 1
    return (
        f"In step 1 the ranks read {'the same windows' if same else 'some windows twice'}. Replace "
        "the sampler by a `DistributedSampler` with the number of ranks, the rank and the seed."
    )


def _check_batch_share(reference: RunRecord, runs: list[RunRecord], source: str) -> str:
    found, expected = len(_collect_windows(runs, 0)), len(reference.read_windows[0])
    if found == expected:
        return ""
    return (
        f"A step reads {found} windows over all ranks, and {expected} in one process: the loader's "
        "batch size must be the rank's share, `batch // world`."
    )


def _check_drop_last(reference: RunRecord, runs: list[RunRecord], source: str) -> str:
    epoch = {window for step in range(3) for window in _collect_windows(runs, step)}
    if len(epoch) < 47 or sorted(reference.read_windows[2]) == _collect_windows(runs, 2):
        return ""
    return (
        "An epoch has a third step, which one process does not have: the sampler has filled up 47 "
        "windows to 48. Pass `drop_last=True` to both sampler and loader."
    )


def _check_set_epoch(reference: RunRecord, runs: list[RunRecord], source: str) -> str:
    if _collect_windows(runs, 2) == _collect_windows(runs, 0):
        return (
            "Epoch 2 has the order of epoch 1. Call `sampler.set_epoch(epoch)` before the loop of "
            "each epoch."
        )
    for step in range(SCRIPT_OPTIONS["steps"]):
        if _collect_windows(runs, step) != sorted(reference.read_windows[step]):
            return (
                f"Step {step + 1} reads other windows than one process. Give the sampler the "
                "script's seed, and count epochs from 0."
            )
    return ""


def _is_close(found: list[float], expected: list[float]) -> bool:
    return len(found) == len(expected) and all(
        abs(a - b) < PRINT_TOLERANCE for a, b in zip(found, expected, strict=True)
    )


def _check_mean_loss(reference: RunRecord, runs: list[RunRecord], source: str) -> str:
    found, expected = runs[0].parse_numbers("loss"), reference.parse_numbers("loss")
    if _is_close(found, expected):
        return ""
    shown = f"{found[0]:.4f}" if found else "nothing"
    if _is_close([x / len(runs) for x in found], expected):
        return f"Rank 0 prints the ranks' sum, {shown}: divide it by the number of ranks."
    return (
        f"Rank 0 prints {shown} for step {SCRIPT_OPTIONS['every']}; the batch's loss is "
        f"{expected[0]:.4f}. A rank's loss is the loss of its own share: average the detached "
        "losses over the ranks."
    )


def _check_validation_split(reference: RunRecord, runs: list[RunRecord], source: str) -> str:
    shares = [set(seen.validated_windows[2]) for seen in runs]
    if len(shares[0] & shares[1]) <= 1:  # the sampler repeats one window as padding
        return ""
    return (
        "Each rank validates all windows. Give `evaluate` its own `DistributedSampler`, with "
        "`shuffle=False`."
    )


def _check_validation_loss(reference: RunRecord, runs: list[RunRecord], source: str) -> str:
    found, expected = runs[0].parse_numbers("validation"), reference.parse_numbers("validation")
    if _is_close(found, expected):
        return ""
    if len(shares := {tuple(seen.parse_numbers("validation")) for seen in runs} - {()}) > 1:
        return (
            f"Ranks print {sorted(x[0] for x in shares)} as the validation loss: each prints the "
            "loss of its share. Add up losses and tokens over the ranks, then divide."
        )
    shown = f"{found[0]:.4f}" if found else "nothing"
    return (
        f"The validation loss is {shown}, and {expected[0]:.4f} in one process. The sampler "
        "repeats a window, so that all ranks have equally many: give the copy the targets -100, "
        "count the other tokens, and divide the sum of losses by the sum of counts."
    )


def _check_printing(reference: RunRecord, runs: list[RunRecord], source: str) -> str:
    lines = [line for line in runs[1].stdout.splitlines() if not line.startswith("rank ")]
    if not lines:
        return ""
    return f"Rank 1 prints, too: {lines[0]!r}. Print on rank 0 only (each may print its rank once)."


def _check_saving(reference: RunRecord, runs: list[RunRecord], source: str) -> str:
    if runs[1].saved_shapes:
        return f"Rank 1 writes {', '.join(runs[1].saved_shapes)}, too, to the path of rank 0."
    names = {name for kept in runs[0].saved_shapes.values() for name in kept}
    if any(name.startswith("module.") for name in names):
        return (
            "The names in the files begin with `module.`, which a plain model cannot load: "
            "save `model.module.state_dict()`, and load into `model.module`."
        )
    if runs[0].wrapper == "ddp" and runs[0].saved_shapes != reference.saved_shapes:
        return "Rank 0 writes other files, names or shapes than one process."
    return ""


def _check_barrier(reference: RunRecord, runs: list[RunRecord], source: str) -> str:
    if runs[1].best_load_time > runs[0].last_save_time:
        return ""
    return "Rank 1 reads `best.pt` while rank 0 still writes it. Call `dist.barrier()` before."


def _check_fsdp(reference: RunRecord, runs: list[RunRecord], source: str) -> str:
    if any(seen.wrapper != "fsdp" for seen in runs):
        return (
            "DDP keeps all on each rank. Instead call `fully_shard(part, mesh=mesh)` for each "
            "block and then for the model; `init_device_mesh` makes the mesh."
        )
    if runs[0].fsdp_units < 2:
        return "The model is one unit, gathered at once: shard each block first, then the model."
    return ""


def _check_full_state_dict(reference: RunRecord, runs: list[RunRecord], source: str) -> str:
    if runs[0].saved_shapes != reference.saved_shapes or any(seen.error for seen in runs):
        return (
            "The files differ from those of one process: a rank's state dict has shards. Call "
            "`get_model_state_dict` with `full_state_dict=True` on all ranks, write on rank 0, and "
            "load each rank's shards with `set_model_state_dict`."
        )
    return ""


STEPS: list[tuple[str, Check]] = [
    ("a process group", _check_group),
    ("the end of the group", _check_group_closed),
    ("a device for each rank", _check_device),
    ("seeds", _check_seeds),
    ("DDP", _check_wrapper),
    ("a sampler", _check_sampler),
    ("a share of the batch", _check_batch_share),
    ("drop_last", _check_drop_last),
    ("an order for each epoch", _check_set_epoch),
    ("the loss of all ranks", _check_mean_loss),
    ("validation on all ranks", _check_validation_split),
    ("each window counted once", _check_validation_loss),
    ("one rank prints", _check_printing),
    ("one rank writes", _check_saving),
    ("the others wait", _check_barrier),
    ("FSDP2", _check_fsdp),
    ("whole weights in the files", _check_full_state_dict),
]


DDP_STEPS, FSDP2_STEPS = 15, 17  # steps to a complete script


def check_script(file: str | Path, max_steps: int = FSDP2_STEPS) -> tuple[int, str]:
    """Return how many steps a script has made, and the error in the next ("" after `max_steps`).

    Raises ValueError for a file that cannot be read.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"file={str(file)!r}: must be a script, such as my_train.py")
    source, reference = path.read_text("utf-8"), _run_reference()
    try:
        runs = _run_script(str(path.resolve()), 2)
    except ranks.RankError as error:
        return 0, f"The script does not end on two ranks: {error}"
    ended = next((f" It ended with {s.error}." for s in runs if s.error), "")
    for done, (_, check) in enumerate(STEPS[:max_steps]):
        try:
            wrong = check(reference, runs, source)
        except (IndexError, ValueError):  # the script ended before there was anything to judge
            wrong = "The script ends before this step."
        if wrong:
            return done, wrong + ended
    return max_steps - bool(ended), ended.strip()


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `steps` to the command line."""
    parser = options.add_parser(commands, "steps", __doc__)
    parser.add_argument("file", help="your copy of code/shardlab/train/one_gpu.py")
    parser.set_defaults(command=_main)


def _main(args: argparse.Namespace) -> int:
    done, wrong = check_script(args.file)
    print(f"{done} of {len(STEPS)} steps are made")
    for number, (title, _) in enumerate(STEPS[:done], 1):
        print(f"✓ {number:2} {title}")
    if wrong:
        title = STEPS[min(done, len(STEPS) - 1)][0]
        print(f"✗ {done + 1:2} {title}: {wrong}")
    return int(bool(wrong))
