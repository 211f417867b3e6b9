"""Choose a layout, and predict its step time and memory: `python -m shardlab strategy`.

`--help` after each of these commands prints its manual and examples.
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

from shardlab.common.arguments import check_integer, check_number, check_one_of
from shardlab.common.machines import MACHINES, Machine, check_machine
from shardlab.common.shapes import PRESETS
from shardlab.layout import Layout, Structure, get_structure
from shardlab.layout import parse_layout as read_layout
from shardlab.layout.core import OFFLOAD_CHOICES
from shardlab.layout.structure import check_expert_degree, check_tensor_degree
from shardtools import options

from . import report
from .advice import explain_infeasible, tabulate_remedies
from .job import DTYPES
from .plan import Plan, plan, plan_layout
from .profile import PROFILES, Profile, modernize_profile
from .rates import Rates, load_rates, modernize_rates, read_rates

# Fields of a layout that options can fix: numbers, and names.
CONSTRAINT_FIELDS = {
    "dp": "data-parallel degree", "tp": "tensor-parallel degree", "pp": "number of stages",
    "cp": "context-parallel degree", "ep": "expert-parallel degree",
    "micro_batch": "size of a micro-batch", "zero": "stage of ZeRO",
}  # fmt: skip
TEXT_CONSTRAINTS = "recompute", "offload"
DEFAULT_ROWS = 10  # rows of the table
DEFAULT_BATCH_TOKENS = 4_194_304  # tokens per step without --batch: a common size for large models
ENGINES = "deepspeed", "torchtitan", "megatron", "course", "slurm"  # same as `emit.ENGINES`


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `strategy`, with its five subcommands, to the command line."""
    parser = options.add_parser(commands, "strategy", __doc__)
    parser.set_defaults(command=lambda _: parser.print_help() or 0)
    parts = parser.add_subparsers(title="commands", metavar="command")
    for add in (add_plan, _add_run, _add_emit, _add_fit, _add_predict):
        add(parts)


def add_plan(commands: argparse._SubParsersAction) -> None:
    """Add `strategy plan`, which a page's calculator runs as well."""
    parser = _add_subcommand(commands, "plan", _run_plan)
    _add_job(parser)
    add = partial(options.add_option, parser)
    add("top", f"rows of the table ({DEFAULT_ROWS})", "N", int)
    forms = parser.add_mutually_exclusive_group()
    options.add_flag(forms, "explain", "the first layout, part by part")
    options.add_flag(forms, "json", "print the plan as JSON")


def _add_run(commands: argparse._SubParsersAction) -> None:
    _add_job(_add_subcommand(commands, "run", _run_trial))


def _add_emit(commands: argparse._SubParsersAction) -> None:
    parser = _add_subcommand(commands, "emit", _run_emit)
    parser.add_argument("engine", metavar="ENGINE", help=", ".join(ENGINES))
    _add_job(parser)
    add = partial(options.add_option, parser)
    add("into", "write the file, or the whole Slurm job, into this folder", "DIR")
    add("site", "a cluster.yml with your site's settings, for a batch file", "FILE")
    add("time", "the batch file's time limit (01:00:00)", "TIME")
    add("partition", "the batch file's Slurm partition (the site's default)", "NAME")


def _add_fit(commands: argparse._SubParsersAction) -> None:
    parser = _add_subcommand(commands, "fit", _run_fit)
    parser.add_argument("file", nargs="?", metavar="FILE", help="measured steps or layer times")
    parser.add_argument("--rates", required=True, metavar="FILE", help="the file to write")
    _add_profile(parser)


def _add_predict(commands: argparse._SubParsersAction) -> None:
    parser = _add_subcommand(commands, "predict", _run_predict)
    parser.add_argument("file", metavar="FILE", help="rows (CSV), or cases (.json)")
    written = "a file that `strategy fit` wrote"
    parser.add_argument("--rates", required=True, metavar="FILE", help=written)
    _add_profile(parser)


def _add_subcommand(
    commands: argparse._SubParsersAction, name: str, run: Callable[[dict[str, Any]], int]
) -> argparse.ArgumentParser:
    """Return the parser of a subcommand; the docstring of `run` is its manual."""
    parser = options.add_parser(commands, name, (run.__doc__ or "").replace("\n    ", "\n"))
    parser.set_defaults(command=lambda chosen: run(options.collect_options(chosen)))
    return parser


def _add_profile(parser: argparse.ArgumentParser) -> None:
    options.add_option(parser, "profile", f"implementation: {', '.join(PROFILES)} (course)", "NAME")


def _add_job(parser: argparse.ArgumentParser) -> None:
    add = partial(options.add_option, parser)
    add("model", f"a model: {', '.join(PRESETS)}", "NAME")
    add("config", "or the config.json of a model on Hugging Face's hub", "FILE")
    add("gpu", f"machines: {', '.join(MACHINES)}", "NAME")
    add("gpus", "number of GPUs", "N", int)
    add("per-node", "GPUs of a node (the usual number for this GPU)", "N", int)
    add("seq", "tokens of a sequence (the model's longest, at most 8192)", "S", int)
    add("batch", "sequences in a step (some four million tokens)", "B", int)
    add("tokens", "tokens of the whole training, for example 1.5e12", "N", float)
    for name, meaning in CONSTRAINT_FIELDS.items():
        add(name.replace("_", "-"), f"only this {meaning}", "N", int)
    add("recompute", "only this: none, full, selective, or operators as norms+ffn", "HOW")
    add("offload", f"only this: {', '.join(OFFLOAD_CHOICES)}", "WHAT")
    add("layout", "only this layout, as 'd 2 · t 8 · p 4, ZeRO-1'", "LAYOUT")
    add("dtype", f"of matrix products: {', '.join(DTYPES)} (bf16)", "NAME")
    add("rates", "a file that `strategy fit` wrote (the profile's own)", "FILE")
    _add_profile(parser)


def _run_plan(args: dict[str, Any]) -> int:
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
    name, plan = _make_plan(args)
    tokens, first = args.get("tokens"), (plan.feasible or [plan.closest_infeasible])[0]
    check_integer(top=(top := args.get("top", DEFAULT_ROWS)))
    if "json" in args:
        best = plan.feasible[:top] or [first]
        print(json.dumps(report.plan_to_dict(plan, best, tokens), indent=1))
    elif "explain" in args or "layout" in args:
        print(report.format_candidate(plan, first))
        if len(rows := tabulate_remedies(plan, first.layout)) > 1:
            print("", *report.align_columns(rows), sep="\n")
    else:
        print(report.format_plan(name, plan, top, tokens))
    return 0


def _run_trial(args: dict[str, Any]) -> int:
    """Train the fastest layout here, on real ranks, as small as this machine can.

        python -m shardlab strategy run --model llama-3-70b --gpu h100 --gpus 256 --tp 8 --pp 4

    It prints whether the layout computes the same as one process, and what each rank holds and
    sends beside the prediction. The exit status is 1 if it does not equal one process.
    """
    name, plan = _make_plan(args, as_course_model=True)
    from .trial import run_trial  # loads torch

    first = (plan.feasible or [plan.closest_infeasible])[0]
    text, good = run_trial(name, plan.config, first.layout)
    print(text)
    return 0 if good else 1


def _run_emit(args: dict[str, Any]) -> int:
    """Write the fastest layout that an engine can run as its configuration.

        python -m shardlab strategy emit deepspeed --model llama-3-8b --gpu h100 --gpus 16
        python -m shardlab strategy emit torchtitan --model llama-3-8b --gpu a100-80 --gpus 16 \\
            --time 00:55:00 --into job
        python -m shardlab strategy emit slurm --model llama-3-8b --gpu a100 --gpus 16

    deepspeed prints its JSON, for any model without experts; torchtitan a configuration module, for
    shapes of Llama 3 and Qwen3; megatron a script of arguments, for Llama, Qwen3, Mixtral and the
    like; course the options of train.py, a plain GPT of these sizes; slurm a batch file for any
    program. --into writes this file into a folder, or the whole Slurm job of torchtitan, megatron
    or course. The plan uses the bytes and seconds of the engine's --profile; with slurm name that
    of your program. The prediction and its warnings go to stderr.
    """
    from . import emit_command  # imported here: no page's calculator loads it
    from .emit.target import SHAPED

    args = emit_command.prepare_options(args)
    _, plan = _make_plan(args, as_course_model=args["engine"] in SHAPED)
    print(emit_command.emit_files(args, plan))
    return 0


def _run_fit(args: dict[str, Any]) -> int:
    """Fit rates to measured steps, and write them into a file.

        python -m shardlab strategy fit --rates here.json
        python -m shardlab strategy fit sweep.csv --rates rates.json --profile nanotron

    Without a file it measures this machine, in under a minute; a plan with those rates needs no
    --gpu. A CSV file has measured steps, with the columns of the Ultra-Scale sweep; a JSON file
    layer times, as a list of cases with "id", "config" and "published"; and with --profile engines
    a CSV file is a table of throughputs (engine, model, gpu, gpus, dtype, degrees, mbs, gbs, seq,
    recompute, and tokens_per_s_per_gpu, step_s or tflops_per_gpu). It names lines that it skips.
    """
    from . import fit_runs  # imported here: no page's calculator needs it

    options.write_file(
        "rates", args["rates"]
    )  # check the path before anything is measured or fitted
    skipped: list[str] = []
    if "file" in args:
        rates = fit_runs.fit_file(Path(args["file"]), _find_profile(args), skipped)
    else:
        from .measure import measure_rates

        rates = measure_rates(_find_profile({"profile": "course", **args}).name)
    options.write_file("rates", args["rates"], rates.write_json)
    print("\n".join([format_rates(rates), *skipped]))
    return 0


def _run_predict(args: dict[str, Any]) -> int:
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
    from . import fit_runs  # imported here: no page's calculator needs it

    path = Path(args["file"])
    profile, rates = _load_rates(args)
    if path.suffix == ".json":
        print(json.dumps(fit_runs.predict_cases(path, profile, rates), indent=1))
    else:
        print(fit_runs.predict_rows(path, profile, rates), end="")
    return 0


def _make_plan(args: dict[str, Any], as_course_model: bool = False) -> tuple[str, Plan]:
    """Return the model's name and the plan (as_course_model: for the course's own model)."""
    if "rates" in args:
        profile, rates = _load_rates(args)
    else:
        profile = _find_profile({"profile": "course", **args})
        rates = modernize_rates(load_rates(profile.name))
    profile = modernize_profile(profile)
    name, config = _load_model(args, as_course_model)
    machine = rates.machine
    if "gpu" in args or machine is None:
        machine = check_machine(gpu=args.get("gpu", ""))
    if "per_node" in args:
        machine = replace(machine, gpus_per_node=args["per_node"])
    if "tokens" in args:
        check_number(tokens=args["tokens"])
    seq = args.get("seq", min(config.seq, options.MAX_DEFAULT_SEQ))
    dtype = args.get("dtype", "bf16")
    if "layout" in args:
        options.refuse_options(
            args, (*CONSTRAINT_FIELDS, *TEXT_CONSTRAINTS), "with --layout, which sets it"
        )
        layout = _parse_layout(args, machine, seq)
        return name, plan_layout(config, machine, layout, seq, profile, rates, dtype)
    check_integer(seq=seq, gpus=(gpus := args.get("gpus", "")))
    # By default all copies get equal numbers of sequences.
    batch = args.get("batch", max(1, DEFAULT_BATCH_TOKENS // seq // gpus) * gpus)
    fixed = _read_constraints(args, config, gpus, machine, profile)
    result = plan(config, machine, gpus, batch, seq, profile, rates, fixed, dtype)
    if not result.feasible:
        raise ValueError(explain_infeasible(result))
    return name, result


def _load_model(args: dict[str, Any], as_course_model: bool) -> tuple[str, Structure]:
    options.check_exactly_one(args, "model", "config")
    if "model" in args:
        check_one_of(PRESETS, model=args["model"])
        return args["model"], get_structure(PRESETS[args["model"]])
    from shardtools import hub  # imported here: no page's calculator needs it

    path = Path(args["config"])
    model = hub.read_plannable(path)
    for words in model.assumptions:  # to stderr: stdout may be a configuration, or JSON
        print(f"assumed: {words}", file=sys.stderr)
    if as_course_model:  # the shape in which the course's own model computes the same
        from shardlab.checkpoint.hub_names import read_config_file  # loads torch

        try:
            model = replace(model, course_config=read_config_file(path))
        except ValueError as error:
            raise ValueError(f"{error}; plan and emit slurm take any model") from None
        if (total := get_structure(model.course_config).num_params) != model.num_params:
            words = f"config={str(path)!r}: {model.num_params:,} parameters"
            raise ValueError(f"{words}; emit and run need a model with {total:,}")
    return path.name, model


def _read_constraints(
    args: dict[str, Any], config: Structure, gpus: int, machine: Machine, profile: Profile
) -> dict[str, Any]:
    fixed = {name: args[name] for name in (*CONSTRAINT_FIELDS, *TEXT_CONSTRAINTS) if name in args}
    for name, value in fixed.items():
        if name != "ep":  # ep depends on other fields
            Layout(**{name: value})
    tp, node = fixed.get("tp", 1), machine.gpus_per_node
    check_expert_degree(config, fixed.get("ep", 1))
    check_tensor_degree(config, tp, profile.replicates_kv_heads)
    if tp > node:
        raise ValueError(f"tp={tp}: must be at most {node}, the GPUs of a node, without --layout")
    degrees = {name: fixed[name] for name in ("dp", "tp", "pp", "cp") if name in fixed}
    if gpus % prod(degrees.values()):
        given = ", ".join(f"{name}={value}" for name, value in degrees.items())
        raise ValueError(f"{given}: their product must divide the number of GPUs ({gpus})")
    return fixed


def _parse_layout(args: dict[str, Any], machine: Machine, seq: int) -> Layout:
    check_integer(seq=seq)
    layout = read_layout(args["layout"])
    if (gpus := args.get("gpus", layout.world_size)) != layout.world_size:
        raise ValueError(f"gpus={gpus!r}: must be {layout.world_size}, as the layout has it")
    if layout.world_size > (n := machine.gpus_per_node) and layout.world_size % n:
        raise ValueError(f"gpus={layout.world_size}: must be at most {n}, or a multiple of {n}")
    if "batch" not in args:
        return layout
    check_integer(batch=(batch := args["batch"]))
    if layout.microbatches == 1 and batch % layout.global_batch == 0:
        layout = replace(layout, microbatches=batch // layout.global_batch)
    if layout.global_batch != batch:
        raise ValueError(f"batch={batch}: must be {layout.global_batch}, d · b · m of the layout")
    return layout


def _find_profile(args: dict[str, Any]) -> Profile:
    name = args.get("profile", "")
    if name not in PROFILES:
        raise ValueError(f"profile={name!r}: must be one of {', '.join(PROFILES)}")
    return PROFILES[name]


def _load_rates(args: dict[str, Any]) -> tuple[Profile, Rates]:
    rates = read_rates(Path(args["rates"]))
    profile = _find_profile({"profile": rates.profile, **args})
    if profile.name != rates.profile:
        words = f"must be {rates.profile!r}, the profile of {args['rates']}"
        raise ValueError(f"profile={profile.name!r}: {words}")
    return profile, rates


def format_rates(rates: Rates) -> str:
    """Format rates as a table: value, uncertainty, meaning and origin."""
    rows = [["rate", "value", "±", "meaning; origin"]]
    for name, rate in rates.by_name.items():
        spread, words = f"{100 * rate.spread:.0f} %", f"{rate.unit}; {rate.origin}"
        rows.append([name, f"{rate.value:.4g}", spread, words])
    return "\n".join(report.align_columns(rows))
