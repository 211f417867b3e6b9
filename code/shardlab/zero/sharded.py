"""What the three stages share: a model that looks like the plain one and trains a shard of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardlab import ranks

from .flat import Flat
from .gradients import Gradients


def _check_options(compute_dtype: Any, reduction: Any) -> None:
    if compute_dtype is not None and (
        not isinstance(compute_dtype, torch.dtype) or not compute_dtype.is_floating_point
    ):
        allowed = "allowed are None and floating-point types, torch.bfloat16 for one"
        raise ValueError(f"compute_dtype={compute_dtype!r}: {allowed}")
    if reduction not in ("auto", "ordered", "library"):
        raise ValueError(f"reduction={reduction!r}: allowed are 'auto', 'ordered' and 'library'")


def in_backward() -> bool:
    """Whether autograd is at work: a forward is then a recomputation. torch's own code asks so."""
    return torch._C._current_graph_task_id() != -1


class Sharded(nn.Module):
    """Wraps `module` so that this rank trains its own pieces of the parameters, over `group`.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        loss(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    `parameters()` are pieces, one for each parameter of the module and under its name: flat, with
    what this rank owns of it, which may be nothing. When backward returns, their gradients are
    averages over the group; several backwards add up. What no rank has a gradient for keeps None,
    as in one process, for which one byte per parameter travels with each backward. A sum over
    `parameters()`, such as a norm, is that of the own pieces: see clip_grad_norm_.

    Parameters and buffers start as rank 0's. Ranks have to call the same modules in the same order.
    compute_dtype: the module's parameters have it, while pieces, gradients and the optimizer keep
    the module's own, which is then that of master weights (Micikevicius et al., arXiv 1710.03740).
    reduction: "ordered", "library", or "auto": ordered on the CPU; see ReduceScatter.
    """

    keep = False  # whether full gradients stay after the reduce-scatter

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        compute_dtype: torch.dtype | None = None,
        reduction: str = "auto",
    ):
        super().__init__()
        _check_options(compute_dtype, reduction)
        ranks.check_model(module, group)
        if not all(p.is_floating_point() for p in module.parameters()):
            kind = type(module).__name__
            raise ValueError(f"module={kind}: allowed are parameters of floating-point types alone")
        self.module, self.group, self.compute_dtype = module, group, compute_dtype
        on_cpu = next(module.parameters()).device.type == "cpu"
        self.ordered = reduction == "ordered" or (reduction == "auto" and on_cpu)
        self.flats: list[Flat] = []
        self.frozen: dict[str, nn.Parameter] = {}  # whole on every rank
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._order = list(self._names.values())
        self._stepped = False
        self._backward: int | None = None  # autograd's number of the one that is under way
        self._synchronise = True
        self._sent: list[Gradients] = []
        for buffer in module.buffers():
            self._copy_from_rank_0(buffer)
        notice = weakref.WeakMethod(self._notice)  # the hook shall not keep the model alive

        def stepped(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            if (method := notice()) is not None:
                method(optimizer)

        self._hook = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, self._hook.remove)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's pieces, by the parameters' names in the module: for the optimizer."""
        pieces = dict(self.frozen)
        for flat in self.flats:
            pieces |= zip(flat.names, flat.pieces, strict=True)
        for name in self._order:
            yield (f"{prefix}.{name}" if prefix else name), pieces[name]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only stage 1 has it: see Zero1."""
        stage = type(self).__name__
        raise ValueError(
            f"no_sync: {stage} keeps a shard of the gradients, so each backward has to send them; "
            "allowed is Zero1, which keeps them whole"
        )
        yield

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their joint norm is `max_norm` at most; return what it was.

        Each rank knows its shard's share of the sum of squares: one number to add up over ranks.
        The norm is torch.nn.utils.clip_grad_norm_'s of one process, up to the order of a sum.
        """
        ranks.check_number(max_norm=max_norm)
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        square = norm.to(self.flats[0].device, torch.float64).square()
        dist.all_reduce(square, group=self.group)  # a scalar
        norm = square.sqrt().to(self.flats[0].master)
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The plain module's state dict, in full and on every rank, in the masters' dtype.

        Every rank has to call it. Between steps it is the way to look at weights.
        """
        whole = {name: p.detach().clone() for name, p in self.frozen.items()}
        for flat in self.flats:
            whole |= zip(flat.names, flat.whole(), strict=True)
        return {
            name: whole[self._names[id(t)]] if id(t) in self._names else t.detach().clone()
            for name, t in self.module.state_dict(keep_vars=True).items()
        }

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state dict of the plain module; every rank has to be given the same one."""
        if not isinstance(state, Mapping) or not all(isinstance(x, Tensor) for x in state.values()):
            kind = type(state).__name__
            raise ValueError(f"state={kind}: allowed are tensors by the names of the plain module")
        own = self.module.state_dict(keep_vars=True)
        if state.keys() != own.keys():
            names = sorted(state.keys() ^ own.keys())
            raise ValueError(f"state: {names} stand in one of state and module; allowed are both")
        shapes = {n: s for f in self.flats for n, s in zip(f.names, f.shapes, strict=True)}
        for name, tensor in own.items():
            shape = shapes.get(self._names.get(id(tensor), ""), tensor.shape)
            if state[name].shape != shape:
                given = list(state[name].shape)
                raise ValueError(f"state: {name} has shape {given}; allowed is {list(shape)}")
        for flat in self.flats:
            flat.shard.copy_(flat.joined([state[name] for name in flat.names])[flat.own])
        sharded = {id(p) for flat in self.flats for p in flat.parameters}
        for name, tensor in own.items():
            if id(tensor) not in sharded:
                tensor.copy_(state[name])
        self.changed()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a rank's own tensors are no model."""
        raise ValueError("state_dict: a rank has a shard alone; allowed is full_state_dict()")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused as well."""
        raise ValueError("load_state_dict: allowed is load_full_state_dict()")

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Moving and converting, which would tear parameters out of their flat tensors."""
        raise ValueError("a sharded model stays where it is: move or convert the module before")

    def changed(self) -> None:
        """Pieces have new values: on some rank, so it has to be called on all.

        The steps of torch's optimizers are noticed; only who changes pieces by hand calls this.
        """
        self._stepped = True

    def _notice(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped: if it is ours, pieces have changed, here or on other ranks."""
        own = {id(p) for p in self.parameters()}
        if any(id(p) in own for g in optimizer.param_groups for p in g["params"]):
            self.changed()

    def _copy_from_rank_0(self, tensor: Tensor) -> None:
        dist.broadcast(tensor.detach(), dist.get_global_rank(self.group, 0), group=self.group)

    def _take(self, flat: Flat) -> Tensor:
        """The flat tensor [size] of rank 0's parameters, in the masters' dtype."""
        whole = flat.joined([p.detach() for p in flat.parameters])
        self._copy_from_rank_0(whole)
        self.flats.append(flat)
        return whole

    # One backward: `_backward_begins` at its first sign of life, `_send` whatever is complete,
    # `_finish` when it is over.

    def _backward_begins(self) -> None:
        backward = torch._C._current_graph_task_id()
        if self._backward not in (None, backward):
            raise RuntimeError("an error ended the last backward: a forward has to come first")
        if self._backward is None:
            self._backward = backward
            # Autograd calls back when this backward is over, just before backward() returns: the
            # first moment at which a gradient that has not come is known not to come. The interface
            # is not public, but torch's DDP and FSDP2 stand on it too.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _send(self, gradients: Gradients) -> None:
        """Start a reduce-scatter. One at a time is under way, so that only one takes memory."""
        self._receive()
        gradients.send()
        self._sent.append(gradients)

    def _receive(self) -> None:
        for gradients in self._sent:
            gradients.receive()

    def _finish(self) -> None:
        """Send what is still here, wait for everything, and begin anew."""
        self._send_rest()
        if self._sent:
            # [trainable parameters]: did any rank have a gradient?
            had_gradient = torch.cat([g.had_gradient for g in self._sent])
            work = dist.all_reduce(had_gradient, dist.ReduceOp.MAX, self.group, async_op=True)
            self._receive()
            work.wait()
            parts = had_gradient.split([len(g.had_gradient) for g in self._sent])
            for gradients, part in zip(self._sent, parts, strict=True):
                gradients.settle(part)
        self._start_over()

    def _send_rest(self) -> None:
        raise NotImplementedError

    def _start_over(self) -> None:
        self._backward = None
        self._sent = []
