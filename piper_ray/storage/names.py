"""Names of a checkpoint's files. A name is written by one driver only, and all but a lease's just once.

    outcomes.000003.000017.CHECKSUM.json    every finished evaluation
    levels.000003.000018.CHECKSUM.arrow     finished levels of the evaluation under way
    parts.000003.000019.CHECKSUM.json       of a sweep's dataset: its parts (``sweep.parts``)
    lease.000003.DRIVER.json                the driver that writes, rewritten every few seconds
    claim.000003.DRIVER.json                a driver that is about to

The first number is the epoch, one higher with each driver; the second counts a driver's writes. A name that differs
from these in any way, as by one zero less, is somebody else's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import NamedTuple

OUTCOMES, LEVELS, PARTS = "outcomes", "levels", "parts"
LEASE, CLAIM = "lease", "claim"
UNFINISHED = ".tmp"
"""What a file's name ends with until it is whole."""

_SUFFIX = {OUTCOMES: "json", LEVELS: "arrow", PARTS: "json"}
_STATE = re.compile(r"(outcomes|levels|parts)\.([0-9]+)\.([0-9]+)\.([0-9a-f]{32})\.(?:json|arrow)")
_DRIVER = re.compile(r"(lease|claim)\.([0-9]+)\.([0-9a-f]{32})\.json")


class StateFile(NamedTuple):
    """checksum: of the content, so that a torn or altered file is known by its name."""

    kind: str
    epoch: int
    sequence: int
    checksum: str

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.epoch:06}.{self.sequence:06}.{self.checksum}.{_SUFFIX[self.kind]}"

    @property
    def age(self) -> tuple[int, int]:
        """Larger is newer."""
        return self.epoch, self.sequence


class DriverFile(NamedTuple):
    """driver: a random number in hexadecimal."""

    kind: str
    epoch: int
    driver: str

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.epoch:06}.{self.driver}.json"

    def outranks(self, other: DriverFile) -> bool:
        """The later epoch goes first; of one epoch the smaller driver."""
        return (-self.epoch, self.driver) < (-other.epoch, other.driver)


def checksum(content: bytes) -> str:
    """Half a SHA-256, as the names of files have it."""
    return hashlib.sha256(content).hexdigest()[:32]


def state_files(names: Iterable[str]) -> list[StateFile]:
    """Newest first."""
    matches = [match for name in names if (match := _STATE.fullmatch(name))]
    files = [file for m in matches if (file := StateFile(m[1], int(m[2]), int(m[3]), m[4])).name == m[0]]
    return sorted(files, key=lambda file: file.age, reverse=True)


def driver_files(names: Iterable[str]) -> list[DriverFile]:
    """Leases and claims among the names; what only looks like one is left out."""
    matches = [match for name in names if (match := _DRIVER.fullmatch(name))]
    return [file for m in matches if (file := DriverFile(m[1], int(m[2]), m[3])).name == m[0]]


def highest_epoch(names: Iterable[str]) -> int:
    """0 if there is none."""
    names = list(names)
    epochs = [file.epoch for file in state_files(names)] + [file.epoch for file in driver_files(names)]
    return max(epochs, default=0)


def unfinished_before(names: Iterable[str], epoch: int) -> list[str]:
    """Files that drivers of earlier epochs left half-written."""
    return [
        name for name in names if name.endswith(UNFINISHED) and 0 < highest_epoch([name[: -len(UNFINISHED)]]) < epoch
    ]
