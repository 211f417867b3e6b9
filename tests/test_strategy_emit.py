"""Layouts as configurations: DeepSpeed runs its own; the others use published names."""

import ast
import copy
import json
import os
import re
import subprocess
import time
from dataclasses import replace
from importlib.util import find_spec
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardlab import deepspeed_engine as de
from shardlab import ranks
from shardlab.common.machines import MACHINES
from shardlab.common.shapes import PRESETS
from shardlab.deepspeed_engine import setup
from shardlab.deepspeed_engine.core import COURSE_TP_PLAN
from shardlab.deepspeed_engine.pipeline import list_layers
from shardlab.gpt.model import GPT, loss
from shardlab.layout import Layout
from shardlab.train import take_home
from shardtools.cluster import slurm
from shardtools.strategy.emit import course, deepspeed, emit
from shardtools.strategy.emit.slurm import FILE_NAME

HERE = Path(__file__).parent
MEGATRON = json.loads((HERE / "strategy_emit_megatron.json").read_text())
TORCHTITAN = json.loads((HERE / "strategy_emit_torchtitan.json").read_text())

NANO = replace(PRESETS["nano"], seq=16)
QWEN = replace(
    PRESETS["qwen3-30b-a3b"], layers=36, hidden=4096, kv_heads=8, ffn=12_288, experts=0,
    expert_ffn=None,
)  # fmt: skip
LLAMA, GPT3, BIG = (PRESETS[name] for name in ("llama-3-8b", "gpt-3-175b", "llama-3-405b"))
MIXTRAL = PRESETS["mixtral-8x7b"]
H100, V100 = MACHINES["h100"], MACHINES["v100"]
ALONG = {"tp": 2, "sequence_parallel": True}
STEPS = 4

# In bf16 26 products in a row move a token's loss by sqrt(26) 2^-8 of logits of up to 0.5, which is
# 1e-2; the mean of 64 tokens and more, of two programs, by 2 / sqrt(64) of that.
ROUNDED = 2.5e-3


def draw_windows(micro, share, size, seq):
    """Return tokens and targets, [size, seq], the same in each step, as the scripts draw them."""
    draw = torch.Generator().manual_seed(10**3 * micro + share)
    tokens = torch.randint(0, NANO.vocab, (size, seq + 1), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def one_process(layout):
    """Return the losses of the same steps without an engine: bf16 weights with float32 masters.

    DeepSpeed's stage 0 begins with a step whose gradients are zero.
    """
    torch.manual_seed(0)
    used = GPT(NANO).to(torch.bfloat16)
    master = copy.deepcopy(used).float()
    optimizer = torch.optim.AdamW(master.parameters(), lr=3e-4, foreach=False)
    pairs = list(zip(used.parameters(), master.parameters(), strict=True))
    if layout.zero == 0:
        for _, kept in pairs:
            kept.grad = torch.zeros_like(kept)
        optimizer.step()
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for share in range(layout.dp):
            for micro in range(layout.microbatches):
                tokens, targets = draw_windows(micro, share, layout.micro_batch, NANO.seq)
                value = loss(used(tokens), targets) / (layout.dp * layout.microbatches)
                value.backward()
                total += value.item()
                for weight, kept in pairs:  # micro-batches are accumulated in float32
                    kept.grad = weight.grad.float() + (0 if kept.grad is None else kept.grad)
                    weight.grad = None
        torch.nn.utils.clip_grad_norm_(master.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for weight, kept in pairs:
                weight.copy_(kept)
        found.append(total)
    return found


def train_references():
    """Return `one_process` of each layout, on a rank, with as many threads as the engines have."""
    return [one_process(layout) for layout in DEEPSPEED.values()]


# --------------------------------------------------------------------------------------- course

COURSE = {
    "copies": Layout(dp=2, micro_batch=2, microbatches=2),
    "ZeRO-1": Layout(dp=2, zero=1, micro_batch=2, microbatches=2),
    "ZeRO-2": Layout(dp=2, zero=2, micro_batch=2, microbatches=2),
    "ZeRO-3": Layout(dp=2, zero=3, micro_batch=2, microbatches=2),
    "tensor": Layout(tp=2, zero=1, micro_batch=4, microbatches=2),
}


def test_the_course_s_options_say_the_layout():
    """tests/test_train.py checks that each of these layouts trains as one process does."""
    for name, layout in COURSE.items():
        text = re.sub("#.*", "", emit("course", NANO, H100, layout))
        given = take_home.parse_options(re.search(r"(?s)options=\((.*?)\n\)", text)[1].split())
        assert given.strategy == course.STRATEGIES[layout.zero], name
        assert (given.tensor, given.micro, given.batch) == (layout.tp, layout.micro_batch, 8), name
        shape = given.layers, given.hidden, given.heads, given.seq
        assert shape == (NANO.layers, NANO.hidden, NANO.heads, NANO.seq), name


def test_a_gpu_without_bf16_gets_fp16():
    layout = Layout(dp=2, zero=2, microbatches=2)
    assert "--precision fp16" in emit("course", NANO, V100, layout)
    assert '"fp16"' in emit("deepspeed", NANO, V100, layout)
    assert "--fp16" in emit("megatron", NANO, V100, layout)


# ------------------------------------------------------------------------------------- deepspeed

DEEPSPEED = {
    "stage 0": Layout(dp=2, micro_batch=2),
    "stage 1": Layout(dp=2, zero=1, micro_batch=2, microbatches=2),
    "stage 2": Layout(dp=2, zero=2, micro_batch=2, offload="optimizer"),
    "stage 3": Layout(dp=2, zero=3, micro_batch=2, offload="parameters", recompute="full"),
    "pipeline": Layout(pp=2, zero=1, micro_batch=2, microbatches=2, recompute="full"),
    "tensor": Layout(tp=2, zero=1, micro_batch=2, microbatches=2),
}


def engine_of(layout, path):
    import hjson  # installed with DeepSpeed

    ds = setup.import_deepspeed()
    de.check_config(hjson.loads(path.read_text()), optimizer=True)  # DeepSpeed knows each name
    torch.manual_seed(0)
    module = GPT(NANO)
    if layout.recompute == "full" and layout.pp == 1:
        de.enable_recompute(module)
    with setup.suppress_output():
        if layout.pp > 1:
            from deepspeed.pipe import PipelineModule

            ds.init_distributed()
            sequence, _ = list_layers(module)
            kind = {"partition_method": "type:Block", "loss_fn": loss}
            module = PipelineModule(sequence, num_stages=layout.pp, **kind)
            held = [type(layer).__name__ for layer in module.forward_funcs]
            assert held.count("Block") == NANO.layers // layout.pp
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, foreach=False)
        engine, *_ = ds.initialize(model=module, optimizer=optimizer, config=str(path))
    return engine


def train_with_deepspeed(folder):
    found = []
    for name, layout in DEEPSPEED.items():
        engine = engine_of(layout, folder / f"{name}.json")
        share = dist.get_rank() if layout.dp > 1 else 0
        size = layout.micro_batch
        micros = range(layout.microbatches)
        batch = [draw_windows(micro, share, size, NANO.seq) for micro in micros]
        found.append([de.step(engine, batch) for _ in range(STEPS)])
    return found


@pytest.mark.skipif(not find_spec("deepspeed"), reason="needs DeepSpeed")
def test_deepspeed_reads_the_file_and_trains_as_one_process_does(tmp_path):
    for name, layout in DEEPSPEED.items():
        (tmp_path / f"{name}.json").write_text(emit("deepspeed", NANO, H100, layout))
    results = ranks.run(train_with_deepspeed, 2, tmp_path, device="cpu", timeout=400)
    wanted = ranks.run(train_references, 1, device="cpu", timeout=240)[0]
    for name, mine, plain in zip(DEEPSPEED, results[0], wanted, strict=True):
        assert mine == pytest.approx(plain, abs=ROUNDED), name
        assert plain[-1] < plain[0] - 50 * ROUNDED, "nothing was learned"


@pytest.mark.skipif(not find_spec("deepspeed"), reason="needs DeepSpeed")
def test_deepspeed_s_comments_are_all_that_is_not_json():
    import hjson

    for layout in DEEPSPEED.values():
        text = emit("deepspeed", LLAMA, H100, layout)
        lines = [line for line in text.splitlines() if not line.strip().startswith("//")]
        settings = json.loads("\n".join(lines))
        assert settings == hjson.loads(text)
        assert text.count("//") >= len(settings)
    assert deepspeed.TENSOR_PLAN == COURSE_TP_PLAN


# ---------------------------------------------------------------------- torchtitan and megatron

TITANS = {
    "copies": (LLAMA, Layout(dp=8, microbatches=2)),
    "host": (LLAMA, Layout(dp=8, zero=3, offload="parameters", recompute="selective")),
    "groups": (PRESETS["llama-3-70b"], Layout(dp=32, zero=2, replicas=2, **ALONG)),
    "stages": (LLAMA, Layout(dp=2, tp=2, pp=4, zero=1, microbatches=8, stages=(7, 9, 9, 7))),
    "parts": (LLAMA, Layout(pp=4, chunks=2, schedule="interleaved", microbatches=8)),
    "v": (LLAMA, Layout(pp=4, chunks=2, schedule="zb-v", micro_batch=2, microbatches=8)),
    "tokens": (LLAMA, Layout(dp=4, cp=2, zero=3, recompute="full")),
    "normed heads": (QWEN, Layout(dp=8, zero=3)),
}


def parse_assignments(text):
    """Return field -> value of `config.<field> = <value>`; None if it is no constant."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("config."):
            value = node.value.value if isinstance(node.value, ast.Constant) else None
            found[ast.unparse(node.targets[0]).removeprefix("config.")] = value
    return found


@pytest.mark.parametrize("name", TITANS)
def test_torchtitan_has_every_field_and_every_name(name):
    config, layout = TITANS[name]
    text = emit("torchtitan", config, H100, layout)
    fields = TORCHTITAN["fields"]
    values = parse_assignments(text)
    for field, value in values.items():
        assert field in fields, field
        if isinstance(value, bool):
            assert fields[field] == "bool"
        elif isinstance(value, int):
            assert fields[field] == "int", field
        elif isinstance(value, str):
            assert fields[field] == "str" or repr(value) in fields[field], (field, value)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("torchtitan"):
            assert {alias.name for alias in node.names} <= set(TORCHTITAN["names"][node.module])
    degrees = [
        values.get(f"parallelism.{kind}_parallel{which}_degree", 1)
        for kind, which in [("data", "_replicate"), ("data", "_shard"), ("tensor", "")]
        + [("pipeline", ""), ("context", "")]
    ]
    assert prod(degrees) == layout.world_size
    assert values["training.global_batch_size"] == layout.global_batch


def test_torchtitan_s_parts_hold_each_layer_once_and_its_shapes_have_names():
    for name, parts in (("stages", (7, 9, 9, 7)), ("parts", (4,) * 8), ("v", (4,) * 8)):
        text = emit("torchtitan", TITANS[name][0], H100, TITANS[name][1])
        assert f"for layers in {parts}:" in text
    for flavor in ("8B", "70B", "405B"):
        text = emit("torchtitan", PRESETS[f"llama-3-{flavor.lower()}"], H100, Layout(dp=8, zero=3))
        assert (f'model_registry("{flavor}")' in text) is (flavor != "8B")


MEGATRONS = {
    "copies": (LLAMA, Layout(dp=8)),
    "optimizer": (LLAMA, Layout(dp=16, zero=1, replicas=2, recompute="selective")),
    "host": (LLAMA, Layout(dp=8, zero=1, offload="optimizer")),
    "ZeRO-2": (LLAMA, Layout(dp=8, zero=2)),
    "ZeRO-3": (LLAMA, Layout(dp=8, zero=3, microbatches=2)),
    "GPT-3": (GPT3, Layout(dp=2, tp=8, pp=8, microbatches=16, recompute="full")),
    "parts": (LLAMA, Layout(pp=4, chunks=2, schedule="interleaved", microbatches=8, **ALONG)),
    "stages": (BIG, Layout(pp=16, zero=1, dp=8, microbatches=16, stages="megatron")),
    "tokens": (LLAMA, Layout(dp=2, cp=2, zero=1, **ALONG)),
    "experts": (MIXTRAL, Layout(dp=16, pp=4, ep=8, zero=1, microbatches=8)),
    "wide heads": (PRESETS["qwen3-30b-a3b"], Layout(dp=8, ep=8, zero=1)),
}


def run_script(text, tmp_path):
    """Return torchrun's own arguments, and pretrain_gpt.py's as name -> values."""
    fake = tmp_path / "torchrun"
    fake.write_text('#!/bin/bash\nprintf "%s\\n" "cuda=${CUDA_DEVICE_MAX_CONNECTIONS-}" "$@"\n')
    fake.chmod(0o755)
    (tmp_path / "job.sh").write_text(text)
    said = subprocess.run(
        ["bash", "job.sh", "--seed", "7"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOST": "node1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    where = said.index("pretrain_gpt.py")
    found = {}
    for word in said[where + 1 :]:
        if word.startswith("--"):
            found[word] = []
        else:
            found[list(found)[-1]].append(word)
    return said[:where], found


@pytest.mark.parametrize("name", MEGATRONS)
def test_megatron_has_every_argument_and_takes_its_value(name, tmp_path):
    config, layout = MEGATRONS[name]
    launch, given = run_script(emit("megatron", config, H100, layout), tmp_path)
    known = MEGATRON["arguments"]
    for argument, values in given.items():
        kind = known[argument]
        if kind == "flag":
            assert values == [], argument
        elif kind == "list":
            assert values, argument
        elif isinstance(kind, list):
            assert values[0] in kind and len(values) == 1, argument
        else:
            {"int": int, "float": float, "str": str}[kind](*values)

    def get_degree(argument):
        return int(given.get(argument, ["1"])[0])

    cut = ["tensor-model", "pipeline-model", "context", "expert-model"]
    degrees = [get_degree(f"--{kind}-parallel-size") for kind in cut]
    assert degrees == [layout.tp, layout.pp, layout.cp, layout.ep]
    assert ("--num-experts" in given) is (config.experts > 0)
    assert ("--qk-layernorm" in given) is config.qk_norm
    assert get_degree("--global-batch-size") == layout.global_batch
    assert given["--seed"] == ["7"]
    nodes = int((re.findall(r"--nnodes=(\d+)", "\n".join(launch)) or ["1"])[0])
    each = int(re.findall(r"--nproc-per-node=(\d+)", "\n".join(launch))[0])
    assert nodes * each == layout.world_size
    # Before Blackwell validate_args rejects a run without it, and Megatron-FSDP one with it.
    serial = layout.zero < 2 and (layout.tp > 1 or layout.cp > 1)
    assert launch[0] == f"cuda={1 if serial else ''}"


def test_megatron_s_stages_hold_each_layer_once(tmp_path):
    given = run_script(emit("megatron", BIG, H100, MEGATRONS["stages"][1]), tmp_path)[1]
    text = given["--pipeline-model-parallel-layout"][0]
    assert text == "Et*7|(t*8|)*14t*7L"  # 405B's own: arXiv 2407.21783, section 3.3.2
    uneven = Layout(pp=4, microbatches=4, stages=(7, 9, 9, 7))
    given = run_script(emit("megatron", LLAMA, H100, uneven), tmp_path)[1]
    assert given["--pipeline-model-parallel-layout"] == ["Et*7|(t*9|)*2t*7L"]


# ----------------------------------------------------------------------------------------- slurm


def test_slurm_s_file_is_bash_and_asks_for_the_plan_s_gpus(tmp_path):
    for layout, nodes, each in ((Layout(dp=32), 4, 8), (Layout(dp=2), 1, 2)):
        text = emit("slurm", LLAMA, H100, layout)
        (tmp_path / "job").write_text(text)
        subprocess.run(["bash", "-n", tmp_path / "job"], check=True)
        options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", text, re.M))
        assert (options["nodes"], options["gpus-per-node"]) == (str(nodes), str(each))
        assert ("exclusive" in options) == (each == H100.gpus_per_node)


@pytest.mark.skipif(bool(slurm.find_missing()), reason=f"Slurm is not installed: {slurm.INSTALL}")
@pytest.mark.alone
def test_slurm_starts_every_rank_of_the_plan(tmp_path):
    pair = replace(H100, gpus_per_node=2)
    (tmp_path / FILE_NAME).write_text(emit("slurm", NANO, pair, Layout(dp=4)))
    (tmp_path / "stub.py").write_text(
        "import os, sys\n"
        "names = 'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'SLURM_NODEID'\n"
        "sys.stdout.write(' '.join(os.environ[name] for name in names) + '\\n')\n"
    )
    with slurm.run_cluster(tmp_path / "box", cpus=8) as box:
        how = {"cwd": tmp_path, "env": box.environment}
        submit = ["sbatch", "--parsable", "--time=1", FILE_NAME, "stub.py"]
        job = box.run(submit, **how).stdout.strip()
        end = time.monotonic() + 90
        while (state := state_of(box, job)) not in ("COMPLETED", "FAILED", "CANCELLED"):
            assert time.monotonic() < end, state
            time.sleep(0.2)
        errors = (tmp_path / f"train-{job}.err").read_text()
    assert state == "COMPLETED", errors
    said = sorted((tmp_path / f"train-{job}.out").read_text().splitlines())
    nodes = [line[-1] for line in said]  # the first at the rendezvous has ranks 0, 1
    assert [line[:-2] for line in said] == ["0 0 4", "1 1 4", "2 0 4", "3 1 4"]
    assert nodes in (["0", "0", "1", "1"], ["1", "1", "0", "0"])


def state_of(box, job):
    said = box.run(["scontrol", "--oneliner", "show", "job", job]).stdout
    return re.search(r"JobState=(\w+)", said)[1]


# -------------------------------------------------------------------------------------- refusals

# A feature that each engine lacks, or has in another form, and the argument that is named.
WRONG = [
    ("nemo", LLAMA, {}, "engine='nemo'"),
    ("slurm", LLAMA, {"dp": 12}, "ranks=12"),
    ("megatron", LLAMA, {"dp": 2, "ep": 2}, "ep=2"),
    ("megatron", LLAMA, {"pp": 5}, "pp=5"),
    ("megatron", LLAMA, {"pp": 2, "dp": 2, "zero": 3}, "zero=3"),
    ("megatron", LLAMA, {"pp": 2, "schedule": "gpipe"}, "schedule='gpipe'"),
    ("deepspeed", LLAMA, {"cp": 2}, "cp=2"),
    ("deepspeed", LLAMA, {"dp": 2, "pp": 2, "zero": 2}, "zero=2"),
    ("deepspeed", LLAMA, {"pp": 2, "stages": (15, 17)}, "stages=(15, 17)"),
    ("course", MIXTRAL, {}, "experts=8"),
    ("course", LLAMA, {"pp": 2}, "pp=2"),
    ("torchtitan", GPT3, {}, "mlp='gelu'"),
    ("torchtitan", replace(QWEN, layers=35), {}, "layers=35"),
    ("torchtitan", PRESETS["llama-3.2-1b"], {"pp": 2, "zero": 1}, "tied=True"),
    ("megatron", PRESETS["deepseek-v3"], {}, "latent=512"),
    ("torchtitan", LLAMA, {"pp": 2, "schedule": "zb-h1"}, "schedule='zb-h1'"),
    ("torchtitan", LLAMA, {"dp": 2, "offload": "optimizer"}, "offload='optimizer'"),
]


@pytest.mark.parametrize(("engine", "config", "layout", "named"), WRONG)
def test_unsupported_layouts_are_refused_with_the_field(engine, config, layout, named):
    with pytest.raises(ValueError) as caught:
        emit(engine, config, H100, Layout(**layout))
    assert named in str(caught.value)


def test_seq_is_passed_to_each_engine():
    assert "--seq-length 4096 " in emit("megatron", LLAMA, H100, Layout(dp=8), seq=4096)
    assert "--seq 4096 " in emit("course", LLAMA, H100, Layout(dp=8), seq=4096)
    assert "training.seq_len = 4096" in emit("torchtitan", LLAMA, H100, Layout(dp=8), seq=4096)
