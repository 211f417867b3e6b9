"""Checks of arguments and configurations that DeepSpeed does not support, or silently ignores.

`check_together` checks arguments, and `check_config` a configuration against DeepSpeed itself.

DeepSpeed checks its sections strictly (they are pydantic models, which refuse unknown names), but
not the top level: there it looks up the names that it knows, and silently ignores all others. With
a misspelt "gradient_cliping", DeepSpeed trains with clipping at 1.0, and without a warning.

This module has no list of names. It passes the configuration to DeepSpeed in a dictionary that
records lookups: DeepSpeed does not know the names that it never looks up.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, KeysView, Mapping
from types import SimpleNamespace
from typing import Any

from shardlab import ranks
from shardlab.common.arguments import check_number, check_one_of, check_type
from shardlab.layout import Layout

from .setup import import_deepspeed, suppress_output

# Values of a layout's fields that `build_config` supports; other fields can have any value.
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "cp": (1,), "ep": (1,), "replicas": (1,), "schedule": ("1f1b",), "chunks": (1,),
    "stages": ("equal",), "sequence_parallel": (False,), "recompute": ("none", "full"),
}  # fmt: skip
PRECISIONS = "fp32", "bf16", "fp16"
_SIZE_KEYS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
# Names that deepspeed.initialize reads, outside the class of the configuration.
_OTHER_KEYS = {"sequence_parallel_size", "data_parallel_size"}
# Paths at which "auto" is Hugging Face's; elsewhere, as in "pipeline.stages", it is DeepSpeed's.
_AUTO_PATHS = "gradient_clipping", "optimizer.", "scheduler.", "fp16.", "bf16.", "zero_opt"


def check_together(layout: Layout, precision: str, clipping: float, device: str) -> None:
    """Raise ValueError for arguments that DeepSpeed or `build_config` does not support."""
    check_type(Layout, layout=layout)
    check_one_of(PRECISIONS, precision=precision)
    check_number(0, clipping=clipping)
    zero, tp, pp = layout.zero, layout.tp, layout.pp
    for name, allowed in SUPPORTED_VALUES.items():
        check_one_of(allowed, **{name: getattr(layout, name)})
    if pp > 1 and zero > 1:
        raise ValueError(
            f"zero={zero}: must be 0 or 1 with pp={pp}; a pipeline adds up the gradients of many "
            "micro-batches, and stages 2 and 3 would scatter them after each one"
        )
    if pp > 1 and tp > 1:
        raise ValueError(
            f"tp={tp}: must be 1 with pp={pp}; DeepSpeed's automatic tensor parallelism does not "
            "support its pipeline module"
        )
    if layout.offload == "optimizer" and zero == 0:
        raise ValueError("zero=0: must be 1, 2 or 3 with offload='optimizer'")
    if precision == "fp16" and ranks.choose_backend(1, device)[1] == "cpu":
        raise ValueError("precision='fp16': must be 'fp32' or 'bf16' for DeepSpeed on a CPU")


class RecordingDict(dict):
    """A dict that records in `names` each name that is looked up in it."""

    def __init__(self, content: Mapping[str, Any]):
        super().__init__(content)
        self.names: set[object] = set()

    def __copy__(self) -> RecordingDict:
        return self

    def __contains__(self, key: object) -> bool:
        self.names.add(key)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value as dict.get does, and record the lookup."""
        self.names.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        """Return a view of the names; a membership test in the view is recorded, too."""
        return KeysView(self)


def check_config(config: Mapping[str, Any], optimizer: bool = False) -> None:
    """Raise ValueError unless DeepSpeed accepts `config` and knows all names at its top level.

    optimizer: True if deepspeed.initialize gets an optimizer beside the configuration, as this
        package's `initialize` always does. Otherwise stages 1 and 2 need a section "optimizer".

    Not checked: the content of sections that DeepSpeed reads only on use, and the device's support
    for 16 bits. Batch sizes are checked to suit *some* number of ranks; DeepSpeed itself checks
    them for the actual number.
    """
    import_deepspeed()
    from deepspeed.module_inject.autotp_config import AutoTPConfig, AutoTPPresets
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    autos = [path for path, value in _iter_paths(config) if value == "auto"]
    if auto := [path for path in autos if path.startswith((*_SIZE_KEYS, *_AUTO_PATHS))]:
        raise ValueError(
            f"config: 'auto' at {', '.join(auto)}: only Hugging Face's Trainer and accelerate "
            "replace it; for DeepSpeed itself write the value, or leave it out"
        )
    recording = RecordingDict(_reduce_to_one_copy(config))
    try:
        with suppress_output():
            # Claim one data-parallel copy, whatever the process group of this process is.
            copies = SimpleNamespace(get_data_parallel_world_size=lambda: 1)
            read = DeepSpeedConfig(recording, mpu=copies)
            preset = read.tensor_parallel_config.preset_model
            if preset is not None and AutoTPPresets.get_preset(preset) is None:
                raise ValueError(f"tensor_parallel.preset_model={preset!r}: no such preset")
            if plan := recording.get("tensor_parallel", {}).get("partition_config"):
                AutoTPConfig.from_dict(plan)
    except (ValueError, AssertionError, DeepSpeedConfigError, TypeError) as error:
        raise ValueError(f"config: DeepSpeed refuses it: {_format_error(error)}") from None
    stage = read.zero_optimization_stage
    if stage in (1, 2) and not optimizer and read.optimizer_name is None:
        raise ValueError(
            f"config: zero stage {stage} requires an optimizer: a section 'optimizer', or one that "
            "initialize is given (optimizer=True)"
        )
    known = recording.names | _OTHER_KEYS
    for name in config:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; perhaps meant: {near[0]!r}" if near else ""
            raise ValueError(f"config: {name!r}: unknown to DeepSpeed, which ignores it{meant}")


def _reduce_to_one_copy(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with train_batch_size reduced to one data-parallel copy's share.

    The number of copies follows only from all three batch sizes. If one size is missing, DeepSpeed
    computes it, and sizes that do not suit one copy suit no number of copies.
    """
    total, micro, accumulation = sizes = [config.get(key) for key in _SIZE_KEYS]
    if None in sizes:
        return dict(config)
    if total % (micro * accumulation):
        raise ValueError(
            f"{_SIZE_KEYS[0]}={total} fits no number of ranks: must be a multiple of {micro} * "
            f"{accumulation}, {_SIZE_KEYS[1]} * {_SIZE_KEYS[2]}"
        )
    return {**config, _SIZE_KEYS[0]: micro * accumulation}


def _iter_paths(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of a configuration, with paths such as "zero_optimization.stage"."""
    for key, value in config.items():
        yield f"{path}{key}", value
        if isinstance(value, Mapping):
            yield from _iter_paths(value, f"{path}{key}.")


def _format_error(error: Exception) -> str:
    """Format an error on one line: a pydantic error's text takes four lines per field."""
    if hasattr(error, "errors"):
        wrong = (
            f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors()
        )
        return f"{error.title}: {'; '.join(wrong)}"
    return str(error).partition("\n")[0] or type(error).__name__
