"""What a dataset is and which parts it has, so that a lost one is missed. A new file each time, in ``_sweep``.

A part is written before the manifest that lists it, and deleted after the first one that does not. So whatever ends a
driver, all parts that the newest manifest lists are there or within others; a part that is there and not listed, as the
driver was killed in between, is as good.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from piper_ray.engine.checkpoint.records import prune, read_newest, write
from piper_ray.storage.folder import Folder
from piper_ray.storage.names import PARTS, StateFile, state_files
from piper_ray.sweep.parts import Part, parts

FORMAT = 2
"""1: parts without checksums and no manifest but ``sweep.json``."""

BEFORE_MANIFESTS = "sweep.json"


@dataclass(frozen=True)
class Manifest:
    """made_by: the version of piper_ray. name: of the sweep. rows: of each part, by the workload's label."""

    made_by: str
    name: str
    rows: Mapping[str, Mapping[Part, int]]
    format: int = FORMAT

    def missing(self, present: Mapping[str, Iterable[Part]]) -> Iterator[tuple[str, Part, int]]:
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
        rows = {label: {part: listed[part.name] for part in parts(listed)} for label, listed in found["parts"].items()}
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
    """Durable when it returns. names: of all files there. The manifest before is kept; earlier ones and damaged go."""
    file = write(control, PARTS, epoch, sequence, manifest.encode())
    others = [other for other in state_files(names) if other.kind == PARTS]
    bad = set(damaged)
    prune(control, [*others, file], lambda other: other in bad)
