"""Assertions on measured times, for tests with the mark `alone`.

    with timing_claims():
        assert ours < theirs

An assertion that fails inside raises TimingClaimFailed: the test runs again, three times at most
(conftest.py). If it still fails, the test has failed, unless other programs keep the machine busy:
then the test is skipped, with the reason. Assertions outside, such as equalities, have no excuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardlab.common.show.timing import UNSEEN_PREFIX, format_unseen_claim


class TimingClaimFailed(AssertionError):
    """Failure of a claim on measured times."""


@contextmanager
def timing_claims() -> Iterator[None]:
    """Turn an AssertionError into a TimingClaimFailed that says how busy the machine is."""
    try:
        yield
    except AssertionError as error:
        raise TimingClaimFailed(
            format_unseen_claim(str(error)).removeprefix(UNSEEN_PREFIX)
        ) from error
