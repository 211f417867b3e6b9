"""On a mesh of two axes as on one: of random programs, all that pass are right."""

import random
from itertools import product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensor_programs import OPERATORS
from torch.distributed.device_mesh import init_device_mesh

from shardlab import ranks
from shardlab import tensor_types as tt

AXES = "a", "b"
MOVES = {"f": "IR", "g": "PI", "gather": "VI", "split": "IV"}
PAIRS = ["".join(pair) for pair in product("IRV", repeat=2)]
STEPS = [*product(MOVES, AXES), *product(("*", "+"), PAIRS), ("gelu", "")]
SIZE = 4


def draw(number):
    """Programs in which a step that does not fit is mostly drawn again."""
    chance, found = random.Random(0), []
    while len(found) < number:
        program, words, length = [], {"a": "I", "b": "I"}, chance.randint(2, 6)
        while len(program) < length or {*words.values()} != {"V"} and chance.random() < 0.97:
            step = chance.choice(STEPS)
            while after(words, step) is None and chance.random() < 0.97:
                step = chance.choice(STEPS)
            program.append(step)
            words = after(words, step) or words
        found.append(program)
    return found


def after(words, step):
    kind, of = step
    try:
        if kind in MOVES:
            return words | {of: tt.moved(words[of], *MOVES[kind])}
        mine = dict(zip(AXES, of, strict=True)) if of else {}
        return {
            a: tt.combined([words[a], *mine.get(a, "")], [False] * (1 + bool(of)), "other")
            for a in AXES
        }
    except tt.Mismatch:
        return None


def numbers(seed, word, groups):
    """Four numbers: others along the axes on which the word is V."""
    for axis, w in zip(AXES, word, strict=True):
        seed = 5 * seed + (1 + groups[axis].rank() if w == "V" else 0)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SIZE, generator=generator, dtype=torch.float64)


def tensors(groups):
    words = {"x": "II", **{pair: pair for pair in PAIRS}}
    made = {n: numbers(i, w, groups).requires_grad_() for i, (n, w) in enumerate(words.items())}
    for name, word in words.items():
        tt.declare(made[name], **dict(zip(AXES, word, strict=True)))
    return made, words


def run(program, given, groups):
    y = given["x"] * 1.0
    for kind, of in program:
        if kind in MOVES:
            y = OPERATORS[kind](y, groups[of])
            if kind == "gather":
                y = y.unflatten(0, (-1, SIZE)).sum(0)
            elif kind == "split":
                y = torch.cat([y] * 2)
        elif kind == "gelu":
            y = F.gelu(y)
        else:
            y = y * given[of] if kind == "*" else y + given[of]
    for axis in AXES:
        y = OPERATORS["g"](y, groups[axis])
    return y


def judged(programs):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=AXES)
    groups = {axis: mesh.get_group(axis) for axis in AXES}
    weights, found = torch.arange(1.0, SIZE + 1, dtype=torch.float64), []
    for program in programs:
        given, _ = tensors(groups)
        try:
            with tt.checking(**groups):
                run(program, given, groups)
            passes = True
        except tt.Mismatch:
            passes = False
        given, words = tensors(groups)
        (run(program, given, groups) * weights).sum().backward()
        off = torch.zeros((), dtype=torch.float64)
        used = {"x", *(of for _, of in program)}
        for i, (name, word) in enumerate(words.items()):
            if name not in used:
                continue
            parameter, way = given[name], numbers(100 + i, word, groups)
            claim = torch.zeros((), dtype=torch.float64)
            if parameter.grad is not None:
                claim = (parameter.grad * way).sum()
            for axis, w in zip(AXES, word, strict=True):
                if w != "I":
                    dist.all_reduce(claim, group=groups[axis])
            with torch.no_grad():
                losses = []
                for width in (1e-6, -2e-6):
                    parameter += width * way
                    losses.append((run(program, given, groups) * weights).sum())
                parameter += 1e-6 * way
            truth = (losses[0] - losses[1]) / 2e-6
            # As in `programs`: central differences of float64.
            off += ((claim - truth).abs() > 1e-4 * (1 + truth.abs())).double()
        dist.all_reduce(off)
        found.append((passes, off.item() == 0))
    return found


def test_of_100_random_programs_on_two_axes_all_that_pass_are_right():
    found = ranks.run(judged, 4, draw(100), device="cpu", timeout=250, show=False)
    assert all(other == found[0] for other in found)
    right = [right for passes, right in found[0] if passes]
    assert len(right) > 30 and all(right)
    assert sum(not right for passes, right in found[0] if not passes) > 20
