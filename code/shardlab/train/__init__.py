"""Training scripts, from one GPU to many nodes.

`one_gpu`, `ddp`, `sampler` and `core` are one script in four versions, from one process to many
ranks. `take_home` adds what a real job needs, in one file that imports PyTorch alone;
`code/train.py` is a copy of it.
"""
