"""Part 3: linear layers and a loss that are cut."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab.measure import count

from .core import FLOAT32, TWO_GROUPS, Budget, Case, Part, Seen, Values, note

NO_BIAS = "no biases"
FROZEN = "frozen layers"
NO_GRADIENT = "an input that wants no gradient"
IGNORED = "targets to ignore"
LARGE = "large logits"
SEQUENCES = "an input of three dimensions"
TRANSPOSED = "a transposed input"
AGAIN = "layers that are used twice"
UNEVEN = "sizes that n does not divide"


class Sizes:
    """Of a case: tokens, the model's width, that inside, the vocabulary."""

    def __init__(self, case: Case) -> None:
        random, n = case.random("sizes"), case.size
        self.tokens, self.width = 6, random.randint(9, 15)
        self.inside, self.vocab = n * random.randint(4, 7), n * random.randint(30, 40)


def layers(case: Case, copy: int) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    """Into the block, out of it, and to the logits: whole."""
    s, bias = Sizes(case), not case.has(NO_BIAS)
    made = (
        nn.Linear(s.width, s.inside, bias=bias, dtype=case.dtype),
        nn.Linear(s.inside, s.width, bias=bias, dtype=case.dtype),
        nn.Linear(s.width, s.vocab, bias=bias, dtype=case.dtype),
    )
    with torch.no_grad():
        for i, layer in enumerate(made):
            for name, p in layer.named_parameters():
                p.copy_(case.normal(*p.shape, key=(copy, i, name)) / 3)
            layer.requires_grad_(not (case.has(FROZEN) and i < 2))
        if case.has(LARGE):
            made[2].weight.mul_(3e3)
    return made


def data(case: Case, copy: int) -> tuple[Tensor, Tensor]:
    """Input and targets, the same on all ranks."""
    s = Sizes(case)
    shape = (2, s.tokens // 2) if case.has(SEQUENCES) else (s.tokens,)
    x = case.normal(*shape, s.width, key=(copy, "x"))
    if case.has(TRANSPOSED):
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    random = case.random(copy, "targets")
    targets = torch.tensor([random.randrange(s.vocab) for _ in range(s.tokens)])
    targets[0], targets[1], targets[4] = 0, s.vocab - 1, s.vocab // case.size
    if case.has(IGNORED):
        targets[2:4] = -100
    return x.requires_grad_(not case.has(NO_GRADIENT)), targets


def work(engine: ModuleType, case: Case, copy: int, group: dist.ProcessGroup) -> Seen:
    """A block and a loss, forward and backward."""
    whole = layers(case, copy)
    x, targets = data(case, copy)
    cut: list[nn.Module] = [
        engine.ColumnLinear(whole[0], group),
        engine.RowLinear(whole[1], group),
        engine.ColumnLinear(whole[2], group),
    ]
    seen = Seen({})
    with count.sent() as forward:
        inside = cut[0](x)
    seen.values["the output of ColumnLinear"] = inside.detach().clone()
    if forward.calls or forward.messages:
        seen.wrong = "sends something in the forward of ColumnLinear"
    with count.sent() as sent:
        y = cut[1](torch.tanh(inside))
        if case.has(AGAIN):
            y = cut[1](torch.tanh(cut[0](y + x)))
        seen.values["the output of RowLinear"] = y.detach().clone()
        logits = cut[2]((x + y).flatten(0, -2))
        loss = engine.cross_entropy(logits, targets, group)
    seen.values["the loss"] = loss.detach().clone()
    loss_calls = sum(sent.calls.values())
    with count.sent() as back:
        (3 * loss).backward()
    seen.values["the gradient of the input"] = x.grad
    for name, layer in zip(("first", "second", "last"), cut, strict=True):
        for of in ("weight", "bias"):
            p = getattr(layer, of)
            seen.values[f"the gradient of the {name} layer's {of}"] = None if p is None else p.grad
    seen.values["the input, after all"] = x.detach()
    if {name for layer in cut for name, _ in layer.named_parameters()} - {"weight", "bias"}:
        seen.wrong = seen.wrong or "has other parameters than weight and bias"
    if not loss_calls:
        seen.wrong = seen.wrong or "has a loss for which nothing was sent"
    note(seen, sent, group)
    note(seen, back, group)
    if case.has(UNEVEN):
        seen.wrong = seen.wrong or _refuses(engine, group)
    return seen


def _refuses(engine: ModuleType, group: dist.ProcessGroup) -> str:
    """25 outputs or inputs are divided by no number of ranks here."""
    for kind, linear in (("ColumnLinear", nn.Linear(4, 25)), ("RowLinear", nn.Linear(25, 4))):
        try:
            getattr(engine, kind)(linear, group)
        except ValueError:
            continue
        return f"takes {linear} as a {kind} of {group.size()} ranks, without a ValueError"
    return ""


def right(case: Case, copy: int) -> list[Values]:
    """The whole layers, and of each gradient the part that a rank has."""
    first, second, last = layers(case, copy)
    x, targets = data(case, copy)
    inside = first(x)
    y = second(torch.tanh(inside))
    if case.has(AGAIN):
        y = second(torch.tanh(first(y + x)))
    logits = last((x + y).flatten(0, -2))
    loss = F.cross_entropy(logits, targets)
    (3 * loss).backward()
    found = []
    for rank in range(case.size):

        def part(tensor: Tensor | None, dim: int, rank: int = rank) -> Tensor | None:
            return None if tensor is None else tensor.chunk(case.size, dim)[rank]

        values: Values = {
            "the output of ColumnLinear": part(inside.detach(), -1),
            "the output of RowLinear": y.detach(),
            "the loss": loss.detach(),
            "the gradient of the input": x.grad,
            "the input, after all": x.detach(),
        }
        for name, layer in (("first", first), ("second", second), ("last", last)):
            bias = None if layer.bias is None else layer.bias.grad
            dim = 1 if layer is second else 0
            of = f"the gradient of the {name} layer's"
            values[f"{of} weight"] = part(layer.weight.grad, dim)
            values[f"{of} bias"] = bias if layer is second else part(bias, 0)
        found.append(values)
    return found


def budget(case: Case, copy: int, rank: int) -> Budget:
    """All-reduces of the layers' outputs and input gradients, some numbers a token."""
    s, n = Sizes(case), case.size
    one = s.tokens * s.width * case.dtype.itemsize
    uses = 2 if case.has(AGAIN) else 1
    trained = not (case.has(FROZEN) and case.has(NO_GRADIENT))
    back = (uses - case.has(NO_GRADIENT) + 1) if trained else 0
    reduced = uses + back
    size = 2 * (n - 1) / n * (one + 8 * n) * reduced
    return Budget(size + 4 * 8 * (n - 1) * s.tokens, 2 * reduced + 5)


PART = Part(
    "tensor_parallel",
    ("ColumnLinear", "RowLinear", "cross_entropy"),
    visible=((2, ()), (3, (NO_BIAS,)), (2, (SEQUENCES,)), (4, (IGNORED,))),
    hidden=(
        (TWO_GROUPS,),
        (FROZEN,),
        (NO_GRADIENT,),
        (NO_GRADIENT, FROZEN),
        (LARGE, IGNORED),
        (AGAIN, SEQUENCES),
        (TRANSPOSED,),
        (FLOAT32, SEQUENCES),
        (UNEVEN, NO_BIAS),
        (TWO_GROUPS, IGNORED, AGAIN),
    ),
    extra=(NO_BIAS, FROZEN, SEQUENCES, IGNORED, TRANSPOSED),
    work=work,
    right=right,
    budget=budget,
)
