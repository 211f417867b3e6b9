"""Server that forks Jupyter kernels: a kernel starts without the seconds that imports take.

    with KernelServer(environment) as server:
        manager.provisioner = server.make_provisioner(manager)  # then the manager starts a fork

The server is a process that has imported what most pages import (PRELOADED). It reads a kernel's
arguments, folder and environment from stdin, a line of JSON each, and ends with its stdin.

On the CPU only: a library that has asked for the GPUs' number cannot use them after a fork. And
not on macOS, whose own libraries do not survive a fork.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jupyter_client.manager import AsyncKernelManager
    from jupyter_client.provisioning import LocalProvisioner

# Not matplotlib.pyplot, which registers itself with the kernel that imports it.
PRELOADED = ("ipykernel.kernelapp", "matplotlib.figure", "matplotlib.projections", "torch._dynamo")
PRELOADED += ("torch.distributed.fsdp", "torch.distributed.pipelining")
PRELOADED += ("torch.distributed.tensor.parallel",)


class KernelServer:
    """Client of a server process, whose kernels have the variables `environment` at imports."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        # A kernel sets this variable, too late for a matplotlib that is imported already.
        backend = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, *PRELOADED],  # as a module it would import the course
            env={**backend, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # the terminal's Ctrl-C reaches this process alone
        )

    def __enter__(self) -> KernelServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def fork_kernel(self, argv: list[str], folder: str, environment: Mapping[str, str]) -> int:
        """Start a kernel in a new session; return its process's number."""
        request = json.dumps([argv, folder, dict(environment)])
        print(request, file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline()):
            raise RuntimeError("the process that kernels are forked from has died")
        return int(line)

    def make_provisioner(self, manager: AsyncKernelManager) -> LocalProvisioner:
        """Return a provisioner for `manager` whose kernel is a fork of the server."""
        import psutil
        from jupyter_client.provisioning import LocalProvisioner

        class Kernel(psutil.Process):
            """A process that is no child of this one, with what LocalProvisioner asks for."""

            stdin = stdout = stderr = None

            def poll(self) -> int | None:
                return None if self.is_running() else 1

        class ForkProvisioner(LocalProvisioner):
            """Provisioner of a kernel that the server forks."""

            async def launch_kernel(provisioner, cmd: list[str], **options: Any) -> dict:  # noqa: N805
                pid = self.fork_kernel(cmd, options["cwd"], options["env"])
                provisioner.process = Kernel(pid)
                provisioner.pid = provisioner.pgid = pid
                return provisioner.connection_info

        return ForkProvisioner(kernel_spec=manager.kernel_spec, parent=manager)


def run_kernel(argv: list[str], folder: str, environment: dict[str, str]) -> None:
    """Become a kernel, in a fork of the server: as if this interpreter had just started."""
    os.setsid()
    print(os.getpid(), flush=True)
    for stream in (sys.stdin, sys.stdout):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream.fileno())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv[2:]  # python -m ipykernel_launcher …
    sys.path.insert(0, environment["PYTHONPATH"].partition(os.pathsep)[0])
    sys.modules.pop("sitecustomize", None)
    importlib.import_module("sitecustomize")
    from ipykernel import kernelapp

    kernelapp.launch_new_instance()


def main() -> None:
    """Fork a kernel for each line on stdin."""
    del sys.path[0]  # this file's folder
    # At its import ipykernel reads whose end is to end a kernel, too.
    os.environ["JPY_PARENT_PID"] = str(os.getpid())
    with redirect_stdout(sys.stderr):
        for name in sys.argv[1:]:
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    for line in sys.stdin:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of OpenBLAS's threads
            pid = os.fork()
        if pid == 0:
            run_kernel(*json.loads(line))
            os._exit(0)


if __name__ == "__main__":
    main()
