"""The output of `strategy emit`: a configuration, or the files of a whole job."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote
from typing import Any

from shardlab.common.arguments import check_one_of
from shardtools import options
from shardtools.cluster import site

from .emit import ENGINES, Limits, deepspeed, emit, render_job, slurm
from .emit.job import BATCH_FILE, SITE_FILE
from .emit.job import ENGINES as JOBS
from .emit.target import Target
from .plan import Candidate, Plan
from .profile import PROFILES
from .report import list_warnings

DEFAULT_STEPS = 1000  # steps of the training without --tokens
FILE_NAMES = {"deepspeed": deepspeed.FILE_NAME, "slurm": slurm.FILE_NAME}  # without a whole job


def prepare_options(args: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the engine's profile; Slurm starts any program, of any profile.

    --site is replaced by its contents, and sets --per-node to its GPUs per node by default.
    """
    engine = args["engine"]
    check_one_of(ENGINES, engine=engine)
    if engine != "slurm" and not ("into" in args and engine in JOBS):
        reason = f"needs a batch file: emit slurm, or --into with {', '.join(JOBS)}"
        options.refuse_options(args, ("time", "partition", "site"), reason)
    if "site" in args:
        args = {**args, "site": (cluster := site.read_site(args["site"]))}
        args = {"per_node": cluster.gpus_per_node, **args} if cluster.gpus_per_node else args
    if engine not in PROFILES:
        return args
    if args.get("profile", engine) != engine:
        words = f"must be {engine!r}, the profile that emit {engine} plans with"
        raise ValueError(f"profile={args['profile']!r}: {words}")
    return {**args, "profile": engine}


def emit_files(args: dict[str, Any], plan: Plan) -> str:
    """Return the configuration of the fastest layout that an engine can run.

    With --into write it into a folder, as a whole job if the engine has one; return the files and
    the next commands. The prediction, with the plan's warnings, goes to stderr.
    """
    engine, cluster = args["engine"], args.get("site")
    limit_fields = {name: args[name] for name in ("time", "partition") if name in args}
    if cluster and cluster.partition and "," not in cluster.partition:
        limit_fields = {"partition": cluster.partition, **limit_fields}
    limits, steps = Limits(**limit_fields), DEFAULT_STEPS
    if "tokens" in args:
        steps = -(-int(args["tokens"]) // (plan.batch * plan.seq))
    candidate, text = _find_fastest(engine, plan)
    target = Target.from_model(engine, plan.config, plan.machine, candidate.layout, plan.seq)
    if engine == "slurm":
        text = slurm.render_file(target, limits.time, limits.partition)
    whole = "into" in args and engine in JOBS
    name = BATCH_FILE if whole else FILE_NAMES.get(engine, "")
    texts = render_job(target, limits, steps, candidate.seconds) if whole else {name: text}
    if cluster:
        texts[name] = cluster.adapt_batch_file(texts[name])
    if cluster and whole:
        texts[SITE_FILE] = cluster.make_setup_script()
    if not {"profile", "rates"} & args.keys():  # emit slurm
        print("assumed: profile=course; name your program's, as deepspeed", file=sys.stderr)
    size = f"{candidate.reserved / 1e9:.1f} of {plan.usable_memory / 1e9:.1f} GB"
    words = f"{size} on the fullest GPU (profile {plan.profile.name})"
    said = [f"{candidate.layout}: predicted are {candidate.seconds:.3g} s a step and {words}"]
    said += [f"Warning: {one}." for one in list_warnings(plan, candidate)]
    print(*said, sep="\n", file=sys.stderr)
    if "into" not in args:
        return texts[name].rstrip("\n")

    folder = Path(options.make_folder("into", args["into"]))
    lines = [f"{folder}:"]
    for name, text in texts.items():
        kept = name == SITE_FILE and (folder / name).exists()
        if not kept:
            options.write_file("into", folder / name, text)
        lines.append(f"  {name}" + (", kept as you edited it" if kept else ""))
    if not whole:
        return "\n".join(lines)
    if not cluster:
        lines.append(f"Put your site's modules and environment into {folder}/{SITE_FILE}, then")
    doctor = _format_doctor_line(target, args)
    lines += [f"  cd {quote(str(folder))}", f"  {doctor}", f"  sbatch {BATCH_FILE}"]
    return "\n".join(lines)


def _format_doctor_line(target: Target, args: dict[str, Any]) -> str:
    """Return the command that checks the job's nodes, with the job's options for Slurm."""
    n = target.ranks_per_node
    line = f"srun --nodes={target.nodes} --ntasks-per-node={n} --gpus-per-node={n} "
    line += f"--cpus-per-task={slurm.CPUS_PER_RANK} --time=00:10:00"
    line += f" --partition={args['partition']}" if "partition" in args else ""
    machine = f" --machine {args['gpu']}" if "gpu" in args else ""
    line += f' bash -c "source ./{SITE_FILE}; python -m shardlab doctor{machine}"'
    return args["site"].adapt_command(line) if "site" in args else line


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
    words = f"engine={engine!r}: must be one that runs this model in a layout that fits ({why})"
    raise ValueError(words + "; emit slurm starts any program" * (engine != "slurm"))
