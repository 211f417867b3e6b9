"""The whole plain GPT on a context that is cut over ranks.

Every rank has all weights and its own tokens, from the embedding to the loss. Norms, matrices and
the loss work on each token alone and notice nothing. Attention does: its rotary positions are those
of the whole sequence, and its keys are on all ranks, so its core is `ring_attention` or
`all_to_all_attention`. Gradients of the weights are means over the tokens that a rank saw; the mean
of those over the ranks, which have equally many, is the gradient of the whole (the same step that
data parallelism makes).

    model = distribute(GPT(config), group, attention="ring", layout="zigzag")
    optimizer = torch.optim.AdamW(model.parameters())
    tokens_Bs, targets_Bs = (share(x, group, "zigzag") for x in batch)
    loss(model(tokens_Bs), targets_Bs).backward()
    average_gradients(model, group)
    optimizer.step()

Shapes: B batch, S tokens in all, s = S/N of one rank, H hidden, A heads, K key and value heads, D
size of a head.
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from shardlab import buckets
from shardlab.model import GPT, Attention, rotate
from shardlab.ranks import check_trained

from .layout import check_layout, group_of, positions, split
from .ring import ring_attention
from .ulysses import all_to_all_attention, key_repeats

ATTENTIONS = {"ring": ring_attention, "ulysses": all_to_all_attention}


def distribute(
    model: GPT, group: dist.ProcessGroup, attention: str = "ring", layout: str = "zigzag"
) -> GPT:
    """Let `model` work on this rank's tokens of a context that `group` shares; the same, in place.

    Forward then takes `share(tokens_BS, …)` [B, s] and gives logits [B, s, V]. Parameters stay as
    they are, and whole: states are loaded and saved as ever. attention: "ring" or "ulysses".

    Raises ValueError, before anything is sent, for other names, dropout, a model that is
    distributed already, and heads that all-to-all attention cannot share out.
    """
    if attention not in ATTENTIONS:
        raise ValueError(f"attention={attention!r}: allowed are 'ring' and 'ulysses'")
    check_layout(layout)
    ranks, _ = group_of(group)
    parts = [part for part in model.modules() if isinstance(part, Attention)]
    if not parts:
        raise ValueError(f"model={type(model).__name__}: allowed is a shardlab.model.GPT")
    for part in parts:
        if "forward" in vars(part):
            raise ValueError("model: is distributed already; allowed is a plain one")
        if part.config.dropout:
            # One process draws a number for each pair of tokens; here, no rank sees all pairs.
            raise ValueError(f"dropout={part.config.dropout}: allowed is 0 with a context cut")
        if attention == "ulysses":
            # From the widths, so that it is right for heads that tensor parallelism has cut.
            widths = part.query.weight.shape[0], part.key.weight.shape[0]
            key_repeats(*(width // part.config.head_size for width in widths), ranks)
    for part in parts:
        part.forward = partial(_attention, part, group, attention, layout)
    return model


def share(tokens_BS: Tensor, group: dist.ProcessGroup, layout: str = "zigzag") -> Tensor:
    """This rank's tokens [B, s] of a batch that every rank has.

    Raises ValueError, naming the nearest that would do, for a sequence that cannot be shared out.
    """
    ranks, rank = group_of(group)
    return split(tokens_BS, ranks, rank, layout)


def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """After backward: every gradient becomes the mean over the ranks, in one all-reduce."""
    check_trained(model, group)
    buckets.average_gradients(model.parameters(), group, joined=True)


def average(value: Tensor, group: dist.ProcessGroup) -> float:
    """The mean over the ranks of a number, for instance of the loss; without gradient.

    To return it, a GPU's work has to be waited for.
    """
    total = value.detach().clone()
    dist.all_reduce(total, group=group)
    return total.item() / dist.get_world_size(group)


def _attention(
    module: Attention, group: dist.ProcessGroup, attention: str, layout: str, x_BsH: Tensor
) -> Tensor:
    """`Attention.forward` for this rank's tokens, [B, s, H] to [B, s, H]."""
    q_BAsD, k_BKsD, v_BKsD = (
        linear(x_BsH).unflatten(-1, (-1, module.config.head_size)).transpose(1, 2)
        for linear in (module.query, module.key, module.value)
    )
    ranks, rank = group_of(group)
    at_s = positions(layout, ranks * x_BsH.shape[1], ranks, rank, x_BsH.device)
    q_BAsD, k_BKsD = (rotate(x, module.config.rotary_base, at_s) for x in (q_BAsD, k_BKsD))
    y_BAsD = ATTENTIONS[attention](q_BAsD, k_BKsD, v_BKsD, group, True, layout)
    return module.out(y_BAsD.transpose(1, 2).flatten(-2))  # [B, s, A*D] @ [A*D, H]
