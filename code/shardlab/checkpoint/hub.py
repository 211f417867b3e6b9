"""Load and save weights in the format of Hugging Face's hub, for a model on any number of ranks.

    config.json                             the model's shape
    model.safetensors                       all tensors; or
    model-00001-of-00002.safetensors, …     some tensors each, and
    model.safetensors.index.json            the file of each tensor

A file's header holds names, dtypes, shapes and offsets. To load, each rank reads the slices of its
own pieces, without communication. To save, files are assigned to ranks in turn; the rank that
writes a file receives its tensors from the ranks that hold parts of them. No rank ever holds more
than its own pieces and one file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shardlab.common.arguments import check_integer
from shardlab.common.files import read_json
from shardlab.common.shapes import Config
from shardlab.layout.boxes import (
    Box,
    TensorPiece,
    count_elements,
    get_box_shape,
    infer_full_shapes,
    make_full_box,
)
from shardlab.zero.wrapper import ShardedModule

from . import folder as files
from . import hub_names, resharding
from .folder import CheckpointError, Members
from .hub_names import FAMILIES, Link

GB = 10**9
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}


@dataclass(frozen=True)
class StoredTensor:
    """The location, dtype and shape of a tensor in a safetensors file."""

    file: str
    name: str  # name in the file
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def read_tensor_index(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor in `folder`, by name, from headers and index, without reading values.

    Raises CheckpointError for a file that is missing, truncated, or no safetensors file.
    """
    if (folder / INDEX_FILE).exists():  # the index gives the files; their headers give the tensors
        parts = sorted({*read_json("index", folder / INDEX_FILE)["weight_map"].values()})
    elif (folder / SINGLE_FILE).exists():
        parts = [SINGLE_FILE]
    else:
        raise CheckpointError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
    return {name: tensor for part in parts for name, tensor in _read_header(folder / part).items()}


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file; safetensors checks its header against the file's length."""
    try:
        with safe_open(path, "pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(path.name, name, part.get_dtype(), tuple(part.get_shape()))
                for name, part in parts.items()
            }
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a complete safetensors file: {error}") from None


@torch.no_grad()
def load_hub(
    model: nn.Module, folder: str | Path, group: dist.ProcessGroup | None = None
) -> tuple[str, ...]:
    """Load the weights in `folder`, which is in the hub's format, into a model.

    model: a GPT, plain or sharded, as for `list_pieces`. Collective over `group`; None: the world.
    Values are converted to the model's dtype. Returns the names of tensors in the folder that the
    GPT does not have, such as GPT-2's positions.

    Raises CheckpointError on all ranks, before the model changes, for a file or tensor that is
    missing, truncated, unknown, of another shape, or tied in the model but stored with two values.
    """
    folder = Path(folder)
    with closing(Members(group)) as members:
        members.check_same(folder=os.path.abspath(folder))
        config, own = _get_config(model), resharding.list_pieces(model)
        links, stored, unused = members.run_on_rank_0(lambda: _match_tensors(folder, config))
        _fill_pieces(folder, own, links, stored)
        members.all_gather_object(None)  # barrier: all ranks have read their pieces
        resharding.notify_weights_changed(model)
        return unused


def _fill_pieces(
    folder: Path,
    pieces: Sequence[TensorPiece],
    links: Mapping[str, Link],
    stored: Mapping[str, StoredTensor],
) -> None:
    """Fill this rank's pieces, file by file: read only the slices that the pieces need."""
    by_file: dict[str, list[TensorPiece]] = defaultdict(list)
    for piece in pieces:
        if piece.name in links and count_elements(piece.box):
            by_file[stored[links[piece.name].hub].file].append(piece)
    for file, wanted in by_file.items():
        with safe_open(folder / file, "pt") as opened:  # pages read stay in memory until closed
            for piece in wanted:
                link = links[piece.name]
                slices = tuple(slice(*ends) for ends in map_to_hub(link, piece.box))
                values = opened.get_slice(stored[link.hub].name)[slices]
                piece.tensor.copy_(values.T if link.transposed else values)
                del values  # free it before the next read


def map_to_hub(link: Link, box: Box) -> Box:
    """Return the box in the hub's tensor of `box`, a part of the GPT's tensor."""
    outer = link.box[::-1] if link.transposed else link.box
    inner = tuple(
        (begin + first, begin + end) for (first, end), (begin, _) in zip(box, outer, strict=True)
    )
    return inner[::-1] if link.transposed else inner


def _match_tensors(
    folder: Path, config: Config
) -> tuple[dict[str, Link], dict[str, StoredTensor], tuple[str, ...]]:
    """Find each tensor of the model in `folder`.

    Returns the GPT's tensors with their links, the hub's tensors with their place in the folder,
    and the names of tensors that the GPT does not have. Raises ValueError if there is no such
    folder, CheckpointError for missing, mismatched or unknown tensors.
    """
    model_type = read_json("config", hub_names.find_config_file(folder)).get("model_type")
    stored, links = read_tensor_index(folder), hub_names.map_tensors(config, model_type)
    family, boxes = FAMILIES[model_type], [(link.hub, link.box) for link in links.values()]
    embedding, head = (f"{family.module_names[end]}.weight" for end in ("embedding", "head"))
    found, known = {}, set()
    for name, wanted in infer_full_shapes(boxes).items():
        # Some files omit a prefix; some store tied tensors twice, and both must be equal.
        tied = [head] if config.tied and name == embedding else []
        aliases = (name, name.removeprefix(family.optional_prefix), *tied)
        aliases = [n for n in dict.fromkeys(aliases) if n in stored]
        if not aliases:
            raise CheckpointError(f"{folder}: {name} is missing (another model, or renamed?)")
        for alias in aliases:
            tensor = stored[alias]
            if tensor.shape != wanted:
                text = f"{alias} is {list(tensor.shape)}, and {list(wanted)} in this model"
                raise CheckpointError(f"{folder / tensor.file}: {text}")
            if tensor.dtype not in DTYPES:
                text = f"dtype of {alias}={tensor.dtype}: must be one of {', '.join(DTYPES)}"
                raise CheckpointError(f"{folder / tensor.file}: {text}")
            if alias != aliases[0] and not _are_equal(folder, stored[aliases[0]], tensor):
                text = f"{alias} is not equal to {aliases[0]}, to which this model ties it"
                advice = "build the model with tied=False (tie_word_embeddings=False)"
                raise CheckpointError(f"{folder / tensor.file}: {text}; {advice}")
        found[name] = stored[aliases[0]]
        known |= set(aliases)
    unused = sorted(stored.keys() - known)
    for name in unused:
        names = name, family.optional_prefix + name
        if not any(re.fullmatch(family.ignored, each) for each in names):
            text = f"{name} is unknown: another model, or renamed tensors?"
            raise CheckpointError(f"{folder / stored[name].file}: {text}")
    return links, found | {name: stored[name] for name in unused}, tuple(unused)


def _are_equal(folder: Path, a: StoredTensor, b: StoredTensor) -> bool:
    """Return True if two stored tensors of one shape are equal; reads a few rows at a time."""
    with safe_open(folder / a.file, "pt") as file_a, safe_open(folder / b.file, "pt") as file_b:
        pair = file_a.get_slice(a.name), file_b.get_slice(b.name)
        rows = (slice(first, first + 1024) for first in range(0, a.shape[0], 1024))
        return all((pair[0][some] == pair[1][some]).all() for some in rows)


@torch.no_grad()
def save_hub(
    model: nn.Module,
    folder: str | Path,
    group: dist.ProcessGroup | None = None,
    *,
    template: str | Path,
    shard_bytes: int = 5 * GB,
) -> None:
    """Save a model's weights in the hub's format to a new folder, which `transformers` can load.

    model: as in `load_hub`. Collective over `group`, whose ranks share the folder. template: a
    folder of the same kind of model, such as the one that was loaded; names, dtypes, config.json,
    tokenizer, and tensors that the GPT does not have are copied from it. shard_bytes: largest size
    of a file, unless one tensor is larger. The folder gets its name once all files are on the disk.

    Raises ValueError for an existing folder; CheckpointError on all ranks if the save fails.
    """
    check_integer(shard_bytes=shard_bytes)
    folder, template = Path(folder), Path(template)
    with closing(Members(group)) as members:
        paths = {"folder": os.path.abspath(folder), "template": os.path.abspath(template)}
        members.check_same(**paths, shard_bytes=shard_bytes)
        sources = _Sources(model, template, members)
        saving = members.run_on_rank_0(lambda: _create_save_folder(folder))
        plan = split_state_dict_into_shards_factory(
            sources.stored,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=shard_bytes,
        )
        problem = None
        for number, (file, tensors) in enumerate(plan.filename_to_tensors.items()):
            writer = number % members.size
            content = {hub: sources.gather_tensor(hub, writer) for hub in tensors}
            if members.rank == writer:
                try:
                    save_file(content, saving / file, {"format": "pt"})
                    files.fsync_path(saving / file)
                except (OSError, SafetensorError) as error:  # go on: others need this rank's parts
                    problem = f"rank {members.rank}: {files.describe_error(error)}"
            del content
        problem = next((p for p in members.all_gather_object(problem) if p), None)
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        size = sum(tensor.nbytes for tensor in sources.stored.values())
        members.run_on_rank_0(lambda: _finish_save(saving, folder, template, index, problem, size))


class _Sources:
    """The sources of the tensors to save: parts on ranks, or the files in `template`.

    stored: the hub's tensors in `template`, by name.
    """

    def __init__(self, model: nn.Module, template: Path, members: Members):
        self.template, self.members = template, members
        config, own = _get_config(model), resharding.list_pieces(model)
        self.pieces = resharding.group_by_name(own)
        parts = members.all_gather_object(resharding.list_parts(own))
        self.holders = resharding.find_holders(parts)
        links, self.stored, _ = members.run_on_rank_0(lambda: _match_tensors(template, config))
        self.links_by_hub: dict[str, list[tuple[str, Link]]] = defaultdict(list)
        for name, link in links.items():
            self.links_by_hub[link.hub].append((name, link))

    def gather_tensor(self, hub: str, writer: int) -> Tensor | None:
        """Gather a full tensor of the hub on the rank `writer` (collective); None elsewhere."""
        stored, is_writer = self.stored[hub], self.members.rank == writer
        if hub not in self.links_by_hub:
            if not is_writer:
                return None
            with safe_open(self.template / stored.file, "pt") as file:
                return file.get_tensor(stored.name)
        dtype = DTYPES[stored.dtype]
        full = torch.empty(stored.shape, dtype=dtype) if is_writer else None
        for name, link in self.links_by_hub[hub]:
            box = make_full_box(get_box_shape(link.box[::-1] if link.transposed else link.box))
            plan = resharding.plan_transfers(self.holders[name], [(writer, box)])
            assert plan is not None, link  # shapes were compared with the ranks' parts before
            wanted = []
            if full is not None:
                part = full[tuple(slice(*ends) for ends in link.box)]
                wanted = [TensorPiece(name, box, part.T if link.transposed else part)]
            group, cpu = self.members.group, torch.device("cpu")
            resharding.run_transfers(plan, self.pieces[name], wanted, dtype, group, cpu)
        return full


def _create_save_folder(folder: Path) -> Path:
    """Create a temporary folder beside `folder`, to be renamed later (rank 0 only)."""
    if folder.exists():
        raise ValueError(f"folder={str(folder)!r}: must be a new folder, but exists")
    if not folder.parent.is_dir():
        raise ValueError(f"folder={str(folder)!r}: its parent folder must exist")
    saving = folder.with_name(f"{files.SAVING_PREFIX}{folder.name}")
    shutil.rmtree(saving, ignore_errors=True)  # left by a save that was killed
    saving.mkdir()
    return saving


def _finish_save(
    saving: Path,
    folder: Path,
    template: Path,
    index: dict[str, Any],
    problem: str | None,
    size: int,
) -> None:
    """Write the other files and rename the folder, or delete it after an error (rank 0 only)."""
    weights = set(index["weight_map"].values())
    problem = problem or files.describe_missing_files(saving, weights)
    try:
        if not problem:
            if len(weights) > 1:
                content = json.dumps(index, indent=2).encode() + b"\n"
                files.write_durably(saving / INDEX_FILE, content)
            for path in sorted(template.iterdir()):
                is_index = path.name.endswith(".index.json")
                if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES and not is_index:
                    files.write_durably(saving / path.name, path.read_bytes())
            files.fsync_path(saving)
            os.rename(saving, folder)
            files.fsync_path(folder.parent)
    except OSError as error:
        problem = files.describe_error(error)
    if problem:
        room = files.describe_full_disk(folder.parent, size)
        shutil.rmtree(saving, ignore_errors=True)
        raise CheckpointError(f"{folder}: not saved: {problem}{room}")


def _get_config(model: nn.Module) -> Config:
    model = files.unwrap_model(model)
    config = getattr(model.module if isinstance(model, ShardedModule) else model, "config", None)
    if not isinstance(config, Config):
        raise ValueError(f"model={type(model).__name__}: must be a GPT, plain or sharded")
    return config
