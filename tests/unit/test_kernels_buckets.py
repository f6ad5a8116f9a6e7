"""Buckets of live downsets: every live one in one bucket, and bounds that hold for each member."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from piper_ray.cost.bounds import ceiling_s
from piper_ray.engine.evaluation.backend import OnProgress
from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.kernels.buckets import BUCKET_SIZE, FRONT_SIZE, GROUP_SIZE
from piper_ray.engine.kernels.types import BucketArrays, FrontArrays, GroupArrays, LevelStates, MemberArrays
from piper_ray.engine.tables.problem import Problem
from piper_ray.model.instance import Instance
from tests.instances import parallel_branches, random_instance, two_towers
from tests.solver_support import RecordingBackend, send_every_level_to_the_backend, tables


@dataclass
class Witness(RecordingBackend):
    """Keeps the tables as they were before the last level."""

    seen: tuple[FrontArrays, MemberArrays, BucketArrays, GroupArrays, int] | None = None

    def evaluate_downsets(self, states: StateTables, first: int, last: int, on_progress: OnProgress) -> LevelStates:
        arrays = copy.deepcopy((states.fronts, states.members, states.buckets, states.groups))
        self.seen = (*arrays, first)
        return super().evaluate_downsets(states, first, last, on_progress)


INSTANCES = {
    "towers": two_towers(7, devices=9, microbatches=12, memory_bytes=90.0),
    "branches": parallel_branches(2, 6, devices=12, microbatches=8, memory_bytes=120.0),
    **{f"random {seed}": random_instance(seed, most_layers=8, most_devices=9).replace(devices=9) for seed in range(6)},
}


@pytest.mark.parametrize("fewest_stages", [False, True])
@pytest.mark.parametrize("name", INSTANCES)
def test_buckets(name: str, fewest_stages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    send_every_level_to_the_backend(monkeypatch)
    instance: Instance = INSTANCES[name]
    problem = tables(instance).problem
    backend = Witness()
    # At a third of the ceiling most downsets are live; exact limits do not matter here.
    evaluate_threshold(problem, backend, ceiling_s(instance) / 3, fewest_stages=fewest_stages)
    backend.close()
    assert backend.seen is not None
    fronts, placed, buckets, groups, done = backend.seen
    device_weight = problem.workload.lattice.graph.size + 1 if fewest_stages else 1
    assert_buckets(problem, fronts, placed, buckets, done, device_weight)
    assert_groups(problem, buckets, groups, done)


def assert_buckets(
    problem: Problem, fronts: FrontArrays, placed: MemberArrays, buckets: BucketArrays, done: int, device_weight: int
) -> None:
    costs, bits, starts = problem.costs, problem.lattice.bits, problem.lattice.level_start
    used = int(buckets.used[0])
    assert buckets.member_start[0] == 0
    members = placed.downset[: buckets.member_start[used]].tolist()
    assert sorted(members) == [i for i in range(done) if fronts.states[i] > 0], "each live downset once"
    for bucket in range(used):
        inside = placed.downset[buckets.member_start[bucket] : buckets.member_start[bucket + 1]].tolist()
        assert 1 <= len(inside) <= BUCKET_SIZE
        level = {int(np.searchsorted(starts, i, side="right")) - 1 for i in inside}
        assert len(level) == 1
        first = buckets.level_first[level.pop()]
        assert first <= bucket
        least_tallies = {int(fronts.tally[fronts.start[i] + fronts.states[i] - 1]) for i in inside}
        assert least_tallies == {int(buckets.least_tally[bucket])}, "members of one bucket have the same tally"
        assert buckets.least_devices[bucket] == buckets.least_tally[bucket] // device_weight
        assert buckets.least_sum[bucket] == min(int(fronts.data_parallel_sum[fronts.start[i]]) for i in inside)
        assert np.array_equal(buckets.meet[bucket], np.bitwise_and.reduce(bits[inside]))
        assert np.array_equal(buckets.join[bucket], np.bitwise_or.reduce(bits[inside]))
        assert np.array_equal(buckets.cap_s[:, bucket], costs.cap_s[inside].max(axis=0))
        assert np.array_equal(buckets.resync_s[bucket], costs.resync_s[inside].max(axis=0))
        assert np.array_equal(buckets.least_a[bucket], costs.least_a[inside].max(axis=0))
        assert np.array_equal(buckets.least_b[bucket], costs.least_b[inside].max(axis=0))
        assert np.array_equal(buckets.many_s[bucket], (costs.cap_s + costs.many_s)[inside].max(axis=0))
        assert np.array_equal(buckets.one_s[bucket], (costs.cap_s + costs.one_s)[inside].max(axis=0))
        assert_bounds_states(fronts, buckets, bucket, inside)
        assert np.array_equal(buckets.missing[bucket], costs.missing[inside].max(axis=0))
        place = np.arange(buckets.member_start[bucket], buckets.member_start[bucket + 1])
        assert np.array_equal(placed.place[inside], place)
        assert np.array_equal(placed.bits[place], bits[inside])
        assert np.array_equal(placed.cap_s[place], costs.cap_s[inside])


def assert_bounds_states(fronts: FrontArrays, buckets: BucketArrays, bucket: int, inside: list[int]) -> None:
    """Each state of several members is as large in both as one kept for the bucket; of few no others are kept."""
    size = int(buckets.front_size[bucket])
    assert (size == 0) == (len(inside) == 1)
    if size == 0:
        return
    kept = list(zip(buckets.front_tally[bucket, :size], buckets.front_sum[bucket, :size], strict=True))
    states = {
        (int(fronts.tally[state]), int(fronts.data_parallel_sum[state]))
        for i in inside
        for state in range(fronts.start[i], fronts.start[i] + fronts.states[i])
    }
    assert all(any(tally <= state[0] and total <= state[1] for tally, total in kept) for state in states)
    if len(states) <= FRONT_SIZE:
        assert set(kept) <= states


def assert_groups(problem: Problem, buckets: BucketArrays, groups: GroupArrays, done: int) -> None:
    starts, used = problem.lattice.level_start.tolist(), int(groups.used[0])
    edges = groups.bucket_start[: used + 1].tolist()
    assert edges[0] == 0
    assert edges[-1] == buckets.used[0]
    finished = [level for level in range(len(starts) - 1) if starts[level + 1] <= done]
    for level in finished:
        first = int(groups.level_first[level])
        assert edges[first] == buckets.level_first[level], "groups are of one level"
    for group, (begin, end) in enumerate(pairwise(edges)):
        assert 1 <= end - begin <= GROUP_SIZE
        assert groups.least_tally[group] == buckets.least_tally[begin:end].min()
        assert groups.least_devices[group] == buckets.least_devices[begin:end].min()
        assert groups.least_sum[group] == buckets.least_sum[begin:end].min()
        assert np.array_equal(groups.cap_s[:, group], buckets.cap_s[:, begin:end].max(axis=1))
