"""Nothing in a step makes the host wait for a GPU: no value is read, no list becomes a tensor."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardlab import context_parallel as cp
from shardlab import data_parallel, pipeline, ranks, zero
from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp
from shardlab.gpt.model import GPT, Config, loss

SHAPE = {"vocab": 64, "seq": 16, "layers": 2, "heads": 4, "hidden": 32}
# Of a value on a GPU, each of these waits for what computes it; of the CPU's, none shows.
READING = ("aten._local_scalar_dense", "aten.equal", "aten.nonzero", "aten.masked_select")


class Reading(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = str(operator)
        masks = name.startswith("aten.index") and any(
            isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1])
        )
        assert not name.startswith(READING) and not masks, f"{name}: a GPU would be waited for"
        return operator(*args, **(kwargs or {}))


@contextmanager
def on_gpu():
    """Inside, tensors are no longer the CPU's, as far as anybody asks: and nobody may read one."""

    def refused(*args, **kwargs):
        raise AssertionError("a copy from the host, or to it: a GPU would be waited for")

    with pytest.MonkeyPatch.context() as patch, Reading():
        patch.setattr(torch.Tensor, "is_cpu", property(lambda _: False))
        for name in ("cpu", "numpy", "tolist"):
            patch.setattr(torch.Tensor, name, refused)
        for name in ("tensor", "as_tensor", "from_numpy"):
            patch.setattr(torch, name, refused)
        yield


def gpt():
    torch.manual_seed(0)
    return GPT(Config(**SHAPE))


def step_of(name):
    """A step by this technique, as a function of a batch."""
    group = dist.group.WORLD
    if name.startswith("zero"):
        model = zero.shard(gpt(), group, int(name[-1]))
        return lambda x, y: (loss(model(x), y).backward(), model.clip_grad_norm_(1.0))
    if name == "data_parallel":
        model = data_parallel.DataParallel(gpt(), group)

        def step(x, y):
            data_parallel.joined_mean(loss(model(x), y) * y.numel(), y.numel(), group).backward()

        return step
    if name == "tensor_parallel":
        model = tp.parallelize(gpt(), group)
        return lambda x, y: (tp.loss(model(x), y, group).backward(), tp.clip_grad_norm_(model, 1.0))
    if name == "along_sequence":
        model = tp.parallelize(gpt(), group, edges=sp.ALONG_SEQUENCE)
        return lambda x, y: (
            tp.loss(model(x), y, group).backward(),
            sp.sum_gradients(model, group),
        )
    if name in ("ring", "ulysses"):
        model = cp.distribute(gpt(), group, name)

        def step(x, y):
            x, y = (cp.shard(part, group) for part in (x, y))
            loss(model(x), y).backward()
            cp.average_gradients(model, group)

        return step
    staged = pipeline.distribute(gpt(), pipeline.schedule(name, 2, 4), group)
    return staged.step


def steps(names):
    batch = torch.randint(64, (4, 17))
    x, y = batch[:, :-1], batch[:, 1:]
    for name in names:
        step = step_of(name)
        step(x, y)  # what is made once
        with on_gpu():
            step(x, y)


@pytest.mark.parametrize(
    "names",
    [
        ("data_parallel",),
        ("zero1", "zero2", "zero3"),
        ("tensor_parallel", "along_sequence", "ring", "ulysses"),
        ("1f1b", "zb-h1"),
    ],
)
def test_a_step_reads_nothing_and_copies_nothing_from_the_host(names):
    ranks.run(steps, 2, names, device="cpu")


def reads():
    x = torch.ones(3)
    for read in (lambda: x.sum().item(), lambda: bool(x[0]), lambda: x[x > 0], lambda: x.tolist()):
        with pytest.raises(AssertionError), on_gpu():
            read()


def test_the_watch_sees_who_reads():
    reads()
