"""An elastic launcher from scratch: an agent on each node starts, monitors and restarts its ranks.

`core` is the agent, `host` makes the decisions for all agents, `job` holds the agents' arguments,
`born` is the launch shim of a rank, and `keep` kills ranks with their child processes. The command
is `python -m shardlab cluster run`. `restarts.json` holds measured costs of faults, under this
launcher and under torchrun.
"""
