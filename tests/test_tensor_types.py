"""Tensor types equals one process; one test per promise."""

import pytest
import torch
import torch.distributed as dist

from shardlab import ranks
from shardlab.tensor_types import mean


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_mean_is_that_of_one_process(size):
    x_N = torch.arange(8.0)  # whole numbers: every order of adding gives the same bits

    def work():
        return mean(x_N.chunk(size)[dist.get_rank()].to(ranks.device()), dist.group.WORLD).item()

    assert ranks.run(work, size) == [x_N.mean().item()] * size


def test_no_numbers_are_refused():
    with pytest.raises(ValueError, match="x_n is empty: allowed are one number and more"):
        mean(torch.zeros(0), None)
