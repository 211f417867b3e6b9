"""Benchmark of our checker against spmd_types: seconds to check one forward and backward.

    python benchmarks/tensor_types.py            # a table; half a minute
    python benchmarks/tensor_types.py --json     # {"rows": [{"case", "against", …}, …]}
    python benchmarks/tensor_types.py --quick    # toy sizes, seconds: only a smoke test

A tensor-parallel GPT runs layer by layer in one process, as rank 0 of a fake group: nothing is
sent. Three contenders take turns: the plain forward and backward; the same followed by our checker;
the same under spmd_types' (0.3.1, its local mode, which knows as much as ours), whose rules are
made from our operators' signatures. Both find nothing to refuse.

ratio: median seconds of ours over theirs, in each repeat; of that the median over the repeats, and
the quartiles. floor: plain over ours: no check is shorter than what it checks. It is nearer to 1
where layers are wide, for a check costs by the operation and not by its size.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
import warnings
from dataclasses import replace

import torch
import torch.distributed as dist
from side_by_side import make_row, parse_options, print_progress, print_rows

from shardlab import ranks
from shardlab import tensor_parallel as tp
from shardlab import tensor_types as tt
from shardlab.gpt.model import GPT, Config
from shardlab.tensor_parallel.core import _CopyTo, _ReduceFrom
from shardlab.tensor_parallel.cross_entropy import _CrossEntropy
from shardlab.tensor_types import spmd_rules

SHAPE = Config(vocab=256, seq=32, heads=8, hidden=64, kv_heads=8, tied=False)
BY_LAYER = tp.Edges(tp.copy_to, tp.reduce_from)
WARM_UP = 2  # rounds


def measure(layers: int, hidden: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contender's rounds, which take turns, in a fake process group."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    import spmd_types as spmd
    from spmd_types.checker import typecheck

    for operator in (_CopyTo, _ReduceFrom, _CrossEntropy):
        spmd_rules.attach_rule(operator)
    group = dist.group.WORLD
    model = tp.parallelize(GPT(replace(SHAPE, layers=layers, hidden=hidden)), group, BY_LAYER)
    words, batch = tp.get_parameter_types(model), torch.randint(SHAPE.vocab, (2, 2, SHAPE.seq))
    tt.declare_parameters(model, tp=words)
    tokens, targets = (tt.declare_types(x, tp="R") for x in batch)

    def step() -> None:
        model.zero_grad()
        tp.vocab_parallel_loss(model(tokens), targets, group).backward()

    def run_ours() -> None:
        with tt.check_types(tp=group):
            step()

    def run_torch() -> None:
        with typecheck():
            step()

    times: dict[str, list[float]] = {"plain": [], "ours": [], "theirs": []}
    with spmd.set_current_mesh({"tp": spmd.MeshAxis.of(group)}):
        for name, parameter in model.named_parameters():
            spmd_rules.declare_types(parameter, tp=words[name])
        for x in (tokens, targets):
            spmd_rules.declare_types(x, tp="R")
        contenders = {"plain": step, "ours": run_ours, "theirs": run_torch}
        for number in range(-WARM_UP, rounds):
            order = list(contenders)
            for name in order if number % 2 else reversed(order):
                begin = time.perf_counter()
                contenders[name]()
                if number >= 0:
                    times[name].append(time.perf_counter() - begin)
    return times


def main(arguments: list[str] | None = None) -> None:
    chosen = parse_options(__doc__, arguments, kinds=("loopback", "gpu"))
    if importlib.util.find_spec("spmd_types") is None:
        print("nothing to compare with: pip install spmd_types==0.3.1", file=sys.stderr)
        if chosen.json:
            print(json.dumps({"rows": []}))
        return
    shapes = [(1, 64)] if chosen.quick else [(2, 64), (12, 64), (12, 512)]
    rounds = (1 if chosen.quick else 4) * chosen.repeats
    rows = []
    # A check computes nothing that a GPU would speed up: there is no row for the GPU link.
    for size in chosen.ranks if "loopback" in chosen.links else []:
        for layers, hidden in shapes:
            print_progress(f"{layers} layers of {hidden}", f"{size} ranks")
            found = ranks.run_with_fake_group(measure, size, layers, hidden, rounds, timeout=600)
            times = {name: torch.tensor(seconds) for name, seconds in found.items()}
            given = f"{layers} layers, h = {hidden}", "spmd_types", size, "loopback", times
            rows.append(make_row(*given, chosen.repeats, lambda middle: middle["plain"]))
    print_rows(rows, chosen.json)


if __name__ == "__main__":
    main()
