"""What only all ranks together show: rows that are nowhere, copies that differ, what is missing."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .causes import listed, spans
from .noise import Tolerance
from .places import apart
from .record import Record
from .recording import BEFORE, Key


def on_no_rank(key: Key, near: Tolerance, ranks: list[Any]) -> str:
    """Of which rows of an output nobody has one, or an equal one; "" where all are there."""
    whole = near.whole
    if whole.dim() < 2:
        return ""
    had = _had(key, whole, ranks)
    width = whole.shape[-1]
    rows, matrix = had.view(-1, width).any(-1), whole.reshape(-1, width)
    gone = (~rows).nonzero().flatten()
    if not len(gone) or not rows.any():
        return ""
    far = apart(matrix[gone].double(), matrix[rows].double()).amin(1)
    gone = gone[far > near.of_row * near.size * width**0.5]
    said = f"{len(gone)} of {len(matrix)} rows are on no rank ({spans(gone)}): "
    return said + _who(key, ranks) if len(gone) else ""


def _had(key: Key, whole: Tensor, ranks: list[Any]) -> Tensor:
    """Of each number of a whole tensor, whether some rank has it."""
    had = torch.zeros(whole.shape, dtype=torch.bool)
    for matcher in ranks:
        for seen in matcher.seen.get(key, ()):
            if seen.place is not None:
                seen.place.mark(had)
    return had


def numbers_on_no_rank(key: Key, whole: Tensor, ranks: list[Any]) -> str:
    """Of a weight, which numbers nobody has, nor equal ones; "" where all are there."""
    had = _had(key, whole, ranks)
    if had.all() or torch.isin(whole[~had], whole[had]).all():
        return ""
    said = f"{int((~had).sum())} of {had.numel()} numbers are on no rank: {_who(key, ranks)}"
    return f"{said} (parts that are drawn with one seed, or cut alike?)"


def _who(key: Key, ranks: list[Any]) -> str:
    at = {m.rank: [s.place for s in m.seen.get(key, ()) if s.place] for m in ranks}
    for one, places in at.items():
        twins = [
            rank
            for rank, others in at.items()
            if rank >= one and others and len(others) == len(places)
            if all(a.same(b) for a, b in zip(others, places, strict=True))
        ]
        if len(twins) > 1:
            return f"ranks {listed(twins)} have the same ones"
    return f"nobody {'has' if key.phase == 'weights' else 'computed'} them"


def samples(key: Key, plain: Record, ranks: list[Any]) -> str:
    """What is wrong with the samples of a step; "" where all ranks together have the plain ones.

    Those that ranks share are the same on each of them, and count once.
    """

    def ids(parts: Iterable[Any]) -> Counter[int]:
        return Counter(i for part in parts for i in part.value.tolist())

    wanted = ids(plain.parts[key])
    at = {m.rank: ids(s.part for s in m.seen.get(key, ())) for m in ranks}
    distinct: list[Counter[int]] = []
    for mine in at.values():
        if mine and mine not in distinct:
            distinct.append(mine)
    if wanted in (sum(distinct, Counter()), sum(at.values(), Counter())):
        return ""
    have = sum(distinct, Counter())
    shared = [rank for rank, mine in at.items() if mine == distinct[0]] if distinct else []
    same = f" (ranks {listed(shared)} have the same ones)" if len(shared) > 1 else ""
    said = []
    for found, words in (
        (wanted - have, f"are on no rank{same}"),
        (Counter({i: n for i, n in (have - wanted).items() if i in wanted}), "count too often"),
        (Counter({i: n for i, n in have.items() if i not in wanted}), "are none of this step's"),
    ):
        if found:
            which = sorted(found)
            who = [rank for rank, mine in at.items() if set(mine) & set(which)]
            where = f" (rank{'s' if len(who) > 1 else ''} {listed(who)})" if who else ""
            said.append(f"{spans(torch.tensor(which))} {words}{where}")
    for step in {k.step for k in plain.parts if k.phase == "samples"} - {key.step}:
        if have and not have - ids(plain.parts[key._replace(step=step)]):
            said.append(f"they are step {step + 1}'s")
    return "; ".join(said)


def dtypes(keys: Iterable[Key], plain: Record, ranks: list[Any]) -> list[tuple[Key, str, str]]:
    """Outputs that have other dtypes than the plain ones: key, this dtype, the plain one's."""
    found = []
    for key in keys:
        mine = {s.part.value.dtype for m in ranks for s in m.seen.get(key, ())}
        other = mine - {part.value.dtype for part in plain.parts[key]}
        if key.phase == "forward" and other:
            names = (str(d).removeprefix("torch.") for d in (other.pop(), plain.dtype(key)))
            found.append((key, *names))
    return found


def checksum(value: torch.Tensor) -> int:
    """Of its bits: copies have the same."""
    return zlib.crc32(value.contiguous().flatten().view(torch.uint8).numpy())


def copies_differ(parts: list[tuple[Any, int, Any]]) -> bool:
    """Whether copies of one thing have other bits on other ranks: they drift apart."""
    for n, (matcher, _, seen) in enumerate(parts):
        for other, _, theirs in parts[n + 1 :]:
            apart = other.rank != matcher.rank and seen.bits != theirs.bits
            if apart and seen.place and theirs.place and seen.place.same(theirs.place):
                return True
    return False


def lacks(key: Key, matcher: Any) -> bool:
    """Whether a rank has a weight, and not the gradient or update that belongs to it."""

    def there(key: Key) -> int:
        return sum(1 for seen in matcher.seen.get(key, ()) if seen.part.value.numel())

    return there(key) < there(Key(matcher.begins or BEFORE, "weights", key.name))


def skipped(ranks: list[Any], end: int) -> int:
    """Return the first step that a rank did not end: all its modules have more calls in it."""
    calls = [(m, key, len(parts)) for m in ranks for key, parts in m.seen.items()]
    calls = sorted((c for c in calls if c[1].phase == "forward"), key=lambda c: -c[2])
    fewest = {key.name: n for _, key, n in calls}
    found = [m.steps for m in ranks]
    for bad in (m for m in ranks if m.steps != end):
        usual = {key.step for m, key, n in calls if m is bad and n == fewest[key.name]}
        found += {key.step for m, key, _ in calls if m is bad} - usual
    return min(found)


def complete(key: Key, plain: Record, matcher: Any) -> bool:
    """Whether a module has all its children on a rank: a stage of a pipeline is not the model."""
    prefix = key.name.partition("[")[0]
    prefix += "." if prefix else ""

    def children(keys: Iterable[Key]) -> set[str]:
        names = [k.name for k in keys if k.phase in ("forward", "weights")]
        return {n[len(prefix) :].split(".")[0] for n in names if n.startswith(prefix)} - {""}

    return children(plain.parts) <= children(matcher.seen)


def groupings(ranks: int) -> Iterator[list[list[int]]]:
    """Ways to have groups of equal size: all together, neighbours, every so many."""
    yield [list(range(ranks))]
    for size in (s for s in range(2, ranks) if ranks % s == 0):
        step = ranks // size
        yield [list(range(i, i + size)) for i in range(0, ranks, size)]
        yield [list(range(i, ranks, step)) for i in range(step)]
