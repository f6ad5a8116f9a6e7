"""The lattice of downsets and the sums over it, against sets and direct sums."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest

from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.downsets import GrownLattice, Lattice, build_lattice, chain_lattice
from piper_ray.engine.lattice.layer_graph import bit_rows, build_graph, descendants, members, offsets
from piper_ray.model.errors import LimitError
from piper_ray.model.instance import Instance, Tmpc
from tests.instances import equal_chain, named_instances, random_instance, two_towers
from tests.lengths import long_after
from tests.solver_support import MANY, Tables, downsets_by_definition, graph_only, random_graph, tables

DENSITIES = (0.0, 0.1, 0.3, 0.6, 1.0)


def small_graphs() -> list[Instance]:
    rng = Random(1)
    return [random_graph(rng, layers, density) for layers in range(1, 9) for density in DENSITIES for _ in range(3)]


def lattice_of(instance: Instance) -> Lattice:
    return build_lattice(build_graph(instance, without_contraction()), MANY)


def vertex_lists(lattice: Lattice) -> list[list[int]]:
    return [members(row) for row in lattice.arrays.bits]


def test_vertices_come_after_their_successors() -> None:
    for instance in small_graphs():
        graph = build_graph(instance, without_contraction())
        assert sorted(graph.layer_ids) == sorted(layer.id for layer in instance.layers)
        pairs = {(graph.layer_ids[tail], graph.layer_ids[head]) for tail, head, _ in graph.edges}
        assert pairs == {(edge.source, edge.target) for edge in instance.edges}
        assert all(head < tail for tail, head, _ in graph.edges)
        assert [(head, tail) for tail, head, _ in graph.edges] == sorted((head, tail) for tail, head, _ in graph.edges)
        for tail, head, index in graph.edges:
            edge = instance.edges[index]
            assert (graph.layer_ids[tail], graph.layer_ids[head]) == (edge.source, edge.target)
            assert head in graph.successors[tail]
            assert tail in graph.predecessors[head]


def test_numbering_takes_the_first_layer_in_the_file_that_is_ready() -> None:
    # From the back: 3 is ready first; then 5, which is listed before 4; then 4 and 9.
    graph = build_graph(graph_only([9, 5, 4, 3], [(9, 5), (9, 4), (5, 3), (4, 3)]), without_contraction())
    assert graph.layer_ids == (3, 5, 4, 9)


def test_descendants() -> None:
    graph = build_graph(graph_only([0, 1, 2, 3], [(0, 1), (1, 2)]), without_contraction())
    assert graph.layer_ids == (2, 1, 0, 3)
    assert descendants(graph.successors) == [0b000, 0b001, 0b011, 0b000]


def test_every_downset_once_and_in_order() -> None:
    for instance in small_graphs():
        lattice = lattice_of(instance)
        ids = lattice.graph.layer_ids
        found = vertex_lists(lattice)
        assert {frozenset(ids[v] for v in row) for row in found} == set(downsets_by_definition(instance))
        assert lattice.size == len(found) == len(downsets_by_definition(instance))
        assert found == sorted(found, key=lambda row: (len(row), row)), "by level, then lexicographic"
        starts = lattice.arrays.level_start.tolist()
        assert lattice.levels == len(ids) + 1 == len(starts) - 1
        for level, (first, last) in enumerate(pairwise(starts)):
            assert all(len(row) == level for row in found[first:last])
        assert (starts[0], starts[-1]) == (0, lattice.size)


def test_parent_and_added_vertex() -> None:
    for instance in small_graphs():
        lattice = lattice_of(instance)
        assert isinstance(lattice, GrownLattice)
        found = vertex_lists(lattice)
        assert (lattice.parent[0], lattice.added[0]) == (-1, -1)
        for i in range(1, lattice.size):
            assert lattice.added[i] == max(found[i])
            assert found[lattice.parent[i]] == found[i][:-1]


@pytest.mark.parametrize("layers", [63, 64, 65, 130])
def test_more_layers_than_a_word_has_bits(layers: int) -> None:
    # A chain and one more layer parallel to it: 2 (n + 1) downsets, however the sets are stored.
    lattice = lattice_of(graph_only(range(layers + 1), [(v, v + 1) for v in range(layers - 1)]))
    assert lattice.size == 2 * (layers + 1)
    assert lattice.arrays.bits.shape[1] == (layers + 1 + 63) // 64
    found = vertex_lists(lattice)
    assert found == sorted(found, key=lambda row: (len(row), row))
    assert len(set(map(tuple, found))) == lattice.size
    assert found[-1] == list(range(layers + 1))


def test_growth_past_the_first_allocation() -> None:
    assert lattice_of(two_towers(40)).size == 41**2 + 2
    assert lattice_of(graph_only(range(13), [])).size == 2**13


def test_limit() -> None:
    graph = build_graph(graph_only(range(5), []), without_contraction())
    assert build_lattice(graph, 32).size == 32
    with pytest.raises(LimitError, match="more than 31 downsets"):
        build_lattice(graph, 31)


def test_chain_lattice() -> None:
    graph = build_graph(two_towers(2), without_contraction())
    order = [0, 1, 3, 2, 4, 5]
    lattice = chain_lattice(graph, order)
    assert vertex_lists(lattice) == [sorted(order[:i]) for i in range(7)]
    assert lattice.parent.tolist() == [-1, 0, 1, 2, 3, 4, 5]
    assert lattice.added.tolist() == [-1, *order]
    assert lattice.arrays.level_start.tolist() == list(range(8))
    assert_crossing_edges(lattice)


def test_crossing_edges() -> None:
    for instance in small_graphs():
        assert_crossing_edges(lattice_of(instance))


def assert_crossing_edges(lattice: Lattice) -> None:
    """Those from outside to inside, each once."""
    arrays, edges = lattice.arrays, lattice.graph.edges
    assert list(zip(arrays.edge_tail.tolist(), arrays.edge_head.tolist(), strict=True)) == [e[:2] for e in edges]
    for i, row in enumerate(vertex_lists(lattice)):
        crossing = arrays.crossing[arrays.crossing_start[i] : arrays.crossing_start[i + 1]].tolist()
        assert sorted(crossing) == [e for e, (tail, head, _) in enumerate(edges) if tail not in row and head in row]


def test_vertex_level_is_the_size_of_the_least_downset_with_the_vertex() -> None:
    for instance in small_graphs():
        lattice = lattice_of(instance)
        found = vertex_lists(lattice)
        for v in range(lattice.graph.size):
            assert lattice.arrays.vertex_level[v] == min(len(row) for row in found if v in row)


@pytest.mark.parametrize("seed", long_after(5, range(20)))
def test_sums_over_downsets(seed: int) -> None:
    assert_sums(tables(random_instance(seed, most_layers=7).replace(devices=4), contraction=without_contraction()))


@pytest.mark.parametrize("name", named_instances())
def test_sums_over_downsets_of_named_instances(name: str) -> None:
    assert_sums(tables(named_instances()[name]))


def assert_sums(whole: Tables) -> None:
    """Every table of stage sums is the direct sum of least figures over the downset."""
    sums, options = whole.problem.workload.sums, whole.problem.workload.options
    ids = whole.graph.layer_ids

    def least(rows: list[tuple[Tmpc, ...]], name: str) -> float:
        return sum(min((getattr(tmpc, name) for tmpc in row), default=0.0) for row in rows)

    def fastest(row: tuple[Tmpc, ...]) -> Tmpc:
        return min(row, key=lambda tmpc: (tmpc.time_per_sample_s, tmpc.activation_bytes))

    for i, row in enumerate(vertex_lists(whole.lattice)):
        for r, variant in enumerate(options.variants):
            kept = [options.tmpcs[r][v] for v in row]
            assert sums.figures.work_s[i, r] == pytest.approx(least(kept, "time_per_sample_s"))
            assert sums.figures.weights_bytes[i, r] == pytest.approx(least(kept, "weights_bytes"))
            assert sums.figures.least_a[i, r] == pytest.approx(least(kept, "activation_bytes"))
            assert sums.figures.least_b[i, r] == pytest.approx(least(kept, "fixed_bytes"))
            assert sums.figures.fast_a[i, r] == pytest.approx(sum(fastest(k).activation_bytes for k in kept if k))
            assert sums.figures.fast_b[i, r] == pytest.approx(sum(fastest(k).fixed_bytes for k in kept if k))
            assert sums.figures.missing[i, r] == sum(not variant.tmpcs[ids[v]] for v in row)
        times = [
            [(variant.degree, tmpc.time_per_sample_s) for variant in options.variants for tmpc in variant.tmpcs[ids[v]]]
            for v in row
        ]
        assert sums.device_work_s[i] == pytest.approx(sum(min(t * p for t, p in layer) for layer in times))
        assert sums.replica_work_s[i] == pytest.approx(sum(min(p for _, p in layer) for layer in times))


@pytest.mark.parametrize("seed", long_after(5, range(20)))
def test_charges_over_crossing_edges(seed: int) -> None:
    instance = random_instance(seed, most_layers=7).replace(devices=4)
    whole = tables(instance, contraction=without_contraction())
    sums, options, arrays = whole.problem.workload.sums, whole.problem.workload.options, whole.lattice.arrays
    edges = [(tail, head, instance.edges[index]) for tail, head, index in whole.graph.edges]
    for i in range(whole.lattice.size):
        crossing = [edges[e] for e in arrays.crossing[arrays.crossing_start[i] : arrays.crossing_start[i + 1]]]
        for r, tmpcs in enumerate(options.tmpcs):
            incoming = [
                min((edge.communication_bytes + x.forward_sync_bytes[edge.source] for x in tmpcs[head]), default=0.0)
                for _, head, edge in crossing
            ]
            outgoing = [
                min((edge.communication_bytes + x.backward_sync_bytes[edge.target] for x in tmpcs[tail]), default=0.0)
                for tail, _, edge in crossing
            ]
            assert sums.figures.in_bytes[i, r] == pytest.approx(sum(incoming))
            assert sums.figures.out_bytes[i, r] == pytest.approx(sum(outgoing))


def test_a_stage_costs_a_difference_of_sums() -> None:
    """need[I] - cap[J], less what jumps over I \\ J, is the time of the stage on one device."""
    instance = equal_chain(4)
    whole = tables(instance)
    costs = whole.problem.costs
    # Stage {1, 2} at t = 1: 2 * 6 s of work, and one edge in and one out, 2 * 1 byte each at 4 bytes/s.
    outer, inner = 3, 1
    assert costs.need_s[outer, 0] - costs.cap_s[inner, 0] == pytest.approx(12 + 0.5 + 0.5)
    # Weights 2 * 4 bytes at 4 / (N B) = 1 / 4 s per byte.
    assert costs.resync_s[outer, 0] - costs.resync_s[inner, 0] == pytest.approx(2.0)


def test_an_edge_that_jumps_over_a_stage_is_charged_back() -> None:
    instance = graph_only([0, 1, 2], [(0, 1), (1, 2), (0, 2)])
    whole = tables(instance, contraction=without_contraction())
    assert whole.graph.layer_ids == (2, 1, 0)
    costs = whole.problem.costs
    jump = next(e for e, (tail, head, _) in enumerate(whole.graph.edges) if (tail, head) == (2, 0))
    # Stage {1}: 1 s, its two edges 2 * 1 / 4 each; need and cap hold the edge 0 -> 2 as well, twice.
    work_s = costs.need_s[2, 0] - costs.cap_s[1, 0]
    assert work_s - costs.both_s[0, jump] == pytest.approx(1 + 0.5 + 0.5)
    assert costs.both_s[0, jump] == pytest.approx(1.0)


def test_bit_rows_and_members() -> None:
    sets = [[], [0], [63], [64], [0, 5, 64, 99]]
    rows = bit_rows(sets, 100)
    assert rows.dtype == np.uint64
    assert rows.shape == (5, 2)
    assert [members(row) for row in rows] == sets
    assert bit_rows([[]], 0).shape == (1, 1)


def test_offsets() -> None:
    assert offsets([2, 0, 3]).tolist() == [0, 2, 2, 5]
    assert offsets([]).tolist() == [0]
