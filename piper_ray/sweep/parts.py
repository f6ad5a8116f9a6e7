"""A dataset's files of rows, the list of all of them, and reading them: which are whole, and the rows of those.

    part-000001-000012.E0003.CHECKSUM.parquet     rows of the writes 1 to 12, by driver 3

A part that lies within the numbers of another is obsolete: its rows are in that one. A name that differs from these in
any way is somebody else's. The checksum is over the numbers, the workload's label and the content, so that a part that
was altered, renamed, swapped with another or moved to another workload is known by its name.

A manifest, a new file each time in ``_sweep``, lists all parts, so that a lost one is missed. A part is written before
the manifest that lists it, and deleted after the first one that does not. So whatever ends a driver, all parts that the
newest manifest lists are there or within others; a part that is there and not listed, as the driver was killed in
between, is as good.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from piper_ray.engine.checkpoint.checkpoint import prune, read_newest, write
from piper_ray.storage.folder import PARTS, UNFINISHED, Folder, StateFile, Vanished, open_folder, state_files
from piper_ray.sweep.columns import PARTITION, SCHEMA, completed

_PART = re.compile(r"part-([0-9]+)-([0-9]+)\.E([0-9]+)\.([0-9a-f]{32})\.parquet")


class DatasetPart(NamedTuple):
    """A file of a workload: the rows of writes ``first`` to ``last``, by the driver of an epoch.

    checksum: over content, numbers and workload.
    """

    first: int
    last: int
    epoch: int
    checksum: str

    @classmethod
    def of(cls, label: str, first: int, last: int, epoch: int, content: bytes) -> DatasetPart:
        """The part that holds ``content``: the Parquet file's bytes."""
        return cls(first, last, epoch, _checksum(label, first, last, epoch, content))

    @property
    def name(self) -> str:
        return f"part-{self.first:06}-{self.last:06}.E{self.epoch:04}.{self.checksum}.parquet"

    def holds(self, label: str, content: bytes) -> bool:
        """Whether this is what was written as this part of the workload."""
        return self.checksum == _checksum(label, self.first, self.last, self.epoch, content)

    def replaces(self, other: DatasetPart) -> bool:
        """What a later driver wrote is never within an earlier one's."""
        within = self.first <= other.first and other.last <= self.last
        return within and self.span > other.span and self.epoch >= other.epoch

    @property
    def span(self) -> int:
        return self.last - self.first


def among(names: Iterable[str]) -> list[DatasetPart]:
    """The parts among names of files."""
    matches = [match for name in names if (match := _PART.fullmatch(name))]
    return [part for m in matches if (part := DatasetPart(int(m[1]), int(m[2]), int(m[3]), m[4])).name == m[0]]


def unfinished_before(names: Iterable[str], epoch: int) -> list[str]:
    """Files that drivers of earlier epochs left half-written."""
    stems = [name.removesuffix(UNFINISHED) for name in names if name.endswith(UNFINISHED)]
    return [part.name + UNFINISHED for part in among(stems) if part.epoch < epoch]


def _checksum(label: str, first: int, last: int, epoch: int, content: bytes) -> str:
    digest = hashlib.sha256(f"{label} {first} {last} {epoch}\n".encode())
    digest.update(content)
    return digest.hexdigest()[:32]


FORMAT = 2
"""1: parts without checksums and no manifest but ``sweep.json``."""

BEFORE_MANIFESTS = "sweep.json"


@dataclass(frozen=True)
class Manifest:
    """made_by: the version of piper_ray. name: the name of the sweep. rows: the rows of each part, by the workload's
    label."""

    made_by: str
    name: str
    rows: Mapping[str, Mapping[DatasetPart, int]]
    format: int = FORMAT

    def missing(self, present: Mapping[str, Iterable[DatasetPart]]) -> Iterator[tuple[str, DatasetPart, int]]:
        """Parts listed that are neither present nor within one that is: label, part, rows."""
        for label, listed in self.rows.items():
            there = set(present.get(label, ()))
            for part, rows in listed.items():
                if part not in there and not any(other.replaces(part) for other in there):
                    yield label, part, rows

    def encode(self) -> bytes:
        rows = {label: {part.name: rows for part, rows in listed.items()} for label, listed in self.rows.items()}
        return json.dumps(
            {"format": self.format, "piper_ray": self.made_by, "name": self.name, "parts": rows}, indent=1
        ).encode()

    @classmethod
    def decode(cls, content: bytes) -> Manifest:
        """content: what a driver wrote; of a later format no more than that is known."""
        found = json.loads(content)
        if found["format"] != FORMAT:
            return cls(found.get("piper_ray", "unknown"), "", {}, found["format"])
        rows = {label: {part: listed[part.name] for part in among(listed)} for label, listed in found["parts"].items()}
        return cls(found["piper_ray"], found["name"], rows)


@dataclass(frozen=True)
class FoundManifest:
    """The newest whole manifest, its file, and the newer ones that are damaged."""

    manifest: Manifest | None
    file: StateFile | None
    damaged: list[StateFile] = field(default_factory=list)


def read_manifest(control: Folder) -> FoundManifest:
    """Raises Vanished if a driver at work wrote another one meanwhile."""
    files = [file for file in state_files(control.names()) if file.kind == PARTS]
    damaged: list[StateFile] = []
    content = read_newest(control, files, PARTS, damaged.append)
    if content is None:
        return FoundManifest(None, None, damaged)
    return FoundManifest(Manifest.decode(content), files[len(damaged)], damaged)


def write_manifest(
    control: Folder, names: Iterable[str], manifest: Manifest, epoch: int, sequence: int, damaged: Iterable[StateFile]
) -> None:
    """Durable when it returns. names: the names of all files there. The manifest before is kept; earlier ones and
    damaged go."""
    file = write(control, PARTS, epoch, sequence, manifest.encode())
    others = [other for other in state_files(names) if other.kind == PARTS]
    bad = set(damaged)
    prune(control, [*others, file], lambda other: other in bad)


CONTROL = "_sweep"
FOLDER = f"{PARTITION.name}="


@dataclass
class OfLabel:
    """Parts of one workload. whole: parts with their rows; what they replace is obsolete. damaged: parts that are not
    as they were written."""

    folder: Folder
    whole: dict[DatasetPart, pa.Table] = field(default_factory=dict)
    obsolete: list[DatasetPart] = field(default_factory=list)
    damaged: list[DatasetPart] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.whole or self.damaged)


@dataclass(frozen=True)
class Contents:
    """All of a dataset, by label."""

    found: FoundManifest
    of_label: dict[str, OfLabel]

    @property
    def damage(self) -> list[str]:
        """What is damaged or missing, each in words."""
        return [*self.manifest_damage, *(text for _, text in (*self.damaged(), *self.missing()))]

    @property
    def manifest_damage(self) -> list[str]:
        """Damage of the manifests. Without any manifest it is unknown which parts there were."""
        if self.found.manifest is None and not self.found.damaged and any(self.of_label.values()):
            return [f"{CONTROL}/parts.* is missing, the list of all parts"]
        return [f"{CONTROL}/{file.name} is damaged, a list of parts" for file in self.found.damaged]

    def damaged(self) -> Iterator[tuple[tuple[str, DatasetPart], str]]:
        """Each part that is not what was written: its label and itself, and what is wrong, in words."""
        rows = {} if self.found.manifest is None else self.found.manifest.rows
        for label, of_label in self.of_label.items():
            for part in of_label.damaged:
                yield (label, part), _told(label, part, "damaged", rows.get(label, {}).get(part))

    def missing(self) -> Iterator[tuple[tuple[str, DatasetPart], str]]:
        """Likewise each part that should be there."""
        if self.found.manifest is not None:
            present = {label: [*known.whole, *known.damaged] for label, known in self.of_label.items()}
            for label, part, rows in self.found.manifest.missing(present):
                yield (label, part), _told(label, part, "missing", rows)


def _told(label: str, part: DatasetPart, state: str, rows: int | None) -> str:
    count = "" if rows is None else f" ({rows:,} point{'s' if rows > 1 else ''})"
    return f"{FOLDER}{label}/{part.name} is {state}{count}"


def read_contents(filesystem: fs.FileSystem, root: str, columns: list[str] | None) -> Contents:
    """Every part, checked.

    Raises Vanished if a driver at work merged parts meanwhile, OSError and ArrowException if the storage fails.
    """
    control = open_folder(f"{root}/{CONTROL}", filesystem)
    found = read_manifest(control)
    contents = Contents(
        found, {label: _read_label(folder, label, columns) for label, folder in folders(filesystem, root).items()}
    )
    lost = {part for part, _ in contents.missing()}
    if lost:  # unless a driver at work merged them, which it says before it deletes them
        newest = read_manifest(control).manifest
        if newest is not None and not lost <= {(label, part) for label, rows in newest.rows.items() for part in rows}:
            raise Vanished
    return contents


def folders(filesystem: fs.FileSystem, root: str) -> dict[str, Folder]:
    """The folders of workloads, by label, in alphabetical order."""
    infos = filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True))
    labels = sorted(
        info.base_name.removeprefix(FOLDER)
        for info in infos
        if info.type == fs.FileType.Directory and info.base_name.startswith(FOLDER)
    )
    return {label: open_folder(f"{root}/{FOLDER}{label}", filesystem) for label in labels}


def _read_label(folder: Folder, label: str, columns: list[str] | None) -> OfLabel:
    known = OfLabel(folder)
    for part in sorted(among(folder.names()), key=lambda part: (-part.span, part)):
        if any(whole.replaces(part) for whole in known.whole):
            known.obsolete.append(part)
            continue
        rows = read_part(folder, label, part, columns)
        if rows is None:
            known.damaged.append(part)
        else:
            known.whole[part] = rows
    known.whole = dict(sorted(known.whole.items()))
    return known


def read_part(folder: Folder, label: str, part: DatasetPart, columns: list[str] | None) -> pa.Table | None:
    """The part's rows; None if it is not what was written. Raises Vanished if it has gone."""
    content = folder.read(part.name)
    if content is None:
        raise Vanished
    if not part.holds(label, content):
        return None
    # In this thread alone: one of Arrow's that still held ``content`` would take the interpreter down at its exit.
    table = completed(pq.ParquetFile(pa.BufferReader(content)).read(columns=columns, use_threads=False))
    return table.select(schema_of(columns).names).cast(schema_of(columns))


def schema_of(columns: list[str] | None) -> pa.Schema:
    """columns: None for all."""
    return SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns], SCHEMA.metadata)
