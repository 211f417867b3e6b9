"""What CUDA and nccl refuse or get wrong in silence, a small case of each; and what they allow."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rehearsal.machine import HERE
from shardlab import ranks

from .common import on, waits, world


def _x() -> torch.Tensor:
    return torch.ones(4, 4, device=ranks.device())


def _on_cpu() -> torch.Tensor:
    return torch.ones(4, 4)


def _early() -> float:
    begin = time.perf_counter()
    _x() @ _x()
    return time.perf_counter() - begin


def _in_time() -> float:
    begin = time.perf_counter()
    (_x() @ _x()).sum().item()
    time.perf_counter()  # read, and not used
    return time.perf_counter() - begin


def _read_early() -> Any:
    there = torch.empty(4, 4, pin_memory=True)
    there.copy_(_x(), non_blocking=True)
    return there.sum()


def _read_in_time() -> Any:
    there = torch.empty(4, 4, pin_memory=True)
    there.copy_(_x(), non_blocking=True)
    torch.cuda.synchronize()
    return there.sum()


REFUSED: dict[str, list[Callable[[], Any]]] = {
    "devices": [
        lambda: _x() + _on_cpu(),
        lambda: _x() @ _on_cpu(),
        lambda: _x()[0].copy_(_x()[0]).add_(_on_cpu()[0]),
        lambda: torch.nn.functional.embedding(torch.zeros(2, dtype=torch.int64), _x()),
        lambda: torch.nn.Linear(4, 4)(_x()),
    ],
    "generator": [
        lambda: torch.rand(3, device=ranks.device(), generator=torch.Generator()),
        lambda: _x().normal_(generator=torch.Generator()),
    ],
    "numpy": [lambda: _x().numpy(), lambda: _x().__array__()],
    "kernel": [lambda: torch.histogram(_x(), 3)],
    "dtype": [lambda: _x().long() @ _x().long()],
    "ordinal": [lambda: torch.ones(1, device=f"cuda:{HERE.gpus}")],
    "memory": [lambda: torch.empty(HERE.total, device=ranks.device())],
    "clock": [_early],
    "race": [_read_early],
}
ALLOWED: list[Callable[[], Any]] = [
    lambda: _x() + torch.tensor(2.0),  # one number from the CPU
    lambda: _x()[torch.tensor([0, 2])],  # indices are brought there
    lambda: _x().cpu().numpy(),
    lambda: torch.rand(3, device="cuda", generator=torch.Generator(ranks.device())),
    _in_time,
    _read_in_time,
]


def each_alone():
    for kind, cases in REFUSED.items():
        for number, case in enumerate(cases):
            try:
                case()
            except Exception as error:
                assert f"[rehearsal: {kind}]" in str(error), f"{kind} {number}: {error}"
            else:
                raise AssertionError(f"{kind} {number}: passed")
            torch.cuda.synchronize()
    for number, case in enumerate(ALLOWED):
        try:
            case()
        except Exception as error:
            raise AssertionError(f"what is allowed, {number}: {error}") from error


def waits_are_counted():
    x, device = _x(), ranks.device()
    pinned = torch.ones(4).pin_memory()
    free = [
        lambda: torch.full((3,), 2.0, device=device),
        lambda: x.sum() + 1,
        lambda: pinned.to(device, non_blocking=True),
        lambda: torch.arange(3, device=device),
    ]
    waiting = [
        lambda: torch.tensor([1.0, 2.0], device=device),
        lambda: x.sum().item(),
        lambda: x.tolist(),
        lambda: x.cpu(),
        lambda: torch.ones(3).to(device),
        lambda: bool(x[0, 0] > 0),
        lambda: x[x > 0],
        lambda: torch.cuda.synchronize(),
    ]
    for count, cases in ((0, free), (1, waiting)):
        for number, case in enumerate(cases):
            with waits() as found:
                case()
            assert len(found) == count, f"{number} of those that wait {count} times: {found}"


@on(2, 4)
def nccl():
    """Ranks have a GPU each."""
    group, rank, size = world()
    x = _x()
    work = dist.all_reduce(x, async_op=True)
    _refused("race", lambda: x + 1)
    work.wait()
    assert (x == size).all()
    _refused("group", lambda: dist.all_reduce(x.t()[:2]))
    dist.barrier()
    # All send first, in one call: allowed. One after another: not.
    got, after, before = torch.empty_like(x), (rank + 1) % size, (rank - 1) % size
    both = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, got, before)]
    for one in dist.batch_isend_irecv(both):
        one.wait()
    assert (got == size).all()
    HERE.patience = 1.0
    _refused("connection", lambda: dist.isend(x, after))


def _refused(kind: str, case: Callable[[], Any]) -> None:
    try:
        case()
    except Exception as error:
        assert f"[rehearsal: {kind}]" in str(error), error
    else:
        raise AssertionError(f"{kind}: passed")


@on(2, 4)
def nccls_wait_does_not_stop_the_process():
    _, rank, size = world()
    x, store = _x(), dist.distributed_c10d._get_default_store()
    dist.all_reduce(x)  # connects
    others = [f"rank {other} went on" for other in range(1, size)]
    if rank == 0:
        store.wait(others)  # gloo's own wait() would keep the others from it
    dist.all_reduce(x)
    if rank > 0:
        store.set(others[rank - 1], "")
    assert x[0, 0].item() == size**2
