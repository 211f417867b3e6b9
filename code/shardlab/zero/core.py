"""ZeRO stages 1 to 3: when parameters are gathered, gradients are sent and memory is freed.

`Zero1` and `Zero2` keep the whole model on every rank and gather its parameters after each
optimizer step; `Zero3` gathers each `Unit` just before its use and frees it afterwards. Each class
lists its methods in the order in which a training step calls them. `flat` gathers parameters and
reduce-scatters gradients; `wrapper` does the work between steps. N ranks, P elements.

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

from shardlab.common.arguments import check_integer
from shardlab.data_parallel.buckets import MIB, copy_from_rank_0, is_in_backward

from .flat import FlatGrads, FlatParams, Reducer
from .units import UnitSpec, assign_parameters, find_units
from .wrapper import ShardedModule


class Zero1(ShardedModule):
    """Stage 1: whole parameters and gradients on each rank, sharded optimizer states.

    Buckets are flat tensors of `bucket_bytes` (the first: `first_bytes`) with the last
    parameters first. A full bucket is sent while backward computes the next gradients. After
    optimizer.step() a rank has new values of its own shards alone. The next forward gathers the
    others, and each module waits only for the parameters that it uses itself. Until then
    `module` has stale values of the other shards. (The paper gathers within the step.)

    Bytes on the wire: P(N-1)/N elements each for gradients and parameters, 2P together, as many
    as one all-reduce of the gradients sends (Rajbhandari, section 7.1). defer_reduction: gradients
    stay in `parameter.grad` until `reduce_gradients` is called, once per step. Other arguments: see
    ShardedModule. Raises ValueError for sizes below 1 and unshardable modules.
    """

    keep_full = True

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        bucket_bytes: int = 25 * MIB,
        first_bytes: int = MIB,
        compute_dtype: torch.dtype | None = None,
        reduction: str = "auto",
        defer_reduction: bool = False,
    ):
        sizes: dict[str, Any] = {"bucket_bytes": bucket_bytes, "first_bytes": first_bytes}
        check_integer(**sizes)
        own = sizes | {"defer_reduction": defer_reduction}
        super().__init__(module, group, compute_dtype, reduction, **own)
        trained = [p for p in module.parameters() if p.requires_grad]
        self._shard_parameters(reversed(trained), True, bucket_bytes, first_bytes)
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                copy_from_rank_0([parameter], group)
                parameter.data = parameter.data.to(compute_dtype or parameter.dtype)
                self.frozen[name] = parameter
        self._versions = {flat: flat.shard._version for flat in self.flats}
        buckets = [FlatGrads(flat, self.keep_full, self.ordered) for flat in self.flats]
        self.reducer = Reducer(buckets, group)
        self._require_sync = True
        self._gather_needed = False  # True: an optimizer has stepped since the last gather
        self._reset_backward_state()
        # A weak reference, because the hook must not keep the model alive.
        on_step = weakref.WeakMethod(self._on_optimizer_step)
        hook = register_optimizer_step_post_hook(
            lambda optimizer, *_: (method := on_step()) and method(optimizer)
        )
        weakref.finalize(self, hook.remove)

        flat_of = {p: flat for flat in self.flats for p in flat.parameters}
        module.register_forward_pre_hook(self._pre_forward)
        for part in module.modules():
            own = part.parameters(recurse=part is not module)
            used = {flat_of[p]: None for p in own if p in flat_of}
            part.register_forward_pre_hook(partial(self._wait_for_params, used))
        module.register_forward_hook(partial(self._wait_for_params, self.flats))
        for bucket in [] if defer_reduction else buckets:
            for index, parameter in enumerate(bucket.flat.parameters):
                hook = partial(self._on_grad_ready, bucket, index)
                parameter.register_post_accumulate_grad_hook(hook)

    def _reset_backward_state(self) -> None:
        self._backward.mark_ended()
        self._unsent = list(self.reducer.gradients)  # the same order on all ranks
        self._pending = {bucket: len(bucket.flat.parameters) for bucket in self._unsent}

    def _pre_forward(self, *_: Any) -> None:
        """Forward pre-hook: start to gather parameters after an optimizer step."""
        if is_in_backward():  # inside backward: checkpointing recomputes this forward
            return
        self._wait_for_params(self.flats)  # an error may have ended the last forward halfway
        if self._backward.is_unfinished:  # an error has ended the last backward halfway
            self.reducer.discard_gradients()
            self._reset_backward_state()
        news = any(flat.shard._version != self._versions[flat] for flat in self.flats)
        if news and not self._gather_needed:
            # A rank that gathers alone would wait for ever for the ranks that saw no change.
            raise RuntimeError("pieces were changed by hand: call mark_changed() on all ranks")
        for flat in reversed(self.flats) if self._gather_needed else ():  # in forward's order
            flat.start_gather()
        self._gather_needed = False

    def _wait_for_params(self, flats: Iterable[FlatParams], *_: Any) -> None:
        """Forward pre-hook of each module: wait until the parameters that it uses are gathered."""
        for flat in flats:
            if flat.state == "gathering":
                flat.wait()
                self._versions[flat] = flat.shard._version

    def _on_grad_ready(self, bucket: FlatGrads, index: int, _parameter: Tensor) -> None:
        """Count a final gradient (autograd hook); send the buckets that are full."""
        self._backward.mark_started(self._finalize_backward)
        bucket.add_gradient(index)
        self._pending[bucket] -= 1
        while self._require_sync and self._unsent and not self._pending[self._unsent[0]]:
            self.reducer.start_reduce_scatter(self._unsent.pop(0))

    def _finalize_backward(self) -> None:
        while self._require_sync and self._unsent:
            self.reducer.start_reduce_scatter(self._unsent.pop(0))
        self.reducer.finish_all()
        self._reset_backward_state()

    def reduce_gradients(self) -> None:
        """Average the gradients and fill those of the pieces: only with `defer_reduction`."""
        self._finalize_backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate full local gradients without sending, inside this context.

        Wrap all micro-batches of a step but the last.
        """
        before, self._require_sync = self._require_sync, False
        try:
            yield
        finally:
            self._require_sync = before

    def mark_changed(self) -> None:
        """Tell this rank that pieces have new values on some rank; all ranks call this.

        Steps of torch's optimizers are noticed automatically; only code that writes to pieces
        itself has to call this.
        """
        self._gather_needed = True

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        own = {id(p) for p in self.parameters()}
        if any(id(p) in own for g in optimizer.param_groups for p in g["params"]):
            self.mark_changed()


class Zero2(Zero1):
    """Stage 2: as stage 1, but each rank also keeps only its shard of the gradients.

    A bucket's full gradients live from its first gradient to the end of its reduce-scatter.
    Each micro-batch sends its own gradients, and the shards add up, so m micro-batches send m
    times as much as one. `no_sync` is refused: it would keep full gradients.

    Bytes on the wire: 2P(N-1)/N elements as well (Rajbhandari, section 7.2.1).
    """

    keep_full = False
    no_sync = ShardedModule.no_sync


class Unit:
    """Parameters that are gathered, used and freed together, with their step state.

    Parameters: sharded -> gathering (`start_gather`) -> full (`wait`) -> sharded (`free_full`).
    Gradients: `count_forward`, `count_gradient` and `count_backward` are called by hooks, then
    `reduce_gradients` once; `reset_state` ends the step.
    """

    def __init__(self, flats: list[FlatParams], ordered: bool):
        self.flats = flats  # one for each dtype, device and requires_grad
        self.gradients = [FlatGrads(f, False, ordered) for f in flats if f.trainable]
        self.elements = sum(sum(g.flat.sizes) for g in self.gradients)
        self.reset_state()

    def start_gather(self) -> None:
        """Start to gather the sharded parameters."""
        for flat in self.flats:
            if flat.state == "sharded":
                flat.start_gather()

    def wait(self) -> None:
        """Wait until all parameters of the unit are gathered."""
        self.start_gather()
        for flat in self.flats:
            flat.wait()

    def free_full(self) -> None:
        """Free the memory of the gathered parameters."""
        for flat in self.flats:
            flat.free_full()

    def count_forward(self) -> None:
        """Count a forward whose backward is still to come."""
        self.pending_backwards += 1

    def count_gradient(self, parameter: Tensor) -> bool:
        """Count a gradient; return True if it completes half of the unit's elements."""
        if self.sent:
            raise RuntimeError(
                "a unit's gradient came after its backward: its parameters are used outside of its "
                "forward; leave their module out of `units`, so that it belongs to the rest"
            )
        before, self.ready_elements = self.ready_elements, self.ready_elements + parameter.numel()
        return before < self.elements / 2 <= self.ready_elements

    def count_backward(self) -> bool:
        """Count a backward; return True for the last: the first forward's."""
        self.pending_backwards -= 1
        return self.pending_backwards == 0

    def reduce_gradients(self, reducer: Reducer) -> None:
        """Free the parameters and send the gradients, once per step."""
        if not self.sent:
            self.free_full()
            self.sent = True
            for gradients in self.gradients:
                reducer.start_reduce_scatter(gradients)

    def reset_state(self) -> None:
        """Free the gathered parameters and reset the counters."""
        self.free_full()
        self.pending_backwards, self.ready_elements, self.sent = 0, 0, False


class Zero3(ShardedModule):
    """Stage 3: each rank owns one shard of parameters, gradients and optimizer states.

    units: modules, or lists of modules (by default each of `module.blocks`). Each unit is
    gathered just before its forward and again before its backward, and freed after either;
    after backward its gradients are reduce-scattered at once. The rest of the module (with
    units=[] all of it) stays gathered from the start of forward to the end of backward.

    prefetch: while a unit computes, gather the next one in the order of the last forward (at
    first, of `units`), and in backward the previous one. Two units are then whole at a time
    (Zhao, section 3.3). reshard: free units after forward, not only after backward.

    Bytes on the wire: P(N-1)/N elements each in forward, in backward and for gradients, 3P
    together (Rajbhandari, section 7.2.2), less the rest, which is gathered only once.

    All ranks must run the same units in the same order. See ShardedModule for the other arguments.
    Raises ValueError for units outside the module or nested ones, and unshardable modules.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        units: Sequence[UnitSpec] | None = None,
        reshard: bool = True,
        prefetch: bool = True,
        compute_dtype: torch.dtype | None = None,
        reduction: str = "auto",
    ):
        chosen = find_units(module, units)
        own = {"units": [[*unit] for unit in chosen], "reshard": reshard, "prefetch": prefetch}
        super().__init__(module, group, compute_dtype, reduction, **own)
        self.reshard, self.prefetch = reshard, prefetch
        parts = [[*unit.values()] for unit in chosen]
        units_and_rest = [
            Unit(self._shard_parameters(parameters, keep_full=False), self.ordered)
            for parameters in assign_parameters(module, parts)
        ]
        *self.units, self.rest = units_and_rest
        self.reducer = Reducer([g for unit in units_and_rest for g in unit.gradients], group)
        self._last_order = list(self.units)  # units in the order of the last forward
        self._order: list[Unit] = []  # units in the order of this forward

        for unit, modules in zip(units_and_rest, [*parts, [module]], strict=True):
            for part in modules:
                part.register_forward_pre_hook(partial(self._pre_forward, unit), with_kwargs=True)
                part.register_forward_hook(partial(self._post_forward, unit))
            for parameter in (p for g in unit.gradients for p in g.flat.parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._on_grad_ready, unit))

    def _reset_backward_state(self) -> None:
        self._backward.mark_ended()
        for unit in [*self.units, self.rest]:
            unit.reset_state()

    def _pre_forward(self, unit: Unit, part: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook: gather the unit, prefetch the next one, hook its backward.

        The pre-hook of the rest is that of the whole module, so it begins the step.
        """
        if is_in_backward():  # checkpointing recomputes this forward in backward
            return unit.wait()
        if unit is self.rest:
            if self._backward.is_unfinished:  # an error has ended the last backward halfway
                self.reducer.discard_gradients()
                self._reset_backward_state()
            self._free_all()  # an error may have ended the last forward halfway
            self._last_order, self._order = self._order or self._last_order, []
        elif unit not in self._order:
            self._order.append(unit)
        unit.start_gather()
        self._prefetch_next(self._last_order, unit)
        unit.wait()
        if unit is self.rest or not torch.is_grad_enabled():
            return None
        # Autograd is through the unit once all of the unit's inputs have gradients. A view of
        # each input gets the hook, because other modules may use the input itself.
        aliases: dict[int, Tensor] = {}

        def make_alias(x: Tensor) -> Tensor:
            return aliases.setdefault(id(x), x.view_as(x)) if x.requires_grad else x

        args, kwargs = tree_map_only(Tensor, make_alias, (args, kwargs))
        unit.count_forward()
        if aliases:  # without them, `_finalize_backward` sends the unit's gradients
            register_multi_grad_hook(list(aliases.values()), partial(self._post_backward, unit))
        return args, kwargs

    def _post_forward(self, unit: Unit, part: nn.Module, args: Any, output: Any) -> None:
        """Forward hook: free the unit, and hook the gradients of its outputs."""
        if is_in_backward():
            return
        tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        for tensor in tensors:
            tensor.register_hook(partial(self._pre_backward, unit))
        if unit is self.rest and not tensors:  # no backward will follow
            self._free_all()
        elif (self.reshard and unit is not self.rest) or not torch.is_grad_enabled():
            unit.free_full()

    def _pre_backward(self, unit: Unit, _gradient: Tensor) -> None:
        self._backward.mark_started(self._finalize_backward)
        unit.wait()
        if unit is self.rest or not self.ordered:
            self._prefetch_next(self._order[::-1], unit)

    def _on_grad_ready(self, unit: Unit, parameter: Tensor) -> None:
        self._backward.mark_started(self._finalize_backward)
        # An ordered reduce-scatter receives up to as many bytes as it sends. So the first half
        # of a unit's backward hides the gradients of the unit before it in backward, and the
        # second half hides the gather of the next unit.
        if unit.count_gradient(parameter) and unit is not self.rest and self.ordered:
            self.reducer.finish_reduce_scatter()
            self._prefetch_next(self._order[::-1], unit)

    def _post_backward(self, unit: Unit, _gradients: Any) -> None:
        if unit.count_backward():
            unit.reduce_gradients(self.reducer)

    def _finalize_backward(self) -> None:
        """At the end of backward, send the units that are not sent yet, and last the rest."""
        for unit in [*self._order[::-1], self.rest]:
            unit.reduce_gradients(self.reducer)
        self.reducer.finish_all()
        self._reset_backward_state()

    def _prefetch_next(self, order: list[Unit], unit: Unit) -> None:
        """Start to gather the unit after `unit` in `order`, rest first."""
        order = [self.rest, *order]
        following = order[order.index(unit) + 1 :] if unit in order else []
        if self.prefetch and following:
            following[0].start_gather()

    def _free_all(self) -> None:
        for unit in [*self.units, self.rest]:
            unit.free_full()
