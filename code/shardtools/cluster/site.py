"""A site's settings, `cluster.yml`, from which its batch files and commands are made.

    python -m shardlab strategy emit course … --into job --site cluster.yml
    python -m shardlab cluster files --site cluster.yml --into jobs

`Site.batch` adds what a site needs in every job (its account, modules, container) to a general
batch file. Each key is optional, and a file without keys changes nothing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Any

from shardlab.common.arguments import is_integer, shorten_repr
from shardlab.common.files import read_text
from shardtools import options

JOBS, EXAMPLES = (Path(__file__).parent / name for name in ("jobs", "sites"))
LAUNCHERS = "torchrun", "python -m torch.distributed.run", "srun"
# Programs that start a container, all but pyxis with options: --nv (Apptainer, Singularity) and
# --gpu (podman-hpc) bring NVIDIA's libraries into it, --rocm AMD's.
RUNTIMES = "apptainer", "singularity", "podman-hpc", "pyxis"
# Options of sbatch with a key of their own, and options that every batch file sets itself.
_KEYS = "account", "partition", "reservation", "qos", "constraint"
_OWN = ("job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus", "gpus-per-node",
        "gres", "time", "output", "error", "array", "signal", "requeue", "open-mode")  # fmt: skip
# A command's options between its name and its program, on one line or on several.
_OPTIONS = r"(?:(?: |\s*\\\n\s*)--[\w-]+(?:=\S+)?)*"
_HINT = re.compile(r"^# What you type before.*\n(?:#   .*\n)*", re.MULTILINE)


# Characters that need no quotes in a shell, and variables.
_PLAIN = r"(?:[\w./@:+=,%-]|\$\w+|\$\{\w+\})"
_LINE = r"[^\n]*\S[^\n]*", "one line of text"
_WORD = r"[\w.@:+-]+", "one word, as Slurm writes it; a number in quotes"
_PATH = rf"(?!~[^/])(?:[~#]|{_PLAIN})+", "a path, without spaces; $USER and your ~ may stand in it"
# Allowed forms of a key's text, or of each line of its list.
FORMS = {
    "name": _LINE,
    "account": _WORD,
    "partition": (r"[\w.,-]+", "names that sinfo prints"),
    "reservation": _WORD,
    "qos": _WORD,
    "constraint": (r"[\w.&|*()\[\]-]+", "an expression of sbatch --constraint"),
    "gres": (r"\w+(:[\w.-]+)?", "gpu, or gpu:TYPE, without a number"),
    "sbatch": (
        rf"--(?!({'|'.join((*_KEYS, *_OWN))})\b(?!-))[a-z][a-z-]*(=[^\s#'\"\\]+)?",
        "a list of --NAME or --NAME=VALUE without a key of its own and not said in batch files",
    ),
    "modules": (r"[\w./+-]+", "a list of NAME or NAME/VERSION"),
    "environment": _PATH,
    "setup": (r"[^\n]*[^\s\\]\s*", "a list of whole lines of shell"),
    "container": _PATH,
    "runtime": (
        rf"pyxis|(apptainer|singularity|podman-hpc)( {_PLAIN}+)*",
        f"{', '.join(RUNTIMES)}, but for pyxis with their options, of plain words and $NAME",
    ),
    # gloo takes only whole names; NCCL's prefixes and =eth0, ^lo are not allowed.
    "interface": (r"[\w.-]+(,[\w.-]+)*", "whole names that `ip link` prints"),
    "scratch": _PATH,
    "launcher": ("|".join(map(re.escape, LAUNCHERS)), ", ".join(map(repr, LAUNCHERS))),
    "scheduler": ("slurm", "slurm; for PBS the lesson on clusters has job.pbs"),
}


@dataclass(frozen=True)
class Site:
    """One site's settings for every job. Raises ValueError, with key, value and allowed values."""

    name: str = ""  # the site's name, for a comment
    account: str = ""
    partition: str = ""
    reservation: str = ""
    qos: str = ""
    constraint: str = ""
    gres: str = ""  # GPU resource such as gpu:a100; "": --gpus-per-node is used
    gpus_per_node: int = 0  # 0: the machine's usual number
    sbatch: tuple[str, ...] = ()  # more options of every batch file, as --mem=0
    modules: tuple[str, ...] = ()
    environment: str = ""  # the folder of a virtual environment
    setup: tuple[str, ...] = ()  # lines of shell, after the modules
    container: str = ""  # an image, for `runtime`
    runtime: str = "apptainer --nv"
    interface: str = ""  # network interface over which ranks find each other
    scratch: str = ""  # a folder that all nodes see: caches go there
    offline: bool = False  # compute nodes reach no other machine
    launcher: str = "torchrun"
    scheduler: str = "slurm"  # for PBS there is jobs/job.pbs, to be edited by hand

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            form, allowed = FORMS.get(field.name, ("", "true and false"))
            if kind is int:
                good, allowed = value == 0 or is_integer(value, 1, 64), "whole numbers, 1 to 64"
            elif kind is bool:
                good = isinstance(value, bool)
            else:
                each = value if kind is tuple else (value,)
                good = isinstance(value, kind) and all(
                    isinstance(one, str) and re.fullmatch(form, one) for one in each
                )
            if value != field.default and not good:
                raise ValueError(f"{field.name}={shorten_repr(value)}: allowed: {allowed}")
        if self.runtime != "apptainer --nv" and not self.container:
            raise ValueError(f"runtime={self.runtime!r}: allowed beside a container")

    def asks(self) -> dict[str, str]:
        """Return the options of sbatch, salloc and srun that every job needs on this site."""
        return {f"--{name}": value for name in _KEYS if (value := getattr(self, name))}

    def lines(self) -> list[str]:
        """Return the lines that a job's shell runs before anything else."""
        said = [f"module load {' '.join(self.modules)}"] if self.modules else []
        said += self.setup
        if self.environment and not self.container:
            said.append(f'source "{_home(self.environment)}/bin/activate"')
        if self.scratch:
            said.append(f"export HF_HOME={_home(self.scratch)}/huggingface")
            said.append(f"export XDG_CACHE_HOME={_home(self.scratch)}/cache")
        if self.offline:
            said.append("export HF_HUB_OFFLINE=1  # fetch on the login node")
        if self.interface:
            said.append(f"export NCCL_SOCKET_IFNAME={self.interface}")
            said.append(f"export GLOO_SOCKET_IFNAME={self.interface}")
        return said

    def script(self) -> str:
        """Return the file that a job sources; it also sets up a shell on the login node."""
        head = f"# {self.name or 'This site'}, from its cluster.yml. `source site.sh` gives a"
        return "\n".join([f"{head} login shell the same.", *self.lines(), ""])

    def batch(self, text: str, launch: bool = True) -> str:
        """Return a Slurm batch file, adapted to this site; launch: use the site's launcher.

        Raises ValueError if `srun` should start the ranks of a file that does not call torchrun.
        """
        head = re.findall(r"(?m)^#SBATCH ([^#\n]*)", text)
        there = {option.partition("=")[0] for line in head for option in line.split()}
        given = [f"{name}={value}" for name, value in self.asks().items()]
        given = [one for one in [*given, *self.sbatch] if one.partition("=")[0] not in there]
        text = re.sub(r"(?m)^#SBATCH [^#\n]*", lambda found: self._gres(found[0]), text)
        if given:
            name = f"  # {self.name}" if self.name else ""
            last = list(re.finditer(r"(?m)^#(SBATCH .*|!.*)$", text))[-1]
            more = [f"#SBATCH {one}{name}" for one in given]
            text = "\n".join([text[: last.end()], *more]) + text[last.end() :]
        if self.launcher.startswith("python"):  # a venv on an image's PyTorch has no torchrun
            text = re.sub(r'(?<![/\w])torchrun (?=--nnodes|"\$@")', f"{self.launcher} ", text)
        elif launch and self.launcher == "srun":
            text = _by_srun(text)
        if self.launcher != "torchrun":
            text = text.replace("command -v torchrun >", "command -v python >")
            text = text.replace('"no torchrun: ', '"no python: ')
        return self._shell(self._inside(text))

    def command(self, line: str) -> str:
        """Adapt a typed line: srun and salloc get the site's options, the planner gets --site."""
        word, _, rest = line.partition(" ")
        if word in ("srun", "salloc") and "--jobid" not in line:
            given = [f"{name}={quote(value)}" for name, value in self.asks().items()]
            return " ".join([word, *given, self._gres(rest)])
        if "strategy emit" in line and ("emit slurm" in line or "--into" in line):
            return f"{line} --site cluster.yml"
        return line

    def _gres(self, options: str) -> str:
        """Return options with `gres` in the place of --gpus and --gpus-per-node."""
        if not self.gres:
            return options
        made = rf"--gres={self.gres}:\1"
        return re.sub(r"--gpus(?:-per-node)?=(\d+)", made, options)

    def _shell(self, text: str) -> str:
        """Return the file with the site's lines, unless another file brings them."""
        brought = "source ./site.sh\n"
        if brought in text:  # a site's lines may read variables that are not set
            return text.replace(brought, f"set +u\n{brought}set -u\n")
        if not (said := self.lines()):
            return text
        if "set -euo" in text:
            said = ["set +u", *said, "set -u"]
        text = _HINT.sub("", text)
        place = re.search(r"(?m)^set -euo pipefail\n", text)
        at = place.end() if place else [m.end() for m in re.finditer(r"(?m)^#.*\n", text)][-1]
        return text[:at] + "\n".join(["", *said, ""]) + text[at:]

    def _inside(self, text: str) -> str:
        """Return the file with every program that srun starts inside the container."""
        if not self.container:
            return text
        image, folders = _home(self.container), ["$PWD"]
        if self.scratch:
            folders.append(_home(self.scratch))
        how = venv = ""
        if self.environment:  # made with the image's Python, so activated inside the container
            venv = f'bash -c \'source "{_home(self.environment)}/bin/activate"; exec "$@"\' venv'
        program, *flags = self.runtime.split()
        need = f'command -v {program} >/dev/null || fail "no {program}: load its module"'
        if self.runtime == "pyxis":
            need = '[[ $(srun --help) == *--container-image* ]] || fail "no pyxis: ask your site"'
            mounts = ",".join(f"{folder}:{folder}" for folder in folders)
            more = f'--container-image="{image}" --container-mounts="{mounts}"'
            text = re.sub(r"(?m)^srun ", f'srun {more} \\\n  --container-workdir="$PWD" ', text)
        elif program == "podman-hpc":  # by default it passes neither variables nor network
            bound = [f'--volume "{folder}:{folder}"' for folder in folders]
            flags = ["--rm --net host --ipc host --env-host", *flags, *bound]
            how = " ".join([program, "run", *flags, f'--workdir "$PWD" "{image}"'])
        else:
            bound = ",".join(folders)
            how = " ".join([program, "exec", *flags, f'--bind "{bound}" "{image}"'])
        if how := " \\\n  ".join(filter(None, [how, venv])):
            text = re.sub(rf"(?m)^(srun{_OPTIONS})((?: |\s*\\\n\s*))(?=[^-\s\\])",
                          lambda m: f"{m[1]} \\\n  {how} \\\n  ", text)  # fmt: skip
        return re.sub(r"(?m)^command -v (?:torchrun|python) .*$", lambda m: need, text)


def _home(path: str) -> str:
    """Return a path whose ~ a shell expands inside quotes, too."""
    return path.replace("~", "$HOME", 1) if path.startswith("~") else path


def _by_srun(text: str) -> str:
    """Return the file with one Slurm task for each rank, in the place of torchrun on each node."""
    form = re.compile(rf"(?m)torchrun(?= --nnodes){_OPTIONS}")
    found = form.search(text)
    many = found and re.search(r"--nproc-per-node=(\d+)", found[0])
    meet = found and re.search(r'--rdzv-endpoint="(\$\w+):(\$\w+)"', found[0])
    if not (found and many and meet):
        raise ValueError("launcher='srun': allowed where the batch file itself calls torchrun")
    n = int(many[1])
    start = "export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID"
    text = form.sub(lambda m: f"bash -c '{start}\n    exec python \"$@\"' rank", text)
    asked = r"(?m)^(#SBATCH --%s=)(\d+)( *)(#.*)?$"
    text = re.sub(asked % "ntasks-per-node", rf"\g<1>{n}\3# one task for each rank", text)

    def cores(found: re.Match[str]) -> str:
        return f"{found[1]}{max(1, int(found[2]) // n)}{found[3]}# for one rank"

    text = re.sub(asked % "cpus-per-task", cores, text)
    text = re.sub(r"\$\(\(SLURM_CPUS_PER_TASK / \d+\)\)", "$SLURM_CPUS_PER_TASK", text)
    text = re.sub(r"(?m)^(srun )", f"export MASTER_ADDR={meet[1]} MASTER_PORT={meet[2]}\n\\1", text)
    return text.replace("# torchrun would die of USR1. It ignores", "# It ignores")


def read(given: str | Path, name: str = "site") -> Site:
    """Read a site's file. Raises ValueError for a bad file, key or value."""
    import yaml  # imported here: no other command needs it

    text = read_text(name, given, "a YAML file")
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        words = " ".join(str(error).split())
        raise ValueError(f"{name}={str(given)!r}: allowed are YAML files ({words})") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{name}={str(given)!r}: allowed are lines of KEY: VALUE")
    try:
        return of(found)
    except ValueError as error:
        raise ValueError(f"{name}={str(given)!r}: {error}") from None


def of(found: Mapping[Any, Any]) -> Site:
    """Return the site that these keys and values describe. Raises ValueError."""
    names = [field.name for field in fields(Site)]
    for key in found:
        if key not in names:
            near = options.nearest(str(key), names)
            raise ValueError(f"key {shorten_repr(key)}{near}: allowed are {', '.join(names)}")
    return Site(**{key: tuple(v) if isinstance(v, list) else v for key, v in found.items()})


def add_files(commands: argparse._SubParsersAction) -> None:
    """Add `cluster files` to the command line: the course's batch files, made for a site."""
    parser = options.command(commands, "files", add_files.__doc__)
    options.add(parser, "site", "the site's cluster.yml", "FILE")
    options.add(parser, "into", "the folder for the batch files (jobs)", "DIR")
    parser.set_defaults(command=_files)


def _files(chosen: argparse.Namespace) -> int:
    site = read(chosen.site or "")
    folder = options.folder("into", "jobs" if chosen.into is None else chosen.into)
    for path in sorted(JOBS.glob("*.sbatch")):
        text = site.batch(path.read_text("utf-8"), launch=False)
        options.written("into", folder / path.name, text)
        print(folder / path.name)
    return 0
