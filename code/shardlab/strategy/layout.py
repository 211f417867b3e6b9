"""A layout: how many copies, how many cuts, and what each rank then holds."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab import memory
from shardlab.arguments import check_flag, check_one_of, check_whole
from shardlab.memory import Stage
from shardlab.memory.core import computed_again
from shardlab.memory.stages import check_rule, check_schedule
from shardlab.shapes import Config

_DEGREES = "dp", "tp", "pp", "micro_batch", "microbatches", "cp", "ep", "chunks", "replicas"


@dataclass(frozen=True)
class Layout:
    """d copies of a model that is cut t ways across and p ways along, and a step's batch."""

    dp: int = 1  # [d] copies
    tp: int = 1  # [t] ranks that share each matrix
    pp: int = 1  # [p] stages
    zero: int = 0  # stage of ZeRO, between the copies
    micro_batch: int = 1  # [b] sequences
    microbatches: int = 1  # [m] in one step, one after the other, on each copy
    recompute: str = "none"  # or "selective", "full"; or by operator: "norms+ffn"
    sequence_parallel: bool = False
    cp: int = 1  # [c] ranks that share each sequence
    ep: int = 1  # ranks, of the copies, that share the experts
    chunks: int = 1  # [v] parts of the model on each stage, under "interleaved" and "zb-v"
    schedule: str = "1f1b"  # of a pipeline: one of memory.SCHEDULES
    replicas: int = 1  # groups of dp / replicas copies that ZeRO shards over; groups repeat (HSDP)
    offload: str = "none"  # to the host's memory: or "optimizer", "parameters" (ZeRO-3)
    stages: str | tuple[int, ...] = (
        "equal"  # one of memory.STAGE_RULES, or the layers of each stage
    )

    def __post_init__(self) -> None:
        check_whole(1, **{name: getattr(self, name) for name in _DEGREES})
        if self.zero not in (0, 1, 2, 3) or isinstance(self.zero, bool):
            raise ValueError(f"zero={self.zero!r}: allowed are 0, 1, 2 and 3")
        check_one_of(("none", "optimizer", "parameters"), offload=self.offload)
        computed_again(self.recompute)
        check_flag(sequence_parallel=self.sequence_parallel)
        self._check_copies()
        check_schedule(self.pp, self.schedule, self.chunks)
        check_rule(self.pp, self.stages)

    def _check_copies(self) -> None:
        if self.dp % self.replicas:
            raise ValueError(f"replicas={self.replicas}: allowed are divisors of dp={self.dp}")
        if self.dp // self.replicas % self.ep:
            group = f"{self.dp // self.replicas} copies" + " of a group" * (self.replicas > 1)
            raise ValueError(f"ep={self.ep}: allowed are divisors of dp={self.dp}, the {group}")
        if self.replicas > 1 and not self.zero:
            raise ValueError(f"replicas={self.replicas}: allowed with zero=0 is 1")
        if self.offload == "parameters" and self.zero != 3:
            raise ValueError(f"zero={self.zero}: allowed with offload='parameters' is 3")

    @property
    def ranks(self) -> int:
        """GPUs that it takes."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def batch(self) -> int:
        """[B] sequences in one step, on all copies together."""
        return self.dp * self.micro_batch * self.microbatches

    @property
    def shards(self) -> int:
        """Ranks among which ZeRO divides: copies of a group, and those that share a sequence."""
        return self.dp // self.replicas * self.cp

    def __str__(self) -> str:
        degrees = ("t", self.tp), ("p", self.pp), ("c", self.cp), ("e", self.ep)
        cuts = [f"{n} {size}" for n, size in degrees if size > 1]
        words = [" · ".join([f"d {self.dp}", *cuts])]
        if self.zero:
            groups = f" in {self.replicas} groups" if self.replicas > 1 else ""
            words.append(f"ZeRO-{self.zero}{groups}")
        if self.recompute != "none":
            parts = {"full": "", "selective": " attention"}
            words.append("recompute" + parts.get(self.recompute, f" {self.recompute}"))
        if self.pp > 1 and self.schedule != "1f1b":
            chunks = f" {self.chunks}" if self.schedule == "interleaved" else ""
            words.append(self.schedule + chunks)
        if self.offload != "none":
            words.append(f"{self.offload} on the host")
        if self.pp > 1 and not isinstance(self.stages, str):
            words.append(f"layers {_runs(self.stages)}")
        return ", ".join(words)


def _runs(layers: tuple[int, ...]) -> str:
    """Layers of each stage, with repeats counted: 15+3×16+15."""
    runs: list[list[int]] = []
    for n in layers:
        if runs and runs[-1][1] == n:
            runs[-1][0] += 1
        else:
            runs.append([1, n])
    return "+".join(str(n) if times == 1 else f"{times}×{n}" for times, n in runs)


def stages(config: Config, layout: Layout) -> list[Stage]:
    """The stages of `config` in that layout, first to last; errors as those of `memory.stages`."""
    return memory.stages(config, layout.pp, layout.stages, layout.schedule)


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
        layout.offload,
        sequence_parallel=layout.sequence_parallel and layout.tp > 1,
        recompute=layout.recompute,
        microbatches=layout.microbatches,
        device="gpu",
        # From the second micro-batch on, the gradients of earlier ones are there.
        accumulate=layout.microbatches > 1,
        cp=layout.cp,
        ep=layout.ep,
        replicas=layout.replicas,
        stages=layout.stages,
        schedule=layout.schedule,
        chunks=layout.chunks,
    ).peak
