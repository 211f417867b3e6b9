"""Which ranks form which group: arithmetic on their numbers, before any of them starts.

N = d · p · t ranks stand in a box with three axes: d copies of the model ("dp"), p stages of each
copy ("pp"), t ranks that share each matrix ("tp"). A rank's number is its place in the box, read
like a number with three digits; `order` says which digit counts most. The last one changes from
each rank to the next, so its groups are neighbours: in one node, as long as it holds them.

The standard library alone: the picture and the bytes of an order need no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import permutations, product

from shardlab.arguments import (
    check_callable,
    check_count,
    check_kind,
    check_one_of,
    check_whole,
    told,
)

AXES = "dp", "pp", "tp"
WORDS = {"dp": "data", "pp": "pipeline", "tp": "tensor"}


@dataclass(frozen=True)
class Mesh:
    """d copies of p stages of t ranks each; `order` names the axes from the outermost in.

    Raises ValueError for degrees below 1, and for an order that is none of the six.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        check_count(dp=self.dp, pp=self.pp, tp=self.tp)
        check_count(ranks=self.ranks)
        named = isinstance(self.order, tuple | list) and tuple(self.order) in permutations(AXES)
        if not named:
            raise ValueError(f"order={told(self.order)}: allowed are dp, pp and tp, each once")

    @property
    def ranks(self) -> int:
        """N."""
        return self.dp * self.pp * self.tp

    def check(self, ranks: int) -> None:
        """Raise ValueError unless there are as many ranks as the degrees multiply to."""
        if ranks != self.ranks:
            degrees = f"dp={self.dp}, pp={self.pp} and tp={self.tp}"
            raise ValueError(
                f"ranks={told(ranks)}: allowed is {self.ranks}, the product of {degrees}"
            )

    def place(self, rank: int) -> dict[str, int]:
        """Where a rank stands along each axis: its number's digits."""
        check_whole(0, self.ranks - 1, rank=rank)
        found = {}
        for axis in reversed(self.order):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def rank(self, **place: int) -> int:
        """Who stands there: rank(dp=0, pp=1, tp=0)."""
        for axis in AXES:
            check_whole(0, getattr(self, axis) - 1, **{axis: place.get(axis)})
        return self._number(place)

    def _number(self, place: Mapping[str, int]) -> int:
        number = 0
        for axis in self.order:
            number = number * getattr(self, axis) + place[axis]
        return number

    def groups(self, axis: str) -> list[list[int]]:
        """The groups of an axis: ranks whose places differ along it, and along no other."""
        check_one_of(AXES, axis=axis)
        others = [other for other in self.order if other != axis]
        found = []
        for rest in product(*(range(getattr(self, other)) for other in others)):
            place = dict(zip(others, rest, strict=True))
            found.append([self._number(place | {axis: i}) for i in range(getattr(self, axis))])
        return found

    def edges(self, axis: str) -> Iterator[tuple[int, int]]:
        """Who sends to whom, as (from, to): rings of the groups "dp" and "tp"; both ways between
        neighbouring stages in "pp"; "twin": between the ends of a pipeline, for tied embeddings.
        """
        for group in self.groups("pp" if axis == "twin" else axis):
            if axis == "pp":
                for stage, later in zip(group[:-1], group[1:], strict=True):
                    yield from ((stage, later), (later, stage))
            elif axis == "twin" and len(group) > 1:
                yield from ((group[0], group[-1]), (group[-1], group[0]))
            elif axis in ("dp", "tp") and len(group) > 1:
                yield from zip(group, [*group[1:], group[0]], strict=True)

    def leaving(
        self, node: int, sent: Callable[[int], Mapping[str, float]]
    ) -> dict[str, list[float]]:
        """Bytes that leave each node of `node` ranks, by axis: a list with one entry for each node.

        sent(rank): bytes that it sends along "dp", "pp", "tp" and "twin". What a rank sends along
        an axis goes to its neighbours there, as rings and pipelines send it, in equal parts.
        Raises ValueError for nodes that the ranks do not fill.
        """
        check_whole(node=node)
        check_callable(sent=sent)
        if self.ranks % node:
            raise ValueError(f"node={node}: allowed are divisors of {self.ranks} ranks")
        found = {}
        for axis in (*AXES, "twin"):
            edges = list(self.edges(axis))
            ways = Counter(source for source, _ in edges)
            found[axis] = [0.0] * (self.ranks // node)
            for source, target in edges:
                if source // node != target // node:
                    found[axis][source // node] += sent(source).get(axis, 0) / ways[source]
        return found


def orders(mesh: Mesh) -> list[Mesh]:
    """The same degrees in every order that makes a difference: axes of one rank make none."""
    check_kind(Mesh, mesh=mesh)
    narrow = [axis for axis in AXES if getattr(mesh, axis) == 1]
    wide = permutations(axis for axis in AXES if axis not in narrow)
    return [replace(mesh, order=(*narrow, *order)) for order in wide]


def said(mesh: Mesh, axis: str, node: int) -> str:
    """A line on an axis: how many groups of how many ranks, and how many leave their node."""
    groups = mesh.groups(axis)
    beyond = sum(len({rank // node for rank in group}) > 1 for group in groups)
    where = {0: "none leaves its node", len(groups): "all leave their node"}
    told = where.get(beyond, f"{beyond} of them leave their node")
    return f"{WORDS[axis]}: {len(groups)} × {getattr(mesh, axis)} ranks, {told}"


def packed(groups: list[list[int]]) -> list[list[list[int]]]:
    """Groups in as few rows as let none pass over another."""
    rows: list[list[list[int]]] = []
    for group in sorted(groups):
        free = [row for row in rows if row[-1][-1] < group[0]]
        if free:
            free[0].append(group)
        else:
            rows.append([group])
    return rows
