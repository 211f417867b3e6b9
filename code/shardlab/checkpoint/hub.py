"""Weights as Hugging Face's hub keeps them, into a model on any ranks, and out of it: streamed.

To load, each rank reads the slices of its own pieces, and nothing is sent. To save, the tensors of
a file come to the rank that writes it, one after the other, each from those who have parts of it;
files are dealt out over the ranks. Nobody ever holds more than his part and one tensor.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shardlab.common.arguments import check_one_of, check_whole
from shardlab.common.shapes import Config
from shardlab.layout.boxes import Box, Piece, common, moved, shape, within
from shardlab.zero.wrapper import Sharded

from . import names, safe
from .folder import (
    SAVING,
    CheckpointError,
    Members,
    cause,
    is_full,
    no_room,
    said,
    sync,
    unwrapped,
    write_durably,
)
from .moving import by_name, carry, changed, holders, parts_of, pieces, transfers
from .names import FAMILIES, Link

GB = 10**9
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}


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
    folder, members = Path(folder), Members(group)
    try:
        members.check_same(folder=os.path.abspath(folder))
        members.first(lambda: names.check_folder(folder=folder))
        config, own = _config(model), pieces(model)
        there, kind = members.first(lambda: (safe.stored(folder), _kind(folder)))
        links = names.links(config, kind)
        wanted, tied = names.shapes(links), _tied(config, kind)
        found, left = members.first(lambda: _matched(folder, there, wanted, kind, tied))
        problem = []
        try:
            _read(folder, own, links, found)
        except (OSError, SafetensorError) as error:
            problem = [f"{folder}: half loaded, build the model anew: {cause(said(error))}"]
        members.agree(problem)
        changed(model)
        return left
    finally:
        members.close()


def _read(
    folder: Path, own: Sequence[Piece], links: Mapping[str, list[Link]], found: Mapping[str, Any]
) -> None:
    """Fill this rank's pieces, file after file: of each tensor the slice that is wanted."""
    wanted = []
    for piece in own:
        for link in links.get(piece.name, ()):
            if (box := common(link.box, piece.box)) is not None:
                stored, as_stored = found[link.hub]
                wanted.append((stored.file, as_stored, in_hub(link, box), link, box, piece))
    file, reader = "", ExitStack()
    with reader:
        for name, tensor, place, link, box, piece in sorted(wanted, key=lambda of: of[:3]):
            if name != file:
                reader.close()  # what was read of a file stays in memory as long as it is open
                file, opened = name, reader.enter_context(safe_open(folder / name, "pt"))
            values = opened.get_slice(tensor)[tuple(slice(*ends) for ends in place)]
            piece.tensor[within(box, piece.box)].copy_(values.T if link.turned else values)
            del values  # before there is another one


def in_hub(link: Link, box: Box) -> Box:
    """Where `box`, a part of link.box, stands in the hub's tensor."""
    inside = slice(len(box) - len(link.place), None)  # of one expert among all in a tensor
    place = link.place[::-1] if link.turned else link.place
    found = moved(box[inside], link.box[inside], place)
    return found[::-1] if link.turned else found


def _matched(
    folder: Path,
    there: Mapping[str, safe.Stored],
    shapes: Mapping[str, tuple[int, ...]],
    kind: str,
    tied: Mapping[str, list[str]],
) -> tuple[dict[str, tuple[safe.Stored, str]], tuple[str, ...]]:
    """Find each tensor that the model wants, and the name it has there; and what has no place.

    tied: further names of a tensor. Some folders have it under several, where all must be equal.

    Raises CheckpointError for what is missing, other or unknown.
    """
    family, found, known = FAMILIES[kind], {}, set()
    for name, wanted in shapes.items():
        short = name.removeprefix(family.base)
        called = [n for n in dict.fromkeys((name, short, *tied.get(name, ()))) if n in there]
        if not called:
            raise CheckpointError(f"{folder}: {name} is not in it: of another model, or renamed")
        for as_stored in called:
            path, stored = folder / there[as_stored].file, there[as_stored]
            if stored.shape != wanted:
                text = f"{as_stored} is {list(stored.shape)}, and {list(wanted)} in this model"
                raise CheckpointError(f"{path}: {text}")
            if stored.dtype not in safe.DTYPES:
                allowed = f"allowed are {', '.join(safe.DTYPES)}"
                raise CheckpointError(f"{path}: {as_stored} is {stored.dtype}; {allowed}")
            if not safe.are_equal(folder, there, called[0], as_stored):
                text = f"{as_stored} is not equal to {called[0]}, to which this model ties it"
                allowed = "allowed is a model with both (tied=False, tie_word_embeddings=False)"
                raise CheckpointError(f"{path}: {text}; {allowed}")
        found[name] = there[called[0]], called[0]
        known |= set(called)
    left = sorted(there.keys() - known)
    for name in left:
        if not any(re.fullmatch(family.beside, of) for of in (name, f"{family.base}{name}")):
            text = f"{name} is unknown: of another model, or renamed"
            raise CheckpointError(f"{folder / there[name].file}: {text}")
    return found, tuple(left)


@torch.no_grad()
def save_hub(
    model: nn.Module,
    folder: str | Path,
    group: dist.ProcessGroup | None = None,
    like: str | Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5 * GB,
) -> None:
    """Write a model's weights into a new folder, as the hub has them: `transformers` reads it.

    model: as in `load_hub`. All ranks of `group`, which share the folder, call it. like: a folder
    of such a model, the one that was loaded for instance, from which come its dtypes, config.json,
    tokenizer, and what the model has no place for; without it, a GPT becomes the kind that computes
    the same (`names.family_of`). dtype: of all; None: like's, or the model's. shard_bytes: of a
    file, at most, unless one tensor is larger. The folder appears when all of it is on the disk.

    Raises ValueError for a folder that is there, and for a model with what its kind has no place
    for; CheckpointError, the same on all ranks, for what cannot be read or written.
    """
    check_one_of([None, *safe.DTYPES.values()], dtype=dtype)
    check_whole(shard_bytes=shard_bytes)
    members = Members(group)
    try:
        same = {"folder": os.path.abspath(folder), "like": like, "dtype": dtype}
        members.check_same(**same, shard_bytes=shard_bytes)
        job = _Saving(model, Path(folder), None if like is None else Path(like), dtype, members)
        job.write(shard_bytes)
    finally:
        members.close()


class _Saving:
    """A model on its way into a folder: what goes where, known on all ranks before the first byte.

    shapes, dtypes: of the hub's tensors. sources: of those, which come out of `like` as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        like: Path | None,
        dtype: torch.dtype | None,
        members: Members,
    ):
        self.folder, self.like, self.members = folder, like, members
        config, own = _config(model), pieces(model)
        told = members.exchange((parts_of(own), {p.name: p.tensor.dtype for p in own}))
        parts, kinds = [of for of, _ in told], {n: t for _, of in told for n, t in of.items()}
        if like is None:
            there, kind = {}, names.family_of(config)
        else:
            members.first(lambda: names.check_folder(like=like))
            there, kind = members.first(lambda: (safe.stored(like), _kind(like)))
        self.kind, self.config = kind, config
        self.pieces, self.holders = by_name(own), holders(parts)
        links = names.links(config, kind)
        lost = [p.name for p in own if p.name not in links and p.tensor.count_nonzero()]
        if lost := [name for names in members.exchange(lost) for name in names]:
            text = f"model_type={kind!r} has no place for {lost[0]}"
            raise ValueError(f"model: {text}; allowed are models without, or where it is 0")
        self.shapes, self.into = names.shapes(links), {}
        for link in (link for of in links.values() for link in of):
            self.into.setdefault(link.hub, []).append(link)
        self.dtypes = {hub: dtype or kinds[of[0].name] for hub, of in self.into.items()}
        self.sources: dict[str, safe.Stored] = {}
        if like is not None:
            tied = _tied(config, kind)
            found, left = members.first(lambda: _matched(like, there, self.shapes, kind, tied))
            self.sources = {name: there[name] for name in left}
            self.shapes |= {name: there[name].shape for name in left}
            stored = {hub: of for hub, (of, _) in found.items()} | self.sources
            self.dtypes = {hub: dtype or safe.DTYPES[of.dtype] for hub, of in stored.items()}

    def write(self, shard_bytes: int) -> None:
        """All files, beside their place; then the rename."""
        files = safe.dealt(self.shapes, self.dtypes, shard_bytes)
        saving = self.members.first(self._begin)
        rank, size = self.members.rank, self.members.size
        # Files of different writers in turn: while one writes to the disk, another one is filled.
        order = sorted(
            (number // size, place, number, hub)
            for number, file in enumerate(files)
            for place, hub in enumerate(file.shapes)
        )
        problem, opened = None, {}
        try:
            for number, file in enumerate(files[rank::size]):
                opened[rank + number * size] = content = open(saving / file.name, "wb")
                content.write(safe.header(file, self.dtypes))
        except OSError as error:
            problem = error
        for _, _, number, hub in order:
            tensor = self._tensor(hub, number % size)
            if tensor is None or problem:  # others wait for this rank, whatever its disk says
                continue
            try:
                opened[number].write(safe.numbers(tensor))
            except OSError as error:
                problem = error
            del tensor
        for content in opened.values():
            try:
                with content:
                    content.flush()
                    os.fsync(content.fileno())
            except OSError as error:
                problem = problem or error
        reports = self.members.exchange((cause(problem), is_full(problem)) if problem else None)
        self.members.first(lambda: self._complete(saving, files, [r for r in reports if r]))

    def _tensor(self, hub: str, writer: int) -> Tensor | None:
        """A tensor of the hub's, whole, on its writer; all ranks that have parts of it call it."""
        dtype, mine = self.dtypes[hub], self.members.rank == writer
        if hub in self.sources:
            if not mine:
                return None
            with safe_open(self.like / self.sources[hub].file, "pt") as file:
                return file.get_tensor(hub).to(dtype)
        full = torch.empty(self.shapes[hub], dtype=dtype) if mine else None
        for link in self.into[hub]:
            plan = transfers(self.holders.get(link.name, {}), [(writer, link.box)])
            assert plan is not None, link  # the shapes are those of what ranks have
            place = []
            if full is not None:
                there = full[tuple(slice(*ends) for ends in link.place)]
                there = there.T if link.turned else there
                place = [Piece(link.name, link.box, there.view(shape(link.box)))]
            if any(self.members.rank in (move.source, move.target) for move in plan):
                own = self.pieces.get(link.name, ())
                carry(plan, own, place, dtype, self.members.group, torch.device("cpu"))
        return full

    def _begin(self) -> Path:
        """On rank 0: the folder that is written, beside the one that it becomes."""
        if self.folder.exists():
            raise ValueError(f"folder={str(self.folder)!r}: it is there; allowed is a new one")
        if not self.folder.parent.is_dir():
            parent = self.folder.parent
            raise ValueError(f"folder={str(self.folder)!r}: there is no folder {parent}")
        saving = self.folder.with_name(f"{SAVING}{self.folder.name}")
        try:
            if saving.exists():  # left by a save that was killed
                shutil.rmtree(saving)
            saving.mkdir()
        except OSError as error:
            raise CheckpointError(f"{self.folder}: not saved: {cause(error)}") from None
        return saving

    def _complete(
        self, saving: Path, files: Sequence[safe.File], reports: Sequence[tuple[str, bool]]
    ) -> None:
        """On rank 0: what stands beside the weights, and the rename; or nothing is left."""
        try:
            if unseen := [file.name for file in files if not (saving / file.name).exists()]:
                text = f"rank 0 does not see {unseen[0]}: allowed is a folder that all ranks share"
                reports = [*reports, (text, False)]
            if not reports:
                if files[1:]:
                    write_durably(saving / safe.INDEX, safe.index(files, self.dtypes))
                self._beside(saving)
                sync(saving)
                os.rename(saving, self.folder)
                sync(self.folder.parent)
        except OSError as error:
            reports = [(cause(error), is_full(error))]
        if reports:
            shutil.rmtree(saving, ignore_errors=True)
            problem, full = reports[0]
            needed = sum(prod(of) * self.dtypes[hub].itemsize for hub, of in self.shapes.items())
            room = no_room(self.folder.parent, needed) if full else ""
            raise CheckpointError(f"{self.folder}: not saved: {problem}{room}")

    def _beside(self, saving: Path) -> None:
        """config.json, and where there is a folder to be like, tokenizer and the like."""
        for path in sorted(self.like.iterdir()) if self.like else ():
            weights = path.suffix in _WEIGHTS or path.name.endswith(".index.json")
            if path.is_file() and not weights:
                shutil.copyfile(path, saving / path.name)
        content = names.config_json(self.config, self.kind)
        if self.like is not None:
            content = json.loads((self.like / "config.json").read_text("utf-8"))
        words = {str(dtype).removeprefix("torch.") for dtype in self.dtypes.values()}
        for key in {"dtype", "torch_dtype"} & content.keys() or {"dtype"}:
            if len(words) == 1:
                content[key] = next(iter(words))
        write_durably(saving / "config.json", json.dumps(content, indent=2).encode() + b"\n")


def _config(model: nn.Module) -> Config:
    """The shape of a GPT, whatever it is wrapped in."""
    model = unwrapped(model)
    config = getattr(model.module if isinstance(model, Sharded) else model, "config", None)
    if not isinstance(config, Config):
        raise ValueError(f"model={type(model).__name__}: allowed are a GPT, plain or on any ranks")
    return config


def _tied(config: Config, kind: str) -> dict[str, list[str]]:
    """Return a tied tensor's further name on the hub, by the name under which the model has it."""
    first, other = (f"{FAMILIES[kind].names[end]}.weight" for end in ("embedding", "head"))
    return {first: [other]} if config.tied else {}


def _kind(folder: Path) -> str:
    """Return the model_type that config.json says."""
    path = folder / "config.json"
    safe.check_file(path)
    try:
        return str(json.loads(path.read_text("utf-8"))["model_type"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path}: has no model_type: {error!r}") from None
