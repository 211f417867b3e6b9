"""A sharded model between steps: pieces for the optimizer, whole weights, one norm, checkpoints.

It knows nothing of a step, which is in `core`: which part of a flat tensor is where, and when.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab import ranks
from shardlab.data_parallel.buckets import Backward, clip_by_joint_norm, copy_from_rank_0, deal
from shardlab.layout.boxes import Box, Piece, whole
from shardlab.ranks.agree import check_state

from . import saved
from .flat import Flat


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

    Raises ValueError on every rank when the ranks' modules, stages or arguments differ. (`own` are
    a stage's own arguments.)
    """

    keep = False  # whether full gradients stay after the reduce-scatter

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
            allowed = "allowed are 'auto', 'ordered' and 'library'"
            raise ValueError(f"reduction={reduction!r}: {allowed}")
        options = {"compute_dtype": compute_dtype, "reduction": reduction, **own}
        ranks.check_model(module, group, stage=type(self), **options)
        if not all(p.is_floating_point() for p in module.parameters()):
            kind = type(module).__name__
            raise ValueError(f"module={kind}: allowed are parameters of floating-point types alone")
        self.module, self.group, self.compute_dtype = module, group, compute_dtype
        on_cpu = next(module.parameters()).device.type == "cpu"
        self.ordered = reduction == "ordered" or (reduction == "auto" and on_cpu)
        self.flats: list[Flat] = []
        self.frozen: dict[str, nn.Parameter] = {}  # whole on every rank
        self._names = {p: name for name, p in module.named_parameters()}
        self._backward = Backward()
        copy_from_rank_0(module.buffers(), group)

    def _shard(self, parameters: Iterable[nn.Parameter], stay: bool, *limits: float) -> list[Flat]:
        """Put parameters, as they are on rank 0, into flat tensors; limits: see `buckets.deal`."""
        flats = []
        for bucket in deal(parameters, *limits):
            named = {self._names[p]: p for p in bucket}
            flats.append(Flat(named, self.group, self.compute_dtype or bucket[0].dtype, stay))
        self.flats += flats
        return flats

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, whose hooks gather what it uses."""
        return self.module(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's pieces, by the parameters' names in the module: for the optimizer."""
        pieces = dict(self.frozen)
        for flat in self.flats:
            pieces |= zip(flat.names, flat.pieces, strict=True)
        for name in self._names.values():
            yield (f"{prefix}.{name}" if prefix else name), pieces[name]

    def no_sync(self) -> Any:
        """Refused, but in stage 1: see Zero1."""
        raise ValueError(
            f"no_sync: {type(self).__name__} keeps a shard of the gradients, so each backward has "
            "to send them; allowed is Zero1, which keeps them whole"
        )

    def clip_grad_norm_(self, limit: float) -> Tensor:
        """Scale gradients down to a joint norm of `limit`, where it is larger; return the norm.

        Each rank knows its shard's share of the sum of squares: one number to add up over ranks.
        The norm is torch.nn.utils.clip_grad_norm_'s of one process, up to the order of a sum.
        Every rank calls it. Raises ValueError for a limit below 0, and on every rank when the
        first call's limits differ.
        """
        return clip_by_joint_norm(self, limit, [self.group], self.parameters())

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The plain module's state dict, in full and on every rank, in the masters' dtype.

        Every rank has to call it. Between steps it is the way to look at weights.
        """
        tensors = {name: p.detach().clone() for name, p in self.frozen.items()}
        for flat in self.flats:
            full = saved.assembled(flat, flat.pieces)
            tensors |= {name: view.clone() for name, view in full.items()}
        return {
            name: tensors[self._names[t]] if t in self._names else t.detach().clone()
            for name, t in self.module.state_dict(keep_vars=True).items()
        }

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state dict of the plain module; every rank has to be given the same one."""
        own = self.module.state_dict(keep_vars=True)
        shapes = {
            p: shape
            for flat in self.flats
            for p, shape in zip(flat.parameters, flat.shapes, strict=True)
        }
        check_state(state, {name: shapes.get(t, t.shape) for name, t in own.items()})
        for flat in self.flats:
            flat.shard.copy_(flat.join(state[name] for name in flat.names)[flat.own])
        for name, tensor in own.items():
            if tensor not in shapes:
                tensor.copy_(state[name])
        self.changed()

    @contextmanager
    def checkpoint_tensors(
        self, optimizer: torch.optim.Optimizer, to_load: bool
    ) -> Iterator[dict[str, Any]]:
        """For `checkpoint`: weights and the optimizer's states as rows, by the module's names.

        Buffers, scalars and frozen weights are whole. to_load: with states for all that the
        optimizer trains, which are gone again afterwards. Raises ValueError for an optimizer whose
        states are no numbers for each element.
        """
        pieces = dict(self.named_parameters())
        made = [p for p in pieces.values() if to_load and p not in optimizer.state]
        if to_load:
            self._warm_up(optimizer)
        try:
            rows = saved.rows(self.flats, pieces)
            own = self.module.state_dict(keep_vars=True)
            weights = {name: rows.get(self._names.get(t), t.detach()) for name, t in own.items()}
            states = saved.states(self.flats, pieces, optimizer, self.group)
            yield {"model": weights, "optimizer": states}
        finally:
            for piece in made:
                optimizer.state.pop(piece, None)

    @torch.no_grad()
    def restore(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Take over such tensors, saved by any number of ranks."""
        pieces = dict(self.named_parameters())
        self._warm_up(optimizer)
        for name, piece in pieces.items():
            if name not in state["optimizer"]:
                optimizer.state.pop(piece, None)
        # A checkpoint fills what is whole in its place.
        for flat in self.flats:
            saved.deal_out(flat, state["model"], pieces)
        for key in sorted({key for of in state["optimizer"].values() for key in of}):
            values = {name: of[key] for name, of in state["optimizer"].items() if key in of}
            targets = {name: optimizer.state[pieces[name]][key] for name in values}
            for flat in self.flats:
                saved.deal_out(flat, values, {n: t for n, t in targets.items() if t.dim()})
            for name, target in targets.items():
                if not target.dim():
                    target.copy_(values[name])

    def _warm_up(self, optimizer: torch.optim.Optimizer) -> None:
        given = {p for group in optimizer.param_groups for p in group["params"]}
        saved.warm([p for p in self.parameters() if p in given and p.requires_grad], optimizer)
        self.changed()  # it was a step: for one rank, for all

    def pieces(self, boxes: Mapping[str, Box] | None = None) -> list[Piece]:
        """What this rank trains, and buffers, as parts of the plain module's tensors: views.

        Who fills them calls `changed`, on all ranks. boxes: which part of a tensor the module has,
        where it is cut itself.
        """
        parts = {name: whole(parameter.shape) for name, parameter in self.frozen.items()}
        for flat in self.flats:
            parts |= {n: whole(shape) for n, shape in zip(flat.names, flat.shapes, strict=True)}
        parts |= boxes or {}
        found = [Piece(name, parts[name], p.detach()) for name, p in self.frozen.items()]
        found += [Piece(n, whole(b.shape), b) for n, b in self.module.named_buffers()]
        return found + [piece for flat in self.flats for piece in saved.pieces_of(flat, parts)]

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
        """Pieces have new values: nothing to do where each forward gathers them, as in stage 3."""
