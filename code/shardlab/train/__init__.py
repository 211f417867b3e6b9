"""Training scripts, from one GPU to many nodes.

`one_gpu`, `ddp`, `sampler` and `core` are one script in four versions, from one process to many
ranks. `take_home`, linked as `code/train.py`, adds what a real job needs, and imports only torch.
"""
