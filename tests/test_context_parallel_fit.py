"""Lesson `context_parallel`: the context length that fits, compared with real training steps."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardlab import memory, ranks
from shardlab.common.shapes import PRESETS
from shardlab.context_parallel import average_gradients, distribute_model, shard_tokens
from shardlab.context_parallel.fit import (
    METHODS,
    find_max_context,
    predict_context_moments,
)
from shardlab.gpt.model import GPT, Config, loss
from shardlab.layout import Layout
from shardlab.measure import count

LLAMA = PRESETS["llama-3-8b"]
TWO, EIGHT = Layout(cp=2), Layout(cp=8)
SHAPES = {
    "nano": Config(seq=512, layers=2, heads=4, hidden=64),
    # Attention dominates: its keys and values in flight are the peak.
    "attention": Config(vocab=16, seq=1024, layers=1, heads=8, hidden=64, ffn=16),
    "llama": Config(
        vocab=64, seq=1024, layers=2, heads=4, hidden=64, kv_heads=2, ffn=32,
        mlp="swiglu", norm="rms", bias=False, tied=False,
    ),
    "deep": Config(vocab=64, seq=1024, layers=6, heads=4, hidden=64, ffn=64),
    # Many weights, few tokens: the gradients' message at the end is the peak.
    "weights": Config(seq=16, layers=1, heads=4, hidden=128),
}  # fmt: skip


def peak_of_a_step(config: Config, seq: int, way: str) -> int:
    """Return this rank's peak bytes in a training step on `seq` tokens, after a short step."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    model = GPT(config)
    if dist.get_world_size() > 1:
        model = distribute_model(model, group, way)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for length in (16, seq):
        model.zero_grad()
        tokens_BS, targets_BS = torch.randint(0, config.vocab, (2, 1, length))
        layout = "zigzag" if dist.get_world_size() > 1 else "contiguous"
        tokens_Bs, targets_Bs = (
            shard_tokens(x, group, layout).clone() for x in (tokens_BS, targets_BS)
        )
        del tokens_BS, targets_BS
        gc.collect()
        with count.track_memory(model, optimizer, tokens_Bs, targets_Bs) as held:
            loss(model(tokens_Bs), targets_Bs).backward()
            if dist.get_world_size() > 1:
                average_gradients(model, group)
            optimizer.step()
    return held.peak_bytes


# On two ranks a ring holds keys of fewer ranks: the shapes with most keys are enough.
@pytest.mark.parametrize(("size", "names"), [(2, ["attention", "weights"]), (4, [*SHAPES])])
def test_predicted_peak_is_the_measured_one(size: int, names: list[str]) -> None:
    def run() -> dict[tuple[str, str], int]:
        return {
            (name, way): peak_of_a_step(SHAPES[name], SHAPES[name].seq, way)
            for name in names
            for way in METHODS
        }

    results = ranks.run(run, size, device="cpu")  # as predicted: a GPU's attention keeps others
    for name, way in results[0]:
        config, peaks = SHAPES[name], [found[name, way] for found in results]
        layout = Layout(cp=size)
        moments = predict_context_moments(config, layout, config.seq, way, "fp32", "cpu")
        predicted = max(moments.values())
        # Ranks may differ: zig-zag, those with early tokens have more to hold when they compute the
        # last turn. Within 5 %, the course's promise for peaks, here and in `memory`.
        assert min(peaks) > 0.95 * predicted, (name, way, peaks, moments)
        # gloo's threads may hold the tensors of a finished collective until they wake up again.
        late = 0
        if way == "ulysses":  # gradients of results, queries, keys, values, in and out
            late = 4 * config.seq // size * 2 * (4 * config.hidden)
        if predicted == moments.get("average"):  # at the start of the optimizer's step
            late += moments["step"] - 4 * 4 * memory.count_parameters(config)
        assert max(peaks) < 1.05 * predicted + late, (name, way, peaks, moments)
        if not late:
            assert max(peaks) == pytest.approx(predicted, rel=0.03), (name, peaks, moments)


def test_what_fits_does_fit_and_nothing_longer() -> None:
    config, choices = SHAPES["deep"], {"precision": "fp32", "device": "cpu"}
    budget = 6 * 10**6

    def run(lengths: tuple[int, ...]) -> list[int]:
        return [peak_of_a_step(config, seq, "ring") for seq in lengths]

    seq = find_max_context(config, budget, Layout(cp=4), **choices)
    lengths = seq, seq + seq // 8 // 8 * 8
    peaks = [max(pair) for pair in zip(*ranks.run(run, 4, lengths, device="cpu"), strict=True)]
    # Activations grow by 1/8 and dominate: 5 % of the model's accuracy lie between.
    assert peaks[0] <= 1.01 * budget < peaks[1], (seq, peaks)


# ------------------------------------------------------------------------------- by arithmetic


def test_what_divides_activations_makes_room() -> None:
    def fit(way: str = "ring", **more: Any) -> int:
        return find_max_context(LLAMA, 80 * 10**9, Layout(tp=8, **more), way)

    alone, along = fit(), fit(sequence_parallel=True)
    assert 1.5 * alone < along  # norms and dropouts of all tokens dominated
    assert along < fit(sequence_parallel=True, recompute="full")
    assert 2 * along < fit(sequence_parallel=True, cp=4)
    # Fewer key/value heads than ranks: all-to-all attention replicates them.
    assert fit(cp=4, way="ulysses") < fit(cp=4)
