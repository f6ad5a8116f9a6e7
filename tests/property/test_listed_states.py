"""On the downsets that states reach, an evaluation keeps what it keeps of them on all downsets, state for state.

Both are held against the recurrence in exact rationals: they have every state that leads to a plan, and no state that
it does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from random import Random

import pytest

import piper_ray
from piper_ray.engine.evaluation.dual_prices import StageCover
from piper_ray.engine.evaluation.outcome import Outcome
from piper_ray.engine.evaluation.reach import Reach, Room
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.downsets import listed_lattice
from piper_ray.engine.lattice.layer_graph import members
from piper_ray.engine.search import wide
from piper_ray.engine.tables.problem import LatticeTables, Problem, build_problem
from piper_ray.model.constraints import Restrictions
from piper_ray.model.instance import Instance
from tests.instances import equal_chain, parallel_branches, random_instance, two_towers
from tests.lengths import long_after
from tests.property.test_solver_fronts import Downset, State, slow_fronts
from tests.solver_support import ONE_THREAD, RecordingBackend, send_every_level_to_the_backend, tables

AMPLE = Room(10**6, 10**9)
Fronts = dict[Downset, set[State]]


@dataclass(frozen=True)
class Evaluated:
    outcome: Outcome
    fronts: Fronts


def evaluated(problem: Problem, threshold_s: float) -> Evaluated:
    backend = RecordingBackend()
    outcome = evaluate_threshold(problem, backend, threshold_s)
    backend.close()
    bits, ids = problem.lattice.bits, problem.workload.lattice.graph.layer_ids
    return Evaluated(
        outcome, {frozenset(ids[v] for v in members(bits[i])): set(states) for i, states in backend.fronts.items()}
    )


def listed(problem: Problem, instance: Instance, threshold_s: float, rounds: int) -> Problem | None:
    """On what states reach; None if these do not get as far as all layers."""
    cover = StageCover.of(problem, wide.CELLS)
    assert cover is not None
    found = Reach(cover).downsets(cover.dual_prices(threshold_s, rounds=rounds), AMPLE)
    assert found is not None
    graph = problem.workload.lattice.graph
    if not any(len(members(row)) == graph.size for row in found):
        return None
    workload = LatticeTables.build(listed_lattice(graph, found), problem.workload.options)
    return build_problem(workload, instance, Restrictions().data_parallel_degrees(instance))


def assert_state_for_state(instance: Instance, threshold_s: float, rounds: int) -> tuple[int, int]:
    """How many states both kept, and how many downsets were not listed."""
    needed = slow_fronts(instance, Fraction(threshold_s)).needed
    problem = tables(instance, contraction=without_contraction()).problem
    whole = evaluated(problem, threshold_s)
    fewer = listed(problem, instance, threshold_s, rounds)
    if fewer is None:
        assert not whole.outcome.feasible
        return 0, len(needed)
    some = evaluated(fewer, threshold_s)
    assert (some.outcome.feasible, some.outcome.devices) == (whole.outcome.feasible, whole.outcome.devices)
    for downset, states in needed.items():
        if downset:
            assert states <= some.fronts.get(downset, set())
            assert states <= whole.fronts[downset]
    kept = 0
    for downset, states in some.fronts.items():
        if states:
            # What the whole lattice leaves out of a downset's states leads to no plan, as what is not listed.
            assert states & needed[downset] == whole.fronts[downset] & needed[downset]
            kept += len(states & needed[downset])
    return kept, len(needed) - len(some.fronts) - 1


@pytest.mark.parametrize("bucket", long_after(1, range(2)))
def test_random_graphs(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    send_every_level_to_the_backend(monkeypatch)
    kept, left_out = 0, 0
    for seed in range(700 + 15 * bucket, 700 + 15 * (bucket + 1)):
        rng = Random(f"listed {seed}")
        most_layers, most_tmpcs = (4, 3) if seed % 2 else (6, 1)
        instance = random_instance(seed, most_layers=most_layers, most_devices=14, most_tmpcs=most_tmpcs)
        optimum_s = piper_ray.solve(instance, options=ONE_THREAD).time_per_sample_s
        if not optimum_s:
            continue
        # Not at a stage's very time, where the threshold's tolerance decides.
        for factor in (0.97003, 1.00003, 1.13003, 1.9003):
            found = assert_state_for_state(instance, optimum_s * factor, rng.choice([1, 60]))
            kept, left_out = kept + found[0], left_out + found[1]
    assert kept >= 30
    assert left_out >= 25


@pytest.mark.long
@pytest.mark.parametrize(
    "instance",
    long_after(
        1,
        [
            two_towers(2, devices=9, microbatches=12, memory_bytes=60.0),
            parallel_branches(1, 3, devices=6, microbatches=6, memory_bytes=50.0),
            equal_chain(5, devices=8, microbatches=8, memory_bytes=40.0),
        ],
    ),
    ids=lambda instance: instance.name,
)
def test_families(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    send_every_level_to_the_backend(monkeypatch)
    kept = [assert_state_for_state(instance, threshold_s, 60)[0] for threshold_s in (8.03, 11.03, 15.03)]
    assert max(kept) >= 5
