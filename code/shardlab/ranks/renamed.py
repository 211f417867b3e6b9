"""Two collectives under the names that torch 2.13 gave them: older ones warn there, or are alone.

Both take the output first. The group is to be named: `all_gather_single(out, x, group=group)`.
"""

from __future__ import annotations

import torch.distributed as dist

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
