"""The part of a sharded model that acts between steps: pieces, full weights, norm, checkpoints.

A training step, with its gathers and reduce-scatters, is in `core`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab import ranks
from shardlab.data_parallel import buckets
from shardlab.layout.boxes import Box, TensorPiece, make_full_box
from shardlab.ranks.checks import check_state

from .checkpointing import (
    collect_optimizer_states,
    copy_to_pieces,
    gather_full_tensors,
    gather_rows,
    init_optimizer_states,
    list_pieces,
)
from .flat import FlatParams


class ShardedModule(nn.Module):
    """A wrapper of `module` with which this rank trains its own pieces of the parameters.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        loss(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    `parameters()` are pieces, one per parameter of the module and under its name: flat tensors of
    the elements that this rank owns, possibly none. After backward their gradients are averages
    over `group`; several backwards add up. A parameter without a gradient on any rank keeps None,
    as in one process; for this one byte per parameter is sent with each backward. A sum over
    `parameters()`, such as a norm, covers this rank's pieces alone: see clip_grad_norm_.

    Parameters and buffers start as rank 0's. Ranks must call the same modules in the same order.
    compute_dtype: dtype of the module's parameters, while pieces, gradients and optimizer keep the
    module's original dtype as master weights (Micikevicius et al., arXiv 1710.03740). reduction:
    "ordered", "library", or "auto": ordered on the CPU; see ReduceScatter.

    Raises ValueError on every rank when the ranks' modules, stages or arguments differ. (`own` are
    the arguments of the stage's class.)
    """

    keep_full = False  # True: full gradients stay in memory after the reduce-scatter

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        compute_dtype: torch.dtype | None = None,
        reduction: str = "auto",
        **own: Any,
    ):
        super().__init__()
        if reduction not in ("auto", "ordered", "library"):
            raise ValueError(f"reduction={reduction!r}: must be 'auto', 'ordered' or 'library'")
        options = {"compute_dtype": compute_dtype, "reduction": reduction, **own}
        ranks.check_model(module, group, stage=type(self), **options)
        if not all(p.is_floating_point() for p in module.parameters()):
            kind = type(module).__name__
            raise ValueError(f"module={kind}: all parameters must have a floating-point dtype")
        self.module, self.group, self.compute_dtype = module, group, compute_dtype
        on_cpu = next(module.parameters()).device.type == "cpu"
        self.ordered = reduction == "ordered" or (reduction == "auto" and on_cpu)
        self.flats: list[FlatParams] = []
        self.frozen: dict[str, nn.Parameter] = {}  # whole on every rank
        self._names = {p: name for name, p in module.named_parameters()}
        self._backward = buckets.BackwardTracker()
        buckets.copy_from_rank_0(module.buffers(), group)

    def _shard_parameters(
        self, parameters: Iterable[nn.Parameter], keep_full: bool, *limits: float
    ) -> list[FlatParams]:
        """Move parameters, as they are on rank 0, into flat tensors; limits: of buckets."""
        flats = []
        for bucket in buckets.split_into_buckets(parameters, *limits):
            named = {self._names[p]: p for p in bucket}
            dtype = self.compute_dtype or bucket[0].dtype
            flats.append(FlatParams(named, self.group, dtype, keep_full))
        self.flats += flats
        return flats

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, whose hooks gather its parameters."""
        return self.module(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's pieces under the parameters' names in the module, for the optimizer."""
        pieces = dict(self.frozen)
        for flat in self.flats:
            pieces |= zip(flat.names, flat.pieces, strict=True)
        for name in self._names.values():
            yield (f"{prefix}.{name}" if prefix else name), pieces[name]

    def no_sync(self) -> Any:
        """Raise ValueError, except in stage 1: see Zero1."""
        raise ValueError(
            f"no_sync: {type(self).__name__} keeps only a shard of the gradients, so each backward "
            "has to send them; use Zero1, which keeps full gradients"
        )

    def clip_grad_norm_(self, limit: float) -> Tensor:
        """Scale gradients down to a global norm of at most `limit`; return the norm before.

        Each rank computes its shard's share of the sum of squares; one number is summed over the
        ranks. The norm equals torch.nn.utils.clip_grad_norm_'s in one process, up to summation
        order. Every rank calls this. Raises ValueError for a limit below 0, and on every rank when
        the first call's limits differ.
        """
        return buckets.clip_by_global_norm(self, limit, [self.group], self.parameters())

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the plain module's full state dict on every rank, in the masters' dtype.

        Every rank calls this. Between steps it is the way to look at weights.
        """
        tensors = {name: p.detach().clone() for name, p in self.frozen.items()}
        for flat in self.flats:
            full = gather_full_tensors(flat, flat.pieces)
            tensors |= {name: view.clone() for name, view in full.items()}
        return {
            name: tensors[self._names[t]] if t in self._names else t.detach().clone()
            for name, t in self.module.state_dict(keep_vars=True).items()
        }

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state dict of the plain module; every rank must be given the same one."""
        own = self.module.state_dict(keep_vars=True)
        shapes = {
            p: shape
            for flat in self.flats
            for p, shape in zip(flat.parameters, flat.shapes, strict=True)
        }
        check_state(state, {name: shapes.get(t, t.shape) for name, t in own.items()})
        for flat in self.flats:
            full = flat.flatten_tensors(state[name] for name in flat.names)
            flat.shard.copy_(full[flat.shard_slice])
        for name, tensor in own.items():
            if tensor not in shapes:
                tensor.copy_(state[name])
        self.mark_changed()

    @contextmanager
    def checkpoint_tensors(
        self, optimizer: torch.optim.Optimizer, to_load: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield weights and optimizer states as row shards by the module's names: for `checkpoint`.

        Buffers, scalars and frozen weights are whole. to_load: make missing optimizer states first,
        and remove them afterwards. Raises ValueError for an optimizer with states that are not one
        number per element.
        """
        pieces = dict(self.named_parameters())
        made = [p for p in pieces.values() if to_load and p not in optimizer.state]
        if to_load:
            self._init_optimizer_states(optimizer)
        try:
            rows = gather_rows(self.flats, pieces)
            own = self.module.state_dict(keep_vars=True)
            weights = {name: rows.get(self._names.get(t), t.detach()) for name, t in own.items()}
            states = collect_optimizer_states(self.flats, pieces, optimizer, self.group)
            yield {"model": weights, "optimizer": states}
        finally:
            for piece in made:
                optimizer.state.pop(piece, None)

    @torch.no_grad()
    def restore(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load tensors of `checkpoint_tensors`, saved by any number of ranks."""
        pieces = dict(self.named_parameters())
        self._init_optimizer_states(optimizer)
        for name, piece in pieces.items():
            if name not in state["optimizer"]:
                optimizer.state.pop(piece, None)
        # The checkpoint has already filled whole tensors in place.
        for flat in self.flats:
            copy_to_pieces(flat, state["model"], pieces)
        for key in sorted({key for of in state["optimizer"].values() for key in of}):
            values = {name: of[key] for name, of in state["optimizer"].items() if key in of}
            targets = {name: optimizer.state[pieces[name]][key] for name in values}
            for flat in self.flats:
                copy_to_pieces(flat, values, {n: t for n, t in targets.items() if t.dim()})
            for name, target in targets.items():
                if not target.dim():
                    target.copy_(values[name])

    def _init_optimizer_states(self, optimizer: torch.optim.Optimizer) -> None:
        given = {p for group in optimizer.param_groups for p in group["params"]}
        trained = [p for p in self.parameters() if p in given and p.requires_grad]
        init_optimizer_states(trained, optimizer)
        self.mark_changed()  # it was an optimizer step, and then all ranks must gather

    def pieces(self, boxes: Mapping[str, Box] | None = None) -> list[TensorPiece]:
        """Return this rank's trained tensors and buffers as boxes of the plain module's tensors.

        The boxes are views: after filling them, call `mark_changed` on all ranks. boxes: the part
        of each plain tensor that the module has, if the module itself is cut.
        """
        parts = {name: make_full_box(parameter.shape) for name, parameter in self.frozen.items()}
        for flat in self.flats:
            parts |= {
                n: make_full_box(shape) for n, shape in zip(flat.names, flat.shapes, strict=True)
            }
        parts |= boxes or {}
        found = [TensorPiece(name, parts[name], p.detach()) for name, p in self.frozen.items()]
        found += [TensorPiece(n, make_full_box(b.shape), b) for n, b in self.module.named_buffers()]
        return found + [piece for flat in self.flats for piece in list_pieces(flat, parts)]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ValueError: the tensors of one rank are no model."""
        raise ValueError("state_dict: a rank has only a shard; call full_state_dict() instead")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ValueError: one rank's tensors are no model."""
        raise ValueError("load_state_dict: call load_full_state_dict() instead")

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("a sharded model cannot be moved: move or convert it before sharding")

    def mark_changed(self) -> None:
        """Note that pieces have new values; a no-op in stage 3, where each forward gathers them."""
