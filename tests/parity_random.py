"""Random right programs: technique, plan, model, batch and optimizer drawn from a seed.

A program is a row of the contract, like those of `parity_programs`. A technique's requirements for
its plan and its model's shape are its row in KINDS; all else is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from random import Random
from typing import Any

import torch
from contract import FLOAT32, Row
from torch import Tensor, nn

from shardlab.gpt.model import Config
from shardlab.layout import Layout

Plan = Callable[[Random, int], dict[str, Any]]  # ranks -> further drawn options
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW, no decay": (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.95)}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
}
FAMILIES = "Llama", "Qwen3"  # of transformers
NO_DOUBLE = (torch.float32,) * 6 + (torch.bfloat16,)  # transformers' norms compute in float32
DTYPES = (torch.float32,) * 6 + (torch.float64,) * 3 + (torch.bfloat16,)


@dataclass(frozen=True)
class RandomRow(Row):
    optimizer_name: str = "AdamW"
    family: str = "GPT"

    def make_optimizer(self, model: Any) -> torch.optim.Optimizer:
        kind, options = OPTIMIZERS[self.optimizer_name]
        return kind(model.parameters(), foreach=False, **options)

    def build_plain_model(self, config: Config | None) -> nn.Module:
        is_gpt = self.family == "GPT"
        return super().build_plain_model(config) if is_gpt else Logits(config, self.family)


class Logits(nn.Module):
    def __init__(self, config: Config, family: str):
        super().__init__()
        import transformers

        self.inner = getattr(transformers, f"{family}ForCausalLM")(
            getattr(transformers, f"{family}Config")(
                vocab_size=config.vocab,
                hidden_size=config.hidden,
                intermediate_size=config.ffn_width,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.key_value_heads,
                head_dim=config.head_size,
                tie_word_embeddings=config.tied,
                initializer_range=0.1,
            )
        )

    @property
    def blocks(self) -> nn.ModuleList:
        return self.inner.model.layers

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(input_ids=tokens, use_cache=False).logits


@dataclass(frozen=True)
class Kind:
    """Requirements of a technique: `plan` draws fields of the layout, and further options."""

    technique: str
    plan: Plan
    weight: int = 1  # weight in the draw
    ranks: tuple[int, ...] = (2,) * 20 + (3,) * 6 + (4,) * 6 + (8,)
    accumulates: bool = False  # every copy has micro-batches
    clips: bool = True
    uneven: bool = False  # copies may have different numbers of sequences
    tied: tuple[bool, ...] = (True, False)
    model: dict[str, Any] | None = None  # fixed fields of the model's shape
    family: tuple[str, ...] = ("GPT",)
    dtypes: tuple[torch.dtype, ...] = DTYPES


def plan_copies(**more: tuple[Any, ...]) -> Plan:
    return lambda r, n: {"dp": n} | {name: r.choice(values) for name, values in more.items()}


def plan_axis(axis: str, **more: tuple[Any, ...]) -> Plan:
    return lambda r, n: {axis: n} | {name: r.choice(values) for name, values in more.items()}


def plan_pipeline(*names: str, filled: bool = False) -> Plan:
    """Return a plan for a pipeline and its micro-batches; filled: at least as many as stages."""

    def plan(r: Random, n: int) -> dict[str, Any]:
        name = r.choice(names)
        m = n * r.choice((1, 2)) if name in ("interleaved", "zb-v") else r.randint(1, 2 * n)
        m = max(m, n) if filled else m
        chunks = 2 if name in ("interleaved", "zb-v") else 1
        return {"pp": n, "schedule": name, "microbatches": m, "chunks": chunks}

    return plan


def plan_mesh(r: Random, n: int) -> dict[str, Any]:
    pairs = [
        (a, b, n // a // b) for a in range(1, n + 1) for b in range(1, n + 1) if n % (a * b) == 0
    ]
    d, p, t = r.choice([each for each in pairs if max(each) < n or n < 4])
    plan = plan_pipeline("naive", "gpipe", "1f1b", "interleaved")(r, p) if p > 1 else {}
    zero = r.choice((0, 1) if p > 1 else (0, 1, 2, 3)) if d > 1 else 0
    more = {
        "sequence_parallel": t > 1 and r.random() < 0.5,
        "recompute": r.choice(("none", "full")),
    }
    return {"dp": d, "tp": t, "zero": zero} | plan | more


def plan_tp_in_copies(zero: tuple[int, ...]) -> Plan:
    return lambda r, n: {"dp": n // 2, "tp": 2, "zero": r.choice(zero)}


SPARSE = {"experts": 1, "mlp": "swiglu"}
WAYS = {"way": ("ring", "ulysses"), "layout": ("zigzag", "contiguous")}
ALL = "naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"
EVEN = (4,) * 9 + (8,)
KINDS = (
    Kind("data", plan_copies(way=("hooks", "parameters", "buckets")), 2,
         accumulates=True, uneven=True),
    Kind("DDP", plan_copies(), accumulates=True, uneven=True),
    Kind("zero", plan_copies(zero=(1, 2, 3)), 3, accumulates=True, uneven=True),
    Kind("FSDP2", plan_copies(zero=(2, 3)), accumulates=True, uneven=True),
    Kind("DDP", plan_copies(), accumulates=True, family=FAMILIES, dtypes=NO_DOUBLE),
    Kind("FSDP2", plan_copies(zero=(2, 3)), accumulates=True, family=FAMILIES, dtypes=NO_DOUBLE),
    Kind("DeepSpeed", plan_copies(zero=(1, 2, 3)), accumulates=True, dtypes=(torch.float32,)),
    Kind("tensor", plan_axis("tp", sequence_parallel=(False, True), recompute=("none", "full")), 3),
    Kind("DTensor", plan_axis("tp"), clips=False),
    Kind("DTensor", plan_tp_in_copies((0,)), ranks=EVEN, clips=False),
    Kind("tensor in copies", plan_tp_in_copies((0, 1, 2, 3)), ranks=EVEN, clips=False),
    Kind("context", plan_axis("cp", recompute=("none", "full"), **WAYS), 3),
    Kind("experts", lambda r, n: {"dp": n, "ep": n}, 2, model=SPARSE),
    Kind("experts", lambda r, n: {"dp": 4, "ep": 2}, ranks=(4,), model=SPARSE),
    Kind("pipeline", plan_pipeline(*ALL), 3, clips=False),
    Kind("torch's pipeline", plan_pipeline("gpipe", "1f1b", "interleaved", "zb-v", filled=True),
         clips=False, tied=(False,)),
    Kind("mesh", plan_mesh, 4),
)  # fmt: skip
DRAWN_FROM = [kind for kind in KINDS for _ in range(kind.weight)]
FIELDS = Layout.__dataclass_fields__


def draw_row(seed: int) -> RandomRow:
    r = Random(seed)
    kind = r.choice(DRAWN_FROM)
    plan = {"microbatches": r.choice((1, 2, 3))} if kind.accumulates else {}
    plan |= kind.plan(r, r.choice(kind.ranks))
    options = {
        name: value for name, value in plan.items() if name not in FIELDS or name == "layout"
    }
    layout = Layout(**{name: value for name, value in plan.items() if name not in options})
    clip = r.choice(((), (), (0.3,), (1e3,))) if kind.clips else ()
    if kind.technique == "DeepSpeed" and clip:
        options["clips"] = True
    m = layout.microbatches
    sizes = tuple(m * r.choice((1, 1, 2)) for _ in range(1)) * layout.dp
    if kind.uneven and m == 1 and r.random() < 0.3:
        sizes = tuple(r.randint(1, 3) for _ in range(layout.dp))
    return RandomRow(
        kind.technique, f"seed {seed}", draw_shape(r, kind, layout, options), layout, FLOAT32,
        sizes, options, steps=r.choice((1, 1, 2)), clip=clip,
        optimizer_name=r.choice(list(OPTIMIZERS)), dtype=r.choice(kind.dtypes),
        family=r.choice(kind.family),
    )  # fmt: skip


def draw_shape(r: Random, kind: Kind, layout: Layout, options: dict[str, Any]) -> Config:
    t, c, parts = layout.tp, layout.cp, layout.pp * layout.chunks
    many = lcm(t, c if options.get("way") == "ulysses" else 1)
    kv = many * (r.choice((1, 1, 2)) if many < 4 else 1)
    heads = kv * (r.choice((1, 2, 3)) if kv < 4 else 1)
    size = r.choice([size for size in (2, 4, 6, 8, 10, 16) if 12 <= heads * size <= 64])
    unit = lcm(2 * c if c > 1 else 1, t if layout.sequence_parallel else 1)
    given = {
        "vocab": t * (r.randint(23, 61) // t), "seq": unit * max(1, r.randint(5, 17) // unit),
        "layers": parts * (r.choice((1, 2)) if parts < 4 else 1), "heads": heads, "kv_heads": kv,
        "hidden": heads * size, "ffn": t * r.randint(max(1, 11 // t), 40 // t),
        "mlp": r.choice(("gelu", "swiglu")),
        "norm": r.choice(("layer", "rms")), "bias": r.random() < 0.5, "tied": r.choice(kind.tied),
    }  # fmt: skip
    if kind.model:
        experts = layout.ep * r.choice((1, 2) if layout.ep > 2 else (2, 3))
        given |= kind.model | {
            "experts": experts, "experts_per_token": r.randint(1, min(3, experts)),
            "expert_ffn": t * r.randint(5, 12), "shared_experts": r.choice((0, 0, 1)),
            "router": r.choice(("softmax", "sigmoid")),
        }  # fmt: skip
    return Config(**given)
