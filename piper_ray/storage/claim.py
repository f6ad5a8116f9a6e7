"""How a driver gets the lease, on storage that can do no more than list, read, replace and delete files.

A driver waits until every driver it finds has ended. Then it claims the next epoch, in a file of its own, and looks
again:

- beside a lease, or a claim that goes before its own, it withdraws;
- beside claims that go after its own it waits until each is withdrawn, or has become a lease, and then withdraws.

Of two drivers at least the one that claimed later sees the other, so never do both take the lease; and the one that
goes first withdraws only if the other has the lease. A driver that slept, was taken for dead, and wakes up to take the
lease goes after the one that has it by then, and finds that out before it writes (``Lease.check``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from uuid import uuid4

from piper_ray.model.errors import CheckpointRefused
from piper_ray.storage.folder import Folder
from piper_ray.storage.lease import LEASE_S, Lease
from piper_ray.storage.names import CLAIM, LEASE, DriverFile, driver_files, highest_epoch, unfinished_before
from piper_ray.storage.owner import Owner

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


class _Rivals:
    """Other drivers of the folder. dead: files of those that have ended without removing them."""

    def __init__(self, folder: Folder, clock: Clock, on_warning: Callable[[str], None]) -> None:
        self.dead: set[DriverFile] = set()
        self._folder = folder
        self._clock = clock
        self._on_warning = on_warning

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
