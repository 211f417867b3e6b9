"""The plain GPT as a sequence of layers, for DeepSpeed's pipeline.

DeepSpeed's PipelineModule takes a list of layers, each of which gets the previous layer's output.
It assigns the layers to stages, and a rank keeps only its stage's layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab import ranks
from shardlab.common.arguments import check_integer
from shardlab.gpt.model import GPT, loss

from .setup import import_deepspeed, suppress_output

TIED = "embedding"  # DeepSpeed's key of the matrix that the first and the last layer share


class Embedding(nn.Module):
    """A token embedding that may be tied: DeepSpeed keeps the last stage's copy equal."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())  # [V, H]

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Map [B, S] to [B, S, H]."""
        return F.embedding(tokens_BS, self.weight)


def apply_tied_head(embedding: Embedding, x_BSH: Tensor) -> Tensor:
    """Apply the tied head, [B, S, H] @ [H, V]."""
    return F.linear(x_BSH, embedding.weight)


def list_layers(model: GPT) -> tuple[list[Any], list[str]]:
    """Return the model as a list of layers for DeepSpeed, and each layer's name in the model."""
    from deepspeed.pipe import TiedLayerSpec

    names = ["embedding", *(f"blocks.{i}" for i in range(len(model.blocks))), "norm", "head"]
    middle: list[Any] = [*model.blocks, model.norm]
    if not model.config.tied:
        return [model.embedding, *middle, model.head], names
    first = TiedLayerSpec(TIED, Embedding, model.embedding.weight)
    last = TiedLayerSpec(TIED, Embedding, model.embedding.weight, forward_fn=apply_tied_head)
    return [first, *middle, last], names


def to_pipeline_module(model: GPT, stages: int) -> Any:
    """Convert `model` to DeepSpeed's PipelineModule of `stages` stages, for `initialize`.

        engine = initialize(to_pipeline_module(GPT(shape), 2), build_config(Layout(pp=2)))

    Collective. Each stage gets an equal number of consecutive layers. With more ranks than stages,
    the pipeline is replicated for data parallelism. Every rank builds the whole model first, so
    that weights equal one process's; for larger models, DeepSpeed takes LayerSpecs instead.

    Raises ValueError if `stages` does not divide the ranks or exceeds the layers, and if ranks
    share a GPU: they use Gloo, which does not send GPU tensors from rank to rank.
    """
    deepspeed = import_deepspeed()
    from deepspeed.pipe import PipelineModule

    world = dist.get_world_size()
    check_integer(stages=stages)
    if world % stages:
        raise ValueError(f"stages={stages!r}: must divide the number of ranks ({world})")
    if ranks.device().type == "cuda" and dist.get_backend() == "gloo":
        raise ValueError("device='cuda': must be 'cpu' where several ranks share a GPU")
    with suppress_output():
        sequence, names = list_layers(model)
        if stages > len(sequence):
            raise ValueError(f"stages={stages}: must be at most {len(sequence)}, one per layer")
        deepspeed.init_distributed()  # uses the existing process group
        # PipelineModule seeds the random generators: restore their state afterwards.
        with torch.random.fork_rng():
            cut = PipelineModule(
                sequence, num_stages=stages, loss_fn=loss, partition_method="uniform"
            )
    cut.plain_names = names
    return cut


def is_pipeline(engine: Any) -> bool:
    """Return True if `engine` is DeepSpeed's PipelineEngine."""
    from deepspeed.pipe import PipelineModule

    return isinstance(engine.module, PipelineModule)


def plain_names_of(cut: Any, name: str) -> list[str]:
    """Return the plain model's names of a PipelineModule's parameter: two, if it is tied."""
    if name.startswith(f"tied_modules.{TIED}."):
        return ["embedding.weight", "head.weight"]
    index, _, rest = name.partition(".")
    return [f"{cut.plain_names[int(index)]}.{rest}"]
