"""Dispatch mode that checks every operator: refusals of a GPU, and the device of the results.

One mode is entered for good in every thread: it sees each ATen operator, also in backward.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import kernels, messages
from .factories import generator_device, is_faking, own_numbers
from .machine import HERE, KIND, find
from .paint import CPU, device_of, is_paintable, list_tensors, paint, paint_of, reserve

# Operators of native_functions.yaml with a CPU kernel, no CUDA kernel, and no composition.
CPU_ONLY = {
    "_scaled_dot_product_flash_attention_for_cpu", "histogram", "_histogramdd_bin_edges",
    "_scaled_dot_product_flash_attention_for_cpu_backward", "_histogramdd_from_bin_cts", "_spdiags",
    "mkldnn_rnn_layer", "_weight_int4pack_mm_for_cpu", "from_file", "to_mkldnn", "_add_relu",
    "_add_relu_", "slow_conv3d_forward",
}  # fmt: skip
INTEGERS = {torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool}
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "addmv", "mv", "addbmm", "_addmm_activation"}
COPIES = {"copy_", "_to_copy", "copy", "set_", "_copy_from", "is_same_size", "_foreach_copy_", "to"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# Besides pointwise ones, these accept a scalar tensor on the CPU.
WITH_NUMBERS = {
    "fill_", "fill", "masked_fill", "masked_fill_", "index_fill", "index_fill_", "where", "lerp",
    "_foreach_mul", "_foreach_mul_", "_foreach_div", "_foreach_div_", "_foreach_add",
    "_foreach_add_", "full_like", "new_full", "clamp", "_local_scalar_dense", "index_put",
    "index_put_",
}  # fmt: skip
# The size of their result depends on data, or the result is a number: the host waits for it.
WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "repeat_interleave", "is_nonzero",
}  # fmt: skip
# They read shapes, not memory.
BLIND = {
    "empty_like", "new_empty", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like",
    "full_like", "rand_like", "randn_like", "new_empty_strided", "resize_", "set_", "is_same_size",
    "_reshape_alias", "_unsafe_view", "sym_size", "detach_", "record_stream", "is_pinned",
}  # fmt: skip


class Call:
    """One call of an operator, and the colours in it."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.func, self.args, self.kwargs = func, args, kwargs
        self.space, _, self.name = func._schema.name.partition("::")
        self.tensors = [*list_tensors(args), *list_tensors(kwargs)]
        self.paints = [paint_of(t) for t in self.tensors]
        self.gpus = {p for p in self.paints if p is not None and p.type == KIND}

    def sides(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors that the call reads, and those that it writes."""
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for index, name, written in _arguments(self.func):
            value = self.args[index] if index < len(self.args) else self.kwargs.get(name)
            (writes if written else reads).extend(list_tensors([value]))
        return reads, writes


@functools.cache
def _arguments(func: Any) -> list[tuple[int, str, bool]]:
    """Return place, name, and whether it is written, of an operator's arguments."""
    return [
        (index, a.name, bool(a.alias_info and a.alias_info.is_write))
        for index, a in enumerate(func._schema.arguments)
    ]


class Rehearsal(TorchDispatchMode):
    """Mode that checks each operator, computes it on the CPU, then paints its results."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_faking():  # a mode of torch's own comes next
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a wrapper: its inner operators come back here
        call = Call(func, args, kwargs)
        aten = call.space == "aten"
        if messages.FLIGHTS and not func.is_view and call.name not in BLIND:
            reads, writes = call.sides()
            messages.check(str(func), reads, writes, in_stream=_is_crossing(call))
        if not call.gpus:
            device = CPU if CPU in call.paints else None
            return _paint_result(func(*args, **kwargs), device)
        device = _check_call(call) if aten else _get_only(call.gpus)
        HERE.launch()
        if aten:
            _wait_if_it_waits(call)
        result = _compute_call(call, device) if aten else func(*args, **kwargs)
        if aten:
            for t, colour in zip(call.tensors, call.paints, strict=True):
                # Tensors without a colour take the colour of the other arguments.
                if colour is None and (t.dim() if call.name not in COPIES else t is args[0]):
                    paint(t, device)
        return _paint_result(result, device)


def _get_only(devices: set[torch.device]) -> torch.device | None:
    return next(iter(devices)) if len(devices) == 1 else None


def _paint_result(result: Any, device: torch.device | None) -> Any:
    if device is not None:
        for t in list_tensors([result]):
            if paint_of(t) is None:
                paint(t, device)
    return result


def _compute_call(call: Call, device: torch.device) -> Any:
    func, args, kwargs = call.func, call.args, call.kwargs
    if call.name in kernels.EMULATED:
        with own_numbers(device):
            return kernels.EMULATED[call.name](*args, **kwargs)
    if call.name in ("mm", "addmm", "bmm"):
        a, b = (args[-2], args[-1]) if call.name != "addmm" else args[1:3]
        reserve((a.numel() // max(a.shape[-1], 1)) * b.shape[-1] * a.element_size(), device)
        if 2 * a.numel() * b.shape[-1] > HERE.flops:  # made for a GPU: its shape, no numbers
            return kernels.allocate((*a.shape[:-1], b.shape[-1]), a.dtype)
    if torch.Tag.nondeterministic_seeded in func.tags:
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch._C.Generator)]
        if given and generator_device(given[0]).type != KIND:
            text = f"{func}: Expected a 'cuda' device type for generator but found 'cpu'"
            find("generator", text)
        if not given:
            with own_numbers(device):
                return func(*args, **kwargs)
    return func(*args, **kwargs)


def _check_call(call: Call) -> torch.device:
    """Return the device of the results; raise the error that a GPU would raise."""
    name, func = call.name, call.func
    device = next(iter(call.gpus))
    if name in CPU_ONLY:
        text = f"Could not run 'aten::{name}' with arguments from the 'CUDA' backend"
        find("kernel", text, NotImplementedError)
    if name in PRODUCTS and call.tensors[-1].dtype in INTEGERS:
        text = f"\"{name}_cuda\" not implemented for '{call.tensors[-1].dtype}'"
        find("dtype", text, NotImplementedError)
    if name in COPIES:
        return call.paints[0] or device
    same = f"{func}: Expected all tensors to be on the same device"
    if len(call.gpus) > 1:
        find("devices", f"{same}, but found {', '.join(sorted(map(str, call.gpus)))}")
    host = [t for t, p in zip(call.tensors, call.paints, strict=True) if p == CPU]
    if not host:
        return device
    if name in INDEXING and call.paints[0] == device:  # indices are copied to the GPU
        indices = {id(t) for t in list_tensors(call.args[1])}
        host = [t for t in host if id(t) not in indices]
    # TensorIterator's rule: at most one scalar from the CPU, and never as an output.
    pointwise = torch.Tag.pointwise in func.tags
    written = {id(t) for t in call.sides()[1]}
    lone = pointwise and name not in WITH_NUMBERS and "foreach" not in name and len(host) > 1
    allowed = (pointwise or name in WITH_NUMBERS) and not lone
    bad = [t for t in host if not (allowed and t.dim() == 0 and id(t) not in written)]
    if bad:
        shapes = ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in bad)
        find("devices", f"{same}, but found at least two, {device} and cpu! (on the CPU: {shapes})")
    return device


def _is_crossing(call: Call) -> bool:
    """Return True if a call is a copy between host and GPU, in the GPU's stream."""
    return call.name == "copy_" and len({device_of(t).type for t in call.args[:2]}) == 2


def _wait_if_it_waits(call: Call) -> None:
    """Record a wait for numbers, for sizes, and for copies without non_blocking."""
    if call.name in WAITING:
        return messages.synchronized()
    if call.name in INDEXING and call.paints[0] is not None and call.paints[0].type == KIND:
        indices = [t for t in list_tensors(call.args[1]) if is_paintable(t)]
        if any(t.dtype in (torch.bool, torch.uint8) or device_of(t) == CPU for t in indices):
            messages.synchronized()
    if call.name == "copy_":
        target, source = call.args[:2]
        free = call.args[2] if len(call.args) > 2 else call.kwargs.get("non_blocking", False)
        messages.begin_copy(target, source, bool(free))
    return None


def install() -> None:
    """Enter the mode, here and at the start of every thread."""
    plain_run = threading.Thread.run

    def run(self: threading.Thread) -> None:
        with Rehearsal():
            plain_run(self)

    threading.Thread.run = run
    Rehearsal().__enter__()
