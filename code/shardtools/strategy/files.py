"""Jobs and their measured values, read from files.

A CSV row of the Ultra-Scale sweep, a row of a table of throughputs, and a JSON object of a
published configuration have the same fields under the same names. `published/throughput.csv` uses
the course's words; its column `said` has the source's. A job that cannot be expressed raises
ValueError with the reason.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardlab.common.arguments import (
    LAYERS,
    SIZES,
    check_kind,
    check_number,
    check_one_of,
    check_whole,
)
from shardlab.common.files import read_json, read_text
from shardlab.common.machines import Machine, check_named, named
from shardlab.common.shapes import Config
from shardlab.layout import Layout, Structure

from . import models
from .cost import flops
from .job import DTYPES, Job
from .profile import BY_ENGINE, Profile

# Required columns of a sweep, and of a table of throughputs.
COLUMNS = "layers", "hidden", "heads", "ffn", "seq", "mbs", "ga", "dp", "pp", "tp", "zero"
THROUGHPUTS = "engine", "model", "gpu", "gpus", "dtype", "mbs", "gbs", "seq"
# Other names of fields, and of recomputation settings.
ALSO = {"vp": "vpp", "n_gpus": "gpus", "tok_s_gpu": "tokens_per_s_per_gpu"}
RECOMPUTED = {
    "baseline": "none", "sp": "none", "selective+sp": "selective", "full recompute": "full",
}  # fmt: skip
SWEEP_VOCABULARY = 131_072  # vocabulary of the sweep, which has no column for it
MEGATRON_VOCABULARY = 51_200  # GPT-2's 50,257, padded
TIMES = "fwd_ms", "bwd_ms", "iter_s", "iter_ms"  # times that a published case may have


def read_rows(name: str, path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file as dictionaries. Raises ValueError; `name`: the option."""
    text = read_text(name, path, "CSV files")
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        rows = list(reader)
        columns = reader.fieldnames or []
    except csv.Error:
        raise ValueError(f"{name}={str(path)!r}: allowed are CSV files in UTF-8") from None
    for column in () if set(THROUGHPUTS) <= {*columns} else COLUMNS:
        if column not in columns:
            wanted = ", ".join(COLUMNS), ", ".join(THROUGHPUTS)
            words = f"allowed are CSV files with the columns {' or '.join(wanted)}"
            raise ValueError(f"{name}={str(path)!r}: {words}; {column!r} is missing")
    return rows


def read_cases(name: str, path: Path) -> list[dict[str, Any]]:
    """Read a JSON list of objects with an "id" and a "config". Raises ValueError."""
    cases = read_json(name, path)
    good = isinstance(cases, list) and all(
        isinstance(x, dict) and "id" in x and isinstance(x.get("config"), dict) for x in cases
    )
    if not good:
        words = 'allowed are JSON lists of objects with "id" and "config"'
        raise ValueError(f"{name}={str(path)!r}: {words}")
    return cases


def row_job(row: Mapping[str, Any], profile: Profile) -> Job:
    """Return the job of a row: of a throughput table, which names its engine, if the profile is
    "engines"; else of the sweep, on H100s unless its column `gpu` names another GPU.
    """
    c = _fields(row) | {"sequence_parallel": True}
    if profile.name == "engines":
        check_one_of(BY_ENGINE, engine=c.get("engine", ""))
        engine = replace(BY_ENGINE[c["engine"]], compiled=c.get("compiled") != "no")
        return _job(c, engine, models.named(c.get("model", "")))
    if missing := [key for key in COLUMNS if key not in c]:
        raise ValueError(f"{missing[0]} is missing")
    c = {"vocab": SWEEP_VOCABULARY, "gpu": "h100"} | c
    return _job(c, profile, _shape(c, gelu=False, tied=c.get("emb") == "tied"))


def row_measured(row: Mapping[str, Any], job: Job) -> tuple[float | None, float | None]:
    """Return a row's seconds of a step and reserved bytes; None for a value that is not there.

    `tflops_per_gpu` counts model FLOPs as Megatron does: three passes, and half of the pairs.
    """
    c, tokens = _fields(row), job.layout.batch * job.seq
    seconds = size = None
    if "tokens_per_s_per_gpu" in c:
        seconds = tokens / job.layout.ranks / _number(c, "tokens_per_s_per_gpu")
    elif "step_s" in c:
        seconds = _number(c, "step_s")
    elif "tflops_per_gpu" in c:
        work = flops(job.model, tokens, job.seq)
        seconds = work / job.layout.ranks / (1e12 * _number(c, "tflops_per_gpu"))
    if "mem_GiB" in c:
        size = _number(c, "mem_GiB") * 2**30
    return seconds, size


def case_job(config: Mapping[str, Any], profile: Profile) -> Job:
    """Return the job of a published configuration.

    Defaults: one copy, stage and chunk; a batch of one micro-batch per copy; GPT-2's vocabulary; no
    ZeRO. Models with key-value heads, or whose width is no multiple of h, are taken to have a gated
    network and fused attention; fused attention is also assumed from 4,096 tokens on.
    "file" is the config.json of a model, in place of a shape.
    """
    c = {"vocab": MEGATRON_VOCABULARY} | _fields(config)
    if "file" in c:
        from shardtools import hub  # imported here: no page's calculator needs it

        check_kind(str, file=c["file"])
        return _job(c, replace(profile, attention="flash"), hub.planned(c["file"], "file"))
    heads, h = _whole(c, "heads"), _whole(c, "hidden")
    gelu = _whole(c, "kv_heads", heads) == heads and _whole(c, "ffn", 4 * h) % h == 0
    model = _shape(c, gelu, tied=gelu)
    how = "plain" if gelu and model.seq < 4096 else "flash"
    return _job(c, replace(profile, attention=how), model)


def case_measured(case: Mapping[str, Any]) -> dict[str, float]:
    """Return the times that a case's table prints, by key: `TIMES`."""
    printed = case.get("published") or {}
    check_kind(Mapping, published=printed)
    return {key: _number(printed, key) for key in TIMES if printed.get(key) is not None}


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value, under one name each."""
    return {ALSO.get(key, key): value for key, value in given.items() if value not in (None, "")}


def _job(c: Mapping[str, Any], profile: Profile, model: Config | Structure) -> Job:
    t, p, cp = _whole(c, "tp"), _whole(c, "pp", 1), _whole(c, "cp", 1)
    ranks = t * p * cp
    d, b = _whole(c, "dp", max(1, _whole(c, "gpus", ranks) // ranks)), _whole(c, "mbs")
    if _whole(c, "gpus", d * ranks) != d * ranks:
        raise ValueError(f"gpus={c['gpus']}: allowed is {d * ranks}, as dp, pp, cp and tp say")
    batch = _whole(c, "gbs", d * b * _whole(c, "ga", 1))
    if batch % (d * b) or batch != d * b * _whole(c, "ga", batch // (d * b)):
        words = "as dp, mbs and ga say" if "ga" in c else f"multiples of dp * mbs = {d * b}"
        raise ValueError(f"gbs={batch}: allowed are {words}")
    v = _whole(c, "vpp", 1) if p > 1 else 1
    said = str(c.get("recompute", "none")).lower()
    shared = t > 1 and bool(c.get("sequence_parallel", said.endswith("sp")))
    check_one_of(DTYPES, dtype=(dtype := c.get("dtype", "bf16")))
    layout = Layout(
        d, t, p, _whole(c, "zero", 0), b, batch // d // b, RECOMPUTED.get(said, said), shared, cp,
        _whole(c, "ep", 1), chunks=v, schedule="interleaved" if v > 1 else "1f1b",
        stages=profile.stages, etp=_whole(c, "etp", 1) if "etp" in c else None,
    )  # fmt: skip
    return Job(model, machine_of(c), layout, profile, _whole(c, "seq"), dtype)


def _shape(c: Mapping[str, Any], gelu: bool, tied: bool) -> Config:
    h, heads = _whole(c, "hidden"), _whole(c, "heads")
    return Config(
        _whole(c, "vocab"), _whole(c, "seq"), _whole(c, "layers"), heads, h,
        _whole(c, "kv_heads", heads), _whole(c, "ffn", 4 * h), "gelu" if gelu else "swiglu",
        "layer" if gelu else "rms", gelu, tied,
    )  # fmt: skip


def machine_of(c: Mapping[str, Any]) -> Machine:
    """Return the machine of a GPU's name in tables: "A100", "H100 80GB", "NVIDIA GB200"."""
    if "gpu" not in c:
        raise ValueError("gpu is missing")
    size = None if c.get("gpu_mem_gb") is None else _number(c, "gpu_mem_gb")
    machine = named(str(c["gpu"]), size) or check_named(gpu=str(c["gpu"]))
    if size is not None:
        machine = replace(machine, memory=1e9 * size)
    return machine


def _whole(c: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = c.get(key, default)
    if value is None:
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
