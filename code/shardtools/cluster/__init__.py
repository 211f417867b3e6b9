"""Jobs on many nodes: batch files, monitoring, and checks of the hosts.

`jobs/` has files for Slurm, PBS and Kubernetes. `slurm` is a small Slurm on this machine, `watch`
shows what a job does and why it hangs, `captured/` has jobs that hung, and `doctor` checks the
hosts before a job. `command` is the command line of all except the doctor, and of the launcher in
`shardlab.elastic`.
"""
