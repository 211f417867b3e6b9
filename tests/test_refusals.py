"""Bad input at an interface gets one sentence with the argument, its value and allowed values.

Interfaces are a `Layout`, a model's shape, the call that applies a technique, a command's options,
and files. Behind them functions trust one another. test_alike has ranks that disagree.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import run_main
from torch import nn

from shardlab import (
    checkpoint,
    data_parallel,
    experts,
    gemm,
    layout,
    memory,
    mesh,
    pipeline,
    ranks,
    zero,
)
from shardlab import context_parallel as cp
from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp
from shardlab.common import show
from shardlab.common.shapes import PRESETS
from shardlab.gpt.model import GPT, Config
from shardlab.layout import Layout
from shardlab.measure import count, link
from shardlab.pipeline import distribute_model, make_schedule
from shardtools import strategy
from shardtools.__main__ import COMMANDS
from shardtools.cluster.command import SUBCOMMANDS

PLAIN = Config(vocab=32, seq=6, layers=2, heads=4, hidden=32)
NANO, LLAMA, GPT3 = (PRESETS[name] for name in ("nano", "llama-3-8b", "gpt-3-175b"))
SPARSE = replace(PLAIN, experts=4)
LATENT = replace(PLAIN, bias=False, latent=16, rotary=4)
A100 = strategy.MACHINES["a100"]
PAIR = make_schedule("1f1b", 2, 2)
Table = dict[str, Callable[[], Any]]


def get_message(call: Callable[[], Any]) -> str:
    """Return the message of the ValueError."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def find_missing_words(table: Table) -> dict[str, str]:
    """Return the actual messages by the expected words that they lack."""
    found = {words: get_message(call) for words, call in table.items()}
    return {words: text for words, text in found.items() if words not in text or "\n" in text}


# --- Values -------------------------------------------------------------------------------------


def mesh_call(seq: int | None = None, **options: Any) -> Callable[[], None]:
    return lambda: mesh.check_supported(replace(PLAIN, heads=2), Layout(**options), seq)


def memory_call(
    config: Config = NANO, attention: str = "fused", **options: Any
) -> Callable[[], Any]:
    return lambda: memory.estimate_step(config, Layout(**options), attention=attention)


MODELS: Table = {
    "vocab='x': must be": lambda: replace(PLAIN, vocab="x"),
    "hidden=30: must be": lambda: replace(PLAIN, hidden=30),
    "mlp='relu': must be": lambda: replace(PLAIN, mlp="relu"),
    "experts_per_token=5: must be": lambda: replace(SPARSE, experts_per_token=5),
    "memory=0: must be": lambda: replace(A100, memory=0),
}
LAYOUTS: Table = {
    "dp=0: must be": lambda: Layout(dp=0),
    "zero=4: must be": lambda: Layout(zero=4),
    "ep=3: must divide the 4 ranks": lambda: Layout(dp=4, ep=3),
    "chunks=2: must be 1": lambda: Layout(pp=4, chunks=2),
    "stages=(4, 4, 4): must be": lambda: Layout(pp=2, stages=(4, 4, 4)),
    "recompute='ffn+ffn': must be": lambda: Layout(recompute="ffn+ffn"),
    "ranks=4: must be 8": lambda: Layout(dp=2, pp=2, tp=2).check_world_size(4),
    "is no field of a layout; write": lambda: layout.parse_layout("d 2 · q 2"),
    # A layout and a model.
    "pp=2: must divide layers=5": lambda: layout.build_stages(replace(PLAIN, layers=5), 2),
    "heads=2: must be a multiple of the 4 ranks": mesh_call(tp=4),
    "zero=2: must be 0 or 1 with pp=2": mesh_call(pp=2, zero=2),
    "seq=9: must be divisible by tp=2": mesh_call(tp=2, sequence_parallel=True, seq=9),
    "tp=3: must divide": memory_call(tp=3),
    "precision='fp12': must be": lambda: memory.estimate_step(NANO, Layout(), precision="fp12"),
    "gpus=12: must": lambda: strategy.plan(GPT3, A100, 12, 512),
}
TECHNIQUES: Table = {
    "full=True: must be False with scheme='summa'": lambda: gemm.predict_cost("summa", 4, 4, 4, 4),
    "schedule='1f1c': must": lambda: make_schedule("1f1c", 2, 2),
    "stage 0, 'G0': must": lambda: pipeline.parse_schedule("F0 G0"),
    "layers=9: must": lambda: pipeline.split_model(GPT(PLAIN), 9),
    "parts=3: must be": lambda: pipeline.balance_layers([1, 2], 3),
    "seq=10: must be a multiple of 4": lambda: cp.split_seq(torch.zeros(1, 10), 2, 0, "zigzag"),
    "heads=4: must be a multiple of the 3 ranks": lambda: tp.predict_state_bytes(PLAIN, 3),
    "experts=4: must be a multiple of the 3": lambda: experts.count_held_parameters(SPARSE, 3),
    "folder='/nowhere': must hold a config.json": lambda: checkpoint.read_config("/nowhere"),
}


@pytest.mark.parametrize("table", [MODELS, LAYOUTS, TECHNIQUES], ids=["model", "layout", "other"])
def test_a_wrong_value_is_named(table: Table) -> None:
    assert find_missing_words(table) == {}


# --- On two ranks -------------------------------------------------------------------------------


def on_two(group: Any) -> Table:
    """Return each technique's errors on two ranks, before anything is sent."""
    cut, along = (
        tp.parallelize(GPT(PLAIN), group, e) for e in (tp.REPLICATED, sp.SEQUENCE_SHARDED)
    )
    logits, odd = torch.randn(2, 3, 4), torch.ones(1, 5, dtype=torch.int64)
    q, few = torch.zeros(1, 4, 3, 8), torch.zeros(1, 3, 6, 8)
    frozen, sparse = nn.Linear(2, 2).requires_grad_(False), nn.Embedding(3, 2, sparse=True)
    model, second = nn.Linear(2, 2), zero.shard_module(nn.Linear(2, 2), group, 2)
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    pipe = distribute_model(GPT(PLAIN), PAIR, group)
    return {
        "rows=3, columns=2: must multiply to 2": lambda: gemm.create_grid(group, 3, 2),
        "heads=3: must be a multiple of the 2": lambda: tp.parallelize(
            GPT(replace(PLAIN, heads=3, hidden=36, ffn=48)), group
        ),
        "tokens: must be 0 to 31, but one is 32": lambda: cut(torch.tensor([[1, 32]])),
        "targets: must be 0 to 7, but one is 8": lambda: tp.vocab_parallel_loss(
            logits, torch.full((2, 3), 8), group
        ),
        "seq=5: must be": lambda: along(odd),
        "s=3 must be even": lambda: cp.ring_attention(q, q, q, group),
        "heads=3: must be a multiple of the 2 ranks; ring": lambda: cp.all_to_all_attention(
            few, few, few, group
        ),
        "latent=16: must be None": lambda: cp.distribute_model(GPT(LATENT), group),
        "attention='flash': must be": lambda: cp.distribute_model(GPT(PLAIN), group, "flash"),
        "must be a module with trainable": lambda: data_parallel.DataParallel(frozen, group),
        "must have dense gradients": lambda: zero.shard_module(sparse, group, 1),
        "stage=4: must be 1, 2 or 3": lambda: zero.shard_module(model, group, 4),
        "no_sync: Zero2 keeps": lambda: second.no_sync().__enter__(),
        "experts=3: must be a multiple of the 2": lambda: experts.parallelize(
            GPT(replace(SPARSE, experts=3)), group
        ),
        "group has 2 ranks: must have 4": lambda: distribute_model(
            GPT(PLAIN), make_schedule("gpipe", 4, 2), group
        ),
        "tokens has 1 sequences: must": lambda: pipe.step(tokens[:1], tokens[:1]),
        "ranks=2: must be 4": lambda: mesh.create_groups(Layout(tp=4), group),
        "bandwidth=0: must be": lambda: link.create_slow_group(0.0, 0, group),
    }


def list_foreign_calls(one: Any) -> list[Callable[[], Any]]:
    """Yield calls with a group that this rank is not a member of."""
    x = torch.zeros(1, 4, 4, 8)
    return [
        lambda: gemm.multiply_inner(torch.zeros(8, 4), torch.zeros(4, 6), one),
        lambda: tp.parallelize(GPT(PLAIN), one),
        lambda: cp.ring_attention(x, x, x, one),
        lambda: data_parallel.DataParallel(nn.Linear(2, 2), one),
        lambda: zero.shard_module(nn.Linear(2, 2), one, 1),
        lambda: experts.parallelize(GPT(SPARSE), one),
        lambda: distribute_model(GPT(PLAIN), PAIR, one),
        lambda: mesh.create_groups(Layout(), one),
    ]


def on_a_rank() -> tuple[dict[str, str], list[str]]:
    rank = dist.get_rank()
    one = [dist.new_group([each]) for each in range(2)][1 - rank]
    table = on_two(dist.group.WORLD)
    with count.record_traffic() as sent:
        found = find_missing_words(table)
        strange = [get_message(call) for call in list_foreign_calls(one)]
    assert not sent.calls and not sent.messages
    return found, [text for text in strange if "a process group that contains this" not in text]


def test_on_ranks_it_is_named_on_each_before_anything_is_sent() -> None:
    for found in ranks.run(on_a_rank, 2, device="cpu", timeout=60, show=False):
        assert found == ({}, [])


# --- Commands -----------------------------------------------------------------------------------

for module, _ in COMMANDS.values():
    importlib.import_module(module)  # once: the forks below inherit it
for part in {*SUBCOMMANDS.values()}:
    importlib.import_module(f"shardtools.{part}")

FOLDER = "watch", "hang"  # check for a folder before all else
PLACED = *FOLDER, "steps", "grade"  # require a file or a folder
ALL = [[name] for name in COMMANDS if name != "cluster"] + [
    ["cluster", part] for part in SUBCOMMANDS
]
PUBLISHED = show.ROOT / "code/shardtools/strategy/published"
PLAN = "strategy plan --model llama-3-8b --gpu h100"
MEET = f"cluster run --at 127.0.0.1:29400 {{}} {__file__}"
MISTAKES = {  # command -> words of its error line
    **{f"{' '.join(c)} --no-such": "--no-such" for c in ALL if c[-1] not in PLACED},
    **{f"cluster {part} none --no-such": "--no-such" for part in FOLDER},
    "memory --modle gpt-2": "did you mean --model?",
    "memori": "did you mean memory?",
    "cluster wacth": "did you mean watch?",
    "schedule 1f1c --stages 4 --microbatches 6": "schedule='1f1c': ",
    "schedule 1f1b --stages 9999 --microbatches 9999": "stages=9999: must be",
    "memory --config none --model gpt-2": "--model and --config",
    "memory --model gpt-2 --dp 4 --ranks 6": "ranks=6: must be 4",
    "mesh --dp two": "dp='two': must be",
    "mesh --tp 3": "heads=2: must be",
    "strategy plan --model gpt-9 --gpu h100 --gpus 8": "model='gpt-9': must be",
    f"{PLAN} --layout d8,sideways": "'sideways'",
    f"{PLAN} --layout d8 --tp 2": "--tp",
    f"{PLAN} --layout d8 --gpus 16": "gpus=16",
    f"{PLAN} --layout d8 --batch 12": "batch=12",
    f"{PLAN} --gpus 8 --dtype fp7": "dtype='fp7'",
    f"strategy fit none.csv --rates {os.devnull}/R --profile nanotron": f"rates='{os.devnull}/R'",
    f"strategy fit {PUBLISHED}/sweep.csv --rates none --profile mine": "profile='mine'",
    f"strategy predict {PUBLISHED}/sweep.csv --rates {PUBLISHED}/sweep.csv": "sweep.csv",
    f"strategy predict {PUBLISHED}/sweep.csv --profile megatron --rates "
    f"{PUBLISHED}/rates_nanotron.json": "profile='megatron'",
    "strategy emit nemo --model gpt-2 --gpu h100 --gpus 8": "nemo",
    "parity none.py -- true": "plain='none.py': must be an existing",
    "grade none": "folder='none': must be",
    "grade . --part zeros": "part='zeros': must be",
    "gpu --limit soon": "limit='soon': must be",
    "record zero tiny": "lesson=tiny: must be one of",
    "doctor --ranks 0": "ranks=0: must be",
    MEET.format("--ranks 0"): "ranks=0: must be",
    f"cluster run --at node1 {__file__}": "at='node1': must be",
    "cluster watch none --pid one": "pid='one'",
}


@pytest.mark.parametrize("line", MISTAKES, ids=[repr(line)[:60] for line in MISTAKES])
def test_a_mistaken_option_gets_one_line(capsys: Any, line: str) -> None:
    status, out, err = run_main(capsys, *line.split())
    assert status == 2 and out == "" and "Traceback" not in err
    assert MISTAKES[line] in err.splitlines()[-1] and len(err) < 500, err
    assert not os.path.exists("none")


# --- Files and folders that commands write and read ---------------------------------------------

READ = {
    "file": f"strategy predict --rates {PUBLISHED}/rates_megatron.json",
    "rates": "strategy plan --model gpt-2 --gpu h100 --gpus 8 --rates",
}
NO_JSON = ["[" * 100_000, "[NaN]", "", '[{"id": 1, "con', "[3]", "null"]


@pytest.mark.parametrize("name", READ)
def test_a_file_that_is_none_of_ours_is_refused(capsys: Any, tmp_path: Any, name: str) -> None:
    path = tmp_path / "given.json"
    for text in (*map(str.encode, NO_JSON), b"\xff"):
        path.write_bytes(text)
        status, out, err = run_main(capsys, *READ[name].split(), str(path))
        assert status == 2 and out == "" and err.count("\n") == 1 and len(err) < 500, err
        assert f"{name}='{path}': " in err
    for given in ("/", "/dev/zero", "/nowhere/x.json", ""):
        status, out, err = run_main(capsys, *READ[name].split(), given)
        assert status == 2 and out == "" and err.count("\n") == 1 and f"{name}=" in err, err
    assert [*tmp_path.iterdir()] == [path]
