"""Costs and parts of Megatron's sequence parallelism; equality: `rows.tensors`."""

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from devices import to_device
from plain import run_ranks

from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp
from shardlab.gpt.model import GPT, Config
from shardlab.measure import count

SHAPE = {"vocab": 64, "seq": 16, "layers": 2, "heads": 4, "hidden": 32}
LLAMA = {"kv_heads": 4, "mlp": "swiglu", "norm": "rms", "bias": False, "tied": False}


def gpt(**choices):
    torch.manual_seed(0)
    return to_device(GPT(Config(**(SHAPE | choices))))


def batch(step, sequences=2):
    torch.manual_seed(step)
    tokens = to_device(torch.randint(64, (sequences, 17)))
    return tokens[:, :-1], tokens[:, 1:]


def shard_model(model, group):
    """Return `model`, cut by width inside its layers and by tokens outside."""
    return tp.parallelize(model, group, edges=sp.SEQUENCE_SHARDED)


# Messages


def one_step(edges, choices, sequences=2):
    """Return the messages of a step, by purpose."""
    group = dist.group.WORLD
    model = gpt(**choices)
    model = tp.parallelize(model, group, **({"edges": edges} if edges else {}))
    tokens, targets = batch(0, sequences)
    with count.record_traffic() as forward:
        logits = model(tokens)
    value = tp.vocab_parallel_loss(logits, targets, group)
    with count.record_traffic() as backward:
        value.backward()
    with count.record_traffic() as gradients:
        if edges:
            sp.sum_gradients(model, group)
    return forward, backward, gradients


def count_bytes_sent(sent, size):
    """Return the bytes that leave a rank for its collectives."""
    one = Fraction(size - 1, size)
    each = {"all_gather_into_tensor": size * one, "all_to_all_single": one, "all_reduce": 2 * one}
    assert sum(sent.calls.values()) == sum(sent.calls[name] for name in each) and not sent.messages
    return sum(sent.payload[name] * factor for name, factor in each.items())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_collectives_and_bytes_of_a_step_are_those_predicted(size):
    kinds = {
        "replicated": None,
        "again": sp.SEQUENCE_SHARDED,
        "kept": sp.SequenceShardedEdges(keep_entered=True),
    }
    models = {"gpt": {}, "llama": LLAMA}

    def work():
        return {(k, m): one_step(kinds[k], models[m]) for k in kinds for m in models}

    for results in run_ranks(work, size):
        sums = {}
        for (kind, model), sent in results.items():
            config = Config(**(SHAPE | models[model]))
            predicted = sp.predict_edge_bytes(
                config,
                2,
                16,
                size,
                4,
                sequence_sharded=kind != "replicated",
                keep_entered=kind == "kept",
            )
            counted = [count_bytes_sent(one, size) for one in sent]
            assert counted == [predicted[name] for name in ("forward", "backward", "gradients")]
            calls = sum((one.calls for one in sent), start=type(sent[0].calls)())
            payload = sum((one.payload for one in sent), start=type(sent[0].payload)())
            assert sum(calls.values()) == predicted["calls"]
            assert payload["all_gather_into_tensor"] == predicted["all_gather"]
            assert payload["all_to_all_single"] == predicted["reduce_scatter"]
            assert payload["all_reduce"] == predicted["all_reduce"]
            sums[kind, model] = counted
        for model in models:
            # As many bytes as with all-reduces; half as many more if backward gathers again.
            plain, again, kept = (sums[kind, model] for kind in kinds)
            assert plain[:2] == kept[:2] and again[0] == plain[0]
            assert again[1] == plain[1] * Fraction(3, 2)


def check_dropout():
    """Check that ranks' tokens have different dropout masks, and generators agree afterwards."""
    model = shard_model(gpt(dropout=0.5), dist.group.WORLD)
    ones = to_device(torch.ones(1, 8, 32))
    torch.manual_seed(1)
    return model.blocks[0].dropout(ones) > 0, torch.get_rng_state()


def test_ranks_drop_their_tokens_by_seeds_of_their_own():
    (one, state), (other, theirs) = run_ranks(check_dropout, 2)
    assert not torch.equal(one, other) and torch.equal(state, theirs)
