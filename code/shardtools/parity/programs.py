"""Run the plain program, then the parallel one beside its record, and report differences."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlab import ranks as launch
from shardlab.common.arguments import MAX_PROCESSES, check_integer

from .comparison import Comparison
from .core import Matcher
from .hooks import INITIAL_STEP, Sink, Watch
from .noise import DRAWS, MAX_TOLERANCE, TOLERANCE_FACTOR, NoiseMeter, combine_draws, get_eps
from .record import Record, create_folder
from .report import Report

Program = Callable[[Watch], Any]


def check(
    plain: Program,
    parallel: Program,
    ranks: int = 2,
    draws: int = DRAWS,
    folder: str | Path | None = None,
    timeout: float = 600.0,
) -> Report:
    """Check that `parallel`, on `ranks` ranks, computes what `plain` computes in one process.

        def plain(watch):
            model, optimizer = ...
            watch(model, optimizer)
            for batch in batches:                    # a few steps of them
                ...

        print(parity.check(plain, parallel, ranks=2))

    Both are functions of `watch`, which they call once, before their first step; nothing else in
    them changes. Inputs, initial weights and optimizer options must be the same; `plain` runs once,
    and `draws` times more with every tensor moved by one unit in the last place, to measure what
    rounding does. folder: where its tensors are written, for models whose outputs do not fit
    into memory: a new one, or an empty one. timeout: seconds for each of the two.

    Raises ValueError for programs that cannot be compared: they take no step, or different numbers
    of steps, train nothing, differ from run to run, or name their parameters differently.
    """
    check_integer(1, MAX_PROCESSES, ranks=ranks)
    begin = time.perf_counter()
    record = _record_plain("plain", plain, draws, folder, False, timeout)
    middle = time.perf_counter()
    matchers = launch.run(lambda: match_program(parallel, record), ranks, timeout=timeout)
    report = build_report(record, matchers)
    now = time.perf_counter()
    report.seconds = {"plain": middle - begin, "parallel": now - middle}
    return report


def check_resume(
    full_run: Program,
    stopped_run: Callable[[Watch, Path], Any],
    resumed_run: Callable[[Watch, Path], Any],
    ranks: int | tuple[int, int] = 2,
    draws: int = DRAWS,
    folder: str | Path | None = None,
    timeout: float = 600.0,
) -> Report:
    """Check that a run that is stopped and resumed computes what an uninterrupted run does.

        def full_run(watch):
            train(watch, *build_model(), steps=range(4))

        def stopped_run(watch, folder):
            model, optimizer = build_model()
            train(watch, model, optimizer, steps=range(2))
            save(model, optimizer, folder)

        def resumed_run(watch, folder):
            model, optimizer = build_model()
            load(model, optimizer, folder)           # before it is watched
            train(watch, model, optimizer, steps=range(2, 4))

        print(parity.check_resume(full_run, stopped_run, resumed_run, ranks=(2, 4)))

    `full_run` runs in one process, like the plain program of `check`. `stopped_run` takes some of
    its steps on `ranks` ranks, and saves them to a folder; `resumed_run` loads them, and takes the
    rest. ranks: a pair if `resumed_run` runs on another number; techniques may differ, too.

    Raises ValueError as `check` does, and where the two together take another number of steps.
    """
    pair = ranks if isinstance(ranks, tuple) else (ranks, ranks)
    for number in pair:
        check_integer(1, MAX_PROCESSES, ranks=number)
    record = _record_plain("full_run", full_run, draws, folder, True, timeout)
    with tempfile.TemporaryDirectory(prefix="resume-") as name:

        def match_on_ranks(program: Callable, size: int, first_step: int = 0) -> list[Matcher]:
            run = lambda watch: program(watch, Path(name))  # noqa: E731
            work = lambda: match_program(run, record, first_step)  # noqa: E731
            return launch.run(work, size, timeout=timeout)

        report, taken = build_stopped_report(record, match_on_ranks(stopped_run, pair[0]))
        if report.is_equal:
            matchers = match_on_ranks(resumed_run, pair[1], taken)
            report = report.merge_resumed(build_report(record, matchers, "resumed_run"))
    return report


def keep_first_layers(model: nn.Module, layers: int = 2) -> nn.Module:
    """Keep the first layers of each list of layers of a model, in place; return the model.

    For a model that does not fit: in both programs, where it is made, before it is wrapped or
    sharded (on torch's meta device if the whole does not fit). Techniques that cut layers' tensors
    (tensor, sequence, context, expert parallelism, ZeRO) do the same in two layers as in all; a
    pipeline needs as many layers as it has parts. Inner lists, such as experts, stay. The report
    names the cut.

    Raises ValueError for a model that has no list of more layers of one class.
    """
    check_integer(1, layers=layers)
    inside: tuple[str, ...] = ()
    total = 0
    for name, each in list(model.named_modules()):
        if not isinstance(each, nn.ModuleList) or name.startswith(inside):
            continue
        inside += (f"{name}.",)
        if len(each) > layers and len({type(layer) for layer in each}) == 1:
            total = max(total, len(each))
            del each[layers:]
    if not total:
        raise ValueError(
            f"model={type(model).__name__}: must have a ModuleList of more than {layers} layers of "
            "one class"
        )
    if hasattr(getattr(model, "config", None), "num_hidden_layers"):  # as transformers' count them
        model.config.num_hidden_layers = layers
    model.cut_description = f"{layers} of {total} layers, same widths"
    return model


# The work of one process in a comparison


def _record_plain(
    who: str,
    plain: Program,
    draws: int,
    folder: str | Path | None,
    every_step: bool,
    timeout: float,
) -> Record:
    check_integer(1, 100, draws=draws)
    where = None if folder is None else create_folder(Path(folder))
    (record,) = launch.run(record_program, 1, plain, draws, where, every_step, timeout=timeout)
    check_plain_run(record, who)
    return record


def record_program(
    plain: Program, draws: int = DRAWS, folder: Path | None = None, every_step: bool = False
) -> Record:
    """Record what the plain program computes, and how far rounding moves it; in this process."""
    record = Record(folder)
    state = torch.get_rng_state()
    _run_watched(plain, Watch(record, every_step=every_step))
    record.map_values()
    found = []
    for seed in range(1, draws + 1):
        torch.set_rng_state(state)  # each run draws the same random numbers
        noise = NoiseMeter(record)
        _run_watched(plain, Watch(noise, seed=seed, every_step=every_step))
        found.append(noise.get_differences())
    record.noise = combine_draws(record, found)
    return record


def match_program(parallel: Program, record: Record, first_step: int = 0) -> Matcher:
    """Match the parallel program's tensors on a rank with the plain program's record.

    first_step: number of steps that were taken before a resumed program.
    """
    matcher = Matcher(record, dist.get_rank(), dist.get_world_size(), first_step)
    _run_watched(parallel, Watch(matcher, first_step=first_step))
    return matcher


def _run_watched(program: Program, watch: Watch) -> None:
    try:
        program(watch)
    finally:
        watch.close()
    gc.collect()  # hooks and modules hold each other: else two models would be in memory


# Reports


def build_report(record: Record, matchers: list[Matcher], who: str = "parallel") -> Report:
    """Return the report on a parallel program from the matchers of its ranks."""
    check_parallel_run(record, matchers, who, record.steps)
    return Comparison(record, matchers).run()


def build_stopped_report(record: Record, matchers: list[Matcher]) -> tuple[Report, int]:
    """Return the report on a program that stops, and the number of its steps."""
    taken = max(m.steps for m in matchers)
    check_parallel_run(record, matchers, "stopped_run", taken)
    if taken >= record.steps:
        raise ValueError(
            f"stopped_run: it took {taken} optimizer steps; must take fewer than the full run's "
            f"{record.steps}, so that some are left for resumed_run"
        )
    return Comparison(record, matchers, taken).run(), taken


def check_plain_run(record: Record, who: str = "plain") -> None:
    """Raise ValueError for a plain program that trains nothing, or differs from run to run."""
    _check_watched(who, record, record.steps)
    updates = (parts for key, parts in record.parts.items() if key.phase == "update")
    if not any(part.value.any() for parts in updates for part in parts):
        raise ValueError(
            f"{who}: no weight moved in its steps; must train (requires_grad? learning rate above "
            "0? backward before step?)"
        )
    seed = "call torch.manual_seed with the same seed in each run, before anything random"
    for key, (overall, *_) in record.noise.items():  # differences between runs with noise
        floor = 4 * get_eps(record.parts[key][0].value.dtype)
        if key[:2] == (INITIAL_STEP, "weights") and overall > floor:
            raise ValueError(f"{who}: the initial weights differ between runs ({key.name}); {seed}")
    outputs = [key for key in record.noise if key[:2] == (0, "forward")]
    noise = [record.noise[key][0] for key in outputs if not record.is_scalar(key)]
    if noise and all(x * TOLERANCE_FACTOR > MAX_TOLERANCE for x in noise):
        raise ValueError(f"{who}: the outputs differ between runs (a different batch?); {seed}")


def check_parallel_run(record: Record, matchers: list[Matcher], who: str, needed: int) -> None:
    """Raise ValueError for a parallel program that cannot be compared with the plain one."""
    steps, first_step = {m.steps for m in matchers}, matchers[0].first_step
    for m in matchers:  # a rank that skips steps alone is not refused, but reported as wrong
        _check_watched(f"{who}: rank {m.rank}", m, max(steps))
    if len(steps) == 1 and steps != {needed}:
        before = f" after the {first_step} of the stopped run" if first_step else ""
        raise ValueError(
            f"{who}: it took {steps.pop() - first_step} optimizer steps{before}; must take as many "
            f"as the plain program ({needed}; accumulated micro-batches count as one step)"
        )
    declares = any(key.phase == "samples" for m in matchers for key in m.matches)
    if declares != any(key.phase == "samples" for key in record.parts):
        raise ValueError(
            f"{who}: it {'called' if declares else 'never called'} watch.declare_samples(ids), "
            "unlike the plain program; call it in both programs, or in neither"
        )
    own = {key.name for key in record.parts if key.phase == "weights"}
    others = {key.name for m in matchers for key in m.matches if key.phase == "weights"}
    groups = ((others - own, "has"), (own - others, "lacks"))
    texts = [f"{verb} {len(x)} ({', '.join(sorted(x)[:3])})" for x, verb in groups if x]
    if texts:
        raise ValueError(
            f"{who}: parameters differ from the plain program's: it {' and it '.join(texts)}; pass "
            "watch(…, rename=f) a function that maps its names to the plain program's"
        )


def _check_watched(who: str, sink: Sink, steps: int) -> None:
    if not sink.is_watched:
        raise ValueError(f"{who}: must call watch(model, optimizer) once; it never did")
    if not sink.has_optimizer:
        raise ValueError(f"{who}: must pass the optimizer that steps: watch(model, optimizer)")
    if not steps:
        raise ValueError(
            f"{who}: the optimizer passed to watch took no step; must take at least one (is "
            "another optimizer stepped?)"
        )
