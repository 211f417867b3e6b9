"""Part 5: expert parallelism. Each token's row goes to the ranks that have its experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn


class ExpertParallel(nn.Module):
    """Experts on the n ranks of `group`, and their tokens' way there and back.

    experts: this rank's own ones, equally many on each rank: the group's rank r has those with the
        numbers r E / n to (r + 1) E / n - 1, of E in all. Any modules from rows to rows.
    """

    def __init__(self, experts: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """For each token the sum of what its experts make of its row, each times its weight.

        x: [tokens, hidden], this rank's; ranks may have unequally many, and none.
        chosen: [tokens, k], numbers of k different experts. weights: [tokens, k].
        Returns [tokens, hidden]. Backward gives x, weights and the experts on all ranks their
        gradients; those of an expert come from the tokens of all ranks.

        An expert is called once at most, with all its rows. One that gets none may have gradients
        of zeros or None.

        Sent: forward takes k rows of each token to the experts' ranks and brings k back; backward
        the same, less what nobody wants. Beside that some whole numbers, and no row to a rank that
        has no use for it.
        """
        raise NotImplementedError
