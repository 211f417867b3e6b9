"""Assertions on measured times, for tests with the mark `alone`.

    with on_time():
        assert ours < theirs

An assertion that fails inside raises NotSeen: the test runs again, three times at most
(conftest.py). If it still fails, the test has failed, unless other programs keep the machine busy:
then the test is skipped, with the reason. Assertions outside, such as equalities, have no excuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardlab.common.show.timed import UNSEEN, unseen


class NotSeen(AssertionError):
    """Failure of a claim on measured times."""


@contextmanager
def on_time() -> Iterator[None]:
    """Turn an AssertionError into a NotSeen that says how busy the machine is."""
    try:
        yield
    except AssertionError as error:
        raise NotSeen(unseen(str(error)).removeprefix(UNSEEN)) from error
