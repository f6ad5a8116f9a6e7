"""The states that an evaluation keeps are those of the recurrence, written as plainly as it can be.

f[I], the undominated pairs (devices, sum of data-parallel degrees) of plans for the downset I whose stages all keep
the threshold, comes from all J < I, t and d. The solver may leave out what cannot become a plan of all layers, no more.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import pytest

from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.completion import Completion
from piper_ray.engine.evaluation.outcome import Outcome
from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.layer_graph import members
from piper_ray.engine.tables.problem import Problem
from piper_ray.model.instance import Instance, divisors
from tests.brute_force import brute_force, least_stage_time
from tests.instances import build, random_instance, tmpc
from tests.lengths import long_after
from tests.solver_support import RecordingBackend, downsets_by_definition, send_every_level_to_the_backend, tables

State = tuple[int, int]
Downset = frozenset[int]


@dataclass(frozen=True)
class SlowFronts:
    """undominated: f[I], by downset. needed: those of its states that lead to a plan of all layers."""

    undominated: dict[Downset, set[State]]
    needed: dict[Downset, set[State]]


def slow_fronts(instance: Instance, threshold: Fraction) -> SlowFronts:
    devices, limit = instance.devices, instance.data_parallel_limit
    downsets = downsets_by_definition(instance)
    whole = downsets[-1]
    degrees = [(d, t) for d in divisors(instance.microbatches) if d <= limit for t in instance.degrees]

    @cache
    def keeps(stage: Downset, d: int, t: int, y: int) -> bool:
        time = least_stage_time(instance, tuple(stage), d, t, y)
        return time is not None and time <= threshold

    def longer(inner: Downset, state: State) -> list[tuple[Downset, State]]:
        """All states with one more stage."""
        k, s = state
        return [
            (outer, (k + d * t, s + d))
            for outer in downsets
            if inner < outer
            for d, t in degrees
            if k + d * t <= devices and s + d <= limit and keeps(outer - inner, d, t, -(-(s + d) // d))
        ]

    @cache
    def leads_to_a_plan(downset: Downset, state: State) -> bool:
        return downset == whole or any(leads_to_a_plan(*more) for more in longer(downset, state))

    reached: dict[Downset, set[State]] = {downset: set() for downset in downsets}
    reached[frozenset()].add((0, 0))
    for inner in downsets:  # smaller ones come first
        reached[inner] = undominated(reached[inner])
        for state in reached[inner]:
            for outer, further in longer(inner, state):
                reached[outer].add(further)
    needed = {downset: {s for s in states if leads_to_a_plan(downset, s)} for downset, states in reached.items()}
    return SlowFronts(reached, needed)


def undominated(states: set[State]) -> set[State]:
    return {s for s in states if not any(o != s and o[0] <= s[0] and o[1] <= s[1] for o in states)}


def evaluate_and_record(
    instance: Instance, threshold_s: float, bounded_at_s: float | None = None
) -> tuple[Outcome, dict[Downset, list[State]]]:
    """bounded_at_s: the threshold of an evaluation before, whose states tell which downsets can be completed."""
    whole = tables(instance, contraction=without_contraction())
    backend = RecordingBackend()
    completion = None if bounded_at_s is None else completion_at(whole.problem, bounded_at_s)
    outcome = evaluate_threshold(whole.problem, backend, threshold_s, completion=completion)
    backend.close()
    bits, ids = whole.lattice.arrays.bits, whole.graph.layer_ids
    fronts = {frozenset(ids[v] for v in members(bits[i])): states for i, states in backend.fronts.items()}
    return outcome, fronts


def completion_at(problem: Problem, threshold_s: float) -> Completion:
    found: list[Completion] = []

    def learn(states: StateTables) -> None:
        if states.fronts.states[-1] > 0:
            found.append(Completion.of(threshold_s, states, problem.scratch, lambda: None))

    with closing(LocalBackend(1)) as backend:
        assert evaluate_threshold(problem, backend, threshold_s, on_finished=learn).feasible
    return found[0]


@pytest.mark.parametrize("bucket", long_after(1, range(2)))
def test_fronts_are_those_of_the_recurrence(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    send_every_level_to_the_backend(monkeypatch)
    feasible, widest = 0, 0
    for seed in range(40 * bucket, 40 * (bucket + 1)):
        instance = random_instance(seed, most_layers=4, most_devices=14, most_tmpcs=2)
        best = brute_force(instance)
        if best is None or best.time_per_sample_s == 0:
            continue
        feasible += 1
        for factor in (Fraction(1), Fraction(99, 100), Fraction(3, 2), Fraction(4)):
            widest = max(widest, assert_fronts(instance, best.time_per_sample_s * factor, factor >= 1))
    assert feasible >= 20
    assert widest >= 2


@pytest.mark.long
@pytest.mark.parametrize("bucket", long_after(1, range(2)))
def test_limits_from_both_sides_keep_all_that_leads_to_a_plan(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    send_every_level_to_the_backend(monkeypatch)
    feasible, fewer = 0, 0
    for seed in range(1000 + 20 * bucket, 1000 + 20 * (bucket + 1)):
        instance = random_instance(seed, most_layers=4, most_devices=14, most_tmpcs=2)
        best = brute_force(instance)
        if best is None or best.time_per_sample_s == 0:
            continue
        feasible += 1
        at = best.time_per_sample_s
        for bounded, factor in ((1, Fraction(1)), (1, Fraction(99, 100)), (4, Fraction(3, 2))):
            assert_fronts(instance, at * factor, factor >= 1, bounded_at=at * bounded)
            fewer += states_kept(instance, at * factor, at * bounded) < states_kept(instance, at * factor, None)
    assert feasible >= 10
    assert fewer >= 10


def states_kept(instance: Instance, threshold: Fraction, bounded_at: Fraction | None) -> int:
    bounded_at_s = None if bounded_at is None else float(bounded_at)
    return sum(map(len, evaluate_and_record(instance, float(threshold), bounded_at_s)[1].values()))


def test_wide_fronts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is a stage with (k, s) = (2, 2) or (4, 1): a chain of n has n + 1 states, all needed."""
    send_every_level_to_the_backend(monkeypatch)
    row = {1: [tmpc(8)], 2: [tmpc(6)], 4: [tmpc(4)]}
    for length in (1, 2, 3, 4):
        edges = {(v, v + 1): 0.0 for v in range(length - 1)}
        instance = build(dict.fromkeys(range(length), row), edges, devices=4 * length, microbatches=8)
        assert assert_fronts(instance, Fraction(4), feasible=True) == length + 1


def assert_fronts(instance: Instance, threshold: Fraction, feasible: bool, bounded_at: Fraction | None = None) -> int:
    """Returns the size of the widest front."""
    outcome, fronts = evaluate_and_record(instance, float(threshold), None if bounded_at is None else float(bounded_at))
    slow = slow_fronts(instance, threshold)
    assert outcome.feasible == feasible
    for downset, states in fronts.items():
        tallies, sums = [k for k, _ in states], [s for _, s in states]
        assert tallies == sorted(set(tallies), reverse=True)
        assert sums == sorted(set(sums))
        assert slow.needed[downset] <= set(states) <= slow.undominated[downset]
    if feasible:
        whole = frozenset(layer.id for layer in instance.layers)
        assert outcome.devices == min(k for k, _ in slow.undominated[whole])
        assert fronts[whole][-1] == min(slow.undominated[whole])
    return max(map(len, fronts.values()))
