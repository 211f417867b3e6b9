"""The checker and the production library agree on random programs."""

import importlib.util
import warnings

import pytest
import torch.distributed as dist
from tensor_programs import OPERATORS

from shardlab import ranks
from shardlab.sequence_parallel.core import _GatherSequence, _ReduceScatterSequence
from shardlab.tensor_parallel.core import _CopyTo, _ReduceFrom
from shardlab.tensor_parallel.gather import _GatherLast, _SplitLast
from shardlab.tensor_types import random_programs, spmd_rules

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("spmd_types") is None, reason="spmd_types is not installed"
)


def run_both(chosen):
    warnings.filterwarnings("ignore", category=FutureWarning)  # about names of torch's collectives
    group = dist.group.WORLD
    for operator in (_CopyTo, _ReduceFrom, _GatherLast, _SplitLast):
        spmd_rules.attach_rule(operator)
    for operator in (_GatherSequence, _ReduceScatterSequence):
        spmd_rules.attach_rule(operator, dimension=1)

    def make_programs():
        given = random_programs.make_parameters(0, group)
        return {
            n: spmd_rules.declare_types(x, group=random_programs.PARAMETER_TYPES[n])
            for n, x in given.items()
        }

    def check_theirs(program):
        def step(given):
            random_programs.run_program(
                program, given, group, OPERATORS, lambda y: spmd_rules.declare_types(y, group="P")
            )

        return spmd_rules.find_error(step, make_programs, {"group": group})

    return [(random_programs.find_type_error(p, group, OPERATORS), check_theirs(p)) for p in chosen]


def test_both_say_the_same_of_500_random_programs():
    chosen = random_programs.draw_programs(500, seed=2)
    said = ranks.run_with_fake_group(run_both, 2, chosen)
    differ = [
        p for p, (ours, theirs) in zip(chosen, said, strict=True) if bool(ours) != bool(theirs)
    ]
    assert differ == []
    passed = sum(not ours for ours, _ in said)
    assert 100 < passed < 400
