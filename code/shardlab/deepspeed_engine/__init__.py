"""DeepSpeed's engine on the ranks of this package.

    settings = deepspeed_engine.config(Layout(2, zero=2, micro_batch=2))
    # and on every rank:
    engine = deepspeed_engine.initialize(GPT(PRESETS["nano"]), settings)
    loss = deepspeed_engine.step(engine, [(tokens, targets)])

- `core`: `initialize`, `step`, `config`, `recompute`, `save`, `load`, `to_universal`;
- `start`: `prepare`, which imports DeepSpeed without output and without a compiler;
- `schema`: `check`, and other checks of arguments before anything starts;
- `pipe`: `pipeline`, which splits the plain GPT into the stages of DeepSpeed's pipeline;
- `plain`: `weights` of an engine and `plain_state_dict` of a checkpoint, with the plain names;
- `lab` and `breakdown`: one Llama trained in eight ways, with the cost of each.

Importing this package does not import DeepSpeed, which takes seconds and may not be installed.
Functions that need it raise ImportError. Sources: DeepSpeed 0.19.8; Rajbhandari et al., SC 2020.
"""

from .core import config, initialize, load, recompute, save, step, to_universal
from .pipe import pipeline
from .plain import plain_state_dict, weights
from .schema import check
from .start import prepare

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
    "to_universal",
    "weights",
]
