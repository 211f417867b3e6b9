"""A launcher from scratch: an agent on each node starts its ranks, watches them, starts them again.

`core` is the agent, `host` decides for all of them, `job` is what they are told, `born` what a
rank's process does first, `keep` kills ranks with all that they started, and `run` is the command
for it, `python -m shardlab cluster run`.
`restarts.json` is what faults cost under it and under torchrun.
"""
