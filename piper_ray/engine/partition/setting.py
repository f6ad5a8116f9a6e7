"""What a partitioned lattice is about. Sent to each machine once, which makes its own tables of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_ray.engine.kernels.types import BitArray, IndexArray
from piper_ray.engine.lattice.layer_graph import LayerGraph
from piper_ray.engine.tables.problem import Problem, chain_problem
from piper_ray.engine.tables.tmpc_options import TmpcOptions
from piper_ray.model.instance import Instance


@dataclass(frozen=True)
class PartitionSetting:
    """degrees: data-parallel ones that a stage can have, ascending. most_cells: see ``StageCover``."""

    instance: Instance
    graph: LayerGraph
    options: TmpcOptions
    degrees: tuple[int, ...]
    most_cells: int

    def chain(self) -> Problem:
        """Of a few of the downsets, for what depends on none of them."""
        return chain_problem(self.instance, self.graph, self.options, range(self.graph.size), self.degrees)


_MIX, _FOLD = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)


def owners(bits: BitArray, partitions: int) -> IndexArray:
    """int64[m]: which partition has each of the downsets, uint64[m, words]: about as many in each, of every size."""
    mixed = np.zeros(bits.shape[0], np.uint64)
    for word in (*bits.T, np.uint64(0)):
        mixed = (mixed ^ word) * _MIX
        mixed ^= mixed >> _FOLD
    return (mixed % np.uint64(partitions)).astype(np.int64)
