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

from shardlab.common.arguments import check_whole
from shardlab.common.files import read_json
from shardlab.common.shapes import Config
from shardlab.layout.boxes import Box, Piece, elements, shape, spanned, whole
from shardlab.zero.wrapper import Sharded

from . import folder as files
from . import names
from .folder import CheckpointError, Members
from .moving import by_name, carry, changed, holders, parts_of, pieces, transfers
from .names import FAMILIES, Link

GB = 10**9
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}


@dataclass(frozen=True)
class Stored:
    """The location, dtype and shape of a tensor in a safetensors file."""

    file: str
    name: str  # name in the file
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def stored(folder: Path) -> dict[str, Stored]:
    """Return every tensor in `folder`, by name, from headers and index, without reading values.

    Raises CheckpointError, which names the file, if a file is missing, truncated, or no
    safetensors file.
    """
    if (folder / INDEX).exists():  # the index gives the files; their headers give the tensors
        parts = sorted({*read_json("index", folder / INDEX)["weight_map"].values()})
    elif (folder / ONE).exists():
        parts = [ONE]
    else:
        raise CheckpointError(f"{folder}: there is neither {ONE} nor {INDEX} in it")
    return {name: of for part in parts for name, of in _header(folder / part).items()}


def _header(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file; safetensors checks its header against the file's length."""
    try:
        with safe_open(path, "pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: Stored(path.name, name, part.get_dtype(), tuple(part.get_shape()))
                for name, part in parts.items()
            }
    except (OSError, SafetensorError) as error:
        text = "cannot be read, cut off, or no safetensors file"
        raise CheckpointError(f"{path}: {text}: {error}") from None


@torch.no_grad()
def load_hub(
    model: nn.Module, folder: str | Path, group: dist.ProcessGroup | None = None
) -> tuple[str, ...]:
    """Load the weights in `folder`, which is in the hub's format, into a model.

    model: a GPT, plain or sharded, as for `pieces`. Collective over `group`; None: the world.
    Values are converted to the model's dtype. Returns the names of tensors in the folder that the
    GPT does not have, such as GPT-2's positions.

    Raises CheckpointError, equal on all ranks and before the model changes. It names the file or
    tensor that is missing, truncated, of another shape, unknown, or stored twice with different
    values although the model ties both.
    """
    folder = Path(folder)
    with closing(Members(group)) as members:
        members.check_same(folder=os.path.abspath(folder))
        config, own = _config(model), pieces(model)
        links, found, left = members.first(lambda: _matched(folder, config))
        _read(folder, own, links, found)
        members.exchange(None)  # barrier: all ranks have read their pieces
        changed(model)
        return left


def _read(
    folder: Path,
    own: Sequence[Piece],
    links: Mapping[str, Link],
    found: Mapping[str, Stored],
) -> None:
    """Fill this rank's pieces, file by file: read only the slices that the pieces need."""
    by_file: dict[str, list[Piece]] = defaultdict(list)
    for piece in own:
        if piece.name in links and elements(piece.box):
            by_file[found[links[piece.name].hub].file].append(piece)
    for file, wanted in by_file.items():
        with safe_open(folder / file, "pt") as opened:  # pages read stay in memory until closed
            for piece in wanted:
                link = links[piece.name]
                place = tuple(slice(*ends) for ends in in_hub(link, piece.box))
                values = opened.get_slice(found[link.hub].name)[place]
                piece.tensor.copy_(values.T if link.turned else values)
                del values  # free it before the next read


def in_hub(link: Link, box: Box) -> Box:
    """Return the box in the hub's tensor of `box`, a part of the GPT's tensor."""
    place = link.place[::-1] if link.turned else link.place
    found = tuple(
        (begin + first, begin + end) for (first, end), (begin, _) in zip(box, place, strict=True)
    )
    return found[::-1] if link.turned else found


def _matched(
    folder: Path, config: Config
) -> tuple[dict[str, Link], dict[str, Stored], tuple[str, ...]]:
    """Find each tensor of the model in `folder`.

    Returns the GPT's tensors with their links, the hub's tensors with their place in the folder,
    and the names of tensors that the GPT does not have. Raises ValueError if there is no such
    folder, CheckpointError for missing, mismatched or unknown tensors.
    """
    kind, there = read_json("config", names.config_file(folder)).get("model_type"), stored(folder)
    links = names.links(config, kind)
    family, places = FAMILIES[kind], [(link.hub, link.place) for link in links.values()]
    embedding, head = (f"{family.names[end]}.weight" for end in ("embedding", "head"))
    found, known = {}, set()
    for name, wanted in spanned(places).items():
        # Some files omit a prefix; some store tied tensors twice, and both must be equal.
        tied = [head] if config.tied and name == embedding else []
        called = [n for n in (name, name.removeprefix(family.base), *tied) if n in there]
        if not called:
            raise CheckpointError(f"{folder}: {name} is not in it: of another model, or renamed")
        for each in dict.fromkeys(called):
            of = there[each]
            if of.shape != wanted:
                text = f"{each} is {list(of.shape)}, and {list(wanted)} in this model"
                raise CheckpointError(f"{folder / of.file}: {text}")
            if of.dtype not in DTYPES:
                text = f"{each} is {of.dtype}; allowed are {', '.join(DTYPES)}"
                raise CheckpointError(f"{folder / of.file}: {text}")
            if each != called[0] and not _are_equal(folder, there[called[0]], of):
                text = f"{each} is not equal to {called[0]}, to which this model ties it"
                allowed = "allowed is a model with both (tied=False, tie_word_embeddings=False)"
                raise CheckpointError(f"{folder / of.file}: {text}; {allowed}")
        found[name] = there[called[0]]
        known |= set(called)
    left = sorted(there.keys() - known)
    for name in left:
        if not any(re.fullmatch(family.beside, of) for of in (name, f"{family.base}{name}")):
            text = f"{name} is unknown: of another model, or renamed"
            raise CheckpointError(f"{folder / there[name].file}: {text}")
    return links, found | {name: there[name] for name in left}, tuple(left)


def _are_equal(folder: Path, a: Stored, b: Stored) -> bool:
    """Return True if two stored tensors of one shape are equal; reads a few rows at a time."""
    with safe_open(folder / a.file, "pt") as file_a, safe_open(folder / b.file, "pt") as file_b:
        pair = file_a.get_slice(a.name), file_b.get_slice(b.name)
        rows = (slice(first, first + 1024) for first in range(0, a.shape[0], 1024))
        return all((pair[0][of] == pair[1][of]).all() for of in rows)


@torch.no_grad()
def save_hub(
    model: nn.Module,
    folder: str | Path,
    group: dist.ProcessGroup | None = None,
    *,
    like: str | Path,
    shard_bytes: int = 5 * GB,
) -> None:
    """Save a model's weights in the hub's format to a new folder, which `transformers` can load.

    model: as in `load_hub`. Collective over `group`, whose ranks share the folder. like: a folder
    of the same kind of model, such as the one that was loaded; names, dtypes, config.json,
    tokenizer, and tensors that the GPT does not have are copied from it. shard_bytes: largest size
    of a file, unless one tensor is larger. The folder gets its name once all files are on the disk.

    Raises ValueError for an existing folder; CheckpointError, equal on all ranks, if a file cannot
    be read or written.
    """
    check_whole(shard_bytes=shard_bytes)
    folder, like = Path(folder), Path(like)
    with closing(Members(group)) as members:
        members.check_same(
            folder=os.path.abspath(folder), like=os.path.abspath(like), shard_bytes=shard_bytes
        )
        sources = _Sources(model, like, members)
        saving = members.first(lambda: _begin(folder))
        plan = split_state_dict_into_shards_factory(
            sources.found,
            get_storage_size=lambda of: of.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=shard_bytes,
        )
        problem = None
        for number, (file, tensors) in enumerate(plan.filename_to_tensors.items()):
            writer = number % members.size
            content = {hub: sources.gather(hub, writer) for hub in tensors}
            if members.rank == writer:
                try:
                    save_file(content, saving / file, {"format": "pt"})
                    files.sync(saving / file)
                except (OSError, SafetensorError) as error:  # go on: others need this rank's parts
                    problem = f"rank {members.rank}: {files.cause(error)}"
            del content
        problem = next((of for of in members.exchange(problem) if of), None)
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        needed = sum(of.nbytes for of in sources.found.values())
        members.first(lambda: _complete(saving, folder, like, index, problem, needed))


class _Sources:
    """The sources of the tensors to save: parts on ranks, or the files in `like`.

    found: the hub's tensors in `like`, by name.
    """

    def __init__(self, model: nn.Module, like: Path, members: Members):
        self.like, self.members = like, members
        config, own = _config(model), pieces(model)
        self.pieces, self.holders = by_name(own), holders(members.exchange(parts_of(own)))
        links, self.found, _ = members.first(lambda: _matched(like, config))
        self.into: dict[str, list[tuple[str, Link]]] = defaultdict(list)
        for name, link in links.items():
            self.into[link.hub].append((name, link))

    def gather(self, hub: str, writer: int) -> Tensor | None:
        """Gather a full tensor of the hub on the rank `writer` (collective); None elsewhere."""
        of, mine = self.found[hub], self.members.rank == writer
        if hub not in self.into:
            if not mine:
                return None
            with safe_open(self.like / of.file, "pt") as file:
                return file.get_tensor(of.name)
        dtype = DTYPES[of.dtype]
        full = torch.empty(of.shape, dtype=dtype) if mine else None
        for name, link in self.into[hub]:
            box = whole(shape(link.place[::-1] if link.turned else link.place))
            plan = transfers(self.holders[name], [(writer, box)])
            assert plan is not None, link  # shapes were compared with the ranks' parts before
            place = []
            if full is not None:
                there = full[tuple(slice(*ends) for ends in link.place)]
                place = [Piece(name, box, there.T if link.turned else there)]
            cpu = torch.device("cpu")
            carry(plan, self.pieces[name], place, dtype, self.members.group, cpu)
        return full


def _begin(folder: Path) -> Path:
    """Create a temporary folder beside `folder`, to be renamed later (rank 0 only)."""
    if folder.exists():
        raise ValueError(f"folder={str(folder)!r}: it is there; allowed is a new one")
    if not folder.parent.is_dir():
        raise ValueError(f"folder={str(folder)!r}: there is no folder {folder.parent}")
    saving = folder.with_name(f"{files.SAVING}{folder.name}")
    shutil.rmtree(saving, ignore_errors=True)  # left by a save that was killed
    saving.mkdir()
    return saving


def _complete(
    saving: Path,
    folder: Path,
    like: Path,
    index: dict[str, Any],
    problem: str | None,
    needed: int,
) -> None:
    """Write the other files and rename the folder, or delete it after an error (rank 0 only)."""
    weights = set(index["weight_map"].values())
    problem = problem or files.unseen(saving, weights)
    try:
        if not problem:
            if len(weights) > 1:
                files.write_durably(saving / INDEX, json.dumps(index, indent=2).encode() + b"\n")
            for path in sorted(like.iterdir()):
                beside = path.suffix not in _WEIGHTS and not path.name.endswith(".index.json")
                if path.is_file() and beside:
                    files.write_durably(saving / path.name, path.read_bytes())
            files.sync(saving)
            os.rename(saving, folder)
            files.sync(folder.parent)
    except OSError as error:
        problem = files.cause(error)
    if problem:
        room = files.no_room(folder.parent, needed)
        shutil.rmtree(saving, ignore_errors=True)
        raise CheckpointError(f"{folder}: not saved: {problem}{room}")


def _config(model: nn.Module) -> Config:
    """Return the config of a GPT, inside any wrapper."""
    model = files.unwrapped(model)
    config = getattr(model.module if isinstance(model, Sharded) else model, "config", None)
    if not isinstance(config, Config):
        raise ValueError(f"model={type(model).__name__}: allowed are a GPT, plain or on any ranks")
    return config
