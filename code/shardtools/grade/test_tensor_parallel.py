"""Part 3: linear layers and a loss whose weights are split over ranks."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab.measure import count

from .core import TWO_GROUPS, Case, Part, Traffic, check_values, get_gradients

TOKENS = 6
NO_GRADIENT = "an input that wants no gradient"
PART = Part(
    "tensor_parallel",
    visible=(
        (2, ()),
        (3, ("no biases",)),
        (2, ("an input of three dimensions",)),
        (4, ("targets to ignore",)),
    ),
    hidden=(
        (TWO_GROUPS,),
        ("frozen layers",),
        (NO_GRADIENT,),
        (NO_GRADIENT, "frozen layers"),
        ("large logits", "targets to ignore"),
        ("layers that are used twice", "an input of three dimensions"),
        ("a transposed input",),
        ("float32", "an input of three dimensions"),
        ("sizes that n does not divide", "no biases"),
        (TWO_GROUPS, "targets to ignore", "layers that are used twice"),
    ),
    extra=("no biases", "frozen layers", "targets to ignore", "a transposed input"),
)


def draw_sizes(case: Case) -> tuple[int, int, int]:
    """Return the model's width, that inside of the block, and the vocabulary."""
    random, n = case.make_rng("sizes"), case.size
    return random.randint(9, 15), n * random.randint(4, 7), n * random.randint(30, 40)


def make_layers(case: Case, copy: int) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    """Return the whole layers into the block, out of it, and to the logits."""
    width, inside, vocab = draw_sizes(case)
    made = []
    for i, shape in enumerate(((width, inside), (inside, width), (width, vocab))):
        layer = nn.Linear(*shape, bias=not case.has_trait("no biases"), dtype=case.dtype)
        for name, p in layer.named_parameters():
            p.data.copy_(case.draw_normal(*p.shape, key=(copy, i, name)) / 3)
        made.append(layer.requires_grad_(not (case.has_trait("frozen layers") and i < 2)))
    if case.has_trait("large logits"):
        made[2].weight.data.mul_(3e3)
    return tuple(made)


def draw_batch(case: Case, copy: int) -> tuple[Tensor, Tensor]:
    """Return input and targets, the same on all ranks."""
    width, _, vocab = draw_sizes(case)
    shape = (2, TOKENS // 2) if case.has_trait("an input of three dimensions") else (TOKENS,)
    x = case.draw_normal(*shape, width, key=(copy, "x"))
    if case.has_trait("a transposed input"):
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    random = case.make_rng(copy, "targets")
    targets = torch.tensor([random.randrange(vocab) for _ in range(TOKENS)])
    targets[0], targets[1], targets[4] = 0, vocab - 1, vocab // case.size
    if case.has_trait("targets to ignore"):
        targets[2:4] = -100
    return x.requires_grad_(not case.has_trait(NO_GRADIENT)), targets


def check_engine(engine: ModuleType, case: Case, copy: int, group: dist.ProcessGroup) -> None:
    """Run a block and a loss, forward and backward, beside the whole layers."""
    n, again = case.size, case.has_trait("layers that are used twice")
    whole, (x, targets) = make_layers(case, copy), draw_batch(case, copy)
    kinds = engine.ColumnLinear, engine.RowLinear, engine.ColumnLinear
    layers = [kind(layer, group) for kind, layer in zip(kinds, whole, strict=True)]
    traffic = Traffic(group)

    with count.record_traffic() as forward:
        inside = layers[0](x)
    silent = not forward.calls and not forward.messages
    assert silent, "sends something in the forward of ColumnLinear"
    with count.record_traffic() as sent:
        y = layers[1](torch.tanh(inside))
        if again:
            y = layers[1](torch.tanh(layers[0](y + x)))
        loss = engine.cross_entropy(layers[2]((x + y).flatten(0, -2)), targets, group)
    with count.record_traffic() as back:
        (3 * loss).backward()
    traffic.add_sent(sent)
    traffic.add_sent(back)

    first, second, last = whole
    right_x = draw_batch(case, copy)[0]
    right_inside = first(right_x)
    right_y = second(torch.tanh(right_inside))
    if again:
        right_y = second(torch.tanh(first(right_y + right_x)))
    right_loss = F.cross_entropy(last((right_x + right_y).flatten(0, -2)), targets)
    (3 * right_loss).backward()

    def take_part(tensor: Tensor | None, dim: int) -> Tensor | None:
        return None if tensor is None else tensor.chunk(n, dim)[group.rank()]

    names = "ColumnLinear's output", "RowLinear's output", "the loss", "the input, after all"
    want = take_part(right_inside, -1), right_y, right_loss, right_x
    got = dict(zip(names, (inside, y, loss, x), strict=True))
    check_values("wrong:", got, dict(zip(names, want, strict=True)), case)
    check_values("the gradient of", get_gradients(input=x), get_gradients(input=right_x), case)
    for name, layer, right in zip(("first", "second", "last"), layers, whole, strict=True):
        found = dict(layer.named_parameters())
        assert set(found) <= {"weight", "bias"}, f"has the parameters {', '.join(found)}"
        grads = {key: p.grad for key, p in right.named_parameters()}
        for key in grads:
            if right is not second or key == "weight":
                grads[key] = take_part(grads[key], 1 if right is second else 0)
        check_values(f"the gradient of the {name} layer's", get_gradients(**found), grads, case)
    if case.has_trait("sizes that n does not divide"):  # 25 is divided by neither 2, 3 nor 4
        for kind, linear in zip(kinds[:2], (nn.Linear(4, 25), nn.Linear(25, 4)), strict=True):
            try:
                kind(linear, group)
            except ValueError:
                continue
            raise AssertionError(f"takes {linear} on {n} ranks, without a ValueError")

    output = TOKENS * draw_sizes(case)[0] * case.dtype.itemsize
    back = 2 + again - case.has_trait(NO_GRADIENT)
    if case.has_trait("frozen layers") and case.has_trait(NO_GRADIENT):
        back = 0
    reduced = 1 + again + back
    size = 2 * (n - 1) / n * (output + 8 * n) * reduced
    traffic.check_limits(size + 4 * 8 * (n - 1) * TOKENS, 2 * reduced + 5)


def test_tensor_parallel(on_ranks):
    """Compute as whole layers and a whole loss, forward and backward."""
    on_ranks(check_engine)
