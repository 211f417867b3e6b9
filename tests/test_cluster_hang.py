"""Diagnosis of a hang: the rank, the collective and the line, from the ranks' records."""

import gc
import logging
import os
import pickle
import re
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from commands import run_main
from torch.distributed.flight_recorder import fr_trace

from shardlab import ranks
from shardtools.cluster import captured
from shardtools.cluster.captured import capture
from shardtools.cluster.watch import flight, hang, straggler

LINE = re.compile(r"line (\d+) in (.+)")


def run_torchfrtrace(folder):
    """Return the output of torch's own tool for the records in a folder."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda entry: said.append(entry.getMessage())
    logger = logging.getLogger("Flight Recorder")
    logger.addHandler(handler)
    try:
        fr_trace.main([str(folder), "-p", flight.TRACE_PREFIX])
    finally:
        logger.removeHandler(handler)
        gc.enable()  # torch's tool leaves it off
    return "\n".join(said)


def make_call(rank, group="world", members=(0, 1, 2), number=1, op="all_reduce", **more):
    """Return a call as in a record; `more` are the fields that matter to a test."""
    fields = {"sizes": ((4,),), "dtype": "Float", "line": 1, "location": "f, a.py", "created": 0.0}
    fields |= {"timeout": 60.0, "waiting": False}
    return flight.Call(rank, group, members, number, op, **(fields | more))


def exit_after_records(folder):
    """Exit this rank when all three have written their records, without waiting for a limit."""
    while len(list(folder.glob("trace_*"))) < 3:
        time.sleep(0.05)
    os._exit(1)


def run_hang(folder, how):
    """Run three good steps on three ranks, then a step in which rank 1 does something else."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 2], group_desc="pair")
    watchdog = flight.Watchdog(folder, timeout=0.5)
    threading.Thread(target=exit_after_records, args=(folder,), daemon=True).start()
    for step in range(4):
        dist.all_reduce(torch.ones(5))
        odd = step == 3 and rank == 1
        if odd and how == "missing":
            time.sleep(30)
        elif odd and how == "differs":
            dist.broadcast(torch.ones(7), 0)
        else:
            dist.all_reduce(torch.ones(7))
        if rank != 1:
            dist.broadcast(torch.ones(3), 0, group=pair)
        watchdog.report_step()


@pytest.mark.parametrize("how", ["missing", "differs"])
def test_torchs_tool_says_the_same(tmp_path, no_leftovers, how):
    with pytest.raises(ranks.RankError):
        ranks.run(run_hang, 3, tmp_path, how, timeout=60)
    calls = flight.read_records(tmp_path)
    assert list(calls) == [0, 1, 2]
    first = hang.find_causes(calls)[0]
    assert (first.kind, first.ranks, first.call.op) == (how, (1,), "all_reduce")
    assert first.call.sizes == ((7,),) and set(first.waiting) == {0, 2}
    source = run_hang.__code__.co_firstlineno
    assert first.call.location == "run_hang, test_cluster_hang.py"
    assert first.call.line == source + 14
    theirs = run_torchfrtrace(tmp_path)
    assert f"sequence number: {first.call.number}" in theirs
    assert f"{source + 14}" in theirs or how == "differs"
    if how == "missing":
        assert "missing ranks: {1}" in theirs
    else:  # the first record counts as the right one
        assert "COLLECTIVE_TYPE_MISMATCH" in theirs


def dump_record():
    from torch._C._distributed_c10d import _dump_fr_trace

    dist.all_reduce(torch.ones(2))
    return _dump_fr_trace()


def test_torchs_tool_still_needs_the_groups_filled_in(tmp_path):
    """If this fails, torch fills in the groups: then `flight.take_record` need not."""
    for rank, dumped in enumerate(ranks.run(dump_record, 2)):
        (tmp_path / f"{flight.TRACE_PREFIX}{rank}").write_bytes(dumped)
    with pytest.raises(KeyError):
        run_torchfrtrace(tmp_path)


def groups_and_limits():
    dist.new_group([0, 1], group_desc="plain")
    dist.new_group([0, 1], group_desc="given", timeout=timedelta(seconds=7))
    for group in dist.distributed_c10d._world.pg_names:
        dist.all_reduce(torch.ones(1), group=group)
    dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(4))
    return flight.take_record()


def test_a_record_tells_groups_members_limits_and_what_was_called():
    calls = flight.parse_calls(ranks.run(groups_and_limits, 2, timeout=30)[0])
    limits = {c.group.partition(":")[0]: c.timeout for c in calls}
    assert {c.members for c in calls} == {(0, 1)}
    assert limits["given"] == 7 and limits["plain"] == 30 * 60
    assert limits["default_pg"] < 30 * 60, "the world's own limit, which new_group did not take"
    assert calls[-1].op == "reduce_scatter", "gloo notes an all-reduce"
    assert [c.number for c in calls if c.group == "plain:1"] == [1]


def test_the_waiting_is_followed_to_its_beginning():
    """Rank 2 waits for rank 0, which waits for rank 1, which waits for nobody."""
    pair = {"group": "pair", "members": (0, 1)}
    calls = {
        0: [make_call(0), make_call(0, waiting=True, **pair)],
        1: [make_call(1)],
        2: [make_call(2), make_call(2, number=2, waiting=True)],
    }
    found = hang.find_causes(calls)
    assert [finding.ranks for finding in found] == [(1,), (0, 1)]
    assert found[0].call.group == "pair" and "rank 1" in str(found[0])


# Information from nccl alone: records in the form of torch 2.13, with the states of its events.


def make_entry(number, state, group="0", duration=None, created=0.0, **more):
    """Return one call of a record, as FlightRecorder.hpp of torch 2.13 writes it for nccl."""
    own = {"name": "step", "filename": "/home/me/train.py", "line": 40 + number}
    timed = {} if duration is None else {"duration_ms": duration}
    return timed | {
        "frames": [own], "record_id": number, "pg_id": int(group), "process_group": (group, "dp"),
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "is_p2p": False,
        "profiling_name": "nccl:all_reduce", "time_created_ns": int(1e9 * created),
        "input_sizes": [[7]], "input_dtypes": ["Float"], "output_sizes": [[7]],
        "output_dtypes": ["Float"], "state": state, "timeout_ms": 600_000, "retired": False,
        "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
        "thread_id": "1", "thread_name": "",
    } | more  # fmt: skip


def make_nccl_calls(*by_rank, members="[0, 1, 2, 3]", folder=None):
    """Return each rank's calls from its entries; folder: the records are also written there."""
    groups = {str(n): {"name": str(n), "desc": "dp", "ranks": members} for n in range(2)}
    status = {n: {"last_completed_collective": 0} for n in groups}
    record = {"version": "2.10", "pg_config": groups, "pg_status": status}
    records = {rank: record | {"entries": mine, "rank": rank} for rank, mine in enumerate(by_rank)}
    for rank, one in records.items() if folder else ():
        (folder / f"{flight.TRACE_PREFIX}{rank}").write_bytes(pickle.dumps(one))
    return {rank: flight.parse_calls(one, rank) for rank, one in records.items()}


MOVED = [make_entry(1, "completed")]
TOGETHER = [*MOVED, make_entry(2, "started")]
# Records of all ranks; the first finding's kind and ranks; words of ours, and of torch's own tool.
HANGS = {
    # If this one fails, torch's tool looks beyond a group: then `hang` need not.
    "a circle over two groups": (
        [[make_entry(1, "started", group)] for group in "01"], "cycle", (0, 1),
        "each in another call", "missing ranks: {1}"),
    "all in one all-reduce": (4 * [TOGETHER], None, (), "no collective lacks a rank", ""),
    "one left no record": (3 * [TOGETHER], "missing", (3,), "rank 3  no record", None),
}  # fmt: skip


@pytest.mark.parametrize("case", HANGS)
def test_whatever_waits_is_named_and_torchs_tool_says_no_other(tmp_path, capsys, case):
    records, kind, who, words, theirs = HANGS[case]
    members = str(list(range(4 if case == "one left no record" else len(records))))
    found = hang.find_causes(make_nccl_calls(*records, members=members, folder=tmp_path))
    said = run_main(capsys, "cluster", "hang", str(tmp_path))[1]
    assert ("no collective lacks a rank" in said) == (not found) == (kind is None)
    assert words in said
    if found:
        assert (found[0].kind, found[0].ranks) == (kind, who), said
    if theirs is not None:  # None: torch's tool finds nothing, or only a missing record
        said = run_torchfrtrace(tmp_path)
        assert theirs in said and (theirs or "rror" not in said), said


@pytest.mark.parametrize("prefix", flight.KNOWN_PREFIXES[1:])  # torch's own names
def test_durations_on_gpus_name_the_last_one(tmp_path, prefix):
    """The host of rank 2 is slow; rank 1's GPU is, and its own collectives are the shortest."""
    for rank in range(4):
        took, late = (2.0 if rank == 1 else 42.0), 0.01 * (rank == 2)
        entries = [make_entry(n, "completed", "0", took, n + late) for n in range(1, 41)]
        groups = {"0": {"name": "0", "desc": "dp", "ranks": "[0, 1, 2, 3]"}}
        status = {"0": {"last_completed_collective": 40}}
        record = {"pg_config": groups, "pg_status": status, "entries": entries}
        (tmp_path / f"{prefix}{rank}").write_bytes(pickle.dumps(record))
    calls = flight.read_records(tmp_path)
    arrivals = straggler.measure_delays(calls)
    assert [round(a.median_delay, 6) for a in arrivals] == [0, 0.04, 0, 0]
    assert arrivals[1].share_last == 1
    hosts = {rank: [replace(c, duration=None) for c in mine] for rank, mine in calls.items()}
    untimed = straggler.measure_delays(hosts)
    assert max(untimed, key=lambda a: a.median_delay).rank == 2, "the host"


def test_the_majority_is_right_and_a_ring_that_lost_its_oldest_calls_is_no_fault():
    good = {rank: [make_call(rank, number=n) for n in range(1, 5)] for rank in range(3)}
    assert hang.find_causes(good) == []
    assert hang.find_causes(good | {1: good[1][2:]}) == []
    for odd in range(3):
        mine = [*good[odd][:3], replace(good[odd][3], sizes=((5,),), waiting=True)]
        (found,) = hang.find_causes(good | {odd: mine})
        assert (found.kind, found.ranks, found.call.number) == ("differs", (odd,), 4)
    gathers = {rank: [make_call(rank, op="gather", sizes=((rank,),))] for rank in range(3)}
    assert hang.find_causes(gathers) == [], "a gather may have another size on each rank"


class Trap:
    def __reduce__(self):
        return pytest.fail, ("code from the file is running",)


JUNK = [Trap(), {"entries": [1]}, {"entries": [make_entry(1, "lost")], "pg_config": {}}]


@pytest.mark.parametrize("content", [b"", b"text", *map(pickle.dumps, JUNK)])
def test_a_file_that_is_no_record_is_refused(tmp_path, content):
    (tmp_path / "trace_0").write_bytes(content)
    with pytest.raises(ValueError, match="trace_0"):
        flight.read_records(tmp_path)


def test_bad_input_is_named(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        flight.read_records(tmp_path)
    with pytest.raises(ValueError, match="timeout=0"):
        flight.Watchdog(tmp_path, 0)


def report_steps(folder):
    watchdog = flight.Watchdog(folder, timeout=1.0)
    for _ in range(8):
        time.sleep(0.15)
        watchdog.report_step()
    watchdog.close()


def test_a_job_that_moves_leaves_no_record(tmp_path):
    ranks.run(report_steps, 1, tmp_path)
    assert list(tmp_path.iterdir()) == []


def split_calls(text):
    """Parse the text's flight recorder: operation, number, state, line of each rank."""
    return [line.split() for line in text.splitlines() if LINE.search(line) and " #" in line]


@pytest.mark.alone
def test_the_captured_hangs_are_what_the_jobs_do(no_leftovers):
    """Each job, run again, ends as its text says; only machine and date differ."""
    seen = capture.capture_jobs(*capture.NUM_RANKS)
    for name, job in seen.items():
        again, kept = capture.format_capture(name, job), captured.read_log(name)
        assert split_calls(again) == split_calls(kept), f"{name}.txt is old: run capture.py"
        for part in kept.split("== py-spy")[1:]:
            for frame in re.findall(r"\w+\.py:\d+", part.partition("== flight")[0]):
                here = "".join(job.stacks.values())
                assert not here or "distributed_c10d" in frame or frame in here
    found = {name: hang.find_causes(job.calls) for name, job in seen.items()}
    assert found["uneven"][0].ranks == (2,) and found["uneven"][0].call.op == "all_reduce"
    assert found["order"][0].kind == "cycle"
    assert found["tensor"][0].call.number == 26
    ops = {c.op for c in seen["tensor"].calls[0]} - {"barrier"}
    assert ops == {"all_gather", "reduce_scatter"}, "tensor parallelism would add up activations"
