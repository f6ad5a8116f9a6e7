"""Which layers join a neighbour before the lattice is built. That no plan is lost: test_solver_invariances."""

from __future__ import annotations

from piper_ray.lattice.contraction import Contraction, contract, free_tmpc, without_contraction
from piper_ray.lattice.graph import build_graph
from piper_ray.model import Instance, Tmpc
from piper_ray.restrictions import Recompute, Restrictions
from piper_ray.solver import solve
from piper_ray.variants import stage_variants
from tests.instances import RECOMPUTE, build, tmpc
from tests.solver_support import ONE_THREAD, assert_optimal

FREE = {1: [tmpc(0)]}
WORK = {1: [tmpc(1)]}


def keeper_of(instance: Instance, restrictions: Restrictions = Restrictions()) -> dict[int, int]:
    return dict(contract(instance, stage_variants(instance, restrictions)).keeper)


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
    for costly in (tmpc(1), tmpc(0, weights=1), tmpc(0, activation=1), tmpc(0, fixed=1)):
        assert keeper_of(build({0: {1: [costly]}, 1: WORK}, {(0, 1): 1})) == {}


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
    found = free_tmpc(options)
    assert found is not None
    assert found.id == "c"
    assert free_tmpc(options[:2]) is None
    assert free_tmpc([]) is None


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
