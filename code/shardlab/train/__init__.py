"""From one training script to many nodes.

`core` is the source of the script in all its steps, which `script` derives from it; the last one is
`code/train.py`, for readers to take home. What that one imports stands beside it: `spread`, one
model in six strategies; `job`, its start, stop and log; `options`; `scaler`, fp16's loss scaler.
"""

from shardlab.show.growing import Growing

from . import core  # imported, so that a lesson's key sees it, and what it imports

__all__ = ["script"]

script = Growing(core.__file__)
