"""The checks of lesson `pipeline`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab import pipeline, ranks
from shardlab.check import Wrong, exercise, number, run_answer, same

_TIMEOUT = 10.0  # seconds, for what takes milliseconds: who waits that long waits for ever


def _ask(answer: Callable[..., Any], name: str, *args: Any) -> Any:
    """What the reader's function returns."""
    try:
        return answer(*args)
    except Exception as error:
        call = f"{name}({', '.join(map(repr, args))})"
        raise Wrong(f"{call} raised {type(error).__name__}: {error}") from None


def _cases(answer: Callable[..., Any], name: str, cases: Sequence[tuple[Any, Any, str]]) -> None:
    """Wrong for the first of `cases`, (arguments, right answer, sentence that helps), that fails.

    Their order is such that a well-known mistake fails first where the sentence is about it.
    """
    for args, want, words in cases:
        got = _ask(answer, name, *args)
        if got is None and args is cases[0][0]:
            raise Wrong(f"{name} returned None; {words[:1].lower()}{words[1:]}")
        if got != want:
            raise Wrong(f"{name}({', '.join(map(repr, args))}) returned {got!r}. {words}")


def _orders(name: str, p: int, m: int) -> list[list[str]]:
    made = pipeline.schedule(name, p, m).orders
    return [[str(action) for action in order] for order in made]


@exercise("pipeline_bubble")
def _pipeline_bubble(answer: Any) -> str:
    p, m = 8, 32
    right = (p - 1) / (m + p - 1)
    hints = {
        1 - right: "That is the share of the time in which a stage works.",
        (p - 1) / m: "That is idle time beside working time; the whole step is both together.",
        p / (m + p - 1): "Nearly: how many stages come before the last one's first forward?",
        (p - 1) / (m + p): "Nearly: how many slots take all forwards, over all stages?",
        (p - 1) / p: "That is the share without micro-batches.",
        1 / p: "That is the share of the time in which a stage works, without micro-batches.",
        2 * right: "Twice too much: forward and backward both have idle slots and working ones.",
        100 * right: "In percent it is right; the answer is asked for between 0 and 1.",
    }
    number(answer, right, rel=0.005, hints=hints)
    return f"Right: {p - 1} idle slots of {m + p - 1}, 17.9 %, forward as well as backward."


# Stages, micro-batches and chunks. The first tells the mistakes apart.
_TRIPLES = ((4, 8, 2), (2, 4, 3), (4, 4, 2), (3, 9, 1), (1, 3, 2), (2, 2, 4))
_HOW_INTERLEAVED = {
    "That is 1F1B's number of forwards ahead; here the first backward comes after all of a "
    "stage's chunks.": lambda s, p, m, v: _interleaved(p, m, v, p - 1 - s),
    "The forwards ahead are counted from the wrong end: the first stage runs the most.": (
        lambda s, p, m, v: _interleaved(p, m, v, 2 * s + (v - 1) * p)
    ),
    "All forwards come first: how many does a stage run ahead?": (
        lambda s, p, m, v: _interleaved(p, m, v, m * v)
    ),
    "Backward begins with the last chunk: it is the first whose gradient is there.": (
        lambda s, p, m, v: _interleaved(p, m, v, 2 * (p - 1 - s) + (v - 1) * p, down=False)
    ),
    "A group has as many micro-batches as there are stages; these go through a chunk all at "
    "once.": lambda s, p, m, v: _interleaved(p, m, v, 2 * (p - 1 - s) + (v - 1) * p, group=m),
    "Micro-batches go in groups: a chunk takes as many as there are stages, one after another, "
    "before the next chunk begins.": (
        lambda s, p, m, v: _interleaved(p, m, v, 2 * (p - 1 - s) + (v - 1) * p, group=1)
    ),
}


def _interleaved(
    p: int, m: int, v: int, ahead: int, down: bool = True, group: int | None = None
) -> list[str]:
    """A stage's order with so many forwards ahead, and groups of p or of `group`."""
    size = group or p
    forwards, backwards = [], []
    for first in range(0, m, size):
        them = range(first, min(m, first + size))
        forwards += [f"F{i}.{c}" for c in range(v) for i in them]
        chunks = reversed(range(v)) if down else range(v)
        backwards += [f"B{i}.{c}" for c in chunks for i in them]
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for i in range(len(forwards) - ahead):
        order += [forwards[ahead + i], backwards[i]]
    return order + backwards[len(forwards) - ahead :]


def _flaw(order: Sequence[str], m: int, v: int) -> str:
    """What is wrong with an order on its own, in a sentence; "" if nothing is."""
    want = [f"{kind}{i}.{c}" for kind in "FB" for c in range(v) for i in range(m)]
    strange = [action for action in order if action not in want]
    missing = [action for action in want if action not in order]
    if any("." not in action for action in order):
        return "an action has a micro-batch and a chunk, such as 'F5.1'."
    if strange:
        which = f"micro-batches 0 to {m - 1} and chunks 0 to {v - 1}"
        return f"{strange[0]!r} is no pass of {which}."
    if missing:
        return f"{missing[0]} is missing."
    if len(order) > len(want):
        return "something is there more than once."
    early = [a for a in want[: m * v] if order.index(f"B{a[1:]}") < order.index(a)]
    return f"B{early[0][1:]} stands before {early[0]}." if early else ""


@exercise("my_interleaved")
def _my_interleaved(answer: Callable[[int, int, int, int], Any]) -> str:
    for p, m, v in _TRIPLES:
        want = [
            [f"{a.kind}{a.microbatch}.{a.chunk}" for a in order]
            for order in pipeline.interleaved(p, m, v).orders
        ]
        got = [_ask(answer, "my_interleaved", stage, p, m, v) for stage in range(p)]
        for stage, order in enumerate(got):
            asked = f"my_interleaved({stage}, {p}, {m}, {v})"
            if not isinstance(order, list) or not all(isinstance(a, str) for a in order):
                raise Wrong(f'{asked} returned {order!r}; it should be a list such as ["F0.0", …].')
            if got == want:
                continue
            for words, made in _HOW_INTERLEAVED.items():
                if got == [made(s, p, m, v) for s in range(p)]:
                    raise Wrong(words)
            if flaw := _flaw(order, m, v):
                raise Wrong(f"In {asked}, {flaw}")
            for action, right in zip(order, want[stage], strict=True):
                if action != right:
                    words = "comes at the wrong time. Which group and which chunk is next, and how"
                    raise Wrong(f"{asked}: {action} {words} many forwards run ahead?")
    return f"Right on every stage, for {len(_TRIPLES)} cases of stages, micro-batches and chunks."


@exercise("my_live")
def _my_live(answer: Callable[[list[str]], Any]) -> str:
    back = "A backward gives activations back; asked for is the most that is there at any time."
    cases = (
        ("F0 F1 F2 B0 B1 B2", 3, "Asked for is the most at any time, a number of micro-batches."),
        ("F0 B0 F1 B1 F2 B2", 1, back),
        ("F0 F1 F2 B0 F3 B1 B2 B3", 3, back),
        ("F0 I0 F1 I1 W0 W1", 2, "W needs activations, too, so that I does not end them."),
        ("F0 I0 W0 F1 I1 W1", 1, "Where backward is split there is no B. What ends them then?"),
        *((" ".join(order), 4 - s, back) for s, order in enumerate(_orders("1f1b", 4, 12))),
        *((" ".join(order), 4, back) for order in _orders("zb-h1", 4, 12)),
    )
    _cases(answer, "my_live", [((order.split(),), most, words) for order, most, words in cases])
    return f"Right for {len(cases)} orders, with whole backwards and with split ones."


_COSTS: tuple[tuple[list[float], int], ...] = (
    ([2, 2, 2, 1, 1, 1, 1, 4], 4),  # tells the mistakes apart
    ([2, 1, 1, 1, 1, 1, 1, 1, 1, 5], 4),
    ([1, 2, 3, 4, 5, 6, 7, 8], 3),
    ([5, 4, 3, 2, 1], 5),
    ([7, 3], 1),
    ([4, 1, 3, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], 6),
)


def _slowest(costs: list[float], layers: Sequence[int]) -> float:
    ends = [sum(layers[:i]) for i in range(len(layers) + 1)]
    return max(sum(costs[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True))


@exercise("my_balance")
def _my_balance(answer: Callable[[list[float], int], Any]) -> str:
    for costs, parts in _COSTS:
        got = _ask(answer, "my_balance", list(costs), parts)
        words = f"my_balance({costs}, {parts}) returned {got!r}"
        if not isinstance(got, (list, tuple)) or not all(type(n) is int for n in got):
            raise Wrong(f"{words}; it should be a list of numbers of layers.")
        if len(got) != parts or sum(got) != len(costs):
            raise Wrong(f"{words}; it should be {parts} numbers, {len(costs)} layers in all.")
        if min(got) < 1:
            raise Wrong(f"{words}: a part without a layer is a stage without work.")
        if _slowest(costs, got) > _slowest(costs, pipeline.balance(costs, parts)):
            words += (
                f". Its slowest part takes {_slowest(costs, got):g}, and there is a better cut."
            )
            if max(got) - min(got) <= 1:
                raise Wrong(f"{words} Layers are counted here; what has to be even is their time.")
            raise Wrong(f"{words} Who fills one part after another does not see what is left over.")
    return f"Right: no part slower than necessary, for {len(_COSTS)} lists of layers."


_RAISED = {
    "'NoneType' object has no attribute": " Is a gradient None? Autograd keeps that of an input "
    "only if requires_grad_() was called before part(x).",
    "only for scalar outputs": " Only the last stage has a loss; the others go backward with the "
    "gradient that comes: output.backward(gradient).",
    "did not come together": " Do two neighbours both send, or both receive? Of the two, one has "
    "to send first and the other to receive first.",
}


def _job(size: int) -> tuple[list[nn.Module], Tensor, Tensor]:
    """A part for each stage, [b, h] to [b, h], and a batch of inputs and targets."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        parts: list[nn.Module] = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(size)]
        return parts, torch.randn(8, 6), torch.randn(8, 6)


def _gradient(part: nn.Module) -> Tensor | None:
    found = [parameter.grad for parameter in part.parameters() if parameter.grad is not None]
    return torch.cat([gradient.flatten() for gradient in found]) if found else None


def _send(tensor: Tensor, peer: int) -> None:
    """Return when stage `peer` has received it: its word comes back."""
    ranks.isend(tensor.detach(), peer).wait()
    ranks.irecv(torch.empty(1, device=tensor.device), peer).wait()


def _receive(like: Tensor, peer: int) -> Tensor:
    tensor = torch.empty_like(like, requires_grad=False)
    ranks.irecv(tensor, peer).wait()
    ranks.isend(torch.ones(1, device=tensor.device), peer).wait()
    return tensor


def _passes(part: nn.Module) -> list[str]:
    """What `part` will do from now on, as a list that fills: "F" and "B"."""
    done: list[str] = []
    part.register_forward_hook(lambda *_: done.append("F"))
    next(part.parameters()).register_hook(lambda gradient: done.append("B"))
    return done


def _step_of_1f1b(answer: Callable[..., Any]) -> list[tuple[Tensor | None, list[str]]]:
    found = []
    stage, stages = dist.get_rank(), dist.get_world_size()
    for m in (8, 4, 1):
        parts, x_BH, y_BH = _job(stages)
        part, device = parts[stage].to(ranks.device()), ranks.device()
        done = _passes(part)
        answer(part, x_BH.to(device), y_BH.to(device), m, stage, stages, _send, _receive)
        found.append((_gradient(part), done))
    return found


def _one_process(size: int, m: int, scale: float, only: int = 0, ones: bool = False) -> Any:
    """Gradients of each part, of the losses times `scale`; `only` from one micro-batch on.

    ones: every part but the last goes backward from ones.
    """
    parts, x_BH, y_BH = _job(size)
    for x, y in list(zip(x_BH.chunk(m), y_BH.chunk(m), strict=True))[only:]:
        for part in parts[:-1]:
            x = part(x.detach() if ones else x)
            if ones:
                x.sum().backward()
        (scale * F.mse_loss(parts[-1](x.detach() if ones else x), y)).backward()
    return [_gradient(part) for part in parts]


@exercise("my_1f1b")
def _my_1f1b(answer: Callable[..., Any]) -> str:
    for size in (2, 4):
        try:
            results = run_answer(_step_of_1f1b, size, answer, timeout=_TIMEOUT)
        except Wrong as wrong:
            words = [words for part, words in _RAISED.items() if part in str(wrong)]
            raise Wrong(f"{wrong}{''.join(words)}") from None
        for i, m in enumerate((8, 4, 1)):
            got = [result[i][0] for result in results]
            for rank, gradient in enumerate(got):
                if gradient is None:
                    raise Wrong(f"The part of rank {rank} has no gradient: it never went backward.")
            whole, last = _one_process(size, m, 1.0), _one_process(size, m, 1 / m, only=m - 1)
            hints = {
                f"Without a division by m, the sum of {m} means is {m} times the mean.": whole,
                "These are the gradients of the last micro-batch alone; they add up.": last,
                "All stages but the last went backward from ones, not from the gradient that the "
                "next one sends.": _one_process(size, m, 1 / m, ones=True),
            }
            # 1e-6: float32, values below 1, eight of them added in some order
            same(got, _one_process(size, m, 1 / m), f"with m = {m}, a gradient", 1e-6, hints)
            for stage, result in enumerate(results):
                _judge_order(result[i][1], stage, size, m)
    return "Right: on 2 and 4 ranks the bits are those of one process, and 1F1B's memory is kept."


def _judge_order(done: list[str], stage: int, stages: int, m: int) -> None:
    """Wrong if a stage kept more micro-batches than 1F1B does."""
    held = most = 0
    for kind in done:
        held += 1 if kind == "F" else -1
        most = max(most, held)
    if most > (room := min(stages - stage, m)):
        words = f"with m = {m} on {stages} stages, stage {stage} held {most} micro-batches"
        like = " That is GPipe: all forwards come first." if most == m else ""
        raise Wrong(f"The gradients are right, but {words}, where {room} will do.{like}")


_CIRCLE = "Forwards wait for the stage before, backwards for the one behind; name all that stand."
# Orders of the stages, who waits where, and what helps whoever says something else.
_DEADLOCKS: tuple[tuple[str, dict[int, str], str], ...] = (
    ("F0 B0 F1 B1", {}, 'It should be a dict, {} or such as {1: "B0"}; one stage never waits.'),
    ("F0 F1 B0 B1 / F0 B0 F1 B1", {}, "All finish: who waits goes on once another has moved."),
    ("F0 F1 B1 B0 / F0 F1 B0 B1", {}, "All finish: orders may differ if none waits in a circle."),
    ("F0 B0 F1 B1 / F0 F1 B0 B1", {0: "B0", 1: "F1"}, _CIRCLE),
    ("F0 B0 F1 B1 / F1 F0 B0 B1", {0: "B0", 1: "F1"}, "All that wait are asked for, and where."),
    ("F0 B0 / B0 F0", {0: "B0", 1: "B0"}, "On the last stage a backward waits for its forward."),
    ("F0 B0 / F0 B0 / B0 F0", {0: "B0", 1: "B0", 2: "B0"}, "All that wait are asked for."),
)


def _diagnoses(answer: Callable[..., Any]) -> str:
    cases: list[Any] = [((_orders(name, 4, 12),), {}, "All finish.") for name in ("naive", "1f1b")]
    for rows, stuck, words in reversed(_DEADLOCKS):
        cases.insert(0, (([row.split() for row in rows.split(" / ")],), stuck, words))
    try:
        _cases(answer, "my_deadlock", cases)
    except Wrong as wrong:
        return str(wrong)
    return ""


@exercise("my_deadlock")
def _my_deadlock(answer: Callable[..., Any]) -> str:
    # In a process of its own: a loop that never ends would hold up the page.
    try:
        wrong = ranks.run(_diagnoses, 1, answer, timeout=_TIMEOUT, device="cpu", show=False)[0]
    except ranks.RankError as error:
        raise Wrong(f"{error} Does the loop end when no stage can go on?") from None
    if wrong:
        raise Wrong(wrong)
    return f"Right for {len(_DEADLOCKS) + 2} schedules, some of which never end."


@exercise("my_microbatches")
def _my_microbatches(answer: Callable[[int, int, float, int], Any]) -> str:
    share = "The bubble is (p-1)/(m+p-1), a share of the whole step."
    held = "1F1B's first stage holds up to p micro-batches, each of batch/m sequences."
    cases = (
        ((4, 64, 0.21, 64), 16, "Asked for is the smallest m that divides the batch and fits."),
        ((4, 60, 0.21, 60), 12, share),
        ((4, 64, 0.21, 8), 32, held),
        ((8, 512, 0.11, 64), 64, held),
        ((8, 4, 0.75, 4), 4, "With fewer micro-batches than stages it holds all, and no more."),
        ((16, 96, 0.1, 96), None, "No m can do it: there are only 96 sequences."),
        ((16, 1536, 0.055, 10), None, "No m can do it: 16 sequences are held if each is alone."),
        ((1, 8, 0.0, 8), 1, "One stage has no bubble."),
    )
    _cases(answer, "my_microbatches", cases)
    return f"Right for {len(cases)} steps, two of which cannot be had."
