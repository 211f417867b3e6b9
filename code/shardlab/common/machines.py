"""Data sheets of GPUs and their links."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from shardlab.common.arguments import check_count, check_number, drop_none, join_names, shorten_repr

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """A node type with equal GPUs. Rates are peak rates of one GPU in one direction."""

    name: str
    memory: float  # bytes of one GPU, as CUDA reports them: the label's GB are something else
    gpus_per_node: int  # GPUs in a node
    node_bandwidth: float  # bytes per second to the other GPUs of the node
    network_bandwidth: float  # bytes per second to other nodes
    flops: float  # FLOP/s of dense 16-bit matrix products
    dram_bandwidth: float | None = None  # bytes per second of GPU memory; None: unknown
    sm_count: int | None = None  # streaming multiprocessors; None: unknown
    fp8: float | None = None  # FLOP/s of dense 8-bit matrix products; None: not supported
    matmul_fraction: float | None = None  # share of `flops` that the fastest product reaches
    fp4: float | None = None  # FLOP/s of dense 4-bit matrix products; None: not supported
    host_bandwidth: float = 32e9  # bytes per second from host memory, and equally many to it
    label_gb: int | None = None  # GB in the product's name; None: unknown

    def __post_init__(self) -> None:
        for field in ("memory", "node_bandwidth", "network_bandwidth", "flops", "host_bandwidth"):
            check_number(**{field: getattr(self, field)})
        for field in ("dram_bandwidth", "fp8", "matmul_fraction", "fp4"):
            check_number(**drop_none(**{field: getattr(self, field)}))
        check_count(gpus_per_node=self.gpus_per_node, **drop_none(sm_count=self.sm_count))

    @property
    def memory_bandwidth(self) -> float:
        """Bytes per second of GPU memory; if unknown, one byte for 200 floating-point operations.

        NVIDIA's data centre GPUs have between 140 (V100) and 310 (B200) operations per byte.
        """
        return self.flops / 200 if self.dram_bandwidth is None else self.dram_bandwidth


# `matmul_fraction` was measured in bfloat16 by Bekman, Machine Learning Engineering Open Book,
# compute/accelerator, "Maximum Achievable Matmul FLOPS" (PyTorch 2.6 and 2.7): 271.2 of 312 TFLOP/s
# on an A100, 794.5 of 989 on an H100 (limited by power), 1745 of 2250 on a B200; 781.9 of 1307 on
# an MI300X (ROCm 6.2).
_A100 = Machine(
    "A100", 79.1 * GIB, 8, 300e9, 25e9, 312e12, 2039e9, 108, matmul_fraction=0.869, label_gb=80
)
_H100 = Machine(
    "H100", 79.1 * GIB, 8, 450e9, 50e9, 989e12, 3350e9, 132, 1979e12, 0.803,
    host_bandwidth=64e9, label_gb=80,
)  # fmt: skip
_B200 = Machine(
    "B200", 178.35 * GIB, 8, 900e9, 50e9, 2250e12, 8000e9, 148, 4500e12, 0.776, 9000e12, 64e9, 180
)
_GB200 = replace(
    _B200, name="GB200", memory=184.3 * GIB, gpus_per_node=72, flops=2500e12, fp8=5000e12,
    fp4=10_000e12, host_bandwidth=225e9, label_gb=186,
)  # fmt: skip

# `memory` is CUDA's value, as torch prints it: the "total capacity" of an out-of-memory error in
# published logs, or the "CUDA capacity" in torchtitan's logs. Drivers differ by 0.2 %. The number
# in a product's name is GiB, of which the driver keeps some (80: 79.1); ECC takes more of A10, L4.
# Rates are from NVIDIA's data sheets and white papers; these quote links for both directions
# together, and the values here are halved.
# `host_bandwidth` is 16 lanes of PCIe 3.0 (16 GB/s), 4.0 (32), or from H100 on 5.0 (64); NVLink-C2C
# of 900 GB/s for two GPUs in a GB200.
# `flops` are without sparsity: data sheets from Hopper on print twice the rate.
MACHINES: dict[str, Machine] = {
    # GeForce RTX 4090 (Ada white paper: 165.2 TFLOP/s with float32 sums): no NVLink, 16 lanes of
    # PCIe 4.0. Between nodes: assumes one network card of 100 Gbit/s for eight GPUs.
    "rtx-4090": Machine(
        "RTX 4090", 23.64 * GIB, 8, 32e9, 100e9 / 8 / 8, 165e12, 1008e9, 128, 330e12, label_gb=24,
    ),
    # A10 (data sheet): no NVLink, 16 lanes of PCIe 4.0. Assumes four GPUs in a node, with one
    # network card of 100 Gbit/s.
    "a10": Machine("A10", 21.98 * GIB, 4, 32e9, 100e9 / 8 / 4, 125e12, 600e9, 72, label_gb=24),
    # L4 (data sheet, with sparsity: 242 TFLOP/s in 16 bits, 485 in 8): no NVLink, 16 lanes of
    # PCIe 4.0. Assumes eight GPUs in a node, with one network card of 100 Gbit/s.
    "l4": Machine(
        "L4", 22.05 * GIB, 8, 32e9, 100e9 / 8 / 8, 121e12, 300e9, 58, 242e12, label_gb=24,
    ),
    # DGX-1 with V100 (data sheet): NVLink 300 GB/s, four 100 Gbit/s cards for eight GPUs.
    "v100": Machine(
        "V100", 31.73 * GIB, 8, 150e9, 6.25e9, 125e12, 900e9, 80, host_bandwidth=16e9, label_gb=32,
    ),
    # DGX A100: NVLink of 600 GB/s, a card of 200 Gbit/s for each GPU.
    "a100": _A100,
    "a100-80": _A100,
    "a100-40": replace(
        _A100, name="A100 40 GB", memory=39.56 * GIB, dram_bandwidth=1555e9, label_gb=40,
    ),
    # DGX H100: NVLink of 900 GB/s, a card of 400 Gbit/s for each GPU; the sheet's 1979 TFLOP/s are
    # with sparsity, and dense products reach half of it.
    "h100": _H100,
    "h200": replace(_H100, name="H200", memory=139.8 * GIB, dram_bandwidth=4800e9, label_gb=141),
    # Four GH200 in a node (data sheet; user guides of Alps and JUPITER): an H100 with 96 GB of
    # HBM3, NVLink of 900 GB/s to the three others and 900 GB/s to its own CPU, a card of
    # 200 Gbit/s for each GPU.
    "gh200": replace(
        _H100, name="GH200", memory=94.5 * GIB, gpus_per_node=4, network_bandwidth=25e9,
        dram_bandwidth=4000e9, host_bandwidth=450e9, label_gb=96,
    ),
    # An H100 with 96 GB of HBM2e, limited to 500 W: torchtitan's benchmarks/llama3_h100_202412.
    "h100-96": replace(
        _H100, name="H100 96 GB", memory=94.5 * GIB, dram_bandwidth=2400e9, label_gb=96,
    ),
    # DGX B200 (data sheet): eight GPUs with 1,440 GB and 64 TB/s of memory, 72 PFLOP/s of sparse
    # 8-bit products, NVLink of 1.8 TB/s each; a card of 400 Gbit/s for each GPU.
    "b200": _B200,
    # DGX B300 (data sheet): 2.1 TB, 108 PFLOP/s of dense 4-bit products, cards of 800 Gbit/s.
    "b300": replace(
        _B200, name="B300", memory=267.7 * GIB, network_bandwidth=100e9, fp4=13_500e12,
        label_gb=270,
    ),
    # GB200 NVL72 (data sheet): 72 GPUs behind one NVLink switch, 13.4 TB and 576 TB/s of memory,
    # 360 PFLOP/s of sparse 16-bit products; a card of 400 Gbit/s for each GPU.
    "gb200": _GB200,
    # GB300 NVL72 (data sheet): 20 TB, 1,080 PFLOP/s of dense 4-bit products, cards of 800 Gbit/s.
    "gb300": replace(
        _GB200, name="GB300", memory=276.5 * GIB, network_bandwidth=100e9, fp4=15_000e12,
        label_gb=279,
    ),
    # AMD Instinct MI300X (data sheet): seven Infinity Fabric links of 128 GB/s, both directions
    # together; platforms have a card of 400 Gbit/s for each GPU.
    "mi300x": Machine(
        "MI300X", 191.7 * GIB, 8, 448e9, 50e9, 1307e12, 5300e9, 304, 2614e12, 0.598,
        host_bandwidth=64e9, label_gb=192,
    ),
}  # fmt: skip

_CPU_MEMORY_LABELS = {("gh200", "120"), ("gh200", "480")}  # GB of CPU memory in drivers' GPU names
# Words that drivers and vendors add to a GPU's name, and that the table does not need.
_IGNORED = re.compile(r"nvidia|geforce|tesla|amd|instinct|sxm\d?|pcie|oam|hbm\d?e?|nvl\d+|\d+-?w")


def find_machine(name: str, memory: float | None = None) -> Machine | None:
    """Return the machine for a GPU's name, as people or drivers write it, or None if unknown.

    Examples: "h100-80", "H100 80GB HBM3", "A100-SXM4-40GB", "NVIDIA GeForce RTX 4090". memory: GB
    of one GPU, for a name without a size. A known GPU with an unknown size returns None, too.
    """
    plain = re.sub(r"rtx[^a-z0-9]*(?=\d)", "rtx_", re.sub(r"(\d+) (w|gb)\b", r"\1\2", name.lower()))
    words = [w for w in re.split(r"[^a-z0-9_]+", plain) if w and not _IGNORED.fullmatch(w)]
    words = [re.sub(r"(?<=\d)(gb|gib|g)$", "", word).replace("_", "-") for word in words]
    family, *sizes = words or [""]
    sizes = [size for size in sizes if (family, size) not in _CPU_MEMORY_LABELS]
    if family not in MACHINES or len(sizes) > 1 or not all(size.isdigit() for size in sizes):
        return None
    size = float(sizes[0]) if sizes else memory
    if size is None:
        return MACHINES[family]
    same = [key for key in MACHINES if f"{key}-".startswith(f"{family}-")]
    return next((MACHINES[key] for key in same if MACHINES[key].label_gb == size), None)


def check_machine(**names: str) -> Machine:
    """Return the machine named by an argument (argument=name); raise ValueError if unknown."""
    ((argument, name),) = names.items()
    # Keys of MACHINES need no regular expression, which the pages' calculators (Brython) lack.
    if (machine := MACHINES.get(name) or find_machine(name)) is None:
        allowed = f"{join_names(MACHINES)}, or a similar name"
        raise ValueError(f"{argument}={shorten_repr(name)}: must be {allowed}")
    return machine
