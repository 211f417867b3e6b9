"""The doctor: links by nccl's rules, and the GPU's times."""

from __future__ import annotations

from shardlab import ranks
from shardtools.cluster.doctor import pairs

from .common import on, world


class _Alone:
    """Rendezvous of ranks that are in a group anyway."""

    def set_step(self, words, waiting=False): ...


@on(1, 2, 4, daily=(2, 4))
def check_links():
    """Check that every pair meets once, in rounds that nccl can connect."""
    group, rank, size = world()
    found = pairs.measure_links(_Alone(), group, ranks.device(), ["here"] * size)
    assert sorted(link["pair"][1] for link in found) == list(range(rank + 1, size))
    assert all(link["latency"] > 0 and link["bandwidth"] > 0 for link in found)
    clock = pairs.measure_clock_offset(_Alone(), group)
    assert abs(clock["ahead"]) < 5
