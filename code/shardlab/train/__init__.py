"""A training script, from one process to many."""
