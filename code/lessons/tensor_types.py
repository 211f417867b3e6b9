# ---
# jupyter:
#   jupytext:
#     default_lexer: ipython3
#     notebook_metadata_filter: myst,mystnb,title,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Tensor types: a wrong gradient, found before it runs
#
# After this lesson you can
#
# - name the type of every tensor in a parallel program (how the ranks' copies are related), and the type of its gradient;
# - decide by numbers whether an operator's forward and backward belong together;
# - write a checker that follows these types through forward, backward and the optimizer's step;
# - check your own parallel model in one call, on a laptop, and name the mistakes that no such check sees.
#
# You need one thing from [Tensor parallelism](tensor_parallel.md): its two operators.

# %% tags=["hide-input"]
# Imports, and what the cells share
import importlib.util
import time
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardcourse.exercises import check
from shardlab import (
    context_parallel,
    data_parallel,
    ranks,
    sequence_parallel,
    tensor_parallel,
)
from shardlab import tensor_types as tt
from shardlab.common import show
from shardlab.gpt.model import GPT, Config, loss
from shardlab.sequence_parallel import SEQUENCE_SHARDED
from shardlab.sequence_parallel.core import _GatherSequence, _ReduceScatterSequence
from shardlab.tensor_parallel import copy_to, reduce_from
from shardlab.tensor_parallel.core import _CopyTo, _ReduceFrom
from shardlab.tensor_parallel.gather import _GatherLast, _SplitLast
from shardlab.tensor_parallel.overlap import _Columns
from shardlab.tensor_types import adjoint, core, spmd_rules, random_programs

show.set_style()


def draw_inputs():
    """Input, two matrices and biases of a feed-forward network, and a gradient of its output."""
    generator = torch.Generator().manual_seed(1)
    shapes = (2, 4, 8), (16, 8), (16,), (8, 16), (8,), (2, 4, 8)
    drawn = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [x.to(ranks.device()) for x in drawn]


def take_shard(x, dim, group):
    """This rank's part of x."""
    return x.chunk(group.size(), dim)[group.rank()].clone()


def relative_error(found, wanted):
    """The largest difference, by the largest number."""
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


# %% [markdown]
# ## Two programs, one output
#
# Both are a feed-forward network on two ranks, cut as in [Tensor parallelism](tensor_parallel.md): the first matrix by columns, the second by rows.

# %%
def first(x, up, up_bias, down, bias, group):
    y = F.gelu(F.linear(copy_to(x, group), up, up_bias))
    return reduce_from(F.linear(y, down), group) + bias


def second(x, up, up_bias, down, bias, group):
    y = F.gelu(F.linear(x, up, up_bias))
    return reduce_from(F.linear(y, down), group) + bias


# %% tags=["hide-input"]
# Runs both on two ranks, and holds them against one process
def run_on_rank(network):
    """Output, and gradient of x, of a network with this rank's parts of the matrices."""
    group, (x, up, up_bias, down, bias, dy) = dist.group.WORLD, draw_inputs()
    x.requires_grad_()
    parts = (
        take_shard(up, 0, group),
        take_shard(up_bias, 0, group),
        take_shard(down, 1, group),
    )
    y = network(x, *parts, bias, group)
    y.backward(dy)
    return y.detach(), x.grad


x, up, up_bias, down, bias, dy = [part.cpu() for part in draw_inputs()]
x.requires_grad_()
y = F.linear(F.gelu(F.linear(x, up, up_bias)), down, bias)
y.backward(dy)
OFF = {}
for network in (first, second):
    found = ranks.run(run_on_rank, 2, network)
    OFF[network] = [
        max(relative_error(f, w) for f in each)
        for each, w in zip(zip(*found, strict=True), (y, x.grad), strict=True)
    ]
    assert OFF[network][0] < 1e-14  # float64: sums in another order
    gradient = 100 * OFF[network][1]
    print(f"{network.__name__:6}  output right, gradient of x off by {gradient:.0f} %")
assert OFF[first][1] < 1e-14 and 0.96 < OFF[second][1] < 0.97

# %% [markdown]
# Same output, same loss, and a gradient that is off by 97 %.
# No test of the forward pass will tell them apart. No line of the second program is wrong by itself, either: what is wrong is that `x` is multiplied by `up`.
# This lesson gives tensors types that make the mistake visible, and a checker of some 240 lines that reads these types.
#
# ## Four types
#
# On a group of ranks a tensor is more than its numbers. Is it the same on all of them? And once backward has run, is its *gradient*?
#
# ![The four types, on two ranks. I: both hold 3, and both hold the gradient, 5. R: both hold 3; their gradients are 2 and 3, addends of 5. V: they hold 3 and 4, with gradients 5 and 6. P: they hold 1 and 2, addends of 3, and both hold the gradient, 5.](../figures/tensor_types_kinds.svg)
#
# - **I**, invariant: all ranks hold it, and all do the same with it. Each finds the whole gradient. The stream between the cut parts is I, and so are norms' weights.
# - **R**, replicated: all hold it too, and each does something of its own with it. Each finds an addend of the gradient. What has entered a cut part is R, and with data parallelism all weights are.
# - **V**, varying: each rank has its own. A cut matrix is V, and so is a rank's share of the batch.
# - **P**, partial: addends of a sum that nobody has made yet, such as what a row-cut matrix gives.
#
# I and R hold the same numbers in forward. They differ in what backward owes them, and this is the difference that no output shows.
# PyTorch's DTensor has three placements, Replicate, Shard and Partial: R, V and P. The names are those of Meta's `spmd_types`, with which [we compare](#the-production-library) later.
#
# A gradient has a type as well, which follows from the tensor's: I has I, V has V, and R and P have each other.

# %%
print(tt.GRADIENT_TYPES)

# %% [markdown]
# Now read the network by types.
#
# ![A feed-forward network, by types. Above, as it should be: x is I, f makes it R; the product with the cut W₁ is V, GELU leaves it V, the product with the cut W₂ is V and is meant as P, g makes the sum, I, and the bias, which is I, is added. Gradients go back with the dual types: I, R, V, V, P, I. Below, without f: x is I and is multiplied by W₁, which is V. There the checker stops.](../figures/tensor_types_chain.svg)
#
# `copy_to`, Megatron's $f$, turns I into R. It computes nothing in forward: it *is* this change of type, and the all-reduce in its backward is what the change costs.
# `reduce_from`, $g$, makes I of P.
#
# ## A checker in twenty lines
#
# An operator that sends has a signature: the type of its input and the type of its result. All other operations follow one rule: equal types can be combined, and R can be combined with V.
# P must be summed before anything is computed with it, and I can be combined only with I.

# %%
SENDS = {"f": ("I", "R"), "g": ("P", "I")}


def combine(a, b):
    """The type of what is computed from a and b, where nothing is sent."""
    if a == b != "P":
        return a
    if {a, b} == {"R", "V"}:
        return "V"
    raise ValueError(f"{a} is combined with {b}")


def follow(program, type_="I"):
    """The types that a program's tensor goes through; a step is an operator or a parameter."""
    types = [type_]
    for step in program:
        if step in SENDS:
            src, dst = SENDS[step]
            if type_ != src and (type_, src) != ("V", "P"):
                raise ValueError(f"{step} is {src} -> {dst}, but its input is {type_}")
            type_ = dst
        else:
            type_ = combine(type_, step)
        types.append(type_)
    return " ".join(types)


# %% [markdown]
# V may be declared to be P, as in the product with the cut $W_2$: whether each rank's own numbers are addends, only the author knows.
#
# Is it right? The next cell follows seven programs. Then two real ranks run each with random numbers, and finite differences say which gradients are wrong.
# A step `I`, `R` or `V` is a product with a parameter of this type.

# %% tags=["hide-input"]
# Table: seven programs, the plain checker and finite differences
OPERATORS = {"f": copy_to, "g": reduce_from}
OPERATORS |= {
    "gather": tensor_parallel.gather_last,
    "split": tensor_parallel.split_last,
}


def along_sequence(edge):
    """An operator along the sequence, for four numbers: a sequence of one feature."""
    return lambda y, group: edge(y.view(1, -1, 1), group).view(-1)


OPERATORS |= {
    "enter": along_sequence(SEQUENCE_SHARDED.enter_region),
    "leave": along_sequence(SEQUENCE_SHARDED.leave_region),
}
SEVEN = {
    "as it should be": "f V V g",
    "without f": "V V g",
    "f twice": "f f V V g",
    "g twice": "f V V g g",
    "f and g exchanged": "g V V f V g",
    "a whole parameter inside, as I": "f V I g",
    "a whole parameter inside, as R": "f V R g",
}


def find_wrong_gradients(chosen):
    """On a rank: by program, the parameters whose gradient finite differences refute."""
    found = []
    for seed, program in enumerate(chosen):
        found.append(
            random_programs.find_wrong_gradients(
                program, seed, dist.group.WORLD, OPERATORS
            )
        )
    return found


# There, "*V" is a product, and the last g is always made.
steps = [
    tuple(s if s in SENDS else f"*{s}" for s in text.split()[:-1])
    for text in SEVEN.values()
]
rows = []
for (name, text), wrong in zip(
    SEVEN.items(), ranks.run(find_wrong_gradients, 2, steps)[0], strict=True
):
    try:
        said = f"passes: {follow(text.split())}"
    except ValueError as error:
        said = str(error)
    assert said.startswith("passes") == (not wrong)
    rows.append((name, text, said, ", ".join(wrong) or "none"))
show.table(
    rows, ["program", "steps", "the plain checker", "wrong gradients, two ranks"]
)

# %% [markdown]
# The twenty lines look at no number, and each verdict is that of finite differences.
#
# What the plain version leaves out: real PyTorch programs; more than one group; what sums, products and views do with P; tensors that need no gradient; backward and the step; and whether $f$ and $g$ have the types in their signatures.
#
# ## What decides a type: numbers
#
# The last point first. An operator over ranks is a linear map $A$ of all that the ranks hold, and backward has to be its adjoint $A^{\!\top}$. For any $x$ and $dy$ then
#
# $$
# \langle A x,\, dy\rangle = \langle x,\, A^{\!\top} dy\rangle ,
# $$
#
# with the products taken over everything that the ranks hold: once for I, of which all have a copy; added up over the ranks for the others.
# So draw $x$ and $dy$ as their types say, run forward and backward once, and compare two numbers. Beside it, what is to be equal on all ranks has to be, and forward must not change the value that the ranks hold together.

# %%
show.source(adjoint.find_contradictions)


# %% [markdown]
# Each of the course's operators, the two of the [next lesson](sequence_parallel.md) included, is tested with all sixteen signatures. So is one more operator: an $f$ whose author forgot the all-reduce in backward.

# %%
class ForgetfulCopy(torch.autograd.Function):
    """copy_to without the all-reduce in backward."""

    @staticmethod
    def forward(ctx, x, group):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, None


CANDIDATES = {
    "copy_to": (copy_to, -1),
    "reduce_from": (reduce_from, -1),
    "gather_last": (tensor_parallel.gather_last, -1),
    "split_last": (tensor_parallel.split_last, -1),
    "enter, along the sequence": (SEQUENCE_SHARDED.enter_region, 1),
    "leave, along the sequence": (SEQUENCE_SHARDED.leave_region, 1),
    "copy_to that forgets": (ForgetfulCopy.apply, -1),
}


def list_passing_signatures():
    pairs = [f"{src} -> {dst}" for src in tt.TYPES for dst in tt.TYPES]
    return {
        name: [
            w
            for w in pairs
            if not adjoint.find_contradictions(op, w, dist.group.WORLD, dimension=dim)
        ]
        for name, (op, dim) in CANDIDATES.items()
    }


# %% tags=["hide-input"]
# Table: the signatures that the numbers leave, on two ranks
left = ranks.run(list_passing_signatures, 2)[0]
assert [len(pairs) for pairs in left.values()] == [1] * 6 + [4]
assert "I -> R" not in left["copy_to that forgets"]
show.table(
    [(name, ", ".join(pairs)) for name, pairs in left.items()],
    ["operator", "signatures that pass"],
)

# %% [markdown]
# For each of the six, one signature is left: its types are a fact. The operator that forgets is the identity, which passes with several signatures, but never with I → R.
#
# *Numbers test the types; types test the programs.*
#
# ## The checker
#
# Now the same for real programs of PyTorch. What is known of a tensor travels with it, as an attribute: a type for each axis of the mesh.
# An operator of the course states its signature in one line, beside its forward:

# %%
show.source(_ReduceFrom)

# %% [markdown]
# The table of types has three additions to `combine`. P goes through sums with its like, views, and products with R: `kind` says which of them a function is. What gets no gradient (tokens, masks, anything under `no_grad`) may be I or R as needed, for they differ in nothing but the gradient. And what does not fit says why.

# %%
show.source(core.combine_types, core.convert_type)

# %% [markdown]
# To see each operation, the checker is a `TorchFunctionMode`: torch calls it in the place of each of its functions. It finds the result's type *before* the function runs, runs it, and attaches the type to the result.

# %%
show.source(core.TypeChecker.__torch_function__, core.TypeChecker.infer_types)

# %% [markdown]
# On the axis of its group an operator's own signature counts; on all other axes it is an operation like any other.

# %%
show.source(core.TypeChecker.combine_axes, core.TypeChecker.check_operator)

# %% [markdown]
# Some operators are many in one: `_Columns` starts queries, keys and values at once, and hides a message behind their products. Its `forward_unfused` computes the same with plain operators, and the checker follows those.

# %%
show.source(_Columns.forward_unfused)

# %% [markdown]
# Plain collectives, `dist.all_reduce` and its like, make R of P, in place.
# Where a gradient is to go through one, autograd knows nothing of it: backward hands on what comes, which makes an all-reduce I, and is the end for any other.

# %%
show.source(core.TypeChecker.check_collective)

# %% [markdown]
# torch hands an autograd Function to no mode. So Megatron's $f$ and its like are `Operator`s, whose `apply` asks the mode while a check goes on. A result of any other Function is refused where it is used.

# %%
show.source(tt.Operator, core.check_types)


# %% [markdown]
# One call checks a step: the processes are pretended, and messages move nothing, so it needs neither a GPU nor a second rank.
# `step` is called with a group for each axis. `declare_types` says what a tensor is.

# %%
def step_network(network, tp):
    types = {"x": "I", "up": "V", "up_bias": "V", "down": "V", "bias": "I"}
    shapes = (2, 4, 8), (8, 8), (8,), (8, 8), (8,)
    tensors = [
        tt.declare_types(torch.randn(shape).requires_grad_(), tp=type_)
        for shape, type_ in zip(shapes, types.values(), strict=True)
    ]
    network(*tensors, tp).sum().backward()


for network in (first, second):
    print(tt.check_step(partial(step_network, network), tp=2))


# %% [markdown]
# The second program is refused before its product is computed: with the line, the operation and its types, and the fix.
#
# ## Equal: of 200 random programs, all that pass are right
#
# A checker that lets a wrong program pass is worse than none. So 200 programs are drawn from six operators that send, products and sums with parameters of all four types, and GELU.
# The checker judges each. Then two real ranks run each of them and compare every parameter's gradient with finite differences.

# %%
def find_type_errors(chosen):
    return [
        random_programs.find_type_error(p, dist.group.WORLD, OPERATORS) for p in chosen
    ]


CHOSEN = random_programs.draw_programs(200, seed=0)
said = ranks.run_with_fake_group(find_type_errors, 2, CHOSEN)
wrong = ranks.run(find_wrong_gradients, 2, CHOSEN)[0]

# %% tags=["hide-input"]
# Table: the checker's verdict beside finite differences
found = Counter((not why, bool(names)) for why, names in zip(said, wrong, strict=True))
assert found[True, True] == 0 < 60 < found[True, False]
rows = [
    (text, found[passes, False], found[passes, True])
    for text, passes in (("passes", True), ("is refused", False))
]
show.table(rows, ["the checker", "gradients right", "some gradient wrong"])

# %% [markdown]
# None that passes is wrong. [The tests](../tests/test_tensor_types.py) repeat it with the first 60, and once a week with 1,500, of which 452 pass.
# The other corner is no error: a program that adds up what all ranks have computes $t$ times the value of one process, with the gradient of that. It is refused for what it computes.
#
# ## Through backward and the step
#
# Types do not end with the loss.
#
# ![A step of data and tensor parallelism, by the types of a matrix on both axes, dp and tp. The matrix is R on dp and V on tp, the local loss V and I. It is said to be an addend of the joint loss: P and I. Backward gives the matrix a gradient with the dual types, P and V. The all-reduce over dp makes it R and V, which are the matrix's own types: the step may be taken. Without the all-reduce P is combined with R in the step.](../figures/tensor_types_step.svg)
#
# The loss of a rank's own batch is V on the data axis. You say that it is an addend of the joint one, P.
# A loss that is I or P may go backward; of an R one every rank would count the gradient again.
# Backward then gives each parameter a gradient with the dual type, and no operation needs to be looked at.

# %%
show.source(core.TypeChecker.check_backward, core.TypeChecker.set_gradient_types)

# %% [markdown]
# What comes after is ordinary code, and is followed again: all-reduces make R of P, clipping is an operation, and the step must not add what does not fit.
#
# Here is the course's own GPT on a data × tensor mesh of 2 × 2, with its own functions. `tensor_parallel.get_parameter_types(model)` returns V for parameters that are cut and I for whole ones. With the stream cut along the sequence, as in the [next lesson](sequence_parallel.md), norms see only a rank's own tokens, and whole parameters are R.

# %%
SMALL = Config(vocab=64, seq=16, layers=2, heads=4, hidden=32, tied=False)


def reduce_and_clip(model, dp, tp):
    """What a step owes its gradients."""
    if model.edges is SEQUENCE_SHARDED:
        sequence_parallel.sum_gradients(model, tp)
    data_parallel.average_gradients(model, dp)
    tensor_parallel.clip_grad_norm_(model, 1.0)


def step_on_mesh(dp, tp, edges=tensor_parallel.REPLICATED, after=reduce_and_clip):
    model = tensor_parallel.parallelize(GPT(SMALL), tp, edges)
    tt.declare_parameters(model, dp="R", tp=tensor_parallel.get_parameter_types(model))
    tokens, targets = (
        tt.declare_types(torch.randint(64, (2, 16)), dp="V", tp="R") for _ in range(2)
    )
    value = tensor_parallel.vocab_parallel_loss(model(tokens), targets, tp)
    tt.declare_types(value, dp="P").backward()  # an addend of the joint loss
    after(model, dp, tp)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


for edges in (tensor_parallel.REPLICATED, SEQUENCE_SHARDED):
    print(tt.check_step(partial(step_on_mesh, edges=edges), dp=2, tp=2))


# %% [markdown]
# Nothing of the model was changed for it but the signature beside each operator. Now with some steps left out:

# %%
def skip_average(model, dp, tp):
    tensor_parallel.clip_grad_norm_(model, 1.0)


def clip_by_rank(model, dp, tp):
    data_parallel.average_gradients(model, dp)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def forget_norms(model, dp, tp):
    data_parallel.average_gradients(model, dp)


for after, edges in (
    (skip_average, tensor_parallel.REPLICATED),
    (clip_by_rank, tensor_parallel.REPLICATED),
    (forget_norms, SEQUENCE_SHARDED),
):
    verdict = tt.check_step(partial(step_on_mesh, edges=edges, after=after), dp=2, tp=2)
    print(f"{after.__name__} {verdict}\n")
    assert not verdict


# %% [markdown]
# `clip_grad_norm_` of torch takes a norm of the rank's own shards, which is V, and would scale with it what is I.
# The last is the mistake of [Sequence parallelism](sequence_parallel.md#gradients-of-norms-that-nobody-sums), where the loss curve looks right: the gradient of a norm's weight is still P when the step comes.
#
# ## Two published bugs
#
# BigCode's fork of Megatron-LM gave all heads of queries one head of keys and values. Each rank keeps that one whole, and uses it with its own queries. Its gradients were not added up, and a model that should have had a validation loss of 2.64 had 3.74 (bigcode-project/Megatron-LM, issues 35 and 37).
# The second was reported in September 2026 (NVIDIA/Megatron-LM, issue 7452, finding 11): a norm on each head, with one weight for all heads, inside the cut part.
# Both are here, in one attention, and the same operator makes both right: $f$ around the weight.

# %%
def attention(x, queries, keys_values, scale, out, group, f_kv=copy_to, f_norm=copy_to):
    """One head of keys and values for all queries, and a norm on each query."""
    x = copy_to(x, group)
    q_BaSD = F.linear(x, queries).unflatten(-1, (-1, 4)).transpose(1, 2)
    q_BaSD = F.rms_norm(q_BaSD, (4,)) * f_norm(scale, group)
    k_BSD, v_BSD = F.linear(x, f_kv(keys_values, group)).chunk(2, -1)
    k_BaSD, v_BaSD = (z[:, None].expand(q_BaSD.shape) for z in (k_BSD, v_BSD))
    y_BaSD = F.scaled_dot_product_attention(q_BaSD, k_BaSD, v_BaSD, is_causal=True)
    return reduce_from(F.linear(y_BaSD.transpose(1, 2).flatten(-2), out), group)


def do_nothing(x, group):
    return x


# %% tags=["hide-input"]
# Table: both bugs on two ranks beside one process, and what the checker says
SHAPES = {
    "x": (2, 6, 16),
    "queries": (16, 16),
    "keys_values": (8, 16),
    "scale": (4,),
    "out": (16, 16),
}
PARTS = {"queries": 0, "out": 1}


def draw_weights():
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(
            ranks.device()
        )
        / 4
        for name, shape in SHAPES.items()
    }


def step_attention(tp, options):
    """Output and gradients of an attention, here with this rank's parts; types declared."""
    made = draw_weights()
    for name, x in made.items():
        x = take_shard(x, PARTS[name], tp) if name in PARTS else x
        made[name] = tt.declare_types(
            x.requires_grad_(), tp="V" if name in PARTS else "I"
        )
        made[name].tensor_name = name
    y = attention(**made, group=tp, **options)
    y.square().sum().backward()
    return y.detach(), {name: x.grad for name, x in made.items()}


def step_on_ranks(options):
    return step_attention(dist.group.WORLD, options)


[(full, wanted)] = ranks.run(step_on_ranks, 1, {})  # on one rank nothing is cut
rows = []
for name, options in (
    ("right", {}),
    ("keys and values whole, without f", {"f_kv": do_nothing}),
    ("norm on each head, without f", {"f_norm": do_nothing}),
):
    output, worst = 0.0, (0.0, "")
    for rank, (y, gradients) in enumerate(ranks.run(step_on_ranks, 2, options)):
        output = max(output, relative_error(y, full))
        for which, gradient in gradients.items():
            want = wanted[which]
            want = want.chunk(2, PARTS[which])[rank] if which in PARTS else want
            gap = ((gradient - want).norm() / want.norm()).item()
            worst = max(worst, (gap, which))
    verdict = tt.check_step(
        lambda tp, options=options: step_attention(tp, options), tp=2
    )
    assert verdict.ok == (worst[0] < 1e-12) == (not options) and output < 1e-12
    line = "passes" if verdict else verdict.message.splitlines()[1].split(": each")[0]
    rows.append(
        (
            name,
            f"{100 * output:.0f}",
            f"{100 * worst[0]:.0f}, {worst[1]}" if options else "0",
            line,
        )
    )
show.table(
    rows, ["attention", "output off (%)", "worst gradient off (%)", "the checker"]
)


# %% [markdown]
# ## What it costs
#
# Nothing is sent, and no memory is held beyond the program's own. What a check takes grows with the number of operations, and that is proportional to the layers: two small models predict all others.
# Operators that send can be counted in the model itself: an entrance and an exit for each attention, each feed-forward network; an exit of the embedding, an entrance of the head, and the loss. That is $4L + 3$.

# %%
def step_one_axis(tp, layers):
    model = tensor_parallel.parallelize(GPT(replace(SMALL, layers=layers)), tp)
    tt.declare_parameters(model, tp=tensor_parallel.get_parameter_types(model))
    tokens, targets = (
        tt.declare_types(torch.randint(64, (2, 16)), tp="R") for _ in range(2)
    )
    tensor_parallel.vocab_parallel_loss(model(tokens), targets, tp).backward()


# %% tags=["hide-input"]
# Table: operations and operators, predicted and counted
FOUND = {
    n: tt.check_step(partial(step_one_axis, layers=n), tp=2) for n in (1, 2, 4, 12)
}
each = FOUND[2].num_checked - FOUND[1].num_checked
rows = []
for n, verdict in FOUND.items():
    predicted, sends = FOUND[1].num_checked + (n - 1) * each, 4 * n + 3
    assert (predicted, sends) == (verdict.num_checked, verdict.num_communicating)
    rows.append((n, predicted, verdict.num_checked, sends, verdict.num_communicating))
head = [
    "layers",
    "operations: predicted",
    "counted",
    "operators that send: predicted",
    "counted",
]
show.table(rows, head)


# %% [markdown]
# In time that is some milliseconds for each layer:

# %% tags=["hide-input", "measured"]
# Table: milliseconds of a forward, plain and followed
def time_steps(layers, rounds=7):
    """In a pretended rank: medians of a forward and backward, plain and followed."""
    tp, found = dist.group.WORLD, []
    for followed in (False, True):
        took = []
        for _ in range(rounds):
            begin = time.perf_counter()
            if followed:
                with tt.check_types(tp=tp):
                    step_one_axis(tp, layers)
            else:
                step_one_axis(tp, layers)
            took.append(time.perf_counter() - begin)
        found.append(sorted(took)[rounds // 2])
    return found


rows = []
for n in (2, 12):
    plain, followed = ranks.run_with_fake_group(time_steps, 2, n)
    each = 1e3 * (followed - plain) / n
    show.check_timing(
        each < 200, "the check of a layer takes less than 200 ms"
    )  # some ten
    rows.append((n, f"{1e3 * plain:.0f}", f"{1e3 * followed:.0f}", f"{each:.0f}"))
show.table(rows, ["layers", "plain (ms)", "followed (ms)", "check of a layer (ms)"])

# %% [markdown]
# Widths do not matter: layers of a 405B model have as many operations as these. So check a narrow model of the same make, before every long run and in every commit's tests; it is no mode to train in.
#
# ## The production library
#
# `spmd_types` by Meta (version 0.3.1 of October 2026, a beta under BSD licence) has the same four types, and brings operators of its own with them.
# torchtitan uses it. An autograd Function tells it what it does in a hook; `spmd_rules.attach_rule` makes that hook from the signatures of ours.
# Five hundred other random programs go to both checkers:

# %%
THERE = importlib.util.find_spec("spmd_types") is not None


def check_with_both(chosen):
    """In a pretended rank: for each program, whether ours and theirs pass it."""
    warnings.filterwarnings(
        "ignore", category=FutureWarning
    )  # older names of collectives
    group = dist.group.WORLD
    for operator in (_CopyTo, _ReduceFrom, _GatherLast, _SplitLast):
        spmd_rules.attach_rule(operator)
    for operator in (_GatherSequence, _ReduceScatterSequence):
        spmd_rules.attach_rule(operator, dimension=1)

    def declared():
        given = random_programs.make_parameters(0, group)
        return {
            n: spmd_rules.declare_types(x, tp=random_programs.PARAMETER_TYPES[n])
            for n, x in given.items()
        }

    def run(program, given):
        random_programs.run_program(
            program, given, group, OPERATORS, partial(spmd_rules.declare_types, tp="P")
        )

    theirs = [
        spmd_rules.find_error(partial(run, p), declared, {"tp": group}) for p in chosen
    ]
    ours = [random_programs.find_type_error(p, group, OPERATORS) for p in chosen]
    return [(not a, not b) for a, b in zip(ours, theirs, strict=True)]


# %% tags=["hide-input"]
# Table: what both say of 500 random programs
if THERE:
    told = Counter(
        ranks.run_with_fake_group(check_with_both, 2, random_programs.draw_programs(500, seed=2))
    )
    assert sum(told.values()) == 500 and not told[True, False] + told[False, True]
    rows = [
        (text, told[ours, True], told[ours, False])
        for text, ours in (("passes", True), ("refuses", False))
    ]
    made = show.table(rows, ["ours", "spmd_types passes", "refuses"])
else:
    made = "spmd_types is not installed here: pip install spmd_types==0.3.1"
made


# %% [markdown]
# It knows more. In its *global* mode V has a dimension, S(1) say, as in DTensor. Then it derives that a product along a cut dimension is P, where ours believes the author.
# This network applies GELU to addends, and with V alone nothing is wrong with its gradients:

# %%
def gelu_of_addends(x, up_rows, tp):
    """The first matrix by rows, and no sum in front of GELU."""
    return reduce_from(F.gelu(F.linear(tensor_parallel.split_last(x, tp), up_rows)), tp)


def ours(tp):
    x = tt.declare_types(torch.randn(2, 8).requires_grad_(), tp="I")
    up_rows = tt.declare_types(torch.randn(16, 4).requires_grad_(), tp="V")
    gelu_of_addends(x, up_rows, tp).sum().backward()


def step_theirs():
    import spmd_types as spmd
    from spmd_types.checker import typecheck

    group = dist.group.WORLD
    with spmd.set_current_mesh({"tp": spmd.MeshAxis.of(group)}):
        x = spmd.assert_type(torch.randn(2, 8, requires_grad=True), {"tp": spmd.I})
        up_rows = spmd.assert_type(
            torch.randn(16, 4, requires_grad=True), {"tp": spmd.S(1)}
        )
        try:
            with typecheck(local=False):
                F.gelu(
                    F.linear(spmd.convert(x, group, src=spmd.I, dst=spmd.S(1)), up_rows)
                )
        except spmd.SpmdTypeError as error:
            return str(error).splitlines()[0]


print("ours:      ", tt.check_step(ours, tp=2))
found = ranks.run_with_fake_group(step_theirs, 2) if THERE else "not installed here"
print("spmd_types:", found)

# %% [markdown]
# The price of that mode is that every operation needs a sharding rule: on CPUs attention, the masked embedding and a loss over a cut vocabulary had to be left out as islands when the course's GPT was tried. And its interface moves: ten releases in its first seven months, in which functions changed their names three times.
# Its local mode knows what ours does, and a check takes ours 0.5 to 0.8 times as long ([the benchmark](../benchmarks/tensor_types.py), two and twelve layers, on CPUs).
# One step beside one process finds this network as well: its *output* is wrong. That is the division of labour: **equality sees what forward computes, types see what backward owes it.**
#
# ## What goes wrong
#
# ### What no type sees

# %% tags=["hide-input"]
# The harness: a step with a mistake, for two ranks and for the checker
SHAPE = replace(SMALL, layers=1)
JOINT = torch.randint(64, (2, 4, 16), generator=torch.Generator().manual_seed(0))


def plain():
    torch.manual_seed(0)
    return GPT(SHAPE).to(ranks.device(), torch.float64)


def joint_batch():
    """Tokens and targets of the joint batch, [4, 16]."""
    return [x.to(ranks.device()) for x in JOINT]


def finish_step(model):
    """Gradients as they are before the step, which is taken."""
    found = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters()
    }
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    return found


def sum_norm_gradients(model, tp):
    if model.edges is SEQUENCE_SHARDED:
        sequence_parallel.sum_gradients(model, tp)


def step_tensor_parallel(
    tp,
    edges=tensor_parallel.REPLICATED,
    prepare=do_nothing,
    roll=False,
    after=sum_norm_gradients,
    logits=do_nothing,
):
    """Loss and gradients of a step of tensor parallelism; each argument can be a mistake."""
    model = tensor_parallel.parallelize(plain(), tp, edges)
    prepare(model, tp)
    tt.declare_parameters(model, tp=tensor_parallel.get_parameter_types(model))
    batch = (
        [part.roll(tp.rank(), 0) for part in joint_batch()] if roll else joint_batch()
    )
    x, y = [tt.declare_types(part, tp="V" if roll else "R") for part in batch]
    value = tensor_parallel.vocab_parallel_loss(logits(model(x), tp), y, tp)
    value.backward()
    after(model, tp)
    return value.detach(), finish_step(model)


def step_data_parallel(
    dp,
    batches=((0, 2), (2, 4)),
    scale=1.0,
    steps=1,
    after=data_parallel.average_gradients,
):
    """The same of data parallelism, on this rank's share of the batch."""
    model = plain()
    tt.declare_parameters(model, dp="R")
    x, y = [
        tt.declare_types(part[slice(*batches[dp.rank()])], dp="V")
        for part in joint_batch()
    ]
    for _ in range(steps):  # and nobody sets gradients to zero
        value = loss(model(x), y)
        tt.declare_types(value * scale, dp="P").backward()
        after(model, dp)
    value = value.detach().clone()
    dist.all_reduce(value, group=dp)
    return value / 2, finish_step(model)


def step_context_parallel(cp, attention="ring"):
    """The same of context parallelism; without a ring, each rank's tokens are a text of its own."""
    model = plain()
    if attention:
        model = context_parallel.distribute_model(model, cp, attention, "contiguous")
    tt.declare_parameters(model, cp="R")
    x, y = [
        tt.declare_types(part.chunk(2, 1)[cp.rank()], cp="V") for part in joint_batch()
    ]
    value = loss(model(x), y)
    tt.declare_types(value, cp="P").backward()
    context_parallel.average_gradients(model, cp)
    value = value.detach().clone()
    dist.all_reduce(value, group=cp)
    return value / 2, finish_step(model)


AXIS = {
    step_tensor_parallel: "tp",
    step_data_parallel: "dp",
    step_context_parallel: "cp",
}


def compare_with_one_process(step, options, clipped):
    """On a rank: how far the loss and the worst gradient are from one process's."""
    group, alone = dist.group.WORLD, plain()
    value, gradients = step(group, **options)
    x, y = joint_batch()
    full = loss(alone(x), y)
    full.backward()
    if clipped:
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    dims = {}
    if step is step_tensor_parallel:
        dims = tensor_parallel.get_shard_dims(
            tensor_parallel.parallelize(plain(), group)
        )
    worst = 0.0
    for name, parameter in alone.named_parameters():
        want, dim = parameter.grad, dims.get(name)
        want = want if dim is None else take_shard(want, dim, group)
        worst = max(worst, ((gradients[name] - want).norm() / want.norm()).item())
    return abs(value.item() / full.item() - 1), worst


def measure_mistake(step, options):
    """Loss and worst gradient, how far they are off on any rank; what the checker says."""
    clipped = options.get("after") is clip_own_norm
    # CPU: float64, of the host
    found = ranks.run(compare_with_one_process, 2, step, options, clipped, device="cpu")
    verdict = tt.check_step(partial(step, **options), **{AXIS[step]: 2})
    return *(max(each) for each in zip(*found, strict=True)), verdict


def format_percent(fraction):
    """With two digits; 0 is rounding."""
    return (
        "0" if fraction < 1e-10 else f"{100 * fraction:.{0 if fraction > 0.1 else 2}f}"
    )


def clip_own_norm(model, group):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


for step, options in (
    (step_tensor_parallel, {}),
    (step_tensor_parallel, {"edges": SEQUENCE_SHARDED}),
    (step_data_parallel, {}),
    (step_context_parallel, {}),
):
    value, gradient, verdict = measure_mistake(step, options)
    assert verdict and max(value, gradient) < 1e-10, (value, gradient, verdict)


# %% [markdown]
# Types do not see factors or random numbers, and what you declare is believed.

# %%
def start_apart(model, tp):
    torch.manual_seed(tp.rank())
    nn.init.normal_(model.norm.weight.data)


UNSEEN = {
    "the loss divided by N, and its gradients averaged": (
        step_data_parallel,
        {"scale": 1 / 2},
    ),
    "means of unequal batches, averaged": (
        step_data_parallel,
        {"batches": ((0, 3), (3, 4))},
    ),
    "weights that started apart": (step_tensor_parallel, {"prepare": start_apart}),
    "a factor that differs by rank": (
        step_tensor_parallel,
        {"logits": lambda x, tp: x * (1 + tp.rank())},
    ),
}

# %% tags=["hide-input"]
# Table: mistakes that pass, and what one step beside one process shows of them
rows = []
for name, case in UNSEEN.items():
    value, gradient, verdict = measure_mistake(*case)
    assert verdict and gradient > 0.01
    rows.append((name, format_percent(value), format_percent(gradient), "passes"))
show.table(rows, ["mistake", "loss off (%)", "worst gradient off (%)", "the checker"])


# %% [markdown]
# All four show in one step beside one process, if you compare gradients and not the loss alone: the first has the right loss.
#
# ### Types that are believed
#
# An operator that states I → R and forgets its all-reduce passes every check of programs; [the numeric test](#what-decides-a-type-numbers) is for that.
# Hooks that work within backward, such as those of `DataParallel` and ZeRO, are not followed. Say with `override_types` what they leave behind, and test it as their lessons do, beside one process.
# And a check in which nothing is differentiated checks nothing of $f$, for without a gradient I and R are one. The verdict says so:

# %%
def step_without_gradients(tp):
    with torch.no_grad():
        x = tt.declare_types(torch.randn(2, 8), tp="I")
        F.linear(x, tt.declare_types(torch.randn(4, 8), tp="V"))


print(tt.check_step(step_without_gradients, tp=2))


# %% [markdown]
# What moves between two ranks only, as in a pipeline, has no type: there each rank runs another program. Check the model uncut.
#
# ### Every mistake of this course
#
# Lessons here end in what goes wrong. Which of these would you have found, and how early?
# Rows with numbers were run just now: on two ranks beside one process, and under the checker. The others are judged by what their lessons measured; what raises, hangs or only takes time has no numbers to compare. An empty cell asks nothing of that test. (The table of [Model parallelism](model_parallelism.md#what-goes-wrong-and-how-it-looks) is made of these.)

# %% tags=["hide-input"]
# The mistakes that were run: lesson, name, step and what is wrong with it
def draw_equal_shards(model, tp):
    """Each rank draws with one seed, in its small shapes: all have the first part."""
    full = dict(plain().named_parameters())
    for name, parameter, dim, _ in tensor_parallel.states.list_shards(model):
        if dim is not None:
            parameter.data.copy_(full[name].chunk(tp.size(), dim)[0])


def average_parameters(model, dp):
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter, group=dp)
            parameter /= dp.size()


FORGOTTEN = tensor_parallel.Edges(do_nothing, reduce_from)
RUN = [
    (
        "tensor_parallel",
        "all-reduce in backward forgotten",
        step_tensor_parallel,
        {"edges": FORGOTTEN},
    ),
    (
        "tensor_parallel",
        "shards drawn from one seed",
        step_tensor_parallel,
        {"prepare": draw_equal_shards},
    ),
    ("tensor_parallel", "a batch for each rank", step_tensor_parallel, {"roll": True}),
    (
        "tensor_parallel",
        "a norm for each rank",
        step_tensor_parallel,
        {"after": clip_own_norm},
    ),
    (
        "sequence_parallel",
        "norms' gradients not summed",
        step_tensor_parallel,
        {"edges": SEQUENCE_SHARDED, "after": do_nothing},
    ),
    (
        "context_parallel",
        "each rank a short text",
        step_context_parallel,
        {"attention": None},
    ),
    (
        "data_parallel",
        "hook averages parameters",
        step_data_parallel,
        {"after": average_parameters},
    ),
    (
        "data_parallel",
        "gone round the wrapper",
        step_data_parallel,
        {"after": do_nothing},
    ),
    (
        "data_parallel",
        "means of unequal batches",
        step_data_parallel,
        {"batches": ((0, 3), (3, 4))},
    ),
    ("data_parallel", "zero_grad forgotten (step 2)", step_data_parallel, {"steps": 2}),
    ("pipeline", "gradients m times too large", step_data_parallel, {"scale": 4.0}),
]

# %% tags=["hide-input"]
# Table: every mistake of the lessons, and what finds it
rows, count_ = [], Counter()
for lesson, name, step, options in RUN:
    value, gradient, verdict = measure_mistake(step, options)
    assert gradient > 0.01
    right = value < 1e-10
    count_["right loss"] += right
    count_["found"] += not verdict
    count_["both"] += right and not verdict
    seen = "gradients: " if right else f"loss: {format_percent(value)} %, gradients: "
    seen += f"{format_percent(gradient)} %"
    rows.append((lesson, name, seen, "passes" if verdict else "finds it", ""))
assert (len(RUN), count_["right loss"], count_["found"], count_["both"]) == (
    11,
    7,
    7,
    6,
)
PASSES, NOT = "passes", "not followed"
rows += [
    (
        "tensor_parallel",
        "dropout: seeds of ranks",
        "no: random",
        PASSES,
        "streams of two ranks",
    ),
    ("sequence_parallel", "tokens that cannot be shared", "", "", "ValueError at once"),
    ("context_parallel", "positions from 0", "gradients of queries: 56 %", PASSES, ""),
    ("context_parallel", "all send first in a ring", "", "", "hangs, with nccl alone"),
    ("context_parallel", "heads that cannot be shared", "", "", "ValueError at once"),
    ("experts", "averaged over the wrong ranks", "gradients of experts", NOT, ""),
    ("experts", "a rank skips the exchange", "", NOT, "hangs"),
    ("experts", "all tokens to one expert", "no: all is right", NOT, "loads, watched"),
    ("mesh", "a norm that counts numbers t times", "weights", PASSES, ""),
    ("mesh", "twins that do not meet", "gradients of the twins", NOT, ""),
    ("mesh", "copies of unequal batches weigh the same", "gradients", PASSES, ""),
    ("mesh", "dropout: a seed for each rank", "no: random", PASSES, "masks, compared"),
    (
        "mesh",
        "tensor groups across nodes",
        "no: all is right",
        PASSES,
        "bytes, counted",
    ),
    ("data_parallel", "no_sync forgotten", "no: all is right", NOT, "bytes, counted"),
    ("data_parallel", "device of the second node", "", "", "an error, or one full GPU"),
    ("data_parallel", "a rank skips a bucket", "", NOT, "hangs"),
    ("data_parallel", "ranks built other models", "", "", "ValueError at once"),
    ("zero", "weights read outside forward", "no", NOT, "the value, looked at"),
    ("zero", "optimizer built before sharding", "weights", NOT, ""),
    ("zero", "clipped by the shard's norm", "weights", PASSES, ""),
    ("zero", "called on some ranks", "", NOT, "hangs"),
    ("zero", "one shard saved as the model", "no", NOT, "loading it"),
    ("pipeline", "two schedules", "", NOT, "hangs; validate"),
    ("pipeline", "two messages swapped", "loss", NOT, "validate"),
    ("pipeline", "a stage raises", "", "", "the first error by time"),
    ("collectives", "another order or shape, one missing", "", NOT, "hangs, or raises"),
    ("collectives", "two sums swapped", "outputs", NOT, ""),
    ("gemm", "never added up, joined as rows, averaged", "outputs", PASSES, ""),
    ("gemm", "summed in bfloat16", "within rounding", PASSES, "float32 beside it"),
    ("train", "each process alone", "gradients", "finds it", ""),
    ("train", "the same batches for all", "loss: one rank's", PASSES, ""),
    ("train", "one order in all epochs", "no", NOT, "a longer run"),
    ("train", "filling windows counted", "no", NOT, "validation, by ranks"),
    ("train", "each rank its own fp16 scale", "no", NOT, "a longer run: an overflow"),
    (
        "train",
        "all ranks write; model outlives group",
        "",
        NOT,
        "a broken file; no end",
    ),
    ("checkpoint", "one folder for all saves", "no", NOT, "a killed save, loaded"),
    (
        "checkpoint",
        "optimizer or position forgotten",
        "no",
        NOT,
        "a longer run, resumed",
    ),
    ("checkpoint", "shards of rank 0 saved", "no", NOT, "loading it"),
    ("checkpoint", "a stranger's pickle; a full disk", "", "", "no numbers"),
    ("deepspeed_engine", "a misspelt name: clipped at 1.0", "weights", NOT, ""),
    ("deepspeed_engine", "a parameter read at stage 3", "", NOT, "its shape"),
    (
        "deepspeed_engine",
        "pipeline at stage 2; no compiler",
        "",
        "",
        "an error at once",
    ),
    (
        "memory",
        "zeros, names, losses that hold on",
        "no: all is right",
        NOT,
        "bytes, counted",
    ),
    ("strategy", "rates, spills, fits", "", "", "seconds, measured"),
    ("cluster", "hangs, stragglers, networks", "", "", "watching the job"),
]
order = [
    "memory",
    "collectives",
    "gemm",
    "data_parallel",
    "train",
    "zero",
    "checkpoint",
]
order += ["pipeline", "tensor_parallel", "sequence_parallel", "context_parallel"]
order += ["experts", "mesh", "deepspeed_engine", "strategy", "cluster"]
head = ["lesson", "mistake", "one step beside one process", "the checker", "else"]
show.table(
    sorted(rows, key=lambda row: order.index(row[0])),
    head,
    caption=f"{len(rows)} mistakes",
)

# %% [markdown]
# `````{admonition} Checked: "if the loss of the first step is that of one process, the cut is right"
# :class: checked
#
# Of the eleven mistakes that were run, seven have the loss of one process, to ten digits; all eleven have a wrong gradient in that step, or in the next one.
# The checker finds six of these seven, and one more. What it misses are factors, starts and texts that were cut in two: of those the loss shows all but one factor, and the gradients show all.
# `````
#
# So use both: one step beside one process ([Parity](parity.md)), gradients included, which finds what types cannot see; and the checker, in each commit's tests, which names the line, and needs no reference that fits on one rank.
# What is left for a longer run are mistakes with time in them: orders of data, resumes, overflows.
#
# ## When to use it
#
# | for | against |
# |---|---|
# | Finds gradients that no output shows, before the program runs: all that pass are right, of 1,500 programs | A program can be right and be refused: 216 of the 1,048 refused ones |
# | Names the line, the operation and the fix | Each operator that sends has to state its signature; nobody looks into it |
# | Needs one process, no GPU, no reference, some milliseconds a layer | Factors, random numbers and starting values have no types |
# | Follows ordinary code, the step included | Backward's own hooks, and messages between two ranks, are believed |
#
# In a real job the sign that it is set up right is a count: `num_communicating` is $4L + 3$ for a tensor-parallel model, and `num_backwards` is not 0.
#
# ```{admonition} On more GPUs
# :class: note
#
# Types are the same on any device: nothing on this page would change, but for the milliseconds. The numeric test runs on the ranks' own GPUs, in float64.
# ```
#
# ## Exercises
#
# ```{exercise-start} Types of a model (easy)
# :label: ex-tt-words
# ```
#
# A GPT is trained by data and tensor parallelism, with the stream cut along the sequence between the cut parts. Give, as a string of two types for the axes dp and tp, such as `"RV"`:
# the weight of a norm; its gradient right after backward; the matrix `up`, cut by columns; its gradient right after backward; the tokens, of which each copy has its own.

# %%
answer = {
    "norm": ...,
    "norm's gradient": ...,
    "up": ...,
    "up's gradient": ...,
    "tokens": ...,
}
check(answer, "type_words")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-tt-words
# :label: sol-tt-words
# :class: dropdown
# ```
#
# On dp all copies have all weights, and each finds an addend of their gradient: R, and P. On tp a norm's weight is whole, and sees its own rank's tokens alone: R again. What is cut is V, and so is its gradient.
# All ranks of a tensor group look at the same tokens; integers have no gradient, and R it is.

# %%
answer = {
    "norm": "RR",
    "norm's gradient": "PP",
    "up": "RV",
    "up's gradient": "PV",
    "tokens": "VR",
}
check(answer, "type_words")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} An operator for its types (medium)
# :label: ex-tt-operator
# ```
#
# Write an operator with the signature V → R: all ranks' `x` [..., n] side by side, [..., t n], for ranks that go on with it differently. `group` has t ranks. The check runs the numeric test on real ones.

# %%
def my_operator(x, group):
    pass  # your code


check(my_operator)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-tt-operator
# :label: sol-tt-operator
# :class: dropdown
# ```
#
# Forward gathers. The gradient of R is P: backward is given addends, so it adds them up, and keeps the part that belongs to this rank's `x`.

# %%
class GatherForAll(torch.autograd.Function):
    signature = "V -> R"

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, dy):
        total = dy.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size(), -1)[ctx.group.rank()], None


def my_operator(x, group):
    return GatherForAll.apply(x, group)


check(my_operator)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} What a sum gives (medium)
# :label: ex-tt-meet
# ```
#
# Return the type of a sum of tensors with the given `types` (a list, of any length from 1), all of which get gradients and are added as they are; `None` where it is refused.

# %%
def my_sum(types):
    pass  # your code


check(my_sum)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-tt-meet
# :label: sol-tt-meet
# :class: dropdown
# ```
#
# I is alone with its like, and so is P: a sum of addends is an addend. The others may be mixed.

# %%
def my_sum(types):
    found = set(types)
    if len(found) == 1:
        return types[0]
    return "V" if found == {"R", "V"} else None


check(my_sum)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Repair a network (hard)
# :label: ex-tt-repair
# ```
#
# A gated network has one scale $s$, a number, which all ranks hold whole:
#
# $$
# y = \sum_{\text{ranks}} \big(\mathrm{SiLU}(x\,G) \cdot x\,U\big)\, s\, D + b .
# $$
#
# `x`, `scale` and `bias` are I, `gate`, `up` and `down` are this rank's parts, as `nn.Linear` keeps them. Below, the output is right, and gradients are not. Repair them with `copy_to` and `reduce_from`. The check follows your network, and compares it with one process.

# %%
def my_network(x, gate, up, down, scale, bias, group):
    y = F.silu(F.linear(x, gate)) * F.linear(x, up) * scale
    return reduce_from(F.linear(y, down), group) + bias


check(my_network)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-tt-repair
# :label: sol-tt-repair
# :class: dropdown
# ```
#
# Both `x` and `scale` are used by each rank with something of its own: both have to become R. The bias is added after the sum.

# %%
def my_network(x, gate, up, down, scale, bias, group):
    x, scale = copy_to(x, group), copy_to(scale, group)
    y = F.silu(F.linear(x, gate)) * F.linear(x, up) * scale
    return reduce_from(F.linear(y, down), group) + bias


check(my_network)

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} What finds what? (design)
# :label: ex-tt-plan
# ```
#
# You may run three tests before a long training: `"loss"` (the loss of one step beside one process), `"gradients"` (all gradients of that step beside one process) and `"types"` (the checker). For each mistake give the *cheapest* that finds it: types costs least, then loss, then gradients; `None` where none does.
# A model that does not fit on one rank cannot be run beside one process at all, so types comes first.

# %%
answer = {
    "copy_to forgotten": ...,
    "loss divided by N twice, before backward": ...,
    "a rank's tokens begin at position 0": ...,
    "gradients of norms not summed, sequence cut": ...,
    "each epoch in the same order": ...,
    "gradients averaged over tp in place of dp": ...,
}
check(answer, "type_plan")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-tt-plan
# :label: sol-tt-plan
# :class: dropdown
# ```
#
# Three are wrong types. A factor that is in the loss shows in the loss; wrong positions do as well, if you look at enough digits. The order of data is right in every step.

# %%
answer = {
    "copy_to forgotten": "types",
    "loss divided by N twice, before backward": "loss",
    "a rank's tokens begin at position 0": "loss",
    "gradients of norms not summed, sequence cut": "types",
    "each epoch in the same order": None,
    "gradients averaged over tp in place of dp": "types",
}
check(answer, "type_plan")

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - On each axis of the mesh a tensor has one of four types, I, R, V or P, and so has its gradient: the gradient of I is I, of V is V, of R is P, of P is R.
# - I and R hold the same numbers. They differ in their gradients: the ranks find the same gradient (I) or addends of it (R). No output shows that.
# - An operator's types are right when ⟨y, dy⟩ = ⟨x, dx⟩, summed over the ranks: this leaves one pair of types for each operator.
# - A table of operators and a torch dispatch mode follow a program through backward and step, before it runs: of 1,500 random programs 452 passed, and all 452 were right.
# - A check needs one process; its messages name the line, the operation and the correct type.
# - Types do not see factors, random numbers, initial weights or the order of data: compare one step, gradients included, with one process.
#
# ## Further reading
#
# - {cite:t}`shoeybi2019megatron`: the two operators, in section 3.
# - The documentation of `spmd_types` ([github.com/meta-pytorch/spmd_types](https://github.com/meta-pytorch/spmd_types)): types, operators, and both modes; `design.md` says why.
# - {cite:t}`jiang2025ttrace`: the other school, which finds such bugs in training runs by comparing tensors with a reference.
