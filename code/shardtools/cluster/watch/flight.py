"""The flight recorder: the collectives of every rank, with line and time of each call.

    from shardtools.cluster.watch import flight
    watchdog = flight.Watchdog("runs/one/flight", timeout=120)  # on every rank, before the loop
    watchdog.report_step()                                      # after every step

torch records each collective of a process in memory, the last 2,000 (TORCH_FR_BUFFER_SIZE), with
gloo as with NCCL. NCCL's watchdog writes the record to a file when a collective takes too long;
gloo has no watchdog, so a thread does it here: the stuck main thread has released the GIL.
Each rank writes `trace_<rank>`, for `torchfrtrace FOLDER -p trace_` and for `read_records`.

A call is recorded when the *host* queues it. With gloo that is when the rank enters the call; with
NCCL the host runs ahead, and the GPU's progress is in the states, and in the durations that
TORCH_NCCL_ENABLE_TIMING=1 adds. Without it no call is ever "started".

gloo's records lack groups (`pg_config`, without which torchfrtrace ends in a KeyError in torch
2.13: `take_record` adds them), states of calls (the group's counters give them), and send and recv.
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

TRACE_PREFIX = "trace_"
# Prefixes of the watchdog's files, and of torch's own in ~/.cache/torch (2.13, and before).
KNOWN_PREFIXES = (TRACE_PREFIX, "comm_lib_trace_rank_", "nccl_trace_rank_")
# Frames of libraries, including this course's, on any machine.
_LIBRARY_FRAME = re.compile(
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
    location: str  # function and file of that line
    created: float  # when the host queued it: seconds since 1970, by this machine's clock
    timeout: float  # of the group, in seconds
    waiting: bool  # not finished when the record was taken
    duration: float | None = None  # seconds on the GPU, from this rank's arrival to the end

    def __str__(self) -> str:
        shapes = " ".join("x".join(map(str, shape)) or "scalar" for shape in self.sizes)
        what = f"{self.op} {shapes} {self.dtype}".strip().lower()
        state = "waits" if self.waiting else "done"
        return (
            f"rank {self.rank}  {self.group:<12} #{self.number:<3} {what:<28} {state:<6}"
            f"line {self.line} in {self.location}"
        )


def take_record(stacks: bool = True) -> dict[str, Any]:
    """Return this rank's record as torch keeps it, with the groups that gloo omits.

    stacks: include the lines of the calls, which takes a second at the first time in a process.
    """
    from torch._C._distributed_c10d import _dump_fr_trace

    record = pickle.loads(_dump_fr_trace(includeStackTraces=stacks, onlyActive=False))
    record["rank"] = dist.get_rank()
    record["pg_config"] = {}
    for group, name in dist.distributed_c10d._world.pg_names.items():
        members = str(dist.get_process_group_ranks(group))
        record["pg_config"][name] = {"name": name, "desc": group.group_desc, "ranks": members}
    return record


def write_record(folder: str | Path) -> Path:
    """Write this rank's record into `folder`, made if needed; return the file."""
    record = take_record()
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / f"{TRACE_PREFIX}{record['rank']}"
    beside = path.with_name(f".{record['rank']}.new")
    beside.write_bytes(pickle.dumps(record))
    beside.rename(path)  # a reader of the folder finds a whole file or none
    return path


class Watchdog:
    """A thread that writes this rank's record once after `timeout` seconds without a step.

    The job goes on: the group's own timeout ends it. So `timeout` must be longer than any step,
    including the first and those that save, and shorter than the group's: after that, gloo marks
    the call as completed, and the record no longer shows that the rank waited.
    """

    def __init__(self, folder: str | Path, timeout: float):
        check_number(timeout=timeout)
        self.folder, self.timeout = Path(folder), timeout
        self._last, self._written = time.monotonic(), False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch_steps, name="watchdog", daemon=True)
        self._thread.start()

    def report_step(self) -> None:
        """Report that a step is done."""
        self._last, self._written = time.monotonic(), False

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()

    def _watch_steps(self) -> None:
        while not self._closed.wait(min(0.2, self.timeout / 4)):
            if not self._written and time.monotonic() - self._last > self.timeout:
                self._written = True
                write_record(self.folder)


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler of numbers, texts, lists and dictionaries that refuses code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a flight recorder's record must not contain {module}.{name}")


def read_records(folder: str | Path) -> dict[int, list[Call]]:
    """Return the calls of every rank whose record is in `folder`, oldest first.

    Reads the files of the first of PREFIXES that has any. Raises ValueError for a folder without
    records, and for a file that is no record.
    """
    for prefix in KNOWN_PREFIXES:
        if paths := list(Path(folder).glob(f"{prefix}*")):
            break
    else:
        names = ", ".join(f"{prefix}<rank>" for prefix in KNOWN_PREFIXES)
        raise ValueError(f"folder={str(folder)!r}: must be a folder with files named {names}")
    found: dict[int, list[Call]] = {}
    for path in paths:
        try:
            rank = int(path.name.removeprefix(prefix))
            with path.open("rb") as file:
                found[rank] = parse_calls(_PlainUnpickler(file).load(), rank)
        except Exception as error:  # a pickle of anything can raise anything
            raise ValueError(f"{path}: must be a record of the flight recorder ({error})") from None
    return dict(sorted(found.items()))


def parse_calls(record: Mapping[str, Any], rank: int | None = None) -> list[Call]:
    """Return the calls of a record, oldest first."""
    rank = record["rank"] if rank is None else rank
    found = []
    for entry in record["entries"]:
        if entry["is_p2p"]:  # torchfrtrace matches sends and recvs
            continue
        name, description = entry["process_group"]
        listed = record["pg_config"].get(name, {"ranks": "[]"})["ranks"]
        members = tuple(int(number) for number in re.findall(r"\d+", listed))
        # "undefined" is torch's placeholder for a group without a description
        label = f"{description}:{name}" if description not in ("", "undefined") else f"group:{name}"
        status = record["pg_status"].get(str(entry["pg_id"])) or record["pg_status"][entry["pg_id"]]
        unfinished = entry["op_id"] > status["last_completed_collective"]
        file, line, function = _find_script_frame(entry.get("frames") or [])
        found.append(
            Call(
                rank=rank,
                group=label,
                members=members,
                number=entry["collective_seq_id"],
                op=_get_op_name(entry),
                sizes=tuple(tuple(shape) for shape in entry["input_sizes"]),
                dtype=(entry["input_dtypes"] or [""])[0],
                line=line,
                location=f"{function}, {file}",
                created=entry["time_created_ns"] / 1e9,
                timeout=entry["timeout_ms"] / 1e3,
                waiting=entry["state"] != "completed" and unfinished,
                duration=entry["duration_ms"] / 1e3 if "duration_ms" in entry else None,
            )
        )
    return found


def _find_script_frame(frames: list[dict[str, Any]]) -> tuple[str, int, str]:
    """Return file, line and function of the innermost frame outside libraries."""
    for frame in frames:
        if not _LIBRARY_FRAME.search(frame["filename"]):
            path = Path(frame["filename"])
            return "a cell" if "ipykernel" in str(path) else path.name, frame["line"], frame["name"]
    return "a library", 0, "?"


def _get_op_name(entry: dict[str, Any]) -> str:
    """Return the collective's name. gloo records a reduce-scatter as an all-reduce."""
    name = entry["profiling_name"].rpartition(":")[2].strip("_")
    inner = (entry.get("frames") or [{"filename": "", "name": ""}])[0]
    if inner["filename"].endswith("distributed_c10d.py") and inner["name"].startswith("reduce_sc"):
        return "reduce_scatter"
    return name
