"""A lattice of some of the downsets has of these all that the whole lattice has, bit for bit."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest

from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.downsets import GrownLattice, build_lattice, listed_lattice
from piper_ray.engine.lattice.layer_graph import build_graph
from tests.instances import random_instance, two_towers, with_extras
from tests.lengths import long_after
from tests.solver_support import MANY, random_graph


def whole(seed: int) -> GrownLattice:
    """With tensors in half of them, over more than a word of vertices in some."""
    rng = Random(seed)
    instance = random_instance(seed, most_layers=7) if seed % 4 else random_graph(rng, 70, 0.8)
    instance = with_extras(rng, instance) if seed % 2 else instance
    return build_lattice(build_graph(instance, without_contraction()), MANY)


@pytest.mark.parametrize("seed", long_after(4, range(14)))
def test_all_downsets_in_any_order_are_the_whole_lattice(seed: int) -> None:
    lattice, rng = whole(seed), np.random.default_rng(seed)
    found = listed_lattice(lattice.graph, lattice.arrays.bits[rng.permutation(lattice.size)])
    for one, other in zip(lattice.arrays, found.arrays, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
    values = rng.random((lattice.graph.size, 3))
    np.testing.assert_array_equal(lattice.sums(values), found.sums(values))


@pytest.mark.parametrize("seed", long_after(4, range(14)))
def test_some_downsets_have_what_they_have_in_the_whole(seed: int) -> None:
    lattice, rng = whole(seed), np.random.default_rng(seed)
    chosen = rng.random(lattice.size) < 0.4
    chosen[[0, -1]] = True
    kept = np.flatnonzero(chosen)
    found = listed_lattice(lattice.graph, lattice.arrays.bits[rng.permutation(kept)])
    np.testing.assert_array_equal(found.arrays.bits, lattice.arrays.bits[kept])
    values = rng.random((lattice.graph.size, 2))
    np.testing.assert_array_equal(lattice.sums(values)[kept], found.sums(values))
    for starts, edges in (("crossing_start", "crossing"), ("cut_start", "cut")):
        mine, theirs = getattr(found.arrays, starts), getattr(lattice.arrays, starts)
        for k, i in enumerate(kept if mine.size > 1 else ()):
            listed = getattr(found.arrays, edges)[mine[k] : mine[k + 1]]
            assert listed.tolist() == getattr(lattice.arrays, edges)[theirs[i] : theirs[i + 1]].tolist()


def test_a_level_is_a_size_that_is_there() -> None:
    graph = build_graph(two_towers(3), without_contraction())
    lattice = build_lattice(graph, MANY)
    sizes = np.repeat(np.arange(lattice.levels), np.diff(lattice.arrays.level_start))
    kept = np.flatnonzero((sizes % 3 == 0) | (sizes == graph.size))
    found = listed_lattice(graph, lattice.arrays.bits[kept])
    levels = [sizes[kept][first:last].tolist() for first, last in pairwise(found.arrays.level_start.tolist())]
    assert [set(level) for level in levels] == [{0}, {3}, {6}, {8}]
    # A vertex is in no downset of a level before its own.
    for v, level in enumerate(found.arrays.vertex_level.tolist()):
        assert 0 < level < found.levels
        before = found.arrays.bits[: found.arrays.level_start[level]]
        assert not ((before[:, v >> 6] >> np.uint64(v & 63)) & np.uint64(1)).any()
