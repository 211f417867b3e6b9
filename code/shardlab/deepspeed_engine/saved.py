"""Keeping what DeepSpeed trained: its own checkpoint, and a plain state dict made from it.

Every rank writes its own part of the optimizer into a folder of the tag's name; the file `latest`
beside it holds the last tag. The parts fit as many ranks as wrote them, and no other number. A
plain state dict needs neither ranks nor DeepSpeed afterwards.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .pipe import is_pipeline
from .start import prepare, quiet


def save(engine: Any, directory: str | Path, tag: str | None = None) -> None:
    """Save model, optimizer and step count; on every rank, under one `tag` (global_step<n>).

    Raises ValueError for a 16-bit pipeline without ZeRO: DeepSpeed 0.19.8 writes its checkpoint but
    cannot read it again (KeyError: 0).
    """
    prepare()
    sixteen = is_pipeline(engine) and hasattr(engine.optimizer, "fp32_groups_flat_partition")
    if sixteen and engine.zero_optimization_stage() == 0:
        raise ValueError(
            "zero=0: for the checkpoint of a 16-bit pipeline allowed is 1; DeepSpeed could not load"
            " this one again"
        )
    with quiet():
        engine.save_checkpoint(str(directory), tag=tag)
    dist.barrier()  # whoever returns may read what the others wrote


def load(engine: Any, directory: str | Path, tag: str | None = None) -> None:
    """Load into an engine of the same configuration on as many ranks; the last tag by default.

    Raises FileNotFoundError when there is no such checkpoint.
    """
    prepare()
    folder = _folder(directory, tag)
    with quiet():
        engine.load_checkpoint(str(directory), tag=folder.name)


def plain_state_dict(directory: str | Path, tag: str | None = None) -> dict[str, Tensor]:
    """The float32 weights of a DeepSpeed checkpoint, under the plain module's names, on the CPU.

    For all ZeRO stages and for `pipeline`; without ranks. Where DeepSpeed saves no master weights
    with the model (16 bits in stage 0 or in a pipeline), they are those in use, widened.

    It reads pickles, which can run code: only load checkpoints that you trust. (DeepSpeed writes
    more than tensors into them.)

    Raises FileNotFoundError when there is no such checkpoint, ValueError for one of a tensor
    parallel model, whose shards only the running engine can put together (`weights`).
    """
    prepare()
    folder = _folder(directory, tag)
    shards = {file.name.split("mp_rank_")[1][:2] for file in folder.glob("*mp_rank_*.pt")}
    if len(shards) > 1 and not _layers(folder):
        raise ValueError(
            f"{folder}: written by tensor-parallel ranks; allowed are those of data-parallel and"
            " pipeline ones: use weights(engine) while they run"
        )
    if _layers(folder):
        return _from_layers(folder)
    if list(folder.glob("*_optim_states.pt")):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with quiet():
            return dict(get_fp32_state_dict_from_zero_checkpoint(str(directory), folder.name))
    states = sorted([*folder.glob("mp_rank_00_model_states.pt")])
    if not states:
        raise FileNotFoundError(f"{folder}: it holds no model states of DeepSpeed")
    return _floats(torch.load(states[0], "cpu", weights_only=False)["module"])


def _folder(directory: str | Path, tag: str | None) -> Path:
    latest = Path(directory, "latest")
    if tag is None and not latest.is_file():
        raise FileNotFoundError(f"{latest}: no checkpoint of DeepSpeed was finished here")
    folder = Path(directory, latest.read_text().strip() if tag is None else tag)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such checkpoint")
    return folder


def _layers(folder: Path) -> list[Path]:
    return sorted(folder.glob("layer_*-model_states.pt"))


def _from_layers(folder: Path) -> dict[str, Tensor]:
    """A pipeline writes one file per layer, numbered as in `pipe.layers`; a tied head has none."""
    content = {}
    for file in _layers(folder):
        match = re.match(r"layer_(\d+)-", file.name)
        assert match, file
        content[int(match[1])] = _floats(torch.load(file, "cpu", weights_only=True))
    blocks = [index for index, state in content.items() if any("." in name for name in state)]
    names = {0: "embedding", max(blocks) + 1: "norm", max(blocks) + 2: "head"}
    names |= {index: f"blocks.{index - 1}" for index in blocks}
    state = {
        f"{names[index]}.{name}": value
        for index, layer in content.items()
        for name, value in layer.items()
    }
    state.setdefault("head.weight", state["embedding.weight"])
    return state


def _floats(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.float() for name, value in state.items()}
