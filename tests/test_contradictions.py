"""What is right alone and wrong together is refused by name, in one table for every technique.

What is wrong alone, a number that is none, an object of another kind, is the table of `doors`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import ran
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardlab import context_parallel as cp
from shardlab import data_parallel, experts, gemm, layout, memory, mesh, pipeline, ranks, zero
from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp
from shardlab import tensor_types as tt
from shardlab.common.shapes import PRESETS, Yarn
from shardlab.context_parallel.fit import context_moments, tokens_that_fit
from shardlab.gpt.model import GPT, Attention, Config, FeedForward, loss
from shardlab.layout import Layout
from shardlab.measure import count
from shardlab.mesh import picture
from shardlab.pipeline import Action, Pipeline, Sleeping, asleep, distribute, schedule, simulate
from shardlab.tensor_types.declared import parse
from shardtools import strategy

PLAIN = Config(vocab=32, seq=6, layers=2, heads=4, hidden=32)
NANO, LLAMA, GPT3 = (PRESETS[name] for name in ("nano", "llama-3-8b", "gpt-3-175b"))
SPARSE = replace(PLAIN, experts=4)
LATENT = replace(PLAIN, bias=False, latent=16, rotary=4)
MICRO = replace(PRESETS["micro"], experts=4)
EIGHT, TWO = Layout(dp=2, pp=2, tp=2), Layout(cp=2)
A100 = strategy.MACHINES["a100"]
PAIR = schedule("1f1b", 2, 2)
Table = dict[str, Callable[[], Any]]


def cuts(seq: int | None = None, **options: Any) -> Callable[[], None]:
    return lambda: mesh.check_cuts(replace(PLAIN, heads=2), Layout(**options), seq)


def held(config: Config = NANO, attention: str = "fused", **options: Any) -> Callable[[], Any]:
    return lambda: memory.estimate(config, Layout(**options), attention=attention)


MODELS: Table = {
    "experts_per_token=5: allowed are whole numbers, 1 to 4": lambda: replace(
        SPARSE, experts_per_token=5
    ),
    "dense_layers=2: allowed are whole numbers, 0 to 1": lambda: replace(SPARSE, dense_layers=2),
    "capacity=0.0: allowed are numbers above 0": lambda: replace(SPARSE, capacity=0.0),
    "hidden=30: allowed are multiples of 8": lambda: replace(PLAIN, hidden=30),
    "kv_heads=3: allowed are divisors of 4": lambda: replace(PLAIN, kv_heads=3),
    "layers=0: allowed are whole numbers, 1 or more": lambda: replace(PLAIN, layers=0),
    "head=5: allowed are even sizes": lambda: replace(PLAIN, head=5),
    "full_every=2: allowed is None without a window": lambda: replace(PLAIN, full_every=2),
    "rotary=4: allowed is None without latent": lambda: replace(PLAIN, rotary=4),
    "rotary=None: allowed with latent": lambda: replace(LATENT, rotary=None),
    "bias=True: allowed with latent attention is False": lambda: replace(LATENT, bias=True),
    "kv_heads=2: allowed with latent attention is None": lambda: replace(LATENT, kv_heads=2),
    "qk_norm=True: allowed with latent attention": lambda: replace(LATENT, qk_norm=True),
    "yarn.sharper=1.0: allowed is 0 without": lambda: replace(PLAIN, yarn=Yarn(4, 8, sharper=1.0)),
    "rotary_base=1: allowed with yarn": lambda: replace(PLAIN, rotary_base=1, yarn=Yarn(4, 8)),
    "factor=0.5: allowed are numbers from 1": lambda: Yarn(0.5, 8),
    "expert_groups=3: allowed are those": lambda: replace(SPARSE, expert_groups=3),
    "expert_groups=4: allowed are those that leave groups of 2": lambda: replace(
        SPARSE, expert_groups=4
    ),
    "experts_per_token=3: allowed are up to the 2 of 1 groups": lambda: replace(
        SPARSE, expert_groups=2, experts_per_token=3
    ),
}
LAYOUTS: Table = {
    "dp=0: allowed are whole numbers, 1 or more": lambda: Layout(dp=0),
    "zero=4: allowed are 0, 1, 2 and 3": lambda: Layout(zero=4),
    "zero=2: allowed with offload='parameters' is 3": lambda: Layout(zero=2, offload="parameters"),
    "ep=3: allowed are divisors of 4, the ranks with the same": lambda: Layout(dp=4, ep=3),
    "ep=4: allowed are divisors of 2, the ranks": lambda: Layout(dp=4, zero=1, replicas=2, ep=4),
    "replicas=3: allowed are divisors of dp=4": lambda: Layout(dp=4, replicas=3, zero=1),
    "replicas=2: allowed with zero=0 is 1": lambda: Layout(dp=4, replicas=2),
    "chunks=1: allowed with schedule='interleaved'": lambda: Layout(pp=4, schedule="interleaved"),
    "chunks=2: allowed with schedule='1f1b' and pp=4 is 1": lambda: Layout(pp=4, chunks=2),
    "chunks=2: allowed with schedule='interleaved'": lambda: Layout(
        chunks=2, schedule="interleaved"
    ),
    "chunks=1: allowed with schedule='zb-v' and pp=4 is 2": lambda: Layout(pp=4, schedule="zb-v"),
    "stages=(4, 4, 4): allowed are equal": lambda: Layout(pp=2, stages=(4, 4, 4)),
    "stages=(4, -1): allowed are equal": lambda: Layout(pp=2, stages=(4, -1)),
    "recompute='ffn+ffn': allowed are 'none'": lambda: Layout(recompute="ffn+ffn"),
    "order=('dp', 'dp'): allowed are dp, pp, cp and tp, each": lambda: Layout(order=("dp", "dp")),
    "with pp among them": lambda: Layout(pp=2, order=("dp", "tp")),
    "ranks=4: allowed is 8, the product of dp=2, pp=2 and tp=2": lambda: EIGHT.check(4),
    "rank=8: allowed are whole numbers, 0 to 7": lambda: EIGHT.place(8),
    "node=3: allowed are divisors of 8 ranks": lambda: EIGHT.leaving(3, lambda rank: {}),
    "stages=(2, 2): allowed are those with 5 layers": lambda: layout.stages(
        replace(PLAIN, layers=5), 2, (2, 2)
    ),
    "pp=2: allowed are divisors of layers=5": lambda: layout.stages(replace(PLAIN, layers=5), 2),
    "pp=5: allowed are 1 to 4": lambda: layout.stages(PLAIN, 5, "megatron"),
    # Words that are no layout.
    "'d 2 · q 2' is no part of one; allowed are words as in 'd 2": lambda: layout.read("d 2 · q 2"),
    "'d 4' is said twice": lambda: layout.read("d 2, d 4"),
    "'ZeRO-4' is no part of one": lambda: layout.read("ZeRO-4"),
    "replicas=2: allowed are divisors of dp=3": lambda: layout.read("d 3, ZeRO-1 in 2 groups"),
    "recompute='all': allowed are": lambda: layout.read("recompute all"),
    "is no part of one": lambda: layout.read("d " + "9" * 5000),
}
MESHES: Table = {
    "heads=2: allowed on 4 ranks are mul": cuts(tp=4),
    "pp=3: allowed are divisors of layers": cuts(pp=3),
    "schedule='zb-h1': allowed in a mesh are naive": cuts(pp=2, schedule="zb-h1"),
    "zero=2 with pp=2: allowed are 0 and 1": cuts(pp=2, zero=2),
    "seq=9: allowed with sequence par": cuts(tp=2, sequence_parallel=True, seq=9),
    "cp=2: allowed in a mesh is 1": cuts(cp=2),
    "recompute='selective': allowed in a mesh are": cuts(recompute="selective"),
    "here parts have [1, 1, 0, 0]": cuts(pp=2, chunks=2, schedule="interleaved"),
    "pp=2, chunks=1: allowed are": lambda: mesh.check_cuts(
        Config(vocab=2048, seq=8, layers=2, heads=2, hidden=16), Layout(pp=2, stages="nanotron")
    ),
    "node=3: allowed are divisors of 8": lambda: picture.draw(EIGHT, 3),
    "ranks=128: allowed in a picture are 64": lambda: picture.draw(Layout(dp=128), 8),
}
MEMORY: Table = {
    "tp=3: allowed are divisors of heads=2": held(tp=3),
    "tp=6: allowed are divisors and multiples of key_value_heads=4": held(
        replace(LLAMA, heads=12, kv_heads=4, head=128), tp=6
    ),
    "pp=3: allowed are divisors of layers=2": held(pp=3),
    "stage=2: allowed are whole numbers, 0 to 1": lambda: memory.parameters(NANO, Layout(pp=2), 2),
    "tp=2: allowed with sequence_parallel are divisors of seq=5": lambda: memory.activations(
        NANO, Layout(tp=2, sequence_parallel=True), seq=5
    ),
    "stages=(1, 2): allowed are those with 2 layers": held(pp=2, stages=(1, 2)),
    "cp=3: allowed are divisors of seq=64": held(cp=3),
    "attention='plain': allowed with cp=2 is 'fused'": held(cp=2, attention="plain"),
    "ep=2: allowed is 1, for a model without experts": held(ep=2, dp=2),
    "ep=3: allowed are divisors of experts=4": held(MICRO, ep=3, dp=3),
    "layout.offload='optimizer': allowed is 'none'": lambda: memory.largest(
        1, Layout(offload="optimizer")
    ),
    "offload_parameters=True: allowed with": lambda: memory.deepspeed_zero3(1, 1, 1, 1, False),
    "precision='bf16': allowed are 'fp16', 'bf16-fp32-gradients'": lambda: memory.megatron_bytes(
        "bf16"
    ),
    # How many tokens fit.
    "allowed are divisors of heads=32": lambda: tokens_that_fit(LLAMA, 10**9, Layout(tp=3)),
    "heads=32: 3 ranks need": lambda: tokens_that_fit(LLAMA, 10**9, Layout(cp=3), "ulysses"),
    "attention='plain': allowed": lambda: tokens_that_fit(LLAMA, 10**9, TWO, attention="plain"),
    "dropout=0.1: allowed is 0": lambda: tokens_that_fit(Config(dropout=0.1), 10**9, TWO),
    "latent=16: allowed is None with cp=2": lambda: tokens_that_fit(LATENT, 10**9, TWO),
    "multiples of 16; the nearest: 96 and 112": lambda: context_moments(LLAMA, Layout(cp=8), 100),
}
STRATEGIES: Table = {
    "tp=5: allowed are divisors of heads": lambda: strategy.predict(GPT3, A100, Layout(tp=5)),
    "pp=5: allowed are divisors of": lambda: strategy.floor(GPT3, A100, Layout(pp=5)),
    "cp=3: allowed are divisors of seq=8192": lambda: strategy.predict(LLAMA, A100, Layout(cp=3)),
    "ep=2: allowed is 1": lambda: strategy.predict(LLAMA, A100, Layout(dp=4, ep=2)),
    "tokens=0: allowed are": lambda: strategy.flops(GPT3, 0),
    "gpus=12: allowed are 1 to 8, and whole": lambda: strategy.plan(GPT3, A100, 12, 512),
    "machine='a100': allowed is a Machine": lambda: strategy.plan(GPT3, "a100", 64, 64),
    "memory=0: allowed are numbers above 0": lambda: replace(A100, memory=0),
}
PRODUCTS: Table = {
    "allowed with way='summa' is False": lambda: gemm.predict("summa", 4, 4, 4, 4),
    "a grid of 4": lambda: gemm.predict("summa", 4, 4, 4, 4, full=False, shape=(1, 3)),
    "for way='summa'": lambda: gemm.predict("rows", 4, 4, 4, 4, shape=(2, 2)),
    "ranks=1: allowed are 2 or more": lambda: gemm.pays_from("rows", 1, gemm.Machine(1, 1, 1)),
    "allowed here are 1 to 8": lambda: gemm.shard_throughput(8, 8, 8, (1, 9)),
}
PIPELINES: Table = {
    "chunks=2: allowed for 1f1b is 1": lambda: schedule("1f1b", 2, 2, 2),
    "chunks=3: allowed for zb-v is 2": lambda: schedule("zb-v", 2, 2, 3),
    "stages=0: allowed are whole numbers, 1 or more": lambda: schedule("1f1b", 0, 2),
    "backward_input has 3 values: allowed are one for all, or one for each of 2": lambda: simulate(
        PAIR, backward_input=[1, 1, 1]
    ),
    "backward_weight=nan: allowed": lambda: simulate(PAIR, backward_weight=[1, float("nan")]),
    "stage 0, 'G0': allowed are F, B, I, W, RF": lambda: pipeline.from_text("F0 G0"),
    "rows=(): allowed is a row of actions for each stage": lambda: pipeline.from_text(),
    "allowed is a row of parts": lambda: pipeline.from_text("F0", placement=((0,), (1,))),
    "message=F0: allowed are RF, SF": lambda: pipeline.other_end(PAIR, 0, Action("F", 0)),
    "SB0 on stage 0: its part has no": lambda: pipeline.other_end(PAIR, 0, Action("SB", 0)),
    "titles=[]: allowed is one for each": lambda: pipeline.draw(simulate(PAIR), titles=[]),
    "each of parts 0 to 3 once, 2 on each of 2 stages": lambda: pipeline.validate(
        replace(pipeline.interleaved(2, 2, 2), placement=((0, 1), (1, 3)))
    ),
    "orders of 1 stages: allowed is one for each of 2": lambda: pipeline.validate(
        replace(PAIR, orders=PAIR.orders[:1])
    ),
    "stage 0: F1 is none of its passes": lambda: pipeline.validate(replace(PAIR, microbatches=1)),
    "part=4: allowed are 0 to 3": lambda: pipeline.interleaved(2, 2, 2).owner(4),
    "layers=[3, 0, 3]: allowed are whole numbers whose sum is 6, 0 at the ends": lambda: (
        pipeline.cut(GPT(replace(PLAIN, layers=6)), [3, 0, 3])
    ),
    "layers=9: allowed are 1 to 2 parts": lambda: pipeline.cut(GPT(PLAIN), 9),
    "parts=3: allowed are whole numbers, 1 to 2": lambda: pipeline.balance([1, 2], 3),
    "costs[1]=nan: allowed": lambda: pipeline.balance([1, float("nan")], 1),
}
SEQUENCES: Table = {
    "seq=10: 2 ranks in layout 'zigzag' need a multiple of 4; the nearest are 8 and 12": lambda: (
        cp.split(torch.zeros(1, 10), 2, 0, "zigzag")
    ),
    "seq=1: 2 ranks in layout 'contiguous' need a multiple of 2; the nearest is 2": lambda: (
        cp.split(torch.zeros(1, 1), 2, 0, "contiguous")
    ),
    "seq=9: 2 ranks in layout 'contiguous'": lambda: cp.score_turns("contiguous", 9, 2),
    "heads=4: allowed on 3 ranks are multiples of 3, such as 3 or 6; allowed ranks for this model "
    "are 1, 2 and 4": lambda: tp.predicted_states(PLAIN, 3),
    "experts=4: 3 ranks do not divide them": lambda: experts.held(SPARSE, 3),
}
LINEAR = nn.Linear(2, 2, bias=False)
TYPES: Table = {
    "tp='X': allowed are 'I', 'R', 'V', 'P'": lambda: tt.declare(torch.ones(2), tp="X"),
    "tp: 'up' is a name too many, or missing": lambda: tt.declare_parameters(
        LINEAR, tp={"weight": "V", "up": "V"}
    ),
    "tp: 'weight' is a name too many, or missing": lambda: tt.declare_parameters(LINEAR, tp={}),
    "degrees: there is none": lambda: tt.check(lambda: None),
    "tp=1: allowed": lambda: tt.check(lambda tp: None, tp=1),
    "allowed are the axes dp, tp": lambda: tt.check(lambda tp: None, dp=2, tp=2),
    "groups: there is none": lambda: tt.checking().__enter__(),
    "words='I -> X': allowed is one of I, R, V, P": lambda: parse("I -> X"),
}
ALONE = (MODELS, LAYOUTS, MESHES, MEMORY, STRATEGIES, PRODUCTS, PIPELINES, SEQUENCES, TYPES)


def said(call: Callable[[], Any]) -> str:
    """What the ValueError says."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def missed(table: Table) -> dict[str, str]:
    """By the words that are wanted: what was said in their place."""
    found = {words: said(call) for words, call in table.items()}
    return {words: text for words, text in found.items() if words not in text or "\n" in text}


def test_what_does_not_go_together_is_named() -> None:
    assert [missed(table) for table in ALONE] == [{}] * len(ALONE)


# --- Options of commands ------------------------------------------------------------------------

SMALL = "--stages 4 --microbatches 6"
JOB = "--model llama-3-8b --gpu a100-80 --gpus 16"
LINES = {
    f"schedule 1f1c {SMALL}": "schedule='1f1c': allowed are naive, gpipe, 1f1b, interleaved",
    f"schedule {SMALL}": "schedule='': allowed are naive",
    "schedule 1f1b": "stages='': allowed are whole numbers, 1 or more",
    "schedule 1f1b --stages 1.5 --microbatches 6": "stages='1.5': allowed are whole numbers",
    f"schedule 1f1b {SMALL} --chunks 2": "chunks=2: allowed for 1f1b is 1",
    f"schedule interleaved {SMALL} --chunks": "chunks='': allowed are whole numbers, 1 or more",
    f"schedule 1f1b {SMALL} --backward-weight nan": "backward_weight=nan: allowed are numbers from",
    f"schedule 1f1b {SMALL} --forward 1,2": "forward has 2 values: allowed are one for all, or one",
    f"schedule 1f1b {SMALL} --forward 5e-324": "forward=5e-324: allowed are numbers from 0, above",
    f"schedule 1f1b {SMALL} --forward 1,1,1,1e308": "forward=1e+308: allowed are numbers from 0",
    f"schedule 1f1b gpipe {SMALL}": "unrecognized arguments: gpipe",
    "schedule 1f1b --stages 9999 --microbatches 9999": "stages=9999: allowed are 1 to 1,000",
    "schedule 1f1b --stages 1000 --microbatches 1000": "allowed are 100,000 at most",
    "memory --params 7.5e9 --zero 4": "zero=4: allowed are whole numbers, 0 to 3",
    "memory --params 7.5e9 --zero": "zero='': allowed are whole numbers, 0 to 3",
    "memory --params many": "params='many': allowed are numbers above 0",
    "memory --params 0": "params=0: allowed are whole numbers, 1 or more",
    "memory --params nan": "params=nan: allowed are whole numbers, 1 or more",
    "memory --params 7.5e9 --precision fp12": "precision='fp12': allowed are",
    "memory --params 7.5e9 --unit Gb": "unit='Gb': allowed are",
    "memory --model llama-9": "model='llama-9': allowed are 'nano'",
    "memory --model gpt-2 --seq -5": "seq=-5: allowed are whole numbers, 1 or more",
    "memory --model gpt-2 --tp 5": "tp=5: allowed are",
    "memory --params 1e9 --batch 2": "--batch with --params: allowed with --model",
    "memory --dp 2": "allowed is exactly one of --params",
    "memory --params 1e9 --dp 4 --ranks 6": "ranks=6: allowed is 4, the product of",
    "memory --model gpt-2 --stages half": "stages='half': allowed are equal, ",
    "memory --model gpt-2 --pp 2 --stages 6,5": "allowed are those with 12 layers",
    "memory --model gpt-2 --pp 2 --stage 2": "stage=2: allowed are whole numbers, 0 to 1",
    "memory --model gpt-2 --cp 3": "cp=3: allowed are divisors of seq=1024",
    "memory --params 1e9 --dp 2 3": "unrecognized arguments: 3",
    "mesh --dp two": "dp='two': allowed are whole numbers, 1 or more",
    "mesh --tp 3": "heads=2: allowed on 3 ranks are multiples of 3",
    "mesh --steps 2": "steps=2: allowed are whole numbers, 3 or more",
    "mesh --layers 5000": "allowed here are 1,000 at most",
    "mesh --hidden 65536": "allowed here are 100,000,000 at most",
    f"mesh --steps {10**18}": "allowed here are 10,000,000 at most",
    "mesh --dp 3": "batch=8: allowed are multiples of dp=3 copies times 1 micro-batches",
    "mesh --dp 4 --microbatches 4": "batch=8: allowed are multiples of dp=4 copies times 4 micro",
    "mesh --dp 64 --batch 64": "ranks=64: allowed on this machine are 1 to",
    "mesh --pp 2 --zero 3": "zero=3 with pp=2: allowed are 0 and 1",
    "mesh --budget much": "budget='much': allowed are bytes, such as 2e6",
    "mesh --budget -1": "budget=-1: allowed are bytes, such as 2e6",
    "mesh --node 3": "node=3: allowed are divisors of 1 ranks",
    "mesh --dp 1024 --node 8": "ranks=1024: allowed with --node are 512 at most",
    "mesh --order tp,dp --node 1": "order='tp,dp': allowed are dp, pp and tp, each once, with",
    "mesh --layout d2 --dp 2": "dp with --layout, which says it: allowed is one of both",
    "mesh --layout x2": "layout: 'x2' is no part of one",
    "mesh --layout c2": "cp=2: allowed in a mesh is 1",
    "strategy --model gpt-9 --gpu h100 --gpus 8": "model='gpt-9': allowed are",
    "strategy --model gpt-2 --gpus 8": "gpu='': allowed are",
    "strategy --model gpt-2 --gpu h100": "gpus='': allowed are whole numbers",
    "strategy --model gpt-2 --gpu h100 --gpus 12": "gpus=12: allowed are 1 to",
    f"strategy {JOB} --batch {10**18}": "allowed are whole numbers, 1 to 1,000,000,000",
    f"strategy {JOB} --tokens 0": "tokens=0: allowed are numbers above 0",
    f"strategy {JOB} --tp 3": "tp=3: allowed are divisors of heads=32",
    f"strategy {JOB} --tp 16": "tp=16: allowed are 1 to 8, those of a node",
    f"strategy {JOB} --pp 5": "pp=5: allowed are divisors of gpus=16",
    f"strategy {JOB} --dp 3": "dp=3: allowed are divisors of batch=",
    f"strategy {JOB} --cp 3": "cp=3: allowed are divisors of seq=8192",
    f"strategy {JOB} --ep 2": "ep=2: allowed is 1, for a model without experts",
    f"strategy {JOB} --dp 4 --tp 8": "dp=4 with tp=8: allowed are products that divide gpus=16",
    "strategy --model gpt-2 --gpu h100-79 --gpus 8": "gpu='h100-79': allowed are 'rtx-4090',",
    f"strategy {JOB} --emit nemo": "emit='nemo': allowed are 'deepspeed'",
    f"strategy {JOB} --pp 2 --emit fsdp2": "emit='fsdp2': none of the 39 layouts",
    f"strategy {JOB} --config x.json": "--model and --config: allowed is exactly one",
    "strategy --model llama-3-405b --gpu h100 --gpus 16": "32 of these GPUs would be enough",
    "strategy --model llama-3-8b --gpu rtx-4090 --gpus 1 --seq 1000001": "larger ones would",
}


@pytest.mark.parametrize("line", LINES)
def test_an_option_that_cannot_be_gets_one_line(capsys: Any, line: str) -> None:
    status, out, err = ran(capsys, *line.split())
    assert status == 2 and out == ""
    assert LINES[line] in err.splitlines()[-1] and "Traceback" not in err


# --- On two ranks -------------------------------------------------------------------------------


def products(group: Any, one: Any) -> Table:
    a, b, block = torch.zeros(8, 4), torch.zeros(4, 6), torch.zeros(4, 4)
    grid = gemm.grid(group, 2, 1)
    return {
        "the inner dimensions are 4 and 6": lambda: gemm.by_rows(a, b.T),
        "[8] @": lambda: gemm.by_columns(torch.zeros(8), b),
        "torch.float32 on cpu and torch.float64 on cpu": lambda: gemm.by_rows(a, b.double()),
        "[8, 4] @ [5, 6]": lambda: gemm.by_inner(a, torch.zeros(5, 6), group, False),
        "has 4 of 8 rows": lambda: gemm.gather_rows(torch.zeros(3, 6), 8, group),
        "has 6 of 12 columns": lambda: gemm.gather_columns(torch.zeros(3, 2), 12, group),
        "rows=3, columns=2: 6 ranks, and the group has 2; allowed are 1 x 2, 2 x 1": lambda: (
            gemm.grid(group, 3, 2)
        ),
        "columns of A and": lambda: gemm.summa(block, block, 7, grid),
        "the two factors have to be of one kind": lambda: gemm.summa(
            block, torch.zeros(2, 4).double(), 4, grid
        ),
        "a process group that holds this rank": lambda: gemm.by_inner(a, b, one),
    }


def tensors(group: Any, one: Any) -> Table:
    cut, state = tp.parallelize(GPT(PLAIN), group), GPT(PLAIN).state_dict()
    along, odd_tokens = tp.parallelize(GPT(PLAIN), group, sp.ALONG_SEQUENCE), torch.ones(1, 5)
    first = next(iter(state))
    less = {name: tensor for name, tensor in state.items() if name != first}
    odd = replace(PLAIN, heads=3, hidden=36, ffn=48, vocab=18)
    grouped = replace(PLAIN, heads=6, kv_heads=3, hidden=36, ffn=48)
    logits, targets = torch.randn(2, 3, 4), torch.randint(8, (2, 3))
    return {
        "heads=3: allowed on 2 ranks are multiples of 2, such as 2 or 4; allowed ranks for this "
        "model are 1 and 3": lambda: tp.parallelize(GPT(odd), group),
        "key_value_heads=3: allowed on 2": lambda: tp.parallelize(GPT(grouped), group),
        "ffn_width=33: allowed on 2": lambda: tp.cut_ffn(
            FeedForward(replace(PLAIN, ffn=33)), group
        ),
        "vocab=257": lambda: tp.parallelize(GPT(replace(PLAIN, vocab=257)), group),
        "heads=3": lambda: tp.cut_attention(Attention(odd), group),
        "out_features=3": lambda: tp.ColumnLinear.from_plain(nn.Linear(4, 3), group),
        "in_features=3": lambda: tp.RowLinear.from_plain(nn.Linear(3, 4), group),
        "num_embeddings=3": lambda: tp.VocabEmbedding.from_plain(nn.Embedding(3, 4), group),
        "last dimension of x=5": lambda: tp.split_last(torch.ones(2, 5), group),
        "allowed is a process group that holds this": lambda: tp.parallelize(GPT(PLAIN), one),
        "it is parallelized already": lambda: tp.parallelize(cut, group),
        "tokens: 32 is among them; allowed are 0 to 31": lambda: cut(torch.tensor([[1, 32]])),
        "embedding.weight missing; 1 in all": lambda: tp.load_full_state_dict(cut, less),
        "extra not the model's; 1 in all": lambda: tp.load_full_state_dict(
            cut, state | {"extra": torch.ones(1)}
        ),
        "shape [16, 32]; allowed is [32, 32]": lambda: tp.load_full_state_dict(
            cut, cut.state_dict()
        ),
        "model=GPT: allowed is what `parallelize` returned": lambda: tp.full_state_dict(GPT(PLAIN)),
        "allowed are whole numbers of shape [2, 3]": lambda: tp.loss(logits, targets[:1], group),
        "targets: 8 is among them; allowed are 0 to 7": lambda: tp.loss(
            logits, torch.full((2, 3), 8), group
        ),
        "model: no part of it is cut by tensor parallelism": lambda: sp.sum_gradients(
            GPT(PLAIN), group
        ),
        "seq=5: allowed are multiples of 2 ranks; nearest: 4 and 6": lambda: along(
            odd_tokens.long()
        ),
    }


def sequences(group: Any, one: Any) -> Table:
    good, long, ring = torch.zeros(1, 4, 6, 8), torch.zeros(1, 4, 8, 8), cp.ring_attention
    around, few = cp.all_to_all_attention, torch.zeros(1, 3, 6, 8)
    third, twelve = torch.zeros(1, 3, 2, 4), torch.zeros(1, 12, 2, 4)
    plain, distributed = GPT(PLAIN), cp.distribute(GPT(PLAIN), group)
    return {
        "q_BAsD has 3 tokens: layout 'zigzag' needs an even number on each": lambda: around(
            *[torch.zeros(1, 4, 3, 8)] * 3, group, True, "zigzag"
        ),
        "3 tokens: layout 'zigzag' needs an even number on each rank; the nearest are 2 and 4": (
            lambda: ring(*[torch.zeros(1, 4, 3, 8)] * 3, group)
        ),
        "q [4, 6, 8], k [1, 4, 6, 8]": lambda: ring(good[0], good, good, group),
        "batch, tokens and size of a head have to agree": lambda: ring(good, long, long, group),
        "v [1, 2, 6, 8]: allowed are q [B, A, s, D] and": lambda: ring(
            good, good, good[:, :2], group
        ),
        "v [1, 3, 6, 8]: allowed numbers of key and": lambda: around(good, few, few, group),
        "q, k, v are torch.float64 on cpu": lambda: ring(good.double(), good, good, group),
        "heads=3: 2 ranks need a multiple of 2; the nearest are 2 and 4. Ring attention takes": (
            lambda: around(few, few, few, group)
        ),
        "kv_heads=3: 2 ranks need a multiple or a divisor of 2. Ring attention takes any": lambda: (
            around(twelve, third, third, group)
        ),
        "allowed is a process group that holds": lambda: ring(good, good, good, one),
        "latent=16: allowed is None with a context": lambda: cp.distribute(GPT(LATENT), group),
        "window=4: allowed is None with a context": lambda: cp.distribute(
            GPT(replace(PLAIN, window=4)), group
        ),
        "dropout=0.1: allowed is 0 with a context cut": lambda: cp.distribute(
            GPT(replace(PLAIN, dropout=0.1)), group
        ),
        "model: is distributed already": lambda: cp.distribute(distributed, group),
        "heads=1: 2 ranks need a multiple of 2": lambda: cp.distribute(
            GPT(replace(PLAIN, heads=1)), group, "ulysses"
        ),
        "attention='flash': allowed are 'ring' and": lambda: cp.distribute(plain, group, "flash"),
        "seq=6: 2 ranks in layout 'zigzag' need a multiple of 4": lambda: cp.shard(
            torch.zeros(1, 6), group, "zigzag"
        ),
    }


def copies(group: Any, one: Any) -> Table:
    frozen, sparse = nn.Linear(2, 2).requires_grad_(False), nn.Embedding(3, 2, sparse=True)
    wrap = partial(data_parallel.DataParallel, group=group)
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]))
    first, listed = model
    sharded, second = (zero.shard(nn.Linear(2, 2), group, stage) for stage in (1, 2))
    state, third = nn.Linear(2, 2).state_dict(), partial(zero.shard, model, group, 3)
    wide = {"bias": torch.zeros(3)}
    return {
        "module=Linear: nothing in it can be trained": lambda: wrap(frozen),
        "module=Embedding: its gradients are sparse": lambda: wrap(sparse),
        "allowed is a process group that holds": lambda: data_parallel.DataParallel(model, one),
        "nothing in it can be trained": lambda: zero.shard(frozen, group, 1),
        "its gradients are sparse": lambda: zero.shard(sparse, group, 1),
        "units: Linear in unit 0 is no part of the module": lambda: third(units=[nn.Linear(2, 2)]),
        "units: ModuleList in unit 0 is never called": lambda: third(units=[listed]),
        "units: 0 is in unit 0 and in unit 1": lambda: third(units=[first, [first]]),
        "no_sync: Zero2 keeps a shard of the gradients": lambda: second.no_sync().__enter__(),
        "move or convert the module before": lambda: sharded.to(torch.float64),
        "allowed is full_state_dict()": sharded.state_dict,
        "allowed is load_full_state_dict()": lambda: sharded.load_state_dict({}),
        "w not the model's": lambda: sharded.load_full_state_dict(state | {"w": torch.zeros(1)}),
        "bias has shape [3]; allowed is [2]": lambda: sharded.load_full_state_dict(state | wide),
    }


def routed(group: Any, one: Any) -> Table:
    dealt, state = experts.parallelize(GPT(SPARSE), group), GPT(SPARSE).state_dict()
    alone = dist.new_subgroups(1)[0]
    del state["blocks.1.ffn.experts.3.up.weight"]
    return {
        "experts=3: 2 ranks do not divide them; allowed are [1, 3]": lambda: experts.parallelize(
            GPT(replace(SPARSE, experts=3)), group
        ),
        "allowed is a GPT of shardlab.gpt.model with config.experts": lambda: experts.parallelize(
            GPT(PLAIN), group
        ),
        "allowed is what `parallelize` returned": lambda: experts.full_state_dict(GPT(SPARSE)),
        "dealt out already": lambda: experts.parallelize(dealt, group),
        "data has 1 ranks, the group of experts 2": lambda: experts.average_gradients(dealt, alone),
        "experts.3.up.weight missing": lambda: experts.load_full_state_dict(dealt, state),
    }


def staged(group: Any, one: Any) -> Table:
    alone, model = dist.new_subgroups(1)[0], GPT(PLAIN)
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    pipe = distribute(model, PAIR, group)
    return {
        "group has 2 ranks: allowed are 4, one for each stage of gpipe": lambda: distribute(
            model, schedule("gpipe", 4, 2), group
        ),
        "group has 1 ranks: allowed are 2": lambda: distribute(model, PAIR, alone),
        "allowed is a process group that holds this": lambda: distribute(model, PAIR, one),
        "layers=2: allowed are 1 to 1 parts of a model with 1 layers": lambda: distribute(
            GPT(replace(PLAIN, layers=1)), PAIR, group
        ),
        "layers=[4, 3]: allowed are whole numbers whose sum is 2": lambda: distribute(
            model, PAIR, group, layers=[4, 3]
        ),
        "layers=[1, 1, 0]: allowed is one number for each of 2 parts": lambda: distribute(
            model, PAIR, group, layers=[1, 1, 0]
        ),
        "tokens has 1 sequences: allowed are 2 or more": lambda: pipe.step(tokens[:1], tokens[:1]),
        "tokens has 2 sequences, targets 1": lambda: pipe.step(tokens, tokens[:1]),
        "torch.no_grad()": lambda: torch.no_grad()(pipe.step)(tokens, tokens),
        "record=False": pipe.timeline,
        "backward_weight=[1, 2, 3]: allowed are seconds": lambda: asleep(
            PAIR, group, backward_weight=[1, 2, 3]
        ),
    }


def meshed(group: Any, one: Any) -> Table:
    job = mesh.Parallel(GPT(PLAIN), mesh.join(Layout(dp=2), group), Layout(dp=2))
    named = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    small = DeviceMesh("cpu", torch.zeros(1, 1, 1, dtype=torch.int64), mesh_dim_names=mesh.AXES)
    missing = {"device_mesh: it misses rank 1": lambda: mesh.groups_of(small)}
    return {
        **(missing if dist.get_rank() else {}),
        "ranks=2: allowed is 4, the product of": lambda: mesh.join(Layout(tp=4), group),
        "allowed are dp, pp and tp, each once": lambda: mesh.groups_of(named),
        "state_dict: ": job.state_dict,
    }


def agreed(group: Any, rank: int) -> Table:
    """What one rank finds, and all are told."""

    def parts(*modules: nn.Module) -> Pipeline:
        return Pipeline(modules, PAIR, group, loss)

    short = pipeline.from_text("F0 B0 F1 B1", "F0 F1 B0")
    torn = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1, device="meta")])
    return {
        "schedule: rank 0 has '1f1b (": lambda: distribute(
            GPT(PLAIN), schedule("gpipe" if rank else "1f1b", 2, 2), group
        ),
        "B1": lambda: distribute(GPT(PLAIN), short, group),  # is missing on stage 1
        "rank 0 of the group: between=None: Linear does not say what it gives": lambda: parts(
            nn.Linear(2, 2)
        ),
        "rank 1 of the group: parts has 2 modules: allowed is 1, one for each chunk": lambda: parts(
            *[Sleeping(0, 0, 0)] * (1 + rank)
        ),
        "rank 0 of the group: parts are on several devices (cpu, meta)": lambda: parts(torn),
        "count=0 on every rank": lambda: data_parallel.joined_mean(torch.ones(()), 0, group),
    }


TOGETHER = (products, tensors, sequences, copies, routed, staged, meshed)


def on_a_rank() -> list[dict[str, str]]:
    group, rank = dist.group.WORLD, dist.get_rank()
    one = [dist.new_group([each]) for each in range(2)][1 - rank]  # which holds the other rank
    found = []
    for table in TOGETHER:
        calls = table(group, one)
        with count.sent() as sent:
            found.append(missed(calls))
        assert not sent.calls and not sent.messages, table.__name__
    return [*found, missed(agreed(group, rank))]


def test_on_ranks_it_is_named_on_each_before_anything_is_sent() -> None:
    for found in ranks.run(on_a_rank, 2, device="cpu", timeout=30, show=False):
        assert found == [{}] * (len(TOGETHER) + 1)
