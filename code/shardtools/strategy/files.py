"""Jobs as files have them: rows of a sweep, and cases of published tables.

A row is a line of CSV with the columns of the Ultra-Scale sweep; a case a JSON object with the keys
of a published configuration. What cannot be expressed raises ValueError with the reason, row by
row: whoever reads a whole file writes it beside the row.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardlab.common.arguments import LAYERS, SIZES, check_number, check_whole, told
from shardlab.common.files import read_json, read_text
from shardlab.common.machines import Machine, check_named, named
from shardlab.common.shapes import Config
from shardlab.layout import Layout, Structure

from .job import Job
from .profile import Profile

SHAPE = "layers", "hidden", "heads", "ffn", "seq"
DEGREES = "mbs", "ga", "dp", "pp", "tp", "zero"
COLUMNS = (*SHAPE, *DEGREES)
# Of tables of throughputs: see `tables`.
THROUGHPUTS = "source", "model", "gpu", "gpus", "dtype", "mbs", "gbs", "seq"
SWEEP_VOCABULARY = 131_072  # the sweep's: its column is not in the file
MEGATRON_VOCABULARY = 51_200  # GPT-2's 50,257, padded
# What tables call it that a layer, or attention's core, is computed again.
_RECOMPUTE = {
    "none": "none", "baseline": "none", "sp": "none", "selective": "selective",
    "selective+sp": "selective", "full": "full", "full recompute": "full",
}  # fmt: skip


def read_rows(name: str, path: Path) -> list[dict[str, str]]:
    """The lines of a CSV file as dictionaries. Raises ValueError; `name`: the option's."""
    text = read_text(name, path, "CSV files")
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        rows = list(reader)
        columns = reader.fieldnames or []
    except csv.Error:
        raise ValueError(f"{name}={str(path)!r}: allowed are CSV files in UTF-8") from None
    for column in () if set(THROUGHPUTS) <= {*columns} else COLUMNS:
        if column not in columns:
            words = f"allowed are CSV files with the columns {', '.join(COLUMNS)}"
            raise ValueError(f"{name}={str(path)!r}: {words}; {column!r} is missing")
    return rows


def read_cases(name: str, path: Path) -> list[dict[str, Any]]:
    """A JSON list of objects with an "id" and a "config". Raises ValueError."""
    cases = read_json(name, path)
    good = isinstance(cases, list) and all(
        isinstance(x, dict) and "id" in x and isinstance(x.get("config"), dict) for x in cases
    )
    if not good:
        words = 'allowed are JSON lists of objects with "id" and "config"'
        raise ValueError(f"{name}={str(path)!r}: {words}")
    return cases


def row_job(row: Mapping[str, Any], profile: Profile) -> Job:
    """The job of a line of the sweep, on H100s unless its column `gpu` says another."""
    n = {key: _whole(row, key) for key in COLUMNS}
    known = {key: _whole(row, key) for key in ("vocab", "kv_heads") if row.get(key)}
    vocab = known.get("vocab", SWEEP_VOCABULARY)
    tied = row.get("emb", "untied") == "tied"
    config = Config(
        vocab, n["seq"], n["layers"], n["heads"], n["hidden"], known.get("kv_heads"), n["ffn"],
        "swiglu", "rms", False, tied,
    )  # fmt: skip
    layout = Layout(
        n["dp"], n["tp"], n["pp"], n["zero"], n["mbs"], n["ga"],
        sequence_parallel=n["tp"] > 1, stages=profile.stages,
    )  # fmt: skip
    for key, value in (("n_gpus", layout.ranks), ("gbs", layout.batch)):
        if row.get(key) and _whole(row, key) != value:
            raise ValueError(f"{key}={row[key]}: allowed is {value}, as dp, pp, tp, mbs, ga say")
    return Job(config, machine_of({"gpu": row.get("gpu") or "h100"}), layout, profile, n["seq"])


def row_measured(row: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Seconds of a step and bytes reserved, as a line of the sweep has them; None: not there."""
    seconds = size = None
    if row.get("tok_s_gpu"):
        rate = _number(row, "tok_s_gpu")
        tokens = _whole(row, "mbs") * _whole(row, "ga") * _whole(row, "dp") * _whole(row, "seq")
        seconds = tokens / rate / (_whole(row, "dp") * _whole(row, "pp") * _whole(row, "tp"))
    if row.get("mem_GiB"):
        size = _number(row, "mem_GiB") * 2**30
    return seconds, size


def case_measured(case: Mapping[str, Any]) -> dict[str, float]:
    """The times that a case's table prints, by their keys: fwd_ms and bwd_ms, iter_s, iter_ms."""
    printed = case.get("published") or {}
    if not isinstance(printed, Mapping):
        raise ValueError(f"published={told(printed)}: allowed are objects")
    keys = "fwd_ms", "bwd_ms", "iter_s", "iter_ms"
    return {key: _number(printed, key) for key in keys if printed.get(key) is not None}


def case_job(config: Mapping[str, Any], profile: Profile) -> Job:
    """The job of a published configuration.

    Where a key is missing: one copy, stage, chunk; as many sequences in a step as the copies take
    at once; GPT-2's vocabulary; no ZeRO. A gated network and fused attention are taken for what
    has key-value heads or a width that is no multiple of h, and the latter from 4,096 tokens on.
    "file" is the config.json of a model, in place of a shape.
    """
    c = {key: value for key, value in config.items() if value is not None}
    seq, model = _whole(c, "seq"), _model(c)
    plain = isinstance(model, Config) and model.mlp == "gelu" and seq < 4096
    profile = replace(profile, attention="plain" if plain else "flash")
    t, p, cp = _whole(c, "tp"), _whole(c, "pp", 1), _whole(c, "cp", 1)
    ranks = t * p * cp
    gpus = _whole(c, "gpus", _whole(c, "n_gpus", ranks))
    d, b = _whole(c, "dp", max(1, gpus // ranks)), _whole(c, "mbs")
    if "gpus" in c and d * ranks != gpus:
        raise ValueError(f"gpus={gpus}: allowed is {d * ranks}, as dp, pp, cp and tp say")
    batch = _whole(c, "gbs", d * b * _whole(c, "ga", 1))
    if batch % (d * b):
        raise ValueError(f"gbs={batch}: allowed are multiples of dp * mbs = {d * b}")
    v = _whole(c, "vpp", _whole(c, "vp", 1)) if p > 1 else 1
    said = str(c.get("recompute", "none")).lower()
    if said not in _RECOMPUTE:
        raise ValueError(f"recompute={told(said)}: allowed are {', '.join(_RECOMPUTE)}")
    layout = Layout(
        d, t, p, _whole(c, "zero", 0), b, batch // d // b, _RECOMPUTE[said],
        bool(c.get("sequence_parallel", said.endswith("sp"))), cp, _whole(c, "ep", 1), chunks=v,
        schedule="interleaved" if v > 1 else "1f1b", stages=profile.stages,
        etp=_whole(c, "etp", 1) if "etp" in c else None,
    )  # fmt: skip
    return Job(model, machine_of(c), layout, profile, seq)


def _model(c: Mapping[str, Any]) -> Config | Structure:
    """The shape of a case, or what its file describes."""
    if "file" in c:
        if not isinstance(c["file"], str):
            raise ValueError(f"file={told(c['file'])}: allowed are names of config.json files")
        from shardtools import hub  # which no page's calculator needs

        return hub.planned(c["file"], "file")
    need = {key: _whole(c, key) for key in ("layers", "hidden", "heads")}
    h = need["hidden"]
    ffn = _whole(c, "ffn", 4 * h)
    kv = _whole(c, "kv_heads", need["heads"])
    gelu = kv == need["heads"] and ffn % h == 0
    return Config(
        _whole(c, "vocab", MEGATRON_VOCABULARY), _whole(c, "seq"), need["layers"], need["heads"],
        h, kv, ffn, "gelu" if gelu else "swiglu", "layer" if gelu else "rms", gelu, gelu,
    )  # fmt: skip


def machine_of(c: Mapping[str, Any]) -> Machine:
    """The machine of a GPU's name, as tables write it: "A100", "H100 80GB", "NVIDIA GB200"."""
    if "gpu" not in c:
        raise ValueError("gpu is missing")
    size = None if c.get("gpu_mem_gb") is None else _number(c, "gpu_mem_gb")
    machine = named(str(c["gpu"]), size) or check_named(gpu=str(c["gpu"]))
    if size is not None:
        machine = replace(machine, memory=1e9 * size)
    return machine


def _whole(c: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = c.get(key, default)
    if value is None or value == "":
        raise ValueError(f"{key} is missing")
    with suppress(TypeError, ValueError, OverflowError):  # "1e3", and tables have 4096.0
        value = int(float(value)) if float(value).is_integer() else value
    check_whole(int(key != "zero"), LAYERS if key == "layers" else SIZES, **{key: value})
    return value


def _number(c: Mapping[str, Any], key: str) -> float:
    value = c[key]
    with suppress(TypeError, ValueError, OverflowError):
        value = float(value)
    check_number(**{key: value})
    return value
