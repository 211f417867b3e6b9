"""Tensor, pipeline and data parallelism together, with the results of one process.

In the order of the lesson: the three groups of a rank (`Groups`, `create_groups`); the plain GPT,
cut along each of them (`Parallel.__init__`); a training step, in which every group adds up its
share (`step`); one gradient norm over all ranks (`clip_grad_norm_`). Each kind of parallelism has
its own package, which knows nothing of the others; this file combines them in the right order.

    tensor      each matrix over t ranks: sums inside of every layer (`tensor_parallel`)
    pipeline    some layers on each of p stages, in one part of the model or in several chunks:
                activations go from part to part (`pipeline`)
    data        d replicas of all this: gradients are averaged once a step; ZeRO shards what the
                replicas would otherwise all hold (`zero`)

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC 2021 (arXiv 2104.04473), section 3; Korthikanti et al. 2022 (arXiv 2205.05198) for the sequence.

Shapes in names: B batch of this replica, S sequence, s = S/t, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardlab import pipeline, sequence_parallel, tensor_parallel, zero
from shardlab.common.arguments import check_type
from shardlab.data_parallel.buckets import all_reduce_gradients, clip_by_global_norm
from shardlab.gpt.model import GPT, IGNORED
from shardlab.layout import Layout
from shardlab.layout.boxes import TensorPiece, make_full_box
from shardlab.layout.parameters import list_params
from shardlab.pipeline import Part, Pipeline, Schedule
from shardlab.ranks import check_group, check_same, checks, device
from shardlab.ranks.gather import gather_named_tensors
from shardlab.zero.checkpointing import list_pieces
from shardlab.zero.flat import FlatParams

from . import states
from .predict import check_supported, count_chunk_layers

Group = dist.ProcessGroup
AXES = "dp", "pp", "tp"  # the axes of a layout that `Parallel` supports


class Groups(NamedTuple):
    """The data-parallel, pipeline and tensor-parallel group of one rank."""

    dp: Group
    pp: Group
    tp: Group


def create_groups(layout: Layout, world: Group) -> Groups:
    """Return this rank's groups in `layout`; all ranks of `world` call this.

    Ranks are numbered within `world`. Every rank makes its tp group first, then pp, then dp. Groups
    of one axis share no rank, so no ranks wait in a circle. Two ranks share at most one group, as
    nccl requires. Raises ValueError unless the degrees multiply to the size of `world`, and on
    every rank when layouts differ.
    """
    rank, size = check_group(world, "world")
    layout.check_world_size(size)
    check_same(world, layout=layout)
    members = dist.get_process_group_ranks(world)
    made = {}
    for axis in ("tp", "pp", "dp"):
        mine = next(group for group in layout.list_groups(axis) if rank in group)
        made[axis] = dist.new_group(
            [members[number] for number in mine],
            timeout=checks.get_timeout(world),
            use_local_synchronization=True,
        )
    return Groups(**made)


def get_mesh_groups(device_mesh: DeviceMesh) -> Groups:
    """Return the same groups from a DeviceMesh.

    Its dimensions are called "dp", "pp" and "tp", in any order; other names raise ValueError.
    """
    names = device_mesh.mesh_dim_names or ()
    if sorted(names) != sorted(AXES):
        raise ValueError(f"mesh_dim_names={names!r}: must be dp, pp and tp, each once")
    return Groups(*(device_mesh.get_group(axis) for axis in AXES))


class Parallel(nn.Module):
    """This rank's part of a plain GPT that is cut along three groups at once.

        layout = Layout(dp=2, pp=2, tp=2, zero=1, microbatches=4)
        job = Parallel(GPT(config), create_groups(layout, dist.group.WORLD), layout)
        optimizer = torch.optim.AdamW(job.parameters(), lr=1e-3, foreach=False)
        loss = job.step(tokens, targets)            # this replica's share of the batch
        job.clip_grad_norm_(1.0)
        optimizer.step(); optimizer.zero_grad()

    model: the same on every rank; its modules are used, so drop other references to it. On meta: a
    rank makes its part alone, of zeros, which `checkpoint.load_hub` fills. layout: the degrees,
    equal to the groups' sizes; schedule, chunks per stage, micro-batches; the ZeRO stage of the
    replicas (2 and 3 only without a pipeline); sequence_parallel: also split the activations
    between the matrices by tokens; recompute: "full" keeps only each block's input, and computes
    the rest again in backward, messages included. seed: for dropout; each replica and stage seeds
    torch's generator with its own number.

    `parameters()` yields what this rank's optimizer trains, under the plain model's names: its part
    of each matrix, or with ZeRO a flat piece of that part.

    Raises ValueError before anything is sent for what `check_supported` refuses and for groups of
    other sizes than the degrees; on every rank when arguments differ.
    """

    def __init__(self, model: GPT, groups: Groups, layout: Layout, seed: int = 0):
        super().__init__()
        check_type(GPT, model=model)
        check_supported(model.config, layout)
        check_same(*groups, config=model.config, layout=layout, seed=seed)
        for axis, group in zip(AXES, groups, strict=True):
            if (degree := getattr(layout, axis)) != (size := check_group(group)[1]):
                raise ValueError(f"{axis}={degree}: must be {size}, the size of the group")
        self.config, self.layout, self.groups = model.config, layout, groups
        m, chunks = layout.microbatches, layout.chunks
        schedule = pipeline.make_schedule(layout.schedule, layout.pp, m, chunks)
        self._shard_matrices(model, layout.sequence_parallel)
        parts = self._split_layers(model, schedule)
        self.blocks = {number: block for part in parts for number, block in part.blocks.items()}
        if layout.recompute == "full":
            pipeline.recompute_blocks(list(self.blocks.values()))
        self._shard_replicas(parts, schedule)
        if self.config.dropout:  # a tensor group shares a seed: see `parallelize`
            torch.manual_seed(
                seed + dist.get_rank(groups.dp) * layout.pp + dist.get_rank(groups.pp)
            )

    def _shard_matrices(self, model: GPT, sequence: bool) -> None:
        """Cut matrices over the tensor group, and with `sequence` the tokens."""
        edges = sequence_parallel.SEQUENCE_SHARDED if sequence else tensor_parallel.REPLICATED
        tensor_parallel.parallelize(model, self.groups.tp, edges)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.partial_grads = set()  # parameters, whole on every rank, that see 1/t of the tokens
        if sequence:
            self.partial_grads = {names[p] for p in sequence_parallel.find_partial_gradients(model)}
        self.shard_dims = tensor_parallel.get_shard_dims(
            model
        )  # name -> dimension that is cut, or None
        self.shard_dims.setdefault("head.weight", 0)  # if tied, it had the embedding's name
        self.num_shards = tensor_parallel.count_shards(model)  # name -> number of parts
        self.num_shards.setdefault("head.weight", self.layout.tp)

    def _split_layers(self, model: GPT, schedule: Schedule) -> list[Part]:
        """Keep this rank's parts; a tied embedding and head become twins."""
        layout, (stage, _) = self.layout, check_group(self.groups.pp)
        parts = pipeline.split_model(model, count_chunk_layers(model.config, layout))
        mine = [parts[number] for number in schedule.placement[stage]]
        first, last = layout.stage_order[0], layout.stage_order[-1]
        if model.embedding.weight.is_meta:
            for part in mine:
                for tensor in part.to_empty(device=device()).state_dict().values():
                    tensor.zero_()
            if model.config.tied:  # `to_empty` gave embedding and head a tensor each
                ends = model.embedding, model.head
                ends[stage == first].weight = ends[stage != first].weight
        self.twin = None
        if model.config.tied and first != last and stage in (first, last):
            other = last if stage == first else first
            self.twin = model.embedding.weight, other
        return mine

    def _shard_replicas(self, parts: list[Part], schedule: Schedule) -> None:
        """Shard over the replicas with ZeRO, or average; make the pipeline."""
        layout = self.layout
        self.get_plain_spec = parts[0].message_spec
        self.sequence_shards = layout.tp if layout.sequence_parallel else 1
        self.sharded = []
        for part in parts if layout.zero else []:
            defer = {"defer_reduction": True} if layout.zero == 1 else {}
            units = {"units": list(part.blocks.values())} if layout.zero == 3 else {}
            sharded = zero.shard_module(part, self.groups.dp, layout.zero, **defer, **units)
            sharded.plain_names = True  # its pieces have the names of the part's parameters
            self.sharded.append(sharded)
        self.pipeline = Pipeline(
            self.sharded or parts,
            schedule,
            self.groups.pp,
            self._compute_loss,
            message_spec=self._get_activation_spec,
            replicas=None if layout.zero else self.groups.dp,
            tied_parameter=self.twin,
        )
        for sharded in self.sharded:
            sharded.mark_changed()  # Pipeline copied the embedding's twin into a piece

    def _get_activation_spec(self, tokens_BS: Tensor) -> pipeline.parts.TensorSpec:
        """Return shape ([B, S, H] or [B, s, H]) and dtype of sent activations."""
        (batch, seq, hidden), dtype = self.get_plain_spec(tokens_BS)
        return torch.Size((batch, seq // self.sequence_shards, hidden)), dtype

    def _compute_loss(self, logits_BSv: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the mean over this replica's targets times its weight: see `step`."""
        mean = tensor_parallel.vocab_parallel_loss(logits_BSv, targets_BS, self.groups.tp)
        return mean * self.loss_weight.to(mean.dtype)

    def step(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Run forward and backward of one batch; each replica is given its own share.

        All ranks of a replica are given the same share. Shares may differ in size, but each has at
        least as many sequences as there are micro-batches. Returns the mean loss over the whole
        batch, on every rank; the gradients are those of this mean.
        """
        # The average over replicas must be the mean over targets: weigh by targets.
        counted = (targets_BS != IGNORED).sum()
        total = counted.clone()
        dist.all_reduce(total, group=self.groups.dp)  # a scalar
        self.loss_weight = counted * self.layout.dp / total.double()
        # tp: sums in every layer. pp: activations, and the sum of the twins' gradients. dp: the
        # average, if every replica holds everything.
        value = self.pipeline.step(tokens_BS, targets_BS)
        if self.layout.zero == 1:
            for part in self.sharded:
                part.reduce_gradients()  # dp: the average, of which each replica gets its pieces
        if self.partial_grads:  # tp: norms and late biases, with gradients from 1/t of the tokens
            known = [p.grad for name, p in self.named_parameters() if name in self.partial_grads]
            all_reduce_gradients([g for g in known if g is not None], self.groups.tp, coalesce=True)
        return self._average_loss(value, total)

    @torch.no_grad()
    def _average_loss(self, value: Tensor | None, total: Tensor) -> Tensor:
        """Return the loss averaged over replicas, on every rank: two scalars."""
        dtype = torch.promote_types(next(self.parameters()).dtype, torch.float32)
        mean = torch.zeros((), dtype=dtype, device=total.device)
        if value is not None:
            mean += value
        dist.all_reduce(mean, group=self.groups.dp)
        dist.all_reduce(mean, group=self.groups.pp)  # all stages but the last add 0
        return mean / check_group(self.groups.dp)[1]

    def clip_grad_norm_(self, limit: float) -> Tensor:
        """Scale gradients down to a global norm of at most `limit`; return the norm before.

        The norm is that of one process: an element that several ranks hold counts once. Squares are
        added up along tp and pp, and along dp too if ZeRO shards them. Every rank calls this.
        Raises ValueError for a limit below 0, and if the limits of the first call differ.
        """
        counted, copies = [], []
        for name, parameter in self.named_parameters():
            (counted if self._is_counted_in_norm(name) else copies).append(parameter)
        dp, pp, tp = self.groups
        over, alike = ((dp, pp, tp), ()) if self.layout.zero else ((pp, tp), (dp,))
        return clip_by_global_norm(
            self, limit, over, counted, copies=copies, same_norm_groups=alike
        )

    def _is_counted_in_norm(self, name: str) -> bool:
        """Return True if this rank's gradient counts in the norm; copies do not."""
        (_, stages), (rank, _) = check_group(self.groups.pp), check_group(self.groups.tp)
        second = self.config.tied and stages > 1 and name == "head.weight"  # the embedding's twin
        return not second and rank % (self.layout.tp // self.num_shards[name]) == 0

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's trained parameters, under the plain model's names."""
        for name, parameter in self.pipeline.named_parameters():
            yield (f"{prefix}.{name}" if prefix else name), parameter

    def mark_changed(self) -> None:
        """Record that pieces have new values on some rank; all ranks call this."""
        for part in self.sharded:
            part.mark_changed()

    @property
    def flats(self) -> list[FlatParams]:
        """The flat tensors of this rank's ZeRO-sharded parts."""
        return [flat for part in self.sharded for flat in part.flats]

    def pieces(self) -> list[TensorPiece]:
        """Return views of the trained tensors and buffers, placed in the plain model's.

        After filling them, call `mark_changed` on all ranks. A tied head has the embedding's name.
        """
        rank, size = check_group(self.groups.tp)
        boxes = {entry.name: entry.get_box(rank, size) for entry in list_params(self.config)}
        if self.sharded:
            found = [piece for flat in self.flats for piece in list_pieces(flat, boxes)]
        else:
            found = [TensorPiece(n, boxes[n], p.detach()) for n, p in self.named_parameters()]
        found = [piece._replace(name=self.checkpoint_name(piece.name)) for piece in found]
        buffers = self.buffers_by_name.items()
        return found + [TensorPiece(name, make_full_box(b.shape), b) for name, b in buffers]

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the plain model's state dict on every rank; all call this."""
        found = states.gather_model_tensors(self)
        if self.config.experts:
            found |= gather_named_tensors(self.buffers_by_name, self.groups.pp)
        return found

    @property
    def buffers_by_name(self) -> dict[str, Tensor]:
        """The buffers of this rank's layers: a router's bias, whole on tp ranks."""
        return {
            f"blocks.{number}.{name}": buffer
            for number, block in self.blocks.items()
            for name, buffer in block.named_buffers()
        }

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ValueError: the tensors of one rank are not a whole model."""
        raise ValueError("state_dict: a rank has only its part; call full_state_dict()")

    def checkpoint_tensors(self, optimizer: torch.optim.Optimizer, to_load: bool) -> Any:
        """Return weights and moments by the plain names, for `shardlab.checkpoint`."""
        return states.checkpoint_tensors(self, optimizer, to_load)

    def checkpoint_name(self, name: str) -> str:
        """Return the name in checkpoints: a tied head has the embedding's name."""
        return "embedding.weight" if self.config.tied and name == "head.weight" else name

    def restore(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load the tensors of `checkpoint_tensors`, saved under any mesh."""
        states.restore(self, optimizer, state)
