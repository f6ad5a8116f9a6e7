"""The right to write a checkpoint. One driver has it at a time; whoever takes it over has a higher epoch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable

from piper_ray.model.errors import CheckpointLost
from piper_ray.storage.folder import Folder
from piper_ray.storage.names import LEASE, DriverFile, driver_files, state_files
from piper_ray.storage.owner import Owner

BEAT_S = 2.0
"""Between two signs of life."""

LEASE_S = 10.0
"""A driver that gives no sign of life for so long may be taken for dead."""


class Lease:
    """A file that says who writes, with a thread that rewrites it as a sign of life. ``claim.acquire`` makes one."""

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
