"""Count the bytes that a process sends.

Two independent methods: `record_traffic` sees every operation of `torch.distributed` with its
tensors, and is exact; `read_loopback_bytes` reads the operating system's counter of the loopback
interface, which counts everything that was transmitted, headers included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
import torch._dynamo  # the first dispatch mode needs it: once here, not per rank
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators of torch.distributed -> the functions that users call.
_FUNCTION_NAMES = {
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "recv_any_source_": "recv",
    "isend": "send",
    "irecv": "recv",
}


# torch.distributed's operators, and its functional collectives, which DTensor calls.
_NAMESPACES = "c10d", "_c10d_functional"


@dataclass
class Traffic:
    """The traffic of one process: point-to-point in bytes and messages, collectives by name."""

    bytes: int = 0  # in point-to-point sends
    messages: int = 0  # point-to-point sends
    calls: Counter[str] = field(default_factory=Counter)  # collective -> times called
    payload: Counter[str] = field(default_factory=Counter)  # collective -> bytes of its inputs
    groups: dict[str, Traffic] = field(default_factory=dict)  # name of a group -> traffic in it

    @property
    def collectives(self) -> dict[str, tuple[int, int]]:
        """Collective -> (times called, bytes of the tensors that this rank passed to it)."""
        return {name: (self.calls[name], self.payload[name]) for name in sorted(self.calls)}

    def get_group_traffic(self, group: dist.ProcessGroup) -> Traffic:
        """Return the part of the traffic that was sent in `group`."""
        return self.groups.get(group.group_name, Traffic())

    def count_ring_bytes(self, ranks: int, others: float | None = None) -> float:
        """Return the bytes that leave a rank of `ranks` ranks, with collectives as rings.

        For S bytes of input, n ranks' all-reduce sends 2(n-1)/n S from each, a reduce-scatter and
        an all-to-all (n-1)/n S, an all-gather, whose S is the share, (n-1) S (Thakur et al. 2005,
        section 4), and a barrier nothing. Other collectives count as `others` S; without `others`,
        they raise ValueError.
        """
        rings = {"all_reduce": 2 / ranks, "all_gather": 1, "reduce_scatter": 1 / ranks}
        rings |= {"all_to_all": 1 / ranks, "barrier": 0}
        found = float(self.bytes)
        for name, payload in self.payload.items():
            ring = next((ring for kind, ring in rings.items() if name.startswith(kind)), None)
            factor = others if ring is None else (ranks - 1) * ring
            if factor is None:
                raise ValueError(f"{name} was called: must be one of {', '.join(rings)}")
            found += factor * payload
        return found


class _TrafficMode(TorchDispatchMode):
    def __init__(self, sent: Traffic):
        super().__init__()
        self.sent = sent

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first runs operations on local tensors, which may send
        operator = func.__name__.split(".")[0]
        if func.namespace in _NAMESPACES and not operator.startswith(("wait", "_wrap")):
            self._record_operation(operator, args, func.namespace)
        return func(*args, **(kwargs or {}))

    def _record_operation(self, operator: str, args: tuple[Any, ...], namespace: str) -> None:
        name = _FUNCTION_NAMES.get(operator, operator.strip("_"))
        if name == "recv":
            return
        # For collectives with an output and an input, c10d's schema puts the output first.
        output_first = namespace == "c10d" and _has_output_first(operator)
        inputs = args[1] if output_first else args[0]
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        for sent in (self.sent, self.sent.groups.setdefault(_get_group_name(args), Traffic())):
            if name == "send":
                sent.bytes += size
                sent.messages += 1
            else:
                sent.calls[name] += 1
                sent.payload[name] += size


def _get_group_name(args: tuple[Any, ...]) -> str:
    for argument in reversed(args):  # functional operators get the group's name, after a ReduceOp's
        if isinstance(argument, str):
            return argument
        if isinstance(argument, torch.ScriptObject):
            with suppress(RuntimeError):  # another object, such as a ReduceOp
                return dist.ProcessGroup.unbox(argument).group_name
    return ""


def _has_output_first(operator: str) -> bool:
    families = ("allgather", "reduce_scatter", "alltoall", "gather", "scatter")
    return operator.lstrip("_").startswith(families)


@contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Count the bytes that this process sends inside the `with` block.

    Sees all operations of `torch.distributed`, including those of DDP's reducer and DTensors; not
    the traffic of a collective inside a backend: for that compare with `read_loopback_bytes`.

        with count.record_traffic() as sent:
            dist.send(x, 1)
        sent.bytes, sent.messages, sent.collectives
    """
    result = Traffic()
    with _TrafficMode(result):
        yield result


def read_loopback_bytes() -> int | None:
    """Return the bytes sent so far on the loopback interface, by all processes of this machine.

    None if the operating system has no interface named lo, which is Linux's name.
    """
    loopback = psutil.net_io_counters(pernic=True).get("lo")
    return None if loopback is None else loopback.bytes_sent
