"""Several cuts at once: copies of pipelines of tensor groups, equal to one process.

In the order of the lesson: the three groups of a rank (`Groups`, `join`); the plain GPT, cut along
each of them (`Parallel.__init__`); a training step, in which every group adds up what is its own
(`step`); one norm of gradients that lie on all ranks (`clip_grad_norm_`). Each cut is a module of
its own, which knows nothing of the others: what stands here is the order in which they meet.

    tensor      each matrix over t ranks: sums inside of every layer (`tensor_parallel`)
    pipeline    some layers on each of p stages, in one part of the model or in several, its
                chunks: activations from part to part (`pipeline`)
    data        d copies of all this: averages of gradients, once a step; ZeRO shards what the
                copies would hold twice (`zero`)

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC 2021 (arXiv 2104.04473), section 3; Korthikanti et al. 2022 (arXiv 2205.05198) for the sequence.

Shapes in names: B batch of this copy, S sequence, s = S/t, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardlab import pipeline, sequence_parallel, tensor_parallel, zero
from shardlab.common.arguments import check_kind
from shardlab.data_parallel.buckets import add_up, clip_by_joint_norm
from shardlab.gpt.model import GPT, IGNORED
from shardlab.layout import Layout
from shardlab.layout.boxes import Piece, whole
from shardlab.layout.entries import ledger
from shardlab.pipeline import Part, Pipeline, Schedule
from shardlab.ranks import agree, check_group, check_same, device
from shardlab.ranks.gather import named
from shardlab.zero.flat import Flat
from shardlab.zero.saved import pieces_of

from . import states
from .predict import check_cuts, layers_of_parts

Group = dist.ProcessGroup
AXES = "dp", "pp", "tp"  # those of a layout that `Parallel` cuts along


class Groups(NamedTuple):
    """The three groups of one rank: its twins in other copies, its pipeline, its tensor group."""

    dp: Group
    pp: Group
    tp: Group


def join(layout: Layout, world: Group) -> Groups:
    """This rank's groups in `layout`, whose rank 0 is that of `world`; all ranks call it.

    Every rank makes its tensor group first, then its pipeline, then its copies: groups of one axis
    share no rank, so nobody waits in a circle. Two ranks are together in one of the groups at most,
    as nccl wants it. Raises ValueError unless the degrees multiply to the ranks of `world`, and on
    every rank when their layouts differ.
    """
    rank, size = check_group(world, "world")
    layout.check(size)
    check_same(world, layout=layout)
    members = dist.get_process_group_ranks(world)
    made = {}
    for axis in ("tp", "pp", "dp"):
        mine = next(group for group in layout.groups(axis) if rank in group)
        made[axis] = dist.new_group(
            [members[number] for number in mine],
            timeout=agree.time_limit(world),
            use_local_synchronization=True,
        )
    return Groups(**made)


def groups_of(device_mesh: DeviceMesh) -> Groups:
    """The same from torch's mesh, whose dimensions are called "dp", "pp" and "tp", in any order.

    Raises ValueError for other names.
    """
    names = device_mesh.mesh_dim_names or ()
    if sorted(names) != sorted(AXES):
        raise ValueError(f"mesh_dim_names={names!r}: allowed are dp, pp and tp, each once")
    return Groups(*(device_mesh.get_group(axis) for axis in AXES))


class Parallel(nn.Module):
    """This rank's part of a plain GPT that is cut along three groups at once.

        layout = Layout(dp=2, pp=2, tp=2, zero=1, microbatches=4)
        job = Parallel(GPT(config), join(layout, dist.group.WORLD), layout)
        optimizer = torch.optim.AdamW(job.parameters(), lr=1e-3, foreach=False)
        loss = job.step(tokens, targets)            # of this copy: its share of the batch
        job.clip_grad_norm_(1.0)
        optimizer.step(); optimizer.zero_grad()

    model: the same on every rank; its modules are used, so let go of it. If it is on meta, a rank
    makes its own part alone, full of zeros, for `checkpoint.load_hub` to fill. layout: degrees,
    those of the groups; schedule, chunks of each stage, micro-batches; ZeRO's stage between the
    copies, 2 and 3 without a pipeline alone; sequence_parallel: cut what lies between the matrices
    by tokens, too; recompute: "full" keeps of each block its input alone, and computes the rest
    again in backward, messages too. seed: of dropout; each copy and each stage seeds torch's
    generator with a number of its own.

    `parameters()` are what this rank's optimizer trains, by the plain model's names: its part of a
    matrix, or with ZeRO a flat piece of that part.

    Raises ValueError, before anything is sent, for a shape that the degrees do not divide, for what
    else `check_cuts` refuses, and for other groups; on every rank when arguments differ.
    """

    def __init__(self, model: GPT, groups: Groups, layout: Layout, seed: int = 0):
        super().__init__()
        check_kind(GPT, model=model)
        check_cuts(model.config, layout)
        check_same(*groups, config=model.config, layout=layout, seed=seed)
        for axis, group in zip(AXES, groups, strict=True):
            if (degree := getattr(layout, axis)) != (size := check_group(group)[1]):
                raise ValueError(f"{axis}={degree}: allowed with this group is {size}")
        self.config, self.layout, self.groups = model.config, layout, groups
        m, chunks = layout.microbatches, layout.chunks
        schedule = pipeline.schedule(layout.schedule, layout.pp, m, chunks)
        self._cut_matrices(model, layout.sequence_parallel)
        parts = self._cut_layers(model, schedule)
        self.blocks = {number: block for part in parts for number, block in part.blocks.items()}
        if layout.recompute == "full":
            pipeline.compute_again(list(self.blocks.values()))
        self._share_copies(parts, schedule)
        if self.config.dropout:  # ranks of a tensor group have one seed: `parallelize` knows more
            torch.manual_seed(
                seed + dist.get_rank(groups.dp) * layout.pp + dist.get_rank(groups.pp)
            )

    def _cut_matrices(self, model: GPT, sequence: bool) -> None:
        """Along tp: t ranks share each matrix, and with `sequence` the tokens in between."""
        edges = sequence_parallel.ALONG_SEQUENCE if sequence else tensor_parallel.REPLICATED
        tensor_parallel.parallelize(model, self.groups.tp, edges)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.partly = set()  # names of what is whole on every rank, but sees a t-th of the tokens
        if sequence:
            self.partly = {names[p] for p in sequence_parallel.seen_partly(model)}
        self.cuts = tensor_parallel.cuts(model)  # name -> dimension that is cut, or None
        self.cuts.setdefault("head.weight", 0)  # a tied one goes by the embedding's name so far
        self.several = tensor_parallel.parts(model)  # name -> into how many parts it is cut
        self.several.setdefault("head.weight", self.layout.tp)

    def _cut_layers(self, model: GPT, schedule: Schedule) -> list[Part]:
        """Along pp: this rank keeps its parts of the model. The ends of a tied one are twins."""
        layout, (stage, _) = self.layout, check_group(self.groups.pp)
        parts = pipeline.cut(model, layers_of_parts(model.config, layout))
        mine = [parts[number] for number in schedule.placement[stage]]
        first, last = layout.route[0], layout.route[-1]
        if model.embedding.weight.is_meta:
            for part in mine:
                for tensor in part.to_empty(device=device()).state_dict().values():
                    tensor.zero_()
            if model.config.tied:  # each end got a tensor of its own
                ends = model.embedding, model.head
                ends[stage == first].weight = ends[stage != first].weight
        self.twin = None
        if model.config.tied and first != last and stage in (first, last):
            other = last if stage == first else first
            self.twin = model.embedding.weight, other
        return mine

    def _share_copies(self, parts: list[Part], schedule: Schedule) -> None:
        """Along dp: average over the copies, or deal out to them what all would hold."""
        layout = self.layout
        self.plain_form = parts[0].between
        self.shard = layout.tp if layout.sequence_parallel else 1
        self.sharded = []
        for part in parts if layout.zero else []:
            late = {"late": True} if layout.zero == 1 else {}
            units = {"units": list(part.blocks.values())} if layout.zero == 3 else {}
            sharded = zero.shard(part, self.groups.dp, layout.zero, **late, **units)
            sharded.plain_names = True  # its pieces go by the names of the part's parameters
            self.sharded.append(sharded)
        self.pipeline = Pipeline(
            self.sharded or parts,
            schedule,
            self.groups.pp,
            self._loss,
            between=self._form,
            replicas=None if layout.zero else self.groups.dp,
            twin=self.twin,
        )
        for sharded in self.sharded:
            sharded.changed()  # the twin of an embedding was copied

    def _form(self, tokens_BS: Tensor) -> pipeline.parts.Form:
        """What travels from stage to stage: [B, S, H], or [B, s, H] of this rank's tokens."""
        (batch, seq, hidden), dtype = self.plain_form(tokens_BS)
        return torch.Size((batch, seq // self.shard, hidden)), dtype

    def _loss(self, logits_BSv: Tensor, targets_BS: Tensor) -> Tensor:
        """Mean over this copy's targets, times the weight of its batch: see `step`."""
        mean = tensor_parallel.loss(logits_BSv, targets_BS, self.groups.tp)
        return mean * self.weight.to(mean.dtype)

    def step(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Forward and backward of a batch, of which each copy is given its own share.

        All ranks of a copy are given the same. Shares may differ in sequences, but none may be
        shorter than the micro-batches are many. Returns the mean loss over the joined batch on
        every rank; gradients are those of this mean.
        """
        # The average over copies shall be the mean over targets: a copy with more weighs more.
        counted = (targets_BS != IGNORED).sum()
        total = counted.clone()
        dist.all_reduce(total, group=self.groups.dp)  # a scalar
        self.weight = counted * self.layout.dp / total.double()
        # tp: sums in every layer; pp: activations, and the sum of the twins' gradients; dp, where
        # every copy holds all: the average.
        value = self.pipeline.step(tokens_BS, targets_BS)
        if self.layout.zero == 1:
            for part in self.sharded:
                part.reduce()  # dp: the average, of which each copy gets its pieces
        if self.partly:  # tp: norms and late biases, whose gradients know a t-th of the tokens
            known = [p.grad for name, p in self.named_parameters() if name in self.partly]
            add_up([g for g in known if g is not None], self.groups.tp, joined=True)
        return self._joined(value, total)

    @torch.no_grad()
    def _joined(self, value: Tensor | None, total: Tensor) -> Tensor:
        """The loss from the last stages, averaged over copies, on every rank: two scalars."""
        dtype = torch.promote_types(next(self.parameters()).dtype, torch.float32)
        mean = torch.zeros((), dtype=dtype, device=total.device)
        if value is not None:
            mean += value
        dist.all_reduce(mean, group=self.groups.dp)
        dist.all_reduce(mean, group=self.groups.pp)  # all stages but the last have 0
        return mean / check_group(self.groups.dp)[1]

    def clip_grad_norm_(self, limit: float) -> Tensor:
        """Scale gradients down to a joint norm of `limit`, where it is larger; return the norm.

        It is the norm of one process's gradients: every number that lies on several ranks counts
        once. Squares are added up along tp and pp, and, where ZeRO shards them, along dp. Every
        rank calls it. Raises ValueError for a limit below 0, and when the first call's differ.
        """
        counted, copies = [], []
        for name, parameter in self.named_parameters():
            (counted if self._counts(name) else copies).append(parameter)
        dp, pp, tp = self.groups
        over, alike = ((dp, pp, tp), ()) if self.layout.zero else ((pp, tp), (dp,))
        return clip_by_joint_norm(self, limit, over, counted, copies=copies, alike=alike)

    def _counts(self, name: str) -> bool:
        """Whether this rank's gradient belongs to the norm: what others count as well, does not."""
        (_, stages), (rank, _) = check_group(self.groups.pp), check_group(self.groups.tp)
        second = self.config.tied and stages > 1 and name == "head.weight"  # the embedding's twin
        return not second and rank % (self.layout.tp // self.several[name]) == 0

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """What this rank's optimizer trains, by the plain model's names."""
        for name, parameter in self.pipeline.named_parameters():
            yield (f"{prefix}.{name}" if prefix else name), parameter

    def changed(self) -> None:
        """Pieces have new values, here or on other ranks: all ranks call it."""
        for part in self.sharded:
            part.changed()

    @property
    def flats(self) -> list[Flat]:
        """What ZeRO has dealt out of them."""
        return [flat for part in self.sharded for flat in part.flats]

    def pieces(self) -> list[Piece]:
        """What this rank trains, and buffers, as parts of the plain model's tensors: views.

        Who fills them calls `changed`, on all ranks. A tied head goes by the embedding's name.
        """
        rank, size = check_group(self.groups.tp)
        boxes = {entry.name: entry.box(rank, size) for entry in ledger(self.config)}
        if self.sharded:
            found = [piece for flat in self.flats for piece in pieces_of(flat, boxes)]
        else:
            found = [Piece(name, boxes[name], p.detach()) for name, p in self.named_parameters()]
        found = [piece._replace(name=self.checkpoint_name(piece.name)) for piece in found]
        return found + [Piece(name, whole(b.shape), b) for name, b in self.untrained.items()]

    def full_state_dict(self) -> dict[str, Tensor]:
        """The plain model's state dict, whole and on every rank; every rank has to call it."""
        found = states.full_tensors(self)
        if self.config.experts:
            found |= named(self.untrained, self.groups.pp)
        return found

    @property
    def untrained(self) -> dict[str, Tensor]:
        """Buffers of this rank's layers: a router's bias, which its whole tensor group has."""
        return {
            f"blocks.{number}.{name}": buffer
            for number, block in self.blocks.items()
            for name, buffer in block.named_buffers()
        }

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a rank's own tensors are no model."""
        raise ValueError("state_dict: a rank has its part alone; allowed is full_state_dict()")

    def checkpoint_tensors(self, optimizer: torch.optim.Optimizer, to_load: bool) -> Any:
        """For `shardlab.checkpoint`: weights and moments by the plain model's names."""
        return states.checkpoint_tensors(self, optimizer, to_load)

    def checkpoint_name(self, name: str) -> str:
        """The name in a checkpoint: a tied head's is the embedding's, as in one process."""
        return "embedding.weight" if self.config.tied and name == "head.weight" else name

    def restore(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Take over such tensors, saved under any mesh."""
        states.restore(self, optimizer, state)
