"""ZeRO's three stages: when weights are gathered, when gradients are sent, and what is kept.

`Zero1` and `Zero2` have the model whole, and gather it anew after each step; `Zero3` gathers each
`Unit` of it just before it is used, and frees it behind. The methods of each stand in the order in
which a step calls them. A step goes from here to `flat`, which gathers parameters and sends
gradients; `wrapper` has what happens between steps. N ranks, P elements.

Rajbhandari: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020 (arXiv 1910.02054). Zhao: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully
Sharded Data Parallel", VLDB 2023 (arXiv 2304.11277).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from shardlab.common.arguments import check_whole
from shardlab.data_parallel.buckets import MIB, copy_from_rank_0, in_backward

from .flat import Flat, Gradients, Reducer
from .units import Choice, modules_of, owners
from .wrapper import Sharded


class Zero1(Sharded):
    """Stage 1: parameters and gradients are whole on every rank, the optimizer's states sharded.

    Buckets: flat tensors of `bucket_bytes`, the last parameters first, as gradients come; the first
    is full at `first_bytes`. A bucket leaves while backward still computes the next ones. After
    optimizer.step() a rank has new values of its own shards alone. This class gathers them late,
    with the next forward, in which each module waits only for what it uses itself; until then
    `module` holds old values outside the own shards. ZeRO itself gathers at the end of the step.

    Bytes on the wire: P(N-1)/N elements of gradients and as many of parameters, 2P together, as
    much as one all-reduce of the gradients (Rajbhandari, section 7.1).
    late: gradients stay where autograd puts them until `reduce` is called, once for a step.
    See Sharded for the rest. Raises ValueError for sizes below 1, and for what cannot be sharded.
    """

    keep = True

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        bucket_bytes: int = 25 * MIB,
        first_bytes: int = MIB,
        compute_dtype: torch.dtype | None = None,
        reduction: str = "auto",
        late: bool = False,
    ):
        sizes = {"bucket_bytes": bucket_bytes, "first_bytes": first_bytes}
        check_whole(**sizes)
        super().__init__(module, group, compute_dtype, reduction, late=late, **sizes)
        trained = [p for p in module.parameters() if p.requires_grad]
        self._shard(reversed(trained), True, bucket_bytes, first_bytes)
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                copy_from_rank_0([parameter], group)
                parameter.data = parameter.data.to(compute_dtype or parameter.dtype)
                self.frozen[name] = parameter
        self._versions = {flat: flat.shard._version for flat in self.flats}
        buckets = [Gradients(flat, self.keep, self.ordered) for flat in self.flats]
        self.reducer = Reducer(buckets, group)
        self._synchronise = True
        self._stepped = False  # pieces may have new values
        self._start_over()
        notice = weakref.WeakMethod(self._notice)  # the hook shall not keep the model alive
        hook = register_optimizer_step_post_hook(
            lambda optimizer, *_: (method := notice()) and method(optimizer)
        )
        weakref.finalize(self, hook.remove)

        flat_of = {p: flat for flat in self.flats for p in flat.parameters}
        module.register_forward_pre_hook(self._pre_forward)
        for part in module.modules():
            own = part.parameters(recurse=part is not module)
            used = {flat_of[p]: None for p in own if p in flat_of}
            part.register_forward_pre_hook(partial(self._await, used))
        module.register_forward_hook(partial(self._await, self.flats))
        for bucket in [] if late else buckets:
            for index, parameter in enumerate(bucket.flat.parameters):
                arrived = partial(self._arrived, bucket, index)
                parameter.register_post_accumulate_grad_hook(arrived)

    def _start_over(self) -> None:
        """Reset the bookkeeping of gradients before a new backward."""
        self._backward.over()
        self._unsent = list(self.reducer.gradients)  # in one fixed order on all ranks
        self._pending = {bucket: len(bucket.flat.parameters) for bucket in self._unsent}

    def _pre_forward(self, *_: Any) -> None:
        """Before the module's forward: start to gather what the optimizer has changed."""
        if in_backward():  # recomputing
            return
        self._await(self.flats)  # in case an error ended the last forward halfway
        if self._backward.unfinished:  # an error ended the last backward halfway
            self.reducer.forget()
            self._start_over()
        news = any(flat.shard._version != self._versions[flat] for flat in self.flats)
        if news and not self._stepped:
            # Whoever sees it may be the only one who does, and would wait for ever for the others.
            raise RuntimeError("pieces were changed by hand: call changed() on all ranks")
        for flat in reversed(self.flats) if self._stepped else ():  # in the order of forward
            flat.gather()
        self._stepped = False

    def _await(self, flats: Iterable[Flat], *_: Any) -> None:
        """Forward pre-hook of each module: wait until the parameters that it uses are gathered."""
        for flat in flats:
            if flat.state == "gathering":
                flat.wait()
                self._versions[flat] = flat.shard._version

    def _arrived(self, bucket: Gradients, index: int, _parameter: Tensor) -> None:
        """Autograd calls this when a gradient is complete, all uses of its parameter added up."""
        self._backward.begins(self._finish)
        bucket.place(index)
        self._pending[bucket] -= 1
        while self._synchronise and self._unsent and not self._pending[self._unsent[0]]:
            self.reducer.send(self._unsent.pop(0))

    def _finish(self) -> None:
        """When backward is over: send what missing gradients have held up, and wait for all."""
        while self._synchronise and self._unsent:
            self.reducer.send(self._unsent.pop(0))
        self.reducer.finish()
        self._start_over()

    def reduce(self) -> None:
        """With `late`: average the gradients that are there, and give pieces their parts."""
        self._finish()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward adds to this rank's own full gradients and sends nothing.

        Put all micro-batches of a step inside but the last.
        """
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def changed(self) -> None:
        """Pieces have new values: on some rank, so it has to be called on all.

        The steps of torch's optimizers are noticed; only who changes pieces by hand calls this.
        """
        self._stepped = True

    def _notice(self, optimizer: torch.optim.Optimizer) -> None:
        """After a step of any optimizer: if it trains pieces, they have changed on some rank."""
        own = {id(p) for p in self.parameters()}
        if any(id(p) in own for g in optimizer.param_groups for p in g["params"]):
            self.changed()


class Zero2(Zero1):
    """Stage 2: as stage 1, but of the gradients, too, a rank keeps its shard alone.

    A bucket's full gradients live from the first of them to the end of its reduce-scatter. With
    several micro-batches in a step each has to send its own, and shards add up: m micro-batches
    send m times the gradients of one; there is no `no_sync`, whose full gradients are stage 1's.

    Bytes on the wire: 2P(N-1)/N elements as well (Rajbhandari, section 7.2.1).
    """

    keep = False
    no_sync = Sharded.no_sync


class Unit:
    """Parameters that are gathered, used and freed together, and how far they are in this step.

    Parameters: sharded -> gathering (`launch`) -> full (`wait`) -> sharded (`free`). Gradients:
    `enter` with each forward, `arrive` one by one, `leave` with each backward, `send` after the
    last of these; `reset` ends the step.
    """

    def __init__(self, flats: list[Flat], ordered: bool):
        self.flats = flats  # one for each kind of parameter in it
        self.gradients = [Gradients(f, keep=False, ordered=ordered) for f in flats if f.trainable]
        self.elements = sum(sum(g.flat.sizes) for g in self.gradients)
        self.reset()

    def launch(self) -> None:
        """Start to gather, unless it is gathered already."""
        for flat in self.flats:
            if flat.state == "sharded":
                flat.gather()

    def wait(self) -> None:
        """Have it whole."""
        self.launch()
        for flat in self.flats:
            flat.wait()

    def free(self) -> None:
        """Give its memory back."""
        for flat in self.flats:
            flat.free()

    def enter(self) -> None:
        """Count a forward, whose backward is to come."""
        self.uses += 1

    def arrive(self, parameter: Tensor) -> bool:
        """Count a gradient; return True for the one with which half of the elements are there."""
        if self.sent:
            raise RuntimeError(
                "a unit's gradient came after its backward: its parameters are used outside of its "
                "forward; leave their module out of `units`, so that it belongs to the rest"
            )
        before, self.arrived = self.arrived, self.arrived + parameter.numel()
        return before < self.elements / 2 <= self.arrived

    def leave(self) -> bool:
        """Count a backward; return True for the last, that of the first forward."""
        self.uses -= 1
        return self.uses == 0

    def send(self, reducer: Reducer) -> None:
        """Free it, and send its gradients, once for each step."""
        if not self.sent:
            self.free()
            self.sent = True
            for gradients in self.gradients:
                reducer.send(gradients)

    def reset(self) -> None:
        """Keep this rank's shard alone, and begin to count anew."""
        self.free()
        self.uses, self.arrived, self.sent = 0, 0, False


class Zero3(Sharded):
    """Stage 3: a rank owns a shard of parameters, gradients and optimizer states, and no more.

    units: modules, or lists of modules, that are gathered one after another: just before their
    forward, and again before their backward; after either they are freed, and after backward their
    gradients are reduce-scattered at once. By default each of `module.blocks`. The rest of the
    module is gathered once, and whole from the beginning of forward to the end of backward; with
    units=[] this is all of it.

    prefetch: while a unit computes, gather the next one, in the order of the last forward (before
    the first one, that of `units`); in backward the one before. Then two units are whole at a time
    (Zhao, section 3.3). reshard: free units after forward. If not, they stay until their backward.

    Bytes on the wire: P(N-1)/N elements in forward, in backward, and of gradients, 3P together
    (Rajbhandari, section 7.2.2), less what the rest does not need in backward.

    All ranks have to run the same units in the same order. See Sharded for the rest. Raises
    ValueError for units outside the module or inside one another, and for what cannot be sharded.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        units: Sequence[Choice] | None = None,
        reshard: bool = True,
        prefetch: bool = True,
        compute_dtype: torch.dtype | None = None,
        reduction: str = "auto",
    ):
        chosen = modules_of(module, units)
        own = {"units": [[*unit] for unit in chosen], "reshard": reshard, "prefetch": prefetch}
        super().__init__(module, group, compute_dtype, reduction, **own)
        self.reshard, self.prefetch = reshard, prefetch
        parts = [[*unit.values()] for unit in chosen]
        units_and_rest = [
            Unit(self._shard(parameters, stay=False), self.ordered)
            for parameters in owners(module, parts)
        ]
        *self.units, self.rest = units_and_rest
        self.reducer = Reducer([g for unit in units_and_rest for g in unit.gradients], group)
        self._order = list(self.units)  # of the last forward
        self._ran: list[Unit] = []  # in this one

        for unit, modules in zip(units_and_rest, [*parts, [module]], strict=True):
            for part in modules:
                part.register_forward_pre_hook(partial(self._pre_forward, unit), with_kwargs=True)
                part.register_forward_hook(partial(self._post_forward, unit))
            for parameter in (p for g in unit.gradients for p in g.flat.parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, unit))

    def _start_over(self) -> None:
        """Reset all units before a new forward and backward."""
        self._backward.over()
        for unit in [*self.units, self.rest]:
            unit.reset()

    def _pre_forward(self, unit: Unit, part: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before a unit's forward: have it whole, start on the next, and see when it is through.

        The rest's is the module's own: a step begins.
        """
        if in_backward():  # recomputing
            return unit.wait()
        if unit is self.rest:
            if self._backward.unfinished:  # an error ended the last backward halfway
                self.reducer.forget()
                self._start_over()
            self._free_all()  # in case an error ended the last forward halfway
            self._order, self._ran = self._ran or self._order, []
        elif unit not in self._ran:
            self._ran.append(unit)
        unit.launch()
        self._prefetch(self._order, unit)
        unit.wait()
        if unit is self.rest or not torch.is_grad_enabled():
            return None
        # Autograd has gone through the unit when it has the gradients of all that went into it.
        # Inputs become aliases, one step later in its graph, which are told from their other uses.
        aliases: dict[int, Tensor] = {}

        def alias(x: Tensor) -> Tensor:
            return aliases.setdefault(id(x), x.view_as(x)) if x.requires_grad else x

        args, kwargs = tree_map_only(Tensor, alias, (args, kwargs))
        unit.enter()
        if aliases:  # otherwise nobody tells, and the unit is through when backward is
            register_multi_grad_hook(list(aliases.values()), partial(self._post_backward, unit))
        return args, kwargs

    def _post_forward(self, unit: Unit, part: nn.Module, args: Any, output: Any) -> None:
        """After a unit's forward: free it, and hear when backward comes to it."""
        if in_backward():
            return
        tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        for tensor in tensors:
            tensor.register_hook(partial(self._pre_backward, unit))
        if unit is self.rest and not tensors:  # no backward is to come
            self._free_all()
        elif (self.reshard and unit is not self.rest) or not torch.is_grad_enabled():
            unit.free()

    def _pre_backward(self, unit: Unit, _gradient: Tensor) -> None:
        """Before a unit's backward: have it whole, and start on the one before."""
        self._backward.begins(self._finish)
        unit.wait()
        if unit is self.rest or not self.ordered:
            self._prefetch(self._ran[::-1], unit)

    def _arrived(self, unit: Unit, parameter: Tensor) -> None:
        """Autograd calls this when a gradient is complete, all uses of its parameter added up."""
        self._backward.begins(self._finish)
        # What an ordered reduce-scatter receives takes up to as much memory as what it sends. So
        # the first half of a unit's backward hides the gradients of the unit behind it, the second
        # half the parameters of the unit ahead.
        if unit.arrive(parameter) and unit is not self.rest and self.ordered:
            self.reducer.receive()
            self._prefetch(self._ran[::-1], unit)

    def _post_backward(self, unit: Unit, _gradients: Any) -> None:
        """After a unit's backward: free it, and send its gradients."""
        if unit.leave():
            unit.send(self.reducer)

    def _finish(self) -> None:
        """When backward is over: send whatever came first in forward, and the rest."""
        for unit in [*self._ran[::-1], self.rest]:
            unit.send(self.reducer)
        self.reducer.finish()
        self._start_over()

    def _prefetch(self, order: list[Unit], unit: Unit) -> None:
        """Start to gather what follows `unit` in `order`, in which the rest comes first."""
        order = [self.rest, *order]
        following = order[order.index(unit) + 1 :] if unit in order else []
        if self.prefetch and following:
            following[0].launch()

    def _free_all(self) -> None:
        for unit in [*self.units, self.rest]:
            unit.free()
