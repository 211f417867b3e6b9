"""Layers of unequal cost, dealt to stages in order: the slowest stage sets the pace of all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """How many layers in a row each of `parts` gets, so that the most expensive part is cheapest.

    costs: of each layer, in any unit. Where several ways are equally good, the parts come out as
    equal as possible, and larger ones first, because the last part has the loss beside its layers.

    Dynamic programming: the best cut of the first i layers into k parts is a best cut of the first
    j < i into k - 1 parts, and one part more; parts · layers² steps.

    Raises ValueError for costs below 0 or not finite, and for fewer layers than parts.
    """
    costs = list(costs)
    if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        raise ValueError(f"costs={costs}: allowed are finite numbers, 0 or more")
    if isinstance(parts, bool) or not isinstance(parts, int) or not 1 <= parts <= len(costs):
        raise ValueError(f"parts={parts!r}: allowed are 1 to {len(costs)} for {len(costs)} layers")
    # Whole numbers, in a unit that fits all: rounded sums would tell equal ways apart, and so would
    # the rounding of 4/7 to a float. So costs are the nearest simple shares of the largest one.
    largest = max(costs) or 1
    exact = [Fraction(cost / largest).limit_denominator(10**6) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    upto = [0, *accumulate(int(cost * unit) for cost in exact)]  # the cost of the first i layers
    many = range(len(upto))
    # Of the best cut of the first i layers, its largest part.
    most: list[float] = [0, *[math.inf] * len(costs)]
    for _ in range(parts):
        most = [
            min((max(most[j], upto[i] - upto[j]) for j in range(i)), default=math.inf) for i in many
        ]
    # Once more among the cuts whose parts all stay below that: the least sum of squares is the most
    # even one. Sizes are kept negative, so that of equals the first part with more layers wins.
    limit = most[-1]
    even: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for _ in range(parts):
        even = {
            i: min((even[j][0] + (upto[i] - upto[j]) ** 2, [*even[j][1], j - i]) for j in fits)
            for i in many
            if (fits := [j for j in range(i) if j in even and upto[i] - upto[j] <= limit])
        }
    return [-size for size in even[len(costs)][1]]
