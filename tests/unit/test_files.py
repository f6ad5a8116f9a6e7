"""Files written whole or not at all, and what is no file."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from piper_ray.model.errors import UsageError
from piper_ray.storage.files import write_atomically, written_whole


def test_a_file_takes_the_place_of_another(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    path.chmod(0o640)
    write_atomically(path, "after\r\n")
    assert path.read_bytes() == b"after\r\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_was_there_stays_when_something_fails(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def fail() -> None:
        with written_whole(path) as file:
            file.write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link, target = tmp_path / "link", tmp_path / "folder" / "file"
    link.symlink_to(target)
    write_atomically(link, "text")
    assert link.is_symlink()
    assert target.read_text() == "text"


def test_a_pipe_is_written_itself(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_atomically(pipe, "text")
    reader.join()
    assert read == ["text"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", ["missing/file", "folder", "n" * 300])
def test_what_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=f"{name}: cannot be written: "):
        write_atomically(tmp_path / name, "text")
