"""The checks of lesson `memory`: what readers really get wrong, and the sentence that they see."""

import re

import pytest
import torch

from shardlab import memory
from shardlab.check import check
from shardlab.layout import Layout
from shardlab.model import loss


def said(answer: object, name: str | None = None) -> str:
    """What a wrong answer is told."""
    verdict = check(answer, name)
    assert not verdict.ok
    return verdict.message


NUMBERS = [
    ("state_gigabytes", 3, "the weights in bfloat16 alone"),
    ("state_gigabytes", 6, "The optimizer keeps three float32 numbers"),
    ("state_gigabytes", 27, "gradients in float32"),
    ("state_gigabytes", 24e9 / 2**30, "number of GiB"),
    ("state_gigabytes", 24e9, "the question asks for GB"),
    ("state_gigabytes", 48, "48 GB is too large"),
    ("largest_model", 5.0, "activations need their 20 GB"),
    ("largest_model", 30, "can be loaded, not trained"),
    ("largest_model", 3.333, "gradients in float32"),
    ("largest_model", 2, "2 billion parameters is too small"),
]


@pytest.mark.parametrize(("name", "answer", "words"), NUMBERS)
def test_numbers(name: str, answer: float, words: str) -> None:
    assert words in said(answer, name)


def states_without_master(params, precision, optimizer):
    weight = 4 if precision == "fp32" else 2
    gradient = 2 if precision == "bf16" else 4
    return params * (weight + gradient + {"sgd": 0, "momentum": 4, "adamw": 8}[optimizer])


def states_with_two_masters(params, precision, optimizer):
    return states_without_master(params, precision, optimizer) + 4 * params


def states_with_moments_always(params, precision, optimizer):
    return memory.states(params, precision=precision).total


def states_with_narrow_moments(params, precision, optimizer):
    right = memory.states(params, precision=precision, optimizer=optimizer).total
    return right - (8 if precision == "bf16" and optimizer == "adamw" else 0) * params


STATES = [
    (states_without_master, "Does the optimizer have its float32 copy of the weights?"),
    (states_with_two_masters, "In float32 the weights need no second copy."),
    (states_with_moments_always, "Plain SGD keeps no moments."),
    (states_with_narrow_moments, "Two moments of four bytes each"),
    (lambda *_: "16", "should be a number of bytes, not '16'"),
    (lambda params: 16 * params, "Your function raised TypeError"),
]


@pytest.mark.parametrize(("answer", "words"), STATES)
def test_states(answer, words: str) -> None:
    assert words in said(answer, "my_states_bytes")


def batch_by_sum_of_parts(config, limit):
    batch = 0
    while memory.estimate(config, Layout(micro_batch=batch + 1)).total <= limit:
        batch += 1
    return batch


def batch_one_too_many(config, limit):
    batch = 1
    while memory.estimate(config, Layout(micro_batch=batch)).peak <= limit:
        batch += 1
    return batch


def batch_of_at_least_one(config, limit):
    return max(1, batch_one_too_many(config, limit) - 1)


def batch_without_states(config, limit):
    return limit / memory.activations(config).total


BATCHES = [
    (batch_by_sum_of_parts, "one sequence more would still fit"),
    (batch_one_too_many, "more than there is"),
    (batch_of_at_least_one, "not even the states fit there: the answer is 0"),
    (batch_without_states, "expected is a whole number of sequences"),
]


@pytest.mark.parametrize(("answer", "words"), BATCHES)
def test_batches(answer, words: str) -> None:
    assert words in said(answer, "my_largest_batch")


def evaluate_with_graphs(model, batches):
    losses = [loss(model(x), y) for x, y in batches]
    return sum(losses) / len(losses)


def evaluate_with_activations(model, batches):
    losses = [loss(model(x), y).item() for x, y in batches]
    return sum(losses) / len(losses)


def evaluate_to_the_sum(model, batches):
    with torch.no_grad():
        return sum(loss(model(x), y).item() for x, y in batches)


def evaluate_to_a_list(model, batches):
    with torch.no_grad():
        return [loss(model(x), y).item() for x, y in batches]


EVALUATIONS = [
    (evaluate_with_graphs, "with every batch .* kB more are held"),
    (evaluate_with_activations, "autograd still saves activations"),
    (evaluate_to_the_sum, "That is their sum"),
    (evaluate_to_a_list, "expected is the mean loss"),
]


@pytest.mark.parametrize(("answer", "words"), EVALUATIONS)
def test_evaluations(answer, words: str) -> None:
    assert re.search(words, said(answer, "my_evaluate"))


def evaluate_and_detach(model, batches):
    with torch.inference_mode():
        losses = [loss(model(x), y).detach() for x, y in batches]
    return torch.stack(losses).mean()


def test_another_right_evaluation() -> None:
    assert check(evaluate_and_detach, "my_evaluate").ok


def backward_at_once(model, tokens, targets):
    loss(model(tokens), targets).backward()


def backward_of_means(model, tokens, targets):
    for x, y in zip(tokens.chunk(4), targets.chunk(4), strict=True):
        loss(model(x), y).backward()


def backward_at_the_end(model, tokens, targets):
    pairs = zip(tokens.chunk(4), targets.chunk(4), strict=True)
    (sum(loss(model(x), y) for x, y in pairs) / 4).backward()


def backward_that_steps(model, tokens, targets):
    for x, y in zip(tokens.chunk(4), targets.chunk(4), strict=True):
        model.zero_grad()
        (loss(model(x), y) / 4).backward()


BACKWARDS = [
    (backward_at_once, "MB are enough for two sequences"),
    (backward_at_the_end, "before the next piece's forward begins"),
    (backward_of_means, "about 4 times as long"),
    (backward_that_steps, "The gradient is off by up to"),
    (lambda *_: None, "did a backward run on every piece"),
]


@pytest.mark.parametrize(("answer", "words"), BACKWARDS)
def test_backwards(answer, words: str) -> None:
    assert words in said(answer, "my_backward")


def backward_one_by_one(model, tokens, targets):
    for i in range(8):
        (loss(model(tokens[i : i + 1]), targets[i : i + 1]) / 8).backward()


def test_another_right_backward() -> None:
    assert check(backward_one_by_one, "my_backward").ok


def pieces(config, batch, limit, fits="peak", divide=True, order=("none", "full"), steps=False):
    for recompute in order:
        for piece in range(batch, 0, -1):
            m = 1 if steps else -(-batch // piece)
            needs = memory.estimate(config, Layout(1, 1, 1, 0, piece, m, recompute))
            if (not divide or batch % piece == 0) and getattr(needs, fits) <= limit:
                return piece, recompute
    return None


def pieces_as_steps(config, batch, limit):
    return pieces(config, batch, limit, steps=True)


def pieces_that_do_not_divide(config, batch, limit):
    return pieces(config, batch, limit, divide=False)


def pieces_recomputed_first(config, batch, limit):
    return pieces(config, batch, limit, order=("full", "none"))


def pieces_by_the_sum(config, batch, limit):
    return pieces(config, batch, limit, fits="total")


def pieces_never_recomputed(config, batch, limit):
    return pieces(config, batch, limit, order=("none",))


def pieces_of_one_when_nothing_fits(config, batch, limit):
    return pieces(config, batch, limit) or (1, "full")


PIECES = [
    (pieces_as_steps, "The gradients of earlier pieces are there from the start"),
    (pieces_that_do_not_divide, "pieces of 5 do not share out 12 evenly"),
    (pieces_recomputed_first, "computes a third more"),
    (pieces_by_the_sum, "Compare the peak with the limit"),
    (pieces_never_recomputed, "None, but there is a way"),
    (pieces_of_one_when_nothing_fits, "(1, 'full') needs 131 MB at its peak"),
    (lambda config, batch, limit: batch, "expected is (sequences, 'none' or 'full') or None"),
    (lambda config, batch, limit: (batch / 2, "none"), "allowed are 1 to 12"),
]


@pytest.mark.parametrize(("answer", "words"), PIECES)
def test_micro_batches(answer, words: str) -> None:
    assert words in said(answer, "my_micro_batch")
    assert check(pieces, "my_micro_batch").ok
