"""Layers that mix tokens without attention: what they compute beside their matrices, by formula.

transformers writes their scans out in torch, chunk by chunk; what that computes and keeps is a
property of the script and not of the layer. So dimensions are taken from the module, and operations
and elements of a token from here. n heads, dk and dv sizes of a head's keys and values, N numbers
of a channel's state.

- gated DeltaNet (Yang et al. 2024, arXiv 2412.06464) and Kimi's: decay, correct, write and read a
  state of dk x dv: 8 n dk dv, as Megatron-LM's training.py and NeMo Automodel count;
- Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): 7 n dv N, as these;
- Mamba (Gu and Dao 2023, arXiv 2312.00752): 9 d N;
- lightning attention (MiniMax 2025, arXiv 2501.08313): write and read, 4 n dk dv;
- a short convolution has its weights alone.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

# End of the module's class; operations; its attributes for heads, groups and sizes.
MIXERS: tuple[tuple[str, int, tuple[str, str, str, str]], ...] = (
    (r"GatedDeltaNet$", 8, ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim")),
    (r"DeltaAttention$", 8, ("num_heads", "num_heads", "head_dim", "head_dim")),
    (
        r"(Mamba2|GraniteMoeHybridMamba|Bamba|Zamba2Mamba)(Mixer|Layer)$", 7,
        ("num_heads", "n_groups", "ssm_state_size", "head_dim"),
    ),
    (
        r"^(Jamba|Falcon|Zamba|)MambaMixer$", 9,
        ("intermediate_size", "intermediate_size", "ssm_state_size", "one"),
    ),
    (
        r"LightningAttention$", 4,
        ("num_attention_heads", "num_attention_heads", "head_dim", "head_dim"),
    ),
    (r"^Lfm\d(Moe)?ShortConv$", 0, ("one", "one", "one", "hidden_size")),
    (r"Indexer$", 2, ("n_heads", "n_heads", "head_dim", "index_topk")),
)  # fmt: skip


def mixer(layer: nn.Module) -> dict[str, Any] | None:
    """Of a layer's mixer without attention: name, heads, groups, scans and inner width; or None.

    An indexer that chooses keys for attention is one, too: how many it chooses ("top"), and the
    numbers of a token that it compares with every key ("scores").
    """
    for name, module in layer.named_modules():
        kind = type(module).__name__
        for pattern, operations, names in MIXERS:
            if not re.search(pattern, kind):
                continue
            sizes = [1 if key == "one" else getattr(module, key, None) for key in names]
            if not all(isinstance(size, int) for size in sizes):
                return {"name": name, "class": kind}
            n, groups, first, second = sizes
            if kind.endswith("Indexer"):
                return {"name": name, "class": kind, "top": second, "scores": n * first}
            scans = operations * n * first * second
            own = {"heads": n, "groups": groups, "inner": n * second}
            return {"name": name, "class": kind, "scans": scans, **own}
    return None
