"""Many nodes: launching, schedulers, watching and debugging."""
