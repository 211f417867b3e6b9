"""Parallel training equals one process: every row of the contract, on CPU ranks."""

from __future__ import annotations

from functools import cache

import contract
import pytest
from rows import ROWS
from torch import nn

from shardlab import context_parallel as cp
from shardlab import data_parallel, experts
from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp
from shardlab.ranks import RankError

TABLE = {row.name: row for row in ROWS}
FIRST = {row.technique: row.name for row in reversed(ROWS) if row.ranks > 1}


def test_each_row_has_a_name_of_its_own():
    assert len(TABLE) == len(ROWS)


def is_tried(row: contract.Row, quick: bool, weekly: bool) -> bool:
    return row.name in FIRST.values() if quick else weekly or "cpu" not in row.weekly


@cache
def find_differences(
    technique: str, size: int, quick: bool, weekly: bool
) -> dict[str, dict[str, float]] | Exception:
    """Return each row's largest difference on any rank, or the first failing row's error."""
    rows = [row for row in ROWS if (row.technique, row.ranks) == (technique, size)]
    rows = [row for row in rows if is_tried(row, quick, weekly)]
    try:
        return contract.measure_rows(rows, "cpu")
    except Exception as error:
        return error


@pytest.mark.timeout(600)  # the first test waits for all rows with its number of ranks
@pytest.mark.parametrize("name", TABLE)
def test_what_is_parallel_trains_as_one_process_does(name, request):
    row, chosen = TABLE[name], [*map(request.config.getoption, ("--quick", "--weekly"))]
    if not is_tried(row, *chosen):
        pytest.skip("the path of another row, in other numbers: --weekly")
    gaps = find_differences(row.technique, row.ranks, *chosen)
    if isinstance(gaps, Exception):
        raise gaps
    contract.check_gaps(row, gaps, "cpu")


# The test of the test: an omitted operation, and the row of two ranks that has to find it.
LEFT_OUT = {
    "data": (data_parallel, "average_gradients", lambda row: "way" in row.options),
    "experts": (experts, "average_gradients", lambda row: True),
    "context": (cp, "average_gradients", lambda row: True),
    "tensor": (sp, "sum_gradients", lambda row: row.layout.sequence_parallel),
}


@pytest.mark.parametrize("technique", LEFT_OUT)
def test_what_is_left_out_is_found(technique, monkeypatch):
    module, name, finds = LEFT_OUT[technique]
    monkeypatch.setattr(module, name, lambda *_: None)
    two = [row for row in ROWS if (row.technique, row.ranks) == (technique, 2)]
    row = next(row for row in reversed(two) if finds(row))
    # Weights that drift apart are found on the ranks, within the row.
    with pytest.raises((AssertionError, RankError), match="is allowed|in the row"):
        contract.check_gaps(row, contract.measure_rows([row], "cpu"), "cpu")


def test_a_norm_of_a_part_is_found(monkeypatch):
    def of_a_part(model, limit):
        return nn.utils.clip_grad_norm_(model.parameters(), limit)

    monkeypatch.setattr(tp, "clip_grad_norm_", of_a_part)
    row = next(row for row in ROWS if (row.technique, row.ranks) == ("tensor", 2) and row.clip)
    with pytest.raises(AssertionError, match="norms"):
        contract.check_gaps(row, contract.measure_rows([row], "cpu"), "cpu")
