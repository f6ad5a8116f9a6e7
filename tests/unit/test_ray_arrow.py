"""Tables through Arrow and back: the same bytes and types, read-only, on the memory of the Arrow table."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_ray.engine.backends.ray.arrow import (
    array_table,
    arrays_of,
    downset_table,
    graph_table,
    narrow,
    state_table,
    states_of,
    tables_of,
    target_of,
    target_table,
)
from piper_ray.engine.kernels.types import LevelStates, Threshold
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


def through_a_stream(table: pa.Table) -> pa.Table:
    """As another process gets it: one buffer, read without a copy."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(pa.py_buffer(sink.getvalue())).read_all()


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


def lies_in(array: npt.NDArray[Any], table: pa.Table) -> bool:
    """Whether the array's memory is the table's."""
    start, end = array.ctypes.data, array.ctypes.data + array.nbytes
    buffers = [buffer for column in table.columns for chunk in column.chunks for buffer in chunk.buffers() if buffer]
    return array.nbytes == 0 or any(b.address <= start and end <= b.address + b.size for b in buffers)


def test_tables_come_back_bit_for_bit(problem: Problem) -> None:
    ours = problem.tables
    stored = downset_table(ours.lattice, ours.costs), graph_table(ours)
    for downsets, graph in (stored, tuple(map(through_a_stream, stored))):
        found = tables_of(downsets, graph, ours.cluster)
        for one, other in zip(found, ours, strict=True):
            assert_same_bytes(one, other)


def test_tables_are_views_of_what_was_fetched(problem: Problem) -> None:
    ours = problem.tables
    downsets = through_a_stream(downset_table(ours.lattice, ours.costs))
    graph = through_a_stream(graph_table(ours))
    found = tables_of(downsets, graph, ours.cluster)
    for record in (found.lattice, found.costs, found.options):
        for name, array in zip(record._fields, record, strict=True):
            assert lies_in(array, downsets) or lies_in(array, graph), name


def test_limits_come_back_bit_for_bit() -> None:
    target = Threshold(0.1 + 0.2, 7, 1, np.array([0, 2**40, 3]), np.array([5, 0, 1]))
    table = through_a_stream(target_table(target))
    found = target_of(table, target.threshold_s, target.device_weight, target.stage_weight)
    assert_same_bytes(found, target)
    assert lies_in(found.device_limit, table)
    assert lies_in(found.data_parallel_limit, table)


def test_arrays_of_any_type_and_shape_come_back() -> None:
    arrays: dict[str, npt.NDArray[Any]] = {
        "none": np.zeros(0),
        "matrix of no rows": np.zeros((0, 3), np.uint64),
        "one byte": np.array([200], np.uint8),
        "eight bytes after one": np.array([[-0.0, np.inf], [np.nan, 5e-324]]),
        "transposed": np.arange(6).reshape(2, 3).T,
        "cube": np.arange(24, dtype=np.int32).reshape(2, 3, 4),
    }
    found = arrays_of(through_a_stream(array_table(arrays)))
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
        assert not found[name].flags.writeable


fronts = st.lists(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 300)), max_size=4), max_size=12)


@given(fronts, st.integers(0, 2**33))
def test_states_come_back(fronts: list[list[tuple[int, int]]], first: int) -> None:
    """Downsets without a state too, which have no row."""
    pairs = [pair for front in fronts for pair in front]
    states = LevelStates(
        np.array([len(front) for front in fronts], np.int64),
        np.array([tally for tally, _ in pairs], np.int64),
        np.array([data_parallel_sum for _, data_parallel_sum in pairs], np.int64),
        np.zeros(4, np.int64),
    )
    table = through_a_stream(state_table(first, states))
    assert table.num_rows == len(pairs)
    found = states_of(table, first, first + len(fronts))
    for one, other in zip(found[:3], states[:3], strict=True):
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist()


@given(st.lists(st.integers(0, 2**62), max_size=5))
def test_narrow_integers_are_the_same_and_no_wider_than_needed(values: list[int]) -> None:
    found = narrow(np.array(values, np.int64))
    assert found.tolist() == values
    most = max(values, default=0)
    widths = [width for width in (1, 2, 4, 8) if most < 2 ** (8 * width)]
    assert found.dtype.itemsize == widths[0]
