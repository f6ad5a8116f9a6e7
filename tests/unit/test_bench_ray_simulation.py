"""scripts/bench_ray's model of a cluster, event by event, against what can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.ray_benchmarks.simulation import Constants, Lattice, Simulation, towers_lattice
from tests.instances import two_towers
from tests.solver_support import tables

FREE = Constants(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
LEVELS = Lattice(np.arange(0, 6401, 64), 2 * np.arange(101), far_s=1e-5, near_s=0.0)
"""100 levels of 64 downsets, in two buckets each."""


def seconds(
    lattice: Lattice, machines: int, constants: Constants = FREE, *, threads: int = 1, ahead: bool = True
) -> float:
    return Simulation(lattice, machines, threads, 1, constants, ahead=ahead).run()


def test_one_machine_does_all_the_work_and_nothing_else() -> None:
    # Batches are of all levels where finishing costs nothing: all is near, and free.
    near = Lattice(LEVELS.level_start, LEVELS.buckets, 1e-5, 1e6)  # so a level at a time
    level_by_level = seconds(near, 1, ahead=False)
    assert level_by_level == pytest.approx(near.work_s, rel=1e-9)


@pytest.mark.parametrize(("machines", "threads"), [(2, 1), (1, 8), (4, 16)])
def test_free_communication_shares_the_work(machines: int, threads: int) -> None:
    lattice = Lattice(LEVELS.level_start, LEVELS.buckets, 1e-3, 1e6)
    found = seconds(lattice, machines, threads=threads, ahead=False)
    assert found == pytest.approx(lattice.work_s / (machines * threads), rel=0.1)


def test_a_chunk_costs_the_dispatcher_its_calls_and_the_way() -> None:
    lattice = Lattice(np.array([0, 1, 2]), np.array([0, 1, 2]), 1.0, 0.0)
    constants = Constants(send_s=0.01, take_s=0.02, way_s=0.1, chunk_s=0.3, batch_s=0.04, level_s=0.005)
    assert seconds(lattice, 1, constants) == pytest.approx(0.01 + 0.1 + 0.3 + 1.0 + 0.1 + 0.02 + 0.04 + 0.005)


def test_what_is_sent_ahead_hides_the_way() -> None:
    lattice = Lattice(LEVELS.level_start, LEVELS.buckets, 1e-3, 1e-6)
    slow = Constants(1e-4, 1e-4, 0.05, 0.0, 0.0, 0.0)
    assert seconds(lattice, 4, slow, ahead=True) < 0.9 * seconds(lattice, 4, slow, ahead=False)


@given(st.integers(1, 40), st.floats(1e-7, 1e-4), st.integers(1, 12), st.integers(1, 4))
def test_no_cluster_beats_its_threads(height: int, far_s: float, machines: int, threads: int) -> None:
    lattice = towers_lattice(height, far_s, 1e6)  # level by level: nothing is left to the driver but what is near
    free_near = Lattice(lattice.level_start, lattice.buckets, far_s, 1e6)
    found = Simulation(free_near, machines, threads, 1, FREE, ahead=False).run()
    assert found >= free_near.work_s / (machines * threads) * (1 - 1e-9)


@pytest.mark.long
def test_an_hour_on_one_machine_is_a_fortieth_on_64() -> None:
    lattice = towers_lattice(500, far_s=2e-6, near_s=0.8e-6)  # 260 s an evaluation on eight threads
    constants = Constants(1e-4, 8e-5, 6e-4, 5e-4, 5e-4, 2e-4)
    one, many = (Simulation(lattice, machines, 8, 8, constants).run() for machines in (1, 64))
    assert one / many > 40.0


def test_the_towers_lattice_is_that_of_towers() -> None:
    lattice = tables(two_towers(9)).problem.lattice
    assert towers_lattice(9, 1.0, 1.0).level_start.tolist() == lattice.level_start.tolist()
