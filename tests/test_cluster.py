"""Batch files of `cluster` without their schedulers: PBS, Kubernetes, Kubeflow."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardtools.cluster.slurm import sessions

JOBS = sessions.JOBS
KUBERNETES = {  # checked kinds: kubeflow-trainer-api has no model of a whole Job
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): ("TrainerV1alpha1TrainJob", None),
    ("batch/v1", "Job"): ("IoK8sApiBatchV1JobSpec", "spec"),
    ("v1", "Service"): ("IoK8sApiCoreV1ServiceSpec", "spec"),
}
# From OpenPBS's qsub(1B), as its repository has it: options with a value that may be directives
# (all but -C and -q), and resources that pbs_resources(7B) names.
PBS_OPTIONS = "aAcejJklmMNopPrRSuvW"
PBS_RESOURCES = {"select", "place", "walltime", "ncpus", "mem", "ngpus", "mpiprocs", "ompthreads"}


def find_dropped(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Return the names in `given` that a model dropped."""
    if isinstance(given, dict):
        for name, value in given.items():
            if not isinstance(kept, dict) or name not in kept:
                yield f"{path}.{name}"
            else:
                yield from find_dropped(value, kept[name], f"{path}.{name}")
    elif isinstance(given, list):
        for number, value in enumerate(given):
            yield from find_dropped(value, kept[number], f"{path}[{number}]")


def find_faults(text: str) -> list[str]:
    """Return a file's errors under the published schemas of Kubernetes and Kubeflow Trainer."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="wants kubeflow-trainer-api")
    found = []
    for given in yaml.safe_load_all(text):
        name, part = KUBERNETES[given["apiVersion"], given["kind"]]
        given = given[part] if part else given
        try:
            found += find_dropped(given, getattr(models, name).from_dict(given).to_dict())
        except ValueError as error:  # raised by pydantic
            found.append(str(error))
    return found


@pytest.mark.parametrize("name", ["job.yaml", "trainjob.yaml"])
def test_kubernetes_files_follow_their_published_schemas(name: str) -> None:
    assert find_faults((JOBS / name).read_text("utf-8")) == []


def test_the_jobs_parts_find_one_another() -> None:
    service, job = yaml.safe_load_all((JOBS / "job.yaml").read_text("utf-8"))
    pod, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    command = pod["containers"][0]["command"]
    endpoint = next(word for word in command if word.startswith("--rdzv-endpoint="))
    host, _, port = endpoint.partition("=")[2].partition(":")
    # A pod is NAME-0.SERVICE, where its `subdomain` is the headless service that selects it.
    assert host == f"{name}-0.{service['metadata']['name']}" and int(port) > 1024
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert "--nnodes=2" in command
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.[sp]b*")), ids=lambda path: path.name)
def test_the_shell_reads_every_batch_file(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path], capture_output=True).stderr == b""


def parse_directives(text: str, mark: str) -> list[list[str]]:
    """Return the words of each directive; like qsub, ignore those after the first command."""
    found = []
    for line in text.splitlines()[1:]:
        if line.startswith(mark):
            found.append(shlex.split(line.removeprefix(mark), comments=True))
        elif line.strip() and not line.startswith("#"):
            break
    return found


def test_pbs_directives_are_those_of_the_manual() -> None:
    text = (JOBS / "job.pbs").read_text("utf-8")
    words = parse_directives(text, "#PBS")
    assert len(words) == text.count("\n#PBS") > 4
    for option, *values in words:
        assert re.fullmatch(f"-[{PBS_OPTIONS}]", option) and len(values) == 1, (option, values)
        if option == "-l":
            names = [part.partition("=")[0] for part in re.split("[:,]", values[0])]
            assert {n for n in names if not re.fullmatch(r"\d*", n)} <= PBS_RESOURCES, values


def test_the_pbs_file_starts_torchrun_on_both_nodes(tmp_path: Path) -> None:
    # PBS is not available: a stub of pbsdsh runs the command once for each line of the list of
    # nodes, with no environment but PATH, as the manual says of the real one.
    (tmp_path / "nodes").write_text("alpha\nbeta\n")
    (tmp_path / "home").mkdir()
    for name, script in {
        "pbsdsh": '[[ $1 == -- ]] && shift\nwhile read -r _; do env -i PATH="$PATH" '
        f'HOME={tmp_path}/home "$@" </dev/null; done <"$PBS_NODEFILE"',
        "torchrun": 'echo "$OMP_NUM_THREADS $PWD $*"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "home/.bash_profile").write_text(f"PATH={tmp_path}:$PATH\n")
    pbs = {"PBS_O_WORKDIR": str(tmp_path), "PBS_NODEFILE": "nodes", "PBS_JOBID": "123.server"}
    environment = {**pbs, "PATH": f"{tmp_path}:/usr/bin:/bin", "SCRIPT": "train.py --steps 5"}
    command = ["bash", str(JOBS / "job.pbs")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    one, two = done.stdout.splitlines()
    assert one == two and one.startswith(f"2 {tmp_path} --nnodes=2")
    assert "--rdzv-id=123 --rdzv-endpoint=alpha:20123 train.py --steps 5" in one
