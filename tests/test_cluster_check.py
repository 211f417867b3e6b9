"""The exercises of lesson `cluster` help with the wrong answers that readers give."""

from itertools import combinations

import pytest

from shardlab.check import check


def wrong(answer, name, words):
    verdict = check(answer, name)
    assert not verdict.ok and words in verdict.message, verdict


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((8, 2, 3), "count from 0"),
        ((9, 1, 2), "two ranks, not four"),
        ((7, 7, 2), "on the rank's own node"),
        ((7, 1, 7), "GROUP_RANK is the node's number"),
        ((6, 1, 2), "how many ranks come before it"),
        (7, "Three numbers"),
    ],
)
def test_ranks(answer, words):
    wrong(answer, "cluster_ranks", words)


def by_last_reading(seen, now, patience):
    last = {agent: time for time, agent, _ in seen}
    return {agent for agent, time in last.items() if now - time > patience}


def silent(seen, now, patience, grew=lambda new, old: new != old, late=lambda x, y: x > y):
    last = {}
    for time, agent, beat in seen:
        if agent not in last or grew(beat, last[agent][0]):
            last[agent] = beat, time
    return {agent for agent, (_, time) in last.items() if late(now - time, patience)}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (by_last_reading, "though the host has read it again"),
        (lambda *given: silent(*given, late=lambda x, y: x >= y), "2 s are not more than 2 s"),
        (lambda *given: silent(*given, grew=lambda new, old: new > old), "smaller than before"),
        (lambda *_: None, "None, but"),
        (lambda seen: seen, "raised TypeError"),
    ],
)
def test_silent(answer, words):
    wrong(answer, "my_silent", words)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({3, 8, 9, 12}, "Line 12 is right"),
        ({8, 9, 11}, "3 of four. How many launchers"),
        ({3, 9, 11}, "3 of four. Where does sbatch stop"),
        ({3, 8, 11}, "3 of four. Who else gets SIGUSR1"),
        ({3, 8, 9}, "3 of four. Which machine is meant"),
        ({13}, "A set of four numbers"),
        (3, "A set of four numbers"),
    ],
)
def test_batch(answer, words):
    wrong(answer, "cluster_batch", words)


def task(slurm, names, gpus, **other):
    local = int(slurm["SLURM_LOCALID"])
    right = {
        "RANK": int(slurm["SLURM_PROCID"]),
        "WORLD_SIZE": int(slurm["SLURM_NTASKS"]),
        "LOCAL_RANK": local,
        "MASTER_ADDR": names[0],
        "MASTER_PORT": 20000 + int(slurm["SLURM_JOB_ID"]) % 10000,
        "device": local % gpus if gpus else None,
    }
    return right | {name: value(slurm, names, gpus) for name, value in other.items()}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"RANK": lambda slurm, *_: slurm["SLURM_PROCID"]}, "Slurm's variables are text"),
        ({"device": lambda slurm, *_: int(slurm["SLURM_LOCALID"])}, "sees 0 GPUs: device is None"),
        (
            {"device": lambda slurm, _, gpus: int(slurm["SLURM_LOCALID"]) if gpus else None},
            "A task that sees one GPU calls it 0",
        ),
        ({"MASTER_ADDR": lambda slurm, names, _: names[int(slurm["SLURM_NODEID"])]}, "'node7'"),
        ({"MASTER_ADDR": lambda *_: "localhost"}, "'node7', and not 'localhost'"),
        ({"MASTER_PORT": lambda *_: 29500}, "the same port"),
        ({"MASTER_PORT": lambda slurm, *_: int(slurm["SLURM_JOB_ID"])}, "allowed are 1024"),
        (
            {"MASTER_PORT": lambda slurm, *_: 20000 + int(slurm["SLURM_PROCID"])},
            "get different ports",
        ),
    ],
)
def test_what_a_task_is_told(other, words):
    wrong(lambda *given: task(*given, **other), "my_ranks", words)


def test_another_range_of_ports_is_right():
    port = {"MASTER_PORT": lambda slurm, *_: 1024 + int(slurm["SLURM_JOB_ID"]) % 30000}
    assert check(lambda *given: task(*given, **port), "my_ranks").ok
    wrong(lambda *_: None, "my_ranks", "A dictionary")


RIGHT = {
    "hang_uneven": {"rank": 2, "collective": "all_reduce", "line": 17},
    "hang_order": {"rank 0": "norm", "rank 1": "loss"},
    "hang_tensor": {"runs": "zero3", "rank": 1, "collective": "all_gather", "line": 27},
}


@pytest.mark.parametrize(
    ("name", "key", "answer", "words"),
    [
        ("hang_uneven", "rank", 0, "where all should be"),
        ("hang_uneven", "collective", "barrier", "where the missing rank waits"),
        ("hang_uneven", "line", 25, "calls a function"),
        ("hang_uneven", "line", 28, "where the missing rank stands"),
        ("hang_order", "rank 0", "loss", "has finished all of its calls"),
        ("hang_order", "rank 1", "norm", "has not called anything"),
        ("hang_tensor", "runs", "tensor", "That is what it says"),
        ("hang_tensor", "runs", "ddp", "gathers nothing"),
        ("hang_tensor", "runs", "zero1", "gathers once a step"),
        ("hang_tensor", "rank", 0, "has a sequence more"),
        ("hang_tensor", "collective", "reduce_scatter", "All of these are done"),
        ("hang_tensor", "line", 28, "and finished"),
        ("hang_tensor", "line", 99, "read the last call of each rank"),
        ("hang_tensor", "line", ..., "no answer for 'line' yet"),
    ],
)
def test_hangs(name, key, answer, words):
    assert check(RIGHT[name], name).ok
    wrong(RIGHT[name] | {key: answer}, name, words)
    wrong({key: answer, "else": 1}, name, "is a dictionary with")


def culprit(links, enough=all, third=3):
    rates = sorted(rate for _, _, rate in links)
    slow = rates[len(rates) // 2] / third
    for rank in sorted({rank for a, b, _ in links for rank in (a, b)}):
        if enough(rate < slow for a, b, rate in links if rank in (a, b)):
            return rank
    return None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda links: culprit(links, any), "all links of rank 4 are slow"),
        (lambda links: culprit(links) or None, "0 is a rank, too"),
        (lambda links: min(links, key=lambda link: link[2])[0], "rank 4"),
        (lambda links: culprit(links) or 0, "a cable"),
        (lambda links: culprit([*links], lambda slow: sum(slow) > 1), "two of rank 3's links"),
    ],
)
def test_culprit(answer, words):
    wrong(answer, "cluster_culprit", words)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda size: [[pair] for pair in combinations(range(size), 2)], "4 ranks need 3 rounds"),
        (lambda size: [[(a, a ^ d) for a in range(size)] for d in range(1, size)], "be in it once"),
        (lambda size: [[(a, a ^ 1) for a in range(0, size, 2)]] * (size - 1), "2 pairs meet, of 6"),
        (lambda size: None, "A list of rounds"),
        (lambda size: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_rounds(answer, words):
    wrong(answer, "cluster_rounds", words)
