"""Tables of published throughputs, with a line for each run: cases, with the time of a step.

Columns are those of a case (`files.case_job`), and the model's name, its source, and what was
measured: tokens or operations per second of one GPU, or seconds of a step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from . import models
from .cost import flops
from .files import THROUGHPUTS, case_job
from .job import Job
from .predict import check_job
from .profile import ENGINES, Profile

MEASURED = "tokens_per_s_per_gpu", "step_s", "tflops_per_gpu"
# Whose runs a source's are, by the beginning of its name; others are Megatron's.
_ENGINES = {
    "torchtitan": "torchtitan",
    "NeMo Automodel": "automodel",
    "MosaicML llm-foundry": "fsdp",
}
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
    """The job of a line. Raises ValueError, with the reason, for one that no case can express."""
    job = case_job(case(row), ENGINES)
    check_job(job)
    return job


def case(row: Mapping[str, str]) -> dict[str, Any]:
    """The configuration of a line, as a case has it. Raises ValueError as `row_job` does."""
    if "LoRA" in (row.get("kind") or ""):
        raise ValueError("kind: LoRA computes no gradients of most weights; no case says so")
    engine = engine_of(row)
    found: dict[str, Any] = {"named": models.name_of(row["model"]), "engine": engine}
    found |= {key: _first(row[key]) for key in ("gpus", "tp", "pp", "vpp", "cp", "ep", "etp")
              if _first(row.get(key))}  # fmt: skip
    found["gpu"], found["dtype"] = row["gpu"], _dtype(row)
    found["seq"], found["mbs"] = _first(row["seq"]), _first(row["mbs"])
    copies = int(found["gpus"])
    for key in ("tp", "pp", "cp"):
        copies //= int(found.get(key, 1))
    local = re.match(r"local batch (\d+)", row["mbs"])  # of which a pipeline takes one at a time
    if local:
        found["mbs"] = "1"
    found["gbs"] = _first(row["gbs"]) or copies * int(local[1] if local else found["mbs"])
    found["recompute"] = _recomputed(row.get("recompute", ""))
    sharded = row.get("fsdp", "")
    whole = sharded not in ("", "0", "/") or "FSDP" in row.get("recompute", "")
    if int(found.get("pp", 1)) == 1 and copies > 1 and engine == "megatron":
        found["zero"] = 3 if whole else 1
    if sharded == "SHARD_GRAD_OP":
        found["zero"] = 2
    if engine == "torchtitan":
        found["compile"] = "no compile" not in row.get("note", "")
    return found


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


def _first(value: str | None) -> str:
    """The number that a cell begins with, if it does."""
    match = re.match(r"\s*(\d+)", value or "")
    return match[1] if match else ""


def _dtype(row: Mapping[str, str]) -> str:
    said = row["dtype"].lower()
    if "other granularity" in said and not row["gpu"].upper().startswith("H"):
        return "mxfp8"
    found = next((name for word, name in _DTYPES.items() if word in said), "bf16")
    return "bf16" if row["gpu"].upper().startswith("A100") else found


def _recomputed(said: str) -> str:
    """A cell's words for what is computed again, as a case has them; what it leaves open is none.

    "full, 5 of 32 layers" is taken as none: the larger part of the layers keeps all.
    """
    words = said.split(" (")[0].split(";")[0].lower().replace("selective:", "")
    if "sac" in words or words.startswith("selective"):
        return "selective"
    if words.startswith("full"):
        return "none" if " of " in words else "full"
    if not words.strip() or words.startswith(("none", "not ")):
        return "none"
    return words.replace(", activation offloading", "")
