"""DeepSpeed's real engine, started on the ranks of this course.

    settings = deepspeed_engine.config(micro_batch=2, world_size=2, zero=2)
    # and on every rank:
    engine = deepspeed_engine.initialize(GPT(PRESETS["nano"]), settings)
    loss = deepspeed_engine.step(engine, [(tokens, targets)])

- `config` builds DeepSpeed's configuration and `check` holds any configuration against DeepSpeed's
  own schema (builder, schema);
- `initialize` starts the engine, quietly and without a compiler (start);
- `step`, `weights` and `recompute` use it (training);
- `pipeline` cuts the plain GPT into the stages of DeepSpeed's pipeline (pipe);
- `save`, `load` and `plain_state_dict` keep what was trained (saved).

Importing this package does not import DeepSpeed, which takes seconds and may not be installed. The
functions that need it say so. Source: DeepSpeed 0.19.8; Rajbhandari et al., "ZeRO", SC 2020.
"""

from .builder import config
from .pipe import pipeline
from .saved import load, plain_state_dict, save
from .schema import check
from .start import initialize, prepare
from .training import recompute, step, weights

__all__ = [
    "check",
    "config",
    "initialize",
    "load",
    "pipeline",
    "plain_state_dict",
    "prepare",
    "recompute",
    "save",
    "step",
    "weights",
]
