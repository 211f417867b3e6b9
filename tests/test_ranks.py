"""Running functions on ranks: results, outputs, and every way in which a rank can fail."""

from __future__ import annotations

import ctypes
import math
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

from shardlab import ranks, zero
from shardlab.ranks import RankError, run, start

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def add_ranks(start: float = 0.0) -> torch.Tensor:
    """The sum of all rank numbers, by a real collective."""
    x = torch.full((3,), dist.get_rank() + start)
    dist.all_reduce(x)
    return x


# What comes back.


@pytest.mark.parametrize(
    ("method", "world_size"), [("fork", 1), ("fork", 2), ("fork", 4), ("fresh", 3)]
)
def test_results_come_in_rank_order(method: str, world_size: int):
    def work(factor: int) -> tuple[int, int, int]:
        dist.barrier()
        return dist.get_rank() * factor, dist.get_world_size(), os.getpid()

    results = run(work, world_size, 10, method=method)
    assert [r[:2] for r in results] == [(rank * 10, world_size) for rank in range(world_size)]
    assert len({r[2] for r in results} | {os.getpid()}) == world_size + 1  # real processes


@pytest.mark.parametrize("method", ["fork", "fresh"])
def test_a_closure_and_its_data_reach_the_ranks(method: str):
    weights = torch.arange(4.0)
    assert run(lambda: (weights * (dist.get_rank() + 1)).sum().item(), 2, method=method) == [6, 12]


def test_a_fresh_rank_gets_a_function_that_says_config():
    class Model:
        config = 3

    model = Model()

    def work() -> tuple[int, int]:  # cloudpickle takes the name for torch.distributed.config
        return dist.get_world_size(), model.config

    assert run(work, 2, method="fresh") == [(2, 3)] * 2


@dataclass
class Answer:
    """A result of a class of the caller's own."""

    values: torch.Tensor
    note: str


def test_results_of_any_kind():
    def work() -> object:
        return {"a": Answer(torch.ones(2, requires_grad=True), "x"), "n": None, "t": (1, 2.5)}

    first, second = run(work, 2)
    assert first["a"].values.tolist() == [1, 1] and second["a"].note == "x"
    assert first["t"] == (1, 2.5)


def test_ranks_start_from_the_callers_random_state():
    torch.manual_seed(7)
    expected = torch.rand(3)
    for method in ("fork", "fresh"):
        torch.manual_seed(7)
        for result in run(lambda: torch.rand(3), 2, method=method):
            assert torch.equal(result, expected)


def test_launcher_variables_are_those_of_torchrun():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    results = run(lambda: [os.environ[name] for name in names], 2)
    assert results == [["0", "0", "2", "2"], ["1", "1", "2", "2"]]


def test_ranks_compute_with_one_thread_after_the_caller_used_many():
    x, before = torch.rand(512, 512), torch.get_num_threads()
    torch.set_num_threads(4)
    (x @ x).sum()  # warms up the pool of threads that does not survive a fork
    found = run(lambda: (torch.get_num_threads(), (x @ x).shape[0]), 2)
    torch.set_num_threads(before)
    assert found == [(1, 512)] * 2


def test_ranks_listen_on_the_loopback_interface_alone():
    def listening() -> list[str]:
        dist.barrier()
        mine = {
            os.readlink(f"/proc/self/fd/{fd}")[8:-1]
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
            and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        }
        addresses = []
        for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in mine:  # 0A: listening
                    addresses.append(fields[1].split(":")[0])
        return addresses

    loopback = {"0100007F", "00000000000000000000000001000000"}
    found = [address for result in run(listening, 2) for address in result]
    assert found and set(found) <= loopback


# What they print.


def test_prints_come_by_rank_and_the_same_every_time(capfd: pytest.CaptureFixture[str]):
    def work() -> None:
        for i in range(3):
            print("line", i, "of", dist.get_rank())
            dist.barrier()
        os.write(2, b"straight to the descriptor\n")

    outputs = []
    for _ in range(3):
        run(work, 3)
        outputs.append(capfd.readouterr().out)
    assert outputs[0] == outputs[1] == outputs[2]
    lines = outputs[0].splitlines()
    assert lines[0] == "[rank 0] line 0 of 0"
    assert lines[3] == "[rank 0] straight to the descriptor"
    assert [line[:8] for line in lines] == [f"[rank {r}]" for r in range(3) for _ in range(4)]


def test_thousands_of_lines_arrive(capfd: pytest.CaptureFixture[str]):
    def work() -> None:
        for i in range(5000):
            print("x" * 80, i)

    run(work, 2)
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 10_000 and lines[-1].endswith(" 4999")


def test_show_false_prints_nothing(capfd: pytest.CaptureFixture[str]):
    run(lambda: print("hello"), 2, show=False)
    assert capfd.readouterr().out == ""


def test_what_was_printed_before_a_failure_is_shown(capfd: pytest.CaptureFixture[str]):
    def work() -> None:
        print("before")
        raise ValueError("no")

    with pytest.raises(RankError):
        run(work, 2)
    assert capfd.readouterr().out.count("before") == 2


# Every way to fail. Each ends in one RankError that names the rank and the place, and the next run
# works (the fixture sees that no process is left).


def failing(work, world_size: int = 4, timeout: float = 60.0, method: str = "fork"):
    """Run `work`, which fails; return the error and the seconds that it took to see it."""
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        run(work, world_size, timeout=timeout, method=method)
    seconds = time.monotonic() - begin
    assert run(add_ranks, 2)[0].tolist() == [1, 1, 1]
    return caught.value, seconds


@pytest.mark.parametrize(("method", "world_size"), [("fork", 4), ("fresh", 3)])
def test_a_rank_raises(method: str, world_size: int):
    def work() -> None:
        if dist.get_rank() == 2:
            raise ValueError("boom")
        add_ranks()

    error, seconds = failing(work, world_size, method=method)
    assert error.ranks == [2] and error.rank == 2
    assert f"rank 2 of {world_size} raised ValueError: boom" in str(error)
    assert "test_ranks.py" in str(error) and 'raise ValueError("boom")' in str(error)
    assert "Connection" not in str(error)  # the neighbours' complaints stay out
    assert seconds < 30  # at once, not at the timeout of 60


def test_two_ranks_raise():
    def work() -> None:
        if dist.get_rank() in (1, 3):
            raise KeyError(f"lost {dist.get_rank()}")
        add_ranks()

    error, _ = failing(work)
    assert sorted(error.ranks) == [1, 3]
    assert "lost 1" in str(error) and "lost 3" in str(error)


def test_an_exception_whose_text_raises():
    class MineError(Exception):
        def __str__(self) -> str:
            return self.args[7]

    def work() -> None:
        if dist.get_rank() == 1:
            raise MineError
        add_ranks()

    error, _ = failing(work, 2)
    assert error.ranks == [1] and "rank 1 of 2 raised MineError" in str(error)
    assert "IndexError" in str(error) and "raise MineError" in str(error)


@pytest.mark.parametrize(("method", "world_size"), [("fork", 4), ("fresh", 2)])
def test_a_rank_is_killed(method: str, world_size: int):
    def work() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        add_ranks()

    error, seconds = failing(work, world_size, method=method)
    assert error.ranks == [1]
    assert f"rank 1 of {world_size} was ended by SIGKILL" in str(error)
    assert seconds < 30


def test_a_rank_dies_of_a_bad_address():
    def work() -> None:
        if dist.get_rank() == 3:
            ctypes.string_at(0)
        add_ranks()

    error, _ = failing(work)
    assert error.ranks == [3] and "SIGSEGV" in str(error)
    assert "test_ranks.py" in str(error)  # the place, from the fatal signal's own dump


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_calls_exit(code: int):
    def work() -> None:
        if dist.get_rank() == 1:
            sys.exit(code)
        add_ranks()

    error, _ = failing(work)
    assert error.ranks == [1] and f"sys.exit({code})" in str(error)


def test_a_rank_leaves_through_the_back_door():
    def work() -> None:
        if dist.get_rank() == 1:
            os._exit(5)
        add_ranks()

    error, _ = failing(work)
    assert error.ranks == [1] and "exit status 5" in str(error)


@pytest.mark.parametrize("how", ["sleep", "spin"])
def test_a_rank_hangs_while_the_others_wait(how: str):
    def work() -> None:
        if dist.get_rank() == 1:
            if how == "sleep":
                time.sleep(1000)
            while True:
                pass
        add_ranks()

    error, seconds = failing(work, timeout=3)
    assert error.ranks == [1]
    assert "rank 1 of 4 did not finish within 3 s" in str(error)
    assert "Ranks 0, 2 and 3 wait for it in all_reduce" in str(error)
    assert 3 <= seconds < 15


def test_the_limit_counts_from_when_the_ranks_have_met():
    """Fresh interpreters, and whatever the function's modules need to be imported, take seconds."""

    class Work:
        def __reduce__(self):
            return exec, ("import time; time.sleep(2.5)",)

    assert run(lambda work: dist.get_rank(), 2, Work(), timeout=2, method="fresh") == [0, 1]
    error, seconds = failing(lambda: time.sleep(1000), 2, timeout=1, method="fresh")
    assert error.ranks and "within 1 s" in str(error) and 1 <= seconds < 60


def stand_still() -> None:
    while True:
        time.sleep(0.1)


def in_a_thread_of_its_own() -> None:
    helper = threading.Thread(target=time.sleep, args=(1000,), daemon=True)
    helper.start()  # tells nothing: nobody's own code runs in it
    worker = threading.Thread(target=stand_still, daemon=True)
    worker.start()
    worker.join()


def in_a_pool() -> None:
    from concurrent.futures import ThreadPoolExecutor

    ThreadPoolExecutor(1).submit(stand_still).result()


@pytest.mark.parametrize("hang", [in_a_thread_of_its_own, in_a_pool])
def test_a_rank_hangs_in_another_thread(hang):
    def work() -> None:
        if dist.get_rank() == 1:
            hang()
        add_ranks()

    error, _ = failing(work, 2, timeout=3)
    assert error.ranks == [1] and "in stand_still" in str(error)
    assert "Rank 0 waits for it in all_reduce" in str(error)


def test_a_thread_for_which_nobody_waits_is_not_the_ranks_place():
    def busy() -> None:
        while True:
            sum(range(1000))

    def work() -> None:
        threading.Thread(target=busy, daemon=True).start()
        if dist.get_rank() == 1:
            stand_still()
        add_ranks()

    error, _ = failing(work, 2, timeout=3)
    assert error.ranks == [1] and "in stand_still" in str(error)
    assert "Rank 0 waits for it in all_reduce" in str(error) and "busy" not in str(error)


def test_a_rank_that_asks_for_its_number_for_ever():
    def work() -> None:
        while dist.get_rank() == 1 or dist.get_world_size() < 3:
            pass
        add_ranks()

    error, _ = failing(work, 3, timeout=3)
    assert error.ranks == [1] and "rank 1 of 3 did not finish within 3 s" in str(error)
    assert "Ranks 0 and 2 wait for it in all_reduce" in str(error)


def test_an_event_that_nobody_sets_is_no_collective():
    def work() -> None:
        if dist.get_rank() == 1:
            threading.Event().wait()
        add_ranks()

    error, _ = failing(work, 2, timeout=3)
    assert error.ranks == [1] and "rank 1 of 2 did not finish" in str(error)


def test_a_rank_returns_early():
    def work() -> None:
        if dist.get_rank() == 2:
            return
        add_ranks()

    error, _ = failing(work, timeout=3)
    assert error.ranks == [2] and "returned early" in str(error)


def test_collectives_in_another_order():
    def work() -> None:
        a, b = torch.ones(4), torch.ones(3)
        if dist.get_rank() == 1:
            dist.broadcast(b, 0)
            dist.all_reduce(a)
        else:
            dist.all_reduce(a)
            dist.broadcast(b, 0)

    error, _ = failing(work, timeout=3)
    assert error.ranks == [1]
    assert "rank 1 called broadcast(float32[3])" in str(error)
    assert "ranks 0, 2 and 3 called all_reduce(float32[4])" in str(error)


def test_collectives_of_a_technique_in_another_order():
    """Those that torch has renamed are in the log like all others, with the technique's line."""

    def work() -> None:
        group = dist.group.WORLD
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(2))
        zero.all_gather(torch.ones(4), slice(0, 2), group).wait()
        zero.ReduceScatter(torch.ones(4), group, ordered=False).wait()

    error, _ = failing(work, 2, timeout=3)
    assert error.ranks == [1] and "parted ways" in str(error)
    assert "rank 1 called all_reduce(float32[2])" in str(error)
    assert "zero/flat.py" in str(error)


def test_sizes_that_do_not_match():
    def work() -> None:
        dist.all_reduce(torch.ones(5 if dist.get_rank() == 3 else 4))
        dist.barrier()

    error, _ = failing(work, timeout=3)
    assert error.ranks == [3] and "all_reduce(float32[5])" in str(error)


# Ranks that all return, and yet did not agree. gloo gives them garbage, and says nothing.


def shape(me: int) -> None:
    dist.broadcast(torch.ones(4 + me), 0)


def shape_of_as_many(me: int) -> None:
    dist.all_reduce(torch.ones(2 + me, 3 - me))


def type_(me: int) -> None:
    dist.all_reduce(torch.ones(4, dtype=[torch.float32, torch.int32][me]))


def operation(me: int) -> None:
    dist.all_reduce(torch.ones(4), [dist.ReduceOp.SUM, dist.ReduceOp(dist.ReduceOp.MAX)][me])


def number_of_bytes_gathered(me: int) -> None:
    dist.gather(torch.ones(4 - me), [torch.ones(4) for _ in range(2)] if not me else None)


def type_in_parts(me: int) -> None:
    x = torch.ones(4, dtype=[torch.float32, torch.int32][me])
    dist.all_to_all_single(x.clone(), x, [2, 2], [2, 2])


def sizes_in_a_group(me: int) -> None:
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3), group=group)
    if me == 0:
        dist.broadcast(torch.ones(3), 0, group)
    else:
        dist.broadcast(torch.ones(5), group_src=0, group=group)


DISAGREE = {
    shape: ("broadcast(float32[4])", "broadcast(float32[5])"),
    shape_of_as_many: ("all_reduce(float32[2, 3])", "all_reduce(float32[3, 2])"),
    type_: ("all_reduce(float32[4])", "all_reduce(int32[4])"),
    operation: ("SUM", "MAX"),
    number_of_bytes_gathered: ("gather(float32[4])", "gather(float32[3])"),
    type_in_parts: ("all_to_all_single(float32[4]", "all_to_all_single(int32[4]"),
    sizes_in_a_group: ("number 2", "broadcast(float32[3])", "broadcast(float32[5])"),
}


@pytest.mark.parametrize("calls", DISAGREE, ids=lambda calls: calls.__name__)
def test_ranks_that_return_without_having_agreed(calls):
    error, seconds = failing(lambda: calls(dist.get_rank()), 2)
    assert error.ranks == [1] and seconds < 30
    for word in ("rank 0 called", "rank 1 called", "test_ranks.py, line", *DISAGREE[calls]):
        assert word in str(error)


def test_a_disagreement_among_fresh_ranks():
    error, _ = failing(
        lambda: dist.broadcast(torch.ones(4 + dist.get_rank() // 2), 0), 3, 60, "fresh"
    )
    assert error.ranks == [2] and "ranks 0 and 1 called broadcast(float32[4])" in str(error)


# What differs between ranks by right.


def parts(me: int) -> None:
    mine = torch.ones(2 + me)  # to rank 0: 1 and 2; to rank 1: 1 and 1
    got = torch.empty(3 - me)
    dist.all_to_all_single(got, mine, [1, 2 - me], [1 + me, 1])
    share = torch.empty(4 + me)
    dist.reduce_scatter(share, [torch.ones(4), torch.ones(5)])


def roots(me: int) -> None:
    x, every = torch.ones(4), [torch.ones(4) for _ in range(2)]
    dist.gather(x, every if me else None, 1)
    dist.scatter(x, None if me else every, 0)
    dist.gather_object(me, [None, None] if me else None, 1)
    dist.gather(x, every if not me else None, **({} if me else {"dst": 0}))


def objects(me: int) -> None:
    dist.all_gather_object([None, None], "x" * 10**me)
    dist.broadcast_object_list([7 if me else None], 1)


def spelling(me: int) -> None:
    out, x = torch.empty(4), torch.ones(2)
    if me:
        dist.all_gather_into_tensor(out, x)
        dist.broadcast(x, 1)
        dist.all_reduce(x, dist.ReduceOp.MAX)
    else:
        dist.all_gather_into_tensor(input_tensor=x, output_tensor=out)
        dist.broadcast(group_src=1, tensor=x)
        dist.all_reduce(op=dist.ReduceOp(dist.ReduceOp.MAX), tensor=x, group=dist.group.WORLD)


def a_flat_view(me: int) -> None:
    dist.all_reduce(torch.ones(6) if me else torch.ones(2, 3))
    dist.all_reduce(torch.ones(2, 3) if me else torch.ones(2, 1, 3))


def groups(me: int) -> None:
    each = [dist.new_group([0]), dist.new_group([1])]
    dist.all_reduce(torch.ones(3 + me), group=each[me])
    if me:  # who is not in it is told, and passed by
        dist.broadcast(torch.ones(3), 1, group=each[1])
        dist.all_reduce(torch.ones(4), group=each[0])


def two_groups_in_another_order(me: int) -> None:
    long, short = dist.new_group([0, 1]), dist.new_group([0, 1])
    begun = [(short, 2), (long, 4)] if me else [(long, 4), (short, 2)]
    for work in [dist.all_reduce(torch.ones(n), group=g, async_op=True) for g, n in begun]:
        work.wait()


def past_the_log(me: int) -> None:
    broadcast = dist.distributed_c10d.broadcast if me else dist.broadcast
    broadcast(torch.ones(4), 0)
    dist.broadcast(torch.ones(5), 0)


def a_mistake_that_was_caught(me: int) -> None:
    if me:
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            dist.all_reduce(torch.ones(3), group=7)
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            dist.broadcast(torch.ones(3), 9)
    dist.broadcast(torch.ones(5), 0)


def worlds_of_their_own(me: int) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    dist.all_reduce(torch.ones(3 + me))


def messages(me: int) -> None:
    for size in (3, 5):
        if me:
            dist.recv(torch.empty(size), 0)
        else:
            dist.send(torch.ones(size), 1)
    ranks.exchange(torch.ones(1 + me), 1 - me, torch.empty(2 - me), 1 - me).wait()


BY_RIGHT = [
    *(parts, roots, objects, spelling, a_flat_view, groups),
    *(two_groups_in_another_order, past_the_log, a_mistake_that_was_caught),
    *(worlds_of_their_own, messages),
]


@pytest.mark.parametrize("calls", BY_RIGHT, ids=lambda calls: calls.__name__)
def test_what_differs_by_right_is_no_disagreement(calls):
    run(lambda: calls(dist.get_rank()), 2, timeout=20)


def test_all_ranks_wait_for_each_other():
    def work() -> None:
        ranks.irecv(torch.empty(1), (dist.get_rank() + 1) % 2).wait()

    error, _ = failing(work, 2, timeout=3)
    assert error.ranks == [0, 1] and "every one waits for another" in str(error)


@pytest.mark.parametrize("method", ["fork", "fresh"])
def test_a_result_that_cannot_be_sent_back(method: str):
    def work() -> object:
        return (i for i in range(3)) if dist.get_rank() == 1 else 0

    error, _ = failing(work, 2, method=method)
    assert error.ranks == [1]
    assert "generator" in str(error) and "cannot be sent" in str(error)


def test_helpers_of_a_rank_end_with_it():
    def work() -> None:
        print(subprocess.Popen(["sleep", "1000"]).pid)
        if dist.get_rank() == 0:
            raise ValueError("no")
        time.sleep(1000)

    with pytest.raises(RankError):
        run(work, 2)
    assert not [pid for pid in sleepers() if pid["seconds"] == "1000"]


def sleepers() -> list[dict[str, str]]:
    """All `sleep` commands of this machine that are still alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
            state = path.with_name("stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if words[0] == "sleep" and state != "Z":
            found.append({"pid": path.parent.name, "seconds": words[1]})
    return found


# The caller.


@pytest.mark.parametrize("uncaught", [True, False])
def test_an_interrupted_script_ends_in_three_lines(uncaught: bool, tmp_path: Path):
    script = tmp_path / "caller.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, signal, time
            from shardlab.ranks import run
            signal.signal(signal.SIGINT, signal.default_int_handler)
            def work():
                print("begun")
                if os.environ["RANK"] == "1":
                    os.kill(os.getppid(), signal.SIGINT)
                time.sleep(1000)
            def outer():
                run(work, 2)
            try:
                outer()
            except KeyboardInterrupt:
                if {uncaught}:
                    raise
            1 / 0
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert "[rank 1] begun" in done.stdout
    if uncaught:
        assert len(lines) == 3 and lines[0] == "Interrupted: work was running on 2 ranks."
        assert done.returncode == -signal.SIGINT
    else:  # other errors are shown as ever
        assert lines[0].startswith("Traceback") and lines[-1].startswith("ZeroDivisionError")


def test_an_interrupted_caller_leaves_no_rank(leaves_nothing):
    main = threading.main_thread().ident
    assert main is not None
    # Whoever was started in the background of a script ignores this signal until told otherwise.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(1.0, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt) as caught:
            run(lambda: time.sleep(1000), 2)
        (text,) = caught.value._render_traceback_()  # what a notebook shows
        assert len(text.splitlines()) == 3
    finally:
        signal.signal(signal.SIGINT, before)
    assert run(add_ranks, 2)[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("method", ["fork", "fresh"])
def test_a_killed_caller_leaves_nothing(tmp_path: Path, method: str, end: signal.Signals):
    """No rank, whatever it is at, nothing that a rank has started, and no folder."""
    script, folder, pids = tmp_path / "caller.py", tmp_path / "temporary", tmp_path / "pids"
    folder.mkdir()
    pids.mkdir()
    script.write_text(
        textwrap.dedent(
            f"""
            import ctypes, os, subprocess, torch.distributed as dist
            from shardlab.ranks import run
            def work():
                me = dist.get_rank()
                helper = subprocess.Popen(["sleep", "1000"])
                for pid in (os.getpid(), helper.pid):
                    open({str(pids)!r} + f"/{{pid}}", "w").close()
                if me == 1:
                    dist.recv(__import__("torch").ones(1), 0)
                while True:
                    pass
            run(work, 2, method={method!r})
            """
        )
    )
    environment = {**os.environ, "TMPDIR": str(folder)}
    caller = subprocess.Popen([sys.executable, str(script)], env=environment)
    deadline = time.monotonic() + 60
    while len(list(pids.iterdir())) < 4:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    assert list(folder.iterdir())
    caller.send_signal(end)
    caller.wait()
    while left := [p.name for p in pids.iterdir() if alive(int(p.name))] + list(folder.iterdir()):
        assert time.monotonic() < deadline, f"outlived their caller: {left}"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether that process is there, and no mere entry that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_caller_leaves_no_rank_that_lets_no_thread_run(tmp_path: Path):
    script, file = tmp_path / "caller.py", tmp_path / "pid"
    script.write_text(
        textwrap.dedent(
            f"""
            import ctypes, os
            from shardlab.ranks import run
            def work():
                open({str(file)!r}, "w").write(str(os.getpid()))
                ctypes.PyDLL(None).sleep(1000)  # holds Python's lock
            run(work, 1)
            """
        )
    )
    caller = subprocess.Popen([sys.executable, str(script)])
    deadline = time.monotonic() + 60
    while not file.exists() or not file.read_text():
        assert time.monotonic() < deadline, "the rank did not start"
        time.sleep(0.05)
    time.sleep(0.5)
    caller.kill()
    caller.wait()
    while alive(int(file.read_text())):
        assert time.monotonic() < deadline, "a rank outlived its caller"
        time.sleep(0.05)


@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1", "0 1 2"])
@pytest.mark.parametrize("method", ["fork", "fresh"])
def test_a_caller_without_standard_streams(closed: str, method: str, tmp_path: Path):
    if method == "fresh" and closed != "0 1 2":
        pytest.skip("takes seconds, and the most is tried")
    script, results = tmp_path / "caller.py", tmp_path / "results"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, sys, torch, torch.distributed as dist
            from shardlab.ranks import run
            def work():
                print("said")
                os.write(2, b"straight\\n")
                assert not os.read(0, 1)
                x = torch.ones(1)
                dist.all_reduce(x)
                return x.item()
            found = [run(work, 2, method={method!r}) for _ in range(2)]
            if sys.stdout:
                sys.stdout.close()
            found.append(run(work, 2, method={method!r}))
            open({str(results)!r}, "w").write(str(found))
            """
        )
    )
    shut = " ".join(f"{number}>&-" for number in closed.split())
    command = f"exec {sys.executable} {script} {shut}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert results.read_text() == str([[2.0, 2.0]] * 3), done.stderr
    lines = [f"[rank {rank}] {text}" for rank in (0, 1) for text in ("said", "straight")]
    assert done.stdout.splitlines() == ([] if "1" in closed else lines * 2)


def test_interrupts_wrap_the_hook_for_errors_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def interrupt() -> None:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(1000)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    hooks = []
    try:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                run(interrupt, 1)
            hooks.append(sys.excepthook)
    finally:
        signal.signal(signal.SIGINT, before)
    assert hooks[0] is hooks[1]


def test_many_starts_in_a_row():
    for _ in range(25):
        assert run(lambda: dist.get_rank(), 4) == [0, 1, 2, 3]  # without a single collective


# Bad input, before any process starts.


@pytest.mark.parametrize("value", [0, -1, -100])
def test_world_size_below_one(value: int):
    with pytest.raises(ValueError, match=f"world_size={value}: allowed is a whole number"):
        run(add_ranks, value)


@pytest.mark.parametrize("value", ["2", 2.0, None, True, [2]])
def test_world_size_not_a_number(value: object):
    with pytest.raises(TypeError, match="world_size=.*allowed is a whole number"):
        run(add_ranks, value)


def test_more_ranks_than_the_machine_can_run():
    allowed = ranks.max_ranks()
    with pytest.raises(ValueError, match=f"world_size=10000: .*allowed are 1 to {allowed}"):
        run(add_ranks, 10_000)
    assert issubclass(ranks.WorldSizeError, RankError)


def test_arguments_that_do_not_fit():
    def work(a: int, b: int) -> int:
        return a + b

    with pytest.raises(TypeError, match=r"work\(a.*cannot be called with the 1 given arguments"):
        run(work, 2, 1)
    with pytest.raises(TypeError, match="run needs a function"):
        run("work", 2)


@pytest.mark.parametrize(
    "timeout", [0, -1, "long", True, math.nan, math.inf, 1e300, 10**400, 366 * 24 * 3600]
)
def test_timeout_not_a_time(timeout: object):
    with pytest.raises(ValueError, match="timeout=.*seconds above 0, 31536000 .* at most"):
        run(add_ranks, 2, timeout=timeout)


def test_the_longest_timeout():
    assert run(add_ranks, 2, timeout=365 * 24 * 3600)[0].tolist() == [1, 1, 1]


def test_other_bad_arguments():
    with pytest.raises(ValueError, match="method='thread': allowed are 'auto', 'fork' and 'fresh'"):
        run(add_ranks, 2, method="thread")
    with pytest.raises(ValueError, match="device='tpu': allowed are"):
        run(add_ranks, 2, device="tpu")
    with pytest.raises(TypeError, match="cannot be sent to a fresh process"):
        lock = threading.Lock()
        run(lambda: lock, 2, method="fresh")


def test_a_run_inside_a_rank_is_refused():
    with pytest.raises(RankError, match="run was called inside a rank"):
        run(lambda: run(add_ranks, 2), 1)


def test_without_a_gpu_cuda_is_refused():
    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match="device='cuda': this machine has no CUDA GPU"):
        run(add_ranks, 2, device="cuda")
    assert ranks.place(2) == ("gloo", "cpu") and ranks.device() == torch.device("cpu")


def test_a_fork_that_would_break_cuda_is_noticed(monkeypatch: pytest.MonkeyPatch):
    # A build for CUDA leaves its trace where it finds no driver's library to ask.
    if not torch.cuda.is_initialized() and (torch.cuda.device_count() or not torch.version.cuda):
        assert start.cuda_survives_fork()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)  # what a child would find
    assert not start.cuda_survives_fork()


# Point-to-point messages.


def test_messages_go_round_in_a_group_of_their_own():
    def work() -> list[float]:
        group = dist.new_group([1, 3])
        if dist.get_rank() not in (1, 3):
            return []
        me = dist.get_rank(group)
        got = torch.zeros(4, 2).t()  # not contiguous
        out = ranks.isend(torch.full((2, 4), float(me)), 1 - me, group)
        ranks.irecv(got, 1 - me, group).wait()
        out.wait()
        return got.flatten().tolist()

    assert run(work, 4) == [[], [1.0] * 8, [], [0.0] * 8]


def test_staging_through_the_host(monkeypatch: pytest.MonkeyPatch):
    # On a machine without a GPU the copies are real, and the two memories happen to be the same.
    from shardlab.ranks import p2p

    monkeypatch.setattr(p2p, "_through_host", lambda *_: True)

    def work() -> list[float]:
        me, got = dist.get_rank(), torch.zeros(3)
        out = ranks.isend(torch.arange(3.0) + me, 1 - me)
        ranks.irecv(got, 1 - me).wait()
        out.wait()
        return got.tolist()

    assert run(work, 2) == [[1, 2, 3], [0, 1, 2]]


@pytest.mark.parametrize("staged", [False, True])
def test_an_exchange_in_a_ring(staged: bool, monkeypatch: pytest.MonkeyPatch):
    from shardlab.ranks import p2p

    if staged:
        monkeypatch.setattr(p2p, "_through_host", lambda *_: True)

    def work() -> list[float]:
        group = dist.new_group([0, 2, 3])
        if dist.get_rank() == 1:
            return []
        me, got = dist.get_rank(group), torch.zeros(2, 2).t()  # not contiguous
        mine = torch.arange(4.0).view(2, 2).t() + me
        message = ranks.exchange(mine, (me + 1) % 3, got, (me - 1) % 3, group)
        message.wait()
        message.wait()  # a second time is nothing
        return got.flatten().tolist()

    after = [[value + rank for value in (0, 2, 1, 3)] for rank in range(3)]
    assert run(work, 4) == [after[2], [], after[0], after[1]]


def test_a_peer_outside_the_group():
    with pytest.raises(RankError, match="peer=2: this group has ranks 0 to 1"):
        run(lambda: ranks.isend(torch.ones(1), 2), 2)


def test_an_error_that_all_ranks_make_is_theirs():
    def work() -> None:
        dist.reduce_scatter_tensor(torch.empty(3), torch.ones(7))

    error, _ = failing(work, 2)
    assert "rank 0 of 2 raised RuntimeError" in str(error) and "test_ranks.py" in str(error)


# In a notebook.


def test_a_notebook_stays_usable_after_every_failure():
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    cells = [
        "import os, time, torch, torch.distributed as dist\n"
        "from shardlab.ranks import run\n"
        "x = torch.rand(512, 512); (x @ x).sum()\n"  # warms OpenMP up before the first fork
        "def good():\n    dist.barrier(); print('fine'); return dist.get_rank()",
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
        assert outputs[index][0]["text"] == "[rank 0] fine\n[rank 1] fine\n"
        assert outputs[index][1]["data"]["text/plain"] == "[0, 1]"
    texts = ["".join(out[-1].get("traceback", [])) if out else "" for out in outputs]
    # The message alone, without the launcher's frames, and with the reader's own line.
    assert texts[2].startswith("RankError: rank 1 of 2 raised ValueError: boom")
    assert "at this notebook's cell, line 3, in bad" in texts[2]
    assert texts[4].startswith("RankError: rank 1 of 2 did not finish within 3 s")
    assert "were ended" in texts[5] or "was ended by SIGKILL" in texts[5]
    assert all(len(t.splitlines()) < 8 for t in texts)
