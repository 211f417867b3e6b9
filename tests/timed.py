"""What a test claims of times that it has measured. Such a test carries the mark `alone`.

A claim that does not hold raises NotSeen: the test runs again, three times at most (conftest.py).
If it still does not hold, the test has failed, but for a machine that other work keeps busy: there
it is skipped, and says why. An equality is an `assert`, and no load excuses it.
"""

from __future__ import annotations

from shardlab.show.timed import UNSEEN, unseen


class NotSeen(AssertionError):
    """Measured times are not what was claimed of them."""


def timed(holds: bool, claim: str) -> None:
    """Raise NotSeen unless `holds`: what was claimed, and how busy the machine is just now."""
    if not holds:
        raise NotSeen(unseen(claim).removeprefix(UNSEEN))
