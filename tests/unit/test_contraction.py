"""Which layers join a neighbour before the lattice is built. That no plan is lost: test_solver_invariances."""

from __future__ import annotations

from dataclasses import replace

from piper_ray.cost.variants import stage_variants
from piper_ray.engine.lattice.contraction import Contraction, contract, without_contraction
from piper_ray.engine.lattice.layer_graph import build_graph
from piper_ray.engine.solve import solve
from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.instance import Instance, Tensor, Tmpc
from tests.instances import RECOMPUTE, build, tmpc
from tests.solver_support import ONE_THREAD, assert_optimal

FREE = {1: [tmpc(0)]}
WORK = {1: [tmpc(1)]}


def keeper_of(
    instance: Instance, restrictions: Restrictions = Restrictions(), *, all_that_is_free: bool = False
) -> dict[int, int]:
    variants = stage_variants(instance, restrictions)
    return dict(contract(instance, variants, all_that_is_free=all_that_is_free).keeper)


def all_merged(instance: Instance) -> dict[int, int]:
    """What is asked for where the lattice is large."""
    assert keeper_of(instance).items() <= keeper_of(instance, all_that_is_free=True).items()
    return keeper_of(instance, all_that_is_free=True)


def test_a_free_source_joins_its_successor() -> None:
    assert keeper_of(build({0: FREE, 1: WORK, 2: WORK}, {(0, 1): 9, (1, 2): 1})) == {0: 1}


def test_a_free_sink_joins_its_predecessor() -> None:
    assert keeper_of(build({0: WORK, 1: WORK, 2: FREE}, {(0, 1): 1, (1, 2): 9})) == {2: 1}


def test_a_chain_of_free_layers_joins_the_first_that_works() -> None:
    instance = build({0: FREE, 1: FREE, 2: FREE, 3: WORK, 4: FREE}, {(0, 1): 1, (1, 2): 1, (2, 3): 1, (3, 4): 1})
    assert keeper_of(instance) == {0: 3, 1: 3, 2: 3, 4: 3}


def test_a_star_of_free_layers() -> None:
    edges = {(0, 3): 1, (1, 3): 1, (2, 3): 1, (3, 4): 1}
    assert keeper_of(build({0: FREE, 1: FREE, 2: FREE, 3: WORK, 4: FREE}, edges)) == {0: 3, 1: 3, 2: 3, 4: 3}


def test_a_free_layer_between_two_stays() -> None:
    assert keeper_of(build({0: WORK, 1: FREE, 2: WORK}, {(0, 1): 1, (1, 2): 1})) == {}


def test_a_free_source_of_two_layers_stays() -> None:
    assert keeper_of(build({0: FREE, 1: WORK, 2: WORK}, {(0, 1): 1, (0, 2): 1})) == {}


def test_a_free_layer_without_edges_stays() -> None:
    assert keeper_of(build({0: FREE, 1: WORK}, {})) == {}


def test_a_layer_that_takes_anything_stays() -> None:
    shared = replace(tmpc(0), shared_bytes=1.0)
    for costly in (tmpc(1), tmpc(0, weights=1), tmpc(0, activation=1), tmpc(0, fixed=1), shared):
        assert keeper_of(build({0: {1: [costly]}, 1: WORK}, {(0, 1): 1}, memory_bytes=0.5)) == {}


def test_what_takes_only_memory_joins_where_memory_cannot_bind() -> None:
    """Up to N = 4 in flight: 4 * 2 + 1 bytes of layer 0 and 3 of layer 1."""
    layers = {0: {1: [tmpc(0, activation=2, fixed=1)]}, 1: {1: [tmpc(1, fixed=3), tmpc(2, fixed=1, name="small")]}}
    for memory_bytes, expected in ((12.0, {0: 1}), (11.9, {})):
        assert all_merged(build(layers, {(0, 1): 1}, memory_bytes=memory_bytes)) == expected


def test_a_free_layer_joins_the_first_of_its_successors_if_the_others_cost_nothing() -> None:
    layers = {0: FREE, 1: WORK, 2: WORK, 3: WORK}
    edges = {(0, 1): 5, (1, 2): 1, (2, 3): 1}
    assert all_merged(build(layers, edges | {(0, 3): 0})) == {0: 1}
    assert all_merged(build(layers, edges | {(0, 3): 1})) == {}
    assert all_merged(build(layers, {(0, 1): 0, (0, 2): 0, (1, 3): 1, (2, 3): 1})) == {}  # 1 and 2 side by side


def test_a_free_layer_joins_the_last_of_its_predecessors_if_the_others_cost_nothing() -> None:
    layers = {0: WORK, 1: WORK, 2: WORK, 3: FREE}
    edges = {(0, 1): 1, (1, 2): 1, (2, 3): 5}
    assert all_merged(build(layers, edges | {(0, 3): 0})) == {3: 2}
    assert all_merged(build(layers, edges | {(0, 3): 1})) == {}


def test_free_layers_between_others_join_if_their_edges_cost_nothing() -> None:
    """A constant that feeds one free layer parallel to each step of a chain."""
    layers = {0: FREE, 1: FREE, 2: FREE, 3: WORK, 4: WORK}
    edges = {(0, 1): 0, (0, 2): 0, (1, 3): 0, (2, 4): 0, (3, 4): 1}
    assert all_merged(build(layers, edges)) == {0: 3, 1: 3, 2: 4}


def test_an_extra_makes_an_edge_dear() -> None:
    layers = {0: FREE, 1: WORK, 2: {1: [Tmpc("vanilla", 1.0, 0.0, 0.0, 0.0, {0: 3.0}, {})]}}
    assert all_merged(build(layers, {(0, 1): 1, (1, 2): 1, (0, 2): 0})) == {}


def test_a_tensor_must_have_both_among_its_ends() -> None:
    instance = build({0: FREE, 1: WORK, 2: WORK}, {(0, 1): 0, (1, 2): 0})
    assert all_merged(replace(instance, tensors=(Tensor((0, 2), 1.0, 0.0),))) == {}
    assert all_merged(replace(instance, tensors=(Tensor((0, 2), 0.0, 0.0),))) == {0: 1}
    assert all_merged(replace(instance, tensors=(Tensor((2, 0, 1), 1.0, 0.0),))) == {0: 1}


def test_of_edges_between_two_groups_the_dear_one_is_kept() -> None:
    instance = build({0: FREE, 1: WORK, 2: WORK}, {(0, 2): 0, (0, 1): 7, (1, 2): 3})
    graph = build_graph(instance, Contraction({0: 1}))
    assert graph.edges == ((1, 0, 2),)
    assert graph.successors == ((), (0,))


def test_free_layers_alone_leave_one() -> None:
    keeper = keeper_of(build({0: FREE, 1: FREE, 2: FREE}, {(0, 1): 1, (1, 2): 1}))
    assert len(keeper) == 2
    assert len(set(keeper.values())) == 1
    assert not keeper.keys() & set(keeper.values())


def test_free_in_every_degree_of_the_neighbour() -> None:
    both = {1: [tmpc(1)], 2: [tmpc(1)]}
    assert keeper_of(build({0: FREE, 1: both}, {(0, 1): 1})) == {}
    assert keeper_of(build({0: {1: [tmpc(0)], 2: [tmpc(1)]}, 1: both}, {(0, 1): 1})) == {}
    assert keeper_of(build({0: {1: [tmpc(0)], 2: [tmpc(0)]}, 1: both}, {(0, 1): 1})) == {0: 1}
    # What it costs where the neighbour cannot be does not matter.
    assert keeper_of(build({0: {1: [tmpc(0)], 2: [tmpc(1)]}, 1: WORK}, {(0, 1): 1})) == {0: 1}


def test_restrictions_count() -> None:
    """With recomputation forbidden the free configuration is gone."""
    instance = build({0: {1: [tmpc(1), tmpc(0, name=RECOMPUTE)]}, 1: WORK}, {(0, 1): 1})
    assert keeper_of(instance) == {0: 1}
    assert keeper_of(instance, Restrictions(recompute=Recompute.NEVER)) == {}


def test_members_are_in_file_order() -> None:
    instance = build({5: FREE, 3: WORK, 9: FREE, 1: WORK}, {(5, 3): 1, (3, 1): 1, (1, 9): 1})
    contraction = contract(instance, stage_variants(instance, Restrictions()))
    assert contraction.members(instance) == {3: (5, 3), 1: (9, 1)}
    assert without_contraction().members(instance) == {5: (5,), 3: (3,), 9: (9,), 1: (1,)}


def test_edges_inside_a_group_vanish() -> None:
    instance = build({0: FREE, 1: WORK, 2: WORK}, {(0, 1): 9, (1, 2): 1})
    graph = build_graph(instance, Contraction({0: 1}))
    assert graph.layer_ids == (2, 1)
    assert graph.edges == ((1, 0, 1),)


def test_free_tmpc_is_the_first_that_is_free() -> None:
    options = [tmpc(1, name="a"), tmpc(0, weights=1, name="b"), tmpc(0, name="c"), tmpc(0, name="d")]
    contraction = Contraction({})
    found = contraction.free_tmpc(options)
    assert found is not None
    assert found.id == "c"
    assert contraction.free_tmpc(options[:2]) is None
    assert contraction.free_tmpc([]) is None


def test_where_memory_is_ample_a_free_tmpc_may_take_some() -> None:
    found = Contraction({}, ample_memory=True).free_tmpc([tmpc(0, weights=1, name="a"), tmpc(0, fixed=9, name="b")])
    assert found is not None
    assert found.id == "b"


def test_what_a_free_tmpc_sends_does_not_matter() -> None:
    sender = Tmpc("vanilla", 0.0, 0.0, 0.0, 0.0, {}, {1: 100.0})
    instance = build({0: {1: [sender]}, 1: WORK}, {(0, 1): 7})
    assert keeper_of(instance) == {0: 1}


def test_the_plan_has_all_layers_back() -> None:
    """Layer 0 goes with 1 and runs its free configuration, although a slower one comes first."""
    instance = build(
        {0: {1: [tmpc(1, name="slow"), tmpc(0, name="free")]}, 1: WORK, 2: WORK, 3: FREE},
        {(0, 1): 9, (1, 2): 0, (2, 3): 9},
        devices=2,
        microbatches=1,
    )
    solution = solve(instance, options=ONE_THREAD)
    assert_optimal(instance, solution)
    assert solution.plan is not None
    assert solution.stats.contracted_layers == 2
    assert [stage.layers for stage in solution.plan.stages] == [(0, 1, 2, 3)]
    assert solution.plan.stages[0].tmpc_ids[0] == "free"
