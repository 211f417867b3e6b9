"""DeepSpeed's engine equals one process, one test per promise; the lab's breakdown adds up.

The lesson itself asserts that recomputation has to be requested, that DeepSpeed clips at 1, and
that a universal checkpoint fits any number of ranks.
"""

import copy
import itertools
import os
import stat
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from shardlab import deepspeed_engine as de
from shardlab import ranks
from shardlab.deepspeed_engine import breakdown, lab, setup
from shardlab.gpt.model import GPT, PRESETS, loss
from shardlab.layout import Layout
from shardlab.measure import count

pytestmark = pytest.mark.skipif(not find_spec("deepspeed"), reason="needs DeepSpeed")

SHAPE = replace(PRESETS["nano"], seq=32)
MICRO, STEPS = 2, 4
SAVED = 2  # steps before a checkpoint
# 4 sqrt(256 tokens) roundings of 2^-24 of a loss of 5.5, and a turned step: see test_train. A wrong
# gradient moves weights by some 1e-3; rounding moves those with tiny gradients by 1e-6 to 3e-5.
LOSS, WEIGHT = 4.1e-5, 1e-4
PLAIN_LINEAR = {"zero_optimization": {"memory_efficient_linear": False}}


def run_ranks(fn, size, *args, timeout=240):
    # DeepSpeed compiles its optimizers for offloaded states at first use, with nvcc. Tests of the
    # engine on a GPU are at this file's end, in test_gpu.py and in the rehearsal.
    return ranks.run(fn, size, *args, device="cpu", timeout=timeout)


def build_model():
    torch.manual_seed(1)
    return GPT(SHAPE)


def make_batch(step, micro, share):
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + share)
    tokens = torch.randint(0, SHAPE.vocab, (MICRO, SHAPE.seq + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def layout_of(dp=1, **fields):
    return Layout(dp, micro_batch=MICRO, **fields)


def one_process(layout, precision="fp32", clipping=0.0, **_):
    used = build_model().to(torch.bfloat16 if precision == "bf16" else torch.float32)
    master = copy.deepcopy(used).float()  # DeepSpeed rounds the weights first, too
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-3, foreach=False)
    pairs = list(zip(used.parameters(), master.parameters(), strict=True))
    losses = []
    if precision == "bf16" and layout.zero == 0:  # DeepSpeed's first step has zero gradients
        for _, kept in pairs:
            kept.grad = torch.zeros_like(kept)
        optimizer.step()
    for step in range(STEPS):
        total, parts = 0.0, layout.microbatches * layout.dp
        for micro, share in itertools.product(range(layout.microbatches), range(layout.dp)):
            tokens, targets = make_batch(step, micro, share)
            value = loss(used(tokens), targets)
            (value / parts).backward()
            total += value.item() / parts
        for weight, kept in pairs:
            kept.grad, weight.grad = weight.grad.float(), None
        if clipping:
            torch.nn.utils.clip_grad_norm_(master.parameters(), clipping)
        optimizer.step()
        with torch.no_grad():
            for weight, kept in pairs:
                weight.copy_(kept)
        losses.append(total)
    return losses, {name: value.detach().clone() for name, value in master.state_dict().items()}


def train_references(cases):
    return {name: one_process(layout, **more) for name, (layout, more) in cases.items()}


def start_engine(layout, more):
    module = de.to_pipeline_module(build_model(), layout.pp) if layout.pp > 1 else build_model()
    return de.initialize(module, de.build_config(layout, **more))


def one_step(engine, layout, step):
    # DeepSpeed's tensor-parallel ranks are neighbours, its pipeline ranks are dp ranks apart.
    share = dist.get_rank() // layout.tp % layout.dp
    return de.step(engine, [make_batch(step, micro, share) for micro in range(layout.microbatches)])


def train_cases(cases, folder=None):
    """Train each case; return losses and weights; with a folder, also of a run that was resumed."""
    found = {}
    for name, (layout, more) in cases.items():
        engine = start_engine(layout, more)
        losses = [one_step(engine, layout, step) for step in range(SAVED)]
        saved = de.gather_weights(engine)
        if folder is not None:
            de.save_checkpoint(engine, f"{folder}/{name}")
        losses += [one_step(engine, layout, step) for step in range(SAVED, STEPS)]
        found[name] = {"losses": losses, "weights": de.gather_weights(engine), "saved": saved}
        if folder is not None:
            again = start_engine(layout, more)
            de.load_checkpoint(again, f"{folder}/{name}")
            resumed = [one_step(again, layout, step) for step in range(SAVED, STEPS)]
            found[name]["resumed"] = (resumed, de.gather_weights(again))
    return found


def max_gap(a, b):
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def compare_to_one_process(cases, results):
    gaps = {}
    for name, (losses, weights) in run_ranks(train_references, 1, cases)[0].items():
        for result in results:
            assert max_gap(result[name]["weights"], results[0][name]["weights"]) == 0.0, name
        mine = results[0][name]
        far = max(abs(a - b) for a, b in zip(losses, mine["losses"], strict=True))
        gaps[name] = (far, max_gap(weights, mine["weights"]))
    return gaps


# ------------------------------------------------------------------------------- equal

TWO = {
    "stage 0": (layout_of(2), {}),
    "stage 1": (layout_of(2, zero=1), {}),
    "stage 2": (layout_of(2, zero=2), {}),
    "stage 3": (layout_of(2, zero=3), PLAIN_LINEAR),
    "accumulation": (layout_of(2, zero=2, microbatches=2), {}),
    "clipping": (layout_of(2, zero=1), {"clipping": 0.1}),
    "clipping, stage 3": (layout_of(2, zero=3), {"clipping": 0.1, **PLAIN_LINEAR}),
    "optimizer offloaded": (layout_of(2, zero=2, offload="optimizer"), {}),
    "parameters offloaded": (layout_of(2, zero=3, offload="parameters"), PLAIN_LINEAR),
    "bf16": (layout_of(2, zero=1), {"precision": "bf16"}),
    "bf16, stage 0": (layout_of(2), {"precision": "bf16"}),
    # DeepSpeed's own linear layer stays in the process, so its case comes last.
    "stage 3, its own linear": (layout_of(2, zero=3), {}),
}
PIPELINES = {
    "pipeline": (layout_of(pp=2), {}),
    "pipeline, bf16": (layout_of(pp=2, zero=1), {"precision": "bf16"}),
}
# Elsewhere gradients are added in another order: of micro-batches, of a norm's terms, of a sum.
ROUNDED = {"accumulation", "clipping", "clipping, stage 3", "stage 3, its own linear"}


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def two_ranks(checkpoint_folder):
    de.import_deepspeed()
    # Separate runs: a pipeline leaves state in the process that breaks other engines.
    runs = [run_ranks(train_cases, 2, cases, checkpoint_folder) for cases in (TWO, PIPELINES)]
    return [flat | piped for flat, piped in zip(*runs, strict=True)]


def test_two_ranks_train_like_one_process(two_ranks):
    for name, (losses, weights) in compare_to_one_process(TWO | PIPELINES, two_ranks).items():
        if name in ROUNDED:
            assert losses < LOSS and weights < WEIGHT, (name, losses, weights)
        else:
            assert losses == weights == 0.0, (name, losses, weights)


def test_a_loaded_checkpoint_goes_on_as_if_nothing_had_stopped(two_ranks):
    for name, result in two_ranks[0].items():
        losses, weights = result["resumed"]
        assert losses == result["losses"][SAVED:], name
        assert max_gap(weights, result["weights"]) == 0.0, name


def test_a_checkpoint_becomes_a_plain_state_dict(two_ranks, checkpoint_folder, capfd):
    for name in TWO:
        result, state = two_ranks[0][name], de.plain_state_dict(checkpoint_folder / name)
        GPT(SHAPE).load_state_dict(state)  # names and shapes; strict
        # 16 bits without ZeRO's optimizer files: only weights with 8 binary digits
        rounded = name == "bf16, stage 0"
        relative = max(
            ((state[key] - kept).abs() / kept.abs().clamp(min=1e-3)).max().item()
            for key, kept in result["saved"].items()
        )
        assert (0 < relative <= 2**-8) if rounded else relative == 0.0, (name, relative)
    assert capfd.readouterr() == ("", "")


FOUR = {
    "four ranks, stage 2": (layout_of(4, zero=2), {}),
    "pipeline x data": (layout_of(2, pp=2, zero=1, microbatches=2), {}),
}
TENSOR = {
    "tensor x data, stage 1": (layout_of(2, tp=2, zero=1, microbatches=2), {}),
    "tensor x data, stage 3": (layout_of(2, tp=2, zero=3), {}),
}


@pytest.mark.parametrize("cases", [FOUR, TENSOR], ids=["pipeline", "tensor"])
def test_four_ranks_in_two_dimensions_train_like_one_process(cases):
    results = run_ranks(train_cases, 4, cases)
    for name, (losses, weights) in compare_to_one_process(cases, results).items():
        assert losses < LOSS and weights < WEIGHT, (name, losses, weights)


def pipelines_saved():
    found = []
    for recompute in ("none", "full"):
        engine = start_engine(layout_of(pp=2, recompute=recompute), {})
        with count.track_saved_activations(*engine.module.parameters()) as saved:
            de.step(engine, [make_batch(0, 0, 0)])
        found.append((saved.bytes, de.gather_weights(engine)))
    return found


def test_in_a_pipeline_the_configuration_recomputes():
    (plain, w0), (recomputing, w1) = run_ranks(pipelines_saved, 2)[0]
    assert recomputing < plain / 2  # excludes tensors that DeepSpeed itself keeps
    assert max_gap(w0, w1) == 0.0


# ------------------------------------------------------------------------------- quiet

ALONE = """
import sys, tempfile
from shardlab import deepspeed_engine as de, ranks
assert "deepspeed" not in sys.modules, "the import alone must not load DeepSpeed"
sys.path.insert(0, {tests!r})
import test_deepspeed_engine as t

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        flat = t.layout_of(2, zero=3, offload="parameters"), {{}}
        ranks.run(t.train_cases, 2, dict(flat=flat), folder, device="cpu")
        de.plain_state_dict(folder + "/flat")
    print("done")
"""


def test_nothing_is_printed_and_no_compiler_is_called(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("g++", "c++", "gcc", "cc", "clang", "clang++", "ninja", "nvcc", "ld"):
        (tools / name).write_text(f"#!/bin/sh\necho $0 >> {tmp_path}/called\nexit 1\n")
        (tools / name).chmod(stat.S_IRWXU)
    script = tmp_path / "alone.py"
    script.write_text(ALONE.format(tests=os.path.dirname(__file__)))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DS_", "PYTEST"))}
    done = subprocess.run(
        [sys.executable, script],
        env=kept | {"PATH": str(tools), "HOME": str(tmp_path), "PYTHONPATH": "code"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.stdout, done.stderr) == ("done\n", ""), done.stderr[-2000:]
    assert not (tmp_path / "called").exists(), (tmp_path / "called").read_text()


# ------------------------------------------------------------------------------- configurations


def test_a_configuration_multiplies_and_merges_further_sections():
    built = de.build_config(Layout(8, zero=2, micro_batch=4, microbatches=3), clipping=1)
    assert built["train_batch_size"] == 96 == 4 * 3 * 8
    assert built["zero_optimization"] == {"stage": 2}
    assert built["gradient_clipping"] == 1.0
    assert de.build_config(Layout(4, pp=2, micro_batch=4, microbatches=3))["train_batch_size"] == 48
    # DeepSpeed would count all ranks.
    assert "train_batch_size" not in de.build_config(Layout(4, 2))
    built = de.build_config(Layout(zero=3), zero_optimization={"overlap_comm": False})
    assert built["zero_optimization"] == {"stage": 3, "overlap_comm": False}


WRONG = [
    ({"layout": Layout(pp=2, zero=2)}, "zero=2: must be 0 or 1 with pp=2"),
    ({"layout": Layout(pp=2, schedule="gpipe")}, "schedule='gpipe': must be"),
    ({"layout": Layout(offload="optimizer")}, "zero=0: must be 1, 2 or 3 with offload"),
    ({"precision": "fp8"}, "precision='fp8': must be"),
    ({"clipping": -1.0}, "clipping=-1.0: must be"),
    ({"layout": Layout(tp=2), "tp_plan": "gpt9"}, "preset_model='gpt9'"),
    ({"gradient_cliping": 0.0}, "perhaps meant: 'gradient_clipping'"),
    ({"zero_optimization": {"overlapcomm": True}}, "overlapcomm=True: Extra inputs"),
    ({"gradient_clipping": "auto"}, "'auto' at gradient_clipping"),
]


def test_what_cannot_go_together_is_one_clear_error():
    for arguments, words in WRONG:
        with pytest.raises(ValueError) as caught:
            de.build_config(**arguments)
        assert words in str(caught.value) and "\n" not in str(caught.value), arguments


MICRO_OF = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
NO_SIZE = "Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided"
TORCH_ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
# Examples from tutorials, in float32: a CPU has no fp16.
PRINTED = {
    "train_batch_size": 256,
    ACCUMULATION: 8,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
}


def with_micro_batch(**settings):
    return {MICRO_OF: 1, **settings}


def with_stage(number, **settings):
    return {**settings, "zero_optimization": {"stage": number}}


# Configuration, whether an optimizer is passed, and the engine's error, or None if it starts.
STARTS = {
    "as printed": (PRINTED, False, "zero stage 2 requires an optimizer"),
    "with a section": ({**PRINTED, "optimizer": TORCH_ADAM}, False, None),
    "with an optimizer": ({**PRINTED, "zero_force_ds_cpu_optimizer": False}, True, None),
    "stage 1 alone": (with_stage(1), True, NO_SIZE),
    "stage 0, a size": (with_micro_batch(**with_stage(0)), False, None),
    "stage 1, a size": (
        with_micro_batch(**with_stage(1)),
        False,
        "zero stage 1 requires an optimizer",
    ),
    "batch alone": ({"train_batch_size": 4}, True, None),
    "all three": ({"train_batch_size": 12, MICRO_OF: 2, ACCUMULATION: 3}, True, None),
    "three for no ranks": ({"train_batch_size": 7, MICRO_OF: 2, ACCUMULATION: 1}, True, ""),
}


def real_engines(cases):
    deepspeed, said = de.import_deepspeed(), {}
    for name, (settings, given, _) in cases.items():
        module = build_model()
        adamw = torch.optim.AdamW(module.parameters(), lr=1e-3) if given else None
        before = copy.deepcopy(settings)
        try:
            with setup.suppress_output():
                deepspeed.initialize(model=module, optimizer=adamw, config=copy.deepcopy(settings))
            theirs = None
        except Exception as error:
            theirs = str(error)
        said[name] = theirs, check_or_error(settings, given)
        assert settings == before
    return said


def check_or_error(settings, given):
    try:
        return de.check_config(settings, optimizer=given)
    except ValueError as error:
        return str(error)


def test_check_and_the_engine_agree_and_on_ranks_it_says_the_same_as_without():
    de.import_deepspeed()
    said = run_ranks(real_engines, 2, STARTS)[0]
    for name, (settings, given, words) in STARTS.items():
        theirs, ours = said[name]
        assert ours == check_or_error(settings, given)
        assert (words is None) == (theirs is None) == (ours is None), (name, said)
        if words is not None:
            assert words in theirs and words in ours and "\n" not in ours, name


def check_refusals(folder):
    engine = start_engine(layout_of(pp=2), {"precision": "bf16"})
    for words, fn, *args in (
        ("stages=3: must divide", de.to_pipeline_module, build_model(), 3),
        ("micro_batches: 0 of them", de.step, engine, []),
    ):
        with pytest.raises(ValueError, match=words):
            fn(*args)
    with pytest.raises(FileNotFoundError):
        de.load_checkpoint(engine, folder)


def test_refusals_come_before_anything_is_started_or_written(tmp_path):
    run_ranks(check_refusals, 2, tmp_path)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------- the lab

# The ranks are on the CPU: what greedy decoding picks is compared to the token, and the sums of
# four ways on a GPU, each in its order, may part at a tie.
TASK = lab.Task(batch=2, prompt=8, new=4, seq=16, steps=2)


@pytest.fixture(scope="module")
def reference_reports() -> list[lab.Report]:
    return lab.run("one", 2, TASK, device="cpu")


def test_breakdown(reference_reports: list[lab.Report]) -> None:
    assert [r.tokens for r in reference_reports] == [2 * 4, 2 * 2 * 16]
    report = lab.Report("data", "training", 8, 1_000_000, 50.0, 10**14, 10**12, 2.5, torch.ones(1))
    assert report.tokens_per_second == 20_000
    assert report.total_tflops == 2.0
    assert report.flops_per_byte == 100.0
    # Eight GPUs for 50 of an hour's 3600 seconds, at 2.5. float64 rounds at 1e-16.
    assert report.cost_per_million == pytest.approx(8 * 2.5 * 50 / 3600, rel=1e-12)
    assert "0.28" in repr(breakdown.show_table([report]))
    assert "cost" in repr(breakdown.show_table([report]))
    assert reference_reports[0].cost_per_million is None and "cost" not in repr(
        breakdown.show_table(reference_reports)
    )
    assert len(breakdown.draw_bars([report, *reference_reports]).axes) == 4


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 6, "tie_word_embeddings": True}])
def test_flops_are_what_torch_counts(changes: dict[str, int]) -> None:
    # Eager: the counter does not see inside the fused attention of a CPU.
    model = lab.build_llama(attn_implementation="eager", **changes)
    shape = model.config
    tokens_BS = torch.zeros(2, 12, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens_BS, labels=tokens_BS, use_cache=False).loss.backward()
    assert counter.get_total_flops() == breakdown.training_flops(shape, 2, 12)
    with FlopCounterMode(display=False) as counter:
        lab.generate_tokens(model, tokens_BS, 5)
    assert counter.get_total_flops() == breakdown.inference_flops(shape, 2, 12, 5)


def test_bytes_moved() -> None:
    # One process: read forward and backward, gradient written, then gradient read and three
    # states read and written: 10 float32 per parameter.
    assert breakdown.training_bytes_moved(100, 100, gathered=False) == 4 * 100 * 10
    # ZeRO-3 on two ranks: weights are written twice when gathered; half of the optimizer's part.
    assert breakdown.training_bytes_moved(100, 50, gathered=True) == 4 * (100 * 5 + 50 * 7)


def test_the_lab_refuses_what_it_cannot_share() -> None:
    for given, words in (
        ({"mode": "five"}, "mode='five': must be"),
        ({"mode": "data", "size": 3}, "batch=2: must be a multiple"),
        ({"mode": "tensor", "size": 4}, "size=4: must divide"),
        ({"precision": "fp8"}, "precision='fp8': must be"),
    ):
        with pytest.raises(ValueError, match=words):
            lab.run(**{"mode": "one", "task": TASK, **given})


def test_the_command_of_the_lab(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch", "2", "--prompt", "8", "--new", "3", "--seq", "16", "--steps", "1"]
    assert lab.main(["--modes", "one", "--device", "cpu", "--price", "2.5", *sizes]) == 0
    said = capsys.readouterr().out
    assert "inference" in said and "cost per million tokens" in said
    with pytest.raises(SystemExit):
        lab.main(["--modes", "five"])
    assert "must be 'one'" in capsys.readouterr().err


@pytest.mark.weekly("the lesson trains four of them each day")
@pytest.mark.parametrize("precision", breakdown.BYTES_PER_VALUE)
@pytest.mark.parametrize("mode", [mode for mode in breakdown.MODES if mode != "one"])
def test_every_mode_computes_what_one_process_does(mode: str, precision: str) -> None:
    size = 4 if mode == "mixed" else 2
    one, found = (lab.run(w, size, TASK, device="cpu", precision=precision) for w in ("one", mode))
    if precision == "fp32":  # bfloat16: greedy tokens differ where two logits are nearly equal
        assert torch.equal(found[0].outcome, one[0].outcome)
    # Losses of 8: 4 sqrt(32 tokens) 2^-24 and a turned step, or two roundings of 2^-8.
    gap = (found[1].outcome - one[1].outcome).abs().max().item()
    assert gap < (3.1e-5 if precision == "fp32" else 0.065)
    whole = 12_593_024  # bytes of TINY in float32
    assert one[0].build_peak >= whole and (found[0].build_peak < 0.8 * whole) == (
        mode in ("zero3", "offload")
    )


def on_a_gpu():
    engine = start_engine(layout_of(zero=2), {})
    return [one_step(engine, layout_of(zero=2), step) for step in range(3)]


@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")
def test_on_a_gpu_the_losses_are_those_of_the_cpu():
    got = ranks.run(on_a_gpu, 1, device="cuda", timeout=240)[0]
    want = run_ranks(on_a_gpu, 1)[0]
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) < LOSS  # tf32 is off
