"""Table of the contract: cases that must train as one process does. See `contract`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from contract import CUT64, EXACT, FLOAT32, FLOAT64, Row, make_tol

from shardlab.common.shapes import Yarn
from shardlab.gpt.model import PRESETS, Config
from shardlab.layout import Layout
from shardlab.pipeline import SCHEDULE_NAMES

GPT2 = Config(vocab=32, seq=6, layers=2, heads=4, hidden=32)
LLAMA = Config(
    vocab=64, seq=8, layers=2, heads=8, hidden=64, kv_heads=4, ffn=40, mlp="swiglu", norm="rms",
    bias=False, tied=False,
)  # fmt: skip
QWEN = replace(LLAMA, heads=4, kv_heads=2, head=12, qk_norm=True, window=3, full_every=2,
               yarn=Yarn(4.0, 4, 2.0, 0.5, 1.1))  # fmt: skip
LATENT = replace(
    LLAMA, kv_heads=None, head=8, latent=16, query_latent=20, rotary=4, value=10, norm_eps=1e-6
)  # fmt: skip
ROUTED_LATENT = replace(
    LATENT, heads=4, experts=8, experts_per_token=3, expert_ffn=24, shared_experts=1,
    dense_layers=1, router="sigmoid", expert_groups=4, groups_per_token=2, routed_scale=2.5,
    yarn=Yarn(4.0, 4, 2.0, 0.5, mscale=0.7),
)  # fmt: skip
UNTIED = replace(GPT2, tied=False, layers=1)
# Rows in float32 for GPUs have two steps, since the second step is like all later ones. On the CPU
# the same plan in float64 is stricter.
F32 = {"dtype": torch.float32, "steps": 2, "tol": FLOAT32, "clip": (1e9, 0.1), "gpus": True}
F32["weekly"] = "cpu"
WEEKLY_F32 = F32 | {"weekly": "cpu, gpus"}  # shows the same as another row, with other numbers
RANKS = 1, 2, 4  # numbers of ranks


def make_row(technique: str, case: str, config: Config | None, layout: Layout, **more: Any) -> Row:
    """Return a row; `more` holds the fields that differ from the usual ones."""
    sizes = more.pop("sizes", (6 if config is None else 2,) * layout.dp)
    return Row(technique, case, config, layout, more.pop("tol", FLOAT64), sizes, **more)


# A step's branches of copy c, its samples, its micro-batches.
TOYS: dict[str, dict[str, Any]] = {
    "plain": {"branches": lambda c, m: "lr"},
    "unused on some": {"branches": lambda c, m: "lr" if c == 0 else "l"},
    "other order": {"branches": lambda c, m: "lr" if c % 2 else "rl"},
    "accumulated": {"branches": lambda c, m: "lr", "m": 3},
    "accumulated, unused": {"branches": lambda c, m: "l" if c else "r", "m": 2},
    "accumulated, first part alone": {"branches": lambda c, m: "l" if m else "lr", "m": 3},
    "uneven": {"branches": lambda c, m: "lr", "uneven": True},
}


def make_toy(technique: str, case: str, n: int, zero: int = 0, **more: Any) -> Row:
    how = dict(TOYS[case])
    m, uneven = how.pop("m", 1), how.pop("uneven", False)
    sizes = tuple(6 - 2 * r if r < 3 else 0 for r in range(n)) if uneven else (6 * m,) * n
    layout = Layout(dp=n, zero=zero, microbatches=m)
    return make_row(technique, case, None, layout, sizes=sizes, **how | more)


IN_ORDER = make_tol(
    1.2e-6, "float32 rounds at 6e-8: gradients up to 1, terms in another order, 3 steps"
)
SUMS_OF_SUMS = make_tol(1e-5, IN_ORDER.why + "; sums of sums, which AdamW makes somewhat larger")


def yield_data_rows() -> Iterator[Row]:
    for n in RANKS:
        for case in TOYS:
            # The order of buckets is the same on two GPUs and on four.
            yield make_toy("data", case, n, gpus=n > 1, weekly="gpus" if n == 4 else "")
            # torch's DDP determines unused parameters from the last micro-batch alone.
            if n < 4 and case != "accumulated, first part alone":
                # a + b equals b + a, also when rounded
                more = {"dtype": torch.float32, "tol": EXACT, "reference": "DDP"}
                yield make_toy("data", case, n, **more)
        more = {"tol": make_tol(1e-10, FLOAT64.why), "sizes": (4,) * n, "lr": 1e-3}
        more["options"] = {"bucket_bytes": 2**16, "first_bytes": 2**14}
        yield make_row("data", "text", PRESETS["nano"], Layout(dp=n), **more)
        more["weekly"] = "" if n == 2 else "cpu"  # beside DDP the Toy uses every branch
        more |= {"reference": "DDP", "gpus": n == 2}
        yield make_row("data", "text", PRESETS["nano"], Layout(dp=n), **more)
    for case, kept in (("plain", True), ("unused on some", True), ("unused on some", False)):
        more = {"dtype": torch.float32, "set_to_none": kept}
        yield make_toy("data", case, 2, tol=EXACT, **more)  # one process computes share by share
        yield make_toy("data", case, 4, tol=IN_ORDER, **more)
    for way in ("buckets", "parameters"):
        more = {"tol": EXACT, "dtype": torch.float32, "options": {"way": way}, "gpus": True}
        yield make_row("data", "gpt", GPT2, Layout(dp=2), **more)
    yield make_toy("data", "plain", 2, group="pairs", clip=(1e9, 0.1))
    yield make_toy("data", "plain", 2, group="slow")
    yield make_toy("DDP", "plain", 2, group="slow", gpus=True)
    yield make_row("data", "gpt", GPT2, Layout(dp=2), ignored=True)
    yield make_row("data", "gpt", GPT2, Layout(dp=2), **F32)
    yield make_row("data", "gpt", GPT2, Layout(dp=4), **WEEKLY_F32)


def yield_zero_rows() -> Iterator[Row]:
    kept = [case for case in TOYS if case not in ("uneven", "accumulated, first part alone")]
    for stage in (1, 2, 3):
        for case in kept:
            # On three ranks no parameter's size, and no flat tensor, divides into equal shards.
            yield make_toy("zero", case, 1, stage)
            yield make_toy("zero", case, 3, stage)
            for n in (2, 4):
                # Halves and quarters are exact, and sums are made in the order of the ranks.
                near = SUMS_OF_SUMS if case.startswith("accumulated") else EXACT
                yield make_toy("zero", case, n, stage, tol=near, dtype=torch.float32)
        # AdamW takes zeros for gradients, and decays the weights.
        more = {"dtype": torch.float32, "set_to_none": False, "tol": EXACT}
        yield make_toy("zero", "unused on some", 2, stage, **more)
        clip = {"clip": (0.05, 1e9, 0.2)}
        yield make_toy("zero", "plain", 2, stage, **clip)
        yield make_toy("zero", "plain", 4, stage, tol=SUMS_OF_SUMS, dtype=torch.float32, **clip)
        yield make_toy("zero", "plain", 2, stage, group="pairs", dtype=torch.float32, tol=EXACT)
        yield make_toy("zero", "plain", 2, stage, group="slow", dtype=torch.float32, tol=EXACT)
        yield make_row("zero", "gpt", GPT2, Layout(dp=2, zero=stage), **F32)
        yield make_row("zero", "gpt", GPT2, Layout(dp=4, zero=stage), **WEEKLY_F32)
        narrow = {"compute_dtype": torch.bfloat16}
        nano = {"sizes": (4, 4), "dtype": torch.float32, "options": narrow, "tol": EXACT}
        for beside in ("FSDP2", "masters"):
            layout = Layout(dp=2, zero=stage)
            yield make_row("zero", "bf16", PRESETS["nano"], layout, reference=beside, **nano)
        for n in (2, 4):
            # On two ranks, sums equal the library's bitwise; on four they are close.
            beside = {"sizes": (4,) * n, "dtype": torch.float32, "weekly": "cpu" if n == 4 else ""}
            why = "four terms in another order: AdamW takes another part of a step of 1e-2"
            near = make_tol(5e-3, why, losses=1e-4)
            layout = Layout(dp=n, zero=stage)
            exact = EXACT if n == 2 else near  # a + b equals b + a, also when rounded
            nano = PRESETS["nano"]
            yield make_row("zero", "text", nano, layout, reference="FSDP2", tol=exact, **beside)
            yield make_row("zero", "text", nano, layout, reference="DeepSpeed", tol=near, **beside)
    yield make_row("zero", "gpt", GPT2, Layout(dp=2, zero=3), ignored=True)
    late = {"options": {"defer_reduction": True}, "tol": SUMS_OF_SUMS, "dtype": torch.float32}
    yield make_toy("zero", "accumulated, unused", 2, 1, **late)
    for stage in (2, 3):
        yield make_toy("zero", "plain", 2, stage, options={"reduction": "library"})
        for n in (2, 4):
            options, more = {"reduction": "ordered"}, F32 if n == 2 else WEEKLY_F32
            yield make_row("zero", "gpt", GPT2, Layout(dp=n, zero=stage), options=options, **more)


TINY = Config(vocab=32, seq=4, layers=6, heads=2, hidden=16, tied=False)
TINY_LLAMA = replace(TINY, heads=4, kv_heads=2, hidden=32, mlp="swiglu", norm="rms", bias=False)
# By stages: micro-batches (fewer than stages, as many, more) and sequences (some do not divide).
BATCHES = {1: ((1, 2), (5, 7)), 2: ((1, 2), (2, 3), (5, 7)), 4: ((2, 3), (4, 4), (5, 7))}
# Each schedule runs all three every day; test_pipeline_schedules checks all schedules as data.
DAILY = {1: ((5, 7),), 2: ((1, 2), (2, 3)), 4: ((5, 7),)}
SHAPES: dict[str, tuple[Config, dict[int, list[int]]]] = {
    "tied": (replace(TINY, tied=True), {}),
    "llama": (TINY_LLAMA, {}),
    "uneven": (TINY_LLAMA, {2: [1, 5], 4: [0, 2, 3, 1]}),
    "ends alone": (TINY, {2: [6, 0], 4: [0, 4, 2, 0]}),
}
OTHERS = ("1f1b", "interleaved", "zb-h2", "zb-v")
TWINS = make_tol(
    5e-5,
    "one process adds both gradients of the matrix for each micro-batch, two stages once at the "
    "end: another order of sums, some units of 6e-8, and AdamW steps over gradients of about 1e-3",
)


def make_layout(name: str, p: int, m: int, **more: Any) -> Layout:
    chunks = 2 if p > 1 and name in ("interleaved", "zb-v") else 1
    return Layout(pp=p, schedule=name, microbatches=m, chunks=chunks, **more)


def yield_pipeline_rows() -> Iterator[Row]:
    narrow = {"dtype": torch.float32}
    tied = replace(TINY, tied=True)
    for p in (2, 4):
        more = {"sizes": (4,), "gpus": True, "steps": 2, "tol": TWINS, **narrow}
        more["weekly"] = "gpus" * (p == 2)
        yield make_row("pipeline", "tied", tied, make_layout("1f1b", p, 4), **more)
    for p in RANKS:
        for name in SCHEDULE_NAMES:
            for m, sequences in BATCHES[p]:
                layout = make_layout(name, p, m)
                # Eight parts of six blocks: the first is the embedding alone, the last the head.
                eight = layout.pp * layout.chunks == 8
                options = {"layers": [0, 1, 1, 1, 1, 1, 1, 0]} if eight else {}
                more = {"sizes": (sequences,), "options": options, "tol": EXACT, **narrow}
                more["gpus"] = (m, sequences) == BATCHES[p][1]
                # Who meets whom first is seen on four GPUs, and on two for what stands for a kind.
                seen = p == 4 or (p == 2 and name in ("1f1b", "zb-v"))
                here = (m, sequences) in DAILY[p]
                more["weekly"] = ", ".join(["cpu"] * (not here) + ["gpus"] * (not seen))
                yield make_row("pipeline", f"{name} of {m}", TINY, layout, **more)
    for name in OTHERS:
        for again in ("none", "full"):
            for number, (case, (config, layers)) in enumerate(SHAPES.items()):
                layout = make_layout(name, 2, 3, recompute=again)
                options = {"layers": layers[2 * layout.chunks]} if layers else {}
                more = {"steps": 2, "sizes": (4,), "options": options, **narrow}
                more["gpus"] = name == "1f1b"
                # Daily, every pair of schedule, shape and recomputation; weekly, every triple.
                other = (OTHERS.index(name) + number + (again == "full")) % 2
                more["weekly"] = "cpu, gpus" if other else "gpus" * (case == "uneven")
                near = TWINS if config.tied else EXACT
                yield make_row("pipeline", f"{case} {name}", config, layout, tol=near, **more)
        # Micro-batches of unequal size, and both ends of a tied matrix.
        layout = make_layout(name, 2, 3)
        yield make_row("pipeline", f"tied {name}", tied, layout, sizes=(5,))
        yield make_row("pipeline", f"tied {name}", tied, layout, sizes=(5,), ignored=True)
    layout = make_layout("1f1b", 2, 3)
    over = {"group": "slow", "steps": 2, "sizes": (3,), "tol": EXACT}
    yield make_row("pipeline", "1f1b", TINY_LLAMA, layout, **over, **narrow)
    far = make_tol(1.2e-4, "three AdamW steps of 1e-2 over gradients of about 1e-3, 1e-7 off")
    copies = {"sizes": (3, 3)}
    copies["gpus"] = True
    yield make_row(
        "pipeline", "replicas", tied, make_layout("1f1b", 2, 2, dp=2), tol=far, **narrow, **copies
    )
    yield make_row("pipeline", "replicas", tied, make_layout("zb-v", 2, 2, dp=2), **copies)


CUT = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "untied": UNTIED,
    "no bias": replace(GPT2, bias=False, layers=1),
    "swiglu, bias, tied": replace(LLAMA, bias=True, tied=True, norm="layer", layers=1),
    "qwen": QWEN,
    "latent": LATENT,
    "latent keys": replace(LATENT, query_latent=None, window=3, layers=1),
    "deepseek": ROUTED_LATENT,
    "copies": replace(LLAMA, kv_heads=1, bias=True, layers=1),
}
NEW = [CUT[case] for case in ("qwen", "latent", "latent keys", "deepseek", "copies")]


def yield_tensor_rows() -> Iterator[Row]:
    near = {"tol": CUT64, "clip": (1e9, 0.3, 0.1), "sizes": (3,)}
    for t in RANKS:
        # The parts of a model are cut on two ranks as on four.
        rest = {"weekly": "cpu" if t == 4 else "", **near}
        for case, config in CUT.items():
            daily = case in ("gpt2", "llama", "qwen")  # four ranks copy its key/value heads
            more = near if daily else rest
            if t == 1 and config in NEW:
                more = near | {"weekly": "cpu"}
            yield make_row("tensor", case, config, Layout(tp=t), **more)
        for case in ("llama", "gpt2"):
            layout = Layout(tp=t, recompute="full")
            yield make_row("tensor", f"{case}, recomputed", CUT[case], layout, **near)
        options = {"by_layer": True}
        yield make_row("tensor", "layer by layer", LLAMA, Layout(tp=t), options=options, **rest)
        yield make_row("tensor", "frozen", UNTIED, Layout(tp=t), frozen=("embedding",), **rest)
        along = Layout(tp=t, sequence_parallel=True)
        for case in ("gpt2", "llama", "qwen", "latent"):
            config = replace(CUT[case], seq=8)
            more = near | {"weekly": "cpu" if CUT[case] in NEW and t != 2 else ""}
            yield make_row("tensor", f"{case}, along", config, along, **more)
            again = replace(along, recompute="full")
            yield make_row("tensor", f"{case}, along", config, again, **rest)
        options = {"keep": True}
        config = replace(GPT2, seq=8)
        yield make_row("tensor", "kept, along", config, along, options=options, **rest)
    for group in ("pairs", "slow"):
        for sequence in (False, True):
            layout = Layout(tp=2, sequence_parallel=sequence)
            yield make_row("tensor", f"in {group}", LLAMA, layout, group=group, **near)
    for t in (2, 4):
        for sequence in (False, True):
            layout = Layout(tp=t, sequence_parallel=sequence)
            for case in ("gpt2", "llama"):
                more = F32 if t == 2 else WEEKLY_F32
                yield make_row("tensor", case, replace(CUT[case], seq=8), layout, **more)
            yield make_row("tensor", "llama", LLAMA, layout, ignored=True, **near)
    thirds = Config(vocab=15, seq=5, layers=1, heads=6, hidden=24, kv_heads=3, ffn=9, mlp="swiglu")
    yield make_row("tensor", "thirds", thirds, Layout(tp=3), **near)
    for stage in (0, 3):
        layout = Layout(dp=2, tp=2, zero=stage)
        yield make_row("tensor in copies", "text", PRESETS["nano"], layout, tol=CUT64)
    layout = Layout(pp=2, tp=2, microbatches=2)
    yield make_row("pipeline", "of tensors", PRESETS["nano"], layout, tol=CUT64)


def yield_context_rows() -> Iterator[Row]:
    dense = Config(vocab=64, seq=16, layers=2, heads=4, hidden=32)
    llama = replace(dense, kv_heads=2, mlp="swiglu", norm="rms", bias=False, tied=False)
    for c in RANKS:
        for way in ("ring", "ulysses"):
            for order in ("contiguous", "zigzag"):
                options = {"way": way, "layout": order}
                for case, config in (("gpt", dense), ("llama", llama)):
                    case = f"{case}, {way}, {order}"
                    more = {"options": options, "tol": CUT64}
                    yield make_row("context", case, config, Layout(cp=c), **more)
                if c > 1:
                    case = f"llama, {way}, {order}"
                    more = WEEKLY_F32 if c == 4 and order == "contiguous" else F32
                    yield make_row("context", case, llama, Layout(cp=c), options=options, **more)
        options = {"way": "ring", "layout": "zigzag"}
        layout = Layout(cp=c, recompute="full")
        yield make_row("context", "ring", dense, layout, options=options, tol=CUT64)
        if c > 1:
            yield make_row("context", "ring", dense, Layout(cp=c), options=options, ignored=True)
    for group in ("slow", "pairs"):
        layout = Layout(cp=2)
        more = {"options": options, "tol": CUT64, "group": group}
        yield make_row("context", f"in {group}", dense, layout, **more)
    for way in ("ring", "ulysses"):
        options = {"way": way, "layout": "zigzag"}
        layout = Layout(cp=2, tp=2)
        yield make_row("context", f"of tensors, {way}", llama, layout, options=options, tol=CUT64)


SPARSE = Config(
    vocab=64, seq=12, layers=2, heads=4, hidden=32, experts=4, expert_ffn=24, mlp="swiglu"
)
DEEPSEEK = replace(
    SPARSE, router="sigmoid", experts=8, experts_per_token=3, shared_experts=1, dense_layers=1
)
ROUTED = {
    "mixtral": replace(SPARSE, bias=False, norm="rms"),
    "switch": replace(SPARSE, experts_per_token=1, capacity=1.0, mlp="gelu"),
    "gshard": replace(SPARSE, capacity=0.75),
    "deepseek": DEEPSEEK,
}
BY_TOKENS = make_tol(
    1e-9,
    "float64; gradients add up in another order, and AdamW divides small ones by small ones",
    losses=1e-12,
)


def yield_expert_rows() -> Iterator[Row]:
    near = {"tol": BY_TOKENS, "balanced": True}
    one = make_tol(2e-6, "float32; products of other shapes add up in another order", weights=1e-2)
    for n in RANKS:
        sizes = {"sizes": (8 // n,) * n}
        for case, config in ROUTED.items():
            yield make_row("experts", case, config, Layout(dp=n, ep=n), **near, **sizes)
            more = {"dtype": torch.float32, "steps": 1, "tol": one, "gpus": True, **sizes}
            more["weekly"] = "cpu, gpus" if n == 4 else "cpu"
            yield make_row("experts", case, config, Layout(dp=n, ep=n), **more)
    layout = Layout(dp=4, ep=2)
    yield make_row("experts", "copied", DEEPSEEK, layout, sizes=(2,) * 4, **near)
    more |= {"sizes": (2,) * 4, "weekly": "cpu"}
    yield make_row("experts", "copied", ROUTED["mixtral"], layout, **more)
    for case in ("mixtral", "deepseek"):
        layout = Layout(dp=2, ep=2, tp=2)
        more = {"sizes": (4, 4), "tol": BY_TOKENS}
        yield make_row("experts", f"{case}, of tensors", ROUTED[case], layout, **more)


def yield_mesh_rows() -> Iterator[Row]:
    gpt = Config(vocab=32, seq=8, layers=2, heads=2, hidden=16)
    llama = replace(gpt, mlp="swiglu", norm="rms", bias=False, tied=False)
    deep = replace(gpt, layers=4)
    eight = Layout(dp=2, pp=2, tp=2, microbatches=2)
    four = replace(eight, pp=1)
    along = {"sequence_parallel": True}
    cases = [
        (Layout(microbatches=2), gpt, (3,)),
        (replace(eight, dp=1, schedule="gpipe", **along), gpt, (4,)),
        (replace(eight, tp=1, zero=1), gpt, (2, 2)),
        (replace(four, zero=2, **along), gpt, (4, 3)),
        (replace(four, zero=3, microbatches=1, **along), llama, (2, 2)),
        (replace(four, zero=3, order=("tp", "pp", "dp")), gpt, (2, 3)),
        (replace(eight, zero=1, **along), gpt, (2, 2)),
        (replace(eight, zero=1, **along), deep, (3, 2)),
        (eight, llama, (2, 3)),
        (replace(eight, zero=1, order=("pp", "tp", "dp")), gpt, (2, 2)),
    ]
    cases += [(Layout(dp=2, zero=s), gpt, (2, 2)) for s in range(4)]
    looped = {"schedule": "interleaved", "chunks": 2}
    again = {"recompute": "full"}
    cases += [
        (replace(eight, dp=1, **looped, **along), deep, (4,)),
        (replace(eight, tp=1, zero=1, **looped), replace(deep, layers=6), (2, 3)),
        (replace(eight, zero=1, **looped, **along, **again), deep, (3, 2)),
        (replace(eight, dp=1, pp=4, tp=1, **looped), replace(deep, layers=8), (4,)),
        (replace(four, zero=3, **again), llama, (2, 2)),
        (Layout(tp=2, **along, **again), gpt, (2,)),
        (Layout(pp=2, microbatches=3, schedule="naive", **again), gpt, (4,)),
    ]
    cases += [(Layout(tp=2, **along), llama, (2,)), (Layout(pp=2, microbatches=2), gpt, (4,))]
    for number, (layout, config, sizes) in enumerate(cases):
        # On eight ranks: 6 is in 7, and the order of 9 is in 5.
        more = {"sizes": sizes, "clip": (0.3,), "weekly": "cpu" if number in (6, 9) else ""}
        yield make_row("mesh", f"{number}", config, layout, **more)
        if layout.world_size in (2, 4):
            # One cut alone is in its technique's rows; several cuts need four ranks. 5 is in 4,
            # and 15 in 2 and 14.
            narrow = WEEKLY_F32 if layout.world_size == 2 or number in (5, 15) else F32
            narrow = narrow | {"sizes": sizes, "clip": (0.3,)}
            yield make_row("mesh", f"{number}", config, layout, **narrow)
    short = {"sizes": (2, 3), "ignored": True}
    yield make_row("mesh", "short", gpt, replace(eight, zero=1), clip=(0.3,), **short)
    yield make_row("mesh", "short", gpt, replace(four, zero=2), **F32 | short | {"weekly": "gpus"})
    copies = replace(QWEN, kv_heads=1, vocab=32, ffn=24)
    for case, layout, config in (
        ("deepseek", replace(eight, zero=1), ROUTED_LATENT),
        ("copies, along", replace(eight, zero=1, **along), copies),
        ("qwen", replace(four, zero=3), replace(copies, kv_heads=2)),
        ("latent, along", replace(four, zero=2, **along, **again), LATENT),
    ):
        more = {"weekly": "" if case in ("deepseek", "qwen") else "cpu"}
        yield make_row("mesh", case, config, layout, sizes=(2, 2), clip=(0.3,), **more)


def yield_recent_rows() -> Iterator[Row]:
    deep = {"layers": 6, "seq": 4, "vocab": 32}
    for name, config in (("zb-h2", ROUTED_LATENT), ("zb-v", QWEN)):
        layout = make_layout(name, 2, 3, recompute="full")
        more = {"sizes": (4,), "steps": 2, "weekly": "cpu"}
        yield make_row("pipeline", f"today, {name}", replace(config, **deep), layout, **more)
    yield make_row("zero", "today", ROUTED_LATENT, Layout(dp=2, zero=3), weekly="cpu")
    more = {"sizes": (4, 4), "tol": BY_TOKENS, "weekly": "cpu"}
    yield make_row("experts", "today", ROUTED_LATENT, Layout(dp=2, ep=2, tp=2), **more)
    whole = replace(QWEN, window=None, full_every=None, seq=16)
    for way in ("ring", "ulysses"):
        options = {"way": way, "layout": "zigzag"}
        yield make_row("context", f"today, {way}", whole, Layout(cp=2), options=options, tol=CUT64)
    options, layout = {"way": "ring", "layout": "zigzag"}, Layout(cp=2, tp=2)
    more = {"options": options, "tol": CUT64, "weekly": "cpu"}
    yield make_row("context", "today, of tensors", replace(whole, kv_heads=1), layout, **more)


ROWS = [
    *yield_data_rows(), *yield_zero_rows(), *yield_pipeline_rows(), *yield_tensor_rows(),
    *yield_context_rows(), *yield_expert_rows(), *yield_mesh_rows(), *yield_recent_rows(),
]  # fmt: skip


def select_gpu_rows(technique: str, size: int, whole: bool = True) -> list[Row]:
    found = [r for r in ROWS if r.gpus and (r.technique, r.ranks) == (technique, size)]
    found = [r for r in found if whole or "gpus" not in r.weekly]
    return [replace(r, steps=min(2, r.steps)) for r in found]
