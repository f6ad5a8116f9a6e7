"""Downsets that one with a vertex more does as well as: by the definition, and that no state is lost with them."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import numpy as np
import pytest

from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.lattice.layer_graph import members
from piper_ray.model.instance import Instance, Tmpc
from tests.instances import RECOMPUTE, build, equal_chain, parallel_branches, random_instance, tmpc, two_towers
from tests.kernel_support import Case, case, target_of

State = tuple[int, int]


def small_tensors(seed: int) -> Instance:
    """A random DAG whose layers have two options with the same weights, one slow and small, and send little."""
    rng, size = Random(seed), 7

    def options(t: int) -> list[Tmpc]:
        time_s, weights, activation = rng.randint(3, 9) / t, rng.randint(0, 3), rng.randint(2, 6)
        slow = tmpc(time_s + rng.randint(1, 3), weights, rng.randint(0, activation), name=RECOMPUTE)
        return [tmpc(time_s, weights, activation), slow]

    degrees = (1, 2)[: rng.randint(1, 2)]
    edges = {(u, v): rng.choice((0.1, 0.2)) for v in range(size) for u in range(v) if rng.random() < 0.35}
    rows = {v: {t: options(t) for t in degrees} for v in range(size)}
    memory_bytes = rng.choice((30.0, 60.0, 1e4))
    return build(rows, edges, devices=9, microbatches=12, memory_bytes=memory_bytes)


INSTANCES: dict[str, Instance] = {
    "chain": equal_chain(9, devices=8, microbatches=12, memory_bytes=90.0),
    "towers": two_towers(4, devices=8, microbatches=12, memory_bytes=60.0),
    "branches": parallel_branches(2, 4, devices=9, microbatches=8, memory_bytes=70.0),
    **{f"random {seed}": random_instance(seed, most_layers=6, most_tmpcs=2).replace(devices=9) for seed in range(6)},
    **{f"small tensors {seed}": small_tensors(seed) for seed in range(8)},
}


def evaluated(made: Case, factor: float) -> StateTables:
    """All states, at some threshold."""
    work_s = float(made.problem.workload.sums.replica_work_s[-1])
    states = StateTables(made.problem.tables, target_of(made, factor * max(1.0, work_s / 4)))
    states.evaluate(made.problem.lattice.level_start.size - 1, made.problem.scratch)
    return states


def front(states: StateTables, i: int) -> list[State]:
    fronts = states.fronts
    first, count = int(fronts.start[i]), int(fronts.states[i])
    pairs = zip(fronts.tally[first : first + count], fronts.data_parallel_sum[first : first + count], strict=True)
    return [(int(tally), int(total)) for tally, total in pairs]


def dominators(made: Case, states: StateTables, j: int) -> set[int]:
    """By definition: with each of these J has a state as good for each of its own, and work for all that it adds."""
    lattice, costs, options = made.problem.lattice, made.problem.costs, made.problem.options
    if (options.uniform == 0).any():
        return set()
    found: set[int] = set()
    for outer in range(lattice.level_start[len(made.sets[j]) + 1], lattice.level_start[-1]):
        if len(made.sets[outer]) != len(made.sets[j]) + 1 or not made.sets[j] < made.sets[outer]:
            continue
        covered = front(states, j) and all(
            any(more[0] <= own[0] and more[1] <= own[1] for more in front(states, outer)) for own in front(states, j)
        )
        adds_work = all(
            costs.missing[outer, r] > costs.missing[j, r]
            or float(costs.cap_s[outer, r]) - float(costs.cap_s[j, r]) >= 1e-12 * float(costs.need_s[-1, r])
            for r in range(options.degree.size)
        )
        if covered and adds_work:
            found |= made.sets[outer] - made.sets[j]
    return found


@pytest.mark.parametrize("name", INSTANCES)
def test_marks_by_their_definition(name: str) -> None:
    made, marked = case(INSTANCES[name]), 0
    for factor in (0.7, 1.1, 3.0):
        states = evaluated(made, factor)
        buckets, groups = states.buckets, states.groups
        used, used_groups = int(buckets.used[0]), int(groups.used[0])
        for place in range(int(buckets.member_start[used])):
            j = int(states.members.downset[place])
            expected = dominators(made, states, j) if len(made.sets[j]) < len(made.sets[-1]) else set()
            assert set(members(states.members.dominated_by[place])) == expected
            assert states.members.place[j] == place
            marked += len(expected)
        for bucket in range(used):
            of_members = states.members.dominated_by[buckets.member_start[bucket] : buckets.member_start[bucket + 1]]
            assert np.array_equal(buckets.all_dominated_by[bucket], np.bitwise_and.reduce(of_members))
        for group in range(used_groups):
            of_buckets = buckets.all_dominated_by[groups.bucket_start[group] : groups.bucket_start[group + 1]]
            assert np.array_equal(groups.all_dominated_by[group], np.bitwise_and.reduce(of_buckets))
    assert marked > 0 or not name.startswith("small tensors")


@pytest.mark.long
def test_what_is_dominated_is_never_needed() -> None:
    """Each state of an I with a first stage down to a dominated J has one as good over the J that dominates it."""
    seen = 0
    for seed in range(3):
        made = case(small_tensors(seed))
        states = evaluated(made, 1.0 + seed % 3)
        threshold = Fraction(states.target.threshold_s)
        for j in range(1, len(made.sets) - 1):
            if states.fronts.states[j] == 0:
                continue
            for v in members(states.members.dominated_by[states.members.place[j]]):
                with_v = made.sets.index(made.sets[j] | {v})
                for i in range(j % 6, len(made.sets), 6):
                    if made.sets[with_v] < made.sets[i]:
                        of_j, of_more = (
                            reached(made, states, i, j, threshold),
                            reached(made, states, i, with_v, threshold),
                        )
                        seen += len(of_j)
                        for own in of_j:
                            assert any(more[0] <= own[0] and more[1] <= own[1] for more in of_more)
    assert seen > 20


def reached(made: Case, states: StateTables, i: int, j: int, threshold: Fraction) -> set[State]:
    """States of I with the first stage I \\ J, by trying every choice."""
    layers, found = made.layers(i, j), set()
    for r in made.variants(layers):
        t = int(made.problem.options.degree[r])
        for _, d in made.degrees(r):
            for devices, later_sum in front(states, j):
                time = made.time_s(layers, r, d, -(-(later_sum + d) // d))
                if time is not None and time <= threshold:
                    found.add((devices + d * t, later_sum + d))
    return found
