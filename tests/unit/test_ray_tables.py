"""Tables through the object store: the same bytes and types, read-only; and states, which travel narrow."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_ray.engine.backends.ray.calls import array_bytes
from piper_ray.engine.evaluation.state_tables import narrow, wide
from piper_ray.engine.kernels.types import LevelStates, Threshold, frozen
from piper_ray.engine.tables.problem import Problem
from piper_ray.model.instance import Instance
from tests.instances import named_instances, parallel_branches, random_instance, two_towers
from tests.solver_support import tables

INSTANCES = {
    **named_instances(),
    "larger towers": two_towers(9, devices=9),
    "larger branches": parallel_branches(2, 6, devices=12),
    **{f"random {seed}": random_instance(seed, most_layers=8).replace(devices=9) for seed in range(8)},
}


@pytest.fixture(params=INSTANCES)
def problem(request: pytest.FixtureRequest) -> Problem:
    instance: Instance = INSTANCES[request.param]
    return tables(instance).problem


def sent(value: Any) -> Any:
    """As another process gets it from Ray: arrays lie in buffers that are shared and read-only."""
    buffers: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(rest, buffers=[bytes(buffer.raw()) for buffer in buffers])


def assert_same_bytes(found: Any, expected: Any) -> None:
    """Of two of the solver's records."""
    assert type(found) is type(expected)
    for name, one, other in zip(expected._fields, found, expected, strict=True):
        if not isinstance(other, np.ndarray):
            assert one == other, name
            continue
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert one.tobytes() == other.tobytes(), name
        assert one.flags.c_contiguous, name
        assert not one.flags.writeable, name


def test_tables_come_back_bit_for_bit(problem: Problem) -> None:
    ours = problem.tables
    found = sent((ours.lattice, ours.costs, ours.options))
    for one, other in zip(found, ours, strict=False):
        assert_same_bytes(frozen(one), other)
    assert array_bytes(found) == sum(array.nbytes for record in found for array in record)


def test_limits_come_back_bit_for_bit() -> None:
    target = Threshold(0.1 + 0.2, 7, 1, np.array([0, 2**40, 3]), np.array([5, 0, 1]))
    assert_same_bytes(frozen(sent(target)), target)
    assert array_bytes(target) == 48


figures = st.lists(st.integers(0, 2**62), max_size=5)


@given(st.tuples(figures, figures, figures))
def test_narrow_states_are_the_same_and_no_wider_than_needed(lists: tuple[list[int], ...]) -> None:
    states = LevelStates(*(np.array(values, np.int64) for values in (*lists, [0, 1, 300, 0])))
    for array in narrow(states):
        most = max(array.tolist(), default=0)
        widths = [width for width in (1, 2, 4, 8) if most < 2 ** (8 * width)]
        assert array.dtype.itemsize == widths[0]
    for one, other in zip(wide(sent(narrow(states))), states, strict=True):
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist()
