"""The right to write a checkpoint. One driver has it at a time; whoever takes it over has a higher epoch.

How a driver gets it (``acquire``), on storage that can do no more than list, read, replace and delete files:

A driver waits until every driver it finds has ended. Then it claims the next epoch, in a file of its own, and looks
again:

- beside a lease, or a claim that goes before its own, it withdraws;
- beside claims that go after its own it waits until each is withdrawn, or has become a lease, and then withdraws.

Of two drivers at least the one that claimed later sees the other, so never do both take the lease; and the one that
goes first withdraws only if the other has the lease. A driver that slept, was taken for dead, and wakes up to take the
lease goes after the one that has it by then, and finds that out before it writes (``Lease.check``).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from piper_ray.model.errors import CheckpointLost, CheckpointRefused
from piper_ray.storage.folder import (
    CLAIM,
    LEASE,
    DriverFile,
    Folder,
    driver_files,
    highest_epoch,
    state_files,
    unfinished_before,
)


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


BEAT_S = 2.0
"""Between two signs of life."""

LEASE_S = 10.0
"""A driver that gives no sign of life for so long may be taken for dead."""


class Lease:
    """A file that says who writes, with a thread that rewrites it as a sign of life. ``acquire`` makes one."""

    def __init__(self, folder: Folder, file: DriverFile, owner: Owner) -> None:
        self._folder = folder
        self._file = file
        self._owner = owner
        self._beats = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name="checkpoint lease", daemon=True)

    @property
    def epoch(self) -> int:
        return self._file.epoch

    def take(self) -> None:
        """From now on other drivers see this one as the owner."""
        self.beat()
        self._thread.start()

    def beat(self) -> None:
        """A sign of life."""
        self._beats += 1
        self._folder.put(self._file.name, self._owner.encode(self._beats), durable=False)

    def check(self, names: Iterable[str]) -> None:
        """Raises CheckpointLost if the files of the folder show a driver that goes before this one."""
        names = list(names)
        rivals = [file for file in driver_files(names) if file.kind == LEASE and file.outranks(self._file)]
        if rivals:
            raise _lost(self._read(rivals[0]))
        if any(file.epoch > self.epoch for file in state_files(names)):
            raise _lost(None)

    def _read(self, file: DriverFile) -> Owner | None:
        with contextlib.suppress(OSError):
            return Owner.decode(self._folder.read(file.name))
        return None

    def release(self) -> None:
        """Nothing of the lease is left, and its thread has ended. What the storage cannot delete stays."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(LEASE_S)  # it may be waiting for a store that does not answer
        with contextlib.suppress(OSError):
            self._folder.delete(self._file.name)

    def _live(self) -> None:
        while not self._ended.wait(BEAT_S):
            # A store that fails for longer than LEASE_S costs the lease, which the next write finds out.
            with contextlib.suppress(OSError):
                self.beat()


def _lost(other: Owner | None) -> CheckpointLost:
    who = "another solve" if other is None else f"another solve ({other})"
    return CheckpointLost(f"{who} has taken over this checkpoint; this one stops, and what it saved is kept")


_POLL_S = 0.5


class Clock(Protocol):
    """As the module ``time``."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


def acquire(folder: Folder, clock: Clock, on_warning: Callable[[str], None]) -> Lease:
    """The lease, with its sign of life running. Raises CheckpointRefused if another driver works on the checkpoint."""
    owner = Owner.current()
    rivals = _Rivals(folder, clock, on_warning)
    names = rivals.outlast_all()
    claim = DriverFile(CLAIM, highest_epoch(names) + 1, uuid4().hex)
    lease = Lease(folder, claim._replace(kind=LEASE), owner)
    try:
        try:
            folder.put(claim.name, owner.encode(0), durable=False)
            rivals.withdraw_or_outlast(claim)
            lease.take()
        finally:
            folder.delete(claim.name)
        for name in [*(file.name for file in rivals.dead), *unfinished_before(folder.names(), lease.epoch)]:
            folder.delete(name)
    except BaseException:
        lease.release()
        raise
    return lease


@dataclass
class _Rivals:
    """Other drivers of the folder. dead: files of those that have ended without removing them."""

    _folder: Folder
    _clock: Clock
    _on_warning: Callable[[str], None]
    dead: set[DriverFile] = field(default_factory=set)

    def outlast_all(self) -> list[str]:
        """The names of all files once no other driver is left. Raises CheckpointRefused if one is alive."""
        while True:
            names = self._folder.names()
            rivals = self._living(names)
            if not rivals:
                return names
            self._outlast(rivals)

    def withdraw_or_outlast(self, claim: DriverFile) -> None:
        """Returns once no other driver is left. Raises CheckpointRefused if one goes first."""
        while True:
            rivals = [file for file in self._living(self._folder.names()) if file.driver != claim.driver]
            if not rivals:
                return
            first = next((file for file in rivals if file.kind == LEASE or file.outranks(claim)), None)
            if first is None:
                self._outlast(rivals)
            elif (content := self._folder.read(first.name)) is not None:  # else it is gone, or another file
                raise _in_use(Owner.decode(content))

    def _living(self, names: list[str]) -> list[DriverFile]:
        return [file for file in driver_files(names) if file not in self.dead]

    def _outlast(self, files: list[DriverFile]) -> None:
        """Waits until each file is gone or its driver is dead. Raises CheckpointRefused at a sign of life."""
        first_seen: dict[DriverFile, bytes] = {}
        for file in files:
            content = self._folder.read(file.name)
            if content is not None:
                first_seen[file] = content
        self._drop_ended(first_seen)
        if first_seen:
            who = Owner.decode(next(iter(first_seen.values())))
            self._on_warning(
                f"{who or 'another solve'} may still be working on this checkpoint; waiting up to {LEASE_S:.0f} s "
                "for a sign of life"
            )
        deadline = self._clock.monotonic() + LEASE_S
        while first_seen:
            if self._clock.monotonic() >= deadline:
                self.dead.update(first_seen)
                return
            self._clock.sleep(_POLL_S)
            for file, before in list(first_seen.items()):
                content = self._folder.read(file.name)
                if content is None:
                    del first_seen[file]
                elif content != before:
                    raise _in_use(Owner.decode(content))
            self._drop_ended(first_seen)

    def _drop_ended(self, seen: dict[DriverFile, bytes]) -> None:
        for file, content in list(seen.items()):
            owner = Owner.decode(content)
            if owner is not None and owner.is_gone():
                self.dead.add(file)
                del seen[file]


def _in_use(owner: Owner | None) -> CheckpointRefused:
    who = "another solve" if owner is None else f"another solve ({owner})"
    return CheckpointRefused(f"{who} works on this checkpoint; wait for it to end, or give another folder")
