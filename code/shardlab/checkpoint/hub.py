"""Weights as Hugging Face's hub keeps them, into a model on any ranks, and out of it.

    config.json                             the model's shape
    model.safetensors                       all of it; or
    model-00001-of-00002.safetensors, …     some tensors each, and
    model.safetensors.index.json            which tensor is in which file

A file's header says names, dtypes, shapes and places. To load, each rank reads the slices of its
own pieces, and nothing is sent. To save, the tensors of a file come to the rank that writes it,
each from those who have parts of it; files are dealt out over the ranks. Nobody ever holds more
than his part and one file.
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
    """A tensor in a file."""

    file: str
    name: str  # there
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return how many bytes its numbers take."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def stored(folder: Path) -> dict[str, Stored]:
    """Return every tensor in `folder`, by name, from headers and index; no number is read.

    Raises CheckpointError, which names the file, for one that is missing, cut off, or no
    safetensors file.
    """
    if (folder / INDEX).exists():  # it says which files; what is in them, their headers do
        parts = sorted({*read_json("index", folder / INDEX)["weight_map"].values()})
    elif (folder / ONE).exists():
        parts = [ONE]
    else:
        raise CheckpointError(f"{folder}: there is neither {ONE} nor {INDEX} in it")
    return {name: of for part in parts for name, of in _header(folder / part).items()}


def _header(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file, whose header the library checks against its length."""
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
    """Fill a model with the weights in `folder`, which is as the hub has it.

    model: a GPT, plain or on any ranks, as `pieces` takes it. All ranks of `group` call it; None:
    those of the world. Values are converted to the model's dtype. Returns the tensors in the folder
    that such a model has no place for, such as GPT-2's positions.

    Raises CheckpointError, the same on all ranks, which names the file or tensor that is missing,
    cut off, of another shape, unknown, or stored twice with unequal values though the model ties
    both: all that is found before the model changes.
    """
    folder = Path(folder)
    with closing(Members(group)) as members:
        members.check_same(folder=os.path.abspath(folder))
        config, own = _config(model), pieces(model)
        links, found, left = members.first(lambda: _matched(folder, config))
        _read(folder, own, links, found)
        members.exchange(None)  # all have read
        changed(model)
        return left


def _read(
    folder: Path,
    own: Sequence[Piece],
    links: Mapping[str, Link],
    found: Mapping[str, Stored],
) -> None:
    """Fill this rank's pieces, file after file: of each tensor the slice that is wanted."""
    by_file: dict[str, list[Piece]] = defaultdict(list)
    for piece in own:
        if piece.name in links and elements(piece.box):
            by_file[found[links[piece.name].hub].file].append(piece)
    for file, wanted in by_file.items():
        with safe_open(folder / file, "pt") as opened:  # what was read stays in memory until closed
            for piece in wanted:
                link = links[piece.name]
                place = tuple(slice(*ends) for ends in in_hub(link, piece.box))
                values = opened.get_slice(found[link.hub].name)[place]
                piece.tensor.copy_(values.T if link.turned else values)
                del values  # before there is another one


def in_hub(link: Link, box: Box) -> Box:
    """Where `box`, a part of our tensor, stands in the hub's tensor."""
    place = link.place[::-1] if link.turned else link.place
    found = tuple(
        (begin + first, begin + end) for (first, end), (begin, _) in zip(box, place, strict=True)
    )
    return found[::-1] if link.turned else found


def _matched(
    folder: Path, config: Config
) -> tuple[dict[str, Link], dict[str, Stored], tuple[str, ...]]:
    """Find each tensor that the model wants.

    Returns where our tensors stand on the hub, where the folder has each of the hub's, and the
    names of tensors that have no place in the model. Raises ValueError for no such folder,
    CheckpointError for what is missing, other or unknown.
    """
    kind, there = read_json("config", names.config_file(folder)).get("model_type"), stored(folder)
    links = names.links(config, kind)
    family, places = FAMILIES[kind], [(link.hub, link.place) for link in links.values()]
    embedding, head = (f"{family.names[end]}.weight" for end in ("embedding", "head"))
    found, known = {}, set()
    for name, wanted in spanned(places).items():
        # Some files leave a prefix out; some have tied layers twice, where both must be equal.
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
    """Return True if two tensors of one shape have equal numbers; a few rows at a time are read."""
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
    """Write a model's weights into a new folder, as the hub has them: `transformers` reads it.

    model: as in `load_hub`. All ranks of `group`, which share the folder, call it. like: a folder
    of such a model, the one that was loaded for instance, from which come names, dtypes,
    config.json, tokenizer, and the tensors that the model has no place for. shard_bytes: of a
    file, at most, unless one tensor is larger. The folder appears when all of it is on the disk.

    Raises ValueError for a folder that is there; CheckpointError, the same on all ranks, for what
    cannot be read or written.
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
                except (OSError, SafetensorError) as error:  # others wait for this rank's tensors
                    problem = f"rank {members.rank}: {files.cause(error)}"
            del content
        problem = next((of for of in members.exchange(problem) if of), None)
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        needed = sum(of.nbytes for of in sources.found.values())
        members.first(lambda: _complete(saving, folder, like, index, problem, needed))


class _Sources:
    """Where the tensors of a folder that is saved come from: parts on ranks, or `like`'s files.

    found: the hub's tensors, by name, as `like` has them.
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
        """A tensor of the hub's, whole, on its writer; all ranks that have parts of it call it."""
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
            assert plan is not None, link  # the shapes are those of what ranks have
            place = []
            if full is not None:
                there = full[tuple(slice(*ends) for ends in link.place)]
                place = [Piece(name, box, there.T if link.turned else there)]
            cpu = torch.device("cpu")
            carry(plan, self.pieces[name], place, dtype, self.members.group, cpu)
        return full


def _begin(folder: Path) -> Path:
    """On rank 0: the folder that is written, beside the one that it becomes."""
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
    """On rank 0: what stands beside the weights, and the rename; or nothing is left."""
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
    """The shape of a GPT, whatever it is wrapped in."""
    model = files.unwrapped(model)
    config = getattr(model.module if isinstance(model, Sharded) else model, "config", None)
    if not isinstance(config, Config):
        raise ValueError(f"model={type(model).__name__}: allowed are a GPT, plain or on any ranks")
    return config
