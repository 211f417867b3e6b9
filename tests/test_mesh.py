"""Memory, messages, checkpoints and refusals of several cuts at once; equality: `rows.meshes`."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from commands import run_main
from devices import to_device
from hypothesis import given
from hypothesis import strategies as st
from plain import build_plain_model, make_adamw, max_diff, run_ranks

from shardlab import mesh
from shardlab.checkpoint import Checkpoints, Training, export_model
from shardlab.gpt.model import GPT, Config
from shardlab.layout import Layout
from shardlab.measure import count

GPT2 = Config(vocab=32, seq=8, layers=2, heads=2, hidden=16)
DEGREES = st.integers(1, 4)
ORDERS = st.permutations(mesh.AXES).map(tuple)


def batch(config, step, size):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(config.vocab, (size, config.seq + 1), generator=generator)
    return to_device(tokens[:, :-1]), to_device(tokens[:, 1:])


def make_parallel(config, shape, dtype=torch.float64, seed=0, **options):
    """Return a job, and the number of this rank's model copy."""
    layout = replace(shape, **{"microbatches": 2, **options})
    groups = mesh.create_groups(layout, dist.group.WORLD)
    job = mesh.Parallel(build_plain_model(config, dtype), groups, layout, seed)
    return job, dist.get_rank(groups.dp)


EIGHT, FOUR, STAGED = Layout(dp=2, pp=2, tp=2), Layout(dp=2, tp=2), Layout(pp=2, tp=2)
PADDED = replace(GPT2, vocab=30, hidden=20)  # shards that need padding
SPARSE = replace(PADDED, experts=4, expert_ffn=12, shared_experts=1, dense_layers=1)
ALONG, LOOPED = {"sequence_parallel": True}, {"schedule": "interleaved", "chunks": 2}
AGAIN = {"recompute": "full"}
TODAY = replace(
    PADDED, heads=2, kv_heads=1, head=12, qk_norm=True, window=3, full_every=2, mlp="swiglu",
    norm="rms", bias=False,
)  # fmt: skip
LATENT = replace(
    TODAY, kv_heads=None, qk_norm=False, latent=14, query_latent=6, rotary=4, value=10
)  # fmt: skip
COUNTED = [
    (PADDED, EIGHT),
    (PADDED, replace(EIGHT, **ALONG)),
    (PADDED, replace(STAGED, **ALONG, **AGAIN)),
    (SPARSE, STAGED),
    (PADDED, replace(EIGHT, zero=1)),
    (PADDED, replace(FOUR, zero=2, **ALONG)),
    (PADDED, replace(FOUR, zero=3)),
    (PADDED, replace(FOUR, zero=3, **ALONG, **AGAIN)),
    (SPARSE, replace(FOUR, zero=3)),
    (TODAY, replace(EIGHT, zero=1, **ALONG)),
    (LATENT, replace(FOUR, zero=1, **ALONG, **AGAIN)),
    (replace(PADDED, layers=6), replace(EIGHT, zero=1, **LOOPED, **ALONG)),
    (replace(SPARSE, layers=4), replace(STAGED, **LOOPED, **AGAIN)),
    (replace(PADDED, layers=4), Layout(dp=2, pp=2, stages=(1, 3), schedule="naive")),
    (replace(PADDED, dropout=0.1), replace(FOUR, **AGAIN)),
    (replace(PADDED, dropout=0.1), replace(FOUR, zero=3, **ALONG, **AGAIN)),
]


@pytest.mark.parametrize("size", [4, 8])
def test_bytes_held_and_sent_are_as_predicted(size):
    cases = [(config, layout) for config, layout in COUNTED if layout.world_size == size]

    def held_and_sent(config, layout):
        job, copy = make_parallel(config, layout, torch.float32)
        optimizer, sizes, rank = make_adamw(job), [3, 2], dist.get_rank()
        for step in range(2):
            tokens, targets = batch(config, step, sum(sizes))
            with count.record_traffic() as sent:
                job.step(tokens.split(sizes)[copy], targets.split(sizes)[copy])
            optimizer.step()
        sends = mesh.predict_sent_bytes(config, job.layout, rank, config.seq, sizes[copy])
        sends["pp"] += sends.pop("twin")
        assert mesh.count_sent_bytes(sent, job) == sends
        assert mesh.measure_state_bytes(job, optimizer) == mesh.predict_state_bytes(
            config, job.layout, rank
        )
        return sends

    for sends in run_ranks(lambda: [held_and_sent(*case) for case in cases], size):
        for (_, layout), each in zip(cases, sends, strict=True):
            assert all((getattr(layout, axis) > 1) == (each[axis] > 0) for axis in mesh.AXES)


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_goes_on_under_another_mesh(tmp_path, tied):
    config, size, last = replace(GPT2, tied=tied), 8, 4

    def go_on(shape):
        """Resume from the checkpoint, or start, and save after the second of four steps."""
        model, copy = make_parallel(config, shape, torch.float64, microbatches=4 // shape.dp)
        training, found = Training(model, make_adamw(model)), []
        with Checkpoints(tmp_path, dist.group.WORLD) as store:
            if resumed := bool(store.list_steps()):
                store.load(training)
                found.append(read_contents(training))
            while training.step < last:
                tokens, targets = batch(config, training.step, size)
                model.step(tokens.chunk(shape.dp)[copy], targets.chunk(shape.dp)[copy])
                training.optimizer.step()
                training.optimizer.zero_grad()
                training.step += 1
                if training.step == 2 and not resumed:
                    store.save(training)
                    found.append(read_contents(training))
        return *found, read_contents(training)

    def read_contents(training):
        """Return the weights, and the existing first moments."""
        states, model = training.optimizer.state, training.model
        return mesh.gather_model_tensors(model), mesh.gather_model_tensors(
            model, lambda p: states.get(p, {}).get("exp_avg")
        )

    def load_alone():
        """Load the checkpoint in a plain process and return its contents."""
        model = build_plain_model(config, torch.float64)
        training = Training(model, make_adamw(model))
        with Checkpoints(tmp_path, dist.group.WORLD) as store:
            store.load(training)
        states = training.optimizer.state
        moments = {n: states[p]["exp_avg"] for n, p in model.named_parameters()}
        return model.state_dict(), moments

    def same_bits(found, want):
        return all(torch.equal(found[i][n], want[i][n]) for i in range(2) for n in found[i])

    first = replace(EIGHT, zero=1, **ALONG) if not tied else replace(STAGED, **ALONG)
    saved, uninterrupted = run_ranks(lambda: go_on(first), first.world_size)[0]
    assert same_bits(run_ranks(load_alone, 1)[0], saved)
    others = [
        (replace(first, pp=1), True),  # p changes no sum
        (Layout(dp=2, tp=2, zero=3), False),
        (Layout(), False),
    ]
    if tied:  # except that of the tied weights
        others = [(Layout(pp=2), False), (replace(FOUR, zero=3, **ALONG), False)]
    for shape, same in others:
        begin, end = run_ranks(lambda shape=shape: go_on(shape), shape.world_size)[0]
        assert same_bits(begin, saved) and same_bits(end, uninterrupted) == same
        # Gradients: 2 sqrt(64) roundings of 2^-53 of 0.5. AdamW: twice lr / eps of that.
        assert max(max_diff(end[0][n], w) for n, w in uninterrupted[0].items()) < 2e-9


def test_copied_heads_and_the_bias_of_a_router_go_on_under_another_mesh(tmp_path):
    config = replace(
        TODAY, heads=4, kv_heads=2, vocab=32, experts=4, router="sigmoid", ffn=24, tied=False
    )

    def save_mesh():
        job, _ = make_parallel(config, Layout(tp=4), torch.float32)
        for buffer in job.buffers_by_name.values():
            buffer.copy_(torch.arange(4.0) / 100)
        training = Training(job, make_adamw(job))
        job.step(*batch(config, 0, 2))
        training.optimizer.step()
        with Checkpoints(tmp_path, dist.group.WORLD) as store:
            training.step = 1
            store.save(training)
        return job.full_state_dict(), list_moments(job, training.optimizer)

    def list_moments(model, optimizer):
        def get_first(piece):
            return optimizer.state[piece]["exp_avg"]

        if isinstance(model, GPT):
            return {name: get_first(p) for name, p in model.named_parameters()}
        return mesh.gather_model_tensors(model, get_first)

    def load_mesh(shape):
        model = build_plain_model(config, torch.float32)
        if shape.world_size > 1:
            model, _ = make_parallel(config, shape, torch.float32, seed=1)
        optimizer = make_adamw(model)
        with Checkpoints(tmp_path, dist.group.WORLD) as store:
            store.load(Training(model, optimizer))
        whole = model.state_dict() if shape.world_size == 1 else model.full_state_dict()
        return whole, list_moments(model, optimizer)

    four = Layout(tp=4), replace(STAGED, zero=1)
    each = run_ranks(lambda: [save_mesh(), *map(load_mesh, four)], 4)
    want = each[0][0]
    assert want[0]["blocks.1.ffn.router.bias_E"].tolist() == (torch.arange(4.0) / 100).tolist()
    for found in (
        run_ranks(lambda: load_mesh(Layout()), 1)[0],
        *(x for mine in each for x in mine[1:]),
    ):
        for mine, theirs in zip(found, want, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


def test_a_plain_process_reads_what_a_mesh_exports(tmp_path):
    def work():
        job, _ = make_parallel(GPT2, EIGHT, zero=1, dtype=torch.float32)
        with pytest.raises(ValueError, match="state_dict: .* call full_state_dict()"):
            job.state_dict()
        export_model(job, tmp_path / "model.pt", dist.group.WORLD)

    run_ranks(work, 8)
    model = GPT(GPT2)
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    want = build_plain_model(GPT2, torch.float32).state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())


@given(dp=DEGREES, pp=DEGREES, tp=DEGREES, order=ORDERS)
def test_groups_are_those_of_torchs_mesh(dp, pp, tp, order):
    found = Layout(dp=dp, pp=pp, tp=tp, order=order)
    whole = torch.arange(found.world_size).view([getattr(found, axis) for axis in order])
    for number, axis in enumerate(order):
        want = whole.movedim(number, -1).flatten(0, 1).tolist()
        assert sorted(found.list_groups(axis)) == sorted(want)
        for group in want:  # a rank's place in its group
            assert [found.get_coordinates(rank)[axis] for rank in group] == list(range(len(group)))
    assert all(
        found.find_rank(**found.get_coordinates(rank)) == rank for rank in range(found.world_size)
    )


def run_training(capsys, line):
    return run_main(capsys, "mesh", "--steps", "3", *line.split())


def test_the_command_trains_counts_and_compares(capsys):
    status, out, _ = run_training(capsys, "--dp 2 --tp 2 --pp 2 --zero 1 --json")
    found = json.loads(out)
    assert status == 0 and len(found["ranks"]) == 8 and found["tokens_per_second"] > 0
    for one in found["ranks"]:
        assert one["held"] == one["held_predicted"] and one["sent"] == one["sent_predicted"]
    losses, gradients, weights = found["differences"].values()
    # 4 sqrt(8 x 16 tokens) 2^-24 of 5.5, and a turned step: see test_train
    assert max(losses, gradients) < 3.5e-5 and weights < 1e-4


def test_a_budget_counts_the_peak(capsys):
    """States that exceed it alone are refused untrained; else the trained job's peak decides."""
    status, out, _ = run_training(capsys, "--tp 2 --json")
    ranks = json.loads(out)["ranks"]
    peak = max(one["peak"] for one in ranks)
    states = max(sum(one["held"].values()) for one in ranks)
    assert status == 0 and states < peak
    for budget, fits in ((states - 1, False), (peak - 1, False), (peak, True)):
        status, out, _ = run_training(capsys, f"--tp 2 --json --budget {budget}")
        found = json.loads(out)
        assert (status, found["fits"]) == (int(not fits), fits)
        assert found["needs"] == (states if budget < states else peak)
        assert ("ranks" in found) == (budget >= states)


def test_groups_are_printed_and_nothing_is_trained(capsys):
    status, out, _ = run_main(capsys, "mesh", "--dp", "2", "--tp", "2", "--node", "2")
    assert status == 0 and "tensor: 2 × 2 ranks, none leaves its node\n  0 1\n  2 3\n" in out
