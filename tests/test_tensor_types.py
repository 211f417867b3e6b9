"""Tensor types: accepted programs have right gradients, wrong ones are refused."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensor_programs import OPERATORS
from torch import nn

from shardlab import ranks
from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp_
from shardlab import tensor_types as tt
from shardlab.tensor_types import random_programs
from shardlab.tensor_types.adjoint import find_contradictions


def get_world():
    return dist.group.WORLD


def make_parameter(*shape, **types):
    """Return random numbers that are trained, with their types."""
    return tt.declare_types(torch.randn(*shape).requires_grad_(), **types)


def get_refusal(step, **degrees):
    """Return the checker's message for a step that it must refuse."""
    verdict = tt.check_step(step, **(degrees or {"tp": 2}))
    assert not verdict, f"{step.__name__} passes"
    return verdict.message


def check_passes(step, **degrees):
    verdict = tt.check_step(step, **(degrees or {"tp": 2}))
    assert verdict, verdict
    return verdict


# Accepted random programs are right by finite differences.


def judge(chosen):
    return [
        random_programs.find_wrong_gradients(p, s, get_world(), OPERATORS)
        for s, p in enumerate(chosen)
    ]


def list_refusals(chosen):
    return [random_programs.find_type_error(p, get_world(), OPERATORS) for p in chosen]


def check_sound(number, seed):
    chosen = random_programs.draw_programs(number, seed)
    said = ranks.run_with_fake_group(list_refusals, 2, chosen)
    wrong = ranks.run(judge, 2, chosen, timeout=400, show=False)
    assert wrong[0] == wrong[1]
    passed = [names for names, why in zip(wrong[0], said, strict=True) if not why]
    assert passed == [[]] * len(passed)
    # Most refused programs are wrong; the rest is right for reasons that types cannot express.
    others = [names for names, why in zip(wrong[0], said, strict=True) if why]
    return len(passed), sum(map(bool, others)), len(others)


def test_of_random_programs_all_that_pass_are_right():
    passed, wrong, refused = check_sound(60, seed=0)  # the lesson executes 200
    assert passed > 15 and wrong > refused / 2


@pytest.mark.weekly("takes a minute")
@pytest.mark.timeout(500)
def test_of_1500_random_programs_all_that_pass_are_right():
    assert check_sound(1500, seed=0) == (452, 832, 1048)  # the numbers of the lesson


def test_a_wrong_gradient_is_found_by_finite_differences():
    """The test of the test: f forgotten, g twice, and the correct program."""
    chosen = [("*V",), ("split", "g"), ("f", "*V")]
    assert ranks.run(judge, 2, chosen)[0] == [["x"], ["x"], []]


# Types of the course's operators, by numbers.

EDGES = {
    "copy_to": (tp_.copy_to, "I -> R", -1),
    "reduce_from": (tp_.reduce_from, "P -> I", -1),
    "gather_last": (tp_.gather_last, "V -> I", -1),
    "split_last": (tp_.split_last, "I -> V", -1),
    "enter": (sp.SEQUENCE_SHARDED.enter_region, "V -> R", 1),
    "leave": (sp.SEQUENCE_SHARDED.leave_region, "P -> V", 1),
}


def all_signatures():
    found = {}
    for name, (operator, _, dimension) in EDGES.items():
        pairs = [f"{src} -> {dst}" for src, dst in product(tt.TYPES, tt.TYPES)]
        found[name] = [
            w
            for w in pairs
            if not find_contradictions(operator, w, get_world(), dimension=dimension)
        ]
    return found


def test_numbers_leave_each_operator_one_signature():
    for found in ranks.run(all_signatures, 2):
        assert found == {name: [signature] for name, (_, signature, _) in EDGES.items()}


class Forgets(torch.autograd.Function):
    """Operator f whose backward forgets its all-reduce."""

    signature = "I -> R"

    @staticmethod
    def forward(ctx, x, group):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, None


def wrong_operator():
    pairs = [f"{src} -> {dst}" for src, dst in product(tt.TYPES, tt.TYPES)]
    fits = [w for w in pairs if not find_contradictions(Forgets.apply, w, get_world())]
    return fits, find_contradictions(Forgets.apply, "I -> R", get_world())


def test_numbers_find_a_backward_that_does_not_fit():
    fits, why = ranks.run(wrong_operator, 2)[0]
    # Without its all-reduce f is the identity, for any type.
    assert fits == ["I -> I", "R -> R", "V -> V", "P -> P"]
    assert any("dx differs between ranks" in line for line in why)


# The table of allowed combinations.

TABLE = [  # types, operation, result; None: refused
    ("II", "other", "I"), ("RR", "other", "R"), ("VV", "other", "V"), ("RV", "other", "V"),
    ("IR", "sum", None), ("IV", "product", None), ("IP", "product", None), ("IP", "sum", None),
    ("PP", "sum", "P"), ("PR", "sum", None), ("PV", "sum", None), ("P", "other", None),
    ("PR", "product", "P"), ("PP", "product", None), ("PV", "product", None),
    ("PR", "first", "P"), ("RP", "first", None), ("RP", "product", "P"), ("PRR", "first", None),
]  # fmt: skip


@pytest.mark.parametrize(("types", "kind", "wanted"), TABLE)
def test_which_types_are_combined(types, kind, wanted):
    fixed = [False] * len(types)
    if wanted is None:
        with pytest.raises(tt.TypeMismatch):
            tt.combine_types(list(types), fixed, kind)
    else:
        assert tt.combine_types(list(types), fixed, kind) == wanted


# The checker: forward.


def forward(enter, leave, bias="behind"):
    def step(tp):
        x, up, down = (
            make_parameter(2, 8, tp="I"),
            make_parameter(8, 8, tp="V"),
            make_parameter(8, 8, tp="V"),
        )
        b = make_parameter(8, tp="I")
        y = F.linear(F.gelu(F.linear(enter(x, tp), up)), down, b if bias == "inside" else None)
        y = leave(y, tp)
        (y + b if bias == "behind" else y).sum().backward()

    return step


def do_nothing(x, group):
    return x


def apply_twice(operator):
    return lambda x, group: operator(operator(x, group), group)


def send_raw(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def gather_all(x, group):
    out = torch.empty(2 * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(out, x, group=group)
    return out[: len(x)]


MISTAKES = {
    "f forgotten": (forward(do_nothing, tp_.reduce_from), "linear(", "apply copy_to (I -> R)"),
    "f twice": (
        forward(apply_twice(tp_.copy_to), tp_.reduce_from),
        "but its input is R",
        "is R already",
    ),
    "g twice": (
        forward(tp_.copy_to, apply_twice(tp_.reduce_from)),
        "but its input is I",
        "all ranks have the tensor",
    ),
    "bias in each": (forward(tp_.copy_to, tp_.reduce_from, "inside"), "linear(", "after the sum"),
    "raw sum in front": (forward(send_raw, tp_.reduce_from), "all_reduce(", "remove this sum"),
    "raw gather": (forward(gather_all, tp_.reduce_from), "the gradient ends here", ""),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_forward_is_refused_with_what_would_be_right(name):
    step, operation, right = MISTAKES[name]
    message = get_refusal(step)
    assert operation in message and right in message


def test_the_right_network_passes_also_with_a_plain_sum_behind():
    verdict = check_passes(forward(tp_.copy_to, tp_.reduce_from))
    assert (verdict.num_backwards, verdict.num_communicating) == (1, 2)
    assert verdict.num_checked > 5
    check_passes(forward(tp_.copy_to, send_raw))  # backward has no all-reduce there


class Silent(torch.autograd.Function):
    """Operator f without types."""

    forward = staticmethod(lambda ctx, x, group: x.view_as(x))
    backward = staticmethod(lambda ctx, dx: (dx, None))


def test_a_function_without_a_signature_is_refused():
    def step(tp):
        (Silent.apply(make_parameter(2, tp="P"), tp) * 2.0).sum().backward()

    assert "an autograd Function that is no Operator" in get_refusal(step)


def test_addends_go_through_what_is_linear():
    def linear(tp):
        p, r = make_parameter(4, 4, tp="P"), make_parameter(4, 4, tp="R")
        y = (p * 2 + p / 3 - p) * r @ r
        y = torch.cat([y.mean(0, keepdim=True), -y[:1], F.linear(p, r)[:1]]).sum()
        y.backward()
        assert tt.get_types(p.grad) == {"tp": "R"} and tt.get_types(r.grad) == {"tp": "P"}
        with torch.no_grad():
            r[2:] *= 0.5  # torch raises if the view's grad_fn is read

    check_passes(linear)
    for wrong in (
        lambda p, r: p + 1, lambda p, r: p * p, lambda p, r: r / p, lambda p, r: 1 / p,
        lambda p, r: p.to(torch.bfloat16), lambda p, r: F.gelu(p), lambda p, r: p + r,
        lambda p, r: F.linear(p, r, r[0]), lambda p, r: 1 - p, lambda p, r: p.abs(),
    ):  # fmt: skip

        def step(tp, wrong=wrong):
            wrong(make_parameter(4, 4, tp="P"), make_parameter(4, 4, tp="R"))

        assert "P is a summand of a sum not made yet" in get_refusal(step)


def test_tensors_that_nobody_declared_are_named():
    def multiply_by_mask(tp):
        x = make_parameter(4, tp="I")
        (x * (torch.rand(4) > 0.5)).sum().backward()

    assert "argument 2 has no declared type" in get_refusal(multiply_by_mask)

    def with_ones(tp):
        x = make_parameter(4, tp="I")
        (x * torch.ones(4) + torch.arange(4)).sum().backward()  # the same on all ranks

    check_passes(with_ones)


# The checker: the loss, backward, and what comes after it.


def test_a_loss_is_one_of_all_ranks_or_an_addend():
    for type_, right in (
        ("V", "declare_types(loss, dp='P')"),
        ("R", "the loss is R: must be I or P"),
    ):

        def step(dp, type_=type_):
            make_parameter(3, dp=type_).sum().backward()

        assert right in get_refusal(step, dp=2)
    for type_ in "IP":

        def step(dp, type_=type_):
            make_parameter(3, dp=type_).sum().backward()

        check_passes(step, dp=2)


def train_step(after):
    """Run a data-parallel step; `after` runs after backward."""

    def step(dp):
        model = nn.Linear(4, 4)
        tt.declare_parameters(model, dp="R")
        x = tt.declare_types(torch.randn(2, 4), dp="V")

        def backward():
            tt.declare_types(model(x).square().mean(), dp="P").backward()

        backward()
        after(model, dp, backward)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad

    return step


def reduce_gradients(model, group, _=None):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)


def then_more(model, group, backward):
    reduce_gradients(model, group)
    backward()


def test_the_step_takes_gradients_that_are_added_up_once():
    check_passes(train_step(reduce_gradients), dp=2)
    for after, message in (
        (lambda *_: None, "P is combined with R"),
        (then_more, "zero_grad, or reduce once"),
    ):
        assert message in get_refusal(train_step(after), dp=2)


def test_axes_are_judged_each_for_itself_and_an_axis_of_one_rank_is_not():
    def step(dp, tp):
        x, w = make_parameter(2, 4, dp="V", tp="I"), make_parameter(4, 4, dp="R", tp="V")
        y = tp_.reduce_from(F.linear(tp_.copy_to(x, tp), w), tp)
        assert tt.get_types(y) == {"dp": "V", "tp": "I"}
        tt.declare_types(y.sum(), dp="P").backward()
        assert tt.get_types(w.grad) == {"dp": "P", "tp": "V"}

    check_passes(step, dp=2, tp=4)

    def run_alone():
        with tt.check_types(tp=get_world()):
            F.linear(make_parameter(2, 4, tp="I"), make_parameter(4, 4, tp="V")).sum().backward()

    ranks.run(run_alone, 1)


def test_real_ranks_say_the_same():
    def step():
        try:
            with tt.check_types(tp=get_world()):
                F.linear(make_parameter(2, 4, tp="I"), make_parameter(4, 4, tp="V"))
        except tt.TypeMismatch as error:
            return str(error)

    one, two = ranks.run(step, 2)
    assert one == two and "I is combined with V" in one
