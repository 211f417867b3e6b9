"""Run the plain program, then the parallel one beside its record, and judge."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardlab import ranks as launch
from shardlab.arguments import PROCESSES, check_callable, check_number, check_whole

from .core import Judge, Matcher
from .noise import DECIDES, DRAWS, FACTOR, Noise, eps, largest
from .record import Record
from .recording import Watch
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
    """Whether `parallel`, on so many ranks, computes what `plain` computes in one process.

        def plain(watch):
            model, optimizer = ...
            watch(model, optimizer)
            for batch in batches:                    # a few steps of them
                ...

        print(parity.check(plain, parallel, ranks=2))

    Both are functions of `watch`, which they call once, before their first step; nothing else of
    them changes. Their inputs, first weights and optimizers' options have to be the same; `plain`
    runs once, and `draws` times more with every tensor moved by one unit in the last place, to see
    what rounding does. folder: where its tensors are written, for models whose outputs do not fit
    into memory; None keeps them there. timeout: seconds for each of the two.

    Raises ValueError for programs that cannot be compared: that take no step, or another number of
    them, train nothing, draw other numbers each time, or name their parameters otherwise.
    """
    check_callable(plain=plain, parallel=parallel)
    check_whole(1, PROCESSES, ranks=ranks)
    check_whole(1, 100, draws=draws)
    check_number(timeout=timeout)
    if folder is not None and not isinstance(folder, (str, Path)):
        raise ValueError(f"folder={folder!r}: allowed is a path, or None")
    begin = time.perf_counter()
    where = None if folder is None else Path(folder)
    (record,) = launch.run(recorded, 1, plain, draws, where, timeout=timeout)
    record.map()
    refuse_plain(record)
    refuse_other_runs(record)
    middle = time.perf_counter()
    matchers = launch.run(lambda: matched(parallel, record), ranks, timeout=timeout)
    report = judged(record, matchers)
    now = time.perf_counter()
    report.seconds = {"plain": middle - begin, "parallel": now - middle}
    return report


def recorded(plain: Program, draws: int = DRAWS, folder: Path | None = None) -> Record:
    """What the plain program computes, and how far rounding moves it; in this process."""
    record = Record(folder)
    state = torch.get_rng_state()
    _run(plain, record, None)
    record.map()
    found = []
    for seed in range(1, draws + 1):
        torch.set_rng_state(state)  # what is drawn is drawn alike
        noise = Noise(record)
        _run(plain, noise, seed)
        found.append(noise.found())
    record.noise = largest(record, found)
    record.save()
    return record


def matched(parallel: Program, record: Record) -> Matcher:
    """On a rank: what the parallel program computes, compared with the plain one's record."""
    import torch.distributed as dist

    matcher = Matcher(record, dist.get_rank(), dist.get_world_size())
    _run(parallel, matcher, None)
    return matcher


def _run(program: Program, sink: Any, seed: int | None) -> None:
    watch = Watch(sink, seed)
    program(watch)
    sink.watched, sink.optimized = watch.watched, watch.optimized
    gc.collect()  # hooks and modules hold each other: two models at once would count


def judged(record: Record, matchers: list[Matcher]) -> Report:
    """The report on a parallel program, of which each rank has its matcher."""
    refuse_parallel(record, matchers)
    return Judge(record, matchers).judge()


def refuse_plain(record: Record) -> None:
    """Raise ValueError for a plain program with which nothing can be compared."""
    _refuse("plain", record.watched, record.optimized, record.steps)
    moved = any(
        part.value.any() for key, each in record.parts.items() if key.phase == "update"
        for part in each
    )  # fmt: skip
    if not moved:
        raise ValueError(
            "plain: no weight moved in its steps, so that two dead programs would be equal; needed "
            "is one that trains (requires_grad? a learning rate above 0? backward before step?)"
        )


def refuse_other_runs(record: Record) -> None:
    """Raise ValueError for a plain program that computes something else each time it runs."""
    same = "needed is the same torch.manual_seed in each run, before anything is drawn"
    for key, (of_all, _) in record.noise.items():  # by which its runs with noise differ
        if key.phase == "weights" and of_all > 4 * eps(record.parts[key][0].value.dtype):
            raise ValueError(f"plain: each run begins with other weights ({key.name}); {same}")
    outputs = [key for key in record.noise if key[:2] == (0, "forward") and not record.scalar(key)]
    if outputs and all(record.noise[key][0] * FACTOR > DECIDES for key in outputs):
        raise ValueError(f"plain: each run computes other outputs (another batch?); {same}")


def refuse_parallel(record: Record, matchers: list[Matcher]) -> None:
    """Raise ValueError for a parallel program that cannot be compared with the plain one."""
    for m in matchers:  # one that skips its steps alone is not refused: it is wrong
        most = max(other.steps for other in matchers)
        _refuse(f"parallel: rank {m.rank}", m.watched, m.optimized, most)
    steps = {m.steps for m in matchers}
    if len(steps) == 1 and steps != {record.steps}:
        raise ValueError(
            f"parallel: it took {steps.pop()} optimizer steps, and the plain program "
            f"{record.steps}; needed are as many (micro-batches share a step)"
        )
    own = {key.name for key in record.parts if key.phase == "weights"}
    theirs = {key.name for m in matchers for key in m.seen if key.phase == "weights"}
    foreign, lacking = sorted(theirs - own), [name for name in sorted(own) if name not in theirs]
    if foreign or lacking:
        said = []
        if foreign:
            said.append(
                f"{len(foreign)} parameters that the plain one lacks ({', '.join(foreign[:3])})"
            )
        if lacking:
            said.append(f"on no rank {len(lacking)} of the plain one's ({', '.join(lacking[:3])})")
        raise ValueError(
            f"parallel: it has {' and '.join(said)}; give watch(…, rename=f) a function from its "
            "names to the plain program's"
        )


def _refuse(who: str, watched: bool, optimized: bool, steps: int) -> None:
    if not watched:
        raise ValueError(f"{who}: it never called watch(model, optimizer); needed is one call")
    if not optimized:
        raise ValueError(
            f"{who}: watch(model) was given no optimizer; needed is the one that steps"
        )
    if not steps:
        raise ValueError(
            f"{who}: the optimizer that watch was given took no step; needed is one at least "
            "(is another optimizer stepped?)"
        )
