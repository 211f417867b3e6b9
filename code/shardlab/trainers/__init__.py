"""The training script by others' loops, and fp16's scale.

`core` is the script with Lightning's Trainer, for one GPU or two nodes; `beside` holds it against
a plain loop, on ranks that are there. `scaler` is fp16's loss scaler: one decision for all ranks.
"""
