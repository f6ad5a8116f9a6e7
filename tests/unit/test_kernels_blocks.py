"""Blocks of live downsets: every live one in one block, and bounds that hold for each member."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest

from piper_ray.engine.evaluation.backend import Heartbeat
from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.evaluation.threshold import evaluate_threshold
from piper_ray.engine.kernels.blocks import BLOCK_SIZE
from piper_ray.engine.kernels.types import BlockArrays, FrontArrays, LevelStates
from piper_ray.engine.search.search import ceiling_s
from piper_ray.engine.tables.problem import Problem
from piper_ray.model.instance import Instance
from tests.instances import parallel_branches, random_instance, two_towers
from tests.solver_support import RecordingBackend, send_every_level_to_the_backend, tables


@dataclass
class Witness(RecordingBackend):
    """Keeps the tables as they were before the last level."""

    seen: tuple[FrontArrays, BlockArrays, int] | None = None

    def evaluate_downsets(self, states: StateTables, first: int, last: int, heartbeat: Heartbeat) -> LevelStates:
        self.seen = copy.deepcopy(states.fronts), copy.deepcopy(states.blocks), first
        return super().evaluate_downsets(states, first, last, heartbeat)


INSTANCES = {
    "towers": two_towers(7, devices=9, microbatches=12, memory_bytes=90.0),
    "branches": parallel_branches(2, 6, devices=12, microbatches=8, memory_bytes=120.0),
    **{f"random {seed}": random_instance(seed, most_layers=8, most_devices=9).replace(devices=9) for seed in range(6)},
}


@pytest.mark.parametrize("fewest_stages", [False, True])
@pytest.mark.parametrize("name", INSTANCES)
def test_blocks(name: str, fewest_stages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    send_every_level_to_the_backend(monkeypatch)
    instance: Instance = INSTANCES[name]
    problem = tables(instance).problem
    backend = Witness()
    # At a third of the ceiling most downsets are live; exact limits do not matter here.
    evaluate_threshold(problem, backend, ceiling_s(instance) / 3, fewest_stages=fewest_stages)
    backend.close()
    assert backend.seen is not None
    fronts, blocks, done = backend.seen
    device_cost = problem.workload.lattice.graph.size + 1 if fewest_stages else 1
    assert_blocks(problem, fronts, blocks, done, device_cost)


def assert_blocks(problem: Problem, fronts: FrontArrays, blocks: BlockArrays, done: int, device_cost: int) -> None:
    costs, bits, starts = problem.costs, problem.lattice.bits, problem.lattice.level_start
    used = int(blocks.used[0])
    assert blocks.member_start[0] == 0
    members = blocks.member[: blocks.member_start[used]].tolist()
    assert sorted(members) == [i for i in range(done) if fronts.states[i] > 0], "each live downset once"
    for block in range(used):
        inside = blocks.member[blocks.member_start[block] : blocks.member_start[block + 1]].tolist()
        assert 1 <= len(inside) <= BLOCK_SIZE
        level = {int(np.searchsorted(starts, i, side="right")) - 1 for i in inside}
        assert len(level) == 1
        first = blocks.level_first[level.pop()]
        assert first <= block
        least_costs = {int(fronts.cost[fronts.start[i] + fronts.states[i] - 1]) for i in inside}
        assert least_costs == {int(blocks.least_cost[block])}, "members of one block cost the same"
        assert blocks.least_devices[block] == blocks.least_cost[block] // device_cost
        assert blocks.least_sum[block] == min(int(fronts.data_parallel_sum[fronts.start[i]]) for i in inside)
        assert np.array_equal(blocks.meet[block], np.bitwise_and.reduce(bits[inside]))
        assert np.array_equal(blocks.join[block], np.bitwise_or.reduce(bits[inside]))
        assert np.array_equal(blocks.cap_s[:, block], costs.cap_s[inside].max(axis=0))
        assert np.array_equal(blocks.resync_s[block], costs.resync_s[inside].max(axis=0))
        assert np.array_equal(blocks.least_a[block], costs.least_a[inside].max(axis=0))
        assert np.array_equal(blocks.least_b[block], costs.least_b[inside].max(axis=0))
        assert np.array_equal(blocks.missing[block], costs.missing[inside].max(axis=0))
