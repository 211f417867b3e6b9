"""Lesson `mesh`: its exercises accept solutions, and help with common mistakes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from answers import each, judged

from shardlab import mesh
from shardlab.layout import Layout


def groups(rank, d, p, t, order=mesh.AXES):
    shape = Layout(dp=d, pp=p, tp=t, order=order)
    return [next(g for g in shape.groups(axis) if rank in g) for axis in mesh.AXES]


def norm(gradients, cut, groups, whole_once=True, twin=False, added=True):
    square = torch.zeros((), device=next(iter(gradients.values())).device)
    for name, gradient in gradients.items():
        counts = name in cut or not whole_once or dist.get_rank(groups.tp) == 0
        if counts and (twin or name != "head.weight"):
            square += gradient.square().sum()
    for group in (groups.tp, groups.pp) if added else ():
        dist.all_reduce(square, group=group)
    return square.sqrt()


def choice(config, ranks, node, limit, batch, worst=False, limited=True):
    found = {}
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for d, t in ((d, t) for d in sizes for t in sizes if ranks % (d * t) == 0):
        shape = Layout(dp=d, pp=ranks // (d * t), tp=t, zero=1)
        try:
            mesh.check_cuts(config, shape)
        except ValueError:
            continue
        held = [sum(mesh.predicted_states(config, shape, r).values()) for r in range(ranks)]
        if batch % d or (limited and max(held) > limit):
            continue
        how = config.seq, batch // d
        sent = [mesh.predicted_sent(config, shape, r, *how) for r in range(ranks)]
        found[shape] = sum(map(sum, shape.leaving(node, sent.__getitem__).values()))
    return (max if worst else min)(found, key=found.get, default=None)


ANSWERS = [
    ("my_groups", groups, None),
    ("my_groups", lambda *_: None, "return three lists, not None"),
    ("my_groups", lambda *a: groups(*a)[:2], "return three lists"),
    ("my_groups", lambda *a: [g[::-1] for g in groups(*a)], "they should ascend"),
    ("my_groups", lambda *a: groups(*a, order=("tp", "pp", "dp")), "it is innermost"),
    ("my_groups", lambda r, d, p, t: [[r]] * 3, "the data group has 1 ranks; there are d=2"),
    ("my_groups", lambda r, d, p, t: [[r + 1, r + 2]] * 3, "does not hold the rank itself"),
    ("my_groups", lambda rank: None, "raised TypeError"),
    ("mesh_budget", "--dp 2 --tp 4 --zero 3", None),
    ("mesh_budget", "--dp 8 --zero 3", None),
    ("mesh_budget", "--tp 2", "There are 6 ranks left"),
    ("mesh_budget", "--dp 8 --zero 1", "In ZeRO's stage 1 copies hold something whole"),
    ("mesh_budget", "--tp 4 --hidden 32", "Leave the model as it is"),
    ("mesh_budget", "--dp 4 --tp 4 --zero 3 --batch 16", "That takes 16 ranks; there are 8"),
    ("mesh_budget", "--tp 3", "The command refuses it: heads=4"),
    ("mesh_budget", "--warp 9", "The command"),
    ("mesh_budget", 2, "a line of options"),
    ("my_norm", norm, None),
    ("my_norm", lambda *_: None, "Return a scalar tensor"),
    ("my_norm", lambda *a: norm(*a, added=False), "add them up over both groups"),
    ("my_norm", lambda *a: norm(*a, whole_once=False, twin=True), "and the twin as well"),
    ("my_norm", lambda *a: norm(*a, twin=True), "The tied embedding counts twice"),
    ("my_norm", lambda *a: norm(*a, whole_once=False), "counts t times"),
    ("my_mesh", choice, None),
    ("my_mesh", lambda *_: None, "there is one that fits"),
    ("my_mesh", lambda *_: 8, "That is no Layout of 8 ranks"),
    ("my_mesh", lambda *_: Layout(tp=8, zero=1), "heads=4"),
    ("my_mesh", lambda *a: choice(*a, worst=True), "are enough"),
    ("my_mesh", lambda *a: choice(*a, limited=False), "A rank holds too much"),
]


@each(ANSWERS)
def test_exercises_accept_the_solution_and_help_with_mistakes(name, answer, words):
    judged(name, answer, words)
