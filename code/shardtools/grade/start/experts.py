"""Part 5: expert parallelism. Each token's row is sent to the ranks that have its experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn


class ExpertParallel(nn.Module):
    """Experts on the n ranks of `group`, which exchange tokens.

    experts: this rank's, equally many on each rank, as any modules from rows to rows: the group's
        rank r has the numbers r E / n to (r + 1) E / n - 1 of E in all.
    """

    def __init__(self, experts: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return for each token the weighted sum of its experts' outputs.

        x: [tokens, hidden], this rank's; ranks may have different numbers of tokens, and none.
        chosen: [tokens, k], numbers of k different experts. weights: [tokens, k].
        Returns [tokens, hidden]. Backward gives x, weights and the experts on all ranks their
        gradients; an expert's gradients come from the tokens of all ranks.

        An expert is called at most once, with all its rows. An expert without rows may have
        gradients of zeros or None.

        Sent: forward sends k rows of each token to the experts' ranks and k back; backward the
        same, less gradients that are not needed. In addition some whole numbers, and no unused
        rows.
        """
        raise NotImplementedError
