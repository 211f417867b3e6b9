"""The exercises of lesson `TOPIC`."""

from __future__ import annotations

import torch

from shardcourse.exercises.forms import Part, Trial, on_ranks


@on_ranks("my_TOPIC", (2, 4), says="Equal to the mean of one process, on 2 and on 4 ranks.")
def _(size: int) -> Trial:
    x_N = torch.arange(12.0)
    own = [part.mean() for part in x_N.chunk(size)]
    mistakes = {"That is the mean of this rank's numbers alone.": own}
    return Trial([Part("the mean", x_N.mean(), mistakes, 1e-6)], [(x,) for x in x_N.chunk(size)])
