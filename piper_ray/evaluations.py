"""Evaluations of the whole lattice, each made once: on record in a checkpoint, or computed by a backend."""

from __future__ import annotations

from piper_ray.backends import Backend
from piper_ray.checkpoint import Checkpoint, EvaluationKey
from piper_ray.kernels.types import LevelStates
from piper_ray.problem import Problem
from piper_ray.state_tables import StateTables
from piper_ray.threshold import OnProgress, Outcome, evaluate_threshold


class Evaluations:
    """``evaluate`` by a backend, and through a checkpoint if there is one: what is on record there is not done again.

    Only for the lattice and stage costs that the checkpoint's identity stands for; a chain is evaluated apart.
    """

    def __init__(self, backend: Backend, checkpoint: Checkpoint | None = None) -> None:
        self.backend = backend
        self._checkpoint = checkpoint

    def evaluate(
        self, problem: Problem, threshold_s: float, *, fewest_stages: bool = False, on_progress: OnProgress
    ) -> Outcome:
        """As ``evaluate_threshold``. Raises CheckpointLost if another solve has taken the checkpoint over."""
        checkpoint = self._checkpoint
        if checkpoint is None:
            return evaluate_threshold(
                problem, self.backend, threshold_s, fewest_stages=fewest_stages, on_progress=on_progress
            )
        key = EvaluationKey.of(problem.cluster.memory_bytes, threshold_s, fewest_stages)
        known = checkpoint.outcome(key)
        if known is not None:
            return known

        def record(states: StateTables) -> None:
            def finished() -> LevelStates:
                return states.finished(1, states.level)._replace(tested=states.tested)

            checkpoint.record_levels(key, finished)

        outcome = evaluate_threshold(
            problem,
            self.backend,
            threshold_s,
            fewest_stages=fewest_stages,
            on_progress=on_progress,
            finished=checkpoint.levels(key),
            on_finished=record,
        )
        checkpoint.record_outcome(key, outcome)
        return outcome
