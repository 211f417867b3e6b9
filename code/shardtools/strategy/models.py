"""Models that published tables of throughputs name, with their structures.

Models of the course's own kind are defined here by their shapes. For other models,
`published/models.json` has the kinds of layers and tensors, counted from their config.json, so that
reading a table loads no torch.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from shardlab.common.arguments import check_one_of
from shardlab.common.shapes import PRESETS, Config
from shardlab.layout import Structure, get_structure
from shardlab.layout.parameters import ParamInfo
from shardlab.layout.structure import AttentionCore, LayerKind, RoutedExperts

PUBLISHED_FILE = Path(__file__).parent / "published" / "models.json"

_LLAMA_2 = Config(32_000, 4096, 32, 32, 4096, None, 11_008, "swiglu", "rms", False, False)
# NVIDIA/NeMo's recipes: two matrices, no biases, a vocabulary of 256,000 and heads of their own.
_NEMOTRON = Config(256_000, 4096, 32, 32, 4096, None, 16_384, "gelu", "layer", False, False)
# mosaicml/llm-foundry, scripts/train/yamls/pretrain: learned positions, no biases.
_MPT = Config(50_368, 2048, 32, 32, 4096, None, None, "gelu", "layer", False, True)
_GPT = PRESETS["gpt-3-175b"]
_SHAPES = {
    **PRESETS,
    "llama-2-7b": _LLAMA_2,
    "llama-2-13b": replace(_LLAMA_2, layers=40, heads=40, hidden=5120, ffn=13_824),
    "llama-2-70b": replace(_LLAMA_2, layers=80, heads=64, hidden=8192, kv_heads=8, ffn=28_672),
    "gpt-3-5b": replace(_GPT, layers=24, heads=32, hidden=4096),
    "gpt-3-20b": replace(_GPT, layers=44, heads=48, hidden=6144),
    "nemotron-8b": _NEMOTRON,
    "nemotron-22b": replace(_NEMOTRON, layers=40, heads=48, hidden=6144, ffn=24_576),
    "nemotron-340b": replace(_NEMOTRON, layers=96, heads=96, hidden=18_432, kv_heads=8, ffn=73_728),
    "mpt-1b": replace(_MPT, layers=24, heads=16, hidden=2048),
    "mpt-3b": replace(_MPT, heads=20, hidden=2560),
    "mpt-7b": _MPT,
    "mpt-13b": replace(_MPT, layers=40, heads=40, hidden=5120),
    "mpt-30b": replace(_MPT, layers=48, heads=56, hidden=7168),
    "mpt-70b": replace(_MPT, layers=80, heads=64, hidden=8192),
}  # fmt: skip


@cache
def find_model(name: str) -> Structure:
    """Return the structure of the model of that name. Raises ValueError for unknown names."""
    published = json.loads(PUBLISHED_FILE.read_text("utf-8"))
    check_one_of(_SHAPES | published, model=name)
    if name not in published:
        return get_structure(_SHAPES[name])
    fields = {"tied": False} | published[name]  # the file leaves out default values
    return Structure(
        **fields
        | {
            "kinds": tuple(_make_kind(kind) for kind in fields["kinds"]),
            "layer_kinds": tuple(map(int, fields["layer_kinds"].split())),
            "outer_params": _make_entries(fields["outer_params"]),
            "assumptions": tuple(fields.get("assumptions", ())),
        }
    )


def _make_kind(published: dict[str, Any]) -> LayerKind:
    entries = _make_entries(published["parameters"])
    fields = {"core": None, "gated": False, **published, "parameters": entries}
    for name, made in (("core", AttentionCore), ("routed", RoutedExperts)):
        if name in published:
            fields[name] = made(**published[name])
    return LayerKind(**fields)


def _make_entries(listed: list[dict[str, Any]]) -> tuple[ParamInfo, ...]:
    return tuple(ParamInfo(**{**entry, "shape": tuple(entry["shape"])}) for entry in listed)
