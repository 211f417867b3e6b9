"""Checkpoints: stop on some ranks, resume on others, and lose nothing when a save is killed.

torch.distributed.checkpoint (DCP) writes and reads the tensors: every rank its own shards, and any
number of ranks can read what another number wrote. This package adds what DCP leaves to its user:

- `state`: what belongs into a checkpoint beside the weights (optimizer, schedule, step, position in
  the data, random state), and how two lists of tensors differ;
- `folder`: one atomic rename makes a save the current one; a manifest with sizes and checksums
  tells damage before anything is loaded; old checkpoints go only after a new one is complete;
- `store`: `Checkpoints`, which does both on all ranks, at once or in the background;
- `cost`: how often to save.

    store = Checkpoints("runs/a", dist.group.WORLD, keep=2)
    training = Training(model, optimizer, schedule)
    if store.steps():
        store.load(training)
    while training.step < 1000:
        ...                                     # one step; then
        training.step += 1
        training.samples += 32                  # of all ranks together
        if training.step % 100 == 0:
            store.save(training, wait=False)
    store.close()
"""

from .cost import best_interval, lost_share, simulated_lost_share
from .folder import MANIFEST, CheckpointError, complete
from .state import Training, export, tensors
from .store import Checkpoints

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "Checkpoints",
    "Training",
    "best_interval",
    "complete",
    "export",
    "lost_share",
    "simulated_lost_share",
    "tensors",
]
