"""What the tests of checkpoints share: a clock that stands still, storage in memory, answers to put on record."""

from __future__ import annotations

import io
import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import fs

from piper_ray.engine.checkpoint import Checkpoint, Identity
from piper_ray.engine.evaluation.outcome import EvaluationKey, Outcome, TracedStage
from piper_ray.engine.kernels.types import LevelStates
from piper_ray.model.constraints import Restrictions
from piper_ray.storage.folder import Folder, open_folder
from tests.instances import equal_chain

IDENTITY = Identity.of(equal_chain(3), Restrictions())
LEASE_THREAD = "checkpoint lease"


def key(number: int) -> EvaluationKey:
    return EvaluationKey.of(8.0 * 2**30, 1.0 / (number + 3))


def outcome(number: int) -> Outcome:
    stages = tuple(TracedStage(i + number, i, 1, 2, number, 1.0 / (i + 3)) for i in range(number % 4))
    tested = np.arange(4, dtype=np.int64) * number
    return Outcome(bool(stages), number, stages, 1.0 / (number + 1), 5 * number, 7 * number, tested)


def levels(number: int) -> LevelStates:
    """More than 64 bytes even when compressed."""
    rng = np.random.default_rng(number)
    counts = rng.integers(0, 3, 50 + number)
    tallies, sums = rng.integers(0, 2**20, (2, int(counts.sum())))
    return LevelStates(counts, tallies, sums, np.arange(4, dtype=np.int64) * number)


def same_outcome(one: Outcome | None, other: Outcome | None) -> bool:
    """Bit for bit, types included."""

    def figures(outcome: Outcome) -> str:
        stages = [(*vars(stage).values(), stage.budget_s.hex()) for stage in outcome.stages]
        return repr([{**vars(outcome), "stages": stages, "tested": (outcome.tested.dtype, outcome.tested.tolist())}])

    return one is not None and other is not None and figures(one) == figures(other)


def same_levels(one: LevelStates | None, other: LevelStates | None) -> bool:
    if one is None or other is None:
        return False
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def ignored(text: str) -> None:
    """A warning that is not the matter of the test."""


def unexpected(text: str) -> None:
    raise AssertionError(text)


@dataclass
class Clock:
    """Time passes when a test says so, and in ``sleep``. on_sleep: what others do meanwhile."""

    now_s: float = 0.0
    slept_s: float = 0.0
    on_sleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float, /) -> None:
        self.now_s += seconds
        self.slept_s += seconds
        self.on_sleep()


def opened(
    location: Path | str,
    *,
    identity: Identity = IDENTITY,
    clock: Clock | None = None,
    on_warning: Callable[[str], None] = unexpected,
    filesystem: fs.FileSystem | None = None,
) -> Checkpoint:
    """By default a clock that stands still, so that every answer is written at once, and no warnings."""
    clock = clock or Clock()
    return Checkpoint.open(location, identity, on_warning=on_warning, clock=clock, filesystem=filesystem)


def record(checkpoint: Checkpoint, *numbers: int) -> None:
    for number in numbers:
        assert checkpoint.record_outcome(key(number), outcome(number))


def recorded(checkpoint: Checkpoint, most: int = 20) -> set[int]:
    """The numbers on record, each as it was given."""
    found = {number for number in range(most) if checkpoint.outcome(key(number)) is not None}
    assert all(same_outcome(checkpoint.outcome(key(number)), outcome(number)) for number in found)
    return found


@dataclass
class ObjectStore(fs.FileSystemHandler):
    """As S3: whole objects by key; no rename, no exclusive creation; folders are but prefixes.

    before: called with the operation ("list", "get", "put", "delete") and the key; what it raises is the answer.
    torn: of an object whose PUT fails the first half is there all the same.
    """

    before: Callable[[str, str], None] = lambda *asked: None  # noqa: ARG005
    torn: bool = False
    objects: dict[str, bytes] = field(default_factory=dict)

    @property
    def filesystem(self) -> fs.FileSystem:
        return fs.PyFileSystem(self)

    def get_type_name(self) -> str:
        return "memory"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        def info(path: str) -> fs.FileInfo:
            if path in self.objects:
                return fs.FileInfo(path, fs.FileType.File, size=len(self.objects[path]))
            exists = any(key.startswith(path + "/") for key in self.objects)
            return fs.FileInfo(path, fs.FileType.Directory if exists else fs.FileType.NotFound)

        return [info(path) for path in paths]

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        self.before("list", selector.base_dir)
        keys = [key for key in sorted(self.objects) if posixpath.dirname(key) == selector.base_dir]
        assert keys or selector.allow_not_found
        return self.get_file_info(keys)

    def create_dir(self, path: str, recursive: bool) -> None:
        """There are none."""

    def open_input_file(self, path: str) -> pa.NativeFile:
        self.before("get", path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return pa.BufferReader(self.objects[path])

    def open_output_stream(self, path: str, metadata: object) -> pa.NativeFile:
        del metadata
        return pa.PythonFile(_Upload(self, path), mode="w")

    def delete_file(self, path: str) -> None:
        self.before("delete", path)
        if self.objects.pop(path, None) is None:
            raise FileNotFoundError(path)

    def _never(self, *arguments: object) -> None:
        raise AssertionError(f"not for object stores: {arguments}")

    delete_dir = delete_dir_contents = delete_root_dir_contents = move = copy_file = _never
    open_input_stream = open_append_stream = _never


def open_folder_in(store: ObjectStore) -> Folder:
    return open_folder("bucket", store.filesystem)


class _Upload(io.BytesIO):
    """Seen by nobody until it is closed."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        super().__init__()
        self._store = store
        self._key = key

    def close(self) -> None:
        if self.closed:
            return
        content = self.getvalue()
        super().close()
        try:
            self._store.before("put", self._key)
        except BaseException:
            if self._store.torn:
                self._store.objects[self._key] = content[: len(content) // 2]
            raise
        self._store.objects[self._key] = content
