"""Exercises of the lesson `elastic`."""

from __future__ import annotations

from shardcourse.exercises.forms import add_cases

add_cases(
    "my_first_ranks",
    (
        (([4, 2, 4],), [0, 4, 6], "Ranks 0 to 3 are on the first node, 4 and 5 on the second."),
        (([1, 3],), [0, 1], "One rank is on the first node, so the second begins with rank 1."),
        (([8],), [0], "Ranks count from 0."),
    ),
    equal=lambda got, want: list(got) == want,
    success="Right: as many ranks come before a node as the nodes before it have.",
)

_SEEN = [(0.0, 0, 1), (0.0, 1, 1), (1.0, 0, 2), (1.0, 1, 1), (2.0, 0, 3), (2.0, 1, 1)]
_ANEW = [(0.0, 0, 9), (3.0, 0, 1)]  # an agent that was restarted counts from 1 again
add_cases(
    "my_silent",
    (
        ((_SEEN, 2.0, 1.5), {1}, "Agent 1's beat is old, though the host has read it again."),
        ((_SEEN, 2.0, 2.0), set(), "2 s are not more than 2 s."),
        ((_SEEN, 5.0, 2.0), {0, 1}, "Nobody has been heard for 3 s."),
        ((_ANEW, 3.5, 1.0), set(), "A beat that is smaller than before is a sign of life as well."),
    ),
    equal=lambda got, want: set(got) == want,
    success="Right: a beat counts from when it was first seen, by the host's own clock.",
)

_ERRORS = [(5.2, 0, 0), (5.0, 3, 0), (5.1, 1, 0)]
add_cases(
    "my_cause",
    (
        ((_ERRORS,), 3, "Of errors the earliest is the cause."),
        (([*_ERRORS, (5.3, 2, 9)],), 2, "Rank 2 was killed with SIGKILL, from outside."),
        (([(4.0, 1, 15), (5.0, 2, 0)],), 2, "Rank 1 was ended by its agent, with SIGTERM."),
        (([(5.0, 2, 6), (4.0, 0, 0)],), 0, "SIGABRT counts like an error, and is later here."),
        (([(4.0, 1, 11), (5.0, 0, 9)],), 0, "SIGSEGV is rank 1's own error, SIGKILL is not."),
        (([(1.0, 1, 4), (2.0, 2, 7), (3.0, 3, 8), (4.0, 0, 9)],), 0, "4, 7 and 8 are errors."),
        (([(4.0, 1, 0), (5.0, 0, 2)],), 0, "SIGINT (2) came from outside, as any other signal."),
        (([(6.0, 1, 9), (5.0, 0, 9)],), 0, "Two signals from outside: the earlier one."),
        (([(4.0, 1, 15)],), None, "Only the agent has ended a rank: there is no cause."),
    ),
    success="Right: signals from outside first, then the earliest error; SIGTERM is no cause.",
)
