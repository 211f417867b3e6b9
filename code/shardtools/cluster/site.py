"""Settings of a site, `cluster.yml`, and batch files and commands adapted to it.

    python -m shardlab strategy emit course … --into job --site cluster.yml
    python -m shardlab cluster files --site cluster.yml --into jobs

`Site.adapt_batch_file` adds the site's account, modules, container and so on to a general batch
file. Each key is optional, and a file without keys changes nothing.
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
_OPTION_KEYS = "account", "partition", "reservation", "qos", "constraint"
_SET = ("job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus", "gpus-per-node",
        "gres", "time", "output", "error", "array", "signal", "requeue", "open-mode")  # fmt: skip
# A command's options between its name and its program, on one line or on several.
_OPTIONS_PATTERN = r"(?:(?: |\s*\\\n\s*)--[\w-]+(?:=\S+)?)*"
_HINT_COMMENT = re.compile(r"^# What you type before.*\n(?:#   .*\n)*\n?", re.MULTILINE)


# Characters that need no quotes in a shell, and variables.
_UNQUOTED = r"(?:[\w./@:+=,%-]|\$\w+|\$\{\w+\})"
_LINE_FORM = r"[^\n]*\S[^\n]*", "one line of text"
_WORD_FORM = r"[\w.@:+-]+", "one word, as Slurm writes it; a number in quotes"
_PATH_FORM = rf"(?!~[^/])(?:[~#]|{_UNQUOTED})+", "a path without spaces; $USER and ~ are expanded"
# Allowed forms of a key's text, or of each line of its list.
ALLOWED_FORMS = {
    "name": _LINE_FORM,
    "account": _WORD_FORM,
    "partition": (r"[\w.,-]+", "partition names, as sinfo prints them"),
    "reservation": _WORD_FORM,
    "qos": _WORD_FORM,
    "constraint": (r"[\w.&|*()\[\]-]+", "an expression for sbatch --constraint"),
    "gres": (r"\w+(:[\w.-]+)?", "gpu or gpu:TYPE, without a number"),
    "sbatch": (
        rf"--(?!({'|'.join((*_OPTION_KEYS, *_SET))})\b(?!-))[a-z][a-z-]*(=[^\s#'\"\\]+)?",
        "a list of --NAME or --NAME=VALUE, without options that have a key or are in batch files",
    ),
    "modules": (r"[\w./+-]+", "a list of NAME or NAME/VERSION"),
    "environment": _PATH_FORM,
    "setup": (r"[^\n]*[^\s\\]\s*", "a list of complete shell lines"),
    "container": _PATH_FORM,
    "runtime": (
        rf"pyxis|(apptainer|singularity|podman-hpc)( {_UNQUOTED}+)*",
        f"{', '.join(RUNTIMES)}; except for pyxis with options of plain words and $NAME",
    ),
    # gloo takes only whole names; NCCL's prefixes and =eth0, ^lo are not allowed.
    "interface": (r"[\w.-]+(,[\w.-]+)*", "full interface names, as `ip link` prints them"),
    "scratch": _PATH_FORM,
    "launcher": ("|".join(map(re.escape, LAUNCHERS)), ", ".join(map(repr, LAUNCHERS))),
    "scheduler": ("slurm", "slurm (for PBS, edit jobs/job.pbs of the lesson on clusters)"),
}


@dataclass(frozen=True)
class Site:
    """One site's settings for every job. Raises ValueError for a bad value."""

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
            form, words = ALLOWED_FORMS.get(field.name, ("", "true or false"))
            if kind is int:
                good, words = value == 0 or is_integer(value, 1, 64), "a whole number, 1 to 64"
            elif kind is bool:
                good = isinstance(value, bool)
            else:
                each = value if kind is tuple else (value,)
                good = isinstance(value, kind) and all(
                    isinstance(one, str) and re.fullmatch(form, one) for one in each
                )
            if value != field.default and not good:
                raise ValueError(f"{field.name}={shorten_repr(value)}: must be {words}")
        if self.runtime != "apptainer --nv" and not self.container:
            raise ValueError(f"runtime={self.runtime!r}: needs a container")

    def get_job_options(self) -> dict[str, str]:
        """Return the options for sbatch, salloc and srun that every job on this site needs."""
        return {f"--{name}": value for name in _OPTION_KEYS if (value := getattr(self, name))}

    def get_setup_lines(self) -> list[str]:
        """Return the shell lines that begin every job."""
        lines = [f"module load {' '.join(self.modules)}"] if self.modules else []
        lines += self.setup
        if self.environment and not self.container:
            lines.append(f'source "{_expand_home(self.environment)}/bin/activate"')
        if self.scratch:
            lines.append(f"export HF_HOME={_expand_home(self.scratch)}/huggingface")
            lines.append(f"export XDG_CACHE_HOME={_expand_home(self.scratch)}/cache")
        if self.offline:
            lines.append("export HF_HUB_OFFLINE=1  # fetch on the login node")
        if self.interface:
            lines.append(f"export NCCL_SOCKET_IFNAME={self.interface}")
            lines.append(f"export GLOO_SOCKET_IFNAME={self.interface}")
        return lines

    def make_setup_script(self) -> str:
        """Return the file site.sh, which jobs source and users may source on the login node."""
        head = f"# {self.name or 'This site'}, from its cluster.yml. `source site.sh` gives a"
        return "\n".join([f"{head} login shell the same.", *self.get_setup_lines(), ""])

    def adapt_batch_file(self, text: str, use_launcher: bool = True) -> str:
        """Return a Slurm batch file adapted to this site. use_launcher: let srun replace torchrun.

        Raises ValueError if `srun` should start the ranks of a file that does not call torchrun.
        """
        head = re.findall(r"(?m)^#SBATCH ([^#\n]*)", text)
        present = {option.partition("=")[0] for line in head for option in line.split()}
        options = [f"{name}={value}" for name, value in self.get_job_options().items()]
        options = [one for one in [*options, *self.sbatch] if one.partition("=")[0] not in present]
        text = re.sub(r"(?m)^#SBATCH [^#\n]*", lambda m: self._replace_gpu_options(m[0]), text)
        if options:
            name = f"  # {self.name}" if self.name else ""
            last = list(re.finditer(r"(?m)^#(SBATCH .*|!.*)$", text))[-1]
            added = [f"#SBATCH {one}{name}" for one in options]
            text = "\n".join([text[: last.end()], *added]) + text[last.end() :]
        if self.launcher.startswith("python"):  # a venv on an image's PyTorch has no torchrun
            text = re.sub(r'(?<![/\w])torchrun (?=--nnodes|"\$@")', f"{self.launcher} ", text)
        elif use_launcher and self.launcher == "srun":
            text = _replace_torchrun(text)
        if self.launcher != "torchrun":
            text = text.replace("command -v torchrun >", "command -v python >")
            text = text.replace('"no torchrun: ', '"no python: ')
        return self._insert_setup(self._wrap_in_container(text))

    def adapt_command(self, line: str) -> str:
        """Add the site's options to a command line of srun, salloc or the planner."""
        word, _, rest = line.partition(" ")
        if word in ("srun", "salloc") and "--jobid" not in line:
            given = [f"{name}={quote(value)}" for name, value in self.get_job_options().items()]
            return " ".join([word, *given, self._replace_gpu_options(rest)])
        if "strategy emit" in line and ("emit slurm" in line or "--into" in line):
            return f"{line} --site cluster.yml"
        return line

    def _replace_gpu_options(self, options: str) -> str:
        """Replace --gpus and --gpus-per-node by --gres, if the site asks for GPUs that way."""
        if not self.gres:
            return options
        made = rf"--gres={self.gres}:\1"
        return re.sub(r"--gpus(?:-per-node)?=(\d+)", made, options)

    def _insert_setup(self, text: str) -> str:
        """Insert the setup lines into a batch file, unless the file sources site.sh."""
        source_line = "source ./site.sh\n"
        if source_line in text:  # a site's lines may read variables that are not set
            return text.replace(source_line, f"set +u\n{source_line}set -u\n")
        if not (lines := self.get_setup_lines()):
            return text
        if "set -euo" in text:
            lines = ["set +u", *lines, "set -u"]
        text = _HINT_COMMENT.sub("", text)
        place = re.search(r"(?m)^set -euo pipefail\n", text)
        at = place.end() if place else [m.end() for m in re.finditer(r"(?m)^#.*\n", text)][-1]
        return text[:at] + "\n".join(["", *lines, ""]) + text[at:]

    def _wrap_in_container(self, text: str) -> str:
        """Start every program of srun inside the container."""
        if not self.container:
            return text
        image, folders = _expand_home(self.container), ["$PWD"]
        if self.scratch:
            folders.append(_expand_home(self.scratch))
        start = venv = ""
        if self.environment:  # made with the image's Python, so activated inside the container
            folder = _expand_home(self.environment)
            venv = f'bash -c \'source "{folder}/bin/activate"; exec "$@"\' venv'
        program, *flags = self.runtime.split()
        test = f'command -v {program} >/dev/null || fail "no {program}: load its module"'
        if self.runtime == "pyxis":
            test = '[[ $(srun --help) == *--container-image* ]] || fail "no pyxis: ask your site"'
            mounts = ",".join(f"{folder}:{folder}" for folder in folders)
            more = f'--container-image="{image}" --container-mounts="{mounts}"'
            text = re.sub(r"(?m)^srun ", f'srun {more} \\\n  --container-workdir="$PWD" ', text)
        elif program == "podman-hpc":  # by default it passes neither variables nor network
            mounts = [f'--volume "{folder}:{folder}"' for folder in folders]
            flags = ["--rm --net host --ipc host --env-host", *flags, *mounts]
            start = " ".join([program, "run", *flags, f'--workdir "$PWD" "{image}"'])
        else:
            mounts = ",".join(folders)
            start = " ".join([program, "exec", *flags, f'--bind "{mounts}" "{image}"'])
        if start := " \\\n  ".join(filter(None, [start, venv])):
            text = re.sub(rf"(?m)^(srun{_OPTIONS_PATTERN})((?: |\s*\\\n\s*))(?=[^-\s\\])",
                          lambda m: f"{m[1]} \\\n  {start} \\\n  ", text)  # fmt: skip
        return re.sub(r"(?m)^command -v (?:torchrun|python) .*$", lambda m: test, text)


def _expand_home(path: str) -> str:
    """Replace ~ by $HOME, which a shell expands inside quotes, too."""
    return path.replace("~", "$HOME", 1) if path.startswith("~") else path


def _replace_torchrun(text: str) -> str:
    """Replace torchrun on each node by one Slurm task for each rank."""
    form = re.compile(rf"(?m)torchrun(?= --nnodes){_OPTIONS_PATTERN}")
    found = form.search(text)
    per_node = found and re.search(r"--nproc-per-node=(\d+)", found[0])
    endpoint = found and re.search(r'--rdzv-endpoint="(\$\w+):(\$\w+)"', found[0])
    if not (found and per_node and endpoint):
        raise ValueError("launcher='srun': needs a batch file that itself calls torchrun")
    n = int(per_node[1])
    start = "export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID"
    text = form.sub(lambda m: f"bash -c '{start}\n    exec python \"$@\"' rank", text)
    sbatch_line = r"(?m)^(#SBATCH --%s=)(\d+)( *)(#.*)?$"
    text = re.sub(sbatch_line % "ntasks-per-node", rf"\g<1>{n}\3# one task for each rank", text)

    def divide_cores(found: re.Match[str]) -> str:
        return f"{found[1]}{max(1, int(found[2]) // n)}{found[3]}# for one rank"

    text = re.sub(sbatch_line % "cpus-per-task", divide_cores, text)
    text = re.sub(r"\$\(\(SLURM_CPUS_PER_TASK / \d+\)\)", "$SLURM_CPUS_PER_TASK", text)
    export = f"export MASTER_ADDR={endpoint[1]} MASTER_PORT={endpoint[2]}"
    text = re.sub(r"(?m)^(srun )", f"{export}\n\\1", text)
    return text.replace("# torchrun would die of USR1. It ignores", "# It ignores")


def read_site(path: str | Path, name: str = "site") -> Site:
    """Read a site's file. Raises ValueError for a bad file, key or value."""
    import yaml  # imported here: no other command needs it

    text = read_text(name, path, "a YAML file")
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        words = f"must be a YAML file ({' '.join(str(error).split())})"
        raise ValueError(f"{name}={str(path)!r}: {words}") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{name}={str(path)!r}: must have lines of KEY: VALUE")
    try:
        return parse_site(found)
    except ValueError as error:
        raise ValueError(f"{name}={str(path)!r}: {error}") from None


def parse_site(found: Mapping[Any, Any]) -> Site:
    """Return the site that a mapping describes. Raises ValueError for a bad key or value."""
    names = [field.name for field in fields(Site)]
    for key in found:
        if key not in names:
            near = options.suggest_nearest(str(key), names)
            raise ValueError(f"key {shorten_repr(key)}{near}: must be one of {', '.join(names)}")
    return Site(**{key: tuple(v) if isinstance(v, list) else v for key, v in found.items()})


def add_files(commands: argparse._SubParsersAction) -> None:
    """Write the course's batch files, adapted to your site.

    python -m shardlab cluster files --site cluster.yml --into jobs
    """
    parser = options.add_parser(commands, "files", add_files.__doc__)
    options.add_option(parser, "site", "settings of the site: cluster.yml", "FILE")
    options.add_option(parser, "into", "folder to write the batch files to (jobs)", "DIR")
    parser.set_defaults(command=_write_files)


def _write_files(args: argparse.Namespace) -> int:
    site = read_site(args.site or "")
    folder = options.make_folder("into", "jobs" if args.into is None else args.into)
    for path in sorted(JOBS.glob("*.sbatch")):
        text = site.adapt_batch_file(path.read_text("utf-8"), use_launcher=False)
        options.write_file("into", folder / path.name, text)
        print(folder / path.name)
    return 0
