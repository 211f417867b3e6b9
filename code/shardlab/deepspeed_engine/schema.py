"""What is refused before anything starts: what DeepSpeed cannot do, or would pass over in silence.

First arguments that cannot go together. Then a configuration against DeepSpeed's own schema.

DeepSpeed checks its sections strictly (they are pydantic models, which refuse unknown names), but
not the top level: it looks up the names that it knows, and whatever else stands there is passed
over in silence. A misspelt "gradient_cliping" trains with clipping at 1.0, and nobody is told.

No list of names is kept here. The configuration is handed to DeepSpeed in a dictionary that takes
note of what is looked up: what DeepSpeed never asks for, it does not know.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, KeysView, Mapping
from types import SimpleNamespace
from typing import Any

from shardlab import ranks
from shardlab.common.arguments import check_kind, check_number, check_one_of
from shardlab.layout import Layout

from .start import prepare, quiet

# Of a layout's fields, what `config` writes; of the others, all that a Layout takes.
WRITTEN: dict[str, tuple[Any, ...]] = {
    "cp": (1,), "ep": (1,), "replicas": (1,), "schedule": ("1f1b",), "chunks": (1,),
    "stages": ("equal",), "sequence_parallel": (False,), "recompute": ("none", "full"),
}  # fmt: skip
PRECISIONS = "fp32", "bf16", "fp16"
_SIZES = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
# Read by deepspeed.initialize, outside the class that holds the configuration.
_READ_ELSEWHERE = {"sequence_parallel_size", "data_parallel_size"}
# Places of Hugging Face's "auto"; in "pipeline.stages" and others it is a word of DeepSpeed's.
_FILLED = (*_SIZES, "gradient_clipping", "optimizer.", "scheduler.", "fp16.", "bf16.", "zero_opt")


def check_together(layout: Layout, precision: str, clipping: float, device: str) -> None:
    """Raise ValueError for what DeepSpeed cannot combine, or `config` does not write."""
    check_kind(Layout, layout=layout)
    check_one_of(PRECISIONS, precision=precision)
    check_number(0, clipping=clipping)
    zero, tp, pp = layout.zero, layout.tp, layout.pp
    for name, allowed in WRITTEN.items():
        check_one_of(allowed, **{name: getattr(layout, name)})
    if pp > 1 and zero > 1:
        raise ValueError(
            f"zero={zero}: with pp={pp} allowed are 0 and 1; a pipeline adds up the gradients of "
            "many micro-batches, and stages 2 and 3 would scatter them after each one"
        )
    if pp > 1 and tp > 1:
        raise ValueError(
            f"tp={tp}: with pp={pp} allowed is 1; DeepSpeed's automatic tensor parallelism does not"
            " go into its pipeline module"
        )
    if layout.offload == "optimizer" and zero == 0:
        raise ValueError("zero=0: with offload='optimizer' allowed are 1, 2 and 3")
    if precision == "fp16" and ranks.place(1, device)[1] == "cpu":
        raise ValueError("precision='fp16': on a CPU DeepSpeed allows 'fp32' and 'bf16'")


class Asked(dict):
    """A dict that notes in `names` each name that is looked up in it."""

    def __init__(self, content: Mapping[str, Any]):
        super().__init__(content)
        self.names: set[object] = set()

    def __copy__(self) -> Asked:
        return self

    def __contains__(self, key: object) -> bool:
        self.names.add(key)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As dict's."""
        self.names.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        """As dict's, but `name in keys()` is noted too."""
        return KeysView(self)


def check(config: Mapping[str, Any], optimizer: bool = False) -> None:
    """Raise ValueError unless DeepSpeed takes `config`, and knows every name at its top level.

    optimizer: whether `initialize` is given an optimizer beside the configuration, as the course's
        `initialize` always is. Without one, stages 1 and 2 want a section "optimizer".

    Not checked: the inside of sections that DeepSpeed reads only when it comes to use them, and
    whether the device can compute in 16 bits. Of the batch sizes: whether they fit *any* number of
    ranks; DeepSpeed itself says whether they fit a given one.
    """
    prepare()
    from deepspeed.module_inject.autotp_config import AutoTPConfig, AutoTPPresets
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    if auto := [path for path, v in _paths(config) if v == "auto" and path.startswith(_FILLED)]:
        raise ValueError(
            f"config: 'auto' at {', '.join(auto)}: a word of Hugging Face's, which transformers' "
            "Trainer and accelerate replace; for DeepSpeed itself write the value, or leave it out"
        )
    asked = Asked(_of_one_copy(config))
    try:
        with quiet():
            # Told of one copy of the model, whatever ranks this process is one of.
            copies = SimpleNamespace(get_data_parallel_world_size=lambda: 1)
            read = DeepSpeedConfig(asked, mpu=copies)
            preset = read.tensor_parallel_config.preset_model
            if preset is not None and AutoTPPresets.get_preset(preset) is None:
                raise ValueError(f"tensor_parallel.preset_model={preset!r}: no such preset")
            if plan := asked.get("tensor_parallel", {}).get("partition_config"):
                AutoTPConfig.from_dict(plan)
    except (ValueError, AssertionError, DeepSpeedConfigError, TypeError) as error:
        raise ValueError(f"config: DeepSpeed refuses it: {_one_line(error)}") from None
    stage = read.zero_optimization_stage
    if stage in (1, 2) and not optimizer and read.optimizer_name is None:
        raise ValueError(
            f"config: zero stage {stage} requires an optimizer: a section 'optimizer', or one that "
            "initialize is given (optimizer=True)"
        )
    known = asked.names | _READ_ELSEWHERE
    for name in config:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; perhaps meant: {near[0]!r}" if near else ""
            raise ValueError(f"config: DeepSpeed knows no {name!r}, and would ignore it{meant}")


def _of_one_copy(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, with that part of train_batch_size which one copy computes.

    How many copies there will be is not known here; all three sizes together say it. Where one is
    left out, DeepSpeed works it out, and whatever does not fit one copy fits no number of them.
    """
    total, micro, accumulation = sizes = [config.get(key) for key in _SIZES]
    if None in sizes:
        return dict(config)
    if total % (micro * accumulation):
        raise ValueError(
            f"{_SIZES[0]}={total} fits no number of ranks: allowed are multiples of {micro} * "
            f"{accumulation}, {_SIZES[1]} * {_SIZES[2]}"
        )
    return {**config, _SIZES[0]: micro * accumulation}


def _paths(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a configuration with their names: "zero_optimization.stage"."""
    for key, value in config.items():
        yield f"{path}{key}", value
        if isinstance(value, Mapping):
            yield from _paths(value, f"{path}{key}.")


def _one_line(error: Exception) -> str:
    """A pydantic error takes four lines, of which the second and third say what is wrong."""
    if hasattr(error, "errors"):
        wrong = (
            f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors()
        )
        return f"{error.title}: {'; '.join(wrong)}"
    return str(error).partition("\n")[0] or type(error).__name__
