"""The router: it chooses experts for each token and weights their outputs, on one device.

    scores = softmax(x W) or sigmoid(x W)      chosen = the C largest of scores + bias
    y = sum over the chosen of  score / (sum of the chosen scores)  *  expert(x)

With groups of experts, a token first chooses groups, by the sum of their two best scores, and then
chooses experts only from these groups.

Shazeer et al. 2017 (arXiv 1701.06538): the choice. Jiang et al. 2024 (arXiv 2401.04088), section
2.1: softmax. DeepSeek-AI 2024 (arXiv 2412.19437), section 2.1.2: sigmoid, the bias, and groups.

Shapes in names: B batch, S sequence, H hidden, E experts, C experts that a token chooses, G groups
of X experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab.common.shapes import Config


class Router(nn.Module):
    """A linear router that scores the experts for each token and chooses the best.

    `bias_E` affects the choice but not the weights (arXiv 2408.15664); it is initialized to 0. It
    is float32 in a model of any dtype: in 16 bits, steps of 0.001 are lost once it reaches 0.5.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.score = nn.Linear(config.hidden, config.experts, bias=False)
        self.register_buffer("bias_E", torch.zeros(config.experts, dtype=torch.float32))

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores [B, S, E], chosen experts [B, S, C], best first, and their weights.

        Weights are the chosen scores divided by their sum. With one choice the weight is the score
        itself: divided by its sum it would always be 1, and the router would get no gradient.
        """
        logits_BSE = self.score(x_BSH)  # [B, S, H] @ [H, E]
        wide = torch.promote_types(logits_BSE.dtype, torch.float32)
        squash = torch.sigmoid if self.config.router == "sigmoid" else partial(F.softmax, dim=-1)
        scores_BSE = squash(logits_BSE.to(wide))
        eligible_BSE = self._mask_groups(scores_BSE + self.bias_E)
        chosen_BSC = eligible_BSE.topk(self.config.experts_per_token).indices
        weights_BSC = scores_BSE.gather(-1, chosen_BSC)
        if self.config.experts_per_token > 1:
            weights_BSC = weights_BSC / weights_BSC.sum(-1, keepdim=True)
        if self.config.routed_scale != 1.0:
            weights_BSC = weights_BSC * self.config.routed_scale
        return scores_BSE, chosen_BSC, weights_BSC.to(x_BSH.dtype)

    def _mask_groups(self, scores_BSE: Tensor) -> Tensor:
        """Set the scores of groups that a token did not choose to -inf."""
        groups, some = self.config.expert_groups, self.config.groups_per_token
        if groups == 1:
            return scores_BSE
        grouped_BSGX = scores_BSE.detach().unflatten(-1, (groups, -1))
        worth_BSG = grouped_BSGX.topk(2).values.sum(-1)
        left_out_BSG = torch.ones_like(worth_BSG, dtype=torch.bool)
        left_out_BSG.scatter_(-1, worth_BSG.topk(some).indices, False)
        return grouped_BSGX.masked_fill(left_out_BSG[..., None], -torch.inf).flatten(-2)

    def _apply(self, *args: Any, **kwargs: Any) -> Router:
        """Move and convert the module as usual, but only move the bias: it stays float32."""
        before_E = self.bias_E
        super()._apply(*args, **kwargs)
        if self.bias_E.dtype != torch.float32:
            self.bias_E = before_E.to(self.bias_E.device)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Convert a bias that was saved in 16 bits to float32, with `assign=True` as well."""
        super()._load_from_state_dict(*args, **kwargs)
        self.bias_E = self.bias_E.float()

    def apply_capacity(self, chosen_BSC: Tensor) -> Tensor:
        """Return the choices, with -1 where the chosen expert is full."""
        capacity = self.config.get_expert_capacity(chosen_BSC.shape[1])
        if capacity is None:
            return chosen_BSC
        return drop_overflow(chosen_BSC, self.config.experts, capacity)


def drop_overflow(chosen_BSC: Tensor, experts: int, capacity: int) -> Tensor:
    """Limit each expert to `capacity` choices of each sequence, and set the other choices to -1.

    All first choices take precedence over all second ones (GShard, arXiv 2006.16668, Algorithm 1).
    """
    queue_BX = chosen_BSC.transpose(1, 2).flatten(1)  # [B, C * S], all first choices first
    numbers_BXE = F.one_hot(queue_BX, experts).cumsum(1)
    number_BX = numbers_BXE.gather(-1, queue_BX[..., None])[..., 0]  # 1: an expert's first choice
    number_BSC = number_BX.unflatten(1, (-1, chosen_BSC.shape[1])).transpose(1, 2)
    return chosen_BSC.masked_fill(number_BSC > capacity, -1)
