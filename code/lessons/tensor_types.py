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
# # Tensor types
#
# After this lesson you can
#
# - say what a tensor is on all ranks, and find a wrong gradient before it runs;
# - prove that it computes what one process computes;
# - predict what it costs.
#
# It takes a minute to read. Running it takes ten seconds.

# %% tags=["hide-input"]
import torch
import torch.distributed as dist

from shardlab import count, ranks, show
from shardlab.tensor_types import mean, predict
from shardlab.check import check

x_N = torch.arange(1_000_000.0)

# %% [markdown]
# ## The problem in a number
#
# The number is measured on the page, and makes the reader want to know why.

# %%
print(f"{x_N.numel():,} numbers take {x_N.nbytes / 1e6:.0f} MB.")


# %% [markdown]
# ## The picture
#
# ![Before, each of four ranks holds numbers of its own; after, all hold the same mean.](../figures/tensor_types_mean.svg)
#
# ## The mechanism in its plainest form
#
# From 5 to 25 lines that one can hold in the head, equal to one process. The text says what they leave out: here, bad input.

# %%
def plain():
    x_n = x_N.chunk(dist.get_world_size())[dist.get_rank()].to(ranks.device())
    total = x_n.sum()
    dist.all_reduce(total)
    return total.item() / x_N.numel()


found = ranks.run(plain, 4)
assert all(abs(value / x_N.mean().item() - 1) < 1e-6 for value in found)  # another order of adding
print(found)

# %% [markdown]
# ## The module's core
#
# What the module adds to it, and why.

# %%
show.source(mean)


# %% [markdown]
# ## Equal to one process
#
# The tolerance, and why it is not zero: ranks add in another order.

# %%
def difference():
    x_n = x_N.chunk(dist.get_world_size())[dist.get_rank()].to(ranks.device())
    with count.sent() as sent:
        ours = mean(x_n, dist.group.WORLD)
    return abs(ours.item() / x_N.mean().item() - 1), sent.payload["all_reduce"]


for size in (1, 2, 4):
    assert all(off < 1e-6 for off, _ in ranks.run(difference, size))
print("equal on 1, 2 and 4 ranks")

# %% [markdown]
# ## What it costs

# %%
want, (_, sent) = predict(x_N.itemsize), ranks.run(difference, 4)[0]
assert sent == want
show.table([("all_reduce", want, sent, sent - want)], ["step", "predicted (bytes)", "counted (bytes)", "off"])


# %% [markdown]
# ## The production library
#
# The same by the library that real jobs use, beside ours.

# %%
def theirs():
    x_n = x_N.chunk(dist.get_world_size())[dist.get_rank()].to(ranks.device())
    parts = [torch.empty_like(x_n) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x_n)  # all numbers travel
    return torch.cat(parts).mean().item()


assert all(abs(value / x_N.mean().item() - 1) < 1e-6 for value in ranks.run(theirs, 4))


# %% [markdown]
# ## What goes wrong
#
# How each mistake looks, and how it is found.
#
# ## Exercises
#
# ```{exercise-start} A mean over ranks (easy)
# :label: ex-tensor_types-mean
# ```
#
# Each rank has as many numbers. Return the mean of all of them, on every rank.

# %%
def my_tensor_types(x_n, group):
    pass  # your code


check(my_tensor_types)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-tensor_types-mean
# :label: sol-tensor_types-mean
# :class: dropdown
# ```
#
# Add up what there is here, then what there is on all ranks.

# %%
def my_tensor_types(x_n, group):
    total = x_n.sum()
    dist.all_reduce(total, group=group)
    return total / (len(x_n) * dist.get_world_size(group))


check(my_tensor_types)

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - What to keep, in seven lines at most; advantages and disadvantages with the number behind each.
#
# ## Further reading
#
# - Papers, with what is in them, from `book/references.bib`.
