"""Training with PyTorch Lightning's Trainer, and loss scaling for fp16.

`core` is the training script with Lightning's Trainer, for one GPU or two nodes; `beside` runs the
Trainer on existing ranks, to compare it with a plain loop. `scaler` is a loss scaler for fp16.
"""
