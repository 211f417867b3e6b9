"""Jobs on many nodes: put into queues, watched, and examined.

`jobs/` has files for Slurm, PBS and Kubernetes. `slurm` is a small Slurm on this machine, `watch`
says what a job does and why it hangs, `captured/` has jobs that hung, and `doctor` examines the
hosts before a job. `command` is the command line of all but the doctor, and of the launcher in
`shardlab.elastic`.
"""
