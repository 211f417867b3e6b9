"""Logs of the collectives that each rank enters, and the first mismatch between the ranks.

A backend does not compare its neighbours' shapes, types or operations: mismatched calls may return
garbage without an error. Only the ranks' logs, with one line per call, show what they asked for.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import renamed

# Logged collectives -> the argument whose sizes are logged: one that all ranks give.
COLLECTIVES = {
    **dict.fromkeys(("all_reduce", "broadcast", "reduce", "gather", "scatter"), "tensor"),
    **{"all_gather": "tensor_list", "reduce_scatter": "input_list"},
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_single"), "output_tensor"),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_single"), "output"),
    **{"all_to_all": "output_tensor_list", "all_to_all_single": "output"},
    **dict.fromkeys(("barrier", "all_gather_object", "broadcast_object_list"), ""),
    **dict.fromkeys(("gather_object", "scatter_object_list"), ""),
}
_PARAMETERS = {
    name: list(inspect.signature(getattr(dist, name)).parameters)
    for name in COLLECTIVES
    if hasattr(dist, name)
}


@dataclass(frozen=True)
class Call:
    """One line of a rank's log: a collective, or an event that its reader must know.

    Without a name: a collective raised. Without ranks: from here on all groups are new ones.
    """

    ranks: str  # of its group, as world ranks: "all", "[0, 2]"
    group: str = ""  # torch's name of the group, unless it is the world
    name: str = ""
    sizes: str = ""  # "float32[2, 3]", "4 x float32[3]"; "" if unknown
    told: str = ""  # other arguments that must be equal on all ranks: "src=0", "op=SUM"
    file: str = ""
    line: str = "0"
    function: str = ""

    def written(self) -> str:
        """Return the call's line in the log."""
        return "\t".join(astuple(self)) + "\n"

    def dtype(self) -> str:
        """Return the dtype of its tensors, and their number if it takes a list."""
        return self.sizes.partition("[")[0]


def read(path: Path) -> list[Call]:
    """Read the log of a rank, without an incomplete last line."""
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    lines = (line.split("\t") for line in text.split("\n"))
    return [Call(*words) for words in lines if len(words) == len(fields(Call))]


def members(ranks: str, world_size: int) -> list[int]:
    """Return the ranks of a group from its text in the log."""
    return list(range(world_size)) if ranks == "all" else json.loads(ranks)


def has(ranks: str, rank: int) -> bool:
    """Return True if `rank` is in a group, from the group's text in the log."""
    return rank in members(ranks, rank + 1)


def camps(calls: Mapping[int, Call], nccl: bool) -> list[list[int]]:
    """Group the ranks by their arguments to one collective: a single group if these match.

    Arguments that may differ are ignored: parts of an all-to-all, objects; with nccl, the inputs of
    a gather. Unknown arguments are ignored, too.
    """
    name = next(iter(calls.values())).name
    in_parts = name == "all_to_all_single" and any(call.told for call in calls.values())
    uneven = name == "all_to_all" or in_parts or (nccl and name in ("gather", "scatter"))
    tells: list[Callable[[Call], str]] = [
        lambda call: call.name,
        Call.dtype if uneven else lambda call: call.sizes,
        lambda call: "" if name == "all_to_all_single" else call.told,
    ]
    for tell in tells:
        found: dict[str, list[int]] = {}
        for rank, call in sorted(calls.items()):
            if told := tell(call):
                found.setdefault(told, []).append(rank)
        if len(found) > 1:
            # The smaller camp first; of two equal camps, the one without rank 0.
            return sorted(found.values(), key=lambda camp: (len(camp), -camp[0]))
    return [sorted(calls)]


def parted(
    logs: Sequence[list[Call]], nccl: bool, returned: bool = False
) -> tuple[int, list[list[int]], list[Call]] | None:
    """Return the first mismatch in a group's logs: place, camps of ranks, one call of each.

    returned: all ranks returned. If the ranks of a group then do not even name the same
    collectives, some bypassed the log, and nothing is known about that group. Nor is it if a
    collective raised and the error was caught, or if ranks made a new world with other numbers.
    """
    groups = {call.ranks for log in logs for call in log}
    if returned and "" in groups:
        return None
    for group in sorted(groups - {""}):
        ranks = members(group, len(logs))
        inside = {rank: [call for call in logs[rank] if call.ranks == group] for rank in ranks}
        orders = {tuple((call.group, call.name) for call in log) for log in inside.values()}
        if returned and (len(orders) > 1 or any(not name for _, name in orders.pop())):
            continue
        named = {rank: [call for call in log if call.name] for rank, log in inside.items()}
        for place in range(max(map(len, named.values()))):
            calls = {rank: log[place] for rank, log in named.items() if place < len(log)}
            if len(found := camps(calls, nccl)) > 1:
                return place, found, [calls[camp[0]] for camp in found]
    return None


def log(path: Path) -> None:
    """Start to append a line to `path` for each collective that this process enters.

    Also wraps `Work.wait`, so that waiting for a handle shows as a frame named `wait` in the stack;
    the C++ method leaves none.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(line: str) -> None:
        with suppress(OSError):  # a full disk must not make a collective fail
            os.write(file, line.encode())

    handles_wait = dist.Work.wait

    def wait(*args: Any, **kwargs: Any) -> Any:
        return handles_wait(*args, **kwargs)

    dist.Work.wait = wait

    def logged(name: str, function: Any) -> Any:
        parameters, sized = _PARAMETERS[name], COLLECTIVES[name]
        tells = _tells(parameters)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(parameters, args, strict=False)) | kwargs
            try:
                group = _group(given.get("group"))
            except Exception:  # torch raises a better error
                return function(*args, **kwargs)
            frame = sys._getframe(1)
            while frame.f_code.co_filename == renamed.__file__ and frame.f_back:
                frame = frame.f_back
            place = f"{frame.f_code.co_filename}\t{frame.f_lineno}\t{frame.f_code.co_name}"
            write(f"{group}\t{name}\t{_sizes(given.get(sized))}\t{tells(given)}\t{place}\n")
            try:
                return function(*args, **kwargs)
            except BaseException:
                write(Call(*group.split("\t")).written())
                raise

        return call

    for name in _PARAMETERS:
        setattr(dist, name, logged(name, getattr(dist, name)))
    begin = dist.init_process_group

    def another(*args: Any, **kwargs: Any) -> Any:
        write(Call("").written())
        return begin(*args, **kwargs)

    dist.init_process_group = another


def _group(group: Any) -> str:
    """Return the log's text for a group: its ranks and torch's name."""
    if group is None or group is dist.group.WORLD:
        return "all\t"
    return f"{dist.get_process_group_ranks(group)}\t{getattr(group, 'group_name', '')}"


def _tells(parameters: list[str]) -> Callable[[dict[str, Any]], str]:
    """Return a function from arguments to the text that must agree on all ranks; "" if unknown."""
    root = next((name for name in ("src", "dst") if name in parameters), None)
    reduces, parts = "op" in parameters, "input_split_sizes" in parameters

    def tells(given: dict[str, Any]) -> str:
        told = []
        if root:
            number = given.get(root)
            if number is None and (own := given.get(f"group_{root}")) is not None:
                with suppress(Exception):
                    number = dist.get_global_rank(given.get("group") or dist.group.WORLD, own)
            if not isinstance(number, int):
                return ""
            told.append(f"{root}={number}")
        if reduces:
            operation = given.get("op", dist.ReduceOp.SUM)
            told.append(f"op={getattr(getattr(operation, 'op', operation), 'name', '')}")
        if parts and (given.get("input_split_sizes") or given.get("output_split_sizes")):
            told.append("in parts")
        return ", ".join(told)

    return tells


def _sizes(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        return f"{len(value)} x {_sizes(value[0])}"
    return ""
