"""Evaluations of the whole lattice. Each is made once: read from a checkpoint, or computed by a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from piper_ray.engine.evaluation.backend import Backend, OnProgress
from piper_ray.engine.evaluation.completion import Completion
from piper_ray.engine.evaluation.outcome import EvaluationKey, Outcome
from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.evaluation.threshold import OnFinished, evaluate_threshold, keep_nothing
from piper_ray.engine.kernels.types import LevelStates
from piper_ray.engine.tables.problem import Problem


class Memo(Protocol):
    """Keeps answers, so that none is computed twice; a checkpoint is one. Each method raises CheckpointLost if another
    solve has taken it over.
    """

    def outcome(self, key: EvaluationKey) -> Outcome | None:
        """Returns the answer, if it is recorded."""
        ...

    def record_outcome(self, key: EvaluationKey, outcome: Outcome) -> bool:
        """Records an answer. Returns whether it is durable by now."""
        ...

    def levels(self, key: EvaluationKey) -> LevelStates | None:
        """Returns the states of the levels from 1 on that an earlier run finished, if any."""
        ...

    def record_levels(self, key: EvaluationKey, states: Callable[[], LevelStates]) -> bool:
        """Called after each batch of levels. states: returns those of all finished levels from 1 on; called only if
        they are written."""
        ...


class Evaluations:
    """Evaluates thresholds with a backend. If there is a memo, recorded evaluations are not repeated.

    Use it only for the lattice and stage costs that the memo belongs to; a chain is evaluated separately.
    """

    def __init__(self, backend: Backend, memo: Memo | None = None) -> None:
        self.backend = backend
        self._memo = memo

    def evaluate(
        self,
        problem: Problem,
        threshold_s: float,
        *,
        fewest_stages: bool = False,
        on_progress: OnProgress,
        on_finished: OnFinished = keep_nothing,
        completion: Completion | None = None,
    ) -> Outcome:
        """Evaluates like ``evaluate_threshold``, unless the answer is recorded. Raises CheckpointLost if another solve
        has taken the checkpoint over.

        on_finished, completion: used only if the threshold is evaluated now.
        """
        key = EvaluationKey.of(problem.cluster.memory_bytes, threshold_s, fewest_stages)
        known = self._memo.outcome(key) if self._memo is not None else None
        if known is not None:
            return known
        outcome = self._compute(problem, key, threshold_s, fewest_stages, on_progress, on_finished, completion)
        if self._memo is not None:
            self._memo.record_outcome(key, outcome)
        return outcome

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
