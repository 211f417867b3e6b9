"""`python -m shardlab strategy`: choose a layout, and predict its step time and memory.

    python -m shardlab strategy plan --model llama-3-8b --gpu a100-80 --gpus 16 --tokens 1e12
    python -m shardlab strategy run --model llama-3-70b --gpu h100 --gpus 256 --tp 8 --pp 4
    python -m shardlab strategy emit megatron --model gpt-3-175b --gpu a100 --gpus 1024
    python -m shardlab strategy fit --rates here.json
    python -m shardlab strategy predict rows.csv --rates rates.json

`--help` after each of these commands prints its manual.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from shardlab.common.arguments import check_number, check_one_of, check_whole
from shardlab.common.machines import MACHINES, Machine, check_named
from shardlab.common.shapes import PRESETS
from shardlab.layout import Layout, Structure, structure
from shardlab.layout import read as read_layout
from shardlab.layout.core import OFFLOADS
from shardlab.layout.structure import check_expert_degree, check_tensor_degree
from shardtools import options

from . import report
from .advice import told
from .job import DTYPES
from .plan import Plan, alone, plan, short
from .profile import PROFILES, Profile, today
from .rates import Rates, known, read
from .rates import today as rates_today

FIXED = "dp", "tp", "pp", "cp", "ep", "micro_batch", "zero"  # fields that options can fix
WORDS = "recompute", "offload"  # fields that options can fix by name
TOP = 10  # rows of the table
BATCH_TOKENS = 4_194_304  # tokens per step without --batch: a common size for large models
ENGINES = "deepspeed", "torchtitan", "megatron", "course", "slurm"  # same as `emit.ENGINES`


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `strategy`, with its five subcommands, to the command line."""
    parser = options.command(commands, "strategy", __doc__)
    parser.set_defaults(command=lambda _: parser.print_help() or 0)
    parts = parser.add_subparsers(title="commands", metavar="command")
    for add in (add_plan, _add_run, _add_emit, _add_fit, _add_predict):
        add(parts)


def add_plan(commands: argparse._SubParsersAction) -> None:
    """Add `strategy plan`, which a page's calculator runs as well."""
    parser = _command(commands, "plan", _plan)
    _add_job(parser)
    add = partial(options.add, parser)
    add("top", f"rows of the table ({TOP})", "N", int)
    forms = parser.add_mutually_exclusive_group()
    options.flag(forms, "explain", "the first, by part")
    options.flag(forms, "json", "everything, as JSON")


def _add_run(commands: argparse._SubParsersAction) -> None:
    _add_job(_command(commands, "run", _run))


def _add_emit(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "emit", _emit)
    parser.add_argument("engine", metavar="ENGINE", help=", ".join(ENGINES))
    _add_job(parser)
    add = partial(options.add, parser)
    add("into", "write the whole Slurm job into this folder", "DIR")
    add("site", "what every job wants there: a cluster.yml; with slurm or --into", "FILE")
    add("time", "the job's time limit (01:00:00); with --into", "TIME")
    add("partition", "where the job runs (the default one); with --into", "NAME")


def _add_fit(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "fit", _fit)
    parser.add_argument("file", nargs="?", metavar="FILE", help="measured steps or layer times")
    parser.add_argument("--rates", required=True, metavar="FILE", help="the file to write")
    _add_profile(parser)


def _add_predict(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "predict", _predict)
    parser.add_argument("file", metavar="FILE", help="rows (CSV), or cases (.json)")
    parser.add_argument(
        "--rates", required=True, metavar="FILE", help="a file that `strategy fit` wrote"
    )
    _add_profile(parser)


def _command(
    commands: argparse._SubParsersAction, name: str, run: Callable[[dict[str, Any]], int]
) -> argparse.ArgumentParser:
    """Return the parser of a subcommand; the docstring of `run` is its manual."""
    parser = options.command(commands, name, (run.__doc__ or "").replace("\n    ", "\n"))
    parser.set_defaults(command=lambda chosen: run(options.given(chosen)))
    return parser


def _add_profile(parser: argparse.ArgumentParser) -> None:
    options.add(parser, "profile", f"whose implementation: {', '.join(PROFILES)} (course)", "NAME")


def _add_job(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the job to plan."""
    add = partial(options.add, parser)
    add("model", f"a model: {', '.join(PRESETS)}", "NAME")
    add("config", "or the config.json of a model on Hugging Face's hub", "FILE")
    add("gpu", f"machines: {', '.join(MACHINES)}", "NAME")
    add("gpus", "how many", "N", int)
    add("per-node", "GPUs of a node (as its maker builds it)", "N", int)
    add("seq", "tokens of a sequence (the model's longest)", "S", int)
    add("batch", "sequences in a step (some four million tokens)", "B", int)
    add("tokens", "of the whole training, for example 1.5e12", "N", float)
    for name in FIXED:
        add(name.replace("_", "-"), "keep this value", "N", int)
    add("recompute", "keep this: none, full, selective, or operators as norms+ffn", "HOW")
    add("offload", f"keep this: {', '.join(OFFLOADS)}", "WHAT")
    add("layout", "plan this one alone, as 'd 2 · t 8 · p 4, ZeRO-1'", "WORDS")
    add("dtype", f"products: {', '.join(DTYPES)} (bf16)", "NAME")
    add("rates", "a file that `strategy fit` wrote (the profile's own)", "FILE")
    _add_profile(parser)


def _plan(given: dict[str, Any]) -> int:
    """Print the layouts that fit, the fastest first.

        python -m shardlab strategy plan --model llama-3-8b --gpu a100-80 --gpus 16 --tokens 1e12
        python -m shardlab strategy plan --config config.json --gpu h100 --gpus 64 --seq 8192
        python -m shardlab strategy plan --model gpt-3-175b --gpu a100 --gpus 64 --tp 8 --explain
        python -m shardlab strategy plan --model llama-3-405b --gpu h100 --batch 2048 \\
            --layout "d 128 · t 8 · p 16, ZeRO-1, interleaved 8, stages megatron"

    The table shows size and number of micro-batches; GB that the fullest rank reserves, and GB that
    stay free; seconds of a step; MFU, without pairs of tokens that masks and windows hide; with
    --tokens days and GPU hours of the training. --explain shows the first layout part by part.

    --layout takes one layout, written as in the table, and shows it part by part, whether it fits
    or not; if it names no number of micro-batches, the number follows from --batch.
    """
    name, found = _planned(given)
    tokens, first = given.get("tokens"), found.fits[0] if found.fits else found.nearest
    check_whole(top=(top := given.get("top", TOP)))
    if "json" in given:
        print(json.dumps(report.data(found, found.fits[:top] or [first], tokens), indent=1))
    elif "explain" in given or "layout" in given:
        print(report.explained(found, first))
        if len(rows := told(found, first.layout)) > 1:
            print("", *report.aligned(rows), sep="\n")
    else:
        print(report.text(name, found, top, tokens))
    return 0


def _run(given: dict[str, Any]) -> int:
    """Train the fastest layout here, on real ranks, as small as this machine can.

        python -m shardlab strategy run --model llama-3-70b --gpu h100 --gpus 256 --tp 8 --pp 4

    It prints whether the layout computes the same as one process, and what each rank holds and
    sends beside the prediction. The exit status is 1 if it does not equal one process.
    """
    name, found = _planned(given, own=True)
    from .trial import trained  # loads torch

    text, good = trained(name, found.config, (found.fits or [found.nearest])[0].layout)
    print(text)
    return 0 if good else 1


def _emit(given: dict[str, Any]) -> int:
    """Write the fastest layout that an engine can run as its configuration.

        python -m shardlab strategy emit deepspeed --model llama-3-8b --gpu h100 --gpus 16
        python -m shardlab strategy emit torchtitan --model llama-3-8b --gpu a100-80 --gpus 16 \\
            --time 00:55:00 --into job
        python -m shardlab strategy emit slurm --model llama-3-8b --gpu a100 --gpus 16

    deepspeed prints its JSON; torchtitan a configuration module; megatron a script of arguments;
    course the options of train.py; slurm a batch file for any program. --into writes the whole
    Slurm job of torchtitan, megatron or course into a folder.

    The plan uses the bytes and seconds of that engine's --profile; with slurm, of any profile.
    """
    from . import emitted  # imported here: no page's calculator loads it

    given = emitted.for_engine(given)
    _, found = _planned(given, own=True)
    print((emitted.written if "into" in given else emitted.emitted)(given, found))
    return 0


def _fit(given: dict[str, Any]) -> int:
    """Fit rates to measured steps, and write them into a file.

        python -m shardlab strategy fit --rates here.json
        python -m shardlab strategy fit sweep.csv --rates rates.json --profile nanotron

    Without a file it measures this machine, in under a minute; a plan with those rates needs no
    --gpu. A CSV file has measured steps, with the columns of the Ultra-Scale sweep; a JSON file
    layer times, as a list of cases with "id", "config" and "published"; and with --profile engines
    a CSV file is a table of throughputs (engine, model, gpu, gpus, dtype, degrees, mbs, gbs, seq,
    recompute, and tokens_per_s_per_gpu, step_s or tflops_per_gpu). It names lines that it skips.
    """
    from . import learn  # imported here: no page's calculator needs it

    options.written("rates", given["rates"])  # check the path before anything is measured or fitted
    left: list[str] = []
    if "file" in given:
        rates = learn.fitted(Path(given["file"]), _profile(given), left)
    else:
        from .measure import measure

        rates = measure(_profile({"profile": "course", **given}).name)
    options.written("rates", given["rates"], rates.write)
    print("\n".join([table(rates), *left]))
    return 0


def _predict(given: dict[str, Any]) -> int:
    """Predict each row of a CSV file, or each case of a JSON file.

        python -m shardlab strategy predict rows.csv --rates rates.json --profile nanotron
        python -m shardlab strategy predict cases.json --rates rates.json --profile megatron

    Each row is printed with predicted_seconds of a step, predicted_memory_gib that rank 0 reserves,
    and a note: why the row cannot be predicted; its numbers are then empty.

    For cases it prints a JSON list of {"id", "seconds", "memory_gib", "note"}; the memory is what
    the fullest rank allocates, without fragmentation. A config has a shape (layers,
    hidden, heads, ffn, kv_heads, vocab) or "file", a config.json; gpu, gpus, tp, pp, vpp, cp, ep,
    etp, dp, mbs, gbs, seq, zero, recompute (none, selective, full); others have defaults.
    """
    from . import learn  # imported here: no page's calculator needs it

    path = Path(given["file"])
    profile, rates = _rates(given)
    if path.suffix == ".json":
        print(json.dumps(learn.predicted_cases(path, profile, rates), indent=1))
    else:
        print(learn.predicted_rows(path, profile, rates), end="")
    return 0


def _planned(given: dict[str, Any], own: bool = False) -> tuple[str, Plan]:
    """Return the model's name, and the requested plan; own: the course's own model must run it."""
    if "rates" in given:
        profile, rates = _rates(given)
    else:
        profile = _profile({"profile": "course", **given})
        rates = rates_today(known(profile.name))
    profile = today(profile)
    name, config = _model(given, own)
    machine = rates.machine
    if "gpu" in given or machine is None:
        machine = check_named(gpu=given.get("gpu", ""))
    if "per_node" in given:
        machine = replace(machine, per_node=given["per_node"])
    if "tokens" in given:
        check_number(tokens=given["tokens"])
    seq, dtype = given.get("seq", config.seq), given.get("dtype", "bf16")
    if "layout" in given:
        options.apart(given, (*FIXED, *WORDS), "with --layout, which says it")
        layout = _entered(given, machine, seq)
        return name, alone(config, machine, layout, seq, profile, rates, dtype)
    check_whole(seq=seq, gpus=(gpus := given.get("gpus", "")))
    # By default all copies get equal numbers of sequences.
    batch = given.get("batch", max(1, BATCH_TOKENS // seq // gpus) * gpus)
    fixed = _kept(given, config, gpus, machine, profile)
    found = plan(config, machine, gpus, batch, seq, profile, rates, fixed, dtype)
    if not found.fits:
        raise ValueError(short(found))
    return name, found


def _model(given: dict[str, Any], own: bool) -> tuple[str, Structure]:
    """Return the model's name and structure. Raises ValueError unless there is one model."""
    options.one_of(given, "model", "config")
    if "model" in given:
        check_one_of(PRESETS, model=given["model"])
        return given["model"], structure(PRESETS[given["model"]])
    from shardtools import hub  # imported here: no page's calculator needs it

    path = Path(given["config"])
    found = hub.planned(path)
    for words in found.assumed:  # to stderr: stdout may be a configuration, or JSON
        print(f"assumed: {words}", file=sys.stderr)
    if own:  # the shape in which the course's own model computes the same
        from shardlab.checkpoint.hub_names import read_config_file  # loads torch

        found = replace(found, own=read_config_file(path))
        if (total := structure(found.own).total) != found.total:
            words = f"config={str(path)!r}: {found.total:,} parameters"
            raise ValueError(f"{words}; allowed with emit and run are {total:,}")
    return path.name, found


def _kept(
    given: dict[str, Any], config: Structure, gpus: int, machine: Machine, profile: Profile
) -> dict[str, Any]:
    """Return the fields of a layout whose values the options fix.

    Raises ValueError for values that no layout of the job can have, with the allowed ones.
    """
    fixed = {name: given[name] for name in (*FIXED, *WORDS) if name in given}
    for name, value in fixed.items():
        if name != "ep":  # ep depends on other fields
            Layout(**{name: value})
    tp, node = fixed.get("tp", 1), machine.per_node
    check_expert_degree(config, fixed.get("ep", 1))
    check_tensor_degree(config, tp, profile.copies)
    if tp > node:
        raise ValueError(f"tp={tp}: allowed are 1 to {node}, those of a node; --layout takes more")
    degrees = {name: fixed[name] for name in ("dp", "tp", "pp", "cp") if name in fixed}
    if gpus % prod(degrees.values()):
        said = " with ".join(f"{name}={value}" for name, value in degrees.items())
        raise ValueError(f"{said}: allowed are products that divide gpus={gpus}")
    return fixed


def _entered(given: dict[str, Any], machine: Machine, seq: int) -> Layout:
    """Return the layout of --layout, with as many micro-batches as --batch needs."""
    check_whole(seq=seq)
    layout = read_layout(given["layout"])
    if (gpus := given.get("gpus", layout.ranks)) != layout.ranks:
        raise ValueError(f"gpus={gpus!r}: allowed is {layout.ranks}, those of the layout")
    if layout.ranks > (n := machine.per_node) and layout.ranks % n:
        raise ValueError(f"gpus={layout.ranks}: allowed are 1 to {n}, and whole nodes of {n}")
    if "batch" not in given:
        return layout
    check_whole(batch=(batch := given["batch"]))
    if layout.microbatches == 1 and batch % layout.batch == 0:
        layout = replace(layout, microbatches=batch // layout.batch)
    if layout.batch != batch:
        raise ValueError(f"batch={batch}: allowed are d · b · m of the layout: {layout.batch}")
    return layout


def _profile(given: dict[str, Any]) -> Profile:
    name = given.get("profile", "")
    if name not in PROFILES:
        raise ValueError(f"profile={name!r}: allowed are {', '.join(PROFILES)}")
    return PROFILES[name]


def _rates(given: dict[str, Any]) -> tuple[Profile, Rates]:
    """Return a file's rates, and their profile."""
    rates = read(Path(given["rates"]))
    profile = _profile({"profile": rates.profile, **given})
    if profile.name != rates.profile:
        where = f"the profile of {given['rates']}"
        raise ValueError(f"profile={profile.name!r}: allowed is {rates.profile!r}, {where}")
    return profile, rates


def table(rates: Rates) -> str:
    """Format rates as a table: value, uncertainty, meaning and origin."""
    rows = [["rate", "value", "±", "what, and its origin"]]
    for name, rate in rates.all.items():
        spread, words = f"{100 * rate.spread:.0f} %", f"{rate.unit}; {rate.origin}"
        rows.append([name, f"{rate.value:.4g}", spread, words])
    return "\n".join(report.aligned(rows))
