"""Evaluations of the whole lattice, each made once: on record in a checkpoint, or computed by a backend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol

from piper_ray.engine.evaluation.backend import Backend, OnProgress
from piper_ray.engine.evaluation.completion import Completion
from piper_ray.engine.evaluation.outcome import EvaluationKey, Outcome
from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.evaluation.threshold import OnFinished, evaluate_threshold, keep_nothing
from piper_ray.engine.kernels.types import LevelStates
from piper_ray.engine.tables.problem import Problem

_POLL_S = 0.1


class _NotWanted(Exception):
    """Ends an evaluation from inside."""


@dataclass
class Ahead:
    """Runs ``evaluate`` (given a progress callback) for ``threshold_s`` in a thread of its own, until cancelled."""

    threshold_s: float
    evaluate: Callable[[OnProgress], Outcome]
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _done: int = 0

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="piper-ray-ahead")
        self._outcome = self._thread.submit(self.evaluate, self._on_progress)

    def result(self, on_progress: OnProgress) -> Outcome:
        """The outcome, when it is there; what ``on_progress`` raises meanwhile ends the evaluation."""
        try:
            while not wait([self._outcome], timeout=_POLL_S).done:
                on_progress(self._done)
            return self._outcome.result()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """It ends at its next report; nobody waits for that but the end of the thread."""
        self._cancelled.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _on_progress(self, done: int) -> None:
        self._done = done
        if self._cancelled.is_set():
            raise _NotWanted


class Memo(Protocol):
    """What keeps answers, so that none is worked out twice: a checkpoint. Each method raises CheckpointLost if another
    solve has taken it over.
    """

    def outcome(self, key: EvaluationKey) -> Outcome | None:
        """The answer, if it is on record."""
        ...

    def record_outcome(self, key: EvaluationKey, outcome: Outcome) -> bool:
        """Whether the answer is durable by now."""
        ...

    def levels(self, key: EvaluationKey) -> LevelStates | None:
        """The levels from 1 on that an earlier run had finished, by downset."""
        ...

    def record_levels(self, key: EvaluationKey, states: Callable[[], LevelStates]) -> bool:
        """After each batch of levels. states: all finished ones from 1 on; asked for only if they are written."""
        ...


class Evaluations:
    """``evaluate`` by a backend, and through a memo if there is one: what is on record there is not done again.

    Only for the lattice and stage costs that the memo stands for; a chain is evaluated apart. Close it after use.
    """

    def __init__(self, backend: Backend, memo: Memo | None = None) -> None:
        self.backend = backend
        self._memo = memo
        self._ahead: Ahead | None = None

    def evaluate(
        self,
        problem: Problem,
        threshold_s: float,
        *,
        fewest_stages: bool = False,
        next_s: float | None = None,
        on_progress: OnProgress,
        on_finished: OnFinished = keep_nothing,
        completion: Completion | None = None,
    ) -> Outcome:
        """As ``evaluate_threshold``. Raises CheckpointLost if another solve has taken the checkpoint over.

        next_s: the threshold that comes next if this one is infeasible. Where the backend has room for two, that one is
        evaluated at the same time: the answers are the same, some are there sooner.
        on_finished, completion: as ``evaluate_threshold``, where it is evaluated now.
        """
        key = EvaluationKey.of(problem.cluster.memory_bytes, threshold_s, fewest_stages)
        known = self._memo.outcome(key) if self._memo is not None else None
        if known is not None:
            return known
        outcome = self._from_ahead(threshold_s, fewest_stages, on_progress)
        if outcome is None:
            if next_s is not None and self.backend.has_room():
                self._start_ahead(problem, next_s, completion)
            outcome = self._compute(problem, key, threshold_s, fewest_stages, on_progress, on_finished, completion)
        if self._memo is not None:
            self._memo.record_outcome(key, outcome)
        return outcome

    def close(self) -> None:
        """Ends what was begun ahead of need."""
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    def _from_ahead(self, threshold_s: float, fewest_stages: bool, on_progress: OnProgress) -> Outcome | None:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        if fewest_stages or ahead.threshold_s != threshold_s:
            ahead.cancel()
            return None
        return ahead.result(on_progress)

    def _start_ahead(self, problem: Problem, threshold_s: float, completion: Completion | None) -> None:
        def evaluate(on_progress: OnProgress) -> Outcome:
            return evaluate_threshold(
                problem, self.backend, threshold_s, on_progress=on_progress, completion=completion
            )

        self._ahead = Ahead(threshold_s, evaluate)

    def _compute(
        self,
        problem: Problem,
        key: EvaluationKey,
        threshold_s: float,
        fewest_stages: bool,
        on_progress: OnProgress,
        on_finished: OnFinished,
        completion: Completion | None,
    ) -> Outcome:
        memo = self._memo

        def finished(states: StateTables) -> None:
            if memo is not None:
                memo.record_levels(key, lambda: states.finished(1, states.level)._replace(tested=states.tested))
            on_finished(states)

        return evaluate_threshold(
            problem,
            self.backend,
            threshold_s,
            fewest_stages=fewest_stages,
            on_progress=on_progress,
            finished=None if memo is None else memo.levels(key),
            on_finished=finished,
            completion=completion,
        )
