"""Names of a dataset's files of rows, and what they say of each other.

    part-000001-000012.E0003.CHECKSUM.parquet     rows of the writes 1 to 12, by driver 3

A part that lies within the numbers of another is obsolete: its rows are in that one. A name that differs from these in
any way is somebody else's. The checksum is over the numbers, the workload's label and the content, so that a part that
was altered, renamed, swapped with another or moved to another workload is known by its name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import NamedTuple

from piper_ray.storage.names import UNFINISHED

_PART = re.compile(r"part-([0-9]+)-([0-9]+)\.E([0-9]+)\.([0-9a-f]{32})\.parquet")


class Part(NamedTuple):
    """A file of a workload: the rows of writes ``first`` to ``last``, by the driver of an epoch.

    checksum: over content, numbers and workload.
    """

    first: int
    last: int
    epoch: int
    checksum: str

    @classmethod
    def of(cls, label: str, first: int, last: int, epoch: int, content: bytes) -> Part:
        """The part that holds ``content``: the Parquet file's bytes."""
        return cls(first, last, epoch, _checksum(label, first, last, epoch, content))

    @property
    def name(self) -> str:
        return f"part-{self.first:06}-{self.last:06}.E{self.epoch:04}.{self.checksum}.parquet"

    def holds(self, label: str, content: bytes) -> bool:
        """Whether this is what was written as this part of the workload."""
        return self.checksum == _checksum(label, self.first, self.last, self.epoch, content)

    def replaces(self, other: Part) -> bool:
        """What a later driver wrote is never within an earlier one's."""
        within = self.first <= other.first and other.last <= self.last
        return within and self.span > other.span and self.epoch >= other.epoch

    @property
    def span(self) -> int:
        return self.last - self.first


def parts(names: Iterable[str]) -> list[Part]:
    """Those among names of files."""
    matches = [match for name in names if (match := _PART.fullmatch(name))]
    return [part for m in matches if (part := Part(int(m[1]), int(m[2]), int(m[3]), m[4])).name == m[0]]


def unfinished_before(names: Iterable[str], epoch: int) -> list[str]:
    """Files that drivers of earlier epochs left half-written."""
    stems = [name.removesuffix(UNFINISHED) for name in names if name.endswith(UNFINISHED)]
    return [part.name + UNFINISHED for part in parts(stems) if part.epoch < epoch]


def _checksum(label: str, first: int, last: int, epoch: int, content: bytes) -> str:
    digest = hashlib.sha256(f"{label} {first} {last} {epoch}\n".encode())
    digest.update(content)
    return digest.hexdigest()[:32]
