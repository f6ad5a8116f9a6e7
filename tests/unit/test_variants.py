"""Which configurations a stage may choose from."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from piper_ray.cost.variants import stage_variants, undominated
from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.instance import Instance, Tmpc
from tests.instances import RECOMPUTE, build, instances, tmpc

PLAIN, AGAIN = tmpc(6, 4, 5, 6), tmpc(8, 4, 1, 8, RECOMPUTE)


def instance() -> Instance:
    """Layer 0 has the choice at both degrees, layer 1 only at t = 1 and only plain, layer 2 only at t = 4."""
    return build({0: {1: [PLAIN, AGAIN], 2: [PLAIN, AGAIN]}, 1: {1: [PLAIN]}, 2: {4: [AGAIN]}}, {})


def table(restrictions: Restrictions) -> list[tuple[int, dict[int, list[str]]]]:
    return [
        (variant.degree, {layer: [x.id for x in row] for layer, row in variant.tmpcs.items()})
        for variant in stage_variants(instance(), restrictions)
    ]


V, R = "vanilla", RECOMPUTE


def test_one_variant_for_each_degree() -> None:
    assert table(Restrictions()) == [
        (1, {0: [V, R], 1: [V], 2: []}),
        (2, {0: [V, R], 1: [], 2: []}),
        (4, {0: [], 1: [], 2: [R]}),
    ]


def test_no_tensor_parallelism() -> None:
    assert table(Restrictions(tensor_parallelism=False)) == [(1, {0: [V, R], 1: [V], 2: []})]
    only_two = build({0: {2: [PLAIN]}}, {})
    assert stage_variants(only_two, Restrictions(tensor_parallelism=False)) == ()


def test_data_parallelism_is_no_matter_of_variants() -> None:
    assert table(Restrictions(data_parallelism=False)) == table(Restrictions())


def test_always_and_never_leave_layers_without_the_choice_alone() -> None:
    assert table(Restrictions(recompute=Recompute.ALWAYS)) == [
        (1, {0: [R], 1: [V], 2: []}),
        (2, {0: [R], 1: [], 2: []}),
        (4, {0: [], 1: [], 2: [R]}),
    ]
    assert table(Restrictions(recompute=Recompute.NEVER)) == [
        (1, {0: [V], 1: [V], 2: []}),
        (2, {0: [V], 1: [], 2: []}),
        (4, {0: [], 1: [], 2: [R]}),
    ]


def test_all_or_none_makes_two_variants_where_they_differ() -> None:
    assert table(Restrictions(recompute=Recompute.ALL_OR_NONE)) == [
        (1, {0: [V], 1: [V], 2: []}),
        (1, {0: [R], 1: [V], 2: []}),
        (2, {0: [V], 1: [], 2: []}),
        (2, {0: [R], 1: [], 2: []}),
        (4, {0: [], 1: [], 2: [R]}),
    ]


def ranges(instance: Instance, restrictions: Restrictions = Restrictions()) -> list[tuple[int, int, int, list[str]]]:
    """(t, least d, most d, ids of layer 0), most d up to the largest there can be."""
    return [
        (v.degree, v.least_data_parallel_degree, min(v.most_data_parallel_degree, 99), [x.id for x in v.tmpcs[0]])
        for v in stage_variants(instance, restrictions)
    ]


SHARDED = replace(tmpc(6, 4, 5, 1, "sharded"), least_data_parallel_degree=4)


def test_a_least_degree_makes_a_variant_for_each_range_of_degrees() -> None:
    rows = {1: [PLAIN, SHARDED], 2: [PLAIN]}
    assert ranges(build({0: rows}, {}, devices=8, microbatches=8)) == [
        (1, 1, 3, [V]),
        (1, 4, 99, [V, "sharded"]),
        (2, 1, 99, [V]),
    ]


def test_ranges_that_no_stage_can_have_are_left_out() -> None:
    def of(*rows: Tmpc, devices: int, microbatches: int) -> list[tuple[int, int, int, list[str]]]:
        return ranges(build({0: {1: rows}}, {}, devices=devices, microbatches=microbatches))

    assert of(PLAIN, SHARDED, devices=3, microbatches=8) == [(1, 1, 3, [V])]  # more replicas than devices
    assert of(PLAIN, SHARDED, devices=8, microbatches=3) == [(1, 1, 3, [V])]  # more than microbatches
    least_two = replace(PLAIN, id="two", least_data_parallel_degree=2)
    assert of(PLAIN, least_two, SHARDED, devices=9, microbatches=9) == [  # 9 has no divisor that is 2, and 3 has
        (1, 1, 1, [V]),
        (1, 2, 3, [V, "two"]),
        (1, 4, 99, [V, "two", "sharded"]),
    ]
    assert of(PLAIN, least_two, SHARDED, devices=5, microbatches=5) == [
        (1, 1, 1, [V]),
        (1, 4, 99, [V, "two", "sharded"]),
    ]
    only = build({0: {1: [PLAIN, SHARDED]}}, {}, devices=8, microbatches=8)
    assert ranges(only, Restrictions(data_parallelism=False)) == [(1, 1, 3, [V])]


def test_undominated_by_hand() -> None:
    base = tmpc(5, 5, 5, 5, "base")
    assert undominated((base, replace(base, id="equal"))) == (base,)
    for worse in (tmpc(6, 5, 5, 5), tmpc(5, 6, 5, 5), tmpc(5, 5, 5, 6), tmpc(5, 5, 6, 5)):
        assert undominated((base, worse)) == (base,)
        assert undominated((worse, base)) == (base,)
    for other in (tmpc(6, 4, 5, 5), tmpc(6, 5, 4, 5), tmpc(6, 5, 5, 4)):
        assert undominated((base, other)) == (base, other)
    # a*y + b at y >= 1: (4, 6) is never more than (5, 5); (6, 3) is less at y = 1, more from y = 3 on.
    smaller, trade = tmpc(5, 5, 4, 6, "smaller"), tmpc(5, 5, 6, 3, "trade")
    assert undominated((base, smaller)) == (smaller,)
    assert undominated((base, trade)) == (base, trade)


def test_undominated_looks_at_every_edge() -> None:
    one = Tmpc("one", 1.0, 1.0, 1.0, 1.0, {0: 1.0, 1: 2.0}, {3: 1.0})
    assert undominated((one, replace(one, id="two", forward_sync_bytes={0: 1.0, 1: 2.5}))) == (one,)
    for other in (
        replace(one, id="two", forward_sync_bytes={0: 0.5, 1: 3.0}),
        replace(one, id="two", backward_sync_bytes={3: 0.5}, weights_bytes=1.5),
    ):
        assert undominated((one, other)) == (one, other)


def figures_at(x: Tmpc, y: int, d: int = 1) -> tuple[float, ...]:
    memory_bytes = x.activation_bytes * y + x.fixed_bytes + Fraction(x.shared_bytes) / d
    return (
        x.time_per_sample_s,
        x.weights_bytes,
        memory_bytes,
        *(x.forward_sync_bytes[u] for u in sorted(x.forward_sync_bytes)),
        *(x.backward_sync_bytes[w] for w in sorted(x.backward_sync_bytes)),
    )


def never_worse(one: Tmpc, other: Tmpc) -> bool:
    """At y and d of 1, and at such that only the activation counts, or none of what is shared: memory is linear in y
    and in 1/d.
    """
    return all(
        a <= b
        for y, d in ((1, 1), (1, 10**9), (10**9, 1))
        for a, b in zip(figures_at(one, y, d), figures_at(other, y, d), strict=True)
    )


@given(instances(most_layers=3, most_tmpcs=4))
def test_undominated_against_the_definition(instance: Instance) -> None:
    for layer in instance.layers:
        for row in layer.tmpcs.values():
            assert_undominated(row)


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 4), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_undominated_among_many(figures: list[tuple[int, int, int, int]], rng: Random) -> None:
    row = tuple(tmpc(*figure, name=str(number)) for number, figure in enumerate(figures))
    assert_undominated(row)
    shuffled = tuple(rng.sample(row, len(row)))
    assert {figures_at(x, 1) for x in undominated(row)} == {figures_at(x, 1) for x in undominated(shuffled)}


def assert_undominated(row: tuple[Tmpc, ...]) -> None:
    kept = undominated(row)
    assert [x for x in row if x in kept] == list(kept), "in their order"
    for x in row:
        if x not in kept:
            assert any(never_worse(other, x) for other in kept)
    for x in kept:
        assert not any(never_worse(other, x) for other in kept if other is not x)
    # Of equal ones the first.
    figures = [(figures_at(x, 1), figures_at(x, 2)) for x in row]
    for index, x in enumerate(row):
        assert x not in kept or figures[index] not in figures[:index]
