"""A chosen layout as an engine's configuration, with the reason for each line.

    print(emit("megatron", PRESETS["llama-3-8b"], MACHINES["h100"], Layout(dp=16, zero=3)))

| engine     | output                                                 | for                   |
|------------|--------------------------------------------------------|-----------------------|
| deepspeed  | its configuration, in Hjson, which DeepSpeed reads     | DeepSpeed 0.19.8      |
| torchtitan | a module with one configuration function               | torchtitan 0.3.0      |
| megatron   | a shell script around the arguments of pretrain_gpt.py | Megatron Core 0.19.2  |
| course     | the options of the course's train.py, for a shell      | torch 2.11 to 2.15    |
| slurm      | a batch file that starts torchrun on each node         | Slurm                 |

`render_job` returns all files of a Slurm job for torchtitan, Megatron or the course's script. The
batch file of "slurm" starts any other program, such as yours with DeepSpeed.
A layout that an engine cannot express is refused, with the field and the values allowed. Settings
that no layout decides (data, learning rate, checkpoints) get simple values, marked by a comment.
"""

from __future__ import annotations

from types import ModuleType

from shardlab.common.arguments import check_one_of
from shardlab.common.machines import Machine
from shardlab.common.shapes import Config
from shardlab.layout import Layout, Structure

from . import course, deepspeed, megatron, slurm, torchtitan
from .job import Limits, render_job
from .target import Target

__all__ = ["ENGINES", "Limits", "emit", "render_job"]

_WRITERS: dict[str, ModuleType] = {
    "deepspeed": deepspeed, "torchtitan": torchtitan, "megatron": megatron, "course": course,
    "slurm": slurm,
}  # fmt: skip
ENGINES = tuple(_WRITERS)


def emit(
    engine: str,
    config: Config | Structure,
    machine: Machine,
    layout: Layout,
    seq: int | None = None,
) -> str:
    """Return the text of a file for `engine` (one of ENGINES) that runs `layout`.

    seq: tokens of a sequence, by default the model's longest.

    Raises ValueError for an unknown engine, a shape that cannot be divided so, GPUs that fill no
    whole nodes, and what the engine cannot express: it names the field, its value and allowed ones.
    """
    check_one_of(ENGINES, engine=engine)
    return _WRITERS[engine].render_file(Target.from_model(engine, config, machine, layout, seq))
