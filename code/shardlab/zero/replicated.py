"""Stages 1 and 2: the module is whole on every rank, what trains it is not.

Rajbhandari: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020 (arXiv 1910.02054), sections 5.1 and 5.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab import ranks

from .flat import Flat, all_gather, deal
from .gradients import Gradients
from .sharded import Sharded, in_backward

MIB = 2**20


class Zero1(Sharded):
    """Stage 1: parameters and gradients are whole on every rank, the optimizer's states sharded.

    Buckets: parameters are dealt into flat tensors of `bucket_bytes`, the last first, as gradients
    come; the first bucket is full at `first_bytes`. A bucket whose gradients are there is sent
    while backward still computes the next ones. After optimizer.step() each rank has new values of
    its own shards alone: the next forward gathers them, and each module inside waits only for those
    that it uses itself. Until then `module` holds old values outside the own shards.

    Bytes on the wire: P(N-1)/N elements of gradients and as many of parameters, 2P together, as
    much as one all-reduce of the gradients (Rajbhandari, section 7.1).

    See Sharded for the rest. Raises ValueError for sizes below 1, for what cannot be sharded, and
    on every rank when the ranks' modules differ.
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
    ):
        ranks.check_bytes(bucket_bytes=bucket_bytes, first_bytes=first_bytes)
        super().__init__(module, group, compute_dtype, reduction)
        named = list(module.named_parameters())
        trained = {name: p for name, p in reversed(named) if p.requires_grad}
        for flat in deal(trained, group, compute_dtype, (first_bytes, bucket_bytes)):
            self._replicate(flat, self._take(flat))
        for name, parameter in named:
            if not parameter.requires_grad:
                self._copy_from_rank_0(parameter)
                parameter.data = parameter.data.to(compute_dtype or parameter.dtype)
                self.frozen[name] = parameter
        self.gradients = [Gradients(flat, self.keep, self.ordered) for flat in self.flats]
        self._register_hooks()
        self._start_over()

    def _replicate(self, flat: Flat, whole: Tensor) -> None:
        """Let the module's parameters be views into one flat tensor, and own a shard of it."""
        flat.serve(whole.to(flat.dtype))  # the same tensor where it has that dtype
        own = whole[flat.own]
        flat.train(own if flat.dtype == flat.master else own.clone())

    def _register_hooks(self) -> None:
        for gradients in self.gradients:
            for index, parameter in enumerate(gradients.flat.parameters):
                arrived = partial(self._arrived, gradients, index)
                parameter.register_post_accumulate_grad_hook(arrived)
        flat_of = {id(p): flat for flat in self.flats for p in flat.parameters}
        self._gathering: dict[Flat, dist.Work] = {}
        self._versions = {flat: flat.shard._version for flat in self.flats}
        self.module.register_forward_pre_hook(self._begin)
        for module in self.module.modules():
            own = module.parameters(recurse=module is not self.module)
            used = {flat_of[id(p)]: None for p in own if id(p) in flat_of}
            module.register_forward_pre_hook(partial(self._await, list(used)))
        self.module.register_forward_hook(partial(self._await, self.flats))

    def _begin(self, *_: Any) -> None:
        """Before the module's forward: start to gather what the optimizer has changed."""
        if in_backward():  # recomputing
            return
        self._await(self.flats)  # in case an error ended the last forward halfway
        if self._backward is not None:  # an error ended the last backward halfway
            for gradients in self.gradients:
                gradients.drop()
            self._start_over()
        news = any(flat.shard._version != self._versions[flat] for flat in self.flats)
        if news and not self._stepped:
            # Whoever sees it may be the only one who does, and would wait for ever for the others.
            raise RuntimeError("pieces were changed by hand: call changed() on all ranks")
        if self._stepped:
            self._stepped = False
            for flat in reversed(self.flats):  # in the order of forward
                with torch.no_grad():
                    if flat.dtype != flat.master:
                        flat.full[flat.own] = flat.shard
                    work = all_gather(flat.full, flat.own, self.group)
                flat.hide()
                self._gathering[flat] = work

    def _await(self, flats: list[Flat], *_: Any) -> None:
        """Before the forward of a module in it: have whole what it uses, with all inside it."""
        for flat in flats if self._gathering else ():
            if flat in self._gathering:
                self._gathering.pop(flat).wait()
                flat.show()
                self._versions[flat] = flat.shard._version

    def _arrived(self, gradients: Gradients, index: int, _parameter: Tensor) -> None:
        """Autograd calls this when a gradient is complete, all uses of its parameter added up."""
        self._backward_begins()
        gradients.place(index)
        gradients.pending.discard(index)
        while self._synchronise and self._next and not self._next[0].pending:
            self._send(self._next.pop(0))

    def _send_rest(self) -> None:
        while self._synchronise and self._next:
            self._send(self._next.pop(0))

    def _start_over(self) -> None:
        super()._start_over()
        self._next = list(self.gradients)  # in one fixed order on all ranks
        for gradients in self.gradients:
            gradients.pending = set(range(len(gradients.flat.parameters)))

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
