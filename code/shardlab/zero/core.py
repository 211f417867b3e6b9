"""ZeRO's three stages: when weights are gathered, when gradients are sent, and what is kept.

To be read from top to bottom. `Stage` has what they do alike at the end of backward. `Zero1` and
`Zero2` have the model whole, and gather it anew after each step; `Zero3` gathers each `Unit` of it
just before it is used, and frees it behind. What is gathered and sent is a flat tensor (`flat`);
how a sharded model looks to its user stands in `wrapper`. N ranks, P elements.

Rajbhandari: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020 (arXiv 1910.02054). Zhao: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully
Sharded Data Parallel", VLDB 2023 (arXiv 2304.11277).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from shardlab import ranks
from shardlab.buckets import MIB, copy_from_rank_0, in_backward

from .flat import Flat, Gradients
from .units import Choice, modules_of, names_of, owners
from .wrapper import Sharded


class Stage(Sharded):
    """What the stages do alike: send gradients while backward computes, and end it together."""

    def _start_over(self) -> None:
        self._backward.over()
        self._sent: list[Gradients] = []

    def _send(self, gradients: Gradients) -> None:
        """Start a reduce-scatter. One at a time is under way, so that only one takes memory."""
        self._receive()
        gradients.send()
        self._sent.append(gradients)

    def _receive(self) -> None:
        for gradients in self._sent:
            gradients.receive()

    def _send_rest(self) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        """When backward is over: send what is still here, wait for everything, and begin anew."""
        self._send_rest()
        if self._sent:
            # [trainable parameters]: did any rank have a gradient? Otherwise it is to stay None.
            had_gradient = torch.cat([g.had_gradient for g in self._sent])
            work = dist.all_reduce(had_gradient, dist.ReduceOp.MAX, self.group, async_op=True)
            self._receive()
            work.wait()
            parts = had_gradient.split([len(g.had_gradient) for g in self._sent])
            for gradients, part in zip(self._sent, parts, strict=True):
                gradients.settle(part)
        self._start_over()


class Zero1(Stage):
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
        ranks.check_bytes(**sizes)
        super().__init__(module, group, compute_dtype, reduction, late=late, **sizes)
        trained = [p for p in module.parameters() if p.requires_grad]
        self._shard(reversed(trained), True, bucket_bytes, first_bytes)
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                copy_from_rank_0([parameter], group)
                parameter.data = parameter.data.to(compute_dtype or parameter.dtype)
                self.frozen[name] = parameter
        self.gradients = [Gradients(flat, self.keep, self.ordered) for flat in self.flats]
        for gradients in self.gradients:
            for index, parameter in enumerate([] if late else gradients.flat.parameters):
                arrived = partial(self._arrived, gradients, index)
                parameter.register_post_accumulate_grad_hook(arrived)
        self._versions = {flat: flat.shard._version for flat in self.flats}
        flat_of = {p: flat for flat in self.flats for p in flat.parameters}
        module.register_forward_pre_hook(self._begin)
        for part in module.modules():
            own = part.parameters(recurse=part is not module)
            used = {flat_of[p]: None for p in own if p in flat_of}
            part.register_forward_pre_hook(partial(self._await, used))
        module.register_forward_hook(partial(self._await, self.flats))
        self._synchronise = True
        self._start_over()

    def _start_over(self) -> None:
        super()._start_over()
        self._next = list(self.gradients)  # to be sent, in one fixed order on all ranks
        self._pending = {g: len(g.flat.parameters) for g in self.gradients}

    def _begin(self, *_: Any) -> None:
        """Before the module's forward: start to gather what the optimizer has changed."""
        if in_backward():  # recomputing
            return
        self._await(self.flats)  # in case an error ended the last forward halfway
        if self._backward.unfinished:  # an error ended the last backward halfway
            for gradients in self.gradients:
                gradients.forget()
            self._start_over()
        news = any(flat.shard._version != self._versions[flat] for flat in self.flats)
        if news and not self._stepped:
            # Whoever sees it may be the only one who does, and would wait for ever for the others.
            raise RuntimeError("pieces were changed by hand: call changed() on all ranks")
        for flat in reversed(self.flats) if self._stepped else ():  # in the order of forward
            flat.gather()
        self._stepped = False

    def _await(self, flats: Iterable[Flat], *_: Any) -> None:
        """Before the forward of a module in it: have whole what it uses."""
        for flat in flats:
            if flat.state == "coming":
                flat.wait()
                self._versions[flat] = flat.shard._version

    def _arrived(self, gradients: Gradients, index: int, _parameter: Tensor) -> None:
        """Autograd calls this when a gradient is complete, all uses of its parameter added up."""
        self._backward.begins(self._finish)
        gradients.place(index)
        self._pending[gradients] -= 1
        while self._synchronise and self._next and not self._pending[self._next[0]]:
            self._send(self._next.pop(0))

    def _send_rest(self) -> None:
        while self._synchronise and self._next:
            self._send(self._next.pop(0))

    def reduce(self) -> None:
        """With `late`: average the gradients that are there, and give pieces their parts."""
        for gradients in self.gradients:
            for index, parameter in enumerate(gradients.flat.parameters):
                if parameter.grad is not None:
                    gradients.place(index)
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


class Zero2(Zero1):
    """Stage 2: as stage 1, but of the gradients, too, a rank keeps its shard alone.

    A bucket's full gradients live from the first of them to the end of its reduce-scatter. With
    several micro-batches in a step each has to send its own, and shards add up: m micro-batches
    send m times the gradients of one; there is no `no_sync`, whose whole gradients are stage 1's.

    Bytes on the wire: 2P(N-1)/N elements as well (Rajbhandari, section 7.2.1).
    """

    keep = False
    no_sync = Sharded.no_sync


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered, used and freed together, and how far they are in this step."""

    flats: list[Flat]  # one for each kind of parameter in it
    gradients: list[Gradients]  # of those that are trained
    uses: int = 0  # forwards whose backward is not through
    arrived: int = 0  # elements whose gradients have come
    left: bool = False  # its gradients are sent

    def launch(self) -> None:
        """Start to gather, unless it is gathered already."""
        for flat in self.flats:
            if flat.state == "free":
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


class Zero3(Stage):
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
        chosen = modules_of(module, units) if isinstance(module, nn.Module) else []
        own = {"units": names_of(module, chosen), "reshard": reshard, "prefetch": prefetch}
        super().__init__(module, group, compute_dtype, reduction, **own)
        self.reshard, self.prefetch = reshard, prefetch
        self.units: list[Unit] = []
        for parameters in owners(module, chosen):
            flats = self._shard(parameters, stay=False)
            gradients = [Gradients(f, self.keep, self.ordered) for f in flats if f.trainable]
            self.units.append(Unit(flats, gradients))
            for flat in (g.flat for g in gradients):
                for parameter, size in zip(flat.parameters, flat.sizes, strict=True):
                    arrived = partial(self._arrived, self.units[-1], size)
                    parameter.register_post_accumulate_grad_hook(arrived)
        self.rest = self.units.pop()
        module.register_forward_pre_hook(self._begin)
        for unit, modules in zip(self.units, chosen, strict=True):
            for part in modules:
                part.register_forward_pre_hook(partial(self._before, unit), with_kwargs=True)
                part.register_forward_hook(partial(self._after, unit))
        module.register_forward_hook(self._end)
        self._last = list(self.units)  # the order of the last forward
        self._sequence: list[Unit] = []  # of this one
        self._start_over()

    def _start_over(self) -> None:
        super()._start_over()
        for unit in [*self.units, self.rest]:
            unit.free()
            unit.uses, unit.arrived, unit.left = 0, 0, False

    def _begin(self, *_: Any) -> None:
        """Before the module's forward: gather the rest, and the first unit behind it."""
        if in_backward():  # recomputing
            return self.rest.wait()
        if self._backward.unfinished:  # an error ended the last backward halfway
            for unit in [*self.units, self.rest]:
                for gradients in unit.gradients:
                    gradients.forget()
            self._start_over()
        self._free_all()
        self._last, self._sequence = self._sequence or self._last, []
        self.rest.launch()
        if self.prefetch and self._last:
            self._last[0].launch()
        self.rest.wait()

    def _before(self, unit: Unit, part: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before a unit's forward: have it whole, start on the next, and see when it is through."""
        unit.wait()
        if in_backward():
            return None
        if unit not in self._sequence:
            self._sequence.append(unit)
        self._prefetch(self._last, unit)
        if not torch.is_grad_enabled():
            return None
        # Autograd has gone through the unit when it has the gradients of all that went into it.
        # Inputs become aliases, one step later in its graph, which are told from their other uses.
        aliases: dict[int, Tensor] = {}

        def alias(x: Tensor) -> Tensor:
            return aliases.setdefault(id(x), x.view_as(x)) if x.requires_grad else x

        args, kwargs = tree_map_only(Tensor, alias, (args, kwargs))
        unit.uses += 1
        if aliases:  # otherwise nobody tells, and the unit is through when backward is
            register_multi_grad_hook(list(aliases.values()), partial(self._done, unit))
        return args, kwargs

    def _after(self, unit: Unit, part: nn.Module, args: Any, output: Any) -> None:
        """After a unit's forward: free it, and hear when backward comes to it."""
        if in_backward():
            return
        if self.reshard or not torch.is_grad_enabled():
            unit.free()
        self._hear(unit, output)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the module's forward: without a backward to come, nothing stays whole."""
        if not in_backward() and not self._hear(self.rest, output):
            self._free_all()

    def _hear(self, unit: Unit, output: Any) -> bool:
        """Whether there is a backward to come; `_before_backward` is called when it does."""
        found = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        for tensor in found:
            tensor.register_hook(partial(self._before_backward, unit))
        return bool(found)

    def _before_backward(self, unit: Unit, _gradient: Tensor) -> None:
        """Before a unit's backward: have it whole, and start on the one before."""
        self._backward.begins(self._finish)
        unit.wait()
        if unit is self.rest or not (self.ordered and unit.gradients):
            self._prefetch(self._sequence[::-1], unit)

    def _arrived(self, unit: Unit, size: int, _parameter: Tensor) -> None:
        """Autograd calls this when a gradient of `size` elements is complete."""
        self._backward.begins(self._finish)
        if unit.left:
            raise RuntimeError(
                "a unit's gradient came after its backward: its parameters are used outside of its "
                "forward; leave their module out of `units`, so that it belongs to the rest"
            )
        half = sum(sum(gradients.flat.sizes) for gradients in unit.gradients) / 2
        before, unit.arrived = unit.arrived, unit.arrived + size
        if self.ordered and before < half <= unit.arrived and unit is not self.rest:
            # What an ordered reduce-scatter receives takes up to as much memory as what it sends.
            # So the first half of a unit's backward hides the gradients of the unit behind it, the
            # second half the parameters of the unit ahead.
            self._receive()
            self._prefetch(self._sequence[::-1], unit)

    def _done(self, unit: Unit, _gradients: Any) -> None:
        """After a unit's backward: free it, and send its gradients."""
        unit.uses -= 1
        if unit.uses == 0:
            self._leave(unit)

    def _leave(self, unit: Unit) -> None:
        unit.free()
        unit.left = True
        for gradients in unit.gradients:
            self._receive()
            for index, parameter in enumerate(gradients.flat.parameters):
                if parameter.grad is not None:
                    gradients.place(index)
            self._send(gradients)

    def _send_rest(self) -> None:
        """At the end of backward: whatever came first in forward, and the rest."""
        for unit in [*self._sequence[::-1], self.rest]:
            if not unit.left:
                self._leave(unit)

    def _prefetch(self, order: list[Unit], unit: Unit) -> None:
        """Start to gather the unit after `unit`; after the rest comes the first."""
        place = order.index(unit) + 1 if unit in order else 0
        if self.prefetch and place < len(order) and (place or unit is self.rest):
            order[place].launch()

    def _free_all(self) -> None:
        for unit in [*self.units, self.rest]:
            unit.free()
