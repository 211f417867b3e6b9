"""Models of transformers, counted from their config.json: exactly, or refused in one line.

configs/ holds config.json files of public models; configs/counts.csv what transformers' own class
has in each, with where the file comes from.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from shardlab.layout.structure import Structure
from shardtools import hub
from shardtools.__main__ import main
from shardtools.hub import core, cuts
from shardtools.hub.ahead import with_modules
from shardtools.hub.ask import Builder

CONFIGS = Path(__file__).parent / "configs"
COUNTS = {row["name"]: row for row in csv.DictReader((CONFIGS / "counts.csv").open())}
REFUSED = {"nemotron-super-49b": "model_type='nemotron-nas': transformers"}


@pytest.fixture(scope="module")
def builder() -> Iterator[Builder]:
    """One process for most of the tests: it takes seconds to start."""
    with Builder() as started:
        yield started


@pytest.fixture(scope="module")
def found(builder) -> dict[str, Structure | ValueError]:
    """Each file of configs/, as it is read."""
    files = sorted(CONFIGS.glob("*.json"))
    each = hub.read_many(files, builder=builder)
    return {path.stem: one for path, one in zip(files, each, strict=True)}


def test_public_models_are_counted_to_the_unit(found) -> None:
    counted = {name: one for name, one in found.items() if isinstance(one, Structure)}
    assert {name: (one.total, one.active) for name, one in counted.items()} == {
        name: (int(row["total"]), int(row["active"])) for name, row in COUNTS.items()
    }
    refused = {name: str(one) for name, one in found.items() if name not in counted}
    assert refused.keys() == REFUSED.keys()
    for name, words in REFUSED.items():
        assert words in refused[name] and "\n" not in refused[name]
    assert [name for name, one in counted.items() if one.unplanned] == []


def kept(one: Structure) -> list[int]:
    """Elements that a layer of each kind keeps, a token, in 16 bits."""
    rows = []
    for kind in one.kinds:
        networks = (3 if kind.gated else 2) * kind.wide
        routed = kind.routed.chosen * kind.routed.inputs if kind.routed else 0
        rows.append(kind.stream + kind.latent + kind.heads + networks + routed)
    return rows


def forward(one: Structure, seq: int) -> float:
    """Operations of a token's forward pass, by matrices and core; norms and biases are none."""
    matrices = [e for e in one.outside if len(e.shape) == 2][1:]  # the embedding is looked up
    total = 2.0 * sum(e.elements() for e in matrices)
    for k in one.order:
        kind = one.kinds[k]
        for entry in kind.entries:
            if len(entry.shape) > 1 and not entry.name.endswith("bias"):
                times = 1 if entry.expert is None else kind.routed.chosen
                total += 2 * times * entry.elements()
        total += kind.scans + (kind.core.flops(seq) if kind.core else 0)
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


# What differs from a class's own settings in Qwen3.8-Flash-Next's file, of those that are sizes.
NGRAMS = {
    "model_type": "qwen4_exp_text", "vocab_size": 248_320, "hidden_size": 2560, "hc_lowrank": 320,
    "num_hidden_layers": 48, "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256,
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "hc_count": 4,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 640, "ple_layer_ids": [2],
    "shared_expert_intermediate_size": 640, "ple_embed_dim": 2560, "ple_conv_kernel_size": 4,
    "ngram_size": 3, "heads_per_ngram": 8, "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128, "tie_word_embeddings": False,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 12, "mtp_use_norm": False,
    "indexer_budget": 2048, "indexer_compress_ratio": 4, "split_ngram_parts": 128,
    "partial_rotary_factor": 0.25, "max_position_embeddings": 262_144, "eos_token_id": 248_044,
}  # fmt: skip


def test_a_table_of_which_a_token_reads_rows_is_not_active(builder, tmp_path: Path) -> None:
    """Qwen3.8-Flash-Next's published total; 320,001,536 rows of n-grams, of 160 numbers each."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(NGRAMS))
    (one,) = hub.read_many([path], builder=builder)
    assert one.total == 176_943_899_520
    assert one.active == 58_507_240_320 - 320_001_536 * 160 == 7_306_994_560
    assert one.unplanned and "register_meta" not in one.unplanned and len(one.unplanned) < 80
    assert "not read by Qwen4ExpForCausalLM: mtp_use_norm" in one.assumed
    path.write_text(json.dumps(MOE | {"mlp_only_layers": 1}))  # "'int' object is not iterable"
    (error,) = hub.read_many([path], False, builder)
    one_line(error, path, "mlp_only_layers=1: the class of model_type='qwen3_moe' cannot be built")


@pytest.mark.parametrize("name", VALUES)
def test_what_is_kept_and_computed_is_what_formulas_by_hand_say(found, name: str) -> None:
    one = found[name]
    assert (one.total, kept(one), f"{forward(one, 8192) / 1e9:.3f}") == VALUES[name]


def test_windows_and_chunks_are_those_of_each_layer(found) -> None:
    def seen(name: str) -> list[tuple[int | None, int | None, int]]:
        one = found[name]
        cores = [kind.core for kind in one.kinds]
        return [(c.window, c.chunk, one.order.count(k)) for k, c in enumerate(cores) if c]

    assert seen("gemma-3-4b-text") == [(1024, None, 29), (None, None, 5)]
    assert seen("gpt-oss-20b") == [(128, None, 12), (None, None, 12)]
    assert seen("llama-4-scout") == [(None, 8192, 36), (None, None, 12)]
    assert seen("qwen2.5-7b") == [(None, None, 28)]  # sliding_window stands there, and is not used
    assert seen("nemotron-h-56b") == [(None, None, 10)]
    full = found["olmo-3.1-32b"]
    mean = sum(full.kinds[k].core.keys(65_536) for k in full.order) / full.layers
    assert round(mean) == 11_168


def test_the_same_file_is_built_once(monkeypatch, tmp_path: Path) -> None:
    asked = []
    monkeypatch.setattr(Builder, "ask", lambda self, what: asked.append(what) or REPLY)
    text = json.dumps({"model_type": "llama", "note": str(tmp_path)})
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "b.json").write_text(text)
    assert hub.read(tmp_path / "a.json") is hub.read(tmp_path / "b.json")
    assert len(asked) == 1


REPLY = {
    "class": "Llama", "model_type": "llama", "total": 8, "hidden": 2, "vocab": 4, "seq": 0,
    "tokens": 1, "tied": False, "order": [], "kinds": [], "assumed": [], "unplanned": "no layers",
    "outside": [{"name": "embed.weight", "shape": [4, 2], "experts": 0, "tied": None,
                 "table": False}],
}  # fmt: skip


def test_counts_that_do_not_agree_are_refused(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Builder, "ask", lambda self, what: {**REPLY, "total": 9})
    (tmp_path / "config.json").write_text('{"model_type": "llama", "n": 1}')
    with pytest.raises(ValueError, match="have 8 parameters, its class 9"):
        hub.read(tmp_path / "config.json")


# All classes of transformers.

SOME = (
    "gpt2", "qwen3_next", "granitemoehybrid", "zamba2", "longcat_flash", "minimax", "gemma3",
)  # fmt: skip
# Those whose own defaults make no model, and those that have one and are not understood.
NOT_COUNTED = {
    "deepseek_v2": "says how many experts a token goes through",  # its default is None
    "longcat_flash": "experts of several numbers",
    "zaya": "chooses among others than its 16 experts",
}


TRUTH = """
import json, pathlib, sys, torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES
counts = {}
for name in sys.argv[3:] or NAMES:
    try:
        config = CONFIG_MAPPING[name]()
        config.save_pretrained(pathlib.Path(sys.argv[1], name))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        counts[name] = sum(p.numel() for p in model.parameters())
    except Exception as error:
        counts[name] = None
print(json.dumps(counts))
"""
# What a rank of four has of each weight of a layer, by transformers' own plan and its own code.
SHARES = """
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
mesh, shares = init_device_mesh("cpu", (4,)), {}
for name in "axk2", "deepseek_v3", "gemma3_text", "llama4_text", "phi3", "qwen3_moe":
    config = CONFIG_MAPPING[name](num_hidden_layers=2)
    config.save_pretrained(pathlib.Path(sys.argv[1], "two", name))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    held, modules = set(dict(model.named_parameters())), dict(model.named_modules())
    for one, style in model._expand_parallel_plan(model.tp_plan).items():
        if one in held:
            module, _, inner = one.rpartition(".")
            ALL_PARALLEL_STYLES[style].shard_param(modules[module], inner, mesh)
    local = [(n, getattr(p, "to_local", lambda p=p: p)()) for n, p in model.named_parameters()]
    shares[name] = [[n, p.numel()] for n, p in local]
print(json.dumps(shares))
"""
SMALL = {
    "model_type": "mixtral", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
    "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 128, "sliding_window": 100,
}  # fmt: skip
# The plug-ins, each left out. It comes second: it changes transformers.
WITHOUT = """
import json, sys
from shardtools.hub import build, facts, plugs, trace, kinds
config = build.configured(json.loads(sys.argv[2]))
plain = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
whole = dict(plugs.PLUGGED)
fused, opaque, seen = plugs._fused, plugs._opaque, plugs._seen
def row(**plugged):
    model = build.build(build.configured(json.loads(sys.argv[2])), **plugged)
    one = trace.traced(model, list(range(config.num_hidden_layers)), 512)[0]
    window = one.mixed[0].seen.window if one.mixed else None
    kept = one.stream + one.heads + one.network
    return [round(one.products), window, round(kept), round(one.single)]
rows = {"all": row(**whole)}
rows["attention"] = row(**whole | {"attn_implementation": "eager"})
rows["experts"] = row(**whole | {"experts_implementation": "batched_mm"})
plugs._seen = lambda function, size: plugs.Seen()
rows["masks"] = row(**whole)
plugs._seen = seen
plugs._fused = lambda module: module.forward
rows["norms"] = row(**whole)
plugs._fused = fused
plugs._opaque = lambda function: function
rows["rotations"] = row(**whole)
print(json.dumps(rows))
"""


@pytest.fixture(scope="module")
def apart(request, tmp_path_factory) -> tuple[Path, dict, dict, dict]:
    """Files of classes' defaults, their counts, ranks' shares, and rows without plug-ins, by a
    process apart.
    """
    some = [] if request.config.getoption("--whole") else SOME
    folder = tmp_path_factory.mktemp("defaults")
    done = subprocess.run(
        [sys.executable, "-c", TRUTH + SHARES + WITHOUT, str(folder), json.dumps(SMALL), *some],
        stdout=subprocess.PIPE, check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )  # fmt: skip
    counts, shares, rows = (json.loads(line) for line in done.stdout.splitlines()[-3:])
    return folder, counts, shares, rows


def test_every_class_is_counted_as_transformers_counts_it(request, builder, apart) -> None:
    whole = request.config.getoption("--whole")
    folder, counts, *_ = apart
    assert len(counts) == (189 if whole else len(SOME))
    files = {name: folder / name / "config.json" for name in counts}
    files = {name: path for name, path in files.items() if path.exists()}
    differ = {}
    for name, one in zip(files, hub.read_many(files.values(), False, builder), strict=True):
        if isinstance(one, ValueError):
            assert "\n" not in str(one)
            assert counts[name] is None or NOT_COUNTED[name] in str(one), one
        elif one.total != counts[name] or not 0 < one.active <= one.total:
            differ[name] = one.total, counts[name]
    assert differ == {}


def test_shares_by_transformers_own_plan_are_its_own(monkeypatch, builder, apart) -> None:
    """With no table, every weight of a layer is cut as transformers' code cuts it."""
    folder, _, shares, _ = apart
    files = [folder / "two" / name / "config.json" for name in shares]
    with_table = list(hub.read_many(files, True, builder))
    monkeypatch.setattr(cuts, "_row", lambda stem, mixes: None)
    cut = 0
    for rows, one in zip(shares.values(), hub.read_many(files, True, builder), strict=True):
        assert any("as in transformers' own plan" in words for words in one.assumed)
        place = [0] * one.layers
        for name, many in rows:
            number, _, inner = name.removeprefix("model.layers.").partition(".")
            if not name.startswith("model.layers."):
                continue
            kind = one.kinds[one.order[int(number)]]
            entry = kind.entries[place[int(number)]]
            place[int(number)] += 1
            experts = kind.routed.number if entry.expert is not None else 1
            assert (entry.name, experts * entry.elements(4)) == (inner, many), (
                one.model_type,
                name,
            )
            cut += entry.tp is not None
    assert cut > 50
    # The table stands above: it cuts latent attention, which the plan leaves whole.
    axk2, deepseek = with_table[:2]
    (words,) = [words for words in axk2.assumed if "own plan" in words]
    assert words == "cut by tensor ranks as in transformers' own plan: self_attn.q_gate_proj"
    assert not any("own plan" in words for words in deepseek.assumed)
    latent = {e.name: e.tp for e in deepseek.kinds[0].entries}
    assert [latent[f"self_attn.{name}_proj.weight"] for name in ("q_b", "kv_b", "o")] == [0, 0, 1]


# Today's quirks, in files made for the purpose: what is counted, by hand.

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
QUIRKS = {  # what the file says beside; total; active, None: all
    "tied by the class": ({"model_type": "gemma"}, L * LAYER + H + V * H, None),
    "untied by the class": ({"model_type": "llama"}, L * LAYER + H + 2 * V * H, None),
    "tied by the file": (
        {"model_type": "llama", "tie_word_embeddings": True}, L * LAYER + H + V * H, None,
    ),
    "biases that no key names": (
        {"model_type": "qwen2"}, L * (LAYER + D * (A + 2 * K)) + H + 2 * V * H, None,
    ),
    "biases of queries and out": (
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        L * (LAYER + D * (A + 2 * K) + H + 2 * F + H) + H + 2 * V * H, None,
    ),
    "norms by head": ({"model_type": "qwen3"}, L * (LAYER + 2 * D) + H + 2 * V * H, None),
    "norms of the whole": (
        {"model_type": "olmo2"}, L * (LAYER + (A + K) * D) + H + 2 * V * H, None,
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
    "experts of lists": (
        {
            "model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": [2] * L,
            "moe_intermediate_size": [24] * L, "num_shared_expert": [1] * L, "eos_token_id": 2,
        },
        None, None,
    ),
}  # fmt: skip


def test_quirks_of_files_are_counted(builder, tmp_path: Path) -> None:
    rows = written(tmp_path, {name: (PLAIN | row[0], "") for name, row in QUIRKS.items()})
    found = hub.read_many([path for path, _ in rows], True, builder)
    for (name, (_, total, unmet)), one in zip(QUIRKS.items(), found, strict=True):
        assert isinstance(one, Structure), (name, one)
        if total is not None:
            assert (one.total, one.active) == (total, total - (unmet or 0)), name
        assert not one.unplanned, (name, one.unplanned)


def test_layers_that_predict_further_tokens_are_an_option(found) -> None:
    one = found["deepseek-v3"]
    given = json.loads((CONFIGS / "deepseek-v3.json").read_text())
    more = with_modules(one, given, 1)
    h = one.hidden
    assert more.total - one.total == one.kinds[-1].parameters + 2 * h * h + 3 * h
    assert round((more.total - one.total) / 1e9, 1) == 11.6
    with pytest.raises(ValueError, match="mtp=2: allowed are whole numbers, 0 to 1"):
        with_modules(one, given, 2)


def test_they_are_counted_and_planned_by_the_commands(
    capsys, monkeypatch, builder, tmp_path: Path
) -> None:
    monkeypatch.setattr(core, "Builder", lambda: nullcontext(builder))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PLAIN | QUIRKS["latent attention"][0]))
    asked = ["--gpu", "h100", "--gpus", "1", "--batch", "8", "--seq", "1024", "--json"]
    counts, steps, sizes = [], [], []
    for number in "0", "1":
        more = ["--config", str(path), "--mtp", number]
        assert main(["memory", *more, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["parameters"] == 2 * found["count"]["total"]
        counts.append(found["count"]["total"])
        assert main(["strategy", *more, *asked]) == 0
        out, err = capsys.readouterr()
        first = json.loads(out)["best"][0]
        steps.append(first["seconds"])
        sizes.append(first["bytes_by_part"]["weights"])
        assert ("1 of num_nextn_predict_layers=1: each a layer as the last" in err) is (
            number > "0"
        )
    module = LATENT + 2 * H + 10 * EXPERT + 8 * H + 2 * H * H + 3 * H
    assert counts[1] - counts[0] == module and steps[1] > steps[0]
    assert sizes[1] - sizes[0] == 2 * module
    for wrong, words in (
        (["--mtp", "2"], "mtp=2: allowed are whole numbers, 0 to 1"),
        (["--mtp", "1", "--run"], "--mtp with --run"),
    ):
        assert main(["strategy", "--config", str(path), *asked[:-1], *wrong]) == 2
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1 and words in err


def test_what_is_counted_and_not_understood_is_not_planned(builder, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(core, "Builder", lambda: nullcontext(builder))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bloom", "hidden_size": 64, "n_head": 4}))
    assert hub.read(path).total > 0
    with pytest.raises(ValueError, match="bloom is counted, and not planned: BloomBlock mixes"):
        hub.planned(path)


# Files from strangers. Each ends in one line, and nothing goes on running.

LLAMA = json.loads((CONFIGS / "llama-3.2-1b.json").read_text())
MOE = json.loads((CONFIGS / "qwen3-30b-a3b.json").read_text())
BOUNDED = {  # refused before anything is built
    "hidden 10^30": (LLAMA | {"hidden_size": 10**30}, "a number of 31 digits"),
    "hidden 10^9": (LLAMA | {"hidden_size": 10**9}, "hidden_size=1000000000: allowed are whole"),
    "hidden -1": (LLAMA | {"hidden_size": -4096}, "hidden_size=-4096: allowed are whole numbers"),
    "hidden text": (LLAMA | {"hidden_size": "4096"}, "hidden_size='4096': allowed are whole"),
    "hidden 0": (LLAMA | {"hidden_size": 0}, "hidden_size=0: allowed are whole numbers, 1"),
    "hidden 4096.5": (LLAMA | {"hidden_size": 4096.5}, "hidden_size=4096.5: allowed are whole"),
    "layers 10^6": (LLAMA | {"num_hidden_layers": 10**6}, "num_hidden_layers=1000000: allowed"),
    "layers -3": (LLAMA | {"num_hidden_layers": -3}, "num_hidden_layers=-3: allowed are whole"),
    "heads true": (LLAMA | {"num_attention_heads": True}, "num_attention_heads=True: allowed"),
    "heads 0": (LLAMA | {"num_attention_heads": 0}, "num_attention_heads=0: allowed are whole"),
    "kv 0": (LLAMA | {"num_key_value_heads": 0}, "num_key_value_heads=0: allowed are whole"),
    "experts 10^12": (MOE | {"num_experts": 10**12}, "num_experts=1000000000000: allowed are"),
    "experts -1": (MOE | {"num_experts": -1}, "num_experts=-1: allowed are numbers from 0"),
    "vocab 10^12": (LLAMA | {"vocab_size": 10**12}, "vocab_size=1000000000000: allowed are whole"),
    "width 10^9": (LLAMA | {"intermediate_size": 10**9}, "intermediate_size=1000000000: allowed"),
    "nested": ({"model_type": "llama4", "text_config": {"vocab_size": 10**12}}, "vocab_size=1000"),
    "type list": (LLAMA | {"model_type": ["llama"]}, "model_type=['llama']: allowed is a name"),
    "type path": (LLAMA | {"model_type": "../llama"}, "model_type='../llama': allowed is a name"),
    "no type": ({k: v for k, v in LLAMA.items() if k != "model_type"}, "model_type is missing"),
    "a list": ([1], "allowed are files with a JSON object"),
    "long list": (MOE | {"layer_types": [0] * 10**5}, "a list of 100000 entries"),
    "long text": (LLAMA | {"hidden_act": "x" * 10**5}, "a text of 100000 characters"),
    "many keys": (LLAMA | {f"key{n}": n for n in range(5000)}, "more than 2000 keys"),
}
TEXTS = {
    "no JSON": ("{", "allowed are JSON files"),
    "empty": ("", "allowed are JSON files"),
    "NaN": ('{"model_type": "llama", "rope_theta": NaN}', "the number NaN"),
    "deep": ('{"model_type": ' + "[" * 10**5, "it nests too deep"),
    "deeper": ('{"model_type": "llama", "a": ' + "[" * 50 + "]" * 50 + "}", "8 objects and lists"),
    "long": ('{"model_type": "llama", "a": "' + "x" * 10**6 + '"}', "1000000 bytes at most"),
}
BUILT = {  # refused by the class, or by what it takes
    "heads 7": (LLAMA | {"num_attention_heads": 7, "head_dim": None}, ""),
    "kv 5": (LLAMA | {"num_key_value_heads": 5}, "allowed are divisors of num_attention_heads=32"),
    "kv 64": (LLAMA | {"num_key_value_heads": 64}, "num_key_value_heads=64: allowed are divisors"),
    "a size that is not read": (
        LLAMA | {"routed_expert_hidden_size": 1024, "latent_moe_use_norm": True},
        "does not know; not read by LlamaForCausalLM: latent_moe_use_norm, routed_expert",
    ),
    "hidden null": (LLAMA | {"hidden_size": None}, ""),
    "unknown type": (LLAMA | {"model_type": "evil"}, "has no class of that name"),
    "rotation": (LLAMA | {"rope_scaling": {"rope_type": "evil", "factor": -1}}, ""),
    "activation": (LLAMA | {"hidden_act": "__import__"}, "hidden_act='__import__': the class of"),
    "layer types": (MOE | {"layer_types": ["full_attention"] * 3}, ""),
    "no causal": ({"model_type": "clip"}, "transformers has no causal model of it"),
    "more chosen than there are": (MOE | {"num_experts_per_tok": 129}, "more experts than"),
    "10^4 layers": (LLAMA | {"num_hidden_layers": 10**4}, "is not built after 2 seconds"),
}


def one_line(error: Exception, path: Path, words: str) -> None:
    said = str(error)
    assert said.startswith(f"config={str(path)!r}: ") and words in said, said
    assert "\n" not in said and len(said) < 600 + len(str(path))


def written(folder: Path, cases: dict[str, tuple]) -> list[tuple[Path, str]]:
    rows = []
    for number, (what, words) in enumerate(cases.values()):
        path = folder / f"{number}.json"
        path.write_text(what if isinstance(what, str) else json.dumps(what))
        rows.append((path, words))
    return rows


def test_files_from_strangers_are_refused_before_a_process_starts(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(Builder, "ask", lambda self, what: pytest.fail("it was built"))
    for path, words in written(tmp_path, BOUNDED | TEXTS):
        with pytest.raises(ValueError) as error:
            hub.read(path)
        one_line(error.value, path, words)


def test_what_goes_wrong_in_the_process_is_one_line_and_leaves_nothing(
    monkeypatch, tmp_path: Path
) -> None:
    started = []
    real = subprocess.Popen

    def popen(*args, **kwargs):
        started.append(real(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    harmless = LLAMA | {
        "auto_map": {"AutoModelForCausalLM": "evil--modeling.Evil"},
        "quantization_config": {"quant_method": "fp8"},
        "_attn_implementation": "evil/kernel",
        "torch_dtype": "evil",
        "max_position_embeddings": 10**10,
    }
    rows = written(tmp_path, {"": (harmless, "")} | BUILT)
    files = [path for path, _ in rows]
    with Builder(seconds=2) as builder:
        first, *found = hub.read_many(files, False, builder)
    assert first.total == int(COUNTS["llama-3.2-1b"]["total"])
    assert first.assumed[-1].startswith(
        "quantization_config (fp8) is not read: weights are counted"
    )
    for (path, words), one in zip(rows[1:], found, strict=True):
        assert isinstance(one, ValueError), (path, one)
        one_line(one, path, words)
    assert len(started) == 1 and all(process.poll() is not None for process in started)


def test_too_little_memory_is_one_line(tmp_path: Path) -> None:
    ((path, words),) = written(tmp_path, {"": (LLAMA, "in 0.25 GiB")})
    with Builder(memory=2**28) as builder:
        (error,) = hub.read_many([path], False, builder)
    one_line(error, path, words)


def test_without_any_plug_in_a_number_is_wrong(apart) -> None:
    rows = dict(apart[-1])
    h, a, d, experts, chosen, wide = 64, 4, 32, 8, 2, 48  # of SMALL
    products = 2 * (h * d * (a + 4) + a * d * h + experts * h + chosen * 3 * h * wide)
    kept = 4 * h + (2 * a + 4) * d + chosen * (h + 3 * wide)
    single = (
        a + 2 + experts + 2 * chosen + 1
    )  # sums, norms; scores, the chosen's, their sum, shares
    assert rows.pop("all") == [products, 100, kept, single]
    assert rows["masks"] == [products, None, kept, single]  # no window is seen
    assert rows["attention"][0] > products  # all scores, without the causal half
    assert rows["experts"][2] > kept  # gathered weights
    assert rows["norms"][3] > single + h  # copies of inputs in float32
    assert rows["rotations"][2] > kept


def test_a_file_is_counted_by_the_command(capsys, monkeypatch, builder) -> None:
    monkeypatch.setattr(core, "Builder", lambda: nullcontext(builder))
    path = str(CONFIGS / "olmoe-1b-7b.json")
    assert main(["memory", "--config", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    row = COUNTS["olmoe-1b-7b"]
    assert found["count"] == {
        "total": int(row["total"]), "active": int(row["active"]), "model_type": "olmoe",
    }  # fmt: skip
    assert found["parameters"] == 2 * int(row["total"])
    assert main(["memory", "--config", path, "--tp", "2", "--ep", "4", "--dp", "4"]) == 0
    out = capsys.readouterr().out
    assert "olmoe (olmoe-1b-7b.json) of 6.919 billion parameters (1.282 of them active)" in out
    for words in (["--model", "gpt-2"], ["--device", "cpu"]):
        assert main(["memory", "--config", path, *words]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
