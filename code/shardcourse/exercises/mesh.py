"""Exercises of the lesson `mesh`."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardcourse.exercises import WrongAnswer, add_exercise
from shardcourse.exercises.forms import add_cases, compare_values, make_isclose, run_answer
from shardlab import mesh
from shardlab.common.shapes import Config
from shardlab.layout import Layout
from shardlab.mesh.job import Job, build_model, load_batch
from shardtools.commands.mesh import add_command, build_job


def _list_groups(rank: int, d: int, p: int, t: int, order: tuple = mesh.AXES) -> list[Any]:
    shape = Layout(dp=d, pp=p, tp=t, order=order)
    return [next(g for g in shape.list_groups(axis) if rank in g) for axis in mesh.AXES]


add_cases(
    "my_groups",
    [
        (rank, d, p, t)
        for d, p, t in ((2, 2, 2), (1, 3, 2), (4, 1, 2), (2, 3, 4))
        for rank in range(d * p * t)
    ],
    _list_groups,
    equal=lambda got, want: list(map(list, got)) == want,
    mistakes={
        "That would be right with tensor outermost; it is innermost.": partial(
            _list_groups, order=("tp", "pp", "dp")
        )
    },
    success="Right for every rank of four meshes.",
)


_MAX_STATE_BYTES, _MAX_RANKS = 300_000, 8
_MODEL_OPTIONS = ["--layers", "2", "--hidden", "64", "--heads", "4"]


def _parse_job(options: list[str]) -> Job:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_command(parser.add_subparsers())
    return build_job(parser.parse_args(["mesh", *_MODEL_OPTIONS, *options]))


def _find_max_bytes(job: Job) -> int:
    return max(sum(job.predict_state_bytes(rank).values()) for rank in range(job.layout.world_size))


@add_exercise("mesh_budget")
def _(answer: Any) -> str:
    if not isinstance(answer, str):
        raise WrongAnswer('The answer is a line of options, such as "--tp 2".')
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            job = _parse_job(answer.split())
    except (ValueError, argparse.ArgumentError) as error:
        raise WrongAnswer(f"The command refuses it: {error}") from None
    except SystemExit:  # the parser has already printed a message
        raise WrongAnswer(f"The command has no such options: {answer!r}.") from None
    if (job.config, job.layout.global_batch) != (_parse_job([]).config, 8):
        raise WrongAnswer("Leave the model and the batch as they are; choose degrees and stage.")
    if job.layout.world_size > _MAX_RANKS:
        raise WrongAnswer(f"That takes {job.layout.world_size} ranks; there are {_MAX_RANKS}.")
    held = _find_max_bytes(job)
    if held > _MAX_STATE_BYTES:
        words = f"The fullest rank would hold {held:,} of {_MAX_STATE_BYTES:,} B."
        if job.layout.zero < 3 and job.layout.dp > 1:
            words += f" In ZeRO stage {job.layout.zero} each copy still holds some states in full."
        elif job.layout.world_size < _MAX_RANKS:
            words += f" There are {_MAX_RANKS - job.layout.world_size} ranks left."
        raise WrongAnswer(words)
    return f"It fits: {held:,} B on the fullest rank."


_TIED_CONFIG = Config(seq=8, layers=2, heads=2, hidden=16)


def _compute_norms(answer: Callable[..., Any], p: int, t: int) -> list[Tensor]:
    """Return a rank's norms: the answer's, the right one, the local one, one with copies twice."""
    layout = Layout(pp=p, tp=t)
    groups = mesh.create_groups(layout, dist.group.WORLD)
    model = build_model(_TIED_CONFIG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(0.1)  # makes their gradients larger, so that a mistake shows
    job = mesh.Parallel(model, groups, layout)
    job.step(*load_batch(_TIED_CONFIG, 2, 0))
    gradients = {name: x.grad for name, x in job.named_parameters()}
    cut = {name for name, dimension in job.shard_dims.items() if dimension is not None}
    right = job.clip_grad_norm_(1e9)
    got = answer({name: x.clone() for name, x in gradients.items()}, cut, groups)
    if not isinstance(got, Tensor):
        return [got]
    alone = sum(x.square().sum() for x in gradients.values())
    twice = alone.clone()
    for group in (groups.tp, groups.pp):
        dist.all_reduce(twice, group=group)
    return [x.cpu() for x in (got, right, alone.sqrt(), twice.sqrt())]


@add_exercise("my_norm")
def _(answer: Callable[..., Any]) -> str:
    for p, t in ((2, 2), (2, 1)):
        found = run_answer(_compute_norms, p * t, answer, p, t)
        if any(len(one) == 1 for one in found):
            raise WrongAnswer(f"Return a scalar tensor, not {found[0][0]!r}.")
        got, right, alone, twice = map(list, zip(*found, strict=True))
        hints = {
            "That is the norm of this rank's gradients: add them up over both groups.": alone,
            "Replicated parameters and the tied weight are counted once per rank.": twice,
        }
        compare_values(got, right, "the norm", 1e-5, hints)
    return "The norm of one process, on every rank of 2 × 2 and of 2 × 1."


_CONFIG = Config(vocab=512, seq=64, layers=4, heads=4, hidden=64, tied=False)


def _count_egress_bytes(config: Config, shape: Layout, node: int, batch: int) -> float:
    how = config.seq, batch // shape.dp
    sent = [mesh.predict_sent_bytes(config, shape, rank, *how) for rank in range(shape.world_size)]
    return sum(map(sum, shape.count_node_egress(node, sent.__getitem__).values()))


def _is_feasible(config: Config, shape: Layout, limit: float, batch: int) -> bool:
    held = (mesh.predict_state_bytes(config, shape, rank) for rank in range(shape.world_size))
    return batch % shape.dp == 0 and max(sum(one.values()) for one in held) <= limit


def _find_min_egress(config: Config, size: int, node: int, limit: float, batch: int) -> Any:
    """Return the fewest bytes that cross nodes, over all layouts that fit; None if none fits."""
    found = []
    for d, p in product(range(1, size + 1), repeat=2):
        if size % (d * p):
            continue
        shape = Layout(dp=d, pp=p, tp=size // (d * p), zero=1)
        try:
            mesh.check_supported(config, shape)
        except ValueError:
            continue
        if _is_feasible(config, shape, limit, batch):
            found.append(_count_egress_bytes(config, shape, node, batch))
    return min(found, default=None)


def _check_egress(
    answer: Callable[..., Any], config: Config, size: int, node: int, limit: float, batch: int
) -> float | None:
    """Return the bytes that cross nodes with the answer's layout; ValueError if it does not fit."""
    shape = answer(config, size, node, limit, batch)
    if shape is None:
        return None
    if shape.world_size != size or shape.zero != 1:
        raise ValueError(f"layout={shape}: must have {size} ranks and zero=1")
    mesh.check_supported(config, shape)
    if not _is_feasible(config, shape, limit, batch):
        raise ValueError(f"{shape}: a rank exceeds the limit, or d does not divide the batch")
    return _count_egress_bytes(config, shape, node, batch)


add_cases(
    "my_mesh",
    (
        (_CONFIG, 8, 4, 100e6, 8),
        (_CONFIG, 8, 2, 1.2e6, 16),
        (_CONFIG, 16, 4, 0.5e6, 8),  # rank 0 is not the fullest
        (_CONFIG, 6, 2, 2e6, 8),  # 3 and 6 do not divide the batch
        (_CONFIG, 8, 4, 1000, 8),
    ),
    _find_min_egress,
    call=_check_egress,
    equal=make_isclose(1e-9),
    success="Right for 5 clusters; on one of them nothing fits.",
    explain=lambda job, got, want: f"This number of bytes leaves the nodes; right is {want}.",
)
