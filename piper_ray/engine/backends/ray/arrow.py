"""The solver's tables as Arrow tables, and back without a copy.

Two forms: a row for each downset (``downset_table``), a row for each array (``array_table``); and finished levels as a
row for each state (``state_table``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from piper_ray.engine.kernels.scan import COUNTERS
from piper_ray.engine.kernels.types import (
    ClusterArrays,
    CostArrays,
    LatticeArrays,
    LevelStates,
    OptionArrays,
    Tables,
    Threshold,
    frozen,
)

_OF_DOWNSETS = ("need_s", "cap_s", "resync_s", "least_a", "least_b", "fast_a", "fast_b", "many_s", "one_s", "missing")
_OF_GRAPH = ("level_start", "edge_tail", "edge_head", "vertex_level", "tensor_bits", "cut_start", "cut")
_COSTS_OF_GRAPH = ("both_s", "least_shared", "fast_shared")


def downset_table(lattice: LatticeArrays, costs: CostArrays) -> pa.Table:
    """Row i: downset i's bit set, its crossing edges, and its sums for each variant."""
    columns = {
        "bits": _rows(lattice.bits),
        "crossing": pa.LargeListArray.from_arrays(pa.array(lattice.crossing_start), pa.array(lattice.crossing)),
    }
    columns |= {name: _rows(getattr(costs, name)) for name in _OF_DOWNSETS}
    return pa.table(columns)


def array_table(arrays: dict[str, npt.NDArray[np.generic]]) -> pa.Table:
    """A row for each array: its name, type, shape, and values in C order."""
    ordered = [np.ascontiguousarray(array) for array in arrays.values()]
    offsets = np.cumsum([0, *(array.nbytes for array in ordered)], dtype=np.int64)
    values = np.concatenate([array.reshape(-1).view(np.uint8) for array in ordered])
    data = pa.Array.from_buffers(pa.large_binary(), len(ordered), [None, pa.py_buffer(offsets), pa.py_buffer(values)])
    return pa.table(
        {
            "name": list(arrays),
            "type": [array.dtype.str for array in ordered],
            "shape": pa.array([list(array.shape) for array in ordered], pa.list_(pa.int64())),
            "data": data,
        }
    )


def arrays_of(table: pa.Table) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an ``array_table``: read-only views of its memory."""
    (data,) = table.column("data").chunks
    _, offsets, values = data.buffers()
    starts = np.frombuffer(offsets, np.int64)[data.offset :]
    arrays = {}
    for row, described in enumerate(table.select(["name", "type", "shape"]).to_pylist()):
        dtype = np.dtype(described["type"])
        count = int(starts[row + 1] - starts[row]) // dtype.itemsize
        view = np.frombuffer(values, dtype, count, int(starts[row]))
        arrays[described["name"]] = view.reshape(described["shape"])
    return arrays


def graph_table(tables: Tables) -> pa.Table:
    """What has no row for each downset, or not in every problem: levels, edges and tensors, what replicas share out,
    and each vertex's and class's TMPC options.
    """
    arrays = {name: getattr(tables.lattice, name) for name in _OF_GRAPH}
    arrays |= {name: getattr(tables.costs, name) for name in _COSTS_OF_GRAPH}
    return array_table(arrays | tables.options._asdict())


def tables_of(downsets: pa.Table, graph: pa.Table, cluster: ClusterArrays) -> Tables:
    """The tables as the kernels take them, on the memory of the Arrow tables."""
    arrays = arrays_of(graph)
    (crossing,) = downsets.column("crossing").chunks
    lattice = LatticeArrays(
        bits=_array(downsets, "bits"),
        crossing_start=crossing.offsets.to_numpy(),
        crossing=crossing.values.to_numpy(),
        **{name: arrays.pop(name) for name in _OF_GRAPH},
    )
    costs = CostArrays(
        **{name: _array(downsets, name) for name in _OF_DOWNSETS},
        **{name: arrays.pop(name) for name in _COSTS_OF_GRAPH},
    )
    return Tables(frozen(lattice), frozen(costs), frozen(OptionArrays(**arrays)), frozen(cluster))


def target_table(target: Threshold) -> pa.Table:
    """A target's limits, a row for each downset."""
    return pa.table({"device_limit": target.device_limit, "data_parallel_limit": target.data_parallel_limit})


def target_of(table: pa.Table, threshold_s: float, device_weight: int, stage_weight: int) -> Threshold:
    """The target on the memory of the Arrow table."""
    device_limit, data_parallel_limit = (_array(table, name) for name in ("device_limit", "data_parallel_limit"))
    return frozen(Threshold(threshold_s, device_weight, stage_weight, device_limit, data_parallel_limit))


def state_table(first: int, states: LevelStates) -> pa.Table:
    """Row for each state of consecutive downsets from ``first`` on: live ones only, in the narrowest integers."""
    downset = np.repeat(np.arange(first, first + states.counts.size), states.counts)
    columns = {"downset": downset, "tally": states.tallies, "data_parallel_sum": states.sums}
    return pa.table({name: narrow(column) for name, column in columns.items()})


def states_of(table: pa.Table, first: int, last: int) -> LevelStates:
    """The states of downsets first .. last - 1, which the table must hold and no others."""
    downset = _array(table, "downset").astype(np.int64)
    return LevelStates(
        np.bincount(downset - first, minlength=last - first).astype(np.int64),
        _array(table, "tally").astype(np.int64),
        _array(table, "data_parallel_sum").astype(np.int64),
        np.zeros(COUNTERS, np.int64),
    )


def narrow(values: npt.NDArray[np.int64]) -> npt.NDArray[np.generic]:
    """The same integers, none negative, in the narrowest type that holds them."""
    most = int(values.max()) if values.size else 0
    return values.astype(np.min_scalar_type(most))


def _rows(values: npt.NDArray[np.generic]) -> pa.FixedSizeListArray:
    """A matrix as a column with a list in each row."""
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), values.shape[1])


def _array(table: pa.Table, name: str) -> npt.NDArray[Any]:
    """A column as a read-only array, or matrix if its rows are lists."""
    (column,) = table.column(name).chunks or (pa.array([], table.schema.field(name).type),)
    if pa.types.is_fixed_size_list(column.type):
        matrix: npt.NDArray[Any] = column.values.to_numpy().reshape(-1, column.type.list_size)
        return matrix
    values: npt.NDArray[Any] = column.to_numpy()
    return values
