"""Checkpoints: stop on some ranks, resume on others, and lose nothing when a save is killed.

torch.distributed.checkpoint (DCP) writes and reads the tensors: every rank its own shards, and any
number of ranks can read what another number wrote. This package adds what DCP leaves to its user:

- `core`: what belongs into a checkpoint, the rename that makes a save count, and `Checkpoints`;
- `folder`: what lies in it, its manifest, what tells damage before anything is loaded, and how what
  one rank finds is raised by all;
- `one_file`: `export`, one file for a plain process;
- `hub`: `load_hub` and `save_hub`, weights as Hugging Face's hub keeps them; `names`, what they are
  called there;
- `moving`: `hand_over`, the same weights under another layout while a job runs, from what each rank
  has of a model, whatever has cut it;
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
