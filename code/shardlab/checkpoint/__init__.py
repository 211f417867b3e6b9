"""Checkpoints that resume on any number of ranks, and stay intact if a save is killed.

torch.distributed.checkpoint (DCP) writes and reads the tensors: every rank writes its own shards,
and any number of ranks can read them. This package adds what DCP leaves to its users:

- `core`: the contents of a checkpoint, the atomic rename that completes a save, and `Checkpoints`;
- `folder`: a checkpoint's files and manifest, the check for damage, and errors on all ranks;
- `export`: `export_model`, one file for a plain process;
- `hub`: `load_hub` and `save_hub`, weights in Hugging Face's format; `hub_names`: names there;
- `resharding`: `transfer_weights`, between any two layouts of a model, while a job runs;
- `save_interval`: the best interval between saves.

    store = Checkpoints("runs/a", dist.group.WORLD, keep=2)
    training = Training(model, optimizer, schedule)
    if store.list_steps():
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
from .export import export_model
from .folder import MANIFEST, CheckpointError, list_checkpoints
from .hub import load_hub, save_hub
from .hub_names import read_config
from .resharding import predict_transfer_bytes, transfer_weights
from .save_interval import best_interval, lost_fraction, simulated_lost_fraction

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "Checkpoints",
    "Training",
    "best_interval",
    "export_model",
    "list_checkpoints",
    "load_hub",
    "lost_fraction",
    "named_tensors",
    "predict_transfer_bytes",
    "read_config",
    "save_hub",
    "simulated_lost_fraction",
    "transfer_weights",
]
