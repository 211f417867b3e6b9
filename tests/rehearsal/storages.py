"""Files of tensors: they store the pretended device of each storage, and restore it."""

from __future__ import annotations

from typing import Any

import torch

from .machine import HERE, KIND
from .paint import CPU, paint_storage


def _untyped(storage: Any) -> torch.UntypedStorage:
    return getattr(storage, "_untyped_storage", storage)


def install() -> None:
    """Replace torch.serialization's two functions."""
    module = torch.serialization
    plain_tag, plain_restore = module.location_tag, module.default_restore_location

    def tag(storage: Any) -> str:
        device = getattr(_untyped(storage), "paint", None)
        return str(device) if device and device.type == KIND else plain_tag(storage)

    def restore(storage: Any, location: Any) -> Any:
        if not str(location).startswith(KIND):
            result = plain_restore(storage, location)
            if location == "cpu" and getattr(_untyped(result), "paint", None) is None:
                paint_storage(_untyped(result), CPU)
            return result
        index = torch.device(location).index or 0
        if index >= HERE.gpus:
            raise RuntimeError(
                f"Attempting to deserialize object on CUDA device {index} but "
                f"torch.cuda.device_count() is {HERE.gpus}."
            )
        paint_storage(_untyped(storage), torch.device(KIND, index))
        return storage

    module.location_tag, module.default_restore_location = tag, restore
