"""From a config.json to a `Structure`."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from shardlab.common.files import read_text
from shardlab.layout.entries import COPIED, Entry
from shardlab.layout.structure import Core, Kind, Routed, Structure

from . import bounds, cuts
from .ahead import with_modules

SEQ = 8192  # tokens, where a file names no longest sequence


def read(path: str | Path, name: str = "config", mtp: int = 0) -> Structure:
    """The structure of the model that a config.json describes.

    name: what messages call the argument; mtp: of the modules that predict further tokens so many
    are counted, too (`ahead`). The same content is built once in a process. Raises ValueError, in
    one line, for a file that is none, and for a model that is not counted.
    """
    text = read_text(name, path, "JSON files", bounds.BYTES)
    try:
        found = _read(text)
        return with_modules(found, bounds.read(text)[0], mtp) if mtp else found
    except ValueError as error:
        raise ValueError(f"{name}={str(path)!r}: {error}") from None


def planned(path: str | Path, name: str = "config", mtp: int = 0) -> Structure:
    """The same, of a model whose time and memory can be predicted, or ValueError says why not."""
    found = read(path, name, mtp)
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


def structure(facts: dict[str, Any]) -> Structure:
    """Return the facts as a value. Raises ValueError where its counts do not agree."""
    unplanned = facts["unplanned"]
    kinds, names = [], []
    unknown = [cuts.unknown(layer) for layer in facts["kinds"]]
    for layer, (_, whole) in zip(facts["kinds"], unknown, strict=True):
        kind, why = _kind(layer, facts["tokens"], whole)
        names.append(kind.name)
        kinds.append(replace(kind, name=f"{kind.name} {names.count(kind.name)}"))
        unplanned = unplanned or why
    kinds = [
        replace(kind, name=name) if names.count(name) == 1 else kind
        for kind, name in zip(kinds, names, strict=True)
    ]
    last = len(facts["outside"]) - 1
    ends = tuple(
        replace(
            cuts.outside(tensor, number == 0, number == last and last > 0), table=tensor["table"]
        )
        for number, tensor in enumerate(facts["outside"])
    )
    words = [] if facts["seq"] else [f"no longest sequence is given: {SEQ} tokens"]
    found = Structure(
        facts["hidden"], facts["vocab"], facts["seq"] or SEQ, _told_apart(kinds),
        tuple(facts["order"]), ends, facts["tied"], facts["model_type"],
        (*facts["assumed"], *words, *cuts.said(unknown)), unplanned,
    )  # fmt: skip
    if found.total != facts["total"]:
        words = f"its layers and ends have {found.total:,} parameters, its class {facts['total']:,}"
        raise ValueError(f"{facts['class']}: {words}")
    return found


def _kind(layer: dict[str, Any], tokens: int, whole: list[dict[str, Any]]) -> tuple[Kind, str]:
    """A kind of layer, with `whole` tensors of `unknown`; and why it cannot be planned, or ""."""
    entries = tuple(
        replace(cuts.inside(tensor, layer), table=tensor["table"]) for tensor in layer["tensors"]
    )
    traced, mixer = layer["traced"], layer["mixer"]
    core, why = _core(traced, mixer, layer["module"])
    plain, own = cuts.network(entries, False), cuts.network(entries, True)
    odd = {e.name for e in entries if e.kind == "ffn"} & {tensor["name"] for tensor in whole}
    if not why and (plain is None or own is None or odd):
        why = f"the network of {layer['module']} has matrices whose place is not known"
    width, _, gated = plain or (0, 0, True)
    routed = None
    if layer["experts"]:
        wide, inputs, twice = own or (0, 0, True)
        routed = Routed(layer["experts"], layer["chosen"], wide, inputs)
        gated = twice if not width else gated
        if not why and width and twice != gated:
            why = f"of the networks of {layer['module']} some have gates and some have none"
    kept = {"stream": 0, "latent": 0, "heads": 0}
    if traced:
        kept = {part: round(traced[part]) for part in kept}
    scans = 0.0
    if mixer and "scans" in mixer:
        scans = float(mixer["scans"])
        kept = _kept_by_mixer(entries, mixer, kept)
        if core and not why:
            why = f"{layer['module']} mixes tokens in two ways at once"
    elif traced and not why:
        why = _unexplained(layer, entries, core, tokens)
    pattern = layer["pattern"].removesuffix("_attention")
    words = pattern, "experts" if routed else "dense" if width and pattern != "mlp" else ""
    name = ", ".join(filter(None, words)) or "layer"
    kind = Kind(name, entries, core, width, gated, routed, scans=scans, **kept)
    return kind, why


def _core(
    traced: dict[str, Any] | None, mixer: dict[str, Any] | None, module: str
) -> tuple[Core | None, str]:
    """What mixes the tokens, and why that is not known."""
    if not traced:
        return None, ""
    calls = traced["mixed"]
    if len(calls) != 1:
        return None, f"{module} has {len(calls)} attentions in a layer" if calls else ""
    call = calls[0]
    sizes = {name: call[name] for name in ("heads", "kv_heads", "query", "value")}
    seen = call["seen"]
    if mixer and "top" in mixer:
        return Core(**sizes, top=mixer["top"], scores=mixer["scores"]), ""
    why = f"{module} has {seen['unknown']}" if seen["unknown"] else ""
    return Core(**sizes, window=seen["window"], chunk=seen["chunk"]), why


def _kept_by_mixer(
    entries: tuple[Entry, ...], mixer: dict[str, Any], traced: dict[str, int]
) -> dict[str, int]:
    """What a mixer without attention keeps at least: of its script more would be counted.

    What its projections give, what its convolution gives, what its scan gives, and that again
    behind the gate.
    """
    own = [e for e in entries if e.name.startswith(f"{mixer['name']}.")]
    given = sum(e.shape[0] for e in own if len(e.shape) == 2 and e.tp == 0)
    convolved = sum(e.shape[0] for e in own if len(e.shape) == 3)
    heads = given + convolved + 2 * mixer["inner"]
    return {"stream": traced["stream"], "latent": 0, "heads": traced["heads"] + heads}


def _unexplained(
    layer: dict[str, Any], entries: tuple[Entry, ...], core: Core | None, tokens: int
) -> str:
    """Why what a layer computes is not what its matrices and its core explain."""
    if core is None and any(entry.kind == "attention" for entry in entries):
        return f"{layer['module']} mixes tokens in a way that is not known"
    if layer["module"].startswith("Llama4"):  # whose script sends each token through all experts
        return ""
    times = layer["chosen"]
    known = 2 * sum(
        prod(e.shape) * (1 if e.expert is None else times)
        for e in entries
        if len(e.shape) > 1 and not e.name.endswith("bias")
    )
    if core and core.top:  # all scores, which it computes with
        known += 2 * core.scores * tokens
    more = layer["traced"]["products"] - known
    if abs(more) > 1e-3 * known:
        return f"{layer['module']} computes {more:.3g} operations a token that no matrix explains"
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
