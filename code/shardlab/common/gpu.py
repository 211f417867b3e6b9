"""torch's device type of this machine's GPUs: "cuda" for NVIDIA and AMD, "xpu" for Intel.

No other module names these types: `torch.get_device_module` has the same functions for both.
"""

from __future__ import annotations

from types import ModuleType

import torch

# The torch.distributed backend of each device type, for ranks with a GPU each.
CARRIERS = {"cuda": "nccl", "xpu": "xccl"}


def kind() -> str:
    """Return the device type of this machine's GPUs; "cuda" if there are none."""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and found.type in CARRIERS else "cuda"


def module() -> ModuleType:
    """Return torch.cuda or torch.xpu; its device_count() does not prevent a later fork."""
    return torch.get_device_module(kind())


def carries(backend: str) -> bool:
    """Return True if a backend sends only GPU tensors, as NCCL does."""
    return backend in CARRIERS.values()


def is_on(device: torch.device) -> bool:
    """Return True if a device is a GPU."""
    return device.type in CARRIERS
