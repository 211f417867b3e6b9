"""`python -m shardlab strategy`: which layout, how long it takes, and whether it fits.

    python -m shardlab strategy --model llama-3-8b --gpu a100-80 --gpus 16 --tokens 1e12
    python -m shardlab strategy --config config.json --gpu h100 --gpus 64 --seq 8192 --batch 512
    python -m shardlab strategy --model gpt-3-175b --gpu a100 --gpus 64 --tp 8 --pp 8 --explain

The table has the layouts that fit and are fastest: micro-batch and how many, GB that the fullest
rank reserves, and that stay free; seconds of a step; MFU, without the pairs of tokens that masks
and windows hide; with --tokens the days and GPU hours of the training, and with --price their cost.
--dp, --tp, --pp, --cp, --ep, --zero, --micro-batch, --recompute and --offload keep one value of a
layout. --explain shows the first layout part by part, --json everything. --run trains the first one
here, on real ranks, as small as this machine can: whether it equals one process, and what each rank
holds and sends beside the prediction.

    python -m shardlab strategy --model llama-3-405b --gpu h100 --batch 2048 \\
        --layout "d 128 · t 8 · p 16, ZeRO-1, interleaved 8, stages megatron, sequence parallelism"

--mtp plans so many of the modules that predict further tokens, of those that a file of --config
names: they are trained on the last stage, with the head.

--layout takes one layout as it is, in the words of the table, and shows it part by part, whether it
fits or not; micro-batches that it does not name follow from --batch.

--emit writes the fastest layout that an engine can run as its configuration: deepspeed, fsdp2,
torchtitan, megatron, or slurm, a batch file. It is planned with the bytes and seconds of that
engine's --profile; with slurm, of any. torchtitan runs a model eagerly, compiled, or captured in a
CUDA graph, which is taken unless --compile says another: that is predicted, and emitted. Rates are
the profile's, or those of a file: --rates.

    python -m shardlab strategy --measure --rates here.json
    python -m shardlab strategy --fit sweep.csv --rates rates.json --profile nanotron
    python -m shardlab strategy --predict rows.csv --rates rates.json --profile nanotron
    python -m shardlab strategy --case cases.json --rates rates.json --profile megatron

--measure finds rates of the machine at hand, in under a minute; a plan with them needs no --gpu.

--fit finds rates from measured steps (CSV with the columns of the Ultra-Scale sweep) or from layer
times (JSON, a list of cases with "id", "config" and "published") and writes them; with --profile
engines from a table of throughputs (CSV: source, model, gpu, gpus, dtype, mbs, gbs, seq, degrees,
and tokens_per_s_per_gpu, step_s or tflops_per_gpu). It names each line that it leaves out, and why.

--predict prints the rows of a CSV file with predicted_seconds of a step, predicted_memory_gib that
rank 0 reserves, and a note: why a row cannot be expressed; its numbers are then empty.

--case prints a JSON list of {"id", "seconds", "memory_gib", "note"}; the memory is what is
allocated on the fullest rank, without what an allocator loses. A config has a shape (layers,
hidden, heads, ffn, kv_heads, vocab) or "file", a config.json; gpu, gpus, tp, pp, vpp, cp, ep, etp,
dp, mbs, gbs, seq; and of today's engines (--profile engines) engine, dtype, recompute (none,
selective, full, operators), compile (false, true, "captured"); what is missing follows.

Each takes --profile: whose implementation is predicted.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from shardlab.common.arguments import check_one_of
from shardlab.common.machines import MACHINES, check_named
from shardlab.common.shapes import PRESETS, Config
from shardlab.layout import Layout, Structure, computed_again, structure
from shardlab.layout import read as read_layout
from shardlab.layout.core import OFFLOADS
from shardlab.layout.structure import check_expert_degree, check_tensor_degree
from shardtools import options

from . import report
from .advice import told
from .job import DTYPES
from .plan import Plan, alone, plan, short
from .profile import HOW, PROFILES, Profile, how, today
from .rates import Rates, known, read
from .rates import today as rates_today
from .space import rule

ENTRIES = "measure", "fit", "predict", "case"
# Fields of a layout that an option keeps, and the least of each, or the least and most.
FIXED = dict.fromkeys(("dp", "tp", "pp", "cp", "ep", "micro_batch"), (1,)) | {"zero": (0, 3)}
WORDS = "recompute", "offload"  # and those that it keeps by name
TOP = 10  # rows of the table
BATCH_TOKENS = 4_194_304  # of a step, unless --batch says otherwise: what large models train with


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `strategy` to the command line."""
    parser = options.command(commands, "strategy", __doc__)
    add = partial(options.add, parser)
    add("fit", "measured steps (CSV) or layer times (JSON), to find rates from", "FILE")
    add("predict", "rows to predict (CSV)", "FILE")
    add("case", "cases to predict (JSON)", "FILE")
    add("rates", "rates: written by --fit, read by the others", "FILE")
    add("profile", f"whose implementation: {', '.join(PROFILES)} (course)", "NAME")
    add("model", f"a model: {', '.join(PRESETS)}", "NAME")
    add("config", "or the config.json of a model on Hugging Face's hub", "FILE")
    add("mtp", "modules that predict further tokens, of those of the file (0); with --config", "N")
    add("gpu", f"machines: {', '.join(MACHINES)}", "NAME")
    add("gpus", "how many", "N")
    add("per-node", "GPUs of a node (as its maker builds it)", "N")
    add("seq", "tokens of a sequence (the model's longest)", "S")
    add("batch", "sequences in a step (some four million tokens)", "B")
    add("tokens", "of the whole training, for example 1.5e12", "N")
    add("price", "of one GPU for an hour", "P")
    add("top", f"rows of the table ({TOP})", "N")
    for name in FIXED:
        add(name.replace("_", "-"), "keep this value", "N")
    add("recompute", "keep this: none, full, selective, or operators as norms+ffn", "HOW")
    add("offload", f"keep this: {', '.join(OFFLOADS)}", "WHAT")
    add("layout", "plan this one alone, as 'd 2 · t 8 · p 4, ZeRO-1'", "WORDS")
    add("dtype", f"products: {', '.join(DTYPES)} (bf16)", "NAME")
    words = "find the rates of this machine"
    parser.add_argument("--measure", action="store_true", default=None, help=words)
    parser.add_argument("--explain", action="store_true", default=None, help="the first, by part")
    parser.add_argument("--json", action="store_true", default=None, help="everything, as JSON")
    words = "train the first, small, on ranks of this machine"
    parser.add_argument("--run", action="store_true", default=None, help=words)
    add("compile", f"how torchtitan runs it: {', '.join(HOW)}", "HOW")
    add("emit", "the fastest layout as a configuration for it", "ENGINE")
    add(
        "engine",
        "with --emit slurm, the whole job of: torchtitan, megatron, deepspeed, fsdp2, course",
        "ENGINE",
    )
    add("site", "with --emit slurm, what every job wants there: a cluster.yml", "FILE")
    add("into", "with --engine, the folder for its files (job)", "DIR")
    add("time", "with --engine, the job's time limit (01:00:00)", "TIME")
    add("partition", "with --engine, where it runs (the default one)", "NAME")
    parser.set_defaults(command=_main)


def _main(chosen: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(chosen).items() if value is not None}
    entries = [name for name in ENTRIES if name in given]
    asks = [name for name in ("model", "config") if name in given]
    if len(entries + asks) != 1:
        said = " and ".join(f"--{name}" for name in entries + asks) or "neither"
        allowed = "exactly one of --model, --config, --measure, --fit, --predict and --case"
        raise ValueError(f"{said}: allowed is {allowed}")
    _check_apart(given, (entries + asks)[0])
    if asks:
        return _planned(given)
    if not given.get("rates"):
        raise ValueError(f"rates='': allowed with --{entries[0]} is a file")
    from . import measurements  # which no page's calculator needs

    if entries[0] in ("measure", "fit"):
        options.written("rates", given["rates"])  # before anything is measured or fitted
        left: list[str] = []
        if entries == ["measure"]:
            rates = _measured(given)
        else:
            rates = measurements.fitted(Path(given["fit"]), _profile(given), left)
        options.written("rates", given["rates"], rates.write)
        print("\n".join([table(rates), *left]))
        return 0
    profile, rates = _rates(given)
    if entries == ["predict"]:
        print(measurements.predicted_rows(Path(given["predict"]), profile, rates), end="")
    else:
        found = measurements.predicted_cases(Path(given["case"]), profile, rates)
        print(json.dumps(found, indent=1))
    return 0


def _check_apart(given: dict[str, Any], what: str) -> None:
    """Raise ValueError for options of which one would go unheard beside another."""
    if what in ENTRIES:
        more = [name for name in given if name not in ("command", what, "rates", "profile")]
        options.apart(given, more, f"with --{what}: allowed are --rates and --profile")
    forms = [name for name in ("json", "explain", "run", "emit") if name in given]
    if forms:
        options.apart(given, forms[1:], f"with --{forms[0]}: allowed is one of them")
    if forms and forms != ["json"]:
        options.apart(given, ["top"], f"with --{forms[0]}, which has one layout and no table")
    if "layout" in given:
        options.apart(given, (*FIXED, *WORDS, "top"), "with --layout, which says it")
    if "config" not in given:
        words = "alone: allowed with --config, whose file has such modules"
        options.apart(given, ["mtp"], words)
    if "run" in given:
        options.apart(given, ["mtp"], "with --run: the course's own model has no such modules")
    if given.get("emit") != "slurm":
        options.apart(given, ["engine", "site"], "alone: allowed with --emit slurm")
    if "engine" not in given:
        more = ["into", "time", "partition"]
        options.apart(given, more, "alone: allowed with --engine, of whose job it is")
    if "tokens" not in given:
        options.apart(given, ["price"], "alone: allowed with --tokens, of which it is the price")


def _planned(given: dict[str, Any]) -> int:
    """Print the plan that the options ask for; the status is 1 where its trial is not equal."""
    if "emit" in given:
        from .emitted import for_engine  # which no page's calculator loads

        given = for_engine(given)
    if "rates" in given:
        profile, rates = _rates(given)
    else:
        profile = _profile({"profile": "course", **given})
        rates = rates_today(known(profile.name))
    profile = _compiled(given, today(profile))
    asked = _asked(given, rates)
    dtype = given.get("dtype", "bf16")
    if "layout" in given:
        layout = _entered(given, asked)
        found = alone(asked.config, asked.machine, layout, asked.seq, profile, rates, dtype)
    else:
        job = asked.config, asked.machine, asked.gpus, asked.batch, asked.seq
        fixed = _fixed(given)
        _check_kept(fixed, asked, profile)
        found = plan(*job, profile, rates, fixed, dtype)
        if not found.fits:
            raise ValueError(short(found))
    return _told(given, asked, found, rates)


def _fixed(given: dict[str, Any]) -> dict[str, object]:
    """The fields of a layout that the options keep."""
    fixed: dict[str, object] = {
        name: options.whole(name, given[name], *ends)
        for name, ends in FIXED.items()
        if name in given
    }
    if "recompute" in given:
        computed_again(given["recompute"])
        fixed["recompute"] = given["recompute"]
    if "offload" in given:
        check_one_of(OFFLOADS, offload=given["offload"])
        fixed["offload"] = given["offload"]
    return fixed


def _check_kept(fixed: dict[str, Any], asked: report.Asked, profile: Profile) -> None:
    """Raise ValueError for a value that no layout of the job can have; it says which there are."""
    gpus, config, node = asked.gpus, asked.config, asked.machine.per_node
    tp, pp, dp = (fixed.get(name, 1) for name in ("tp", "pp", "dp"))
    check_tensor_degree(config, tp, profile.copies)
    check_expert_degree(config, fixed.get("ep", 1))
    if tp > node:
        raise ValueError(f"tp={tp}: allowed are 1 to {node}, those of a node; --layout takes more")
    if rule(config.layers, pp, profile) is None:
        allowed = "divisors of" if profile.stages == "equal" else "fewer stages, of"
        raise ValueError(
            f"pp={pp}: allowed with {profile.name} are {allowed} {config.layers} layers"
        )
    for name, whole, size in (("cp", "seq", asked.seq), ("tp", "seq", asked.seq),
                              ("dp", "batch", asked.batch)):  # fmt: skip
        if name in fixed and size % fixed[name]:
            raise ValueError(f"{name}={fixed[name]}: allowed are divisors of {whole}={size}")
    kept = {name: fixed[name] for name in ("dp", "tp", "pp", "cp") if name in fixed}
    if gpus % prod(kept.values()):
        said = " with ".join(f"{name}={value}" for name, value in kept.items())
        allowed = "products that divide" if len(kept) > 1 else "divisors of"
        raise ValueError(f"{said}: allowed are {allowed} gpus={gpus}")


def _entered(given: dict[str, Any], asked: report.Asked) -> Layout:
    """The layout of --layout, with as many micro-batches as the batch that is asked for has."""
    layout = read_layout(given["layout"])
    if "batch" in given and layout.microbatches == 1:
        each = layout.dp * layout.micro_batch
        if asked.batch % each:
            raise ValueError(f"batch={asked.batch}: allowed are multiples of d · b = {each}")
        layout = replace(layout, microbatches=asked.batch // each)
    if "batch" in given and layout.batch != asked.batch:
        raise ValueError(f"batch={asked.batch}: allowed is {layout.batch}, d · b · m of the layout")
    if "gpus" in given and layout.ranks != asked.gpus:
        raise ValueError(f"gpus={asked.gpus}: allowed is {layout.ranks}, those of the layout")
    if layout.ranks > (n := asked.machine.per_node) and layout.ranks % n:
        raise ValueError(f"gpus={layout.ranks}: allowed are 1 to {n}, and whole nodes of {n}")
    return layout


def _told(given: dict[str, Any], asked: report.Asked, found: Plan, rates: Rates) -> int:
    """Print a plan in the form that the options ask for; the status as of `_planned`."""
    first = found.fits[0] if found.fits else found.nearest
    top = options.whole("top", given.get("top", str(TOP)))
    if "json" in given:
        best = found.fits[:top] or [first]
        print(json.dumps(report.data(asked, found, best), indent=1))
    elif "emit" in given:
        from .emitted import emitted, written

        print((written if "engine" in given else emitted)(given, asked, found))
    elif "run" in given:
        from .trial import trained  # which loads torch

        text, good = trained(asked.name, asked.config, first.layout)
        print(text)
        return 0 if good else 1
    elif "explain" in given or "layout" in given:
        print(report.explained(asked, found, first, rates))
        if len(rows := told(found, first.layout)) > 1:
            print("", *report.aligned(rows), sep="\n")
    else:
        print(report.text(asked, found, rates, top))
    return 0


def _compiled(given: dict[str, Any], profile: Profile) -> Profile:
    """The profile with its model run as --compile says, where an engine has the choice."""
    if "compile" not in given:
        return profile
    if profile.name != "torchtitan":
        raise ValueError(f"compile={given['compile']!r}: allowed with --profile torchtitan")
    check_one_of(HOW, compile=given["compile"])
    return how(profile, given["compile"])


def _own(path: Path, found: Structure) -> Config:
    """The shape in which the course's own model computes the same as `found`.

    Raises ValueError where none does: an engine would be told of another model.
    """
    from shardlab.checkpoint.names import config_in  # which loads torch

    own = config_in(path)
    if structure(own).total != found.total:
        words = f"config={str(path)!r}: {found.total:,} parameters"
        raise ValueError(f"{words}; allowed with --emit and --run are {structure(own).total:,}")
    return own


def _asked(given: dict[str, Any], rates: Rates) -> report.Asked:
    if "model" in given:
        name = given["model"]
        check_one_of(PRESETS, model=name)
        config = PRESETS[name]
    else:
        from shardtools import hub  # which no page's calculator needs

        path, mtp = Path(given["config"]), options.whole("mtp", given.get("mtp", "0"), 0)
        name, config = path.name, hub.planned(path, mtp=mtp)
        for words in config.assumed:  # aside: what is printed may be a configuration, or JSON
            print(f"assumed: {words}", file=sys.stderr)
        if "emit" in given or "run" in given:
            config = replace(config, own=_own(path, hub.planned(path)))
    if "gpu" in given or rates.machine is None:
        machine = check_named(gpu=given.get("gpu", ""))
    else:
        machine = rates.machine
    if "per_node" in given:
        machine = replace(machine, per_node=options.whole("per-node", given["per_node"]))
    seq = options.whole("seq", given["seq"]) if "seq" in given else config.seq
    if "batch" in given:
        batch = options.whole("batch", given["batch"])
    if "layout" in given and "gpus" not in given:
        given = {**given, "gpus": str(read_layout(given["layout"]).ranks)}
    gpus = options.whole("gpus", given.get("gpus", ""))
    if "batch" not in given:  # so that all copies get as many
        batch = max(1, BATCH_TOKENS // seq // gpus) * gpus
    numbers = {
        key: _positive(key, given[key]) if key in given else None for key in ("tokens", "price")
    }
    return report.Asked(name, config, machine, gpus, batch, seq, **numbers)


def _positive(name: str, given: str) -> float:
    value = options.number(name, given, "numbers above 0")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}={given}: allowed are numbers above 0")
    return value


def _profile(given: dict[str, Any]) -> Profile:
    name = given.get("profile", "")
    if name not in PROFILES:
        raise ValueError(f"profile={name!r}: allowed are {', '.join(PROFILES)}")
    return PROFILES[name]


def _rates(given: dict[str, Any]) -> tuple[Profile, Rates]:
    """The rates of a file, and the profile that they are for."""
    rates = read(Path(given["rates"]))
    profile = _profile({"profile": rates.profile, **given})
    if profile.name != rates.profile:
        where = f"the profile of {given['rates']}"
        raise ValueError(f"profile={profile.name!r}: allowed is {rates.profile!r}, {where}")
    return profile, rates


def _measured(given: dict[str, Any]) -> Rates:
    from .measure import measure  # which no page's calculator loads, as it does not emit

    return measure(_profile({"profile": "course", **given}).name)


def table(rates: Rates) -> str:
    """Rates as text: value, how far off it may be, what it is, where it comes from."""
    lines = [f"{'rate':<12} {'value':>9}  {'±':>5}  what, and its origin"]
    for name, rate in rates.all.items():
        spread = f"{100 * rate.spread:.0f} %"
        lines.append(f"{name:<12} {rate.value:>9.4g}  {spread:>5}  {rate.unit}; {rate.origin}")
    return "\n".join(lines)
