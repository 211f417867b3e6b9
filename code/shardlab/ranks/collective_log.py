"""Logs of the collectives that each rank enters, and the first mismatch between the ranks.

A backend does not compare the shapes, types or operations of its ranks: mismatched calls may return
garbage without an error. Only the ranks' logs, with one line per call, show what each rank called.
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

from . import torch_compat

# Logged collectives -> the argument whose sizes are logged, one that all ranks pass.
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
class CollectiveCall:
    """One line of a rank's log: the call of a collective, or one of two other events.

    Without a name: a collective raised. Without ranks: the rank initialized a new process group.
    """

    ranks: str  # of its group, as world ranks: "all", "[0, 2]"
    group: str = ""  # torch's name of the group, unless it is the world
    name: str = ""
    sizes: str = ""  # "float32[2, 3]", "4 x float32[3]"; "" if unknown
    options: str = ""  # other arguments that must be equal on all ranks: "src=0", "op=SUM"
    file: str = ""
    line: str = "0"
    function: str = ""

    @property
    def frame(self) -> tuple[str, int, str]:
        """The caller's file, line and function."""
        return self.file, int(self.line), self.function

    def to_line(self) -> str:
        """Return the call's line in the log."""
        return "\t".join(astuple(self)) + "\n"

    def get_dtype(self) -> str:
        """Return the dtype of the call's tensors, and their number if it takes a list."""
        return self.sizes.partition("[")[0]


def read_log(path: Path) -> list[CollectiveCall]:
    """Read the log of a rank, without an incomplete last line."""
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    lines = (line.split("\t") for line in text.split("\n"))
    return [CollectiveCall(*words) for words in lines if len(words) == len(fields(CollectiveCall))]


def parse_ranks(ranks: str, world_size: int) -> list[int]:
    """Return the ranks of a group from its text in the log."""
    return list(range(world_size)) if ranks == "all" else json.loads(ranks)


def is_member(ranks: str, rank: int) -> bool:
    """Return True if `rank` is in a group, from the group's text in the log."""
    return rank in parse_ranks(ranks, rank + 1)


def group_by_signature(calls: Mapping[int, CollectiveCall], nccl: bool) -> list[list[int]]:
    """Group the ranks by their arguments to one collective: a single group if these match.

    Arguments that may differ are ignored: parts of an all-to-all, objects; with nccl, the inputs of
    a gather. Unknown arguments are ignored, too.
    """
    name = next(iter(calls.values())).name
    in_parts = name == "all_to_all_single" and any(call.options for call in calls.values())
    uneven = name == "all_to_all" or in_parts or (nccl and name in ("gather", "scatter"))
    keys: list[Callable[[CollectiveCall], str]] = [
        lambda call: call.name,
        CollectiveCall.get_dtype if uneven else lambda call: call.sizes,
        lambda call: "" if name == "all_to_all_single" else call.options,
    ]
    for get_key in keys:
        groups: dict[str, list[int]] = {}
        for rank, call in sorted(calls.items()):
            if key := get_key(call):
                groups.setdefault(key, []).append(rank)
        if len(groups) > 1:
            # The smaller group first; of two equal groups, the one without rank 0.
            return sorted(groups.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    return [sorted(calls)]


def find_mismatch(
    logs: Sequence[list[CollectiveCall]], nccl: bool, returned: bool = False
) -> tuple[int, list[list[int]], list[CollectiveCall]] | None:
    """Return the first mismatch in a process group's logs: index, groups of ranks, a call of each.

    returned: all ranks returned. If the ranks of a group then do not even name the same
    collectives, some bypassed the log, and nothing is known about that group. Nor is it if a
    collective raised and the error was caught, or if ranks initialized a new process group.
    """
    groups = {call.ranks for log in logs for call in log}
    if returned and "" in groups:
        return None
    for group in sorted(groups - {""}):
        ranks = parse_ranks(group, len(logs))
        of_group = {rank: [call for call in logs[rank] if call.ranks == group] for rank in ranks}
        orders = {tuple((call.group, call.name) for call in log) for log in of_group.values()}
        if returned and (len(orders) > 1 or any(not name for _, name in orders.pop())):
            continue
        named = {rank: [call for call in log if call.name] for rank, log in of_group.items()}
        for index in range(max(map(len, named.values()))):
            calls = {rank: log[index] for rank, log in named.items() if index < len(log)}
            if len(found := group_by_signature(calls, nccl)) > 1:
                return index, found, [calls[ranks[0]] for ranks in found]
    return None


def start_logging(path: Path) -> None:
    """Append a line to `path` for each collective that this process enters from now on.

    Also wraps `Work.wait`, so that waiting for a handle shows as a frame named `wait` in the stack;
    the C++ method leaves none.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write_line(line: str) -> None:
        with suppress(OSError):  # a full disk must not make a collective fail
            os.write(file, line.encode())

    work_wait, initialize = dist.Work.wait, dist.init_process_group

    def wait(*args: Any, **kwargs: Any) -> Any:  # `root_cause` looks for this name
        return work_wait(*args, **kwargs)

    def log_new_world(*args: Any, **kwargs: Any) -> Any:
        write_line(CollectiveCall("").to_line())
        return initialize(*args, **kwargs)

    def wrap_collective(name: str, function: Any) -> Any:
        parameters, sized = _PARAMETERS[name], COLLECTIVES[name]
        format_options = _make_option_formatter(parameters)

        def log_call(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(parameters, args, strict=False)) | kwargs
            try:
                group = _format_group(given.get("group"))
            except Exception:  # torch raises a better error
                return function(*args, **kwargs)
            frame = sys._getframe(1)
            while frame.f_code.co_filename == torch_compat.__file__ and frame.f_back:
                frame = frame.f_back
            code, sizes = frame.f_code, _format_sizes(given.get(sized))
            where = f"{code.co_filename}\t{frame.f_lineno}\t{code.co_name}"
            write_line(f"{group}\t{name}\t{sizes}\t{format_options(given)}\t{where}\n")
            try:
                return function(*args, **kwargs)
            except BaseException:
                write_line(CollectiveCall(*group.split("\t")).to_line())
                raise

        return log_call

    for name in _PARAMETERS:
        setattr(dist, name, wrap_collective(name, getattr(dist, name)))
    dist.Work.wait, dist.init_process_group = wait, log_new_world


def _format_group(group: Any) -> str:
    """Return the log's text for a group: its ranks and torch's name."""
    if group is None or group is dist.group.WORLD:
        return "all\t"
    return f"{dist.get_process_group_ranks(group)}\t{getattr(group, 'group_name', '')}"


def _make_option_formatter(parameters: list[str]) -> Callable[[dict[str, Any]], str]:
    """Return a function from arguments to the text that must agree on all ranks; "" if unknown."""
    root = next((name for name in ("src", "dst") if name in parameters), None)
    reduces, parts = "op" in parameters, "input_split_sizes" in parameters

    def format_options(given: dict[str, Any]) -> str:
        options = []
        if root:
            rank = given.get(root)
            if rank is None and (group_rank := given.get(f"group_{root}")) is not None:
                with suppress(Exception):
                    group = given.get("group") or dist.group.WORLD
                    rank = dist.get_global_rank(group, group_rank)
            if not isinstance(rank, int):
                return ""
            options.append(f"{root}={rank}")
        if reduces:
            operation = given.get("op", dist.ReduceOp.SUM)
            options.append(f"op={getattr(getattr(operation, 'op', operation), 'name', '')}")
        if parts and (given.get("input_split_sizes") or given.get("output_split_sizes")):
            options.append("in parts")
        return ", ".join(options)

    return format_options


def _format_sizes(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        return f"{len(value)} x {_format_sizes(value[0])}"
    return ""
