"""Functions on ranks: results, outputs, and every way in which a rank can fail."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import is_dead

from shardlab import ranks
from shardlab.ranks import RankError, p2p, run

pytestmark = pytest.mark.usefixtures("no_leftovers")


def add_ranks(start: float = 0.0) -> torch.Tensor:
    """Return the sum of all rank numbers, from a real collective."""
    x = torch.full((3,), dist.get_rank() + start)
    dist.all_reduce(x)
    return x


# Results.


@dataclass
class Answer:
    """Result of a class that the caller defines."""

    values: torch.Tensor
    note: str


class Model:
    config = 3


@pytest.mark.parametrize(("method", "world_size"), [("fork", 4), ("fresh", 2)])
def test_results_of_any_kind_come_in_rank_order(method: str, world_size: int):
    # Integers: their sum is the same for any number of threads.
    weights, model = torch.randint(9, (512, 512)).float(), Model()
    before = torch.get_num_threads()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # the variables of torchrun

    def work(factor: int) -> dict:
        dist.barrier()
        return {
            "of all": dist.get_rank() * factor + model.config,  # dist.config is another one
            "answer": Answer(torch.ones(2, requires_grad=True), "x"),
            "launcher": [os.environ[name] for name in names],
            "random": torch.rand(3),
            "product": (torch.get_num_threads(), (weights @ weights).shape, weights.sum()),
            "pid": os.getpid(),
        }

    torch.set_num_threads(4)
    (weights @ weights).sum()  # starts the pool of threads, which does not survive a fork
    torch.manual_seed(7)
    results = run(work, world_size, 10, method=method)
    torch.set_num_threads(before)
    torch.manual_seed(7)
    expected, size = torch.rand(3), str(world_size)
    for rank, found in enumerate(results):
        assert found["of all"] == rank * 10 + 3
        assert found["answer"].values.tolist() == [1, 1] and found["answer"].note == "x"
        assert found["launcher"] == [str(rank), str(rank), size, size]
        assert torch.equal(found["random"], expected)
        assert found["product"] == (1, (512, 512), weights.sum())
    assert len({r["pid"] for r in results} | {os.getpid()}) == world_size + 1  # real processes


# Outputs.


def test_prints_come_by_rank_and_the_same_every_time(capfd: pytest.CaptureFixture[str]):
    def work() -> None:
        for i in range(3):
            print("line", i, "of", dist.get_rank())
            dist.barrier()
        os.write(2, b"straight to the descriptor\n")
        for i in range(5000):
            print("x" * 80, i)

    outputs = []
    for _ in range(2):
        run(work, 3)
        outputs.append(capfd.readouterr().out)
    assert outputs[0] == outputs[1]
    lines = outputs[0].splitlines()
    assert lines[0] == "[rank 0] line 0 of 0"
    assert lines[3] == "[rank 0] straight to the descriptor"
    assert [line[:8] for line in lines] == [f"[rank {r}]" for r in range(3) for _ in range(5004)]
    assert lines[-1].endswith(" 4999")


# Every way to fail. Each ends in one RankError that names the rank and the place, and the next run
# works: that of the next test (the fixture checks that no process is left).


def run_failing(work, world_size: int = 4, timeout: float = 60.0, method: str = "fork"):
    """Run `work`, which fails; return the error and the seconds until the error."""
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        run(work, world_size, timeout=timeout, method=method)
    return caught.value, time.monotonic() - begin


def spin() -> None:
    while True:
        pass


def raise_boom() -> None:
    raise ValueError("boom")


# What rank 1 does while the others all-reduce -> words of the error.
DOES = {
    "raises": (raise_boom, "rank 1 of 3 raised ValueError: boom"),
    "is killed": (lambda: os.kill(os.getpid(), 9), "rank 1 of 3 was killed by SIGKILL"),
    "dies of a bad address": (lambda: ctypes.string_at(0), "SIGSEGV"),
    "leaves through the back door": (lambda: os._exit(5), "exit status 5"),
}
HANGS = {
    "sleeps": (lambda: time.sleep(1000), "rank 1 of 3 did not finish within 1 s"),
    "spins": (spin, "rank 1 of 3 did not finish within 1 s"),
}


@pytest.mark.parametrize("what", [*DOES, *HANGS])
def test_the_rank_at_fault_is_named_with_what_it_did(what: str):
    does, words = {**DOES, **HANGS}[what]

    def work() -> None:
        if dist.get_rank() == 1:
            does()
        add_ranks()

    error, seconds = run_failing(work, 3, 1.0 if what in HANGS else 60.0)
    assert error.ranks == [1] and error.rank == 1
    assert words in str(error) and "Connection" not in str(error)  # the neighbours' complaints
    assert "test_ranks.py" in str(error) or "exit" in words or "SIGKILL" in words
    if what in HANGS:
        assert "Ranks 0 and 2 wait for rank 1 in all_reduce" in str(error) and 1 <= seconds < 15
    else:
        assert seconds < 30  # at once, not at the timeout of 60 s


def return_early() -> None:
    if dist.get_rank() != 1:
        add_ranks()


def in_another_order() -> None:
    a, b = torch.ones(4), torch.ones(3)
    if dist.get_rank() == 1:
        dist.broadcast(b, 0)
        dist.all_reduce(a)
    else:
        dist.all_reduce(a)
        dist.broadcast(b, 0)


def sizes() -> None:
    dist.all_reduce(torch.ones(5 if dist.get_rank() == 1 else 4))
    dist.barrier()


def a_circle() -> None:
    ranks.irecv(torch.empty(1), (dist.get_rank() + 1) % 3).wait()


PART = {  # ranks that diverge: the culprit, and words of the error
    return_early: ([1], "returned early"),
    in_another_order: ([1], "rank 1 called broadcast(float32[3])", "called all_reduce(float32[4])"),
    sizes: ([1], "all_reduce(float32[5])"),
    a_circle: ([0, 1, 2], "each waits for another one"),
}


@pytest.mark.parametrize("calls", PART, ids=lambda calls: calls.__name__)
def test_ranks_that_part_ways(calls):
    error, _ = run_failing(calls, 3, timeout=1)
    at_fault, *words = PART[calls]
    assert error.ranks == at_fault and all(word in str(error) for word in words), error


# Ranks that all return, although they disagreed. gloo gives them garbage, without an error.


def differ_in_shape(me: int) -> None:
    dist.broadcast(torch.ones(4 + me), 0)


def type_(me: int) -> None:
    dist.all_reduce(torch.ones(4, dtype=[torch.float32, torch.int32][me]))


def differ_in_operation(me: int) -> None:
    dist.all_reduce(torch.ones(4), [dist.ReduceOp.SUM, dist.ReduceOp(dist.ReduceOp.MAX)][me])


def sizes_in_a_group(me: int) -> None:
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3), group=group)
    if me == 0:
        dist.broadcast(torch.ones(3), 0, group)
    else:
        dist.broadcast(torch.ones(5), group_src=0, group=group)


DISAGREE = {
    differ_in_shape: ("broadcast(float32[4])", "broadcast(float32[5])"),
    type_: ("all_reduce(float32[4])", "all_reduce(int32[4])"),
    differ_in_operation: ("SUM", "MAX"),
    sizes_in_a_group: ("number 2", "broadcast(float32[3])", "broadcast(float32[5])"),
}


@pytest.mark.parametrize("calls", DISAGREE, ids=lambda calls: calls.__name__)
def test_ranks_that_return_without_having_agreed(calls):
    error, _ = run_failing(lambda: calls(dist.get_rank()), 2)
    assert error.ranks == [1]
    for word in ("rank 0 called", "rank 1 called", "test_ranks.py, line", *DISAGREE[calls]):
        assert word in str(error)


def test_fresh_ranks_are_watched_like_forked_ones():
    error, _ = run_failing(
        lambda: dist.broadcast(torch.ones(4 + dist.get_rank()), 0), 2, 60, "fresh"
    )
    assert error.ranks == [1] and "rank 0 called broadcast(float32[4])" in str(error)


# Legitimate differences between ranks.


def parts(me: int) -> None:
    mine = torch.ones(2 + me)  # to rank 0: 1 and 2; to rank 1: 1 and 1
    got = torch.empty(3 - me)
    dist.all_to_all_single(got, mine, [1, 2 - me], [1 + me, 1])
    share = torch.empty(4 + me)
    dist.reduce_scatter(share, [torch.ones(4), torch.ones(5)])


def differ_in_root(me: int) -> None:
    x, every = torch.ones(4), [torch.ones(4) for _ in range(2)]
    dist.gather(x, every if me else None, 1)
    dist.scatter(x, None if me else every, 0)
    dist.gather_object(me, [None, None] if me else None, 1)
    dist.gather(x, every if not me else None, **({} if me else {"dst": 0}))


def groups(me: int) -> None:
    each = [dist.new_group([0]), dist.new_group([1])]
    dist.all_reduce(torch.ones(3 + me), group=each[me])
    if me:  # who is not in it is told, and passed by
        dist.broadcast(torch.ones(3), 1, group=each[1])
        dist.all_reduce(torch.ones(4), group=each[0])


def messages(me: int) -> None:
    for size in (3, 5):
        if me:
            dist.recv(torch.empty(size), 0)
        else:
            dist.send(torch.ones(size), 1)
    ranks.exchange(torch.ones(1 + me), 1 - me, torch.empty(2 - me), 1 - me).wait()


def test_what_differs_by_right_is_no_disagreement():
    calls = parts, differ_in_root, groups, messages
    run(lambda: [call(dist.get_rank()) for call in calls] and None, 2, timeout=20)


def test_a_result_that_cannot_be_sent_back():
    def work() -> object:
        return (i for i in range(3)) if dist.get_rank() == 1 else 0

    error, _ = run_failing(work, 2)
    assert error.ranks == [1]
    assert "generator" in str(error) and "cannot be sent" in str(error)


# The caller.


@pytest.mark.parametrize(("method", "end"), [("fork", signal.SIGKILL), ("fresh", signal.SIGTERM)])
def test_a_killed_caller_leaves_nothing(tmp_path: Path, method: str, end: signal.Signals):
    """No rank survives, whatever it does, nor its child processes, nor a folder."""
    folder, pids = tmp_path / "temporary", tmp_path / "pids"
    folder.mkdir()
    pids.mkdir()
    script = f"""
        from shardlab.ranks import run
        import ctypes, os, subprocess, torch, torch.distributed as dist
        def work():
            me = dist.get_rank()
            mine = [os.getpid()] + [subprocess.Popen(["sleep", "1000"]).pid for _ in range(me > 0)]
            for pid in mine:
                open({str(pids)!r} + f"/{{pid}}", "w").close()
            if me == 0:
                ctypes.PyDLL(None).sleep(1000)  # holds Python's lock: no thread of it runs
            if me == 1:
                dist.recv(torch.ones(1), 2)
            while True:
                pass
        run(work, 3, method={method!r})
        """
    (tmp_path / "caller.py").write_text(textwrap.dedent(script))
    environment = {**os.environ, "TMPDIR": str(folder)}
    caller = subprocess.Popen([sys.executable, str(tmp_path / "caller.py")], env=environment)
    deadline = time.monotonic() + 120  # fresh interpreters, on a busy machine
    while len(list(pids.iterdir())) < 5:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    assert list(folder.iterdir())
    caller.send_signal(end)
    caller.wait()
    while left := [p for p in pids.iterdir() if not is_dead(int(p.name))] + [*folder.iterdir()]:
        assert time.monotonic() < deadline, f"outlived their caller: {left}"
        time.sleep(0.05)


def test_only_the_default_limit_grows_on_a_slow_machine(monkeypatch):
    monkeypatch.setattr("shardlab.ranks.worker.RUN_TIMEOUT", 0.5)
    monkeypatch.setattr("shardlab.ranks.measure_slowdown", lambda: 20.0)
    assert run(lambda: time.sleep(1.5), 2) == [None, None]
    with pytest.raises(RankError, match=r"within 0\.5 s"):
        run(lambda: time.sleep(60), 2, timeout=0.5)


# Bad input, before any process starts.


BAD = [
    (0, {}, ValueError, "world_size=0: must be"),
    ("2", {}, ValueError, "world_size='2': must be"),
    (10_000, {}, ValueError, "world_size=10000: must be"),
    (2, {"timeout": 0}, ValueError, "timeout=0: must be"),
    (2, {"method": "thread"}, ValueError, "method='thread': must be"),
    (2, {"device": "tpu"}, ValueError, "device='tpu': must be"),
    (2, {"a": 1, "b": 2}, TypeError, r"add_ranks\(.*cannot be called with the 2 given arguments"),
    (
        2,
        {"start": threading.Lock(), "method": "fresh"},
        TypeError,
        "fn=add_ranks: must be picklable",
    ),
]


def test_bad_arguments_are_refused_before_any_process_starts():
    for world_size, more, kind, words in BAD:
        own = [more.pop(name) for name in ("a", "b", "start") if name in more]
        with pytest.raises(kind, match=words):
            run(add_ranks, world_size, *own, **more)
    with pytest.raises(TypeError, match="fn='work': must be a function"):
        run("work", 2)
    with pytest.raises(RankError, match="inside a rank: must be called by"):
        run(lambda: run(add_ranks, 2), 1)


def test_without_a_gpu_cuda_is_refused():
    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match="device='cuda': must be 'auto' or 'cpu'"):
        run(add_ranks, 2, device="cuda")
    assert ranks.choose_backend(2) == ("gloo", "cpu") and ranks.device() == torch.device("cpu")


# Point-to-point messages.


@pytest.mark.parametrize("staged", [False, True])
def test_messages_and_exchanges_in_groups_of_their_own(staged: bool, monkeypatch):
    """staged: through the host, as on a shared GPU; here both memories are the same."""
    if staged:
        monkeypatch.setattr(p2p, "_needs_host_copy", lambda *_: True)

    def work() -> list[list[float]]:
        pair, ring, found = dist.new_group([1, 3]), dist.new_group([0, 2, 3]), []
        if dist.get_rank() in (1, 3):
            me = dist.get_rank(pair)
            got = torch.zeros(4, 2).t()  # not contiguous
            out = ranks.isend(torch.full((2, 4), float(me)), 1 - me, pair)
            ranks.irecv(got, 1 - me, pair).wait()
            out.wait()
            found.append(got.flatten().tolist())
        if dist.get_rank() != 1:
            me, got = dist.get_rank(ring), torch.zeros(2, 2).t()
            mine = torch.arange(4.0).view(2, 2).t() + me
            message = ranks.exchange(mine, (me + 1) % 3, got, (me - 1) % 3, ring)
            message.wait()
            message.wait()  # a second wait returns at once
            found.append(got.flatten().tolist())
        return found

    after = [[value + rank for value in (0, 2, 1, 3)] for rank in range(3)]
    assert run(work, 4) == [[after[2]], [[1.0] * 8], [after[0]], [[0.0] * 8, after[1]]]


# In a notebook.


def test_a_notebook_stays_usable_after_every_failure():
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    cells = [
        "import os, time, torch, torch.distributed as dist\n"
        "from shardlab.ranks import run\n"
        "x = torch.rand(512, 512); (x @ x).sum()\n"  # starts OpenMP's threads before the first fork
        "def good():\n    dist.barrier(); display('fine'); return dist.get_rank()",
        "run(good, 2)",
        "def bad():\n    if dist.get_rank() == 1:\n        raise ValueError('boom')\n    good()\n"
        "run(bad, 2)",
        "run(good, 2)",
        "run(lambda: time.sleep(1000) if dist.get_rank() else good(), 2, timeout=3)",
        "import os\nrun(lambda: os.kill(os.getpid(), 9), 2)",
        "run(good, 2)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbclient.NotebookClient(notebook, timeout=120, allow_errors=True).execute()
    outputs = [cell.outputs for cell in notebook.cells]
    for index in (1, 3, 6):
        assert outputs[index][0]["text"] == "[rank 0] 'fine'\n[rank 1] 'fine'\n"
        assert outputs[index][1]["data"]["text/plain"] == "[0, 1]"
    texts = ["".join(out[-1].get("traceback", [])) if out else "" for out in outputs]
    # The message without the launcher's frames, and with the reader's own line.
    assert texts[2].startswith("RankError: rank 1 of 2 raised ValueError: boom")
    assert "at this notebook's cell, line 3, in bad" in texts[2]
    assert texts[4].startswith("RankError: rank 1 of 2 did not finish within 3 s")
    assert "were stopped" in texts[5] or "was killed by SIGKILL" in texts[5]
    assert all(len(t.splitlines()) < 8 for t in texts)
