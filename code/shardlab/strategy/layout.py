"""A layout: how many copies, how many cuts, and what each rank then holds."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab import memory
from shardlab.arguments import check_whole
from shardlab.shapes import Config

_DEGREES = "dp", "tp", "pp", "micro_batch", "microbatches"


@dataclass(frozen=True)
class Layout:
    """d copies of a model that is cut t ways across and p ways along, and a step's batch."""

    dp: int = 1  # [d] copies
    tp: int = 1  # [t] ranks that share each matrix
    pp: int = 1  # [p] stages
    zero: int = 0  # stage of ZeRO, between the copies
    micro_batch: int = 1  # [b] sequences
    microbatches: int = 1  # [m] in one step, one after the other, on each copy
    recompute: str = "none"  # or "selective", "full"
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        check_whole(1, **{name: getattr(self, name) for name in _DEGREES})
        if self.zero not in (0, 1, 2, 3) or isinstance(self.zero, bool):
            raise ValueError(f"zero={self.zero!r}: allowed are 0, 1, 2 and 3")
        if self.recompute not in ("none", "selective", "full"):
            given = f"recompute={self.recompute!r}"
            raise ValueError(f"{given}: allowed are 'none', 'selective' and 'full'")

    @property
    def ranks(self) -> int:
        """GPUs that it takes."""
        return self.dp * self.tp * self.pp

    @property
    def batch(self) -> int:
        """[B] sequences in one step, on all copies together."""
        return self.dp * self.micro_batch * self.microbatches

    def __str__(self) -> str:
        cuts = [f"{n} {size}" for n, size in (("t", self.tp), ("p", self.pp)) if size > 1]
        words = [" · ".join([f"d {self.dp}", *cuts])]
        if self.zero:
            words.append(f"ZeRO-{self.zero}")
        if self.recompute != "none":
            words.append("recompute" if self.recompute == "full" else "recompute attention")
        return ", ".join(words)


def peak(
    config: Config,
    layout: Layout,
    seq: int | None = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
) -> int:
    """Bytes of the fullest rank at the fullest moment of a step, on a GPU: `memory.estimate`.

    seq: tokens of a sequence, by default the model's longest. Raises ValueError as that does, where
    the shape cannot be cut so.
    """
    return memory.estimate(
        config,
        layout.micro_batch,
        seq,
        precision,
        optimizer,
        layout.zero,
        layout.dp,
        layout.tp,
        layout.pp,
        sequence_parallel=layout.sequence_parallel and layout.tp > 1,
        recompute=layout.recompute,
        microbatches=layout.microbatches,
        device="gpu",
        # From the second micro-batch on, the gradients of earlier ones are there.
        accumulate=layout.microbatches > 1,
    ).peak
