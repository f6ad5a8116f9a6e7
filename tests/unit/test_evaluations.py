"""Each evaluation once: on record, or now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

import pytest

from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation import evaluations
from piper_ray.engine.evaluation.evaluations import Evaluations
from piper_ray.engine.evaluation.outcome import EvaluationKey, Outcome
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.kernels.types import LevelStates
from piper_ray.engine.tables.problem import Problem
from tests.checkpoint_support import same_outcome
from tests.instances import two_towers
from tests.solver_support import send_every_level_to_the_backend, tables

FEASIBLE_S, INFEASIBLE_S = 20.0, 1.0


@dataclass
class Memory:
    """A memo that keeps everything. levels_kept: after each batch of levels, how many downsets."""

    outcomes: dict[EvaluationKey, Outcome] = field(default_factory=dict)
    states: dict[EvaluationKey, LevelStates] = field(default_factory=dict)
    levels_kept: list[int] = field(default_factory=list)

    def outcome(self, key: EvaluationKey) -> Outcome | None:
        return self.outcomes.get(key)

    def record_outcome(self, key: EvaluationKey, outcome: Outcome) -> bool:
        assert key not in self.outcomes, "it was on record"
        self.outcomes[key] = outcome
        return True

    def levels(self, key: EvaluationKey) -> LevelStates | None:
        return self.states.get(key)

    def record_levels(self, key: EvaluationKey, states: Callable[[], LevelStates]) -> bool:
        self.states[key] = states()
        self.levels_kept.append(self.states[key].counts.size)
        return True


class Counted:
    """``evaluate_threshold``, and which thresholds it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.thresholds_s: list[float] = []

        def counted(problem: Problem, backend: LocalBackend, threshold_s: float, **options: object) -> Outcome:
            self.thresholds_s.append(threshold_s)
            return evaluate_threshold(problem, backend, threshold_s, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(evaluations, "evaluate_threshold", counted)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return tables(two_towers(3, devices=9, microbatches=12, memory_bytes=90.0)).problem


@pytest.fixture
def backend() -> Iterator[LocalBackend]:
    with closing(LocalBackend(1)) as made:
        yield made


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def ignored(done: int) -> None:
    pass


def plainly(problem: Problem, backend: LocalBackend, threshold_s: float, fewest_stages: bool = False) -> Outcome:
    return evaluate_threshold(problem, backend, threshold_s, fewest_stages=fewest_stages)


@pytest.mark.parametrize("fewest_stages", [False, True])
def test_what_is_on_record_is_not_done_again(
    problem: Problem, backend: LocalBackend, counted: Counted, fewest_stages: bool
) -> None:
    memory = Memory()
    evaluated = Evaluations(backend, memory)
    for threshold_s in (INFEASIBLE_S, FEASIBLE_S, INFEASIBLE_S, FEASIBLE_S):
        found = evaluated.evaluate(problem, threshold_s, fewest_stages=fewest_stages, on_progress=ignored)
        assert found.feasible == (threshold_s == FEASIBLE_S)
        assert same_outcome(found, plainly(problem, backend, threshold_s, fewest_stages))
    assert counted.thresholds_s == [INFEASIBLE_S, FEASIBLE_S]
    assert len(memory.outcomes) == 2
    later = Evaluations(backend, memory)
    later.evaluate(problem, FEASIBLE_S, fewest_stages=fewest_stages, on_progress=ignored)
    assert len(counted.thresholds_s) == 2
    later.evaluate(problem, FEASIBLE_S, fewest_stages=not fewest_stages, on_progress=ignored)
    assert len(counted.thresholds_s) == 3, "another question"


def test_finished_levels_are_kept_and_gone_on_from(
    problem: Problem, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_every_level_to_the_backend(monkeypatch)
    memory = Memory()
    asked = 0
    evaluated = Evaluations(backend, memory)
    expected = evaluated.evaluate(problem, FEASIBLE_S, on_progress=ignored)
    level_start = problem.lattice.level_start.tolist()
    assert memory.levels_kept == [start - 1 for start in level_start[2:]]

    # As if it had ended half-way.
    (key,) = memory.outcomes
    stopped = Memory()

    class Enough(Exception):
        pass

    def stop(done: int) -> None:  # noqa: ARG001
        nonlocal asked
        asked += 1
        if len(stopped.levels_kept) == 3:
            raise Enough

    with pytest.raises(Enough):
        Evaluations(backend, stopped).evaluate(problem, FEASIBLE_S, on_progress=stop)
    assert asked > 3
    assert not stopped.outcomes
    assert stopped.states[key].counts.size == level_start[4] - 1
    stopped.levels_kept.clear()
    evaluated = Evaluations(backend, stopped)
    assert same_outcome(evaluated.evaluate(problem, FEASIBLE_S, on_progress=ignored), expected)
    assert stopped.levels_kept == memory.levels_kept[3:]
