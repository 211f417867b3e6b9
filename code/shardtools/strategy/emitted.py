"""The output of `strategy emit`: a configuration, or the files of a whole job."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote
from typing import Any

from shardlab.common.arguments import check_one_of
from shardtools import options
from shardtools.cluster import site

from .emit import ENGINES, Limits, emit, job
from .emit.job import ENGINES as JOBS
from .emit.job import FILE, SITE
from .emit.target import Target
from .plan import Plan, Planned
from .profile import PROFILES

STEPS = 1000  # steps of the training without --tokens


def for_engine(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the engine's profile; Slurm starts any program, of any profile.

    --site is replaced by its contents, and sets --per-node to its GPUs per node by default.
    """
    engine = given["engine"]
    check_one_of(ENGINES, engine=engine)
    if "into" in given:
        check_one_of(JOBS, engine=engine)
    else:
        options.apart(
            given, ("time", "partition"), "alone: allowed with --into, of whose job it is"
        )
    if "site" in given and "into" not in given and engine != "slurm":
        raise ValueError("--site alone: allowed with slurm and with --into")
    if "site" in given:
        given = {**given, "site": (at := site.read(given["site"]))}
        given = {"per_node": at.gpus_per_node, **given} if at.gpus_per_node else given
    if engine not in PROFILES:
        return given
    if given.get("profile", engine) != engine:
        words = f"profile={given['profile']!r}: allowed with emit {engine} is {engine!r}"
        raise ValueError(f"{words}, whose bytes and seconds it is planned with")
    return {**given, "profile": engine}


def emitted(given: dict[str, Any], found: Plan) -> str:
    """Return the configuration of the fastest layout that an engine can run."""
    text = _fastest(given["engine"], found)[1].rstrip("\n")
    return given["site"].batch(text) if "site" in given else text


def written(given: dict[str, Any], found: Plan) -> str:
    """Write the whole job of an engine into a folder; return its files and the next command."""
    engine = given["engine"]
    known = {name: given[name] for name in ("time", "partition") if name in given}
    at = given.get("site")
    if at and at.partition and "," not in at.partition:
        known = {"partition": at.partition, **known}
    limits, steps = Limits(**known), STEPS
    if "tokens" in given:
        steps = -(-int(given["tokens"]) // (found.batch * found.seq))

    planned, _ = _fastest(engine, found)
    target = Target.of(engine, found.config, found.machine, planned.layout, found.seq)
    texts = job(target, limits, steps, planned.seconds)
    if at:
        texts |= {FILE: at.batch(texts[FILE]), SITE: at.script()}
    folder = Path(options.folder("into", given["into"]))
    takes = f"{planned.seconds:.3g} s a step and {planned.reserved / 1e9:.1f} GB on the fullest GPU"
    said = [f"{planned.layout}: {takes}, as predicted", f"{folder}:"]
    for name, text in texts.items():
        kept = name == SITE and (folder / name).exists()
        if not kept:
            options.written("into", folder / name, text)
        said.append(f"  {name}" + (", yours: kept" if kept else ""))
    said += [f"Put your site's modules and environment into {folder}/{SITE}, then"] * (not at)
    return "\n".join([*said, f"  cd {quote(str(folder))} && sbatch {FILE}"])


def _fastest(engine: str, found: Plan) -> tuple[Planned, str]:
    """Return the fastest layout that an engine can run, and its configuration.

    Prints to stderr why the first layout is refused. Raises ValueError if the engine can run none.
    """
    why = ""
    for number, one in enumerate(found.fits or [found.nearest], 1):
        try:
            text = emit(engine, found.config, found.machine, one.layout, found.seq)
        except ValueError as error:
            why = why or str(error)
            continue
        if why:
            words = f"number {number} of the layouts that fit, {one.layout}: the first is refused"
            print(f"{words}: {why}", file=sys.stderr)
        return one, text
    raise ValueError(f"engine={engine!r}: none of the {len(found.fits)} layouts that fit; {why}")
