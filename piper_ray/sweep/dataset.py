"""A sweep's dataset on any storage: rows are added in small files, each written whole, and merged now and then.

    STORAGE/workload=bert32/part-000001-000012.E0001.parquet     rows of the files 1 to 12, which it replaces
    STORAGE/workload=bert32/part-000013-000013.E0001.parquet     rows of one write, by driver 1
    STORAGE/_sweep/sweep.json                                    what the dataset is; readers pass over "_" names
    STORAGE/_sweep/lease.*                                       the driver that writes (``checkpoint.claim``)

A file that lies within the numbers of another is obsolete: its rows are in that one. So merging writes first and
deletes then, and a driver that is killed in between leaves nothing wrong behind.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, final

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import ArrowException, fs

import piper_ray
from piper_ray import arguments
from piper_ray.checkpoint.claim import acquire
from piper_ray.checkpoint.lease import Lease
from piper_ray.checkpoint.storage import Folder, open_folder, reason, shown
from piper_ray.errors import CheckpointRefused, UsageError
from piper_ray.sweep.columns import ORDER, PARTITION, SCHEMA, SCHEMA_VERSION, table_of

_CONTROL = "_sweep"
_ABOUT = "sweep.json"
_PARTITION = "workload="
_PART = re.compile(r"part-(\d+)-(\d+)\.E(\d+)\.parquet")
_READINGS = 5
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

MERGE_AT = 64
"""Files of one write each, of one workload, that become one while the sweep goes on."""

FILE_ROWS = 50_000
"""At most of a merged file: a plan takes a few KB."""


class _Part(NamedTuple):
    first: int
    last: int
    epoch: int

    @property
    def name(self) -> str:
        return f"part-{self.first:06}-{self.last:06}.E{self.epoch:04}.parquet"

    def replaces(self, other: _Part) -> bool:
        return self != other and self.first <= other.first and other.last <= self.last and self.span > other.span

    @property
    def span(self) -> int:
        return self.last - self.first


def read_dataset(location: str | os.PathLike[str], columns: list[str] | None = None) -> pa.Table:
    """All rows, with the workload's label as the first column. Safe while a sweep goes on.

    columns: only these of ``columns.SCHEMA``, beside the label. Raises UsageError if there is no dataset, or one of a
    later version, and for columns that it does not have.
    """
    text = arguments.location("location", location)
    columns = None if columns is None else _known_columns(columns)
    try:
        filesystem, root = _resolve(text)
        if filesystem.get_file_info(root).type != fs.FileType.Directory:
            raise UsageError(f"{shown(text)}: there is no dataset of a sweep")
        about = open_folder(f"{root}/{_CONTROL}", filesystem).read(_ABOUT)
        if about is None:
            raise UsageError(f"{shown(text)}: there is no dataset of a sweep")
        _check_version(_decoded(about), text)
        tables = [_labelled(label, _read_all(folder, columns)) for label, folder in _folders(filesystem, root).items()]
    except (OSError, ArrowException) as error:
        raise UsageError(f"{shown(text)}: cannot be read: {_reason(error)}") from error
    return pa.concat_tables([_labelled("", _schema(columns).empty_table()), *tables])


@final
class Dataset:
    """A dataset that only this process writes. ``open`` makes one; ``close`` gives it up, as does ``with``."""

    def __init__(self, location: str, filesystem: fs.FileSystem, root: str, control: Folder, lease: Lease) -> None:
        self._location = location
        self._filesystem = filesystem
        self._root = root
        self._control = control
        self._lease = lease
        self._folders = _folders(filesystem, root)
        self._rows: defaultdict[str, dict[_Part, int]] = defaultdict(dict)
        self._next = 1
        self.finished: set[str] = set()
        """Input hashes of the points on record."""

    @classmethod
    def open(
        cls, location: str | os.PathLike[str], name: str, *, resume: bool, on_warning: Callable[[str], None]
    ) -> Dataset:
        """The dataset at a folder's path or URI (file, s3, gs), begun if there is none.

        Raises CheckpointRefused if another sweep writes it, if it holds points and ``resume`` is not given, if another
        version of piper_ray made it, and if the location cannot be read and written.
        """
        text = os.fspath(location)
        try:
            filesystem, root = _resolve(text)
            control = open_folder(f"{root}/{_CONTROL}", filesystem)
            lease = acquire(control, time, on_warning)
        except CheckpointRefused as refused:
            raise CheckpointRefused(
                f"the dataset at {shown(text)} is in use: {refused}".replace("this checkpoint", "it")
            ) from None
        except (OSError, ArrowException) as error:
            raise CheckpointRefused(f"the dataset at {shown(text)} cannot be used: {_reason(error)}") from error
        dataset = cls(text, filesystem, root, control, lease)
        try:
            dataset._take_up(name, resume)
        except BaseException as error:
            lease.release()
            if isinstance(error, (OSError, ArrowException)):
                raise CheckpointRefused(f"the dataset at {shown(text)} cannot be used: {_reason(error)}") from error
            raise
        return dataset

    def _take_up(self, name: str, resume: bool) -> None:
        about = self._control.read(_ABOUT)
        if about is None:
            made = {"format": SCHEMA_VERSION, "piper_ray": piper_ray.__version__, "name": name}
            self._control.put(_ABOUT, json.dumps(made).encode(), durable=True)
        else:
            found = _decoded(about)
            _check_version(found, self._location)
            if found.get("piper_ray") != piper_ray.__version__:
                raise CheckpointRefused(
                    f"the dataset at {shown(self._location)} was made by piper_ray {found.get('piper_ray')}, this is "
                    f"{piper_ray.__version__}: give another storage"
                )
        for label, folder in self._folders.items():
            names = folder.names()
            current = _current(names)
            for part in current:
                hashes = _read(folder, part, ["input_hash"]).column("input_hash").to_pylist()
                self.finished.update(hashes)
                self._rows[label][part] = len(hashes)
            if self.finished and not resume:
                raise CheckpointRefused(
                    f"the dataset at {shown(self._location)} holds finished points: add --resume to go on with it, or "
                    "give another storage"
                )
            parts = _parts(names)
            self._next = max([self._next, *(part.last + 1 for part in parts)])
            for left in set(names) - {part.name for part in current}:  # by a driver that was killed
                folder.delete(left)

    def add(self, rows: Iterable[dict[str, object]]) -> None:
        """Durable when it returns. Raises CheckpointLost if another sweep took over, CheckpointRefused if it fails."""
        by_label: defaultdict[str, list[dict[str, object]]] = defaultdict(list)
        for row in rows:
            by_label[str(row["workload"])].append(row)
        try:
            self._lease.check(self._control.names())
            for label, of_label in by_label.items():
                part = _Part(self._next, self._next, self._lease.epoch)
                self._next += 1
                self._write(label, part, table_of(of_label))
                self._rows[label][part] = len(of_label)
                self.finished.update(str(row["input_hash"]) for row in of_label)
                if sum(part.first == part.last for part in self._rows[label]) >= MERGE_AT:
                    self._merge(label, lambda part: part.first == part.last)
        except (OSError, ArrowException) as error:
            raise CheckpointRefused(
                f"the dataset at {shown(self._location)} cannot be written: {_reason(error)}; what was written before "
                "is kept"
            ) from error

    def compact(self) -> None:
        """One file for each workload, or several of up to ``FILE_ROWS`` rows, in the order of ``columns.ORDER``."""
        try:
            self._lease.check(self._control.names())
            for label in self._folders:
                self._merge(label, lambda part: True)  # noqa: ARG005 - all of them
        except (OSError, ArrowException) as error:
            raise CheckpointRefused(
                f"the dataset at {shown(self._location)} could not be compacted: {_reason(error)}; all points are in it"
            ) from error

    def _merge(self, label: str, may_join: Callable[[_Part], bool]) -> None:
        """Each run of neighbours that fits into a file becomes one: a file's numbers span no other's."""
        run: list[_Part] = []
        for part in sorted(self._rows[label]):
            fits = sum(self._rows[label][of_run] for of_run in [*run, part]) <= FILE_ROWS
            if not (fits and may_join(part)):
                self._replace(label, run)
                run = []
            if may_join(part):
                run.append(part)
        self._replace(label, run)

    def _replace(self, label: str, run: list[_Part]) -> None:
        """The files of a run by one."""
        if len(run) < 2:
            return
        folder = self._folders[label]
        merged = _Part(run[0].first, max(part.last for part in run), self._lease.epoch)
        table = _distinct(pa.concat_tables([_read(folder, part, None) for part in run]))
        self._write(label, merged, table)
        for part in run:
            del self._rows[label][part]
            if part != merged:
                with contextlib.suppress(OSError):  # obsolete by its name
                    folder.delete(part.name)
        self._rows[label][merged] = len(table)

    def _write(self, label: str, part: _Part, table: pa.Table) -> None:
        if label not in self._folders:
            self._folders[label] = open_folder(f"{self._root}/{_PARTITION}{label}", self._filesystem)
        sink = io.BytesIO()
        pq.write_table(table.sort_by([(name, "ascending") for name in ORDER]), sink, compression="zstd")
        self._folders[label].put(part.name, sink.getvalue(), durable=True)

    def close(self) -> None:
        """Lets other sweeps open the dataset."""
        self._lease.release()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _resolve(location: str) -> tuple[fs.FileSystem, str]:
    """Raises OSError or ArrowException."""
    if not location.strip("/"):
        raise OSError("it names no folder")
    if not _URI.match(location):
        return fs.LocalFileSystem(), str(Path(location).absolute())
    filesystem, path = fs.FileSystem.from_uri(location)
    return filesystem, path.rstrip("/")


def _folders(filesystem: fs.FileSystem, root: str) -> dict[str, Folder]:
    """By label, in alphabetical order."""
    infos = filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True))
    labels = sorted(
        info.base_name.removeprefix(_PARTITION)
        for info in infos
        if info.type == fs.FileType.Directory and info.base_name.startswith(_PARTITION)
    )
    return {label: open_folder(f"{root}/{_PARTITION}{label}", filesystem) for label in labels}


def _parts(names: Iterable[str]) -> list[_Part]:
    matches = [match for name in names if (match := _PART.fullmatch(name))]
    return [_Part(int(m[1]), int(m[2]), int(m[3])) for m in matches]


def _current(names: Iterable[str]) -> list[_Part]:
    parts = sorted(_parts(names))
    return [part for part in parts if not any(other.replaces(part) for other in parts)]


def _read_all(folder: Folder, columns: list[str] | None) -> pa.Table:
    """A file that a sweep at work has merged meanwhile is looked for again."""
    for attempt in range(_READINGS):
        parts = _current(folder.names())
        try:
            tables = [_read(folder, part, columns) for part in parts]
        except FileNotFoundError:
            if attempt == _READINGS - 1:
                raise
        else:
            return _distinct(pa.concat_tables([_schema(columns).empty_table(), *tables]))
    raise AssertionError("unreachable")


def _read(folder: Folder, part: _Part, columns: list[str] | None) -> pa.Table:
    content = folder.read(part.name)
    if content is None:
        raise FileNotFoundError(f"{part.name} has gone")
    return pq.read_table(pa.BufferReader(content), columns=columns).cast(_schema(columns))


def _schema(columns: list[str] | None) -> pa.Schema:
    return SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns], SCHEMA.metadata)


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


def _decoded(about: bytes) -> dict[str, object]:
    try:
        found = json.loads(about)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _check_version(about: dict[str, object], location: str) -> None:
    if about.get("format") != SCHEMA_VERSION:
        raise UsageError(
            f"{shown(location)}: a dataset of format {about.get('format', 'unknown')}; this piper_ray knows "
            f"{SCHEMA_VERSION}"
        )


def _reason(error: BaseException) -> str:
    return reason(error) if isinstance(error, OSError) else str(error).splitlines()[0]
