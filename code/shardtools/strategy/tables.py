"""Tables of published throughputs, with a line for each run of one of today's engines.

Columns are the model's name, its source, GPUs, degrees and batch, and what was measured: tokens or
operations per second of one GPU, or seconds of a step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

from shardlab.layout import Layout
from shardlab.layout.core import OPERATORS

from . import models
from .cost import flops
from .files import THROUGHPUTS, machine_of
from .job import Job
from .predict import check_job
from .profile import BY_ENGINE, ENGINES, Profile

MEASURED = "tokens_per_s_per_gpu", "step_s", "tflops_per_gpu"
# Whose runs a source's are, by the beginning of its name; others are Megatron's.
_ENGINES = {
    "torchtitan": "torchtitan",
    "NeMo Automodel": "automodel",
    "MosaicML llm-foundry": "fsdp",
}
# What engines call parts that are computed again.
_OPERATORS = {
    "attention": "attention", "core_attn": "attention", "norms": "norms", "norm": "norms",
    "layernorm": "norms", "ffn": "ffn", "mlp": "ffn", "moe": "ffn", "act": "ffn", "moe_act": "ffn",
    "shared_expert": "ffn", "shared_experts": "ffn", "mla_up_proj": "latents",
}  # fmt: skip
_DTYPES = {"nvfp4": "nvfp4", "fp4": "nvfp4", "mx": "mxfp8", "fp8": "fp8"}  # the first that is in it


def of_throughputs(rows: Sequence[Mapping[str, Any]], profile: Profile) -> bool:
    """Whether lines are such a table's. Raises ValueError where they are for another profile."""
    found = bool(rows) and all(name in rows[0] for name in THROUGHPUTS)
    if found != (profile.name == "engines"):
        allowed = f"with {'a table of throughputs' if found else 'other rows'} is"
        others = "'engines'" if found else "one of the others"
        raise ValueError(f"profile={profile.name!r}: allowed {allowed} {others}")
    return found


def row_job(row: Mapping[str, str]) -> Job:
    """The job of a line. Raises ValueError, with the reason, for one that cannot be expressed.

    What is left open: no tensor ranks, stages or chunks; the distributed optimizer, or full shards
    where the engine has no other; experts by as many ranks as share them evenly, and not cut.
    """
    if "LoRA" in (row.get("kind") or ""):
        raise ValueError("kind: LoRA computes no gradients of most weights; no layout says so")
    model = models.named(models.name_of(row["model"]))
    engine, dtype = engine_of(row), _dtype(row)
    t, p, v, c = (_count(row, key, 1) for key in ("tp", "pp", "vpp", "cp"))
    gpus = _count(row, "gpus")
    d, rest = divmod(gpus, t * p * c)
    if rest or not d:
        raise ValueError(f"gpus={gpus}: allowed are multiples of tp * pp * cp = {t * p * c}")
    # Of a local batch a pipeline takes one sequence at a time.
    local = re.match(r"local batch (\d+)", row["mbs"])
    b = 1 if local else _count(row, "mbs")
    batch = _count(row, "gbs", d * (int(local[1]) if local else b))
    if batch % (d * b):
        raise ValueError(f"gbs={batch}: allowed are multiples of dp * mbs = {d * b}")
    experts = model.experts
    layout = Layout(
        d, t, p, _zero(row, engine, d, p, c), b, batch // d // b,
        _recomputed(row.get("recompute", ""), engine), True, c,
        _count(row, "ep", gcd(experts, d * c * t) if experts else 1), chunks=v if p > 1 else 1,
        schedule="interleaved" if v > 1 and p > 1 else "1f1b", stages=ENGINES.stages,
        etp=_count(row, "etp", 1) if experts or row.get("etp") else None,
    )  # fmt: skip
    eager = engine == "torchtitan" and "no compile" in row.get("note", "")
    profile = replace(BY_ENGINE[engine], compiled=not eager)
    job = Job(model, machine_of(row), layout, profile, _count(row, "seq"), dtype)
    check_job(job)
    return job


def _zero(row: Mapping[str, str], engine: str, copies: int, pp: int, cp: int) -> int:
    """The stage of ZeRO: as the line says, or as the engine has it by itself."""
    sharded = row.get("fsdp", "")
    if sharded == "SHARD_GRAD_OP":
        return 2
    if engine == "megatron" and pp == 1 and copies > 1:
        whole = sharded not in ("", "0", "/") or "FSDP" in row.get("recompute", "")
        return 3 if whole else 1
    if copies * cp == 1:
        return 0
    return 3 if engine != "megatron" and pp == 1 else 1


def engine_of(row: Mapping[str, str]) -> str:
    """Whose run it is."""
    found = (e for name, e in _ENGINES.items() if row["source"].startswith(name))
    return next(found, "megatron")


def measured(row: Mapping[str, str], job: Job) -> float:
    """Seconds of a step. Raises ValueError where the line has none.

    Operations are a model's own, as Megatron counts them: three passes, and half of the pairs.
    """
    tokens = job.layout.batch * job.seq
    for key in MEASURED:
        try:
            value = float(row.get(key) or 0)
        except ValueError:
            raise ValueError(f"{key}={row[key]!r}: allowed are numbers above 0") from None
        if value > 0 and key == "step_s":
            return value
        if value > 0 and key == "tokens_per_s_per_gpu":
            return tokens / job.layout.ranks / value
        if value > 0:
            work = flops(job.model, tokens, job.seq)
            return work / job.layout.ranks / (value * 1e12)
    raise ValueError(f"none of {', '.join(MEASURED)} is there")


def _count(row: Mapping[str, str], key: str, default: int | None = None) -> int:
    """The number that a cell begins with. Raises ValueError where there is none, nor a default."""
    match = re.match(r"\s*(\d+)", row.get(key) or "")
    if match:
        return int(match[1])
    if default is None:
        raise ValueError(f"{key} is missing")
    return default


def _dtype(row: Mapping[str, str]) -> str:
    said = row["dtype"].lower()
    if "other granularity" in said and not row["gpu"].upper().startswith("H"):
        return "mxfp8"
    found = next((name for word, name in _DTYPES.items() if word in said), "bf16")
    return "bf16" if row["gpu"].upper().startswith("A100") else found


def _recomputed(said: str, engine: str) -> str:
    """What a layout calls what is computed again; what a cell leaves open is none.

    "full, 5 of 32 layers" is taken as none: the larger part of the layers keeps all.
    """
    words = said.split(" (")[0].split(";")[0].lower().replace("selective:", "")
    if "sac" in words or words.startswith("selective"):  # torchtitan's saves products and attention
        return "norms+ffn" if engine == "torchtitan" else "selective"
    if words.startswith("full"):
        return "none" if " of " in words else "full"
    if not words.strip() or words.startswith(("none", "not ")):
        return "none"
    named = re.findall(r"\w+", words.replace(", activation offloading", ""))
    if unknown := [word for word in named if word not in _OPERATORS]:
        raise ValueError(f"recompute={unknown[0]!r}: allowed are {', '.join(_OPERATORS)}")
    found = {_OPERATORS[word] for word in named}
    return "+".join(name for name in OPERATORS if name in found)
