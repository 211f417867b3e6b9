"""The plain GPT: its sizes, its arithmetic, its bad input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardlab.gpt.model import GPT, PRESETS, Config, Experts, count_parameters, loss
from shardlab.gpt.router import drop_overflow

SMALL = Config(vocab=32, seq=12, layers=3, hidden=16, heads=2, mlp="swiglu", experts=4)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        # Llama 3 (arXiv 2407.21783, Table 3) says 8B, 70B, 405B; these are the released models'.
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3-405b", 405_853_388_800),
    ],
)
def test_published_parameter_counts(name: str, published: int):
    assert count_parameters(PRESETS[name]) == published


def test_gpt_counts_differ_by_the_learned_positions_alone():
    # GPT-2 small has 124,439,808 parameters, of which 1024 x 768 are positions that rotary ones
    # replace. The same for GPT-3: 174.6 billion, printed as 175B.
    assert count_parameters(PRESETS["gpt-2"]) == 124_439_808 - 1024 * 768
    assert round(count_parameters(PRESETS["gpt-3-175b"]) / 1e9) == 175


@pytest.mark.parametrize("choices", [{}, {"mlp": "swiglu", "norm": "rms", "kv_heads": 2}])
def test_shapes_and_causality(choices: dict):
    torch.manual_seed(0)
    model = GPT(Config(seq=16, layers=2, hidden=32, **choices))
    tokens_BS = torch.randint(256, (2, 16))
    logits_BSV = model(tokens_BS)
    assert logits_BSV.shape == (2, 16, 256)
    changed_BS = tokens_BS.clone()
    changed_BS[:, 10] = (changed_BS[:, 10] + 1) % 256
    # Positions before 10 do not depend on it; later positions do.
    after_BSV = model(changed_BS)
    assert torch.equal(after_BSV[:, :10], logits_BSV[:, :10])
    assert not torch.allclose(after_BSV[:, 10:], logits_BSV[:, 10:])


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("chosen", "shared"), [(1, 0), (2, 1)])
def test_a_token_gets_the_weighted_outputs_of_its_best_experts(router, chosen, shared):
    torch.manual_seed(0)
    layer = Experts(
        replace(SMALL, router=router, experts_per_token=chosen, shared_experts=shared)
    ).double()
    layer.router.bias_E.copy_(torch.tensor([0.2, 0.0, -0.1, 0.05]))
    x_BSH = torch.randn(2, 5, 16, dtype=torch.float64)
    y_BSH = layer(x_BSH)
    for x_H, y_H in zip(x_BSH.flatten(0, 1), y_BSH.flatten(0, 1), strict=True):
        logits_E = layer.router.score.weight @ x_H
        scores_E = (
            logits_E.sigmoid() if router == "sigmoid" else logits_E.exp() / logits_E.exp().sum()
        )
        best = sorted(range(4), key=lambda e: -(scores_E + layer.router.bias_E)[e])[:chosen]
        total = sum(scores_E[e] for e in best) if chosen > 1 else 1
        want_H = sum(scores_E[e] / total * layer.experts[e](x_H) for e in best)
        if shared:
            want_H = want_H + layer.shared(x_H)
        torch.testing.assert_close(y_H, want_H, rtol=0, atol=1e-13)  # 2 * 80 terms * 2^-53 of 5


def test_a_full_expert_leaves_out_last_choices_and_last_tokens():
    # Tokens choose (first, second). Expert 0 is first choice of tokens 0, 2, 3, second of 1.
    chosen_BSC = torch.tensor([[[0, 1], [1, 0], [0, 2], [0, 1]]])
    assert drop_overflow(chosen_BSC, 3, 4).equal(chosen_BSC)
    kept = drop_overflow(chosen_BSC, 3, 2)
    assert kept.tolist() == [[[0, 1], [1, -1], [0, 2], [-1, -1]]]
    assert drop_overflow(chosen_BSC.expand(3, -1, -1), 3, 2).equal(
        kept.expand(3, -1, -1)
    )  # by sequence


def test_without_a_capacity_no_token_sees_a_later_one():
    torch.manual_seed(0)
    tokens_BS = torch.randint(32, (2, 12))
    changed_BS = tokens_BS.clone()
    changed_BS[:, 7:] = (changed_BS[:, 7:] + 5) % 32
    for capacity, seen in ((None, False), (0.5, True)):  # first choices displace second ones
        model = GPT(replace(SMALL, capacity=capacity)).double()
        apart_BSV = model(tokens_BS) - model(changed_BS)
        assert bool(apart_BSV[:, :7].abs().max() > 1e-6) is seen


def test_the_loss_widens_logits_of_16_bits() -> None:
    logits, targets = torch.randn(1, 4, 256).bfloat16(), torch.arange(4)[None]
    assert loss(logits, targets).dtype == torch.float32
    assert loss(logits, targets) == loss(logits.float(), targets)
    assert loss(logits.double(), targets).dtype == torch.float64  # float64 stays
