"""The folder of a checkpoint's files, on this machine or on any filesystem that pyarrow.fs can reach; and the names of
its files. Each name is written by only one driver, and all but a lease's only once.

    outcomes.000003.000017.CHECKSUM.json    every finished evaluation
    levels.000003.000018.CHECKSUM.zst       finished levels of the evaluation under way
    parts.000003.000019.CHECKSUM.json       of a sweep's dataset: its parts (``sweep.parts``)
    lease.000003.DRIVER.json                the driver that writes, rewritten every few seconds
    claim.000003.DRIVER.json                a driver that is about to write

The first number is the epoch, which each driver increases by one; the second counts a driver's writes. A name that
differs from these in any way, such as by a missing zero, is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from piper_ray.storage.files import kind_unless_file, replacing

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem


OUTCOMES, LEVELS, PARTS = "outcomes", "levels", "parts"
LEASE, CLAIM = "lease", "claim"
UNFINISHED = ".tmp"
"""The end of a file's name while the file is incomplete."""

_SUFFIX = {OUTCOMES: "json", LEVELS: "zst", PARTS: "json"}
_STATE = re.compile(r"(outcomes|levels|parts)\.([0-9]+)\.([0-9]+)\.([0-9a-f]{32})\.(?:json|zst)")
_DRIVER = re.compile(r"(lease|claim)\.([0-9]+)\.([0-9a-f]{32})\.json")


class StateFile(NamedTuple):
    """checksum: of the content, so that its name reveals a torn or altered file."""

    kind: str
    epoch: int
    sequence: int
    checksum: str

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.epoch:06}.{self.sequence:06}.{self.checksum}.{_SUFFIX[self.kind]}"

    @property
    def age(self) -> tuple[int, int]:
        """Sorts files by age; a larger value is newer."""
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
        """Whether this driver has precedence: a later epoch, or the smaller driver number in the same epoch."""
        return (-self.epoch, self.driver) < (-other.epoch, other.driver)


def checksum(content: bytes) -> str:
    """The first half of a SHA-256, as it appears in names of files."""
    return hashlib.sha256(content).hexdigest()[:32]


def state_files(names: Iterable[str]) -> list[StateFile]:
    """The state files among the names, the newest first."""
    matches = [match for name in names if (match := _STATE.fullmatch(name))]
    files = [file for m in matches if (file := StateFile(m[1], int(m[2]), int(m[3]), m[4])).name == m[0]]
    return sorted(files, key=lambda file: file.age, reverse=True)


def driver_files(names: Iterable[str]) -> list[DriverFile]:
    """The leases and claims among the names; similar names are left out."""
    matches = [match for name in names if (match := _DRIVER.fullmatch(name))]
    return [file for m in matches if (file := DriverFile(m[1], int(m[2]), m[3])).name == m[0]]


def highest_epoch(names: Iterable[str]) -> int:
    """The highest epoch in the names; 0 if there is none."""
    names = list(names)
    epochs = [file.epoch for file in state_files(names)] + [file.epoch for file in driver_files(names)]
    return max(epochs, default=0)


def unfinished_before(names: Iterable[str], epoch: int) -> list[str]:
    """Incomplete files of drivers of earlier epochs."""
    return [
        name for name in names if name.endswith(UNFINISHED) and 0 < highest_epoch([name[: -len(UNFINISHED)]]) < epoch
    ]


_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_CREDENTIALS = re.compile(r"//[^/]*@")


class Vanished(Exception):
    """Another driver deleted a file after it was listed and before it was read."""


class Folder(Protocol):
    """Files by name. Each method raises OSError if the storage fails."""

    def names(self) -> list[str]:
        """The names of files only; folders inside are ignored."""
        ...

    def read(self, name: str) -> bytes | None:
        """The content; None if there is no such file."""
        ...

    def put(self, name: str, content: bytes, *, durable: bool) -> None:
        """Atomic: readers find the complete new file or the old one. durable: the file survives a power cut from now
        on."""
        ...

    def delete(self, name: str) -> None:
        """Deletes a file; a missing file is not an error."""
        ...


def shown(location: str) -> str:
    """The location for messages, without the credentials of a URI."""
    return _CREDENTIALS.sub("//", location, count=1)


def open_folder(location: str, filesystem: FileSystem | None = None) -> Folder:
    """The folder at a path or URI, created if it does not exist. filesystem: ``location`` is a path in it.

    Raises OSError, whatever the cause, if the folder cannot be opened.
    """
    if filesystem is None and not _URI.match(location):
        return LocalFolder(_required(location))

    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem, LocalFileSystem

    path = location
    if filesystem is None:
        try:
            filesystem, path = FileSystem.from_uri(location)
        except ArrowException as error:
            raise OSError(str(error)) from error
    # Only object stores replace a file atomically by themselves.
    return LocalFolder(_required(path)) if isinstance(filesystem, LocalFileSystem) else RemoteFolder(filesystem, path)


def _required(path: str) -> str:
    if not path.strip("/") and path != "/":
        raise OSError("it names no folder")
    return path


class LocalFolder:
    """A folder of a POSIX filesystem. A file is written under another name, flushed to disk, and renamed."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        if self._path.exists() and not self._path.is_dir():
            raise NotADirectoryError("it is no folder")
        made = [folder for folder in (self._path, *self._path.parents) if not folder.exists()]
        self._path.mkdir(parents=True, exist_ok=True)
        for folder in made:
            _sync_folder(folder.parent)

    def names(self) -> list[str]:
        with os.scandir(self._path) as entries:
            return [entry.name for entry in entries if entry.is_file()]

    def read(self, name: str) -> bytes | None:
        path = self._path / name
        try:
            kind = kind_unless_file(path)
            if kind is not None:
                raise OSError(f"{path} is {kind}; expected a file")
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def put(self, name: str, content: bytes, *, durable: bool) -> None:
        with (
            replacing(self._path / name, self._path / (name + UNFINISHED)) as unfinished,
            unfinished.open("wb") as file,
        ):
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if durable:
            _sync_folder(self._path)

    def delete(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)


def _sync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RemoteFolder:
    """A folder of an object store, where a PUT is atomic and durable. It needs neither rename nor exclusive
    creation."""

    def __init__(self, filesystem: FileSystem, path: str) -> None:
        from pyarrow import fs

        self._fs = fs
        self._filesystem = filesystem
        self._path = _required(path).rstrip("/")
        with _as_os_error():
            kind = filesystem.get_file_info(self._path).type
            if kind == fs.FileType.File:
                raise NotADirectoryError("it is no folder")
            if kind == fs.FileType.NotFound:
                filesystem.create_dir(self._path, recursive=True)

    def names(self) -> list[str]:
        with _as_os_error():
            selector = self._fs.FileSelector(self._path, allow_not_found=True)
            found = self._filesystem.get_file_info(selector)
        return [info.base_name for info in found if info.type == self._fs.FileType.File]

    def read(self, name: str) -> bytes | None:
        try:
            with _as_os_error(), self._filesystem.open_input_file(f"{self._path}/{name}") as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    def put(self, name: str, content: bytes, *, durable: bool) -> None:  # noqa: ARG002 - it always is
        path = f"{self._path}/{name}"
        with _as_os_error(), self._filesystem.open_output_stream(path, compression=None) as stream:  # none by its name
            stream.write(content)

    def delete(self, name: str) -> None:
        with _as_os_error(), contextlib.suppress(FileNotFoundError):
            self._filesystem.delete_file(f"{self._path}/{name}")


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Converts pyarrow's own errors to OSError."""
    from pyarrow import ArrowException

    try:
        yield
    except ArrowException as error:
        raise OSError(str(error)) from error


def reason(error: OSError) -> str:
    """The first line of the system's message."""
    text = error.strerror or str(error)
    return text.splitlines()[0] if text else type(error).__name__
