"""Lightning's Trainer equals the plain loop, and what it does without being asked."""

from __future__ import annotations

import importlib.util
import logging
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

if importlib.util.find_spec("pytorch_lightning") is None:
    pytest.skip("needs pytorch-lightning", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pytorch_lightning as L

    from shardlab.train import lightning
from shardlab import ranks
from shardlab.model import GPT, PRESETS, loss
from shardlab.text import Windows

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, EPOCH, BATCH = 7, 40, 8  # into the second epoch


def plain():
    """Losses, gradient norms and weights of one process."""
    torch.manual_seed(0)
    model, data, losses, norms = GPT(PRESETS["nano"]), Windows(64), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        order = torch.randperm(EPOCH, generator=torch.Generator().manual_seed(epoch))
        for part in order.split(BATCH):
            tokens, targets = map(torch.stack, zip(*(data[i] for i in part.tolist()), strict=True))
            value = loss(model(tokens), targets)
            optimizer.zero_grad()
            value.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            losses.append(value.item())
            if len(losses) == STEPS:
                return losses, norms, model.state_dict()


@pytest.fixture(scope="module")
def one():
    return ranks.run(plain, 1, device="cpu")[0]


def apart(found, want):
    return max(abs(a - b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize(("strategy", "size"), [("ddp", 2), ("ddp", 4), ("fsdp2", 2)])
def test_it_equals_the_plain_loop(one, strategy, size):
    results = ranks.run(lightning.fit, size, strategy, STEPS, device="cpu")
    losses, norms, weights = results[0]
    assert min(one[1]) > 1  # clipping does something
    assert apart(losses, one[0]) < 1e-5 and apart(norms, one[1]) < 1e-5
    # AdamW moves a weight by up to 1e-3 a step, whatever its gradient: rounding shows magnified.
    assert max((weights[k] - one[2][k]).abs().max() for k in one[2]) < 1e-4
    for _, _, others in results[1:]:
        assert all(torch.equal(weights[k], others[k]) for k in weights)


def test_left_to_itself_it_shards_over_one_rank(one):
    losses, _, _ = ranks.run(lightning.fit, 2, "fsdp2", STEPS, 8, EPOCH, "auto", device="cpu")[0]
    assert apart(losses, one[0]) > 0.05


class Probe(L.LightningModule):
    """Notes what it is given; the gradient of a micro-batch is 1."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.gradients = [], []

    def training_step(self, batch, index):
        self.seen.append(batch[0].tolist())
        self.log("own", batch[0].mean())
        self.log("mean", batch[0].mean(), sync_dist=True)
        return self.weight * 1.0

    def validation_step(self, batch, index):
        self.log("validation", batch[0].mean())
        self.log("validation_mean", batch[0].mean(), sync_dist=True)

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(self.weight.grad.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def probed(items, batch, validated=0, **options):
    """On a rank: what Probe noted, and the metrics, of a Trainer with these options."""
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=lightning.DDP(),
        plugins=[lightning.TheseRanks()],
        num_sanity_val_steps=0,
        **dict.fromkeys(quiet, False),
        **options,
    )
    numbers = [DataLoader(TensorDataset(torch.arange(float(items))), batch)]
    if validated:
        numbers.append(DataLoader(TensorDataset(torch.arange(float(validated))), batch))
    model = Probe()
    trainer.fit(model, *numbers)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return model.seen, model.gradients, metrics


def test_what_it_does_without_being_asked():
    results = ranks.run(lambda: probed(8, 2, validated=5, max_epochs=2), 2, device="cpu")
    (seen, _, metrics), (others, _, theirs) = results
    first = [set(sum(part[:2], [])) for part in (seen, others)]
    assert first[0] | first[1] == set(range(8)) and not first[0] & first[1]  # dealt out
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0)).tolist()
    assert seen[0] == [order[0], order[2]] and seen[0] != seen[2]  # shuffled, anew in each epoch
    assert len(seen[0]) == 2  # the loader's batch size is that of a rank
    assert metrics["own"] != theirs["own"] and metrics["mean"] == theirs["mean"]
    assert metrics["validation_mean"] == pytest.approx(5 / 3)  # of 0 to 4, whose mean is 2


def test_the_last_accumulation_of_an_epoch_is_divided_by_too_much():
    run = lambda: probed(10, 1, max_epochs=1, accumulate_grad_batches=4)  # noqa: E731
    _, gradients, _ = ranks.run(run, 2, device="cpu")[0]
    assert gradients == [1.0, 0.25]  # 5 micro-batches on each rank: four, and one


def test_an_unknown_strategy_is_named():
    with pytest.raises(ValueError, match="strategy='fsdp'"):
        lightning.fit("fsdp", 1)
