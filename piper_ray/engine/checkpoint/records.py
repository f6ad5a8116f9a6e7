"""Reading and writing what a checkpoint keeps: the newest file of each kind, and the one before it in reserve."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from piper_ray.engine.checkpoint.encoding import (
    Plain,
    decode_levels,
    decode_outcomes,
    decode_results,
    identity_of_levels,
    identity_of_outcomes,
)
from piper_ray.engine.checkpoint.identity import Identity
from piper_ray.engine.evaluation.outcome import EvaluationKey, Outcome
from piper_ray.engine.kernels.types import LevelStates
from piper_ray.storage.folder import LEVELS, OUTCOMES, Folder, StateFile, Vanished, checksum, state_files

_KEPT = 2
"""Files of each kind: the newest, and the one before in case the newest is damaged."""


@dataclass
class SavedAnswers:
    """What was read. levels: of the evaluation that was under way. damaged: files that are not what was written."""

    files: list[StateFile]
    outcomes: dict[EvaluationKey, Outcome] = field(default_factory=dict)
    results: dict[str, Plain] = field(default_factory=dict)
    levels: tuple[EvaluationKey, LevelStates] | None = None
    damaged: set[StateFile] = field(default_factory=set)


def read_newest(
    folder: Folder, files: Iterable[StateFile], kind: str, on_damaged: Callable[[StateFile], None]
) -> bytes | None:
    """The content of the newest whole file of a kind, if any. files: newest first. on_damaged: of those passed over.

    Raises Vanished.
    """
    for file in files:
        if file.kind != kind:
            continue
        content = folder.read(file.name)
        if content is None:
            raise Vanished
        if checksum(content) == file.checksum:
            return content
        on_damaged(file)
    return None


def write(folder: Folder, kind: str, epoch: int, sequence: int, content: bytes) -> StateFile:
    """Durable when it returns."""
    file = StateFile(kind, epoch, sequence, checksum(content))
    folder.put(file.name, content, durable=True)
    return file


def prune(folder: Folder, files: Iterable[StateFile], obsolete: Callable[[StateFile], bool]) -> None:
    """Deletes, of ``files``, the obsolete ones and those with newer ones enough. What cannot be deleted stays."""
    kept: Counter[str] = Counter()
    for file in sorted(files, key=lambda file: file.age, reverse=True):
        if kept[file.kind] < _KEPT and not obsolete(file):
            kept[file.kind] += 1
            continue
        with contextlib.suppress(OSError):
            folder.delete(file.name)


class Records:
    """What the files of one checkpoint say."""

    def __init__(self, folder: Folder, location: str, identity: Identity, on_warning: Callable[[str], None]) -> None:
        self._folder = folder
        self._location = location
        self._identity = identity
        self._on_warning = on_warning

    def load(self) -> SavedAnswers:
        """The newest whole file of each kind. Raises CheckpointRefused if it is of another input or other options."""
        while True:
            saved = SavedAnswers(state_files(self._folder.names()))
            try:
                content = self._newest(OUTCOMES, saved)
                if content is not None:
                    self._identity.require(identity_of_outcomes(content), self._location)
                    saved.outcomes, saved.results = decode_outcomes(content), decode_results(content)
                content = self._newest(LEVELS, saved)
                if content is not None:
                    self._identity.require(identity_of_levels(content), self._location)
                    saved.levels = decode_levels(content)
            except Vanished:
                continue
            return saved

    def _newest(self, kind: str, saved: SavedAnswers) -> bytes | None:
        def damaged(file: StateFile) -> None:
            saved.damaged.add(file)
            self._on_warning(
                f"{file.name} of the checkpoint at {self._location} is damaged; what was saved before it is used"
            )

        return read_newest(self._folder, saved.files, kind, damaged)
