"""Jobs on many nodes: started, put into queues, started again, watched, and examined.

`core` is an agent on each node, `host` decides for all of them, `job` is what they are told, and
`run` the command for it. `jobs/` has files for Slurm, PBS and Kubernetes, `restarts.json` what
faults cost. `slurm` is a small Slurm on this machine, `watch` says what a job does and why it
hangs, `captured/` has jobs that hung, and `doctor` examines the hosts before a job. `command` is
the command line of all but the doctor.
"""
