"""DeepSpeed's engine on the ranks of this package.

    settings = deepspeed_engine.build_config(Layout(2, zero=2, micro_batch=2))
    # and on every rank:
    engine = deepspeed_engine.initialize(GPT(PRESETS["nano"]), settings)
    loss = deepspeed_engine.step(engine, [(tokens, targets)])

`lab` and `breakdown` train one Llama in eight modes, and show the cost of each.

Importing this package does not import DeepSpeed, which takes seconds and may not be installed.
Functions that need it raise ImportError. Sources: DeepSpeed 0.19.8; Rajbhandari et al., SC 2020.
"""

from .core import (
    build_config,
    enable_recompute,
    initialize,
    load_checkpoint,
    save_checkpoint,
    step,
    to_universal,
)
from .pipeline import to_pipeline_module
from .schema import check_config
from .setup import import_deepspeed
from .weights import gather_weights, plain_state_dict

__all__ = [
    "build_config",
    "check_config",
    "enable_recompute",
    "gather_weights",
    "import_deepspeed",
    "initialize",
    "load_checkpoint",
    "plain_state_dict",
    "save_checkpoint",
    "step",
    "to_pipeline_module",
    "to_universal",
]
