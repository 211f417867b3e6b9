"""The plain GPT: its sizes, its arithmetic, its bad input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardlab import text
from shardlab.model import GPT, PRESETS, Config, loss, parameter_count, rotate


@pytest.mark.parametrize(
    ("name", "published"),
    [
        # Llama 3 (arXiv 2407.21783, Table 3) says 8B, 70B, 405B; these are the released models'.
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3-405b", 405_853_388_800),
    ],
)
def test_published_parameter_counts(name: str, published: int):
    assert parameter_count(PRESETS[name]) == published


def test_gpt_counts_differ_by_the_learned_positions_alone():
    # GPT-2 small has 124,439,808 parameters, of which 1024 x 768 are positions that rotary ones
    # replace. The same for GPT-3: 174.6 billion, printed as 175B.
    assert parameter_count(PRESETS["gpt-2"]) == 124_439_808 - 1024 * 768
    assert round(parameter_count(PRESETS["gpt-3-175b"]) / 1e9) == 175


def test_counting_a_large_model_takes_no_memory():
    with torch.device("meta"):
        model = GPT(PRESETS["llama-3-405b"])
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_count_by_hand():
    config = Config(vocab=10, hidden=8, heads=2, layers=3, kv_heads=1, mlp="swiglu", norm="rms")
    block = (8 * 8 + 8) + 2 * (8 * 4 + 4) + (8 * 8 + 8) + 2 * (8 * 32 + 32) + (32 * 8 + 8) + 2 * 8
    assert parameter_count(config) == 10 * 8 + 3 * block + 8


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_shapes_and_causality(mlp: str, norm: str, kv_heads: int | None):
    torch.manual_seed(0)
    config = Config(seq=16, layers=2, hidden=32, mlp=mlp, norm=norm, kv_heads=kv_heads)
    model = GPT(config)
    tokens_BS = torch.randint(256, (2, 16))
    logits_BSV = model(tokens_BS)
    assert logits_BSV.shape == (2, 16, 256)
    changed_BS = tokens_BS.clone()
    changed_BS[:, 10] += 1
    changed_BS %= 256
    # What comes before position 10 does not see it; what comes after does.
    after_BSV = model(changed_BS)
    assert torch.equal(after_BSV[:, :10], logits_BSV[:, :10])
    assert not torch.allclose(after_BSV[:, 10:], logits_BSV[:, 10:])


def test_grouped_queries_equal_repeated_keys_and_values():
    torch.manual_seed(0)
    grouped = GPT(Config(seq=8, layers=1, hidden=32, heads=4, kv_heads=2)).eval()
    plain = GPT(Config(seq=8, layers=1, hidden=32, heads=4)).eval()
    state = grouped.state_dict()
    for name in ("key", "value"):
        for kind in ("weight", "bias"):
            entry = f"blocks.0.attention.{name}.{kind}"
            heads = state[entry].unflatten(0, (2, 8))
            state[entry] = heads.repeat_interleave(2, 0).flatten(0, 1)
    plain.load_state_dict(state)
    tokens_BS = torch.randint(256, (2, 8))
    # 1e-6: the two attention kernels add up in different orders; logits are of order 0.1.
    torch.testing.assert_close(grouped(tokens_BS), plain(tokens_BS), rtol=0, atol=1e-6)


def test_rotary_products_depend_on_distance_alone():
    torch.manual_seed(0)
    q_D, k_D = torch.randn(2, 16)
    q_SD = rotate(q_D.expand(1, 1, 20, 16), 10_000.0)[0, 0]
    k_SD = rotate(k_D.expand(1, 1, 20, 16), 10_000.0)[0, 0]
    products = q_SD @ k_SD.T  # [S, D] @ [D, S]
    for distance in (0, 3, 7):
        diagonal = products.diagonal(-distance)
        # 1e-5: angles up to 20 radians lose a digit in float32.
        assert (diagonal - diagonal[0]).abs().max() < 1e-5
    assert torch.allclose(q_SD.norm(dim=-1), q_D.norm().expand(20))


def test_tied_embeddings_are_one_parameter():
    tied, untied = GPT(Config(tied=True)), GPT(Config(tied=False))
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight


def test_it_learns_real_text():
    torch.manual_seed(0)
    model = GPT(PRESETS["nano"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(30):
        tokens_BS, targets_BS = text.batch(64, 8, start=8 * step)
        value = loss(model(tokens_BS), targets_BS)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    assert losses[0] == pytest.approx(5.55, abs=0.1)  # ln(256): it knows nothing yet
    assert losses[-1] < 3.7  # bytes of text are far from even


def test_the_sum_of_losses_is_the_mean_times_the_tokens():
    logits_BSV, targets_BS = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    total, mean = loss(logits_BSV, targets_BS, "sum"), loss(logits_BSV, targets_BS)
    torch.testing.assert_close(total, mean * 10)


def test_dropout_acts_in_training_alone():
    model = GPT(Config(layers=1, dropout=0.5))
    tokens_BS = torch.randint(256, (1, 8))
    assert not torch.equal(model(tokens_BS), model(tokens_BS))
    model.eval()
    assert torch.equal(model(tokens_BS), model(tokens_BS))


def test_the_model_knows_nothing_of_parallelism(root):
    source = (root / "code/shardlab/model.py").read_text()
    assert "distributed" not in source and "import shardlab" not in source
    assert source.count("\n") < 200
    assert isinstance(GPT(PRESETS["nano"]), nn.Module)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 0}, "layers=0: allowed are whole numbers above 0"),
        ({"heads": 0}, "heads=0: allowed are whole numbers above 0"),
        ({"vocab": -1}, "vocab=-1: allowed are whole numbers above 0"),
        ({"hidden": 30}, "hidden=30: allowed are multiples of 8"),
        ({"kv_heads": 3}, "kv_heads=3: allowed are divisors of 4"),
        ({"kv_heads": 0}, "key_value_heads=0: allowed are whole numbers above 0"),
        ({"mlp": "relu"}, "mlp='relu'.*allowed are 'gelu'"),
        ({"norm": "batch"}, "norm='batch'.*allowed are"),
    ],
)
def test_bad_shapes(wrong: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        Config(**wrong)


def test_the_loss_widens_logits_of_16_bits() -> None:
    logits, targets = torch.randn(1, 4, 256).bfloat16(), torch.arange(4)[None]
    assert loss(logits, targets).dtype == torch.float32
    assert loss(logits, targets) == loss(logits.float(), targets)
    assert loss(logits.double(), targets).dtype == torch.float64  # and narrows nothing
