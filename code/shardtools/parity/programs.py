"""Run the plain program, then the parallel one beside its record, and judge."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from shardlab import ranks as launch
from shardlab.common.arguments import PROCESSES, check_callable, check_number, check_whole

from .core import Matcher
from .judge import Judge
from .noise import DECIDES, DRAWS, FACTOR, Noise, eps, largest
from .record import Record, claim
from .recording import BEFORE, Watch
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
    into memory: a new or empty one, or that of an earlier comparison. timeout: seconds for each of
    the two.

    Raises ValueError for programs that cannot be compared: that take no step, or another number of
    them, train nothing, draw other numbers each time, or name their parameters otherwise.
    """
    check_callable(plain=plain, parallel=parallel)
    check_whole(1, PROCESSES, ranks=ranks)
    with _checked(draws, folder, timeout) as where:
        begin = time.perf_counter()
        record = _reference("plain", plain, draws, where, False, timeout)
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
    """Whether a run that is stopped and resumed computes what one that goes through does.

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

    `through` runs in one process, as the plain program of `check` does. `before` takes some of its
    steps on `ranks` ranks, and saves them to the folder `kept`; `after` loads them, and takes the
    rest. ranks: a pair where `after` runs on another number; techniques may differ, too.

    Raises ValueError as `check` does, and where the two together take another number of steps.
    """
    pair = ranks if isinstance(ranks, tuple) else (ranks, ranks)
    if len(pair) != 2:
        raise ValueError(f"ranks={ranks!r}: allowed is a whole number, or a pair of them")
    check_callable(through=through, before=before, after=after)
    for number in pair:
        check_whole(1, PROCESSES, ranks=number)
    with (
        _checked(draws, folder, timeout) as where,
        tempfile.TemporaryDirectory(prefix="resume-") as kept,
    ):
        record = _reference("through", through, draws, where, True, timeout)
        stops = lambda watch: before(watch, Path(kept))  # noqa: E731
        goes_on = lambda watch: after(watch, Path(kept))  # noqa: E731
        first = launch.run(lambda: matched(stops, record), pair[0], timeout=timeout)
        taken = refuse_before(record, first)
        report = Judge(record, first, taken).judge()
        if report.equal:
            second = launch.run(lambda: matched(goes_on, record, taken), pair[1], timeout=timeout)
            refuse_parallel(record, second, "after")
            report = report.then(Judge(record, second).judge())
    return report


@contextmanager
def _checked(draws: int, folder: str | Path | None, timeout: float) -> Iterator[Path | None]:
    """Check what both calls are given, and claim the folder, if there is one."""
    check_whole(1, 100, draws=draws)
    check_number(timeout=timeout)
    if folder is not None and not isinstance(folder, (str, Path)):
        raise ValueError(f"folder={folder!r}: allowed is a path, or None")
    with nullcontext() if folder is None else claim(Path(folder)):
        yield None if folder is None else Path(folder)


def _reference(
    who: str, plain: Program, draws: int, folder: Path | None, every: bool, timeout: float
) -> Record:
    """The plain program's record, made in a process of its own."""
    (record,) = launch.run(recorded, 1, plain, draws, folder, every, timeout=timeout)
    record.map()
    refuse_plain(record, who)
    refuse_other_runs(record)
    return record


def recorded(
    plain: Program, draws: int = DRAWS, folder: Path | None = None, every: bool = False
) -> Record:
    """What the plain program computes, and how far rounding moves it; in this process."""
    record = Record(folder)
    state = torch.get_rng_state()
    _run(plain, record, every=every)
    record.map()
    found = []
    for seed in range(1, draws + 1):
        torch.set_rng_state(state)  # what is drawn is drawn alike
        noise = Noise(record)
        _run(plain, noise, seed=seed, every=every)
        found.append(noise.found())
    record.noise = largest(record, found)
    record.save()
    return record


def matched(parallel: Program, record: Record, begins: int = 0) -> Matcher:
    """On a rank: what the parallel program computes, compared with the plain one's record.

    begins: how many steps a program that is resumed has behind it.
    """
    import torch.distributed as dist

    matcher = Matcher(record, dist.get_rank(), dist.get_world_size(), begins)
    _run(parallel, matcher, begins=begins)
    return matcher


def _run(program: Program, sink: Any, **options: Any) -> None:
    watch = Watch(sink, **options)
    try:
        program(watch)
    finally:
        watch.close()
    sink.watched, sink.optimized, sink.fewer = watch.watched, watch.optimized, watch.fewer
    gc.collect()  # hooks and modules hold each other: two models at once would count


def judged(record: Record, matchers: list[Matcher]) -> Report:
    """The report on a parallel program, of which each rank has its matcher."""
    refuse_parallel(record, matchers)
    return Judge(record, matchers).judge()


def refuse_plain(record: Record, who: str = "plain") -> None:
    """Raise ValueError for a plain program with which nothing can be compared."""
    _refuse(who, record.watched, record.optimized, record.steps)
    moved = any(
        part.value.any() for key, each in record.parts.items() if key.phase == "update"
        for part in each
    )  # fmt: skip
    if not moved:
        raise ValueError(
            f"{who}: no weight moved in its steps, so that two dead programs would be equal; "
            "needed is one that trains (requires_grad? a learning rate above 0? backward before "
            "step?)"
        )


def refuse_other_runs(record: Record) -> None:
    """Raise ValueError for a plain program that computes something else each time it runs."""
    same = "needed is the same torch.manual_seed in each run, before anything is drawn"
    for key, (of_all, *_) in record.noise.items():  # by which its runs with noise differ
        if key[:2] == (BEFORE, "weights") and of_all > 4 * eps(record.parts[key][0].value.dtype):
            raise ValueError(f"plain: each run begins with other weights ({key.name}); {same}")
    outputs = [key for key in record.noise if key[:2] == (0, "forward") and not record.scalar(key)]
    if outputs and all(record.noise[key][0] * FACTOR > DECIDES for key in outputs):
        raise ValueError(f"plain: each run computes other outputs (another batch?); {same}")


def refuse_before(record: Record, matchers: list[Matcher]) -> int:
    """Raise ValueError for a program that cannot be resumed; how many steps it took."""
    taken = max(m.steps for m in matchers)
    refuse_parallel(record, matchers, "before", taken)
    if taken >= record.steps:
        raise ValueError(
            f"before: it took {taken} optimizer steps, and the run that goes through "
            f"{record.steps}; needed are fewer, so that some are left to `after`"
        )
    return taken


def refuse_parallel(
    record: Record, matchers: list[Matcher], who: str = "parallel", needed: int | None = None
) -> None:
    """Raise ValueError for a parallel program that cannot be compared with the plain one."""
    begins, needed = matchers[0].begins, record.steps if needed is None else needed
    for m in matchers:  # one that skips its steps alone is not refused: it is wrong
        most = max(other.steps for other in matchers)
        _refuse(f"{who}: rank {m.rank}", m.watched, m.optimized, most)
    steps = {m.steps for m in matchers}
    if len(steps) == 1 and steps != {needed}:
        behind = f" after {begins} of those before it" if begins else ""
        raise ValueError(
            f"{who}: it took {steps.pop() - begins} optimizer steps{behind}, and the plain program "
            f"{needed}; needed are as many (micro-batches share a step)"
        )
    told = [any(k.phase == "samples" for k in m.seen) for m in matchers]
    if any(told) != any(key.phase == "samples" for key in record.parts):
        raise ValueError(
            f"{who}: it {'called' if any(told) else 'never called'} watch.samples(ids), other than "
            "the plain program; needed is a call in both, or in none"
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
            f"{who}: it has {' and '.join(said)}; give watch(…, rename=f) a function from its "
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
