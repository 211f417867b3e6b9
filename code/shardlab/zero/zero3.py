"""Stage 3: parameters, too, are whole only while they are used.

Rajbhandari: Rajbhandari et al., arXiv 1910.02054, section 5.3; Zhao: Zhao et al., "PyTorch FSDP",
VLDB 2023 (arXiv 2304.11277), section 3.3 on prefetching.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from .flat import deal
from .sharded import Sharded, in_backward
from .units import Choice, Unit, modules_of, owners


class Zero3(Sharded):
    """Stage 3: a rank owns a shard of parameters, gradients and optimizer states, and no more.

    units: modules, or lists of modules, that are gathered one after another: just before their
    forward, and again before their backward; after either they are freed, and after backward their
    gradients are reduce-scattered at once. By default each of `module.blocks`. The rest of the
    module is gathered once, and whole from the beginning of forward to the end of backward; with
    units=[] this is all of it.

    prefetch: while a unit computes, gather the next one, in the order of the last forward (before
    the first one, that of `units`); in backward the one before. Then two units are whole at a time.
    reshard: free units after forward. If not, they stay whole until their backward is through.

    Bytes on the wire: P(N-1)/N elements in forward, in backward, and of gradients, 3P together
    (Rajbhandari, section 7.2.2), less what the rest does not need in backward.

    All ranks have to run the same units in the same order. See Sharded for the rest. Raises
    ValueError for units outside the module or inside one another, for what cannot be sharded, and
    on every rank when the ranks' modules differ.
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
        super().__init__(module, group, compute_dtype, reduction)
        self.reshard, self.prefetch = reshard, prefetch
        self.units: list[Unit] = []
        for parameters in owners(module, chosen):
            flats = deal(parameters, group, compute_dtype)
            for flat in flats:
                flat.train(self._take(flat)[flat.own].clone())
            self.units.append(Unit(flats, self.ordered))
        self.rest = self.units.pop()
        for unit in [self.rest, *self.units]:
            for gradients in unit.gradients:
                flat = gradients.flat
                for parameter, size in zip(flat.parameters, flat.sizes, strict=True):
                    arrived = partial(self._arrived, unit, size)
                    parameter.register_post_accumulate_grad_hook(arrived)
        module.register_forward_pre_hook(self._begin)
        for unit, modules in zip(self.units, chosen, strict=True):
            for part in modules:
                part.register_forward_pre_hook(partial(self._before, unit), with_kwargs=True)
                part.register_forward_hook(partial(self._after, unit))
        module.register_forward_hook(self._end)
        self._last = list(self.units)  # the order of the last forward
        self._sequence: list[Unit] = []  # of this one
        self._start_over()

    # Forward

    def _begin(self, *_: Any) -> None:
        """Before the module's forward: gather the rest, and the first unit behind it."""
        if in_backward():  # recomputing
            return self.rest.wait()
        if self._backward is not None:  # an error ended the last backward halfway
            for unit in [*self.units, self.rest]:
                for gradients in unit.gradients:
                    gradients.drop()
            self._start_over()
        self._free_all()
        self._last = self._sequence or self._last
        self._sequence = []
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
        if in_backward():
            return
        self._hear(self.rest, output)
        if not any(x.requires_grad for x in tree_leaves(output) if isinstance(x, Tensor)):
            self._free_all()

    def _hear(self, unit: Unit, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, unit))

    # Backward

    def _before_backward(self, unit: Unit, _gradient: Tensor) -> None:
        """Before a unit's backward: have it whole, and start on the one before."""
        self._backward_begins()
        unit.wait()
        if unit is self.rest or not (self.ordered and unit.gradients):
            self._prefetch(self._sequence[::-1], unit)

    def _arrived(self, unit: Unit, size: int, _parameter: Tensor) -> None:
        """Autograd calls this when a gradient of `size` elements is complete."""
        self._backward_begins()
        if unit.left:
            raise RuntimeError(
                "a unit's gradient came after its backward: its parameters are used outside of its "
                "forward; leave their module out of `units`, so that it belongs to the rest"
            )
        before, unit.arrived = unit.arrived, unit.arrived + size
        halfway = before < unit.size / 2 <= unit.arrived
        if self.ordered and halfway and unit is not self.rest:
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
            gradients.place_all()
            self._send(gradients)

    def _send_rest(self) -> None:
        """At the end of backward: whatever came first in forward, and the rest."""
        for unit in [*self._sequence[::-1], self.rest]:
            if not unit.left:
                self._leave(unit)

    def _prefetch(self, order: list[Unit], unit: Unit) -> None:
        """Start to gather the unit after `unit`; after the rest comes the first."""
        if not self.prefetch:
            return
        place = order.index(unit) + 1 if unit in order else 0
        if place < len(order) and (unit in order or unit is self.rest):
            order[place].launch()

    def _free_all(self) -> None:
        for unit in [*self.units, self.rest]:
            unit.free()

    def _start_over(self) -> None:
        super()._start_over()
        self._free_all()
        for unit in [*self.units, self.rest]:
            unit.uses, unit.arrived, unit.left = 0, 0, False
