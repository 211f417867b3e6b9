"""Which collectives each rank enters, and where the ranks of a run disagree in them.

A backend looks at no neighbour's shapes, types or operations: what does not fit can come back as
garbage, without an error. What ranks asked for stands in their logs alone, a line for each call.
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

# The collectives that are logged, and the argument whose sizes are: one that all ranks are given.
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
    """One line of a rank's log: a collective, or what its reader has to know beside them.

    Without a name it says that a collective raised; without ranks, that all groups are new ones.
    """

    ranks: str  # of its group, in the world's numbers: "all", "[0, 2]"
    group: str = ""  # torch's name of it, where it is not the world
    name: str = ""
    sizes: str = ""  # "float32[2, 3]", "4 x float32[3]"; "" where they are not known
    told: str = ""  # what else all ranks have to give alike: "src=0", "op=SUM"
    file: str = ""
    line: str = "0"
    function: str = ""

    def written(self) -> str:
        """Its line in the log."""
        return "\t".join(astuple(self)) + "\n"

    def dtype(self) -> str:
        """The type of its tensors, and how many they are where it takes a list."""
        return self.sizes.partition("[")[0]


def read(path: Path) -> list[Call]:
    """The log of a rank, without a last line that was cut short."""
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    lines = (line.split("\t") for line in text.split("\n"))
    return [Call(*words) for words in lines if len(words) == len(fields(Call))]


def members(ranks: str, world_size: int) -> list[int]:
    """The ranks of a group, from how the log names them."""
    return list(range(world_size)) if ranks == "all" else json.loads(ranks)


def has(ranks: str, rank: int) -> bool:
    """Whether `rank` is in a group, from how the log names it."""
    return rank in members(ranks, rank + 1)


def camps(calls: Mapping[int, Call], nccl: bool) -> list[list[int]]:
    """Ranks by what each asked of one collective of their group: one camp if it fits together.

    What differs by right does not count: parts in an all-to-all, objects; under nccl, what ranks
    give to a gather. Nor does what is not known of a call.
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
            # The smaller camp first; of two camps of one size, the one without rank 0.
            return sorted(found.values(), key=lambda camp: (len(camp), -camp[0]))
    return [sorted(calls)]


def parted(
    logs: Sequence[list[Call]], nccl: bool, returned: bool = False
) -> tuple[int, list[list[int]], list[Call]] | None:
    """The first place in a group's logs at which its ranks disagree, their camps, a call of each.

    returned: all ranks did. Where the ranks of a group do not even name the same collectives, and
    yet nobody waits, some were called past the log: of that group nothing can be told. Nor can it
    where one raised and was caught, or where ranks made a world of their own, with other numbers.
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
    """From here on append a line to `path` at each collective that this process enters.

    From here on, too, who waits for a handle has a frame named `wait` in its stack, which C++ alone
    would not leave.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(line: str) -> None:
        with suppress(OSError):  # a full disk is no reason for a collective to fail
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
            except Exception:  # torch itself will say what is wrong with it
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
    """How the log names it: its ranks, and torch's name of it."""
    if group is None or group is dist.group.WORLD:
        return "all\t"
    return f"{dist.get_process_group_ranks(group)}\t{getattr(group, 'group_name', '')}"


def _tells(parameters: list[str]) -> Callable[[dict[str, Any]], str]:
    """What says, of arguments by their names, what all ranks have to give alike; "" if unknown."""
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
