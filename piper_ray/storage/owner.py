"""Which process a driver is, so that another one on the same machine sees at once that it is gone."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Owner:
    """A process. boot_id, pid_namespace, start_time: empty on systems that do not tell.

    start_time: in the clock ticks of the machine, since it was started; tells apart processes that had one pid.
    """

    host: str
    pid: int
    boot_id: str
    pid_namespace: str
    start_time: str

    @classmethod
    def current(cls) -> Owner:
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            boot_id=_text(Path("/proc/sys/kernel/random/boot_id")),
            pid_namespace=_link(Path("/proc/self/ns/pid")),
            start_time=_start_time(os.getpid()),
        )

    @classmethod
    def decode(cls, content: bytes | None) -> Owner | None:
        """None for what is no lease: gone, or cut off by a power cut, say."""
        try:
            document = json.loads(content or b"")
            return cls(**{name: document[name] for name in cls.__dataclass_fields__})
        except (ValueError, TypeError, KeyError):
            return None

    def encode(self, beat: int) -> bytes:
        """beat: differs each time, as a sign of life."""
        return json.dumps({**asdict(self), "beat": beat}).encode()

    def is_gone(self) -> bool:
        """Certainly: the process was on this machine, in this pid namespace, and is there no more."""
        here = Owner.current()
        if not here.start_time or (self.boot_id, self.pid_namespace) != (here.boot_id, here.pid_namespace):
            return False
        return _start_time(self.pid) != self.start_time

    def __str__(self) -> str:
        return f"{self.host}, pid {self.pid}"


def _start_time(pid: int) -> str:
    """Empty if there is no such process, or only what its parent has not yet taken note of."""
    # The name, in parentheses, may hold anything. Fields after it: state (3rd in proc(5)), ..., start time (22nd).
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return "" if not fields or fields[0] in ("Z", "X") else fields[19]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
