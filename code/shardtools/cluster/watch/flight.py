"""The flight recorder: which collectives every rank has called, from which line, and when.

    from shardtools.cluster.watch import flight
    watchdog = flight.Watchdog("runs/one/flight", limit=120)  # on every rank, before the loop
    watchdog.beat()                                           # after every step

torch records each collective of a process in memory, the last 2,000 (TORCH_FR_BUFFER_SIZE), with
gloo as with NCCL. NCCL's watchdog writes the record to a file when a collective takes too long;
gloo has no watchdog, so a thread does it here: the stuck main thread has released the GIL.
Each rank writes `trace_<rank>`, which `torchfrtrace FOLDER -p trace_` reads, and so does `read`.

A call is recorded when the *host* queues it. With gloo that is when the rank enters the call; with
NCCL the host runs ahead, and the GPU's progress is in the states, and in the durations that
TORCH_NCCL_ENABLE_TIMING=1 adds. Without it no call is ever "started".

gloo's records lack groups (`pg_config`, without which torchfrtrace ends in a KeyError in torch
2.13: `record` adds them), states of calls (the group's counters give them), and send and recv.
"""

from __future__ import annotations

import pickle
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardlab.common.arguments import check_number

PREFIX = "trace_"
# Prefixes of the watchdog's files, and of torch's own in ~/.cache/torch (2.13, and before).
PREFIXES = (PREFIX, "comm_lib_trace_rank_", "nccl_trace_rank_")
# Frames of libraries, including this course's, on any machine.
_LIBRARY = re.compile(
    r"/(site|dist)-packages/|/lib/python3|/torch/|/shard(lab|tools|course)/(?!cluster/captured/)|^<|^\?\?"
)


@dataclass(frozen=True)
class Call:
    """A collective, as one rank called it."""

    rank: int
    group: str  # the group's description, if any, and its name
    members: tuple[int, ...]  # ranks of the group
    number: int  # the collective's number in its group, from 1; equal on all ranks if all is well
    op: str  # all_reduce, all_gather, …
    sizes: tuple[tuple[int, ...], ...]  # shapes of the input tensors
    dtype: str
    line: int  # line of the script, even if a library made the call
    where: str  # function and file of that line
    created: float  # when the host queued it: seconds since 1970, by this machine's clock
    limit: float  # seconds after which its group gives up
    waiting: bool  # not finished when the record was taken
    duration: float | None = None  # seconds on the GPU, from this rank's arrival to the end

    def __str__(self) -> str:
        shapes = " ".join("x".join(map(str, shape)) or "scalar" for shape in self.sizes)
        what = f"{self.op} {shapes} {self.dtype}".strip().lower()
        state = "waits" if self.waiting else "done"
        return (
            f"rank {self.rank}  {self.group:<12} #{self.number:<3} {what:<28} {state:<6}"
            f"line {self.line} in {self.where}"
        )


def record(lines: bool = True) -> dict[str, Any]:
    """Return this rank's record as torch keeps it, with the groups that gloo leaves out.

    lines: include the lines that made the calls, which takes a process a second the first time.
    """
    from torch._C._distributed_c10d import _dump_fr_trace

    taken = pickle.loads(_dump_fr_trace(includeStackTraces=lines, onlyActive=False))
    taken["rank"] = dist.get_rank()
    taken["pg_config"] = {}
    for group, name in dist.distributed_c10d._world.pg_names.items():
        members = str(dist.get_process_group_ranks(group))
        taken["pg_config"][name] = {"name": name, "desc": group.group_desc, "ranks": members}
    return taken


def dump(folder: str | Path) -> Path:
    """Write this rank's record into `folder`, which is made if needed; return the file."""
    taken = record()
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / f"{PREFIX}{taken['rank']}"
    beside = path.with_name(f".{taken['rank']}.new")
    beside.write_bytes(pickle.dumps(taken))
    beside.rename(path)  # a reader of the folder finds a whole file or none
    return path


class Watchdog:
    """A thread that writes this rank's record after `limit` seconds without a `beat`, once a hang.

    The job goes on: the group's own timeout ends it. So `limit` must be longer than any step,
    including the first and a save, and shorter than that timeout: a call that gloo gave up counts
    as completed, and no longer shows that a rank waited.
    """

    def __init__(self, folder: str | Path, limit: float):
        check_number(limit=limit)
        self.folder, self.limit = Path(folder), limit
        self._last, self._written = time.monotonic(), False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Report that a step is done."""
        self._last, self._written = time.monotonic(), False

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(min(0.2, self.limit / 4)):
            if not self._written and time.monotonic() - self._last > self.limit:
                self._written = True
                dump(self.folder)


class _Plain(pickle.Unpickler):
    """An unpickler of numbers, texts, lists and dictionaries: code is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a record of the flight recorder names no {module}.{name}")


def read(folder: str | Path) -> dict[int, list[Call]]:
    """Return the calls of every rank whose record is in `folder`, oldest first.

    Reads the files of the first of PREFIXES that has any. Raises ValueError for a folder without
    records, and for a file that is no record.
    """
    for prefix in PREFIXES:
        if paths := list(Path(folder).glob(f"{prefix}*")):
            break
    else:
        names = ", ".join(f"{prefix}<rank>" for prefix in PREFIXES)
        raise ValueError(f"folder={str(folder)!r}: allowed is a folder with files named {names}")
    found: dict[int, list[Call]] = {}
    for path in paths:
        try:
            rank = int(path.name.removeprefix(prefix))
            with path.open("rb") as file:
                found[rank] = calls(_Plain(file).load(), rank)
        except Exception as error:  # a pickle of anything can raise anything
            raise ValueError(f"{path}: no record of the flight recorder ({error})") from None
    return dict(sorted(found.items()))


def calls(taken: Mapping[str, Any], rank: int | None = None) -> list[Call]:
    """Return the calls of a record, oldest first."""
    rank = taken["rank"] if rank is None else rank
    found = []
    for entry in taken["entries"]:
        if entry["is_p2p"]:  # torchfrtrace matches sends and recvs
            continue
        name, described = entry["process_group"]
        listed = taken["pg_config"].get(name, {"ranks": "[]"})["ranks"]
        members = tuple(int(number) for number in re.findall(r"\d+", listed))
        # "undefined" is torch's placeholder for a group without a description
        label = f"{described}:{name}" if described not in ("", "undefined") else f"group:{name}"
        status = taken["pg_status"].get(str(entry["pg_id"])) or taken["pg_status"][entry["pg_id"]]
        unfinished = entry["op_id"] > status["last_completed_collective"]
        file, line, function = _own(entry.get("frames") or [])
        found.append(
            Call(
                rank=rank,
                group=label,
                members=members,
                number=entry["collective_seq_id"],
                op=_op(entry),
                sizes=tuple(tuple(shape) for shape in entry["input_sizes"]),
                dtype=(entry["input_dtypes"] or [""])[0],
                line=line,
                where=f"{function}, {file}",
                created=entry["time_created_ns"] / 1e9,
                limit=entry["timeout_ms"] / 1e3,
                waiting=entry["state"] != "completed" and unfinished,
                duration=entry["duration_ms"] / 1e3 if "duration_ms" in entry else None,
            )
        )
    return found


def _own(frames: list[dict[str, Any]]) -> tuple[str, int, str]:
    """Return file, line and function of the innermost frame that is not a library's."""
    for frame in frames:
        if not _LIBRARY.search(frame["filename"]):
            path = Path(frame["filename"])
            return "a cell" if "ipykernel" in str(path) else path.name, frame["line"], frame["name"]
    return "a library", 0, "?"


def _op(entry: dict[str, Any]) -> str:
    """Return the name of the call. gloo records a reduce-scatter as the all-reduce that it uses."""
    noted = entry["profiling_name"].rpartition(":")[2].strip("_")
    inner = (entry.get("frames") or [{"filename": "", "name": ""}])[0]
    if inner["filename"].endswith("distributed_c10d.py") and inner["name"].startswith("reduce_sc"):
        return "reduce_scatter"
    return noted
