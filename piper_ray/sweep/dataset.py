"""A sweep's dataset on any storage: rows are added in small files, each written whole, and merged now and then.

    STORAGE/workload=bert32/part-000001-000012.E0001.CHECKSUM.parquet     rows of the files 1 to 12, which it replaces
    STORAGE/workload=bert32/part-000013-000013.E0001.CHECKSUM.parquet     rows of one write, by driver 1
    STORAGE/_sweep/parts.000001.000014.CHECKSUM.json                      which parts there are (``manifest``)
    STORAGE/_sweep/lease.*                                                the driver that writes (``checkpoint.claim``)
    STORAGE/_sweep/damaged.bert32.part-*                                  parts that were found damaged, kept aside

Readers pass over "_" names. A part that lies within the numbers of another is obsolete: its rows are in that one. So
merging writes first and deletes then, and a driver that is killed in between leaves nothing wrong behind. Only files of
these very names are ever deleted: whatever else lies in the folders is somebody else's.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import ArrowException, fs

from piper_ray.model import arguments
from piper_ray.model.errors import CheckpointLost, CheckpointRefused, DatasetDamaged, UsageError
from piper_ray.storage.folder import Folder, StateFile, Vanished, open_folder, reason, shown
from piper_ray.storage.lease import Lease, acquire
from piper_ray.sweep import parts
from piper_ray.sweep.columns import ORDER, PARTITION, SCHEMA, table_of
from piper_ray.version import __version__

_READINGS = 5
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

MERGE_AT = 64
"""Files of one write each, of one workload, that become one while the sweep goes on."""

FILE_ROWS = 50_000
"""The most rows of a merged file: a plan takes a few KB."""


def read_dataset(location: str | os.PathLike[str], columns: list[str] | None = None) -> pa.Table:
    """All rows, with the workload's label as the first column. Safe while a sweep goes on.

    columns: only these of ``columns.SCHEMA``, besides the label. Raises DatasetDamaged, which names them, if parts are
    damaged or missing; UsageError if there is no dataset, or one of another format, and for columns that it does not
    have.

    >>> import piper_ray
    >>> piper_ray.read_dataset("dataset", ["devices", "time_per_sample_s"]).to_pandas()  # doctest: +SKIP
    """
    table, damage = read_whole_parts(location, columns)
    if damage:
        raise DatasetDamaged(shown(os.fspath(location)), damage)
    return table


def read_whole_parts(location: str | os.PathLike[str], columns: list[str] | None = None) -> tuple[pa.Table, list[str]]:
    """The same, but for damage: the rows of all parts that are whole, and what is damaged or missing, in words."""
    text = arguments.location("location", location)
    columns = None if columns is None else _known_columns(columns)
    try:
        contents = _read_at_rest(*_resolve(text), text, columns)
    except (OSError, ArrowException) as error:
        raise UsageError(f"{shown(text)}: cannot be read: {_reason(error)}") from error
    tables = [_labelled("", parts.schema_of(columns).empty_table())]
    for label, of_label in contents.of_label.items():
        rows = pa.concat_tables([parts.schema_of(columns).empty_table(), *of_label.whole.values()])
        tables.append(_labelled(label, _distinct(rows)))
    return pa.concat_tables(tables), contents.damage


def _read_at_rest(filesystem: fs.FileSystem, root: str, location: str, columns: list[str] | None) -> parts.Contents:
    """Again if a sweep at work has merged files meanwhile."""
    for folder in (root, f"{root}/{parts.CONTROL}"):
        if filesystem.get_file_info(folder).type != fs.FileType.Directory:
            raise UsageError(f"{shown(location)}: there is no dataset of a sweep")
    for _ in range(_READINGS):
        contents = _read_once(filesystem, root, location, columns)
        if contents is not None:
            return contents
    raise FileNotFoundError("its files change too fast")


def _read_once(filesystem: fs.FileSystem, root: str, location: str, columns: list[str] | None) -> parts.Contents | None:
    try:
        _check_format(open_folder(f"{root}/{parts.CONTROL}", filesystem), location)
        contents = parts.read_contents(filesystem, root, columns)
    except Vanished:
        return None
    if contents.found.manifest is None and not contents.damage:
        raise UsageError(f"{shown(location)}: there is no dataset of a sweep")
    return contents


def _check_format(control: Folder, location: str) -> parts.Manifest | None:
    """The newest manifest, if one can be read. Raises UsageError if it is of another format."""
    manifest = parts.read_manifest(control).manifest
    if manifest is None and parts.BEFORE_MANIFESTS in control.names():
        raise UsageError(
            f"{shown(location)}: a dataset of format 1, whose files have no checksums, so it is not known whether "
            "they are as they were written. pyarrow.parquet.read_table reads it; for rows that are checked, run its "
            "sweep on another storage"
        )
    if manifest is not None and manifest.format != parts.FORMAT:
        raise UsageError(
            f"{shown(location)}: a dataset of format {manifest.format}; this piper_ray knows {parts.FORMAT}"
        )
    return manifest


@final
@dataclass(eq=False)
class Dataset:
    """A dataset that only this process writes. ``open`` makes one; ``close`` gives it up, as does ``with``.

    finished: input hashes of the points on record. _damaged: parts, since they were written, found in merging.
    """

    _location: str
    _filesystem: fs.FileSystem
    _root: str
    _control: Folder
    _lease: Lease
    _on_warning: Callable[[str], None]
    _name: str = ""
    _rows: defaultdict[str, dict[parts.DatasetPart, int]] = field(default_factory=lambda: defaultdict(dict))
    _damaged: defaultdict[str, set[parts.DatasetPart]] = field(default_factory=lambda: defaultdict(set))
    _damaged_manifests: list[StateFile] = field(default_factory=list)
    _sequence: int = 0
    _next: int = 1
    finished: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._folders = parts.folders(self._filesystem, self._root)

    @classmethod
    def open(
        cls, location: str | os.PathLike[str], name: str, *, resume: bool, on_warning: Callable[[str], None]
    ) -> Dataset:
        """The dataset at a folder's path or URI (file, s3, gs), begun if there is none.

        Parts that are damaged are told of and kept aside: their points count as not yet solved.

        Raises CheckpointRefused if another sweep writes it, if it holds points and ``resume`` is not given, if another
        version of piper_ray made it, and if the location cannot be read and written.
        """
        text = os.fspath(location)
        try:
            filesystem, root = _resolve(text)
            control = open_folder(f"{root}/{parts.CONTROL}", filesystem)
            lease = acquire(control, time, on_warning)
        except CheckpointRefused as refused:
            raise CheckpointRefused(
                f"the dataset at {shown(text)} is in use: {refused}".replace("this checkpoint", "it")
            ) from None
        except (OSError, ArrowException) as error:
            raise CheckpointRefused(f"the dataset at {shown(text)} cannot be used: {_reason(error)}") from error
        dataset = cls(text, filesystem, root, control, lease, on_warning)
        try:
            dataset._take_up(name, resume)
        except BaseException as error:
            lease.release()
            if isinstance(error, (OSError, ArrowException, Vanished)):
                raise CheckpointRefused(f"the dataset at {shown(text)} cannot be used: {_reason(error)}") from error
            raise
        return dataset

    def _take_up(self, name: str, resume: bool) -> None:
        listed = self._check_made_by_us()
        if not resume and (listed or any(parts.among(folder.names()) for folder in self._folders.values())):
            raise CheckpointRefused(
                f"the dataset at {shown(self._location)} holds finished points: add --resume to go on with it, or "
                "give another storage"
            )
        contents = parts.read_contents(self._filesystem, self._root, ["input_hash"])
        found = contents.found
        self._damaged_manifests = found.damaged
        self._name = name if found.manifest is None else found.manifest.name
        for label, of_label in contents.of_label.items():
            for part, rows in of_label.whole.items():
                self.finished.update(rows.column("input_hash").to_pylist())
                self._rows[label][part] = len(rows)
            known = [*of_label.whole, *of_label.obsolete, *of_label.damaged]
            self._next = max([self._next, *(part.last + 1 for part in known)])
        for text in contents.manifest_damage:
            self._on_warning(text)
        for (_, part), text in (*contents.damaged(), *contents.missing()):
            self._on_warning(f"{text}: what it held is solved again")
            self._next = max(self._next, part.last + 1)
        self._write_manifest()
        for label, of_label in contents.of_label.items():
            for part in of_label.damaged:
                self._keep_aside(label, part)
            for name in (
                *(part.name for part in of_label.obsolete),
                *parts.unfinished_before(of_label.folder.names(), self._lease.epoch),
            ):  # by a driver that was killed
                of_label.folder.delete(name)

    def _check_made_by_us(self) -> bool:
        """Whether the manifest lists any parts."""
        manifest = _check_format(self._control, self._location)
        if manifest is None:
            return False
        if manifest.made_by != __version__:
            raise CheckpointRefused(
                f"the dataset at {shown(self._location)} was made by piper_ray {manifest.made_by}, this is "
                f"{__version__}: give another storage"
            )
        return any(manifest.rows.values())

    def _keep_aside(self, label: str, part: parts.DatasetPart) -> None:
        """Moves a part out of the way of readers that check nothing, so that a person can look at it."""
        folder = self._folders[label]
        content = folder.read(part.name)
        if content is not None:
            self._control.put(f"damaged.{label}.{part.name}", content, durable=True)
            folder.delete(part.name)

    def add(self, rows: Iterable[dict[str, object]]) -> None:
        """Durable when it returns. Raises CheckpointLost if another sweep took over, CheckpointRefused if it fails."""
        by_label: defaultdict[str, list[dict[str, object]]] = defaultdict(list)
        for row in rows:
            by_label[str(row["workload"])].append(row)
        with self._storage("cannot be written: {}; what was written before is kept"):
            self._check_lease()
            for label, of_label in by_label.items():
                part = self._write(label, self._next, self._next, table_of(of_label))
                self._next += 1
                self._rows[label][part] = len(of_label)
            self._write_manifest()
            for of_label in by_label.values():
                self.finished.update(str(row["input_hash"]) for row in of_label)
            for label in by_label:
                if sum(part.first == part.last for part in self._rows[label]) >= MERGE_AT:
                    self._merge(label, lambda part: part.first == part.last)

    def compact(self) -> None:
        """One file for each workload, or several of up to ``FILE_ROWS`` rows, in the order of ``columns.ORDER``."""
        with self._storage("could not be compacted: {}; all points are in it"):
            self._check_lease()
            for label in self._folders:
                self._merge(label, lambda part: True)  # noqa: ARG005 - all of them
        if any(self._damaged.values()):
            damage = [f"{parts.FOLDER}{label}/{part.name}" for label, found in self._damaged.items() for part in found]
            raise DatasetDamaged(shown(self._location), [f"{name} was altered after it was written" for name in damage])

    @contextlib.contextmanager
    def _storage(self, otherwise: str) -> Iterator[None]:
        """What goes wrong with the storage, in words."""
        try:
            yield
        except (OSError, ArrowException, Vanished) as error:
            text = otherwise.format(_reason(error))
            raise CheckpointRefused(f"the dataset at {shown(self._location)} {text}") from error

    def _check_lease(self) -> None:
        try:
            self._lease.check(self._control.names())
        except CheckpointLost as lost:
            raise CheckpointLost(
                str(lost).replace("solve", "sweep").replace("this checkpoint", f"the dataset at {self._location}")
            ) from None

    def _write_manifest(self) -> None:
        self._sequence += 1
        manifest = parts.Manifest(__version__, self._name, self._rows)
        names = self._control.names()
        parts.write_manifest(self._control, names, manifest, self._lease.epoch, self._sequence, self._damaged_manifests)

    def _merge(self, label: str, may_join: Callable[[parts.DatasetPart], bool]) -> None:
        """Each run of neighbours that fits into a file becomes one: a file's numbers span no other's."""
        run: list[parts.DatasetPart] = []
        for part in sorted(self._rows[label]):
            fits = sum(self._rows[label][of_run] for of_run in [*run, part]) <= FILE_ROWS
            joins = may_join(part) and part not in self._damaged[label]
            if not (fits and joins):
                self._replace(label, run)
                run = []
            if joins:
                run.append(part)
        self._replace(label, run)

    def _replace(self, label: str, run: list[parts.DatasetPart]) -> None:
        """The parts of a run by one; none if one of them is damaged."""
        if len(run) < 2:
            return
        folder = self._folders[label]
        read = {part: parts.read_part(folder, label, part, None) for part in run}
        damaged = [part for part, rows in read.items() if rows is None]
        if damaged:
            self._damaged[label].update(damaged)
            return
        table = _distinct(pa.concat_tables([*read.values()]))
        merged = self._write(label, run[0].first, max(part.last for part in run), table)
        for part in run:
            del self._rows[label][part]
        self._rows[label][merged] = len(table)
        self._write_manifest()
        for part in run:
            if part != merged:
                with contextlib.suppress(OSError):  # obsolete by its name
                    folder.delete(part.name)

    def _write(self, label: str, first: int, last: int, table: pa.Table) -> parts.DatasetPart:
        if label not in self._folders:
            self._folders[label] = open_folder(f"{self._root}/{parts.FOLDER}{label}", self._filesystem)
        sink = io.BytesIO()
        pq.write_table(table.sort_by([(name, "ascending") for name in ORDER]), sink, compression="zstd")
        content = sink.getvalue()
        part = parts.DatasetPart.of(label, first, last, self._lease.epoch, content)
        self._folders[label].put(part.name, content, durable=True)
        return part

    def close(self) -> None:
        """Lets other sweeps open the dataset."""
        self._lease.release()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _resolve(location: str) -> tuple[fs.FileSystem, str]:
    """Raises OSError or ArrowException."""
    if not location.strip("/"):
        raise OSError("it names no folder")
    if not _URI.match(location):
        return fs.LocalFileSystem(), str(Path(location).absolute())
    filesystem, path = fs.FileSystem.from_uri(location)
    return filesystem, path.rstrip("/")


def _distinct(table: pa.Table) -> pa.Table:
    """A point counts once, also where a driver that was taken for dead had written it too."""
    if "input_hash" not in table.column_names:
        return table
    hashes = table.column("input_hash").to_pylist()
    first = {value: index for index, value in reversed(list(enumerate(hashes)))}
    return table if len(first) == len(hashes) else table.take(sorted(first.values()))


def _known_columns(columns: object) -> list[str]:
    names = list(columns) if isinstance(columns, Iterable) and not isinstance(columns, (str, bytes)) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise UsageError(f"columns must be a list of names, not {arguments.shown(columns)}")
    unknown = [name for name in names if name not in (PARTITION.name, *SCHEMA.names)]
    if unknown:
        known = ", ".join(SCHEMA.names)
        raise UsageError(f"columns: there is no {', '.join(map(repr, unknown))}; expected some of {known}")
    return [name for name in dict.fromkeys(names) if name != PARTITION.name]


def _labelled(label: str, table: pa.Table) -> pa.Table:
    return table.add_column(0, PARTITION, pa.array([label] * len(table), PARTITION.type))


def _reason(error: BaseException) -> str:
    return reason(error) if isinstance(error, OSError) else str(error).splitlines()[0]
