"""Checkpoints that resume on any number of ranks, and stay intact if a save is killed.

torch.distributed.checkpoint (DCP) writes and reads the tensors: every rank writes its own shards,
and any number of ranks can read them. This package adds what DCP leaves to its users:

- `core`: the contents of a checkpoint, the atomic rename that completes a save, and `Checkpoints`;
- `folder`: the files of a checkpoint, its manifest, the check for damage before loading, and the
  agreement of all ranks on errors;
- `one_file`: `export`, one file for a plain process;
- `hub`: `load_hub` and `save_hub`, weights in the format of Hugging Face's hub; `names`, the names
  of tensors and sizes there;
- `moving`: `hand_over`, a transfer of weights between two layouts while a job runs, for models with
  any kind of sharding;
- `cost`: the best interval between saves.

    store = Checkpoints("runs/a", dist.group.WORLD, keep=2)
    training = Training(model, optimizer, schedule)
    if store.steps():
        store.load(training)
    while training.step < 1000:
        ...                                     # one optimizer step; then
        training.step += 1
        training.samples += 32                  # counted over all ranks
        if training.step % 100 == 0:
            store.save(training, wait=False)
    store.close()
"""

from .core import Checkpoints, Training, named_tensors
from .cost import best_interval, lost_fraction, simulated_lost_fraction
from .folder import MANIFEST, CheckpointError, complete
from .hub import load_hub, save_hub
from .moving import hand_over, predicted_hand_over
from .names import config_of
from .one_file import export

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "Checkpoints",
    "Training",
    "best_interval",
    "complete",
    "config_of",
    "export",
    "hand_over",
    "load_hub",
    "lost_fraction",
    "named_tensors",
    "predicted_hand_over",
    "save_hub",
    "simulated_lost_fraction",
]
