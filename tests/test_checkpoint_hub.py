"""Weights of real models: folders of the hub, read and written, and handed to another layout."""

import errno
import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from devices import to_device
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shardlab import ranks
from shardlab.checkpoint import (
    CheckpointError,
    hub_names,
    load_hub,
    predict_transfer_bytes,
    read_config,
    save_hub,
    transfer_weights,
)
from shardlab.checkpoint import hub as hub_files
from shardlab.checkpoint.resharding import list_pieces
from shardlab.gpt.model import GPT, PRESETS, Config
from shardlab.layout import Layout
from shardlab.measure import count
from shardlab.mesh import Parallel, create_groups, predict_pieces
from shardlab.tensor_parallel import parallelize

SMALL = {"layers": 2, "heads": 4, "hidden": 32, "ffn": 48, "vocab": 64, "seq": 32}
SHAPES = {
    "llama": replace(PRESETS["llama-3-8b"], **SMALL, kv_heads=2),
    "mixtral": replace(PRESETS["mixtral-8x7b"], **SMALL, kv_heads=2, experts=4),
    "qwen3": replace(PRESETS["llama-3-8b"], **SMALL, kv_heads=2, head=12, qk_norm=True, tied=True),
    "qwen3_moe": replace(
        PRESETS["qwen3-30b-a3b"], **SMALL, kv_heads=2, head=12, experts=4, experts_per_token=2,
        expert_ffn=24,
    ),
    "deepseek_v3": replace(
        PRESETS["deepseek-v3"], **SMALL, head=8, latent=16, query_latent=24, rotary=4, value=6,
        experts=4, experts_per_token=2, expert_ffn=24, dense_layers=1, expert_groups=2,
        groups_per_token=1,
    ),
    "gpt2": replace(PRESETS["gpt-2"], **SMALL),
}  # fmt: skip
MESH = Layout(tp=2, pp=2, microbatches=2)  # ZeRO: `streams`, and the lesson
TOKENS = torch.arange(24).view(2, 12) % 64  # BS


def of_transformers(config, kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    about = AutoConfig.for_model(**hub_names.build_config_json(config, kind))
    return AutoModelForCausalLM.from_config(about)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Return folders written by transformers, by kind, in files of 30 kB."""
    folder = tmp_path_factory.mktemp("hub")
    torch.manual_seed(0)
    for kind, config in SHAPES.items():
        model = of_transformers(config, kind)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor.numel() > 6:  # not the angles of positions
                torch.nn.init.normal_(tensor, std=0.1)  # biases are not zeros, norms not ones
        model.save_pretrained(folder / kind, max_shard_size="30KB")
    with_head(folder / "qwen3")
    return folder


def with_head(folder, change=0):
    """Add the output layer of a tied model in a file of its own, like Qwen3-1.7B's folder."""
    index = json.loads((folder / hub_files.INDEX_FILE).read_text())
    head = read_tensors(folder)["model.embed_tokens.weight"] + change
    save_file({"lm_head.weight": head}, folder / "model-head.safetensors")
    index["weight_map"]["lm_head.weight"] = "model-head.safetensors"
    (folder / hub_files.INDEX_FILE).write_text(json.dumps(index))


def read_tensors(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
    return found


def read_once(folder):
    """Return the tensors, those of tied layers once, as transformers and the course write them."""
    found = read_tensors(folder)
    if json.loads((folder / "config.json").read_text())["tie_word_embeddings"]:
        found.pop("lm_head.weight", None)
    return found


def are_equal(a, b):
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )


def compute_logits(folder):
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(TOKENS).logits


# Reading and writing.


def there_and_back(hub, out, layout):
    """Load each kind into a mesh, and save it again."""
    group, left = dist.group.WORLD, {}
    for kind, config in SHAPES.items():
        with torch.device("meta"):
            model = GPT(config)
        model = Parallel(model, create_groups(layout, group), layout)
        left[kind] = load_hub(model, hub / kind, group)
        save_hub(model, out / kind, group, template=hub / kind, shard_bytes=20_000)
    return left


def test_what_transformers_wrote_goes_into_a_mesh_and_comes_back_bit_for_bit(hub, tmp_path):
    found = ranks.run(there_and_back, 4, hub, tmp_path, MESH, timeout=120)
    for kind in SHAPES:
        assert are_equal(read_once(hub / kind), read_tensors(tmp_path / kind))
        assert torch.equal(compute_logits(hub / kind), compute_logits(tmp_path / kind))
        written = sorted(path.name for path in (tmp_path / kind).iterdir())
        assert len(written) > 4
        assert {hub_files.INDEX_FILE, "generation_config.json"} <= set(written)
        beside = ("transformer.wpe.weight",) if kind == "gpt2" else ()
        assert all(left[kind] == beside for left in found)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(SHAPES)  # nothing half saved


@pytest.mark.parametrize("kind", SHAPES)
def test_the_course_s_gpt_computes_what_transformers_does_from_the_same_folder(hub, kind):
    model = GPT(read_config(hub / kind))
    found, want = (hub_names.build_config_json(c, kind) for c in (model.config, SHAPES[kind]))
    assert found == want
    load_hub(model, hub / kind)
    with torch.no_grad():
        apart = (model(TOKENS) - (want := compute_logits(hub / kind))).abs().max().item()
    # Paths of 13 * 48 terms in two orders. GPT-2's positions and GELU make it another model.
    near = 2 * (13 * 48) ** 0.5 * 2**-24 * want.abs().max().item()
    assert apart > 1e-3 if kind == "gpt2" else apart < near


def in_shards(hub, out):
    """Load GPTs sharded by FSDP2 over a number of ranks that divides nothing."""
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    for kind in ("llama", "gpt2"):
        model = GPT(read_config(hub / kind))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        load_hub(model, hub / kind)  # without a group: all ranks
        save_hub(model, out / kind, template=hub / kind)


def test_models_in_shards_of_fsdp2_go_out_under_the_hub_s_names(hub, tmp_path):
    ranks.run(in_shards, 3, hub, tmp_path, device="cpu", timeout=120)
    for kind in ("llama", "gpt2"):
        assert are_equal(read_once(hub / kind), read_tensors(tmp_path / kind))


def test_two_layers_that_differ_are_not_tied(hub, tmp_path):
    shutil.copytree(hub / "qwen3", folder := tmp_path / "qwen3")
    with_head(folder, change=1)
    with pytest.raises(CheckpointError, match="lm_head.weight is not equal to .*embed_tokens"):
        load_hub(GPT(SHAPES["qwen3"]), folder)
    load_hub(untied := GPT(replace(SHAPES["qwen3"], tied=False)), folder)
    assert torch.equal(untied.head.weight, untied.embedding.weight + 1)


def measure_peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def load_and_save_on_rank(folder, config):
    """Return the bytes of loading and saving beyond the model: tensors at the peak, all memory."""
    torch.set_num_threads(1)
    group, found = dist.group.WORLD, []
    layout = Layout(dp=2, tp=2, zero=3)
    model = Parallel(GPT(config), create_groups(layout, group), layout)
    load_hub(model, folder / "big", group)  # and all modules of the first call
    for act in (
        lambda: load_hub(model, folder / "big", group),
        lambda: save_hub(
            model, folder / "out", group, template=folder / "big", shard_bytes=4_000_000
        ),
    ):
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current memory
        before = measure_peak()
        with count.track_memory(*(piece.tensor for piece in list_pieces(model))) as held:
            start = held.current_bytes
            act()
        found.append((held.peak_bytes - start, measure_peak() - before))
    return found


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux keeps the peak")
def test_no_rank_ever_has_the_whole_in_its_memory(tmp_path):
    config = Config(vocab=1024, layers=12, hidden=384, heads=4, seq=8, mlp="swiglu", norm="rms",
                    bias=False, tied=False)  # fmt: skip
    model = of_transformers(config, "llama")
    model.save_pretrained(tmp_path / "big", max_shard_size="4MB")
    size, most = (of(p.nbytes for p in model.parameters()) for of in (sum, max))
    # What rank 0 tells: gloo may still hold each rank's own message and the four that it received.
    told = 5 * len(pickle.dumps((hub_files._match_tensors(tmp_path / "big", config), None)))
    for rank in ranks.run(load_and_save_on_rank, 4, tmp_path, config, device="cpu", timeout=120):
        (load, load_all), (save, save_all) = rank
        # A tensor, of which a slice is read; a file, and the memory for its next tensor.
        assert load <= most + told and save <= 4_000_000 + most + told, (load, save, told)
        assert load_all < size / 4 and save_all < size / 4, (size, load_all, save_all)
    assert are_equal(read_tensors(tmp_path / "big"), read_tensors(tmp_path / "out"))


# Folders that do not match.


def cut_off(folder):
    path = sorted(folder.glob("model-*"))[1]
    os.truncate(path, path.stat().st_size - 4)
    return path.name


def without_index(folder):
    (folder / hub_files.INDEX_FILE).unlink()
    return hub_files.INDEX_FILE


def make_damage(change):
    """Write a folder whose tensors have passed through `change`, in one file."""

    def damage(folder):
        found = read_tensors(folder)
        said = change(found)
        for path in folder.glob("model*"):
            path.unlink()
        save_file(found, folder / hub_files.SINGLE_FILE)
        return said

    return damage


def other_name(found):
    found["model.layers.0.mlp.upward.weight"] = found.pop(
        name := "model.layers.0.mlp.up_proj.weight"
    )
    return name


def other_shape(found):
    found[name := "model.norm.weight"] = torch.zeros(31)
    return name


DAMAGES = {of.__name__: of for of in (cut_off, without_index)} | {
    of.__name__: make_damage(of) for of in (other_name, other_shape)
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_does_not_fit_is_refused_in_one_line_and_the_model_stays(
    hub, tmp_path, damage
):
    shutil.copytree(hub / "llama", folder := tmp_path / "llama")
    said = DAMAGES[damage](folder)
    model = GPT(SHAPES["llama"])
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(CheckpointError) as caught:
        load_hub(model, folder)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert are_equal(before, dict(model.named_parameters()))


def test_what_is_no_model_no_folder_or_of_another_kind_is_refused(hub, tmp_path):
    model, llama = GPT(SHAPES["llama"]), hub / "llama"
    for call, match in (
        (lambda: load_hub(torch.nn.Linear(2, 2), llama), "model=Linear: must be a GPT"),
        (lambda: load_hub(model, hub / "gpt2"), "models have no blocks.0.ffn.gate.weight"),
        (lambda: save_hub(model, llama, template=llama), "must be a new folder, but exists"),
        (lambda: read_config(tmp_path), "config.json"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    about = json.loads((hub / "llama/config.json").read_text())
    for key, value in (("rope_scaling", {"type": "dynamic", "factor": 2}), ("model_type", "mamba")):
        (tmp_path / "config.json").write_text(json.dumps(about | {key: value}))
        with pytest.raises(ValueError, match="dynamic|mamba"):
            read_config(tmp_path)


def full_disk(hub, out):
    """Save while the disk of rank 1 is full."""
    group, layout = dist.group.WORLD, Layout(tp=2)
    model = Parallel(GPT(SHAPES["llama"]), create_groups(layout, group), layout)
    told = []
    damaged = out / "damaged"
    for act in (
        lambda: load_hub(model, damaged, group),
        lambda: save_hub(model, out / "new", group, template=hub / "llama", shard_bytes=20_000),
    ):
        try:
            act()
        except CheckpointError as error:
            told.append(str(error))
        if dist.get_rank() == 1:

            def no_room(*_):
                raise OSError(errno.ENOSPC, "No space left on device")

            hub_files.save_file = no_room
    return told


def test_what_fails_on_one_rank_fails_on_all_alike_and_nothing_is_left(hub, tmp_path):
    shutil.copytree(hub / "llama", tmp_path / "damaged")
    said = cut_off(tmp_path / "damaged")
    first, second = ranks.run(full_disk, 2, hub, tmp_path, device="cpu")
    assert first == second and said in first[0]
    assert "not saved: rank 1" in first[1] and "No space left" in first[1]
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


# To another layout.

LAYOUTS = (
    Layout(tp=4),
    Layout(dp=2, tp=2),
    Layout(dp=2, pp=2, zero=1, microbatches=2),
    Layout(dp=4, zero=3),
    Layout(pp=4, microbatches=4),
    Layout(tp=2, pp=2, microbatches=2, order=("tp", "pp")),
    Layout(dp=2, tp=2, zero=2),
)
FOUR = {
    "tied": replace(PRESETS["nano"], heads=4, layers=4),
    "experts": replace(SHAPES["mixtral"], layers=4, kv_heads=2),  # fewer than tensor ranks
}


def handed_over(config, old, new):
    """Return the bytes sent, counted and predicted; check the target's weights."""
    group, rank = dist.group.WORLD, dist.get_rank()
    models = []
    for seed, layout in enumerate((old, new)):
        torch.manual_seed(seed)
        models.append(Parallel(to_device(GPT(config)), create_groups(layout, group), layout))
    parts = [[predict_pieces(config, of, r) for r in range(4)] for of in (old, new)]
    for model, each in zip(models, parts, strict=True):
        assert sorted((piece.name, piece.box) for piece in list_pieces(model)) == sorted(each[rank])
    with count.record_traffic() as sent:
        transfer_weights(*models, group)
    source, target = (model.full_state_dict() for model in models)
    assert are_equal(source, target)
    return sent.bytes, predict_transfer_bytes(*parts)[rank]


def all_handed_over(whole_table):
    pairs = list(zip(LAYOUTS, LAYOUTS[1:] + LAYOUTS[:1], strict=True))
    rows = [(config, *pair) for config in FOUR.values() for pair in pairs]
    return [handed_over(*row) for row in (rows if whole_table else rows[:4] + rows[11:])]


def trainer_and_generator():
    """Hand weights from ranks 0 to 3 (tp 4) to ranks 4 and 5 (tp 2, bfloat16)."""
    group, rank, config = dist.group.WORLD, dist.get_rank(), FOUR["tied"]
    torch.manual_seed(rank > 3)
    model = to_device(GPT(config))
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    two = dist.new_group([4, 5]), dist.new_group([0, 1, 2, 3])
    model = parallelize(model if rank < 4 else model.bfloat16(), two[rank < 4])
    with count.record_traffic() as sent:
        transfer_weights(model if rank < 4 else None, model if rank > 3 else None, group)
    with pytest.raises(ValueError, match="the source lacks parts of embedding.weight"):
        transfer_weights(model if rank in (0, 4) else None, model if rank > 3 else None, group)
    return sent.bytes, {n: p.detach().cpu() for n, p in model.named_parameters()}, plain


def test_weights_pass_to_any_layout_and_bytes_are_those_predicted(request):
    found = ranks.run(all_handed_over, 4, request.config.getoption("--weekly"), timeout=120)
    for each in zip(*found, strict=True):
        assert all(counted == predicted for counted, predicted in each)
        assert sum(counted for counted, _ in each)


def test_a_generator_on_other_ranks_gets_a_trainer_s_weights_in_its_own_dtype():
    found = ranks.run(trainer_and_generator, 6, device="cpu", timeout=120)
    config, plain = FOUR["tied"], found[0][2]
    for place, (_, own, _) in enumerate(found[4:]):
        for entry in hub_names.list_params(config)[:-1]:
            want = plain[entry.name].bfloat16()
            want = want if entry.tp_dim is None else want.chunk(2, entry.tp_dim)[place]
            assert torch.equal(own[entry.name], want)
    old = [predict_pieces(config, Layout(tp=4), rank) for rank in range(4)]
    new = [predict_pieces(config, Layout(tp=2), rank) for rank in range(2)]
    sent = predict_transfer_bytes([*old, [], []], [[], [], [], [], *new], itemsize=2)
    assert [counted for counted, *_ in found] == sent and sum(sent) > 0
