"""A process group in a model that is copied or pickled: it stays the same group, found by its name.

A group is this process's place in a job, and no data: torch refuses to copy one, and with it every
model that knows its group. What is written for it is its name and its ranks. Read again in the same
job, or in another one that has made its groups alike, that is the group; elsewhere it is an error.
"""

from __future__ import annotations

import copyreg
from typing import Any

import torch.distributed as dist


def find(name: str, members: list[int]) -> dist.ProcessGroup:
    """This process's group of that name. Raises ValueError where it has none with these ranks."""
    known = dist.distributed_c10d._world.pg_names  # not public; link's groups stand there as well
    for group, other in known.items() if dist.is_initialized() else ():
        if other == name and dist.get_process_group_ranks(group) == members:
            return group
    raise ValueError(
        f"group: it was pickled with ranks {members}, of which this process knows no group {name!r}"
        "; allowed is a process of such a job, or a state dict instead"
    )


def reduced(group: dist.ProcessGroup) -> Any:
    """What stands for `group` in a copy or a pickle."""
    return find, (group.group_name, dist.get_process_group_ranks(group))


class Single:
    """A model whose gradients are heard of by hooks on its parameters: a copy would hear nothing.

    copy.deepcopy and pickle raise ValueError, instead of making what trains on its own in silence.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = type(self).__name__
        raise ValueError(
            f"{kind}: hooks on parameters and messages on their way are not copied; allowed is to "
            "copy or pickle the plain model before, or a state dict"
        )


copyreg.pickle(dist.ProcessGroup, reduced)
