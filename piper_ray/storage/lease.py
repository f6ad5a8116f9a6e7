"""The right to write a checkpoint. One driver holds it at a time; a driver that takes it over has a higher epoch.

How a driver gets it (``acquire``), on storage that can only list, read, replace and delete files:

A driver waits until every driver that it finds has ended. Then it claims the next epoch, in a file of its own, and
looks again:

- if there is a lease, or a claim that precedes its own, it withdraws;
- if there are claims that come after its own, it waits until each is withdrawn or has become a lease; in the
  latter case it withdraws.

Of two drivers, at least the one that claimed later sees the other, so they never both take the lease; and the one with
precedence withdraws only if the other has the lease. A driver that slept, was taken for dead, and wakes up to take the
lease comes after the present holder, and notices that before it writes (``Lease.check``).
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
    """A process. boot_id, pid_namespace, start_time: empty on systems that do not report them.

    start_time: in clock ticks since the machine booted; distinguishes processes that had the same pid.
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
        """The owner in a lease's content; None if it is missing or damaged, for example by a power cut."""
        try:
            document = json.loads(content or b"")
            return cls(**{name: document[name] for name in cls.__dataclass_fields__})
        except (ValueError, TypeError, KeyError):
            return None

    def encode(self, beat: int) -> bytes:
        """The content of a lease. beat: differs each time, to show that the owner is alive."""
        return json.dumps({**asdict(self), "beat": beat}).encode()

    def is_gone(self) -> bool:
        """Whether the process has certainly ended: it ran on this machine, in this pid namespace, and does not exist
        any more."""
        here = Owner.current()
        if not here.start_time or (self.boot_id, self.pid_namespace) != (here.boot_id, here.pid_namespace):
            return False
        return _start_time(self.pid) != self.start_time

    def __str__(self) -> str:
        return f"{self.host}, pid {self.pid}"


def _start_time(pid: int) -> str:
    """The start time of a process; empty if there is none, or only a zombie."""
    # The name, in parentheses, may contain anything. Fields after it: state (3rd in proc(5)), ..., start time (22nd).
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
"""The time between two rewrites of a lease."""

LEASE_S = 10.0
"""A driver that has not rewritten its lease for this long may be taken for dead."""


class Lease:
    """A file that names the writer, and a thread that rewrites it as a sign of life. ``acquire`` makes one."""

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
        """Makes this driver the owner for all other drivers."""
        self.beat()
        self._thread.start()

    def beat(self) -> None:
        """Rewrites the lease as a sign of life."""
        self._beats += 1
        self._folder.put(self._file.name, self._owner.encode(self._beats), durable=False)

    def check(self, names: Iterable[str]) -> None:
        """Raises CheckpointLost if the files of the folder show a driver with precedence over this one."""
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
        """Deletes the lease and ends its thread. A file that the storage cannot delete stays."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(LEASE_S)  # it may be waiting for a store that does not answer
        with contextlib.suppress(OSError):
            self._folder.delete(self._file.name)

    def _live(self) -> None:
        while not self._ended.wait(BEAT_S):
            # A store that fails for longer than LEASE_S costs the lease; the next write finds that out.
            with contextlib.suppress(OSError):
                self.beat()


def _lost(other: Owner | None) -> CheckpointLost:
    who = "another solve" if other is None else f"another solve ({other})"
    return CheckpointLost(f"{who} has taken over this checkpoint; this one stops, and what it saved is kept")


_POLL_S = 0.5


class Clock(Protocol):
    """The functions of module ``time`` that are used here."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


def acquire(folder: Folder, clock: Clock, on_warning: Callable[[str], None]) -> Lease:
    """Acquires the lease and starts its thread. Raises CheckpointRefused if another driver works on the checkpoint."""
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
    """Other drivers of the folder. dead: files of drivers that ended without removing them."""

    _folder: Folder
    _clock: Clock
    _on_warning: Callable[[str], None]
    dead: set[DriverFile] = field(default_factory=set)

    def outlast_all(self) -> list[str]:
        """Waits until no other driver is left, and returns the names of all files. Raises CheckpointRefused if one is
        alive."""
        while True:
            names = self._folder.names()
            rivals = self._living(names)
            if not rivals:
                return names
            self._outlast(rivals)

    def withdraw_or_outlast(self, claim: DriverFile) -> None:
        """Waits until no other driver is left. Raises CheckpointRefused if one has precedence."""
        while True:
            rivals = [file for file in self._living(self._folder.names()) if file.driver != claim.driver]
            if not rivals:
                return
            first = next((file for file in rivals if file.kind == LEASE or file.outranks(claim)), None)
            if first is None:
                self._outlast(rivals)
            elif (content := self._folder.read(first.name)) is not None:  # else it was deleted or replaced
                raise _in_use(Owner.decode(content))

    def _living(self, names: list[str]) -> list[DriverFile]:
        return [file for file in driver_files(names) if file not in self.dead]

    def _outlast(self, files: list[DriverFile]) -> None:
        """Waits until each file is gone or its driver is dead. Raises CheckpointRefused if a file changes."""
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
