"""Reading a dataset's folder: which parts are whole, and the rows of those."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from piper_ray.storage.folder import Folder, Vanished, open_folder
from piper_ray.sweep.columns import PARTITION, SCHEMA, completed
from piper_ray.sweep.parts import FoundManifest, Part, parts, read_manifest

CONTROL = "_sweep"
FOLDER = f"{PARTITION.name}="


@dataclass
class OfLabel:
    """Parts of one workload. whole: with their rows; what they replace is obsolete. damaged: not as it was written."""

    folder: Folder
    whole: dict[Part, pa.Table] = field(default_factory=dict)
    obsolete: list[Part] = field(default_factory=list)
    damaged: list[Part] = field(default_factory=list)

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
        """Without any manifest nobody knows which parts there were."""
        if self.found.manifest is None and not self.found.damaged and any(self.of_label.values()):
            return [f"{CONTROL}/parts.* is missing, the list of all parts"]
        return [f"{CONTROL}/{file.name} is damaged, a list of parts" for file in self.found.damaged]

    def damaged(self) -> Iterator[tuple[tuple[str, Part], str]]:
        """Each part that is not what was written: its label and itself, and what is wrong, in words."""
        rows = {} if self.found.manifest is None else self.found.manifest.rows
        for label, of_label in self.of_label.items():
            for part in of_label.damaged:
                yield (label, part), _told(label, part, "damaged", rows.get(label, {}).get(part))

    def missing(self) -> Iterator[tuple[tuple[str, Part], str]]:
        """Likewise each part that should be there."""
        if self.found.manifest is not None:
            present = {label: [*known.whole, *known.damaged] for label, known in self.of_label.items()}
            for label, part, rows in self.found.manifest.missing(present):
                yield (label, part), _told(label, part, "missing", rows)


def _told(label: str, part: Part, state: str, rows: int | None) -> str:
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
    """Of workloads, by label, in alphabetical order."""
    infos = filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True))
    labels = sorted(
        info.base_name.removeprefix(FOLDER)
        for info in infos
        if info.type == fs.FileType.Directory and info.base_name.startswith(FOLDER)
    )
    return {label: open_folder(f"{root}/{FOLDER}{label}", filesystem) for label in labels}


def _read_label(folder: Folder, label: str, columns: list[str] | None) -> OfLabel:
    known = OfLabel(folder)
    for part in sorted(parts(folder.names()), key=lambda part: (-part.span, part)):
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


def read_part(folder: Folder, label: str, part: Part, columns: list[str] | None) -> pa.Table | None:
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
