"""Formulas for the bytes that a rank holds and sends: exact, padding included."""

from __future__ import annotations

from .core import Zero3
from .wrapper import ShardedModule


def predict_state_bytes(model: ShardedModule, bytes_per_state: int = 8) -> dict[str, int]:
    """Predict the bytes of model states on this rank after a step, by kind.

    bytes_per_state: optimizer bytes per trained element, 8 for AdamW's two states in float32.

    For P trained elements in float32, up to padding (Rajbhandari et al., arXiv 1910.02054, Figure 1
    and section 5): stage 1 4P + 4P + 8P/N, stage 2 4P + 4P/N + 8P/N, stage 3 16P/N. With 16-bit
    computing: 2P + 4P + 12P/N, 2P + 16P/N, and 16P/N, master weights included.
    """
    found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    found["parameters"] = sum(p.nbytes for p in model.frozen.values())
    replicated = not isinstance(model, Zero3)
    for flat in model.flats:
        wide = flat.master_dtype.itemsize
        if replicated:
            found["parameters"] += flat.size * flat.dtype.itemsize
        if not replicated or flat.dtype != flat.master_dtype:
            found["parameters"] += flat.shard_size * wide
        if flat.trainable:
            found["gradients"] += (flat.size if model.keep_full else flat.shard_size) * wide
            found["optimizer"] += sum(p.numel() for p in flat.pieces) * bytes_per_state
    return found


def predict_sent_bytes(model: ShardedModule, backwards: int = 1) -> dict[str, int]:
    """Predict the bytes that this rank sends in a step of `backwards` micro-batches, by purpose.

    A flat tensor's gradients, (N-1)/N of it, are sent once per backward (in stage 1 once per step,
    with `no_sync`). Parameters are sent once per step in stages 1 and 2; in stage 3 once per
    forward, and once more if they were freed between forward and backward.
    """
    sends = 1 if model.keep_full else backwards
    found = {"gradients": 0, "parameters": 0}
    for flat in model.flats:
        others = flat.size - flat.shard_size  # (N-1)/N
        if flat.trainable:
            found["gradients"] += sends * others * flat.master_dtype.itemsize
        gathers = 1
        if isinstance(model, Zero3):
            again = model.reshard and flat not in model.rest.flats
            gathers = backwards * (2 if again else 1)
        found["parameters"] += gathers * others * flat.dtype.itemsize
    return found
