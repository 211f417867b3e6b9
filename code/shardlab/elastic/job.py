"""The arguments of an agent of `shardlab.elastic.core`, and helpers for its address and ports."""

from __future__ import annotations

import socket
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from shardlab.common.arguments import MAX_COUNT, MAX_PROCESSES, check_integer, check_number


@dataclass(frozen=True)
class Job:
    """The arguments of an agent. They are equal for all agents of a job, except `ranks`.

    command: the program of every rank. at: host and port of the store; the host is one of the
    nodes. ranks: number on this node; nodes may differ. nodes: the minimum and maximum number of
    nodes. name: agents of a job with another name are refused. restarts: how often all ranks are
    restarted after a failure. In seconds: `patience`, the heartbeat timeout of an agent;
    `last_call`, the wait for more nodes once the minimum has joined; `join`, the wait for the
    minimum; `grace`, from SIGTERM to SIGKILL. logs: folder for the ranks' output; None: inherited.

    Raises ValueError for an empty command, numbers out of range, an `at` without a valid address.
    """

    command: tuple[str, ...]
    at: str
    ranks: int = 1
    nodes: tuple[int, int] = (1, 1)
    name: str = "job"
    restarts: int = 3
    patience: float = 5.0
    last_call: float = 2.0
    join: float = 600.0
    grace: float = 10.0
    logs: Path | None = None

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command:
            raise ValueError(f"command={self.command!r}: must be a program and its arguments")
        check_integer(1, MAX_PROCESSES, ranks=self.ranks)
        check_integer(0, restarts=self.restarts)
        check_number(patience=self.patience, join=self.join)
        check_number(0, last_call=self.last_call, grace=self.grace)
        least, most = self.nodes
        if not 1 <= least <= most <= MAX_COUNT:
            raise ValueError(f"nodes={least}:{most}: must be LEAST:MOST, from 1 to {MAX_COUNT:,}")
        host, _, port = self.at.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"at={self.at!r}: must be HOST:PORT, with a port from 1 to 65535")
        try:
            socket.getaddrinfo(*self.address)
        except OSError as error:
            text = f"its host must have an address ({error.strerror})"
            raise ValueError(f"at={self.at!r}: {text}") from None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the store."""
        host, _, port = self.at.rpartition(":")
        return host, int(port)


def open_listener(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens at this address, or None if it is remote or in use."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(128)
        return listener
    except OSError:
        listener.close()
        return None


def find_free_port(host: str) -> int:
    """Return a free port of this node's address `host`."""
    with closing(open_listener(host, 0)) as listener:
        return listener.getsockname()[1]
