"""From one training script to many nodes.

`one_gpu`, `ddp`, `sampler` and `core` are one script, which takes three steps from one process to
many ranks. `take_home` is what a real job needs besides, in one file that needs PyTorch alone: its
copy is `code/train.py`.
"""
