"""Models of transformers, counted from their config.json: exactly, or refused in one line.

configs/ holds config.json files of public models; configs/counts.csv has the counts of
transformers' own class for each, with the source of the file.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardlab.layout.structure import Structure
from shardtools import hub
from shardtools.__main__ import main
from shardtools.hub import core, limits

CONFIGS = Path(__file__).parent / "configs"
COUNTS = {row["name"]: row for row in csv.DictReader((CONFIGS / "counts.csv").open())}


def count_model(path: Path, trace: bool = True) -> Structure | ValueError:
    try:
        return core._parse_structure(path.read_text(), trace)
    except ValueError as error:
        return error


# Models that mix tokens without attention are counted, and not planned.
MIXERS = {"granite-4.0-h-small", "nemotron-h-56b", "qwen3-next-80b-a3b", "qwen3.5-27b-text"}
WINDOWS = {"gemma-3-4b-text", "gpt-oss-20b", "llama-4-scout", "olmo-3.1-32b"}


@pytest.fixture(scope="module")
def structures(request) -> dict[str, Any]:
    """Return each parsed file of configs/; layers are traced for some, or for all with --weekly."""
    followed = {*VALUES, *MIXERS, *WINDOWS}
    whole = request.config.getoption("--weekly")
    paths = sorted(CONFIGS.glob("*.json"))
    return {path.stem: count_model(path, whole or path.stem in followed) for path in paths}


def test_public_models_are_counted_to_the_unit(structures) -> None:
    structures = dict(structures)
    refused = structures.pop("nemotron-super-49b")
    assert "model_type='nemotron-nas': transformers" in str(refused)
    assert {name: (one.num_params, one.num_active_params) for name, one in structures.items()} == {
        name: (int(row["total"]), int(row["active"])) for name, row in COUNTS.items()
    }
    known = "", "its layers were not traced"
    assert {
        name for name, one in structures.items() if one.unsupported_reason not in known
    } == MIXERS


def count_saved(one: Structure) -> list[int]:
    """Return the elements that a layer of each kind keeps, a token, in 16 bits."""
    rows = []
    for kind in one.kinds:
        networks = (3 if kind.gated else 2) * kind.active_width
        routed = kind.routed.top_k * kind.routed.input_width if kind.routed else 0
        rows.append(
            kind.stream_elements + kind.latent_elements + kind.head_elements + networks + routed
        )
    return rows


def count_forward(one: Structure, seq: int) -> float:
    """Return the operations of a token's forward pass in matrices and attention."""
    matrices = [e for e in one.outer_params if len(e.shape) == 2][1:]  # the embedding is a lookup
    total = 2.0 * sum(e.count_elements() for e in matrices)
    for k in one.layer_kinds:
        kind = one.kinds[k]
        for entry in kind.parameters:
            if len(entry.shape) > 1 and not entry.name.endswith("bias"):
                times = 1 if entry.expert is None else kind.routed.top_k
                total += 2 * times * entry.count_elements()
        total += kind.extra_flops + (kind.core.count_flops(seq) if kind.core else 0)
    return total


# Parameters, elements that a layer of each kind keeps, 10^9 operations of a token's forward pass
# at 8,192 tokens: formulas by hand, of which what is kept was checked by autograd's hooks on layers
# written for it.
VALUES = {
    "llama-3.1-8b": (8_030_261_248, [69_632], "17.157"),
    "qwen2.5-7b": (7_615_616_512, [79_360], "15.785"),
    "qwen3-32b": (32_762_123_264, [124_928], "72.558"),
    "mistral-nemo-12b": (12_247_782_400, [73_728], "25.837"),
    "phi-4": (14_659_507_200, [87_040], "31.646"),
    "mixtral-8x7b": (46_702_792_704, [120_832], "27.645"),
    "qwen3-30b-a3b": (30_532_122_624, [56_832], "9.305"),
    "deepseek-v2-lite": (15_706_484_224, [52_288, 65_536], "6.035"),
    "deepseek-v3": (671_026_404_352, [169_984, 227_328], "93.720"),
    "kimi-k2": (1_026_408_209_408, [129_024, 186_368], "73.607"),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_is_kept_and_computed_is_what_formulas_by_hand_say(structures, name: str) -> None:
    one = structures[name]
    assert (one.num_params, count_saved(one), f"{count_forward(one, 8192) / 1e9:.3f}") == VALUES[
        name
    ]


def test_windows_and_chunks_are_those_of_each_layer(structures) -> None:
    def list_windows(name: str) -> list[tuple[int | None, int | None, int]]:
        one = structures[name]
        cores = [kind.core for kind in one.kinds]
        return [(c.window, c.chunk, one.layer_kinds.count(k)) for k, c in enumerate(cores) if c]

    assert list_windows("gemma-3-4b-text") == [(1024, None, 29), (None, None, 5)]
    assert list_windows("gpt-oss-20b") == [(128, None, 12), (None, None, 12)]
    assert list_windows("llama-4-scout") == [(None, 8192, 36), (None, None, 12)]
    assert list_windows("qwen2.5-7b") == [(None, None, 28)]  # sliding_window is given, not used
    assert list_windows("nemotron-h-56b") == [(None, None, 10)]
    full = structures["olmo-3.1-32b"]
    mean = sum(full.kinds[k].core.count_keys(65_536) for k in full.layer_kinds) / full.layers
    assert round(mean) == 11_168


# All classes of transformers.

SOME = (
    "gpt2", "qwen3_next", "granitemoehybrid", "zamba2", "longcat_flash", "minimax", "gemma3",
)  # fmt: skip
# Classes whose defaults make no model, and classes that are not supported.
NOT_COUNTED = {
    "deepseek_v2": "gives the experts per token",  # its default is None
    "longcat_flash": "several numbers of experts",
    "zaya": "no router over its 16 experts",
}


def test_every_class_is_counted_as_transformers_counts_it(request, tmp_path: Path) -> None:
    """Compare files with the classes' defaults to transformers' own counts."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto import configuration_auto, modeling_auto

    from shardtools.hub.meta_model import stay_offline

    whole = request.config.getoption("--weekly")
    counts: dict[str, int | None] = {}
    for name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if whole else SOME:
        try:
            with stay_offline(), torch.device("meta"):
                config = configuration_auto.CONFIG_MAPPING[name]()
                config.save_pretrained(tmp_path / name)
                model = AutoModelForCausalLM.from_config(config)
            counts[name] = sum(p.numel() for p in model.parameters())
        except Exception:
            counts[name] = None
    assert len(counts) == (189 if whole else len(SOME))
    differ = {}
    for name, total in counts.items():
        path = tmp_path / name / "config.json"
        one = count_model(path, False) if path.exists() else ValueError()
        if isinstance(one, ValueError):
            assert total is None or NOT_COUNTED[name] in str(one), one
        elif one.num_params != total or not 0 < one.num_active_params <= one.num_params:
            differ[name] = one.num_params, total
    assert differ == {}


# Unusual configurations, in files made for the purpose: counts by hand.

H, A, K, D, F, V, L = 64, 4, 2, 32, 96, 512, 3
PLAIN = {
    "hidden_size": H, "num_attention_heads": A, "num_key_value_heads": K, "head_dim": D,
    "intermediate_size": F, "vocab_size": V, "num_hidden_layers": L, "pad_token_id": None,
    "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = H * D * (A + 2 * K) + A * D * H
LAYER = HEADS + 3 * H * F + 2 * H
MLA = {
    "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "head_dim": 4, "num_key_value_heads": A, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = H * A * 12 + H * 20 + 16 + 16 * A * 16 + A * 8 * H
EXPERT = 3 * H * 24
QUIRKS = {  # additions to the file; total; active, None: all
    "tied by the class": ({"model_type": "gemma"}, L * LAYER + H + V * H, None),
    "biases of queries and out": (
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        L * (LAYER + D * (A + 2 * K) + H + 2 * F + H) + H + 2 * V * H, None,
    ),
    "four norms": (
        {"model_type": "gemma3_text"}, L * (LAYER + 2 * D + 2 * H) + H + V * H, None,
    ),
    "first layers without experts": (
        {
            "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, "mlp_only_layers": [0], "decoder_sparse_step": 1,
        },
        L * (LAYER + 2 * D) - 2 * 3 * H * F + 2 * (8 * EXPERT + 8 * H) + H + 2 * V * H,
        2 * 6 * EXPERT,
    ),
    "latent attention": (
        {
            "model_type": "deepseek_v3", **MLA, "n_routed_experts": 8, "num_experts_per_tok": 3,
            "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
        },
        L * (LATENT + 2 * H) + 3 * H * F + 2 * (10 * EXPERT + 8 * H) + H + 2 * V * H,
        2 * 5 * EXPERT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", QUIRKS)
def test_quirks_of_files_are_counted(name: str) -> None:
    more, total, unmet = QUIRKS[name]
    one = core._parse_structure(json.dumps(PLAIN | more))
    assert (one.num_params, one.num_active_params) == (total, total - (unmet or 0))
    assert not one.unsupported_reason


def test_they_are_counted_and_planned_by_the_commands(capsys, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PLAIN | QUIRKS["latent attention"][0]))
    asked = ["--gpu", "h100", "--gpus", "1", "--batch", "8", "--seq", "1024", "--json"]
    given = ["--config", str(path)]
    assert main(["memory", *given, "--json"]) == 0
    total = json.loads(capsys.readouterr().out)["count"]["total"]
    assert main(["strategy", "plan", *given, *asked]) == 0
    first = json.loads(capsys.readouterr().out)["best"][0]
    assert first["bytes_by_part"]["weights"] == 2 * total


def test_what_is_counted_and_not_understood_is_not_planned(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bloom", "hidden_size": 64, "n_head": 4}))
    assert hub.read_structure(path).num_params > 0
    with pytest.raises(ValueError, match="bloom can be counted, but not planned: BloomBlock has"):
        hub.read_plannable(path)


# Untrusted files: each is refused in one line that names the reason.

LLAMA = json.loads((CONFIGS / "llama-3.2-1b.json").read_text())
MOE = json.loads((CONFIGS / "qwen3-30b-a3b.json").read_text())
BOUNDED: tuple[tuple[Any, str], ...] = (  # refused before anything is built
    (LLAMA | {"hidden_size": 10**30}, "hidden_size=10"),
    (LLAMA | {"hidden_size": "4096"}, "hidden_size='4096'"),
    (MOE | {"num_experts": 10**12}, "num_experts=1000000000000"),
    (LLAMA | {"model_type": "../llama"}, "model_type='../llama'"),
    (MOE | {"layer_types": [0] * 10**5}, "entries, not 100000"),
    ('{"model_type": ' + "[" * 10**5, "it nests too deep"),
    ("{", "JSON"),
)
BUILT: tuple[tuple[Any, str], ...] = (  # refused by the class, or for its size
    (LLAMA | {"num_key_value_heads": 5}, "num_attention_heads=32"),
    (LLAMA | {"model_type": "evil"}, "evil"),
    (LLAMA | {"hidden_act": "__import__"}, "__import__"),
    ({"model_type": "clip"}, "clip"),
)


@pytest.mark.parametrize("what, words", BOUNDED)
def test_files_from_strangers_are_refused_before_they_are_built(what, words) -> None:
    with pytest.raises(ValueError) as error:
        limits.parse_config(what if isinstance(what, str) else json.dumps(what))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("what, words", BUILT)
def test_what_a_class_cannot_be_built_with_is_one_line(what, words, tmp_path: Path) -> None:
    (path := tmp_path / "config.json").write_text(json.dumps(what))
    with pytest.raises(ValueError) as error:
        hub.read_structure(path)
    said = str(error.value)
    assert said.startswith(f"config={str(path)!r}: ") and words in said and "\n" not in said


def test_code_and_kernels_that_a_file_names_are_not_read() -> None:
    harmless = LLAMA | {
        "auto_map": {"AutoModelForCausalLM": "evil--modeling.Evil"}, "trust_remote_code": True,
        "quantization_config": {"quant_method": "fp8"}, "torch_dtype": "evil",
        "_attn_implementation": "evil/kernel", "max_position_embeddings": 10**10,
    }  # fmt: skip
    one = core._parse_structure(json.dumps(harmless), False)
    assert one.num_params == int(COUNTS["llama-3.2-1b"]["total"])
    assert one.assumptions[-1].startswith("quantization_config (fp8) is not read")


def test_a_file_is_counted_by_the_command(capsys) -> None:
    path = str(CONFIGS / "olmoe-1b-7b.json")
    assert main(["memory", "--config", path, "--json"]) == 0
    count = json.loads(capsys.readouterr().out)["count"]
    row = COUNTS["olmoe-1b-7b"]
    assert (count["total"], count["active"]) == (int(row["total"]), int(row["active"]))
