"""GPUs and their links, as their makers state them."""

from __future__ import annotations

from dataclasses import dataclass

RESERVE = 0.1  # of a GPU's memory, that no plan should count on


@dataclass(frozen=True)
class Machine:
    """Nodes of equal GPUs. Rates are for one GPU and one direction, at their best."""

    name: str
    memory: float  # bytes of one GPU
    per_node: int  # GPUs
    inside: float  # bytes per second to the other GPUs of its node
    between: float  # bytes per second to other nodes
    flops: float  # floating-point operations per second: dense products of 16-bit numbers

    def __post_init__(self) -> None:
        for field in ("memory", "per_node", "inside", "between", "flops"):
            if not (value := getattr(self, field)) > 0:
                raise ValueError(f"{field}={value!r}: allowed are numbers above 0")
        if self.per_node != int(self.per_node):
            raise ValueError(f"per_node={self.per_node!r}: allowed are whole numbers above 0")


# Memory is the decimal number of the product's name: tools report a little more. NVIDIA's data
# sheets and white papers; links are quoted there for both directions together, and halved here.
MACHINES: dict[str, Machine] = {
    # GeForce RTX 4090 (Ada white paper: 165.2 TFLOP/s with sums in float32): no NVLink, 16 lanes of
    # PCIe 4.0. Between nodes: assumed is one network card of 100 Gbit/s for eight of them.
    "rtx-4090": Machine("RTX 4090", 24e9, 8, 32e9, 100e9 / 8 / 8, 165e12),
    # DGX A100: NVLink of 600 GB/s, for each GPU a card of 200 Gbit/s.
    "a100": Machine("A100", 80e9, 8, 300e9, 25e9, 312e12),
    # DGX H100: NVLink of 900 GB/s, for each GPU a card of 400 Gbit/s; 1979 TFLOP/s are with
    # sparsity, dense products reach half of it.
    "h100": Machine("H100", 80e9, 8, 450e9, 50e9, 989e12),
    "h200": Machine("H200", 141e9, 8, 450e9, 50e9, 989e12),
}


def room(machine: Machine, reserve: float = RESERVE) -> float:
    """Bytes of one GPU that a job may plan with.

    reserve: the share left for what no formula here counts: CUDA's context, buffers of nccl, and
    what an allocator loses to fragments.
    """
    if not 0 <= reserve < 1:
        raise ValueError(f"reserve={reserve!r}: allowed are numbers from 0 to below 1")
    return machine.memory * (1 - reserve)
