"""Sides that `contract` compares: how each technique wraps a plain model and trains it.

A side is made from a row of the table, a plain model and this rank's groups, by axis. `step` runs
forward and backward of a step's batch and returns losses by copy, or the whole batch's loss under
None; `gradients` and `weights` have the plain model's names; `part` returns this rank's part of an
unsharded tensor. Methods that a side does not define are inherited from the one-process side.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardlab import context_parallel as cp
from shardlab import data_parallel as dp
from shardlab import experts, mesh, pipeline, ranks, zero
from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp
from shardlab.gpt.model import GPT, IGNORED, loss
from shardlab.layout import list_params

SMALL_BUCKETS = {"bucket_bytes": 600, "first_bytes": 500}  # several buckets for models of a few kB
Part = tuple[Tensor, Tensor, tuple[Any, ...]]  # tokens, targets, further inputs of the model


class ToyModel(nn.Module):
    """Model with all special cases: tied, frozen, buffer, branches that a rank may not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(17, 12)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.left = nn.Linear(12, 12)
        self.right = nn.Linear(12, 12)
        self.never = nn.Linear(12, 12)
        self.head = nn.Linear(12, 17, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor, branches: str = "lr") -> Tensor:
        if self.training:
            self.seen += tokens.shape[0]
        x = self.frozen(self.embedding(tokens))  # [batch, 12]
        for branch in branches:
            x = x + (self.left if branch == "l" else self.right)(x).tanh()
        return self.head(x)  # [batch, 17]


def plain_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy over all tokens."""
    if logits.dim() == 2:
        return F.cross_entropy(logits, targets, reduction=reduction)
    return loss(logits, targets, reduction)


def count_targets(part: Part) -> int:
    return int((part[1] != IGNORED).sum())


def make_optimizer(model: Any, lr: float = 1e-2) -> torch.optim.AdamW:
    """Return AdamW with a visible decay; it steps tensors one by one, for one order of sums."""
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, foreach=False)


def wrap_recompute(model: GPT) -> GPT:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def take_tensor_part(side: Any, name: str, whole: Tensor) -> Tensor:
    """Return this rank's part of a tensor-parallel model's tensor; a tied head is `embedding`."""
    dimension, group = side.cuts.get(name, 0 if side.cuts else None), side.groups["tp"]
    if dimension is None:
        return whole
    entry = next(e for e in list_params(side.row.config) if e.name == name)
    mine = tp.shard_slice("size", whole.shape[dimension], group, entry.count_shards(group.size()))
    return whole.narrow(dimension, mine.start, mine.stop - mine.start)


class Side:
    """One process that runs the micro-batches of all copies, copy by copy."""

    has_output = True  # the trained model can be called

    @staticmethod
    def import_library() -> None:
        """Import slow modules before ranks are forked."""

    def __init__(self, row: Any, model: nn.Module, groups: dict[str, dist.ProcessGroup]):
        self.row, self.groups, self.options = row, groups, dict(row.options)
        self.plain = model
        self.model = self.wrap_model(model, **self.options)
        self.optimizer = row.make_optimizer(self.model)
        place = {axis: dist.get_rank(group) for axis, group in groups.items()}
        self.copy = place["dp"]

    def wrap_model(self, model: Any, **_: Any) -> Any:
        return model

    def compute_loss(self, part: Part, reduction: str = "mean") -> Tensor:
        tokens, targets, more = part
        return plain_loss(self.model(tokens, *more), targets, reduction)

    def watch_routers(self) -> AbstractContextManager[list[Any]]:
        return experts.record_routing(self.model) if self.row.balanced else nullcontext([])

    def step(self, batch: list[list[Part]]) -> dict[int | None, Tensor]:
        total, found, whole = sum(count_targets(part) for copy in batch for part in copy), {}, 0.0
        with self.watch_routers() as routed:
            for number, copy in enumerate(batch):
                found[number] = torch.zeros(())
                for part in copy:
                    if not count_targets(part):
                        continue
                    value, weight = self.compute_loss(part), count_targets(part) / total
                    if self.row.balanced:
                        whole = whole + value * weight
                    else:
                        value.backward(torch.tensor(weight, dtype=value.dtype, device=value.device))
                    found[number] = found[number].to(value) + value.detach() * weight * len(batch)
        if self.row.balanced:
            (whole + 0.1 * experts.balancing_loss(routed)).backward()
            experts.update_bias(routed, 0.01)
        return found | {None: sum(found.values()) / len(batch)}

    def get_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.plain.named_parameters(remove_duplicate=False))

    def get_gradients(self) -> dict[str, Tensor | None] | None:
        return {name: parameter.grad for name, parameter in self.get_parameters().items()}

    def take_part(self, name: str, whole: Tensor) -> Tensor:
        return whole

    def clip_gradients(self, limit: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.plain.parameters(), limit)

    def get_weights(self) -> dict[str, Tensor]:
        return self.plain.state_dict()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.plain.load_state_dict(weights)

    def join_loss(self, value: Tensor) -> Tensor:
        """Return the whole batch's loss from a step's loss under None."""
        return value

    def compute_output(self, part: Part) -> Tensor:
        """Return the trained model's complete output for a micro-batch."""
        return self.model(part[0], *part[2])


class DataSide(Side):
    def wrap_model(self, model: Any, way: str = "hooks", **options: Any) -> Any:
        self.way = way
        if way == "hooks":
            return dp.DataParallel(model, self.groups["dp"], **(SMALL_BUCKETS | options))
        return model

    def skip_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync() if self.way == "hooks" else nullcontext()

    def compute_mean(self, part: Part, parts: int) -> Tensor:
        if len(set(self.row.sizes)) == 1 and not self.row.ignored:
            return self.compute_loss(part) / parts
        total = self.compute_loss(part, "sum")
        return dp.scale_for_global_mean(total, count_targets(part), self.groups["dp"])

    def step(self, batch: list[list[Part]]) -> dict[int | None, Tensor]:
        parts, values = batch[self.copy], []
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            with nullcontext() if last else self.skip_sync():
                mine = self.compute_mean(part, len(parts))
                mine.backward()
            values.append(mine.detach())
        if self.way == "parameters":
            dp.average_gradients(self.model, self.groups["dp"])
        if self.way == "buckets":
            dealt = dp.assign_buckets(self.model.parameters(), *SMALL_BUCKETS.values())
            dp.average_in_buckets([dp.Bucket(each, self.groups["dp"]) for each in dealt])
        return {self.copy: sum(values[1:], values[0])}

    def get_gradients(self) -> dict[str, Tensor | None]:
        found = super().get_gradients()
        if self.way == "parameters":  # zeros for parameters that no rank used
            found = {name: g if g is not None and g.any() else None for name, g in found.items()}
        return found

    def get_weights(self) -> dict[str, Tensor]:
        assert dp.measure_drift(self.model, self.groups["dp"]) == 0.0
        return super().get_weights()


def gather_gradients(model: Any, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Gather a ZeRO model's gradients from the pieces of all ranks; zeros where there are none."""
    found = {}
    for flat in model.flats:
        shard = torch.zeros_like(flat.shard)
        for cut, piece in zip(flat.split_shard(shard), flat.pieces, strict=True):
            if piece.grad is not None:
                cut.copy_(piece.grad)
        full = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(full, shard, group=group)
        found |= zip(flat.names, flat.view_as_params(torch.cat(full)), strict=True)
    return found


class ZeroSide(DataSide):
    def wrap_model(self, model: Any, **options: Any) -> Any:
        self.way, self.stage = "hooks", self.row.layout.zero
        if self.stage < 3:
            options = SMALL_BUCKETS | options
        elif isinstance(model, ToyModel):
            # Unused parameters cannot be a unit of their own: `left` and `right` are in the rest.
            options = {"units": [model.frozen]} | options
        return zero.shard_module(model, self.groups["dp"], self.stage, **options)

    def skip_sync(self) -> AbstractContextManager[None]:
        late = self.options.get("defer_reduction")
        return self.model.no_sync() if self.stage == 1 and not late else nullcontext()

    def step(self, batch: list[list[Part]]) -> dict[int | None, Tensor]:
        found = super().step(batch)
        if self.options.get("defer_reduction"):
            assert all(parameter.grad is None for parameter in self.model.parameters())
            self.model.reduce_gradients()
        return found

    def get_gradients(self) -> dict[str, Tensor | None]:
        pieces, found = dict(self.model.named_parameters()), {}
        for name, tensor in gather_gradients(self.model, self.groups["dp"]).items():
            made_up = pieces[name].grad is None and not tensor.any()
            found[name] = None if made_up else tensor
        return found

    def clip_gradients(self, limit: float) -> Tensor:
        return self.model.clip_grad_norm_(limit)

    def get_weights(self) -> dict[str, Tensor]:
        return self.model.full_state_dict()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.model.load_full_state_dict(weights)


class MasterWeightsSide(Side):
    """One process that computes in 16 bits and keeps float32 master weights."""

    def wrap_model(self, model: Any, compute_dtype: torch.dtype, **_: Any) -> Any:
        self.narrow = GPT(model.config).to(ranks.device(), compute_dtype)
        self.copy_weights(model)
        return model

    @torch.no_grad()
    def copy_weights(self, model: nn.Module) -> None:
        for wide, thin in zip(model.parameters(), self.narrow.parameters(), strict=True):
            thin.copy_(wide)

    def step(self, batch: list[list[Part]]) -> dict[int | None, Tensor]:
        self.copy_weights(self.model)
        found = {}
        for number, ((tokens, targets, _),) in enumerate(batch):
            self.narrow.zero_grad()
            value = loss(self.narrow(tokens), targets)
            value.backward()
            found[number] = value.detach()
            for wide, thin in zip(self.model.parameters(), self.narrow.parameters(), strict=True):
                share = thin.grad.float() / len(batch)
                wide.grad = share if wide.grad is None else wide.grad + share
        return found

    def compute_output(self, part: Part) -> Tensor:
        self.copy_weights(self.model)
        return self.narrow(part[0])


class PipelineSide(Side):
    has_output = False

    def wrap_model(self, model: Any, **options: Any) -> Any:
        layout = self.row.layout
        schedule = pipeline.make_schedule(layout.schedule, layout.pp, layout.microbatches)
        if layout.dp > 1:
            options["replicas"] = self.groups["dp"]
            if dist.get_rank(self.groups["dp"]):  # only the first replica's weights count
                for parameter in model.parameters():
                    nn.init.zeros_(parameter)
        self.cuts, self.group = {}, self.groups["tp"]
        if layout.tp > 1:
            self.cuts = tp.get_shard_dims(tp.parallelize(model, self.group))
            options["loss"] = partial(tp.vocab_parallel_loss, group=self.group)
        self.last = schedule.find_owner(schedule.parts - 1)[0] == dist.get_rank(self.groups["pp"])
        return pipeline.distribute_model(
            model, schedule, self.groups["pp"], recompute=layout.recompute == "full", **options
        )

    def step(self, batch: list[list[Part]]) -> dict[int | None, Tensor]:
        parts = batch[self.copy]
        value = self.model.step(*(torch.cat([part[n] for part in parts]) for n in (0, 1)))
        assert (value is not None) == self.last
        return {} if value is None else {self.copy: value}

    def get_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def take_part(self, name: str, whole: Tensor) -> Tensor:
        return take_tensor_part(self, name, whole)

    def get_weights(self) -> dict[str, Tensor] | None:
        return None if self.cuts else self.model.full_state_dict()


class TensorSide(Side):
    def wrap_model(self, model: Any, **options: Any) -> Any:
        layout, self.group = self.row.layout, self.groups["tp"]
        self.keep = options.pop("keep", False)
        if layout.sequence_parallel:
            options["edges"] = sp.SequenceShardedEdges(self.keep)
        elif self.row.options.get("by_layer"):
            options = {"edges": tp.Edges(tp.copy_to, tp.reduce_from)}
        model = tp.parallelize(model, self.group, **options)
        self.cuts = tp.get_shard_dims(model)
        return wrap_recompute(model) if layout.recompute == "full" else model

    def compute_loss(self, part: Part, reduction: str = "mean") -> Tensor:
        return tp.vocab_parallel_loss(self.model(part[0]), part[1], self.group, reduction)

    def step(self, batch: list[list[Part]]) -> dict[int | None, Tensor]:
        ((part,),) = batch
        value = self.compute_loss(part)
        value.backward()
        if self.row.layout.sequence_parallel:
            sp.sum_gradients(self.model, self.group)
        return {None: value.detach()}

    def take_part(self, name: str, whole: Tensor) -> Tensor:
        return take_tensor_part(self, name, whole)

    def clip_gradients(self, limit: float) -> Tensor:
        return tp.clip_grad_norm_(self.model, limit)

    def get_weights(self) -> dict[str, Tensor]:
        return tp.full_state_dict(self.model)

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        tp.load_full_state_dict(self.model, weights)

    def compute_output(self, part: Part) -> Tensor:
        return tp.gather_last(self.model(part[0]), self.group)


class TensorInCopiesSide(TensorSide):
    def wrap_model(self, model: Any, **options: Any) -> Any:
        model, stage = super().wrap_model(model, **options), self.row.layout.zero
        if stage:
            return zero.shard_module(model, self.groups["dp"], stage)
        return dp.DataParallel(model, self.groups["dp"])

    def step(self, batch: list[list[Part]]) -> dict[int | None, Tensor]:
        return {self.copy: super().step([batch[self.copy]])[None]}

    def get_gradients(self) -> dict[str, Tensor | None] | None:
        return None if self.row.layout.zero else super().get_gradients()

    def get_weights(self) -> None:
        return None


class ContextSide(Side):
    def wrap_model(self, model: Any, way: str, layout: str) -> Any:
        self.layout, self.group, self.cuts = layout, self.groups["cp"], {}
        if self.row.layout.tp > 1:
            model = tp.parallelize(model, self.groups["tp"])
            self.cuts = tp.get_shard_dims(model)
        model = cp.distribute_model(model, self.group, way, layout)
        return wrap_recompute(model) if self.row.layout.recompute == "full" else model

    def step(self, batch: list[list[Part]]) -> dict[int | None, Tensor]:
        (((tokens, targets, _),),) = batch
        tokens, targets = (cp.shard_tokens(x, self.group, self.layout) for x in (tokens, targets))
        logits = self.model(tokens)
        if self.cuts:
            value = tp.vocab_parallel_loss(logits, targets, self.groups["tp"])
        elif self.row.ignored:
            part = logits, targets, ()
            value = dp.scale_for_global_mean(
                plain_loss(*part[:2], "sum"), count_targets(part), self.group
            )
        else:
            value = loss(logits, targets)
        value.backward()
        cp.average_gradients(self.model, self.group)
        return {None: value.detach()}

    def join_loss(self, value: Tensor) -> Tensor:
        return torch.tensor(cp.average_scalar(value, self.group), dtype=value.dtype)

    def get_weights(self) -> dict[str, Tensor] | None:
        return None if self.cuts else super().get_weights()

    def take_part(self, name: str, whole: Tensor) -> Tensor:
        return take_tensor_part(self, name, whole)

    def compute_output(self, part: Part) -> Tensor:
        logits = self.model(cp.shard_tokens(part[0], self.group, self.layout))
        if self.cuts:
            logits = tp.gather_last(logits, self.groups["tp"])
        return cp.gather_seq(logits, self.group, self.layout)


class ExpertSide(DataSide):
    def wrap_model(self, model: Any) -> Any:
        layout, world = self.row.layout, self.groups["dp"]
        self.way, self.group, self.copies, self.cuts = "experts", world, None, {}
        if layout.ep < layout.dp:
            pairs = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
            groups = (dist.new_subgroups_by_enumeration(each)[0] for each in pairs)
            self.group, self.copies = groups
        if layout.tp > 1:
            tp.parallelize(model, self.groups["tp"])
            self.cuts = tp.get_shard_dims(model)
        return experts.parallelize(model, self.group)

    def compute_loss(self, part: Part, reduction: str = "mean") -> Tensor:
        logits = self.model(part[0])
        if self.cuts:
            return tp.vocab_parallel_loss(logits, part[1], self.groups["tp"])
        return loss(logits, part[1])

    def step(self, batch: list[list[Part]]) -> dict[int | None, Tensor]:
        (part,), world = batch[self.copy], self.groups["dp"]
        with self.watch_routers() as routed:
            value = self.compute_loss(part)
        balance = 0.1 * experts.balancing_loss(routed, world) if routed else 0.0
        (value + balance).backward()
        experts.average_gradients(self.model, world, self.copies)
        if routed:
            experts.update_bias(routed, 0.01, world)
        return {self.copy: value.detach()}

    def compute_output(self, part: Part) -> Tensor:
        logits = self.model(part[0])
        return tp.gather_last(logits, self.groups["tp"]) if self.cuts else logits

    def take_part(self, name: str, whole: Tensor) -> Tensor:
        return take_tensor_part(self, name, whole)

    def clip_gradients(self, limit: float) -> Tensor:
        return experts.clip_grad_norm_(self.model, limit)

    def get_weights(self) -> dict[str, Tensor] | None:
        return None if self.cuts else experts.full_state_dict(self.model)

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        experts.load_full_state_dict(self.model, weights)


class MeshSide(Side):
    has_output = False

    def wrap_model(self, model: Any, **options: Any) -> Any:
        groups = mesh.create_groups(self.row.layout, dist.group.WORLD)
        return mesh.Parallel(model, groups, self.row.layout, **options)

    def step(self, batch: list[list[Part]]) -> dict[int | None, Tensor]:
        mine = batch[self.copy]
        return {None: self.model.step(*(torch.cat([part[n] for part in mine]) for n in (0, 1)))}

    def get_gradients(self) -> dict[str, Tensor | None]:
        return mesh.gather_model_tensors(self.model, lambda piece: piece.grad)

    def clip_gradients(self, limit: float) -> Tensor:
        return self.model.clip_grad_norm_(limit)

    def get_weights(self) -> dict[str, Tensor]:
        return self.model.full_state_dict()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Do nothing: a mesh loads only checkpoints."""
