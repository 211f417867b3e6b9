"""From a config.json to a `Structure`."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from shardlab.common.files import read_text
from shardlab.layout.entries import COPIED, Entry
from shardlab.layout.structure import Core, Kind, Routed, Structure

from . import bounds, cuts

if TYPE_CHECKING:  # these load torch and transformers
    from .facts import Facts
    from .kinds import Alike, Tensor
    from .trace import Traced

SEQ = 8192  # tokens, where a file names no longest sequence


def read(path: str | Path, name: str = "config") -> Structure:
    """The structure of the model that a config.json describes.

    name: what messages call the argument. The same content is built once in a process. Raises
    ValueError, in one line, for a file that is none, and for a model that is not counted.
    """
    text = read_text(name, path, "JSON files", bounds.BYTES)
    try:
        return _read(text)
    except ValueError as error:
        raise ValueError(f"{name}={str(path)!r}: {error}") from None


def planned(path: str | Path, name: str = "config") -> Structure:
    """The same, of a model whose time and memory can be predicted, or ValueError says why not."""
    found = read(path, name)
    if found.unplanned:
        words = f"{found.model_type} is counted, and not planned: {found.unplanned}"
        raise ValueError(f"{name}={str(path)!r}: {words}")
    return found


@lru_cache(maxsize=64)
def _read(text: str, trace: bool = True) -> Structure:
    """trace: follow what layers compute and keep, which takes nine tenths of the time."""
    given, how = bounds.read(text)
    try:
        with warnings.catch_warnings(
            action="ignore"
        ):  # in a notebook tqdm warns of lacking widgets
            from .facts import facts  # which loads torch and transformers
    except ImportError as error:
        raise ValueError(f"transformers is needed to build its class ({error})") from None
    found = structure(facts(given, trace))
    if how:
        words = f"{how} is not read: weights are counted unquantised, as a training has them"
        found = replace(found, assumed=(*found.assumed, words))
    return found


def structure(facts: Facts) -> Structure:
    """Return the facts as a value. Raises ValueError where its counts do not agree."""
    unplanned = facts.unplanned
    kinds, names, whole = [], [], []
    for layer, traced in facts.kinds:
        whole += (odd := cuts.unknown(layer, traced))
        kind, why = _kind(layer, traced, odd)
        names.append(kind.name)
        kinds.append(replace(kind, name=f"{kind.name} {names.count(kind.name)}"))
        unplanned = unplanned or why
    kinds = [
        replace(kind, name=name) if names.count(name) == 1 else kind
        for kind, name in zip(kinds, names, strict=True)
    ]
    last = len(facts.outside) - 1
    ends = tuple(
        replace(cuts.outside(tensor, n == 0, n == last and last > 0), table=tensor.table)
        for n, tensor in enumerate(facts.outside)
    )
    words = [] if facts.seq else [f"no longest sequence is given: {SEQ} tokens"]
    found = Structure(
        facts.hidden, facts.vocab, facts.seq or SEQ, _told_apart(kinds), tuple(facts.order), ends,
        facts.tied, facts.model_type, (*facts.assumed, *words, *cuts.said(whole)), unplanned,
    )  # fmt: skip
    if found.total != facts.total:
        words = f"its layers and ends have {found.total:,} parameters, its class {facts.total:,}"
        raise ValueError(f"{facts.name}: {words}")
    return found


def _kind(layer: Alike, traced: Traced | None, whole: list[Tensor]) -> tuple[Kind, str]:
    """A kind of layer, with `whole` tensors of `unknown`; and why it cannot be planned, or ""."""
    entries = tuple(
        replace(cuts.inside(tensor, traced), table=tensor.table) for tensor in layer.tensors
    )
    core, why = _core(traced, layer.module)
    plain, own = cuts.network(entries, False), cuts.network(entries, True)
    odd = {e.name for e in entries if e.kind == "ffn"} & {tensor.name for tensor in whole}
    if not why and (plain is None or own is None or odd):
        why = f"the network of {layer.module} has matrices whose place is not known"
    width, _, gated = plain or (0, 0, True)
    routed = None
    if layer.experts:
        wide, inputs, twice = own or (0, 0, True)
        routed = Routed(layer.experts, layer.chosen, wide, inputs)
        gated = twice if not width else gated
        if not why and width and twice != gated:
            why = f"of the networks of {layer.module} some have gates and some have none"
    kept = {part: round(getattr(traced, part, 0)) for part in ("stream", "latent", "heads")}
    if traced and not why:
        why = _unexplained(layer, traced, entries, core)
    pattern = layer.pattern.removesuffix("_attention")
    words = pattern, "experts" if routed else "dense" if width and pattern != "mlp" else ""
    name = ", ".join(filter(None, words)) or "layer"
    return Kind(name, entries, core, width, gated, routed, **kept), why


def _core(traced: Traced | None, module: str) -> tuple[Core | None, str]:
    """What mixes the tokens, and why that is not known."""
    if not traced or not traced.mixed:
        return None, ""
    if (many := len(traced.mixed)) > 1:
        return None, f"{module} has {many} attentions in a layer"
    (call,) = traced.mixed
    why = f"{module} has {call.seen.unknown}" if call.seen.unknown else ""
    sizes = call.heads, call.kv_heads, call.query, call.value
    return Core(*sizes, window=call.seen.window, chunk=call.seen.chunk), why


def _unexplained(
    layer: Alike, traced: Traced, entries: tuple[Entry, ...], core: Core | None
) -> str:
    """Why what a layer computes is not what its matrices and its core explain."""
    if core is None and any(entry.kind == "attention" for entry in entries):
        return f"{layer.module} mixes tokens in a way that is not known"
    if layer.module.startswith("Llama4"):  # whose script sends each token through all experts
        return ""
    known = 2 * sum(
        prod(e.shape) * (1 if e.expert is None else layer.chosen)
        for e in entries
        if len(e.shape) > 1 and not e.name.endswith("bias")
    )
    more = traced.products - known
    if abs(more) > 1e-3 * known:
        return f"{layer.module} computes {more:.3g} operations a token that no matrix explains"
    return ""


def _told_apart(kinds: list[Kind]) -> tuple[Kind, ...]:
    """With other words for what is cut, where it is another number in another kind of layer."""
    units: dict[str, int] = {}
    found = []
    for kind in kinds:
        entries = []
        for entry in kind.entries:
            along, many = entry.along, entry.units
            if along and many and along != COPIED and units.setdefault(along, many) != many:
                entry = replace(entry, along=f"{along} ({kind.name})")
            entries.append(entry)
        found.append(replace(kind, entries=tuple(entries)))
    return tuple(found)
