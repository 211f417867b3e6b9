"""Comparisons: run the plain program, then the parallel one beside its record, and judge."""

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
from shardlab.common.arguments import PROCESSES, check_whole

from .core import Matcher
from .judge import Judge
from .noise import DECIDES, DRAWS, FACTOR, Noise, eps, largest
from .record import Record, new_folder
from .recording import BEFORE, Sink, Watch
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
    them changes. Inputs, first weights and optimizer options must be the same; `plain` runs once,
    and `draws` times more with every tensor moved by one unit in the last place, to measure what
    rounding does. folder: where its tensors are written, for models whose outputs do not fit
    into memory: a new one, or an empty one. timeout: seconds for each of the two.

    Raises ValueError for programs that cannot be compared: they take no step, or another number of
    them, train nothing, draw other numbers each time, or name their parameters differently.
    """
    check_whole(1, PROCESSES, ranks=ranks)
    begin = time.perf_counter()
    record = _reference("plain", plain, draws, folder, False, timeout)
    middle = time.perf_counter()
    matchers = launch.run(lambda: matched(parallel, record), ranks, timeout=timeout)
    report = judged(record, matchers)
    now = time.perf_counter()
    report.seconds = {"plain": middle - begin, "parallel": now - middle}
    return report


def check_resume(
    through: Program,
    before: Callable[[Watch, Path], Any],
    after: Callable[[Watch, Path], Any],
    ranks: int | tuple[int, int] = 2,
    draws: int = DRAWS,
    folder: str | Path | None = None,
    timeout: float = 600.0,
) -> Report:
    """Check that a run that is stopped and resumed computes what an uninterrupted run does.

        def through(watch):
            train(watch, *made(), steps=range(4))

        def before(watch, kept):
            model, optimizer = made()
            train(watch, model, optimizer, steps=range(2))
            save(model, optimizer, kept)

        def after(watch, kept):
            model, optimizer = made()
            load(model, optimizer, kept)             # first of all; then it is watched
            train(watch, model, optimizer, steps=range(2, 4))

        print(parity.check_resume(through, before, after, ranks=(2, 4)))

    `through` runs in one process, like the plain program of `check`. `before` takes some of its
    steps on `ranks` ranks, and saves them to the folder `kept`; `after` loads them, and takes the
    rest. ranks: a pair if `after` runs on another number; techniques may differ, too.

    Raises ValueError as `check` does, and where the two together take another number of steps.
    """
    pair = ranks if isinstance(ranks, tuple) else (ranks, ranks)
    for number in pair:
        check_whole(1, PROCESSES, ranks=number)
    record = _reference("through", through, draws, folder, True, timeout)
    with tempfile.TemporaryDirectory(prefix="resume-") as kept:
        stops = lambda watch: before(watch, Path(kept))  # noqa: E731
        goes_on = lambda watch: after(watch, Path(kept))  # noqa: E731
        first = launch.run(lambda: matched(stops, record), pair[0], timeout=timeout)
        report, taken = judged_before(record, first)
        if report.equal:
            second = launch.run(lambda: matched(goes_on, record, taken), pair[1], timeout=timeout)
            report = report.then(judged(record, second, "after"))
    return report


def first_layers(model: nn.Module, layers: int = 2) -> nn.Module:
    """Cut a model's lists of layers to their first ones, in place; return the model.

    For a model that does not fit: in both programs, where it is made, before it is wrapped or
    sharded (on torch's meta device if the whole does not fit). Techniques that cut layers' tensors
    (tensor, sequence, context, expert parallelism, ZeRO) do the same in two layers as in all; a
    pipeline needs as many layers as it has parts. Inner lists, such as experts, stay. The report
    names the cut.

    Raises ValueError for a model that has no list of more layers of one kind.
    """
    check_whole(1, layers=layers)
    inside: tuple[str, ...] = ()
    had = 0
    for name, each in list(model.named_modules()):
        if not isinstance(each, nn.ModuleList) or name.startswith(inside):
            continue
        inside += (f"{name}.",)
        if len(each) > layers and len({type(layer) for layer in each}) == 1:
            had = max(had, len(each))
            del each[layers:]
    if not had:
        raise ValueError(
            f"model={type(model).__name__}: it has no ModuleList of more than {layers} layers of "
            "one kind; needed is one"
        )
    if hasattr(getattr(model, "config", None), "num_hidden_layers"):  # as transformers' count them
        model.config.num_hidden_layers = layers
    model.fewer = f"{layers} of {had} layers, the same widths"
    return model


# The work of one process in a comparison


def _reference(
    who: str,
    plain: Program,
    draws: int,
    folder: str | Path | None,
    every: bool,
    timeout: float,
) -> Record:
    """Return the plain program's record, made in a process of its own."""
    check_whole(1, 100, draws=draws)
    where = None if folder is None else new_folder(Path(folder))
    (record,) = launch.run(recorded, 1, plain, draws, where, every, timeout=timeout)
    refuse_plain(record, who)
    return record


def recorded(
    plain: Program, draws: int = DRAWS, folder: Path | None = None, every: bool = False
) -> Record:
    """Record what the plain program computes, and how far rounding moves it; in this process."""
    record = Record(folder)
    state = torch.get_rng_state()
    _run(plain, Watch(record, every=every))
    record.map()
    found = []
    for seed in range(1, draws + 1):
        torch.set_rng_state(state)  # each run draws the same random numbers
        noise = Noise(record)
        _run(plain, Watch(noise, seed=seed, every=every))
        found.append(noise.found())
    record.noise = largest(record, found)
    return record


def matched(parallel: Program, record: Record, begins: int = 0) -> Matcher:
    """Match the parallel program's tensors on a rank with the plain program's record.

    begins: steps that were taken before a resumed program.
    """
    matcher = Matcher(record, dist.get_rank(), dist.get_world_size(), begins)
    _run(parallel, Watch(matcher, begins=begins))
    return matcher


def _run(program: Program, watch: Watch) -> None:
    try:
        program(watch)
    finally:
        watch.close()
    gc.collect()  # hooks and modules hold each other: else two models would be in memory


# Reports


def judged(record: Record, matchers: list[Matcher], who: str = "parallel") -> Report:
    """Return the report on a parallel program from the matchers of its ranks."""
    refuse_parallel(record, matchers, who, record.steps)
    return Judge(record, matchers).judge()


def judged_before(record: Record, matchers: list[Matcher]) -> tuple[Report, int]:
    """Return the report on a program that stops, and the number of its steps."""
    taken = max(m.steps for m in matchers)
    refuse_parallel(record, matchers, "before", taken)
    if taken >= record.steps:
        raise ValueError(
            f"before: it took {taken} optimizer steps, and the run that goes through "
            f"{record.steps}; needed are fewer, so that some are left to `after`"
        )
    return Judge(record, matchers, taken).judge(), taken


def refuse_plain(record: Record, who: str = "plain") -> None:
    """Raise ValueError for a plain program that trains nothing, or differs from run to run."""
    _refuse(who, record, record.steps)
    updates = (parts for key, parts in record.parts.items() if key.phase == "update")
    if not any(part.value.any() for parts in updates for part in parts):
        raise ValueError(
            f"{who}: no weight moved in its steps, so that two dead programs would be equal; "
            "needed is one that trains (requires_grad? a learning rate above 0? backward before "
            "step?)"
        )
    same = "needed is the same torch.manual_seed in each run, before anything is drawn"
    for key, (of_all, *_) in record.noise.items():  # differences between runs with noise
        if key[:2] == (BEFORE, "weights") and of_all > 4 * eps(record.parts[key][0].value.dtype):
            raise ValueError(f"{who}: each run begins with other weights ({key.name}); {same}")
    outputs = [key for key in record.noise if key[:2] == (0, "forward") and not record.scalar(key)]
    if outputs and all(record.noise[key][0] * FACTOR > DECIDES for key in outputs):
        raise ValueError(f"{who}: each run computes other outputs (another batch?); {same}")


def refuse_parallel(record: Record, matchers: list[Matcher], who: str, needed: int) -> None:
    """Raise ValueError for a parallel program that cannot be compared with the plain one."""
    steps, begins = {m.steps for m in matchers}, matchers[0].begins
    for m in matchers:  # a rank that skips steps alone is not refused, but reported as wrong
        _refuse(f"{who}: rank {m.rank}", m, max(steps))
    if len(steps) == 1 and steps != {needed}:
        behind = f" after {begins} of those before it" if begins else ""
        raise ValueError(
            f"{who}: it took {steps.pop() - begins} optimizer steps{behind}, and the plain program "
            f"{needed}; needed are as many (micro-batches share a step)"
        )
    told = any(key.phase == "samples" for m in matchers for key in m.seen)
    if told != any(key.phase == "samples" for key in record.parts):
        raise ValueError(
            f"{who}: it {'called' if told else 'never called'} watch.samples(ids), other than "
            "the plain program; needed is a call in both, or in none"
        )
    own = {key.name for key in record.parts if key.phase == "weights"}
    theirs = {key.name for m in matchers for key in m.seen if key.phase == "weights"}
    said = [
        f"{len(names)} {words} ({', '.join(sorted(names)[:3])})"
        for names, words in (
            (theirs - own, "parameters that the plain one lacks"),
            (own - theirs, "fewer, on no rank"),
        )
        if names
    ]
    if said:
        raise ValueError(
            f"{who}: it has {' and '.join(said)}; give watch(…, rename=f) a function from its "
            "names to the plain program's"
        )


def _refuse(who: str, sink: Sink, steps: int) -> None:
    if not sink.watched:
        raise ValueError(f"{who}: it never called watch(model, optimizer); needed is one call")
    if not sink.optimized:
        raise ValueError(
            f"{who}: watch(model) was given no optimizer; needed is the one that steps"
        )
    if not steps:
        raise ValueError(
            f"{who}: the optimizer that watch was given took no step; needed is one at least "
            "(is another optimizer stepped?)"
        )
