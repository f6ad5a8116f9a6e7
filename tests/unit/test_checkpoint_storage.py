"""Folders that hold checkpoints: atomic files, and an error in words for whatever cannot be used."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pyarrow import fs

from piper_ray.model.errors import CheckpointRefused
from piper_ray.storage.folder import Folder, LocalFolder, RemoteFolder, open_folder, shown
from tests.checkpoint_support import ObjectStore, key, opened, outcome
from tests.formats_support import named_pipe


@pytest.fixture(params=["path", "URI", "store", "store of pyarrow's own"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    match request.param:
        case "path":
            return open_folder(str(tmp_path / "a" / "b"))
        case "URI":
            return open_folder((tmp_path / "a" / "b").as_uri())
        case "store":
            return open_folder("bucket/a/b", ObjectStore().filesystem)
        case _:
            return open_folder("mock:///bucket/a/b/")


@pytest.mark.parametrize("durable", [False, True])
def test_files_are_whole_or_not_there(folder: Folder, durable: bool) -> None:
    assert folder.names() == []
    assert folder.read("x") is None
    folder.put("x", b"1", durable=durable)
    folder.put("y", b"", durable=durable)
    folder.put("x", b"22", durable=durable)
    assert sorted(folder.names()) == ["x", "y"]
    assert folder.read("x") == b"22"
    assert folder.read("y") == b""
    folder.delete("x")
    folder.delete("x")
    assert folder.names() == ["y"]


def test_a_path_and_its_uri_are_one_folder(tmp_path: Path) -> None:
    open_folder(str(tmp_path)).put("x", b"1", durable=True)
    by_uri = open_folder(tmp_path.as_uri())
    assert isinstance(by_uri, LocalFolder)
    assert by_uri.read("x") == b"1"
    assert isinstance(open_folder(str(tmp_path), fs.LocalFileSystem()), LocalFolder)
    assert isinstance(open_folder("bucket", ObjectStore().filesystem), RemoteFolder)


def test_a_local_file_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = LocalFolder(str(tmp_path))
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def recorded_fsync(descriptor: int) -> None:
        steps.append("fsync folder" if os.path.samestat(os.fstat(descriptor), tmp_path.stat()) else "fsync file")
        fsync(descriptor)

    def recorded_replace(self: Path, target: Path) -> Path:
        steps.append(f"rename with {self.stat().st_size} bytes to {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "replace", recorded_replace)
    folder.put("x", b"123", durable=True)
    assert steps == ["fsync file", "rename with 3 bytes to x", "fsync folder"]
    steps.clear()
    folder.put("x", b"45", durable=False)
    assert steps == ["rename with 2 bytes to x"]


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:  # noqa: ARG001
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = LocalFolder(str(tmp_path))
    folder.put("x", b"1", durable=True)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        folder.put("x", b"2", durable=True)
    assert folder.names() == ["x"]
    assert folder.read("x") == b"1"


def test_a_new_folder_outlives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def recorded_fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    LocalFolder(str(tmp_path / "a" / "b"))
    assert set(synced) == {tmp_path.stat().st_ino, (tmp_path / "a").stat().st_ino}


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    folder = open_folder(str(tmp_path))
    with named_pipe(tmp_path / "pipe"):
        assert folder.names() == []
        with pytest.raises(OSError, match=r"pipe is a named pipe \(FIFO\); expected a file"):
            folder.read("pipe")


def test_credentials_are_not_shown() -> None:
    assert shown("s3://key:secret@bucket/a@b?region=x") == "s3://bucket/a@b?region=x"
    assert shown("runs/a@b") == "runs/a@b"


def refusal(open_it: Callable[[], object]) -> str:
    with pytest.raises(CheckpointRefused) as refused:
        open_it()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_is_no_folder_is_refused_in_words(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert refusal(lambda: opened(file)) == f"the checkpoint at {file} cannot be used: it is no folder"
    assert refusal(lambda: opened(file / "below")).endswith("below cannot be used: Not a directory")
    assert refusal(lambda: opened("")) == "the checkpoint at  cannot be used: it names no folder"
    assert refusal(lambda: opened("s3://")).endswith("it names no folder")
    assert refusal(lambda: opened("nope://x/y")).startswith("the checkpoint at nope://x/y cannot be used: Unrecognized")
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.skipif(sys.platform != "linux", reason="a folder where nobody can make one is Linux's /proc")
def test_what_cannot_be_made_is_refused_in_words() -> None:
    assert refusal(lambda: opened("/proc/nothing/here")).endswith("cannot be used: No such file or directory")


@pytest.mark.parametrize("operation", ["list", "get", "put", "delete"])
def test_a_store_that_denies_access_is_refused_in_words(operation: str) -> None:
    def deny(asked: str, key: str) -> None:
        if asked == operation:
            raise PermissionError(errno.EACCES, f"AWS Error ACCESS_DENIED during {asked} of {key}\nrequest id 1")

    store = ObjectStore()
    with opened("bucket/a", filesystem=store.filesystem) as checkpoint:  # something to read
        assert checkpoint.record_outcome(key(1), outcome(1))
    store.before = deny
    text = refusal(lambda: opened("bucket/a", filesystem=store.filesystem))
    assert text.startswith("the checkpoint at bucket/a cannot be used: ")
    assert "ACCESS_DENIED" in text


def test_a_store_that_does_not_answer_is_refused_in_words() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        location = f"gs://anonymous@bucket/a?scheme=http&endpoint_override=127.0.0.1:{port}&retry_limit_seconds=0.1"
        text = refusal(lambda: opened(location))
    assert text.startswith("the checkpoint at gs://bucket/a?")
    assert "connect" in text
