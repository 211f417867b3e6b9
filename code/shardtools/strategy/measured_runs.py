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

from shardlab.common import machines
from shardlab.common.arguments import (
    MAX_LAYERS,
    MAX_SIZE,
    check_integer,
    check_number,
    check_one_of,
    check_type,
)
from shardlab.common.files import read_json, read_text
from shardlab.common.machines import Machine, check_machine
from shardlab.common.shapes import Config
from shardlab.layout import Layout, Structure

from . import models
from .cost import count_flops
from .job import DTYPES, Job
from .profile import BY_ENGINE, Profile

# Required columns of a sweep, and of a table of throughputs.
SWEEP_COLUMNS = "layers", "hidden", "heads", "ffn", "seq", "mbs", "ga", "dp", "pp", "tp", "zero"
THROUGHPUT_COLUMNS = "engine", "model", "gpu", "gpus", "dtype", "mbs", "gbs", "seq"
# Other names of fields, and of recomputation settings.
FIELD_ALIASES = {"vp": "vpp", "n_gpus": "gpus", "tok_s_gpu": "tokens_per_s_per_gpu"}
RECOMPUTE_NAMES = {
    "baseline": "none", "sp": "none", "selective+sp": "selective", "full recompute": "full",
}  # fmt: skip
SWEEP_VOCABULARY = 131_072  # vocabulary of the sweep, which has no column for it
MEGATRON_VOCABULARY = 51_200  # GPT-2's 50,257, padded
CASE_TIMES = "fwd_ms", "bwd_ms", "iter_s", "iter_ms"  # times that a published case may have


def read_rows(name: str, path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file as dictionaries. name: the option, for errors."""
    text = read_text(name, path, "a CSV file")
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        rows = list(reader)
        columns = reader.fieldnames or []
    except csv.Error:
        raise ValueError(f"{name}={str(path)!r}: must be a CSV file in UTF-8") from None
    for column in () if set(THROUGHPUT_COLUMNS) <= {*columns} else SWEEP_COLUMNS:
        if column not in columns:
            wanted = ", ".join(SWEEP_COLUMNS), ", ".join(THROUGHPUT_COLUMNS)
            words = f"{column!r} is missing; must have the columns {' or '.join(wanted)}"
            raise ValueError(f"{name}={str(path)!r}: {words}")
    return rows


def read_cases(name: str, path: Path) -> list[dict[str, Any]]:
    """Read a JSON list of objects with an "id" and a "config". Raises ValueError."""
    cases = read_json(name, path)
    good = isinstance(cases, list) and all(
        isinstance(x, dict) and "id" in x and isinstance(x.get("config"), dict) for x in cases
    )
    if not good:
        words = 'must be a JSON list of objects with "id" and "config"'
        raise ValueError(f"{name}={str(path)!r}: {words}")
    return cases


def row_to_job(row: Mapping[str, Any], profile: Profile) -> Job:
    """Return the job of a row: of a throughput table, which names its engine, if the profile is
    "engines"; else of the sweep, on H100s unless its column `gpu` names another GPU.
    """
    c = _normalize_fields(row) | {"sequence_parallel": True}
    if profile.name == "engines":
        check_one_of(BY_ENGINE, engine=c.get("engine", ""))
        engine = replace(BY_ENGINE[c["engine"]], is_compiled=c.get("compiled") != "no")
        return _make_job(c, engine, models.find_model(c.get("model", "")))
    if missing := [key for key in SWEEP_COLUMNS if key not in c]:
        raise ValueError(f"{missing[0]} is missing")
    c = {"vocab": SWEEP_VOCABULARY, "gpu": "h100"} | c
    return _make_job(c, profile, _make_config(c, gelu=False, tied=c.get("emb") == "tied"))


def row_to_measurement(row: Mapping[str, Any], job: Job) -> tuple[float | None, float | None]:
    """Return a row's seconds of a step and reserved bytes; None for a value that is not there.

    `tflops_per_gpu` counts model FLOPs as Megatron does: three passes, and half of the pairs.
    """
    c, tokens = _normalize_fields(row), job.layout.global_batch * job.seq
    seconds = size = None
    if "tokens_per_s_per_gpu" in c:
        seconds = tokens / job.layout.world_size / _get_float(c, "tokens_per_s_per_gpu")
    elif "step_s" in c:
        seconds = _get_float(c, "step_s")
    elif "tflops_per_gpu" in c:
        work = count_flops(job.model, tokens, job.seq)
        seconds = work / job.layout.world_size / (1e12 * _get_float(c, "tflops_per_gpu"))
    if "mem_GiB" in c:
        size = _get_float(c, "mem_GiB") * 2**30
    return seconds, size


def case_to_job(config: Mapping[str, Any], profile: Profile) -> Job:
    """Return the job of a published configuration.

    Defaults: one copy, stage and chunk; a batch of one micro-batch per copy; GPT-2's vocabulary; no
    ZeRO. Models with key-value heads, or whose width is no multiple of h, are taken to have a gated
    network and fused attention; fused attention is also assumed from 4,096 tokens on.
    "file" is the config.json of a model, in place of a shape.
    """
    c = {"vocab": MEGATRON_VOCABULARY} | _normalize_fields(config)
    if "file" in c:
        from shardtools import hub  # imported here: no page's calculator needs it

        check_type(str, file=c["file"])
        return _make_job(
            c, replace(profile, attention="flash"), hub.read_plannable(c["file"], "file")
        )
    heads, h = _get_int(c, "heads"), _get_int(c, "hidden")
    gelu = _get_int(c, "kv_heads", heads) == heads and _get_int(c, "ffn", 4 * h) % h == 0
    model = _make_config(c, gelu, tied=gelu)
    how = "plain" if gelu and model.seq < 4096 else "flash"
    return _make_job(c, replace(profile, attention=how), model)


def case_to_times(case: Mapping[str, Any]) -> dict[str, float]:
    """Return the times that a case's table prints, by key: `CASE_TIMES`."""
    printed = case.get("published") or {}
    check_type(Mapping, published=printed)
    return {key: _get_float(printed, key) for key in CASE_TIMES if printed.get(key) is not None}


def _normalize_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    filled = {key: value for key, value in row.items() if value not in (None, "")}
    return {FIELD_ALIASES.get(key, key): value for key, value in filled.items()}


def _make_job(c: Mapping[str, Any], profile: Profile, model: Config | Structure) -> Job:
    t, p, cp = _get_int(c, "tp"), _get_int(c, "pp", 1), _get_int(c, "cp", 1)
    ranks = t * p * cp
    d, b = _get_int(c, "dp", max(1, _get_int(c, "gpus", ranks) // ranks)), _get_int(c, "mbs")
    if _get_int(c, "gpus", d * ranks) != d * ranks:
        raise ValueError(f"gpus={c['gpus']}: must be {d * ranks}, the product of dp, pp, cp and tp")
    batch = _get_int(c, "gbs", d * b * _get_int(c, "ga", 1))
    if batch % (d * b) or batch != d * b * _get_int(c, "ga", batch // (d * b)):
        words = "be dp * mbs * ga" if "ga" in c else f"be a multiple of dp * mbs = {d * b}"
        raise ValueError(f"gbs={batch}: must {words}")
    v = _get_int(c, "vpp", 1) if p > 1 else 1
    recompute = str(c.get("recompute", "none")).lower()
    sp = t > 1 and bool(c.get("sequence_parallel", recompute.endswith("sp")))
    check_one_of(DTYPES, dtype=(dtype := c.get("dtype", "bf16")))
    layout = Layout(
        d, t, p, _get_int(c, "zero", 0), b, batch // d // b,
        RECOMPUTE_NAMES.get(recompute, recompute), sp, cp,
        _get_int(c, "ep", 1), chunks=v, schedule="interleaved" if v > 1 else "1f1b",
        stages=profile.stage_rule, etp=_get_int(c, "etp", 1) if "etp" in c else None,
    )  # fmt: skip
    return Job(model, find_machine(c), layout, profile, _get_int(c, "seq"), dtype)


def _make_config(c: Mapping[str, Any], gelu: bool, tied: bool) -> Config:
    h, heads = _get_int(c, "hidden"), _get_int(c, "heads")
    return Config(
        _get_int(c, "vocab"), _get_int(c, "seq"), _get_int(c, "layers"), heads, h,
        _get_int(c, "kv_heads", heads), _get_int(c, "ffn", 4 * h), "gelu" if gelu else "swiglu",
        "layer" if gelu else "rms", gelu, tied,
    )  # fmt: skip


def find_machine(c: Mapping[str, Any]) -> Machine:
    """Return the machine of a GPU's name in tables: "A100", "H100 80GB", "NVIDIA GB200"."""
    if "gpu" not in c:
        raise ValueError("gpu is missing")
    size = None if c.get("gpu_mem_gb") is None else _get_float(c, "gpu_mem_gb")
    machine = machines.find_machine(str(c["gpu"]), size) or check_machine(gpu=str(c["gpu"]))
    if size is not None:
        machine = replace(machine, memory=1e9 * size)
    return machine


def _get_int(c: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = c.get(key, default)
    if value is None:
        raise ValueError(f"{key} is missing")
    with suppress(TypeError, ValueError, OverflowError):  # "1e3", and tables have 4096.0
        value = int(float(value)) if float(value).is_integer() else value
    check_integer(int(key != "zero"), MAX_LAYERS if key == "layers" else MAX_SIZE, **{key: value})
    return value


def _get_float(c: Mapping[str, Any], key: str) -> float:
    value = c[key]
    with suppress(TypeError, ValueError, OverflowError):
        value = float(value)
    check_number(**{key: value})
    return value
