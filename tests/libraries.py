"""Production libraries as sides of the contract; ours are compared with them bit by bit.

See `sides`: a library's side has the same interface.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from sides import DataSide, Part, ToyModel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardlab import deepspeed_engine, ranks
from shardlab.gpt.model import loss


class DdpSide(DataSide):
    def wrap_model(self, model: Any, **_: Any) -> Any:
        self.way = "hooks"
        unused = {"find_unused_parameters": True} if isinstance(model, ToyModel) else {}
        return nn.parallel.DistributedDataParallel(
            model, process_group=self.groups["dp"], gradient_as_bucket_view=True, **unused
        )


class FsdpSide(DataSide):
    """Side of torch's fully_shard: stage 2, or stage 3 if weights are resharded after forward."""

    def wrap_model(self, model: Any, compute_dtype: torch.dtype | None = None, **_: Any) -> Any:
        self.way = "library"
        within = init_device_mesh(ranks.device().type, (self.groups["dp"].size(),))
        options = {"reshard_after_forward": self.row.layout.zero == 3}
        if compute_dtype:
            options["mp_policy"] = MixedPrecisionPolicy(compute_dtype, torch.float32)
        for each in (*model.blocks, model):
            fully_shard(each, mesh=within, **options)
        return model

    def get_gradients(self) -> dict[str, Tensor | None]:
        return {name: p.grad.full_tensor() for name, p in self.get_parameters().items()}

    def get_weights(self) -> dict[str, Tensor]:
        return {name: p.full_tensor() for name, p in self.plain.state_dict().items()}


class DeepSpeedSide(DataSide):
    """Side of DeepSpeed's ZeRO stages; it exposes no gradients."""

    has_output = False

    @staticmethod
    def import_library() -> None:
        deepspeed_engine.import_deepspeed()

    def wrap_model(self, model: Any, **_: Any) -> Any:
        self.way = "library"
        os.environ["DS_ACCELERATOR"] = (
            ranks.device().type
        )  # otherwise DeepSpeed searches for one, with a message
        warnings.filterwarnings("ignore")
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {}  # compile nothing
        deepspeed.init_distributed()
        block = 2**16  # elements; by default 2 GB
        stages = {"stage": self.row.layout.zero, "reduce_bucket_size": block}
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=self.row.make_optimizer(model),
            config={
                "train_micro_batch_size_per_gpu": self.row.sizes[0] // self.row.layout.microbatches,
                "gradient_accumulation_steps": self.row.layout.microbatches,
                "gradient_clipping": 0.0,  # 1.0 by default
                "steps_per_print": 10**9,
                "zero_optimization": stages | {"stage3_prefetch_bucket_size": block},
                "zero_allow_untested_optimizer": True,
            },
        )
        return model

    def step(self, batch: list[list[Part]]) -> dict[int | None, Tensor]:
        total, parts = 0.0, batch[self.copy]
        for tokens, targets, _ in parts:
            value = loss(self.engine(tokens), targets)
            self.engine.backward(value)  # divides by the number of micro-batches
            self.engine.step()  # only the last call makes a step
            total = total + value.detach() / len(parts)
        return {self.copy: total}

    def get_gradients(self) -> None:
        return None

    def get_weights(self) -> dict[str, Tensor]:
        from deepspeed import zero as deepspeeds

        named = self.get_parameters()
        with deepspeeds.GatheredParameters(list(self.plain.parameters())):
            return {name: parameter.detach().clone() for name, parameter in named.items()}
