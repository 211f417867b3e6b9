# ---
# jupyter:
#   jupytext:
#     default_lexer: ipython3
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
# # Tensor types: find a wrong gradient before the program runs
#
# After this lesson you can
#
# - name the type of every tensor in a parallel program (how the ranks' copies are related), and the type of its gradient;
# - test numerically whether an operator's backward matches its forward;
# - write a checker that follows these types through forward, backward and the optimizer's step;
# - check your own parallel model in one call, on a laptop.
#
# Two programs on two ranks have the same output and the same loss.
# In one of them the gradient of the input is off by 97 %.
#
# You need `copy_to` and `reduce_from` from [Tensor parallelism](tensor_parallel.md).
#
# ## Two programs with equal outputs and different gradients

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
    """The largest difference, divided by the largest value."""
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


# %% [markdown]
# Both programs compute a feed-forward network on two ranks, sharded as in [Tensor parallelism](tensor_parallel.md): the first matrix by columns, the second by rows.

# %%
def first(x, up, up_bias, down, bias, group):
    y = F.gelu(F.linear(copy_to(x, group), up, up_bias))
    return reduce_from(F.linear(y, down), group) + bias


def second(x, up, up_bias, down, bias, group):
    y = F.gelu(F.linear(x, up, up_bias))
    return reduce_from(F.linear(y, down), group) + bias


# %% tags=["hide-input"]
# Runs both on two ranks, and compares them with one process
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
    assert OFF[network][0] < 1.1e-14  # paths of 48 terms: 2 * 48 * 2^-53
    gradient = 100 * OFF[network][1]
    print(f"{network.__name__:6}  output right, gradient of x off by {gradient:.0f} %")
assert OFF[first][1] < 1.1e-14 and 0.96 < OFF[second][1] < 0.97

# %% [markdown]
# Same output, same loss, and a gradient that is off by 97 %.
# No test of the forward pass distinguishes the two programs.
# No single line of the second program looks wrong, either: `copy_to` is missing before `x` is multiplied by `up`.
# This lesson gives every tensor a type, and builds a checker of some 240 lines that finds such mistakes by these types.
#
# ## Four types: I, R, V and P
#
# A tensor's type says whether the tensor and its *gradient* are the same on all ranks of a group.
#
# ![The four types, on two ranks. I: both hold 3, and both hold the gradient, 5. R: both hold 3; their gradients are 2 and 3, partial sums of 5. V: they hold 3 and 4, with gradients 5 and 6. P: they hold 1 and 2, partial sums of 3, and both hold the gradient, 5.](../figures/tensor_types_kinds.svg)
#
# - **I**, invariant: all ranks hold the same tensor and use it in the same way, so each rank computes the full gradient.
#   In tensor parallelism the residual stream is I, and so are norms' weights.
# - **R**, replicated: all ranks hold the same tensor, but each uses it differently, so each rank computes a partial sum of the gradient.
#   The input of a column-parallel matrix is R, and in data parallelism all weights are.
# - **V**, varying: each rank has a different tensor. A sharded matrix is V, and so is a rank's share of the batch.
# - **P**, partial: each rank has a partial sum (summand), not reduced yet, such as the output of a row-parallel matrix.
#
# I and R hold the same numbers in forward. They differ only in their gradients, so no output shows the difference.
# PyTorch's DTensor has three placements, Replicate, Shard and Partial: R, V and P.
# The letters are those of Meta's library `spmd_types`, which [a later section](#metas-library-spmd_types) compares with ours.
#
# A gradient has a type as well, the dual of the tensor's type: I for I, V for V, P for R, and R for P.

# %%
print(tt.GRADIENT_TYPES)

# %% [markdown]
# The types in the network:
#
# ![A feed-forward network, by types. Above, with f: x is I, f makes it R; the product with the sharded W₁ is V, GELU leaves it V, the product with the sharded W₂ is V and is meant as P, g makes the sum, I, and the bias, which is I, is added. Gradients go back with the dual types: I, R, V, V, P, I. Below, without f: x is I and is multiplied by W₁, which is V. There the checker stops.](../figures/tensor_types_chain.svg)
#
# `copy_to`, Megatron's $f$, turns I into R. Its forward is the identity; the change of type requires the all-reduce in its backward.
# `reduce_from`, $g$, turns P into I.
#
# ## A checker in twenty lines
#
# An operator that communicates has a *signature*: the types of its input and its result. All other operations follow one rule: equal types can be combined, and R can be combined with V.
# P must be reduced before any other operation, and I can be combined only with I.

# %%
SENDS = {"f": ("I", "R"), "g": ("P", "I")}


def combine(a, b):
    """The type of a result of a and b, without communication."""
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
# An operator that expects P also accepts V, such as the product with the sharded $W_2$: only the author knows whether the ranks' different numbers are partial sums.
#
# To test this checker, the next cell checks seven programs. Two real ranks also run each program with random numbers, and finite differences show which gradients are wrong.
# In the column *steps*, `I`, `R` or `V` is a product with a parameter of this type.

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
    """On a rank: for each program, the parameters whose gradient is wrong."""
    found = []
    for seed, program in enumerate(chosen):
        found.append(
            random_programs.find_wrong_gradients(
                program, seed, dist.group.WORLD, OPERATORS
            )
        )
    return found


# random_programs writes a product as "*V", and appends the last g.
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
# The checker computes no numbers, but each verdict agrees with finite differences.
#
# This plain version does not handle real PyTorch programs; more than one group; sums, products and views of P; tensors that need no gradient; backward and the optimizer's step.
# It does not test the signatures of $f$ and $g$, either.
#
# ## Numeric test of a signature: the adjoint
#
# Signatures can be tested.
# An operator that communicates is a linear map $A$ of the tensors of all ranks, and its backward has to be the adjoint $A^{\!\top}$.
# Then, for any $x$ and $dy$,
#
# $$
# \langle A x,\, dy\rangle = \langle x,\, A^{\!\top} dy\rangle ,
# $$
#
# where the product of tensors of type I counts once, since all ranks hold a copy, and products of other types are summed over the ranks.
# So draw $x$ and $dy$ according to their types, run forward and backward once, and compare the two products. In addition, I and R have to be equal on all ranks, and forward must not change the global tensor, which is V's parts concatenated or P's summed.

# %%
show.source(adjoint.find_contradictions)


# %% [markdown]
# The next cells test the course's operators, including the two of the [next lesson](sequence_parallel.md), and an $f$ without the all-reduce in backward, against all sixteen signatures.

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
    "copy_to without its all-reduce": (ForgetfulCopy.apply, -1),
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
# Table: the signatures that pass the numeric test, on two ranks
left = ranks.run(list_passing_signatures, 2)[0]
assert [len(pairs) for pairs in left.values()] == [1] * 6 + [4]
assert "I -> R" not in left["copy_to without its all-reduce"]
show.table(
    [(name, ", ".join(pairs)) for name, pairs in left.items()],
    ["operator", "signatures that pass"],
)

# %% [markdown]
# Each of the six operators passes with exactly one signature. The $f$ without all-reduce is the identity, which passes with several signatures, but not with I → R.
#
# ## The checker for PyTorch programs: a TorchFunctionMode
#
# The full checker handles real PyTorch programs. Each tensor carries its type in an attribute: one of the four letters for each axis of the mesh.
# An operator of the course states its signature in one line, beside its forward:

# %%
show.source(_ReduceFrom)

# %% [markdown]
# The rule for types adds three things to `combine`. P is allowed in sums of P, views, and products with R; `kind` tells these apart.
# Tensors without a gradient (tokens, masks, anything under `no_grad`) may be I or R as needed, since these differ only in the gradient.
# A mismatch raises an error with the reason.

# %%
show.source(core.combine_types, core.convert_type)

# %% [markdown]
# To see each operation, the checker is a `TorchFunctionMode`: torch calls it instead of each torch function. The checker finds the result's type *before* it runs the function, and then attaches the type to the result.

# %%
show.source(core.TypeChecker.__torch_function__, core.TypeChecker.infer_types)

# %% [markdown]
# An operator's signature applies on the axis of its group; on all other axes the rule for ordinary operations applies.

# %%
show.source(core.TypeChecker.combine_axes, core.TypeChecker.check_operator)

# %% [markdown]
# Some operators fuse several others: `_Columns` computes queries, keys and values at once, and overlaps a collective with their products.
# Its `forward_unfused` computes the same with plain operators, which the checker follows.

# %%
show.source(_Columns.forward_unfused)

# %% [markdown]
# `dist.all_reduce` turns P into R, in place.
# Autograd does not see plain collectives.
# If an all-reduced tensor needs a gradient, backward passes the gradient on unchanged, so the result is I, as with `reduce_from`. The checker refuses other plain collectives of such tensors.

# %%
show.source(core.TypeChecker.check_collective)

# %% [markdown]
# torch does not pass an autograd Function to a TorchFunctionMode.
# So Megatron's $f$ and the other operators are subclasses of `Operator`, whose `apply` calls the checker during a check.
# The checker refuses any operation on the result of another Function.

# %%
show.source(tt.Operator, core.check_types)


# %% [markdown]
# `check_step` checks a step in a single process with fake groups, whose messages move no data, so it needs neither a GPU nor a second rank.
# It calls the step with a group for each axis. `declare_types` sets a tensor's type.

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
# The checker refuses the second program before its product is computed, and names the line, the operation, its types, and the fix.
#
# ## Test: 200 random programs and finite differences
#
# A checker that passes a wrong program is worse than none. So this cell draws 200 random programs from six operators that communicate, products and sums with parameters of all four types, and GELU.
# The checker checks each program. Then two real ranks run it and compare every parameter's gradient with finite differences.

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
# No program that passes has a wrong gradient.
# [The tests](../tests/test_tensor_types.py) repeat this with the first 60, and once a week with 1,500, of which 452 pass.
# The checker also refuses programs with right gradients, as it should: for example, a program that sums equal tensors of $t$ ranks returns $t$ times the right value, and its gradient is right for this wrong value.
#
# ## Through backward and the step
#
# ![A step of data and tensor parallelism, by the types of a matrix on both axes, dp and tp. The matrix is R on dp and V on tp, the local loss V and I. The loss is declared a partial sum of the joint loss: P and I. Backward gives the matrix a gradient with the dual types, P and V. The all-reduce over dp makes it R and V, which are the matrix's own types, so the step is allowed. Without the all-reduce P is combined with R in the step.](../figures/tensor_types_step.svg)
#
# The loss of a rank's own batch is V on the data axis. You declare it P: a partial sum of the joint loss.
# Backward may start from a loss of type I or P; from an R loss, each gradient would be counted once for every rank.
# Each parameter's gradient then gets the dual type of the parameter; the checker does not look at the operations of backward.

# %%
show.source(core.TypeChecker.check_backward, core.TypeChecker.set_gradient_types)

# %% [markdown]
# The code after backward is checked as before: an all-reduce turns P into R, clipping is an ordinary operation, and the optimizer's step must not combine mismatched types.
#
# The next cell checks the course's own GPT on a data × tensor mesh of 2 × 2.
# `tensor_parallel.get_parameter_types(model)` returns V for sharded parameters and I for replicated ones.
# With the residual stream sharded along the sequence, as in the [next lesson](sequence_parallel.md), norms see only a rank's own tokens, so replicated parameters are R.

# %%
SMALL = Config(vocab=64, seq=16, layers=2, heads=4, hidden=32, tied=False)


def reduce_and_clip(model, dp, tp):
    """Sum, average and clip the gradients before a step."""
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
    tt.declare_types(value, dp="P").backward()  # a partial sum of the joint loss
    after(model, dp, tp)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


for edges in (tensor_parallel.REPLICATED, SEQUENCE_SHARDED):
    print(tt.check_step(partial(step_on_mesh, edges=edges), dp=2, tp=2))


# %% [markdown]
# The model needs only a signature for each operator. The next cell makes three mistakes after backward:

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
# torch's `clip_grad_norm_` computes the norm of a rank's own shards, which is V, and would scale I gradients by it.
# The last mistake is that of [Sequence parallelism](sequence_parallel.md#gradients-of-norms-that-nobody-sums), where the loss curve looks right: the gradient of a norm's weight is still P in the optimizer's step.
#
# ## Two published bugs
#
# In BigCode's fork of Megatron-LM all query heads share one head of keys and values.
# Each rank holds the full weights of this head, and uses them with its own queries.
# The ranks' gradients of these weights were not summed, so a model had a validation loss of 3.74 instead of 2.64 (bigcode-project/Megatron-LM, issues 35 and 37).
# The second bug was reported in September 2026 (NVIDIA/Megatron-LM, issue 7452, finding 11): in the attention, the gradients of the norm weight that all heads share were not summed.
# The attention below can have both bugs. The same operator fixes both: $f$ applied to the weight.

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
# Table: both bugs on two ranks compared with one process, and the checker's verdict
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
    verdict = tt.check_step(partial(step_attention, options=options), tp=2)
    # Paths of up to 500 terms: 2 * 500 * 2^-53, nine times, since terms cancel.
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
# A check sends nothing, and holds no memory beyond the program's own. Its time grows with the number of operations, which is linear in the number of layers, so two small models predict all others.
# A model with $L$ layers has $4L + 3$ operators that communicate: two for each attention and each feed-forward network, one after the embedding, one before the head, and the loss.

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
# The check takes some milliseconds for each layer:

# %% tags=["hide-input", "measured"]
# Table: milliseconds of forward and backward, plain and checked
def time_steps(layers, rounds=7):
    """Return median seconds of forward and backward on a fake group: plain, checked."""
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
show.table(rows, ["layers", "plain (ms)", "checked (ms)", "check of a layer (ms)"])

# %% [markdown]
# Widths do not matter: layers of a 405B model have as many operations as these. So check a narrow model with the same code before every long run and in every commit's tests, but do not train under the checker.
#
# ## Meta's library spmd_types
#
# `spmd_types` by Meta (version 0.3.1 of October 2026, a beta under BSD licence) has the same four types, and its own operators. torchtitan uses it.
# An autograd Function states its types to `spmd_types` in a hook; our `spmd_rules.attach_rule` makes this hook from our signatures.
# The next cell gives 500 other random programs to both checkers:

# %%
THERE = importlib.util.find_spec("spmd_types") is not None


def check_with_both(chosen):
    """On a fake group: for each program, whether ours and theirs pass it."""
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
# Table: verdicts of both on 500 random programs
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
# `spmd_types` can do more.
# In its *global* mode V has a dimension, such as S(1), as in DTensor.
# So it derives that a product along a sharded dimension is P, while ours relies on the author's declaration.
# This network wrongly applies GELU to partial sums. Our checker follows them as V, and passes the network, since its gradients match its wrong output:

# %%
def gelu_of_addends(x, up_rows, tp):
    """Shard the first matrix by rows, and forget the sum before GELU."""
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
# In that mode every operation needs a sharding rule: for the course's GPT on CPUs, we had to exclude attention, the masked embedding and the loss over a sharded vocabulary.
# The interface is not stable: in ten releases in seven months, functions were renamed three times.
# Its local mode checks the same as our checker, which takes 0.5 to 0.8 times as long ([the benchmark](../benchmarks/tensor_types.py), two and twelve layers, on CPUs).
# Comparing one step with one process also finds the GELU of partial sums, since the *output* is wrong: **a comparison tests what forward computes, types test whether backward matches forward.**
#
# ## What goes wrong
#
# ### What no type sees

# %% tags=["hide-input"]
# Functions that run a step with a mistake, on two ranks and under the checker
SHAPE = replace(SMALL, layers=1)
JOINT = torch.randint(64, (2, 4, 16), generator=torch.Generator().manual_seed(0))


def plain():
    torch.manual_seed(0)
    return GPT(SHAPE).to(ranks.device(), torch.float64)


def joint_batch():
    """Tokens and targets of the joint batch, [4, 16]."""
    return [x.to(ranks.device()) for x in JOINT]


def finish_step(model):
    """Take the step; return the gradients from before it."""
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
    """Loss and gradients of a data-parallel step on this rank's share of the batch."""
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
    """Loss and gradients of a context-parallel step; without a ring, each rank has its own text."""
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
    """Largest errors of loss and gradients on any rank, and the checker's verdict."""
    clipped = options.get("after") is clip_own_norm
    # CPU: float64, of the host
    found = ranks.run(compare_with_one_process, 2, step, options, clipped, device="cpu")
    verdict = tt.check_step(partial(step, **options), **{AXIS[step]: 2})
    return *(max(each) for each in zip(*found, strict=True)), verdict


def format_percent(fraction):
    """With two digits; 0 is rounding: 2 * 900 * 2^-53 of terms that cancel to 1/500."""
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
# Factors and random numbers do not change types, and the checker does not test your declarations.

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
# Table: mistakes that pass the checker, compared with one process in one step
rows = []
for name, case in UNSEEN.items():
    value, gradient, verdict = measure_mistake(*case)
    assert verdict and gradient > 0.01
    rows.append((name, format_percent(value), format_percent(gradient), "passes"))
show.table(rows, ["mistake", "loss off (%)", "worst gradient off (%)", "the checker"])


# %% [markdown]
# Comparing one step with one process finds all four, if you compare gradients as well as the loss: the first has the right loss.
#
# ### What the checker does not verify
#
# An operator with the signature I → R but without the all-reduce passes the checker; only [the numeric test](#numeric-test-of-a-signature-the-adjoint) finds it.
# The checker does not follow hooks in backward, such as those of `DataParallel` and ZeRO. Declare the types of their results with `override_types`, and compare the program with one process, as their lessons do.
# A check without a gradient does not test $f$, because without a gradient I and R are the same. The verdict says so:

# %%
def step_without_gradients(tp):
    with torch.no_grad():
        x = tt.declare_types(torch.randn(2, 8), tp="I")
        F.linear(x, tt.declare_types(torch.randn(4, 8), tp="V"))


print(tt.check_step(step_without_gradients, tp=2))


# %% [markdown]
# Point-to-point messages, as in a pipeline, have no type, because each rank runs a different program. Check the model without pipeline stages.
#
# ### Every mistake of this course
#
# This table shows which test finds each mistake in the lessons' sections "What goes wrong".
# Eleven mistakes are run here: on two ranks compared with one process, and under the checker.
# The other rows rely on measurements in their lessons; programs that raise, hang or only take time have no numbers to compare. An empty cell means that the test does not apply. (The table of [Model parallelism](model_parallelism.md#what-goes-wrong-and-how-it-looks) uses these results.)

# %% tags=["hide-input"]
# The mistakes that were run: lesson, name, step and what is wrong with it
def draw_equal_shards(model, tp):
    """All ranks draw shards from one seed: every rank gets the first shard."""
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
    (
        "tensor_parallel",
        "a different batch on each rank",
        step_tensor_parallel,
        {"roll": True},
    ),
    (
        "tensor_parallel",
        "clipped by each rank's own norm",
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
        "each rank attends to its own part only",
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
        "model.module called, not the wrapper",
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
# Table: every mistake of the lessons, and the test that finds it
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
PASSES, NOT = "passes", "not checked"
RANDOM, EQUAL = "nothing: masks are random", "nothing: all numbers are right"
rows += [
    (
        "tensor_parallel",
        "dropout: wrong seeds on ranks",
        RANDOM,
        PASSES,
        "two ranks' masks",
    ),
    ("sequence_parallel", "tokens not divisible by t", "", "", "ValueError at once"),
    ("context_parallel", "positions from 0", "gradients of queries: 56 %", PASSES, ""),
    ("context_parallel", "all send first in a ring", "", "", "hangs only with nccl"),
    ("context_parallel", "heads not divisible by ranks", "", "", "ValueError at once"),
    ("experts", "averaged over the wrong ranks", "gradients of experts", NOT, ""),
    ("experts", "a rank skips the all-to-all", "", NOT, "hangs"),
    ("experts", "all tokens to one expert", EQUAL, NOT, "experts' loads"),
    ("mesh", "the norm counts elements t times", "weights", PASSES, ""),
    ("mesh", "tied embedding: gradients not summed", "its gradients", NOT, ""),
    ("mesh", "unequal batches weighted equally", "gradients", PASSES, ""),
    ("mesh", "dropout: own seed on each rank", RANDOM, PASSES, "two ranks' masks"),
    ("mesh", "tensor groups across nodes", EQUAL, PASSES, "bytes sent"),
    ("data_parallel", "no_sync forgotten", EQUAL, NOT, "bytes sent"),
    ("data_parallel", "GPU chosen by RANK", "", "", "an error, or one full GPU"),
    ("data_parallel", "a rank skips a bucket", "", NOT, "hangs"),
    ("data_parallel", "ranks built different models", "", "", "ValueError at once"),
    ("zero", "weights read outside forward", "nothing", NOT, "values read"),
    ("zero", "optimizer built before sharding", "weights", NOT, ""),
    ("zero", "clipped by the shard's norm", "weights", PASSES, ""),
    ("zero", "called on some ranks only", "", NOT, "hangs"),
    ("zero", "one shard saved as the model", "nothing", NOT, "loading it"),
    ("pipeline", "stages with two schedules", "", NOT, "hangs; validate"),
    ("pipeline", "two messages swapped", "loss", NOT, "validate"),
    ("pipeline", "a stage raises", "", "", "the earliest error"),
    ("collectives", "another order or shape, or no call", "", NOT, "hangs, or raises"),
    ("collectives", "two sums swapped", "outputs", NOT, ""),
    ("gemm", "partial sums not summed, joined as rows, or averaged", "outputs", PASSES, ""),
    ("gemm", "summed in bfloat16", "within rounding", PASSES, "a sum in float32"),
    ("train", "no process group", "gradients", "finds it", ""),
    ("train", "same batches on all ranks", "loss: one rank's", PASSES, ""),
    ("train", "same order in all epochs", "nothing", NOT, "a longer run"),
    ("train", "repeated windows counted", "nothing", NOT, "validation loss, by ranks"),
    ("train", "own fp16 scale on each rank", "nothing", NOT, "a run with an overflow"),
    (
        "train",
        "all ranks write; model outlives group",
        "",
        NOT,
        "a broken file; the run never ends",
    ),
    ("checkpoint", "one folder for all saves", "nothing", NOT, "loading a killed save"),
    (
        "checkpoint",
        "optimizer or position forgotten",
        "nothing",
        NOT,
        "a longer run, resumed",
    ),
    ("checkpoint", "shards of rank 0 saved", "nothing", NOT, "loading it"),
    ("checkpoint", "an untrusted pickle; a full disk", "", "", "no numbers"),
    ("deepspeed_engine", "a misspelt name: clipped at 1.0", "weights", NOT, ""),
    ("deepspeed_engine", "a parameter read at stage 3", "", NOT, "its shape"),
    (
        "deepspeed_engine",
        "pipeline at stage 2; no compiler",
        "",
        "",
        "an error at once",
    ),
    ("memory", "zeroed gradients or old tensors kept", EQUAL, NOT, "bytes held"),
    ("strategy", "wrong constants; memory nearly full", "", "", "seconds"),
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
head = ["lesson", "mistake", "one step shows", "the checker", "other tests"]
show.table(
    sorted(rows, key=lambda row: order.index(row[0])),
    head,
    caption=f"{len(rows)} mistakes",
)

# %% [markdown]
# `````{admonition} False: "if the loss of the first step is that of one process, the cut is right"
# :class: checked
#
# Of the eleven mistakes that were run, seven have the loss of one process, to ten digits; all eleven have a wrong gradient in that step, or in the next step.
# The checker finds six of these seven, and one more. It misses factors, wrong initial weights and sequences that were cut in two. The loss shows all of these but one factor, and the gradients show all.
# `````
#
# So use both tests.
# Compare one step, gradients included, with one process ([Parity](parity.md)): this finds mistakes that types do not show.
# And run the checker in each commit's tests: it names the line, and needs no reference that fits on one rank.
# Only a longer run finds mistakes that depend on time: the order of data, resuming, overflows.
#
# ## When to use it
#
# | for | against |
# |---|---|
# | Finds wrong gradients that no output shows, before the program runs: of 1,500 programs, all that passed were right | Of 1,048 refused programs, 216 have right gradients |
# | Names the line, the operation and the fix | Each operator that communicates has to state its signature, which the checker does not verify |
# | Needs one process, no GPU, no reference, some milliseconds per layer | Factors, random numbers and starting values have no types |
# | Follows ordinary code, the optimizer's step included | Hooks in backward and point-to-point messages are not checked |
#
# In a real job, check two counts: `num_communicating` is $4L + 3$ for a tensor-parallel model, and `num_backwards` is not 0.
#
# ```{admonition} On more GPUs
# :class: note
#
# Types are the same on any device: on GPUs, only the milliseconds on this page would change. The numeric test runs on the ranks' own GPUs, in float64.
# ```
#
# ## Exercises
#
# ```{exercise-start} Types of a model (easy)
# :label: ex-tt-words
# ```
#
# A GPT is trained with data and tensor parallelism, and its residual stream is sharded along the sequence. Give the types on the axes dp and tp as a string, such as `"RV"`, for
# the weight of a norm; its gradient right after backward; the matrix `up`, sharded by columns; its gradient right after backward; the tokens, which differ between replicas.

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
# On dp every replica has all weights, and computes a partial sum of their gradient: R, and P. On tp all ranks have a norm's weight, but each applies it to its own tokens: R again. A sharded matrix is V, and so is its gradient.
# All ranks of a tensor group have the same tokens, so the tokens are R; as integers they have no gradient.

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
# ```{exercise-start} An operator with a given signature (medium)
# :label: ex-tt-operator
# ```
#
# Write an operator with the signature V → R: it concatenates all ranks' `x` [..., n] to [..., t n], which each rank then uses differently. `group` has t ranks. The check runs the numeric test on real ranks.

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
# Forward gathers. The gradient of R is P: backward receives partial sums, adds them up, and keeps the part of this rank's `x`.

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
# ```{exercise-start} The type of a sum (medium)
# :label: ex-tt-meet
# ```
#
# Return the type of a sum of tensors with the given `types` (a list, of any length from 1), all of which need gradients and are added without communication; `None` if the checker refuses the sum.

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
# I can be added only to I, and P only to P: a sum of partial sums is a partial sum. R and V may be mixed.

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
# A gated network has a scale $s$, one number that all ranks hold:
#
# $$
# y = \sum_{\text{ranks}} \big(\mathrm{SiLU}(x\,G) \cdot x\,U\big)\, s\, D + b .
# $$
#
# `x`, `scale` and `bias` are I; `gate`, `up` and `down` are this rank's shards, as `nn.Linear` keeps them. The network below has the right output and wrong gradients. Repair it with `copy_to` and `reduce_from`. The check runs the checker, and compares the network with one process.

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
# Each rank uses `x` and `scale` with its own shards, so both have to become R. The bias is added after the sum.

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
# ```{exercise-start} Which test finds which mistake? (design)
# :label: ex-tt-plan
# ```
#
# You may run three tests before a long training: `"loss"` (one step's loss, compared with one process), `"gradients"` (that step's gradients, compared with one process) and `"types"` (the checker). For each mistake give the *cheapest* test that finds it: types costs least, then loss, then gradients; `None` if no test does.
# A model that does not fit on one rank cannot be compared with one process, so types comes first.

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
# Three mistakes change types. The loss shows its double division, and also wrong positions, if you compare enough digits. With a wrong order of data every single step is right.

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
# - I and R hold the same numbers, but differ in their gradients: every rank computes the same gradient (I) or a partial sum of it (R). No output shows the difference.
# - An operator's signature is right when ⟨y, dy⟩ = ⟨x, dx⟩, summed over the ranks: each operator passes with one signature.
# - A `TorchFunctionMode` with these signatures checks a program through backward and step, before it runs: of 1,500 random programs 452 passed, and all 452 were right.
# - A check needs one process; its messages name the line, the operation and the correct type.
# - Types do not show factors, random numbers, initial weights or the order of data: compare one step, gradients included, with one process.
#
# ## Further reading
#
# - {cite:t}`shoeybi2019megatron`: the two operators, in section 3.
# - The documentation of `spmd_types` ([github.com/meta-pytorch/spmd_types](https://github.com/meta-pytorch/spmd_types)): types, operators, and both modes; `design.md` says why.
# - {cite:t}`jiang2025ttrace`: another approach, which finds such bugs in training runs by comparing tensors with a reference.
