"""A checkpoint of one solve: the answers of its evaluations, and the finished levels of the current one; or, for
searches over tasks, the results of these.

The search is deterministic: the same answers lead to the same next threshold. So a solve is resumed by running it from
its start, with the recorded evaluations answered from the checkpoint. A checkpoint stays after the solve has ended; a
solve resumed from it then has its answer at once.

Also files of a checkpoint: evaluations as JSON, finished levels as NumPy's npz in zstd. All figures are exact.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np

from piper_ray.engine.checkpoint.identity import Facts, Identity
from piper_ray.engine.evaluation.outcome import EvaluationKey, Outcome, TracedStage
from piper_ray.engine.evaluation.state_tables import narrow, wide
from piper_ray.engine.kernels.types import LevelStates
from piper_ray.model.errors import CheckpointLost, CheckpointRefused
from piper_ray.storage.folder import (
    LEVELS,
    OUTCOMES,
    Folder,
    StateFile,
    Vanished,
    checksum,
    open_folder,
    reason,
    shown,
    state_files,
)
from piper_ray.storage.lease import Clock, Lease, acquire

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem


Plain = Mapping[str, object]
"""A value that JSON can hold."""


def encode_results(identity: Facts, results: Mapping[str, Plain]) -> bytes:
    """Encodes the answers of a search by their keys, as JSON, with the identity that they belong to."""
    return json.dumps({"identity": identity, "results": dict(results)}).encode()


def decode_results(content: bytes) -> tuple[Facts, dict[str, Plain]]:
    """Decodes what ``encode_results`` wrote: the identity, which has the same place in every format, and the
    answers."""
    document = json.loads(content)
    return document["identity"], document.get("results", {})


def outcome_row(outcome: Outcome) -> Plain:
    """Encodes an evaluation's answer."""
    return {**asdict(outcome), "tested": outcome.tested.tolist()}


def outcome_of(row: Any) -> Outcome:
    """Decodes what ``outcome_row`` encoded."""
    stages = tuple(TracedStage(**stage) for stage in row["stages"])
    return Outcome(**{**row, "stages": stages, "tested": np.array(row["tested"], np.int64)})


def encode_levels(identity: Facts, key: EvaluationKey, states: LevelStates) -> bytes:
    """Encodes the finished levels of an evaluation, in the narrowest integers."""
    import pyarrow as pa

    arrays, sink = io.BytesIO(), pa.BufferOutputStream()
    np.savez(arrays, head=json.dumps([identity, key]), **narrow(states)._asdict())
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(arrays.getbuffer())
    content: bytes = sink.getvalue().to_pybytes()
    return content


def decode_levels(content: bytes) -> tuple[Facts, EvaluationKey, LevelStates]:
    """Decodes what ``encode_levels`` wrote."""
    import pyarrow as pa

    with pa.CompressedInputStream(pa.BufferReader(content), "zstd") as stream:
        arrays = io.BytesIO(stream.read())
    with np.load(arrays) as file:
        identity, key = json.loads(str(file["head"]))
        return identity, EvaluationKey(*key), wide(LevelStates(*(file[name] for name in LevelStates._fields)))


_KEPT = 2
"""Number of files of each kind to keep: the newest, and the previous one in case the newest is damaged."""


@dataclass
class SavedAnswers:
    """The content of a checkpoint. results: answers, by key. levels: of the unfinished evaluation. damaged: files whose
    content is not what was written.
    """

    files: list[StateFile]
    results: dict[str, Plain] = field(default_factory=dict)
    levels: tuple[EvaluationKey, LevelStates] | None = None
    damaged: set[StateFile] = field(default_factory=set)


def read_newest(
    folder: Folder, files: Iterable[StateFile], kind: str, on_damaged: Callable[[StateFile], None]
) -> bytes | None:
    """Returns the content of the newest undamaged file of a kind, if any. files: newest first. on_damaged: called with
    damaged ones.

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
    """Writes a file. It is durable when this returns."""
    file = StateFile(kind, epoch, sequence, checksum(content))
    folder.put(file.name, content, durable=True)
    return file


def prune(folder: Folder, files: Iterable[StateFile], obsolete: Callable[[StateFile], bool]) -> None:
    """Deletes those of ``files`` that are obsolete or have enough newer ones. Files that cannot be deleted stay."""
    kept: Counter[str] = Counter()
    for file in sorted(files, key=lambda file: file.age, reverse=True):
        if kept[file.kind] < _KEPT and not obsolete(file):
            kept[file.kind] += 1
            continue
        with contextlib.suppress(OSError):
            folder.delete(file.name)


def _load(folder: Folder, location: str, identity: Identity, on_warning: Callable[[str], None]) -> SavedAnswers:
    """Reads the newest undamaged file of each kind. Raises CheckpointRefused if it is of another input or other
    options."""

    def damaged(file: StateFile) -> None:
        saved.damaged.add(file)
        on_warning(f"{file.name} of the checkpoint at {location} is damaged; what was saved before it is used")

    while True:
        saved = SavedAnswers(state_files(folder.names()))
        try:
            content = read_newest(folder, saved.files, OUTCOMES, damaged)
            if content is not None:
                facts, saved.results = decode_results(content)
                identity.require(facts, location)
            levels = read_newest(folder, saved.files, LEVELS, damaged)
            if levels is not None:
                facts, key, states = decode_levels(levels)
                identity.require(facts, location)
                saved.levels = key, states
        except Vanished:
            continue
        return saved


SHARE = 100
"""A write waits until the run since the last one is this many times as long as the write is expected to take."""

LEVELS_EVERY_S = 5.0
"""Least seconds between two writes of levels."""


@final
@dataclass(eq=False)
class Checkpoint:
    """An open checkpoint, which only this process writes. ``open`` makes one; ``close`` releases it, as does ``with``.

    Writing takes less than 1 % of the run. What has to wait for that reason is written by the next call for which a
    write is due, and by ``close``. A solve that is killed loses at most the work of 100 times the duration of a write
    (for levels 5 s, if that is more) and the current batch of levels. If storage fails during the run, the solve
    continues without the checkpoint.
    """

    _folder: Folder
    _location: str
    _identity: Identity
    _lease: Lease
    _saved: SavedAnswers
    _clock: Clock
    _on_warning: Callable[[str], None]
    _first_cost_s: float

    def __post_init__(self) -> None:
        levels = self._saved.levels
        self._levels_key = levels[0] if levels else None  # whose levels are in the newest file of them
        self._written_at = self._clock.monotonic()
        self._cost_s = {OUTCOMES: self._first_cost_s, LEVELS: self._first_cost_s}
        self._sequence = 0
        self._unwritten = False
        self._failing = False

    @classmethod
    def open(
        cls,
        location: str | os.PathLike[str],
        identity: Identity,
        *,
        on_warning: Callable[[str], None],
        clock: Clock = time,
        filesystem: FileSystem | None = None,
    ) -> Checkpoint:
        """Opens the checkpoint at a folder's path or URI (file, s3, gs: those of pyarrow.fs), and creates it if there
        is none.

        on_warning: receives, in words, problems that do not end the solve. filesystem: given if ``location`` is a path
        in it.

        Raises CheckpointRefused if it is of another input or other options, if another solve uses it, and if the
        location cannot be read and written.
        """
        text = os.fspath(location)
        try:
            with contextlib.ExitStack() as unless_opened:
                folder = open_folder(text, filesystem)
                began = clock.monotonic()
                saved = _load(folder, shown(text), identity, on_warning)
                first_cost_s = clock.monotonic() - began  # an estimate of a write's time until one is measured
                lease = acquire(folder, clock, on_warning)
                unless_opened.callback(lease.release)
                if state_files(folder.names()) != saved.files:  # the previous driver wrote until it ended
                    saved = _load(folder, shown(text), identity, on_warning)
                checkpoint = cls(folder, shown(text), identity, lease, saved, clock, on_warning, first_cost_s)
                prune(folder, saved.files, checkpoint._is_obsolete)  # files left by a driver that was killed
                unless_opened.pop_all()
                return checkpoint
        except OSError as error:
            raise CheckpointRefused(f"the checkpoint at {shown(text)} cannot be used: {reason(error)}") from error

    @property
    def answers(self) -> int:
        """The number of recorded evaluations or, for searches over tasks, results."""
        return len(self._saved.results)

    def outcome(self, key: EvaluationKey) -> Outcome | None:
        """Returns the answer of an evaluation, if it is recorded."""
        row = self.result(json.dumps(key))
        return None if row is None else outcome_of(row)

    def record_outcome(self, key: EvaluationKey, outcome: Outcome) -> bool:
        """Records an evaluation, as ``record_result`` does a result."""
        if self.levels(key) is not None:
            self._saved.levels = None
        return self.record_result(json.dumps(key), outcome_row(outcome))

    def result(self, key: str) -> Plain | None:
        """Returns the result of a task, if it is recorded."""
        return self._saved.results.get(key)

    def record_result(self, key: str, result: Plain) -> bool:
        """Records an answer. Returns True if it is durable, and False if it will be once a write is due.

        Raises CheckpointLost if another solve has taken over.
        """
        self._saved.results[key] = result
        self._unwritten = True
        return self._is_due(OUTCOMES) and self._write_results()

    def levels(self, key: EvaluationKey) -> LevelStates | None:
        """Returns the levels from 1 on that an earlier solve had finished of this evaluation, if any were saved."""
        saved = self._saved.levels
        return saved[1] if saved is not None and saved[0] == key else None

    def record_levels(self, key: EvaluationKey, states: Callable[[], LevelStates]) -> bool:
        """Called after each batch of levels. Returns True if the finished levels have been written and are durable.

        states: returns all finished levels from 1 on; called only if a write is due. Raises CheckpointLost if another
        solve has taken over.
        """
        if self._unwritten and self._is_due(OUTCOMES):
            self._write_results()
        if not self._is_due(LEVELS, LEVELS_EVERY_S):
            return False
        self._levels_key = key
        written = self._write(LEVELS, lambda: encode_levels(self._identity.facts, key, states()))
        if written:
            self._saved.levels = None
        return written

    def close(self) -> None:
        """Writes what is not yet written, and lets other solves open the checkpoint."""
        try:
            if self._unwritten:
                self._write_results()
        except CheckpointLost:
            pass  # the other solve finds these answers itself
        finally:
            self._lease.release()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_due(self, kind: str, least_s: float = 0.0) -> bool:
        return self._clock.monotonic() - self._written_at >= max(SHARE * self._cost_s[kind], least_s)

    def _write_results(self) -> bool:
        written = self._write(OUTCOMES, lambda: encode_results(self._identity.facts, self._saved.results))
        self._unwritten = not written
        return written

    def _write(self, kind: str, content: Callable[[], bytes]) -> bool:
        """Writes content, and returns whether that succeeded. A failure is reported once, until a write succeeds
        again."""
        began = self._clock.monotonic()
        try:
            names = self._folder.names()
            self._lease.check(names)
            self._sequence += 1
            file = write(self._folder, kind, self._lease.epoch, self._sequence, content())
        except OSError as error:
            if not self._failing:
                self._on_warning(
                    f"the checkpoint at {self._location} cannot be written: {reason(error)}; the solve goes on"
                )
            self._failing = True
            return False
        else:
            self._failing = False
            prune(self._folder, [*state_files(names), file], self._is_obsolete)
            return True
        finally:
            self._written_at = self._clock.monotonic()
            self._cost_s[kind] = self._written_at - began

    def _is_obsolete(self, file: StateFile) -> bool:
        """Whether a file is no longer needed: levels are needed until the answer of their evaluation is durable."""
        answered = json.dumps(self._levels_key) in self._saved.results
        return file in self._saved.damaged or (file.kind == LEVELS and answered)
