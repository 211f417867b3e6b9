"""The strategies of the take-home script: one model, spread over all ranks in one of six ways.

`ddp` and `fsdp2` are torch's, `zero1` to `zero3` and `tensor` the course's own. They differ in what
wraps the model, in how a norm is clipped, in when gradients are sent, in the precision's place, and
in what a checkpoint holds. Each difference is one method here.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardlab import tensor_parallel, zero
from shardlab.model import GPT
from shardlab.ranks.agree import time_limit
from shardlab.shapes import Config

STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "tensor")
DTYPES = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Spread:
    """`model`, spread over all ranks. `share` of `shares` is this rank's part of the data.

    model: a plain GPT on its device, the same on all ranks. strategy: one of STRATEGIES.
    tensor: how many neighbouring ranks cut each matrix between them ("tensor" alone); those in the
    same place are copies, and share the data. precision: a key of DTYPES; weights and their
    optimizer stay in float32, and products in forward are of `precision`, to train and to validate
    alike. compiler: torch.compile's backend for each block; None: not compiled.
    """

    def __init__(
        self,
        model: GPT,
        strategy: str = "ddp",
        tensor: int = 1,
        precision: str = "float32",
        compiler: str | None = None,
    ):
        check(dist.get_world_size(), model.config.heads, strategy, tensor, precision)
        self.plain, self.strategy, self.dtype = model, strategy, DTYPES[precision]
        self.device = next(model.parameters()).device
        self.share, self.shares = dist.get_rank() // tensor, dist.get_world_size() // tensor
        world = dist.group.WORLD
        if self.dtype and strategy != "fsdp2":  # whose policy sees to that itself
            model.forward = torch.autocast(self.device.type, self.dtype)(model.forward)
        if compiler is not None:
            for block in model.blocks:
                block.compile(backend=compiler)
        if strategy == "ddp":
            self.model: nn.Module = DistributedDataParallel(model)
        elif strategy == "fsdp2":
            mesh = DeviceMesh.from_group(world, self.device.type)
            policy = MixedPrecisionPolicy(self.dtype, reduce_dtype=torch.float32)
            for block in model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            self.model = fully_shard(model, mesh=mesh, mp_policy=policy)
        elif strategy == "tensor":
            limit = time_limit(world)  # new groups do not take it over by themselves
            neighbours, _ = dist.new_subgroups(tensor, timeout=limit)
            places = [list(range(place, dist.get_world_size(), tensor)) for place in range(tensor)]
            copies, _ = dist.new_subgroups_by_enumeration(places, timeout=limit)
            tensor_parallel.parallelize(model, neighbours)
            # Whole logits on every rank, so that the loss is the plain one's; a large vocabulary
            # wants tensor_parallel.loss instead, which leaves them cut.
            model.register_forward_hook(
                lambda _module, _inputs, x_BSv: tensor_parallel.gather_last(x_BSv, neighbours)
            )
            self.model = DistributedDataParallel(model, process_group=copies)
        else:
            self.model = zero.shard(model, world, int(strategy[-1]))

    def parameters(self) -> Iterator[nn.Parameter]:
        """What this rank's optimizer steps: whole tensors, shards or pieces."""
        return self.model.parameters()

    @contextlib.contextmanager
    def sync_if(self, last: bool) -> Iterator[None]:
        """In which a micro-batch runs: gradients are sent with the `last` one alone.

        FSDP2, ZeRO-2 and ZeRO-3 are to keep no whole gradient to add to: each backward sends.
        """
        if last or self.strategy in ("fsdp2", "zero2", "zero3"):
            yield
        else:
            with self.model.no_sync():
                yield

    def clip(self, limit: float) -> Tensor:
        """Scale the whole model's gradient to a norm of `limit` at most; return what it was."""
        if self.strategy == "tensor":
            return tensor_parallel.clip_grad_norm_(self.plain, limit)
        if self.strategy.startswith("zero"):
            return self.model.clip_grad_norm_(limit)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        return norm.full_tensor() if self.strategy == "fsdp2" else norm

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Weights and optimizer for DCP.

        Of DDP and FSDP2 by names, which any number of ranks can load; of the others what this rank
        has, under this rank's name.
        """
        if self.strategy in ("ddp", "fsdp2"):
            weights, averages = get_state_dict(self.model, optimizer)
            return {"model": weights, "optimizer": averages}
        buffer = io.BytesIO()
        weights = dict(self.model.named_parameters())
        torch.save({"model": weights, "optimizer": optimizer.state_dict()}, buffer)
        return {self._own: buffer.getvalue()}

    def load_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Take over what `state` gave."""
        if self.strategy in ("ddp", "fsdp2"):
            weights = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
            set_state_dict(self.model, optimizer, **weights)
            return
        saved = torch.load(io.BytesIO(state[self._own]), self.device, weights_only=True)
        weights = dict(self.model.named_parameters())
        if alone := set(weights) ^ set(saved["model"]):
            raise ValueError(f"another model: {min(alone)} is in the checkpoint or the run alone")
        with torch.no_grad():
            for name, parameter in weights.items():
                parameter.copy_(saved["model"][name])
        optimizer.load_state_dict(saved["optimizer"])
        if self.strategy.startswith("zero"):
            self.model.changed()

    @property
    def _own(self) -> str:
        return _part(self.strategy, dist.get_rank(), dist.get_world_size())


def _part(strategy: str, rank: int, world: int) -> str:
    """Under which name a checkpoint holds what one rank has."""
    return f"{strategy}, rank {rank} of {world}"


def check(world: int, heads: int, strategy: str, tensor: int, precision: str) -> None:
    """Raise ValueError for what `world` ranks cannot do with a model of so many heads."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r}: allowed are {', '.join(STRATEGIES)}")
    if precision not in DTYPES:
        raise ValueError(f"precision={precision!r}: allowed are {', '.join(DTYPES)}")
    if precision == "fp16" and strategy not in ("ddp", "fsdp2"):
        raise ValueError(f"precision='fp16' with strategy={strategy!r}: allowed are float32, bf16")
    if strategy != "tensor" and tensor != 1:
        raise ValueError(f"tensor={tensor} with strategy={strategy!r}: allowed is 1")
    if world % tensor or heads % tensor:
        allowed = f"divisors of {world} ranks and of {heads} heads"
        raise ValueError(f"tensor={tensor}: allowed are {allowed}")


def check_saved(path: Path, strategy: str, world: int, config: Config) -> None:
    """Raise ValueError for a checkpoint that `world` ranks of a strategy cannot go on from.

    config: the model's shape, which that of the checkpoint has to be. What `zero1` to `zero3` and
    `tensor` have saved has no names to be read here: `Spread.load_state` looks at theirs.
    """
    there = {name.removeprefix("state."): what for name, what in contents_of(path).items()}
    parts = sorted(name for name in there if ", rank " in name)
    if strategy in ("ddp", "fsdp2"):
        fits, allowed = not parts, "ddp or fsdp2, on any number of ranks"
    else:
        fits, allowed = _part(strategy, world - 1, world) in parts, "the same on as many ranks"
    if not fits:
        wrote = f"{parts[0].split(',')[0]} on {len(parts)} ranks" if parts else "ddp or fsdp2"
        here = f"strategy={strategy!r} on {world} ranks"
        raise ValueError(f"{here}: {path} is of {wrote}; allowed is {allowed}")
    if not parts:
        with torch.device("meta"):
            wanted = {n: list(t.shape) for n, t in GPT(config).state_dict().items()}
        model = {n: t for n, t in there.items() if n.startswith("model.")}
        found = {n.removeprefix("model."): list(t.size) for n, t in model.items()}
        for name in sorted(wanted | found):
            if wanted.get(name) != found.get(name):
                shapes = f"{found.get(name, 'missing')} in {path}, {wanted.get(name, 'missing')}"
                raise ValueError(f"preset: {name} is {shapes} in the model; allowed is the same")


def contents_of(path: Path) -> dict[str, Any]:
    """What a checkpoint of DCP says of each name in it. Raises ValueError for what is none."""
    try:
        return dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # a damaged pickle raises whatever it stumbles over
        raise ValueError(f"folder: {path} is no whole checkpoint: {error}") from None
