"""Several nodes, schedulers, and keeping a job busy and alive."""
