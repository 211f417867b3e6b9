"""The output of `strategy emit`: a configuration, or the files of a whole job."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote
from typing import Any

from shardlab.common.arguments import check_one_of
from shardtools import options
from shardtools.cluster import site

from .emit import ENGINES, Limits, emit, render_job
from .emit.job import BATCH_FILE, SITE_FILE
from .emit.job import ENGINES as JOBS
from .emit.target import Target
from .plan import Candidate, Plan
from .profile import PROFILES

DEFAULT_STEPS = 1000  # steps of the training without --tokens


def prepare_options(args: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the engine's profile; Slurm starts any program, of any profile.

    --site is replaced by its contents, and sets --per-node to its GPUs per node by default.
    """
    engine = args["engine"]
    check_one_of(ENGINES, engine=engine)
    if "into" in args:
        check_one_of(JOBS, engine=engine)
    else:
        options.refuse_options(
            args, ("time", "partition"), "without --into: it belongs to the job there"
        )
    if "site" in args and "into" not in args and engine != "slurm":
        raise ValueError(f"--site with {engine}: needs --into")
    if "site" in args:
        args = {**args, "site": (cluster := site.read_site(args["site"]))}
        args = {"per_node": cluster.gpus_per_node, **args} if cluster.gpus_per_node else args
    if engine not in PROFILES:
        return args
    if args.get("profile", engine) != engine:
        words = f"must be {engine!r}, the profile that emit {engine} plans with"
        raise ValueError(f"profile={args['profile']!r}: {words}")
    return {**args, "profile": engine}


def emit_file(args: dict[str, Any], plan: Plan) -> str:
    """Return the configuration of the fastest layout that an engine can run."""
    text = _find_fastest(args["engine"], plan)[1].rstrip("\n")
    return args["site"].adapt_batch_file(text) if "site" in args else text


def write_job(args: dict[str, Any], plan: Plan) -> str:
    """Write the whole job of an engine into a folder; return its files and the next command."""
    engine = args["engine"]
    limit_fields = {name: args[name] for name in ("time", "partition") if name in args}
    cluster = args.get("site")
    if cluster and cluster.partition and "," not in cluster.partition:
        limit_fields = {"partition": cluster.partition, **limit_fields}
    limits, steps = Limits(**limit_fields), DEFAULT_STEPS
    if "tokens" in args:
        steps = -(-int(args["tokens"]) // (plan.batch * plan.seq))

    candidate, _ = _find_fastest(engine, plan)
    target = Target.from_model(engine, plan.config, plan.machine, candidate.layout, plan.seq)
    texts = render_job(target, limits, steps, candidate.seconds)
    if cluster:
        texts |= {
            BATCH_FILE: cluster.adapt_batch_file(texts[BATCH_FILE]),
            SITE_FILE: cluster.make_setup_script(),
        }
    folder = Path(options.make_folder("into", args["into"]))
    size = f"{candidate.reserved / 1e9:.1f} GB on the fullest GPU"
    lines = [f"{candidate.layout}: predicted are {candidate.seconds:.3g} s a step and {size}"]
    lines.append(f"{folder}:")
    for name, text in texts.items():
        kept = name == SITE_FILE and (folder / name).exists()
        if not kept:
            options.write_file("into", folder / name, text)
        lines.append(f"  {name}" + (", kept as you edited it" if kept else ""))
    if not cluster:
        lines.append(f"Put your site's modules and environment into {folder}/{SITE_FILE}, then")
    return "\n".join([*lines, f"  cd {quote(str(folder))} && sbatch {BATCH_FILE}"])


def _find_fastest(engine: str, plan: Plan) -> tuple[Candidate, str]:
    """Return the fastest layout that an engine can run, and its configuration.

    Prints to stderr why the first layout is refused. Raises ValueError if the engine can run none.
    """
    why = ""
    for number, one in enumerate(plan.feasible or [plan.closest_infeasible], 1):
        try:
            text = emit(engine, plan.config, plan.machine, one.layout, plan.seq)
        except ValueError as error:
            why = why or str(error)
            continue
        if why:
            words = f"{engine} cannot run the fastest layout ({why}); emitted is number {number}"
            print(f"{words}, {one.layout}", file=sys.stderr)
        return one, text
    count = len(plan.feasible)
    raise ValueError(f"engine={engine!r}: cannot run any of the {count} layouts that fit: {why}")
