"""What several cuts at once hold, send, save and refuse; they equal one process: `rows.meshes`."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from commands import benchmark, ran
from devices import here
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardlab import count, mesh, ranks
from shardlab.checkpoint import Checkpoints, Training, export
from shardlab.layout import Layout, orders
from shardlab.mesh import groups, picture
from shardlab.model import GPT, Config, loss
from shardlab.ranks import RankError

GPT2 = Config(vocab=32, seq=8, layers=2, heads=2, hidden=16)
DEGREES = st.integers(1, 4)
ORDERS = st.permutations(mesh.AXES).map(tuple)


def run(fn, size):
    return ranks.run(fn, size, timeout=100, show=False)


def plain(config, dtype=torch.float64):
    """A GPT in which every number says something: biases and norms are not their defaults."""
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return here(model).to(dtype)


def batch(config, step, size):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(config.vocab, (size, config.seq + 1), generator=generator)
    return here(tokens[:, :-1]), here(tokens[:, 1:])


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)


def gap(a, b):
    return (a - b).abs().max().item()


def parallel(config, shape, dtype=torch.float64, seed=0, **options):
    """A job, and which copy of the model this rank belongs to."""
    layout = replace(shape, **{"microbatches": 2, **options})
    groups = mesh.join(layout, dist.group.WORLD)
    job = mesh.Parallel(plain(config, dtype), groups, layout, seed)
    return job, dist.get_rank(groups.dp)


EIGHT = Layout(dp=2, pp=2, tp=2)


PADDED = replace(GPT2, vocab=30, hidden=20)  # shards that need padding
SPARSE = replace(PADDED, experts=4, expert_ffn=12, shared_experts=1, dense_layers=1)
ALONG, LOOPED = {"sequence_parallel": True}, {"schedule": "interleaved", "chunks": 2}
AGAIN = {"recompute": "full"}
COUNTED = [
    (config, replace(Layout(dp=2, tp=2) if zero > 1 else EIGHT, zero=zero, **how))
    for zero in range(4)
    for config, how in [(PADDED, {}), (PADDED, ALONG), (SPARSE, {}), (PADDED, ALONG | AGAIN)]
]
COUNTED += [
    (replace(PADDED, layers=6), replace(EIGHT, zero=1, **LOOPED, **ALONG)),
    (replace(SPARSE, layers=4), replace(EIGHT, zero=1, **LOOPED, **AGAIN)),
    (replace(PADDED, layers=4, tied=False), Layout(dp=2, pp=2, **LOOPED)),
    (replace(PADDED, layers=8), Layout(pp=4, zero=1, **LOOPED)),
    (replace(PADDED, layers=4), Layout(dp=2, pp=2, stages=(1, 3), schedule="naive")),
    (PADDED, Layout(dp=2, tp=2, **AGAIN)),
    (replace(PADDED, dropout=0.1), Layout(dp=2, tp=2, **AGAIN)),
    (replace(PADDED, dropout=0.1), Layout(dp=2, tp=2, zero=3, **ALONG, **AGAIN)),
]


@pytest.mark.parametrize("size", [4, 8])
def test_bytes_held_and_sent_are_as_predicted(size):
    cases = [(config, layout) for config, layout in COUNTED if layout.ranks == size]

    def held_and_sent(config, layout):
        job, copy = parallel(config, layout, torch.float32)
        optimizer, sizes, rank = adamw(job), [3, 2], dist.get_rank()
        for step in range(2):
            tokens, targets = batch(config, step, sum(sizes))
            with count.sent() as sent:
                job.step(tokens.split(sizes)[copy], targets.split(sizes)[copy])
            optimizer.step()
        sends = mesh.predicted_sent(config, job.layout, rank, config.seq, sizes[copy])
        sends["pp"] += sends.pop("twin")
        assert mesh.counted(sent, job) == sends
        assert mesh.held(job, optimizer) == mesh.predicted_states(config, job.layout, rank)
        return sends

    for sends in run(lambda: [held_and_sent(*case) for case in cases], size):
        for (_, layout), each in zip(cases, sends, strict=True):
            assert all((getattr(layout, axis) > 1) == (each[axis] > 0) for axis in mesh.AXES)


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_goes_on_under_another_mesh(tmp_path, tied):
    dropout = 0.1 if run(lambda: ranks.device().type, 1) == ["cpu"] else 0.0  # see five_steps
    config, size, last = replace(GPT2, tied=tied, dropout=dropout), 8, 5

    def go_on(shape):
        """From what is saved, or from the beginning, which saves after the third of five steps."""
        model, copy = parallel(config, shape, torch.float32, microbatches=4 // shape.dp)
        training, found = Training(model, adamw(model)), []
        with Checkpoints(tmp_path, dist.group.WORLD) as store:
            if resumed := bool(store.steps()):
                store.load(training)
                found.append(contents(training))
            while training.step < last:
                tokens, targets = batch(config, training.step, size)
                model.step(tokens.chunk(shape.dp)[copy], targets.chunk(shape.dp)[copy])
                training.optimizer.step()
                training.optimizer.zero_grad()
                training.step += 1
                if training.step == 3 and not resumed:
                    store.save(training)
                    found.append(contents(training))
        return *found, contents(training)

    def contents(training):
        """Weights, and the first moments that there are."""
        states, model = training.optimizer.state, training.model
        return mesh.full_tensors(model), mesh.full_tensors(
            model, lambda p: states.get(p, {}).get("exp_avg")
        )

    def alone():
        """In a plain process: what is loaded."""
        model = plain(config, torch.float32)
        training = Training(model, adamw(model))
        with Checkpoints(tmp_path, dist.group.WORLD) as store:
            store.load(training)
        states = training.optimizer.state
        moments = {n: states[p]["exp_avg"] for n, p in model.named_parameters()}
        return model.state_dict(), moments

    def same_bits(found, want):
        return all(torch.equal(found[i][n], want[i][n]) for i in range(2) for n in found[i])

    first = replace(EIGHT, zero=1, sequence_parallel=True)
    saved, uninterrupted = run(lambda: go_on(first), 8)[0]
    assert same_bits(run(alone, 1)[0], saved)
    others = [
        (first, True),
        (replace(first, pp=1), True),  # p changes no sum
        (Layout(dp=4, tp=2, zero=1), False),
        (Layout(dp=2, tp=2, zero=3), False),
        (Layout(), False),
    ]
    if tied:  # but that of the twins
        others = [(Layout(pp=2), False), (replace(first, pp=1, zero=3), False)]
    for shape, same in others:
        begin, end = run(lambda shape=shape: go_on(shape), shape.ranks)[0]
        assert same_bits(begin, saved) and same_bits(end, uninterrupted) == same
        # float32: gradients differ by 1e-7, which AdamW makes up to 1e-5 where they are about 0
        assert max(gap(end[0][n], w) for n, w in uninterrupted[0].items()) < 1e-4


def test_a_plain_process_reads_what_a_mesh_exports(tmp_path):
    def work():
        job, _ = parallel(GPT2, EIGHT, zero=1, dtype=torch.float32)
        with pytest.raises(ValueError, match="state_dict: .* allowed is full_state_dict()"):
            job.state_dict()
        export(job, tmp_path / "model.pt", dist.group.WORLD)

    run(work, 8)
    model = GPT(GPT2)
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    want = plain(GPT2, torch.float32).state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())


@given(dp=DEGREES, pp=DEGREES, tp=DEGREES, order=ORDERS)
def test_groups_are_those_of_torchs_mesh(dp, pp, tp, order):
    found = Layout(dp=dp, pp=pp, tp=tp, order=order)
    whole = torch.arange(found.ranks).view([getattr(found, axis) for axis in order])
    for number, axis in enumerate(order):
        want = whole.movedim(number, -1).flatten(0, 1).tolist()
        assert sorted(found.groups(axis)) == sorted(want)
        for group in want:  # a rank is where its group has it
            assert [found.place(rank)[axis] for rank in group] == list(range(len(group)))
    assert all(found.rank(**found.place(rank)) == rank for rank in range(found.ranks))


def test_ranks_join_the_groups_that_torch_would_give_them():
    shape = Layout(dp=2, tp=2)

    def work():
        ours = mesh.join(shape, dist.group.WORLD)
        kind = ranks.device().type
        theirs = init_device_mesh(kind, (2, 1, 2), mesh_dim_names=mesh.AXES)
        pairs = zip(ours, mesh.groups_of(theirs), strict=True)
        return [tuple(map(dist.get_process_group_ranks, pair)) for pair in pairs]

    for axis in zip(*run(work, 4), strict=True):
        assert all(ours == theirs for ours, theirs in axis)


@given(dp=DEGREES, pp=DEGREES, tp=DEGREES, order=ORDERS, data=st.data())
def test_what_leaves_a_node_is_what_neighbours_beyond_it_are_sent(dp, pp, tp, order, data):
    found = Layout(dp=dp, pp=pp, tp=tp, order=order)
    divisors = [n for n in range(1, found.ranks + 1) if found.ranks % n == 0]
    node = data.draw(st.sampled_from(divisors))
    leaving = found.leaving(node, lambda rank: {"dp": 1.0, "pp": 2.0, "tp": 4.0})
    if node == found.ranks:
        assert not any(map(sum, leaving.values()))
    for axis, each in (("dp", 1.0), ("tp", 4.0)):
        beyond = sum(
            each
            for group in found.groups(axis)
            for i, rank in enumerate(group)
            if rank // node != group[(i + 1) % len(group)] // node
        )
        assert sum(leaving[axis]) == pytest.approx(beyond)
    assert sum(leaving["pp"]) <= 2.0 * found.ranks


def test_tensor_innermost_leaves_least():
    config = replace(GPT2, hidden=32, layers=4)

    def beyond(shape):
        sent = [mesh.predicted_sent(config, shape, rank, 16, 8) for rank in range(8)]
        return sum(map(sum, shape.leaving(4, sent.__getitem__).values()))

    totals = {shape.order: beyond(shape) for shape in orders(EIGHT)}
    assert len(totals) == 6
    assert min(totals, key=totals.get)[-1] == "tp" and max(totals, key=totals.get)[0] == "tp"


def test_two_axes_are_those_of_fully_shard_and_parallelize_module():
    config = replace(GPT2, heads=4, kv_heads=4, tied=False)
    contenders = benchmark("mesh")

    def work():
        steps = {name: contenders[name](config, 2) for name in ("ours", "theirs")}
        for _ in range(3):
            for step, _ in steps.values():
                step()
        full = mesh.full_tensors(steps["ours"][1])
        pairs = [(full[n], p.full_tensor()) for n, p in steps["theirs"][1].named_parameters()]
        full_at_start = contenders["built"](config).state_dict()
        moved = max(gap(w, full_at_start[n]) for n, w in full.items())
        return max(gap(ours, theirs) for ours, theirs in pairs), moved

    for apart, moved in run(work, 4):
        # float32; three steps of AdamW at 1e-3, which divides by gradients that may be about 0
        assert apart < 1e-4 < 1e-3 < moved


def test_more_on_a_copy_weighs_more():
    def work():  # one step without weights: the mean of means
        job, copy = parallel(GPT2, Layout(dp=2), microbatches=1)
        tokens, targets = batch(GPT2, 0, 5)
        part = (tokens.split([4, 1])[copy], targets.split([4, 1])[copy])
        wanted = loss(plain(GPT2)(tokens), targets)
        means = loss(plain(GPT2)(part[0]), part[1])
        value = job.step(*part)
        dist.all_reduce(means)
        return gap(value, wanted), gap(means / 2, wanted)

    for ours, naive in run(work, 2):
        assert ours < 1e-12 and naive > 1e-3


def test_a_step_without_gradients_has_no_norm():
    def work():
        job, _ = parallel(GPT2, Layout(dp=2), zero=1)
        return job.clip_grad_norm_(1.0).item()

    assert run(work, 2) == [0.0, 0.0]


def refused(seq=None, **options):
    mesh.check_cuts(GPT2, Layout(**options), seq)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layout(dp=0), "dp=0: allowed are whole numbers, 1 or more"),
        (lambda: Layout(pp=2, order=("dp", "tp")), r"order=\('dp', 'tp'\): .* with pp among them"),
        (lambda: Layout(order=("dp", "dp")), "order=.*: allowed are dp, pp, cp and tp, each once"),
        (lambda: Layout(order="dp"), "order='dp': allowed are"),
        (lambda: EIGHT.check(4), "ranks=4: allowed is 8, the product of dp=2, pp=2 and tp=2"),
        (lambda: EIGHT.place(8), "rank=8: allowed are whole numbers, 0 to 7"),
        (lambda: EIGHT.leaving(3, lambda rank: {}), "node=3: allowed are divisors of 8 ranks"),
        (lambda: refused(tp=4), "heads=2: allowed on 4 ranks are mul"),
        (lambda: refused(pp=3), "pp=3: allowed are divisors of layers"),
        (lambda: refused(pp=2, schedule="zb-h1"), "schedule='zb-h1': allowed in a mesh are naive"),
        (lambda: refused(zero=4), "zero=4: allowed are 0, 1, 2 and 3"),
        (lambda: refused(pp=2, zero=2), "zero=2 with pp=2: allowed are 0 and 1"),
        (lambda: refused(tp=2, sequence_parallel=True, seq=9), "seq=9: allowed with sequence par"),
        (lambda: refused(cp=2), "cp=2: allowed in a mesh is 1"),
        (lambda: refused(pp=2, **LOOPED), r"pp=2, chunks=2: .* here parts have \[1, 1, 0, 0\]"),
        (
            lambda: mesh.check_cuts(replace(GPT2, vocab=2048), Layout(pp=2, stages="nanotron")),
            r"pp=2, chunks=1: allowed are .* the head; here parts have \[2, 0\]",
        ),
        (lambda: refused(recompute="selective"), "recompute='selective': allowed in a mesh are"),
    ],
)
def test_what_no_mesh_can_train(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def trained(capsys, line):
    return ran(capsys, "mesh", "--steps", "3", *line.split())


def test_the_command_trains_counts_and_compares(capsys):
    status, out, _ = trained(capsys, "--dp 2 --tp 2 --pp 2 --zero 1 --json")
    found = json.loads(out)
    assert status == 0 and len(found["ranks"]) == 8 and found["tokens_per_second"] > 0
    for one in found["ranks"]:
        assert one["held"] == one["held_predicted"] and one["sent"] == one["sent_predicted"]
    # float32, three steps: losses of 5.5 in units of 5e-7; weights through AdamW
    assert max(found["differences"].values()) < 1e-4
    words = "d 2 · t 2, ZeRO-1, m 2 × b 1"
    status, out, _ = ran(capsys, "mesh", "--steps", "3", "--layout", words)
    assert status == 0 and "4 ranks: dp=2 pp=1 tp=2, ZeRO 1" in out and "4 × 32 tokens" in out
    status, out, _ = trained(capsys, "--tp 2 --seq 8 --batch 2")
    assert status == 0 and "held and sent as predicted, to the byte" in out


def test_groups_are_printed_and_nothing_is_trained(capsys):
    status, out, _ = ran(capsys, "mesh", "--dp", "2", "--tp", "2", "--node", "2")
    assert status == 0 and "tensor: 2 × 2 ranks, none leaves its node\n  0 1\n  2 3\n" in out
    assert out.endswith("data: 2 × 2 ranks, all leave their node\n  0 2\n  1 3\n")


def test_a_budget_is_met_before_anything_starts(capsys):
    status, out, _ = ran(capsys, "mesh", "--budget", "1e5")
    assert status == 1 and out.startswith("does not fit: the fullest rank would hold 538,624 of")
    status, out, _ = ran(capsys, "mesh", "--budget", "1e5", "--json")
    assert status == 1 and json.loads(out) == {"fits": False, "needs": 538624, "budget": 1e5}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--dp two", "dp='two': allowed are whole numbers, 1 or more"),
        ("--tp 3", "heads=2: allowed on 3 ranks are multiples of 3"),
        ("--zero -1", "zero=-1: allowed are whole numbers, 0 to 3"),
        ("--steps 2", "steps=2: allowed are whole numbers, 3 or more"),
        ("--layers 5000", "allowed here are 1,000 at most"),
        ("--hidden 65536", "allowed here are 100,000,000 at most"),
        (f"--steps {10**18}", "allowed here are 10,000,000 at most"),
        ("--dp 3", "batch=8: allowed are multiples of dp=3 copies times 1 micro-batches"),
        ("--dp 4 --microbatches 4", "batch=8: allowed are multiples of dp=4 copies times 4 micro"),
        ("--dp 64 --batch 64", "ranks=64: allowed on this machine are 1 to"),
        ("--pp 2 --zero 3", "zero=3 with pp=2: allowed are 0 and 1"),
        ("--budget much", "budget='much': allowed are bytes, such as 2e6"),
        ("--budget -1", "budget=-1: allowed are bytes, such as 2e6"),
        ("--node 3", "node=3: allowed are divisors of 1 ranks"),
        ("--dp 1024 --node 8", "ranks=1024: allowed with --node are 512 at most"),
        ("--order tp,dp --node 1", "order='tp,dp': allowed are dp, pp and tp, each once, with"),
        ("--layout d2 --dp 2", "dp with --layout, which says it: allowed is one of both"),
        ("--layout x2", "layout: 'x2' is no part of one"),
        ("--layout c2", "cp=2: allowed in a mesh is 1"),
        ("--schedule vee", "schedule='vee': allowed are 'naive', 'gpipe', '1f1b'"),
    ],
)
def test_options_that_are_refused(capsys, line, words):
    status, _, err = ran(capsys, "mesh", *line.split())
    assert status == 2 and words in err


@given(dp=DEGREES, pp=DEGREES, tp=DEGREES, order=ORDERS)
def test_every_rank_stands_once_in_each_panel_of_the_picture(dp, pp, tp, order):
    found = Layout(dp=dp, pp=pp, tp=tp, order=order)
    for axis in mesh.AXES:
        rows = groups.packed(found.groups(axis))
        for row in rows:  # none passes over another
            assert all(a[-1] < b[0] for a, b in itertools.pairwise(row))
        assert sorted(sum(sum(rows, []), [])) == list(range(found.ranks))


def test_what_no_picture_can_show():
    with pytest.raises(ValueError, match="node=3: allowed are divisors of 8 ranks"):
        picture.draw(EIGHT, 3)
    with pytest.raises(ValueError, match="ranks=128: allowed in a picture are 64"):
        picture.draw(Layout(dp=128), 8)
    assert "tensor: 4 × 2 ranks, none leaves its node: [0, 1]" in picture.alt(EIGHT, 4)


def test_a_mesh_that_misses_a_rank():
    def work(how):
        if how == "too few":
            mesh.join(Layout(tp=2), dist.group.WORLD)
        elif how == "names":
            mesh.groups_of(init_device_mesh("cpu", (4,), mesh_dim_names=("data",)))
        else:
            numbers = torch.arange(2).view(1, 1, 2)
            mesh.groups_of(DeviceMesh("cpu", numbers, mesh_dim_names=mesh.AXES))

    for how, words in (
        ("too few", "ranks=4: allowed is 2, the product of dp=1, pp=1 and tp=2"),
        ("names", "mesh_dim_names=.*: allowed are dp, pp and tp, each once"),
        ("misses", "device_mesh: it misses rank [23]; allowed is a mesh with every rank; it has 0"),
    ):
        with pytest.raises(RankError, match=words):
            run(lambda how=how: work(how), 4)


def test_sequences_that_the_tensor_group_cannot_share():
    def work():
        job, _ = parallel(GPT2, Layout(tp=2), sequence_parallel=True, microbatches=1)
        tokens, targets = batch(replace(GPT2, seq=7), 0, 2)
        job.step(tokens, targets)

    with pytest.raises(RankError, match="seq=7: allowed are multiples of 2 ranks"):
        run(work, 2)
