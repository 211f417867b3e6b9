"""What torch calls this machine's GPUs: "cuda" for NVIDIA's and AMD's, "xpu" for Intel's.

The one place that names them: `torch.get_device_module` has the same functions for both.
"""

from __future__ import annotations

from types import ModuleType

import torch

# What carries messages from GPU to GPU, for ranks that have one each.
CARRIERS = {"cuda": "nccl", "xpu": "xccl"}


def kind() -> str:
    """Which of the two this machine has; "cuda" where it has none."""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and found.type in CARRIERS else "cuda"


def module() -> ModuleType:
    """torch.cuda or torch.xpu. Asking it how many GPUs there are does not spoil a later fork."""
    return torch.get_device_module(kind())


def carries(backend: str) -> bool:
    """Whether a backend moves GPUs' tensors alone, as nccl does."""
    return backend in CARRIERS.values()


def is_on(device: torch.device) -> bool:
    """Whether a device is a GPU."""
    return device.type in CARRIERS
