"""Training with PyTorch Lightning's Trainer, and loss scaling for fp16.

`core` is the training script with Lightning's Trainer, for one GPU or two nodes; `existing_ranks`
runs the Trainer on existing ranks, to compare it with a plain loop. `scaler` scales the fp16 loss.
"""
