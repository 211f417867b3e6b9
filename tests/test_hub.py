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
from pathlib import Path

import pytest

from shardlab import hub
from shardlab.hub.ask import Builder
from shardlab.layout.structure import Structure

CONFIGS = Path(__file__).parent / "configs"
COUNTS = {row["name"]: row for row in csv.DictReader((CONFIGS / "counts.csv").open())}
REFUSED = {"nemotron-super-49b": "model_type='nemotron-nas': transformers"}


@pytest.fixture(scope="module")
def found() -> dict[str, Structure | ValueError]:
    """Each file of configs/, as it is read; one process for all."""
    files = sorted(CONFIGS.glob("*.json"))
    return {path.stem: one for path, one in zip(files, hub.read_many(files), strict=True)}


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
    "outside": [{"name": "embed.weight", "shape": [4, 2], "experts": 0, "tied": None}],
}  # fmt: skip


def test_counts_that_do_not_agree_are_refused(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Builder, "ask", lambda self, what: {**REPLY, "total": 9})
    (tmp_path / "config.json").write_text('{"model_type": "llama", "n": 1}')
    with pytest.raises(ValueError, match="have 8 parameters, its class 9"):
        hub.read(tmp_path / "config.json")


# All classes of transformers.

SOME = (
    "llama", "gpt2", "gemma2", "qwen3_next", "deepseek_v3", "granitemoehybrid", "llama4_text",
    "zamba2", "longcat_flash", "bert", "minimax", "gemma3", "falcon",
)  # fmt: skip
# Those whose own defaults make no model, and those that have one and are not understood.
NOT_COUNTED = {
    "deepseek_v2": "says how many experts a token goes through",  # its default is None
    "longcat_flash": "experts of several numbers",
    "zaya": "chooses among others than its 16 experts",
}


def test_every_class_is_counted_as_transformers_counts_it(request, tmp_path: Path) -> None:
    script = """
import json, pathlib, sys, torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES
counts = {}
for name in sys.argv[2:] or NAMES:
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
    whole = request.config.getoption("--whole")
    some = [] if whole else SOME
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), *some], stdout=subprocess.PIPE,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}, check=True,
    )  # fmt: skip
    counts = json.loads(done.stdout.splitlines()[-1])
    assert len(counts) == (189 if whole else len(SOME))
    files = {name: tmp_path / name / "config.json" for name in counts}
    files = {name: path for name, path in files.items() if path.exists()}
    differ = {}
    for name, one in zip(files, hub.read_many(files.values(), trace=False), strict=True):
        if isinstance(one, ValueError):
            assert "\n" not in str(one)
            assert counts[name] is None or NOT_COUNTED[name] in str(one), one
        elif one.total != counts[name] or not 0 < one.active <= one.total:
            differ[name] = one.total, counts[name]
    assert differ == {}
