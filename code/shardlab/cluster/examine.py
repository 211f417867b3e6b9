"""What one rank finds on its own host: facts, no verdicts (`doctor` judges them).

Each part is a function, which returns plain values for JSON. Bytes, seconds and bytes per second;
None where the system does not say, or for a limit that there is not.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import platform
import resource
import shutil
import socket
import sys
import time
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from shardlab.count import clock
from shardlab.record import facts

from .meet import Meeting

Facts = dict[str, Any]
LIMITS = ("nofile", "nproc", "memlock", "core")
TRIAL = 8 * 2**20  # bytes that each rank writes into the folder
_PATIENCE = 5.0  # seconds that a network's file system may take to show what another host wrote


def host() -> str:
    """The name of this rank's host: ranks of one name share its memory, cores and clock."""
    return socket.gethostname()


def versions(device: torch.device) -> Facts:
    """Of what has to be equal on all ranks."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda or ""
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = facts.driver()
    return found | {"shardlab": sources()}


def sources() -> str:
    """A short hash of the package's own files: two checkouts are seldom the same."""
    package = Path(__file__).parents[1]
    whole = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        whole.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return whole.hexdigest()[:12]


def gpu(device: torch.device) -> Facts:
    """This rank's device. A GPU's `id` is its own, whatever number it has in this process."""
    if device.type != "cuda":
        return {"kind": "cpu", "name": facts.cpu_name(), "id": None, "free": None, "total": None}
    free, total = torch.cuda.mem_get_info(device)
    about = torch.cuda.get_device_properties(device)
    return {
        "kind": "cuda",
        "name": about.name,
        "id": str(about.uuid),
        "number": device.index,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "free": free,
        "total": total,
    }


def cores() -> Facts:
    """The cores that this process may use, how many there are, and its threads for products."""
    mask = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {"mask": mask, "all": os.cpu_count() or 1, "threads": torch.get_num_threads()}


def memory() -> Facts:
    """The host's memory that is left for this process, and all of it."""
    host = psutil.virtual_memory()
    return {"free": min(host.available, *_group_rooms(), host.total), "total": host.total}


def _group_rooms() -> list[int]:
    """What the control groups leave that this process is in: a job's own limit is one of them."""
    rooms = []
    with suppress(OSError, ValueError, IndexError):
        own = Path("/proc/self/cgroup").read_text().strip().splitlines()[-1].partition("::/")[2]
        group = Path("/sys/fs/cgroup", own)
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # "max": no limit
                most = int((folder / "memory.max").read_text())
                rooms.append(max(0, most - int((folder / "memory.current").read_text())))
    return rooms


def limits() -> Facts:
    """What `ulimit` says: the soft limit, and how far this user may raise it."""
    found: Facts = {"infiniband": any(Path("/sys/class/infiniband").glob("*"))}
    for name in LIMITS:
        both = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
        found[name] = [None if value == resource.RLIM_INFINITY else value for value in both]
    return found


def shared_memory() -> Facts | None:
    """/dev/shm, through which processes of one host hand tensors to one another."""
    if not Path("/dev/shm").is_dir():
        return None
    usage = shutil.disk_usage("/dev/shm")
    return {"free": usage.free, "total": usage.total}


def network() -> Facts:
    """The interface by which this rank talks: what gloo and nccl would take, and how fast it is."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    there = {
        name: [a.address for a in addresses if a.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    found: Facts = {"named": named, "interfaces": sorted(there), "interface": None, "address": None}
    if named:
        addresses = there.get(named, [])
    else:  # gloo's own rule: the address of the host's name
        addresses = []
        with suppress(OSError):
            addresses = [socket.gethostbyname(socket.gethostname())]
    for address in addresses:
        holders = [name for name, its in there.items() if address in its]
        inside = address.startswith("127.")  # Debian gives the host's name 127.0.1.1
        found |= {"address": address, "interface": holders[0] if holders else None}
        found["loopback"] = inside
    speed = psutil.net_if_stats().get(found["interface"] or "")
    found["speed"] = speed.speed * 1e6 / 8 if speed and speed.speed else None
    return found


def speed(device: torch.device, windows: int = 5) -> Facts:
    """FLOP/s of products one after another: the best of some windows of 0.05 s (a GPU: 0.2 s).

    On the CPU: of one core, in seconds that this thread had it; `share` says how often it had.
    """
    cuda = device.type == "cuda"
    side, few, dtype = (8192, 4, torch.float16) if cuda else (256, 4, torch.float32)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    torch.mm(a, b)
    name = torch.cuda.get_device_name(device) if cuda else facts.cpu_name()
    found: Facts = {"kind": device.type, "name": name, "flops": 0.0, "share": 0.0}
    for _ in range(windows):
        begin, core, done, passed = clock(device), time.thread_time(), 0, 0.0
        while passed < (0.2 if cuda else 0.05):
            for _ in range(few):
                torch.mm(a, b)  # [side, side] @ [side, side]
            done += few
            passed = clock(device) - begin
        had = time.thread_time() - core
        flops, share = 2 * side**3 * done / (passed if cuda else had), had / passed
        found |= {"flops": max(found["flops"], flops), "share": max(found["share"], share)}
    return found


def now() -> float:
    """This host's clock, seconds of the epoch."""
    return time.time()


# The folder in which checkpoints will lie.


def folder(path: str, meeting: Meeting) -> Facts:
    """Whether all ranks see the folder, what is renamed in it, and one another's locks.

    Rank 0 makes a folder of its own in there, and everything happens in that; it goes at the end.
    """
    found: Facts = {"error": None, "seen": False, "renamed": False, "locks": {}}
    own = Path(path, f".doctor-{uuid.uuid4().hex[:8]}")
    try:
        if meeting.rank == 0:
            meeting.tell("trial", _tried(partial(_prepare, own, found), found) and str(own))
        meeting.together("folder is made")
        trial = meeting.heard("trial", 0)
        found |= _room(path)
        if trial:
            _tried(partial(_look, Path(trial), meeting, found), found)
    finally:
        meeting.together("folder is done")
        if meeting.rank == 0:
            shutil.rmtree(own, ignore_errors=True)
    return found


def _tried(step: Any, found: Facts) -> bool:
    """Whether it went well; else `found` has the first error, in a line."""
    try:
        step()
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        found["error"] = found["error"] or f"{name}: {error.strerror or error}"
        return False
    return True


def _prepare(own: Path, found: Facts) -> None:
    own.mkdir()
    (own / "token").write_text(own.name)
    (own / "lock").touch()


def _room(path: str) -> Facts:
    """Bytes and files that still fit, and the kind of file system."""
    about: Facts = {"free": None, "files": None, "type": None}
    with suppress(OSError):
        stat = os.statvfs(path)
        about = {"free": stat.f_bavail * stat.f_frsize, "type": _type(path)}
        about["files"] = stat.f_favail if stat.f_files else None
    return about


def _type(path: str) -> str | None:
    """The kind of file system of `path`: nfs4, lustre, ext4, tmpfs, …"""
    whole, best = os.path.realpath(path), ("", None)
    for part in psutil.disk_partitions(all=True):
        point = part.mountpoint.rstrip("/") + "/"
        if (whole + "/").startswith(point) and len(point) >= len(best[0]):
            best = point, part.fstype
    return best[1]


def _look(trial: Path, meeting: Meeting, found: Facts) -> None:
    """Every rank's part. All come to every step, whatever one of them fails at."""
    first = meeting.rank == 0
    found["seen"] = _within(lambda: (trial / "token").read_text() == trial.name)
    meeting.together("token is read")
    if first:
        _tried(lambda: os.replace(trial / "token", trial / "renamed"), found)
    meeting.together("token is renamed")
    found["renamed"] = found["seen"] and _within(
        lambda: (trial / "renamed").exists() and not (trial / "token").exists()
    )
    for name, call in (("flock", fcntl.flock), ("fcntl", fcntl.lockf)):
        with _opened(trial / "lock") as file:
            held = _lock(call, file) if first else None
            meeting.together(f"{name} is held")
            taken = None if first else _lock(call, file)
            meeting.together(f"{name} is tried")
            if first and held is True:
                call(file, fcntl.LOCK_UN)
            meeting.together(f"{name} is free")
            # Whoever waits gets it, one after another.
            after = _within(lambda c=call, f=file: _turn(c, f))
            found["locks"][name] = _judged(held, taken, after, first)
        meeting.together(f"{name} is done")
    begin = time.perf_counter()
    if found["seen"]:
        _tried(lambda: _write(trial / f"written.{meeting.rank}"), found)
        found["seconds"] = time.perf_counter() - begin


def _within(works: Any) -> bool:
    """Whether it is so within some seconds: what a network's file system keeps may be older."""
    limit = time.monotonic() + _PATIENCE
    while True:
        with suppress(OSError):
            if works():
                return True
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)


def _opened(path: Path) -> Any:
    return open(path if path.exists() else os.devnull, "r+b")


def _lock(call: Any, file: Any) -> bool | str:
    """Whether the lock is ours now; the error's name where locks are not to be had at all."""
    try:
        call(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        return errno.errorcode.get(error.errno or 0, str(error))


def _turn(call: Any, file: Any) -> bool:
    if _lock(call, file) is not False:
        with suppress(OSError):
            call(file, fcntl.LOCK_UN)
        return True
    return False


def _judged(held: Any, taken: Any, after: bool, first: bool) -> str:
    """ "": this kind of lock works, seen from this rank."""
    got = held if first else taken
    if isinstance(got, str):
        return got
    if first:
        return "" if held else "a new file was locked already"
    if taken:
        return "was given while rank 0 held it"
    return "" if after else "was not given when it was free"


def _write(path: Path) -> None:
    """Write something, down to the disk: a quota says so only then."""
    with open(path, "wb") as file:
        file.write(os.urandom(TRIAL))
        file.flush()
        os.fsync(file.fileno())


if sys.platform == "win32":  # no rank of the course's runs there
    raise ImportError("shardlab.cluster needs POSIX: Linux, macOS, or WSL 2 on Windows")
