"""torch's device type of this machine's GPUs: "cuda" for NVIDIA and AMD, "xpu" for Intel.

No other module names these types: `torch.get_device_module` has the same functions for both.
"""

from __future__ import annotations

from types import ModuleType

import torch

# The torch.distributed backend of each device type, for ranks with a GPU each.
GPU_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}


def get_device_type() -> str:
    """Return the device type of this machine's GPUs; "cuda" if there are none."""
    device = torch.accelerator.current_accelerator()
    return device.type if device is not None and device.type in GPU_BACKENDS else "cuda"


def get_device_module() -> ModuleType:
    """Return torch.cuda or torch.xpu; its device_count() does not prevent a later fork."""
    return torch.get_device_module(get_device_type())


def is_gpu_backend(backend: str) -> bool:
    """Return True if a backend sends only GPU tensors, as NCCL does."""
    return backend in GPU_BACKENDS.values()


def is_gpu(device: torch.device) -> bool:
    """Return True if a device is a GPU."""
    return device.type in GPU_BACKENDS
