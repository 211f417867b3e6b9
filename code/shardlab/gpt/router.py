"""Which experts a token goes to, and how much each of them counts: nothing of parallelism.

    scores = softmax(x W) or sigmoid(x W)      chosen = the C largest of scores + bias
    y = sum over the chosen of  score / (sum of the chosen scores)  *  expert(x)

With groups of experts a token chooses groups first, by the sum of their best two, and experts of
these alone.

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
    """Scores the experts for each token, chooses the best, and weighs them.

    `bias_E` moves the choice and not the weights (arXiv 2408.15664); as it stands, it is 0. It is
    float32 in a model of any dtype: steps of 0.001 are lost in 16 bits once it has reached 0.5.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.score = nn.Linear(config.hidden, config.experts, bias=False)
        self.register_buffer("bias_E", torch.zeros(config.experts, dtype=torch.float32))

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, H] to scores [B, S, E], chosen experts [B, S, C], best first, and their weights.

        Weights are the chosen scores over their sum; with one choice the score, lest it be always 1
        and teach the router nothing.
        """
        logits_BSE = self.score(x_BSH)  # [B, S, H] @ [H, E]
        wide = torch.promote_types(logits_BSE.dtype, torch.float32)
        squash = torch.sigmoid if self.config.router == "sigmoid" else partial(F.softmax, dim=-1)
        scores_BSE = squash(logits_BSE.to(wide))
        eligible_BSE = self._eligible(scores_BSE + self.bias_E)
        chosen_BSC = eligible_BSE.topk(self.config.experts_per_token).indices
        weights_BSC = scores_BSE.gather(-1, chosen_BSC)
        if self.config.experts_per_token > 1:
            weights_BSC = weights_BSC / weights_BSC.sum(-1, keepdim=True)
        if self.config.routed_scale != 1.0:
            weights_BSC = weights_BSC * self.config.routed_scale
        return scores_BSE, chosen_BSC, weights_BSC.to(x_BSH.dtype)

    def _eligible(self, scores_BSE: Tensor) -> Tensor:
        """The scores, but for those of groups that a token did not choose: -inf."""
        groups, some = self.config.expert_groups, self.config.groups_per_token
        if groups == 1:
            return scores_BSE
        grouped_BSGX = scores_BSE.detach().unflatten(-1, (groups, -1))
        worth_BSG = grouped_BSGX.topk(2).values.sum(-1)
        left_out_BSG = torch.ones_like(worth_BSG, dtype=torch.bool)
        left_out_BSG.scatter_(-1, worth_BSG.topk(some).indices, False)
        return grouped_BSGX.masked_fill(left_out_BSG[..., None], -torch.inf).flatten(-2)

    def _apply(self, *args: Any, **kwargs: Any) -> Router:
        """Moving and converting, which is for the bias a move alone: its bits stay."""
        before_E = self.bias_E
        super()._apply(*args, **kwargs)
        if self.bias_E.dtype != torch.float32:
            self.bias_E = before_E.to(self.bias_E.device)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Take a bias that was saved in 16 bits, too, with `assign=True` as well."""
        super()._load_from_state_dict(*args, **kwargs)
        self.bias_E = self.bias_E.float()

    def admit(self, chosen_BSC: Tensor) -> Tensor:
        """The choices that find a place: where an expert is full, its number becomes -1."""
        places = self.config.places(chosen_BSC.shape[1])
        return chosen_BSC if places is None else drop(chosen_BSC, self.config.experts, places)


def drop(chosen_BSC: Tensor, experts: int, places: int) -> Tensor:
    """Leave each expert `places` choices of each sequence, and make the others -1.

    All first choices come before all second ones (GShard, arXiv 2006.16668, Algorithm 1).
    """
    queue_BX = chosen_BSC.transpose(1, 2).flatten(1)  # C times S in a row
    numbers_BXE = F.one_hot(queue_BX, experts).cumsum(1)
    number_BX = numbers_BXE.gather(-1, queue_BX[..., None])[..., 0]  # 1 for an expert's first
    number_BSC = number_BX.unflatten(1, (-1, chosen_BSC.shape[1])).transpose(1, 2)
    return chosen_BSC.masked_fill(number_BSC > places, -1)
