"""An elastic launcher from scratch: an agent on each node starts, monitors and restarts its ranks.

`core` is the agent, `host` makes the decisions for all agents, `job` holds the agents' arguments,
`exec_rank` is the launch shim of a rank, and `kill_sessions` kills ranks and their child processes.
The command is `python -m shardlab cluster run`. `restarts.json` holds measured costs of faults.
"""
