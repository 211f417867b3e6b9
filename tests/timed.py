"""What a test asserts of times that it has measured. Such a test carries the mark `alone`.

    with on_time():
        assert ours < theirs

An assertion that fails in there raises NotSeen: the test runs again, three times at most
(conftest.py). If it still fails, the test has failed, but for a machine that other work keeps busy:
there it is skipped, and says why. No load excuses an assertion outside, an equality for instance.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardlab.common.show.timed import UNSEEN, unseen


class NotSeen(AssertionError):
    """Measured times are not what was claimed of them."""


@contextmanager
def on_time() -> Iterator[None]:
    """Make of an AssertionError a NotSeen that says how busy the machine is just now."""
    try:
        yield
    except AssertionError as error:
        raise NotSeen(unseen(str(error)).removeprefix(UNSEEN)) from error
