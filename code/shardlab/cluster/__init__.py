"""Jobs on many nodes: started, put into queues, started again, watched, and examined.

Starting: `core`, an agent on each node, and `job`, what it is told. Schedulers: `slurm`, a small
Slurm on this machine, with its `configuration` and `daemons`, started by `up`; `jobs/`, files for
Slurm, PBS and Kubernetes; `sessions`, terminals in it, as in `recorded/`. Watching: `sample` and
its picture, `report`; `straggler`; `timeline`. Hangs: `flight`, what each rank called, and `hang`,
who is missing; `captured/`, jobs that hung. Before a job: `doctor`, whose ranks `meet` and are led
by `consult`: `examine` the host, `pairs` and the `folder` find facts, `checks` judge by `verdicts`.
`command` is the command line of all but the doctor.
"""
