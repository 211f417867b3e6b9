"""The checker accepts every parallel model of the course, and finds the mistakes of its lessons."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlab import context_parallel as cp_
from shardlab import data_parallel as dp_
from shardlab import ranks, zero
from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp_
from shardlab import tensor_types as tt
from shardlab.gpt.model import GPT, Config, loss

GPT2 = Config(vocab=64, seq=16, layers=1, heads=4, hidden=32, tied=False)
LLAMA = Config(
    vocab=64, seq=16, layers=1, heads=4, hidden=32, kv_heads=2, ffn=64, mlp="swiglu", norm="rms",
    bias=False, tied=True,
)  # fmt: skip
QWEN = replace(LLAMA, kv_heads=1, head=12, qk_norm=True, window=5)
LATENT = replace(LLAMA, kv_heads=None, head=8, latent=16, query_latent=20, rotary=4, value=10)
BY_LAYER = tp_.Edges(tp_.copy_to, tp_.reduce_from)


def batch(**types):
    return [tt.declare_types(torch.randint(0, 64, (2, 16)), **types) for _ in range(2)]


def step_model(model):
    """Step by plain gradient descent: importing torch's optimizers takes a second."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def do_nothing(x, group):
    return x


def step(
    dp, tp, config=GPT2, edges=tp_.REPLICATED, types=tp_.get_parameter_types, prepare=None,
    logits=do_nothing, loss=tp_.vocab_parallel_loss, finish=None, tokens="R", after=None,
):  # fmt: skip
    """Run a step on copies of a cut model, as lessons do; every argument can be a mistake."""
    model = tp_.parallelize(GPT(config), tp, edges)
    if prepare:
        prepare(model, tp)
    tt.declare_parameters(model, dp="R", tp=types(model))
    x, y = batch(dp="V", tp=tokens)
    (finish or addend)(loss(logits(model(x), tp), y, tp), dp, tp).backward()
    (after or update)(model, dp, tp)
    step_model(model)


def addend(value, dp, tp):
    return tt.declare_types(value, dp="P")  # a share of the joint loss


def update(model, dp, tp, sums=None, times=1, group=None, clip=tp_.clip_grad_norm_):
    sums = (model.edges.uncut_type == "R") if sums is None else sums
    for _ in range(sums):
        sp.sum_gradients(model, tp)
    for _ in range(times):
        dp_.average_gradients(model, group or dp)
    clip(model, 1.0)


def check(**options):
    return tt.check_step(partial(step, **options), dp=2, tp=2)


def recompute_blocks(model, _):
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


MODELS = {
    "gpt2": {},
    "gpt2, tied": {"config": replace(GPT2, tied=True)},
    "layer by layer": {"edges": BY_LAYER},
    "heads copied, with norms": {"config": QWEN},
    "heads copied, along the sequence": {"config": QWEN, "edges": sp.SEQUENCE_SHARDED},
    "latents, along the sequence": {"config": LATENT, "edges": sp.SEQUENCE_SHARDED},
    "along the sequence, llama": {"edges": sp.SEQUENCE_SHARDED, "config": LLAMA},
    "along the sequence, kept": {"edges": sp.SequenceShardedEdges(keep_entered=True)},
    "recomputed": {"prepare": recompute_blocks},
    "logits gathered": {
        "logits": tp_.gather_last,
        "loss": lambda logits, targets, _: loss(logits, targets),
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallel_models_pass_with_backward_clipping_and_step(name):
    verdict = check(**MODELS[name])
    assert verdict, verdict
    assert verdict.num_backwards == 1 and verdict.num_communicating > 10


@pytest.mark.parametrize(("attention", "layout"), [("ring", "zigzag"), ("ulysses", "contiguous")])
def test_context_parallel_models_pass(attention, layout):
    def distributed(cp):
        model = cp_.distribute_model(GPT(replace(GPT2, tied=True)), cp, attention, layout)
        tt.declare_parameters(model, cp="R")
        x, y = [
            tt.declare_types(cp_.shard_tokens(z, cp, layout), cp="V")
            for z in torch.randint(0, 64, (2, 2, 16))
        ]
        tt.declare_types(loss(model(x), y), cp="P").backward()
        cp_.average_gradients(model, cp)
        step_model(model)

    verdict = tt.check_step(distributed, cp=2)
    assert verdict, verdict


def check_wrapper(kind):
    """Run on real ranks: the checker trusts the wrappers' work in backward."""
    group = dist.group.WORLD
    model = getattr(zero, kind)(GPT(GPT2), group) if "Zero" in kind else dp_.DataParallel(
        GPT(GPT2), group
    )  # fmt: skip
    inner = model.module
    tokens = [x.to(ranks.device()) for x in torch.randint(0, 64, (2, 2, 16))]
    with tt.check_types(dp=group) as mode:
        tt.declare_parameters(inner, dp="R")
        x, y = [tt.declare_types(z, dp="V") for z in tokens]
        tt.declare_types(loss(model(x), y), dp="P").backward()
        for parameter in model.parameters():
            if "Zero" in kind:  # a piece, which only one rank has
                tt.override_types(parameter, dp="V")
            if parameter.grad is not None:
                tt.override_types(parameter.grad, dp="V" if "Zero" in kind else "R")
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
    return mode.num_backwards


def test_wrappers_of_data_parallelism_pass():
    kinds = "DataParallel", "Zero1", "Zero2", "Zero3"
    assert ranks.run(lambda: list(map(check_wrapper, kinds)), 2) == [[1] * 4] * 2


# Mistakes of the course's lessons, and the checker's messages.


def clip_by_rank(model, limit):
    nn.utils.clip_grad_norm_(model.parameters(), limit)


def clip_first(model, dp, tp):
    tp_.clip_grad_norm_(model, 1.0)
    update(model, dp, tp)


def hook_on_parameter(model, dp, tp):
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter, group=dp)


def sum_loss(over):
    """Return a `finish` that all-reduces the loss, "to log it", before backward."""

    def finish(value, dp, tp):
        dist.all_reduce(value, group=tp if over == "tp" else dp)
        return value / 2 if over == "dp" else addend(value / 2, dp, tp)

    return finish


def bias_in_each_rank(model, _):
    """Add the bias inside each rank's product, a typical first version."""
    for module in model.modules():
        if isinstance(module, tp_.RowLinear):

            def forward(x, m=module):
                return m.leave_region(nn.functional.linear(x, m.weight, m.bias), m.group)

            module.forward = forward


def norms_outside(model, _):
    """Use weights of the heads' norms unwrapped: each rank's gradient covers only its own heads."""
    for block in model.blocks:
        for name in ("query_norm", "key_norm"):
            norm = nn.RMSNorm(12)
            norm.weight = getattr(block.attention, name).weight
            setattr(block.attention, name, norm)


def positions_outside(model, _):
    """Use the narrow part of latent attention as in the plain model."""
    for block in model.blocks:
        del block.attention.compute_latents


def invariant(model):
    return {name: "I" if t == "R" else t for name, t in tp_.get_parameter_types(model).items()}


def slice_of_gradient(x, group):
    """Gather in forward, and keep a slice in backward."""
    return tp_.gather_last(x.transpose(1, 2), group).transpose(1, 2)


def gathered_for_all(x, group):
    """Gather along the last dimension like a sequence: all-gather in forward, sum in backward."""
    return sp.SEQUENCE_SHARDED.enter_region(x.transpose(1, 2), group).transpose(1, 2)


ALONG = {"edges": sp.SEQUENCE_SHARDED}
MISTAKES = {  # name -> options, part of the message
    "f forgotten": ({"edges": tp_.Edges(do_nothing, tp_.reduce_from)}, "linear("),
    "g forgotten": ({"edges": tp_.Edges(tp_.copy_to, do_nothing)}, "I is combined with V"),
    "f and g exchanged": ({"edges": tp_.Edges(tp_.reduce_from, tp_.copy_to)}, "the operator is"),
    "bias in each rank": ({"prepare": bias_in_each_rank, "edges": BY_LAYER}, "out.bias dp:R tp:I"),
    "norms of heads left outside": ({"config": QWEN, "prepare": norms_outside}, "query_norm"),
    "positions left outside": ({"config": LATENT, "prepare": positions_outside}, "combined with V"),
    "norms said to be I": (ALONG | {"types": invariant}, "attention_norm.weight dp:R tp:I"),
    "norms not summed": (ALONG | {"after": partial(update, sums=0)}, "dp:R tp:P"),
    "norms summed twice": (ALONG | {"after": partial(update, sums=2)}, "the operator is P -> R"),
    "summed without a cut stream": ({"after": partial(update, sums=1)}, "but its input is I"),
    "gathered, then all-reduced": (
        {"edges": tp_.Edges(sp.SEQUENCE_SHARDED.enter_region, tp_.reduce_from_)}, "its input is I",
    ),
    "not gathered": (
        {"edges": tp_.Edges(tp_.copy_to, sp.SEQUENCE_SHARDED.leave_region)}, "I is combined with V",
    ),
    "slice in backward": (
        {"edges": tp_.Edges(slice_of_gradient, sp.SEQUENCE_SHARDED.leave_region, uncut_type="R")},
        "I is combined with V",
    ),
    "loss of gathered logits": ({"logits": tp_.gather_last}, "split_last (I -> V) first"),
    "gathered logits that add up in backward": (
        {"logits": gathered_for_all, "loss": lambda x, y, _: loss(x, y)}, "the loss is R",
    ),
    "plain loss of a part": ({"loss": lambda x, y, _: loss(x, y % 32)}, "the loss is V"),
    "loss added up over tp": ({"finish": sum_loss("tp")}, "all_reduce("),
    "local loss": ({"finish": lambda value, dp, tp: value}, "the loss is V"),
    "not reduced": ({"after": partial(update, times=0)}, "P is a summand"),
    "reduced twice": ({"after": partial(update, times=2)}, "but its input is R"),
    "another batch on each tp rank": ({"tokens": "V"}, "give all ranks of this axis the same"),
    "clipped by the rank's own norm": ({"after": partial(update, clip=clip_by_rank)}, "in place"),
    "clipped before the exchange": ({"after": clip_first}, "vector_norm("),
    "a hook that averages parameters": ({"after": hook_on_parameter}, "but its input is R"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_the_lessons_are_found(name):
    options, message = MISTAKES[name]
    verdict = check(**options)
    assert not verdict and message in verdict.message, verdict


def test_a_group_that_is_no_axis_is_named():
    def over_the_world(model, dp, tp):
        update(model, dp, tp, group=dist.group.WORLD)

    verdict = check(after=over_the_world)
    assert not verdict and "its group of 4 ranks is not an axis" in verdict.message
    verdict = check(after=lambda model, dp, tp: update(model, dp, tp, group=tp))
    assert not verdict and "its input is I" in verdict.message
