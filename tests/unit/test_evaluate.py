"""A plan's cost against figures worked out by hand, and each rule that a plan can break."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from piper_ray.evaluate import MEMORY_TOLERANCE, binding, evaluate, in_flight_microbatches, objective_s
from piper_ray.model.errors import InvalidPlan
from piper_ray.model.instance import Instance, Tensor, Tmpc
from piper_ray.model.plan import Plan, Stage
from tests.instances import build, tmpc


def chain(**cluster: float) -> Instance:
    """Layers 10 -> 20 -> 30 and an edge 10 -> 30. B is 8, N is 4, K is 6."""
    instance = build(
        {
            10: {1: [tmpc(6, 10, 4, 7)], 2: [tmpc(4, 5, 2, 4)]},
            20: {1: [tmpc(8, 20, 1, 9), tmpc(9, 20, 0, 5, "lean")], 2: [tmpc(5, 10, 1, 5)]},
            30: {1: [Tmpc("wide", 2.0, 6.0, 2.0, 1.0, forward_sync_bytes={20: 3.0})]},
        },
        {(10, 20): 16, (20, 30): 4, (10, 30): 1},
        devices=6,
        microbatches=4,
        memory_bytes=100,
        bandwidth_bytes_per_s=8,
    )
    return replace(instance, **cluster)  # type: ignore[arg-type]


def stage(layers: Mapping[int, str], d: int = 1, t: int = 1) -> Stage:
    return Stage(tuple(layers), d, t, dict(layers))


PLAN = Plan(
    (
        stage({10: "vanilla"}, d=2, t=2),
        stage({20: "vanilla", 30: "wide"}, d=2),
    )
)


def test_two_stages_worked_out_by_hand() -> None:
    result = evaluate(chain(), PLAN)
    first, second = result.stages
    # Stage 1 at d = 2, t = 2: compute 4/2 = 2. The cut is 10->20 and 10->30: 2 * (16 + 1) = 34 bytes, no extras of
    # layer 10, 34 / (2 * 8) = 2.125. Resync 4 * (1/2) * 5 / (4 * 8) = 0.3125.
    assert (first.compute_s, first.communication_s, first.resync_s) == (2.0, 2.125, 0.3125)
    assert first.time_s == 4.4375
    # s = 2 + 2, y = 4/2 = 2: memory 2 * 2 + 4 = 8.
    assert (first.in_flight_microbatches, first.memory_bytes, first.devices) == (2, 8.0, 4)
    # Stage 2 at d = 2: compute (8 + 2)/2 = 5. The same two edges; layer 30's fw of 3 is for 20, which is inside.
    # Resync 4 * (1/2) * 26 / 32 = 1.625.
    assert (second.compute_s, second.communication_s, second.resync_s) == (5.0, 2.125, 1.625)
    # s = 2, y = 1: memory (1 + 2) * 1 + 9 + 1 = 13.
    assert (second.in_flight_microbatches, second.memory_bytes, second.devices) == (1, 13.0, 2)
    assert (result.time_per_sample_s, result.bottleneck) == (8.75, 1)
    assert (result.devices, result.data_parallel_sum) == (6, 4)


def test_an_edge_that_crosses_pays_the_extras_of_both_its_layers() -> None:
    plan = Plan((stage({10: "vanilla", 20: "lean"}), stage({30: "wide"})))
    first, second = evaluate(chain(), plan).stages
    # Both stages pay 20->30 (4) and 10->30 (1), twice; only layer 30 has an extra, fw(20) = 3.
    assert first.communication_s == 2 * (4 + 1) / 8
    assert second.communication_s == 2 * (4 + 3 + 1) / 8
    # d = 1 has no copies to bring in step.
    assert (first.resync_s, second.resync_s) == (0.0, 0.0)


def test_one_stage_crosses_nothing_and_a_missing_extra_is_zero() -> None:
    one = evaluate(chain(), Plan((stage({10: "vanilla", 20: "lean", 30: "wide"}, d=4),)))
    assert one.stages[0].communication_s == 0.0
    # (6 + 9 + 2)/4, and 4 * (3/4) * 36 / (4 * 8)
    assert one.time_per_sample_s == 4.25 + 3.375
    bare = build({0: {1: [tmpc(1)]}, 1: {1: [tmpc(1)]}}, {(0, 1): 4})
    bare = replace(bare, layers=tuple(replace(layer, tmpcs={1: (tmpc(1),)}) for layer in bare.layers))
    assert evaluate(bare, Plan((stage({0: "vanilla"}), stage({1: "vanilla"})))).time_per_sample_s == 1 + 2 * 4 / 4


@pytest.mark.parametrize(
    ("suffix_sum", "d", "y"), [(1, 1, 1), (4, 1, 4), (4, 2, 2), (5, 2, 3), (6, 5, 2), (5, 5, 1), (2048, 16, 128)]
)
def test_in_flight_is_the_sum_over_d_rounded_up(suffix_sum: int, d: int, y: int) -> None:
    assert in_flight_microbatches(suffix_sum, d) == y


def test_the_objective_is_the_slowest_stage() -> None:
    assert objective_s([1.0, 3.0, 2.0]) == 3.0


def test_what_binds() -> None:
    # Memory in use is 8 and 13 (see above).
    assert [s.binding for s in evaluate(chain(memory_bytes=14.0), PLAN).stages] == [(), ("time",)]
    assert [s.binding for s in evaluate(chain(memory_bytes=13.5), PLAN).stages] == [(), ("time", "memory")]
    plan = Plan((stage({10: "vanilla"}), stage({20: "lean", 30: "wide"}, d=4)))
    # Stage 1: 6 + 2 * 17/8 = 10.25 s with y = 5, 27 bytes; stage 2 is faster, 8 bytes.
    assert [s.binding for s in evaluate(chain(memory_bytes=28.0, microbatches=8), plan).stages] == [
        ("time", "memory"),
        (),
    ]
    assert binding(100.0, 10.0, 9.991, 94.9) == ("time",)
    assert binding(100.0, 10.0, 9.989, 95.0) == ("memory",)


def test_memory_may_fit_exactly_but_for_rounding() -> None:
    assert evaluate(chain(memory_bytes=13.0), PLAN).stages[1].memory_bytes == 13.0
    assert evaluate(chain(memory_bytes=13.0 * (1 - MEMORY_TOLERANCE / 2)), PLAN).stages[1].memory_bytes == 13.0
    assert violations(PLAN, chain(memory_bytes=13.0 * (1 - 2 * MEMORY_TOLERANCE))) == [
        "stage 2: needs 13 bytes on each device with 1 microbatches in flight, 2.6e-08 more than the 13 there are"
    ]


def violations(plan: Plan, instance: Instance | None = None) -> list[str]:
    with pytest.raises(InvalidPlan) as caught:
        evaluate(instance or chain(), plan)
    assert all(text in str(caught.value) for text in caught.value.violations)
    assert caught.value.exit_code == 6
    return list(caught.value.violations)


FRONT = stage({10: "vanilla", 20: "vanilla"})
BACK = stage({30: "wide"})


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ([], ["layer 10 is in no stage", "layer 20 is in no stage", "layer 30 is in no stage"]),
        ([FRONT], ["layer 30 is in no stage"]),
        ([FRONT, stage({}), BACK], ["stage 2 is empty"]),
        ([FRONT, stage({20: "vanilla", 30: "wide"})], ["layer 20 is in stage 1 and again in stage 2"]),
        ([FRONT, replace(BACK, layers=(30, 30))], ["layer 30 is listed twice in stage 2"]),
        ([FRONT, stage({30: "wide", 40: "wide"})], ["stage 2: layer 40 is not in the instance"]),
        (
            [BACK, FRONT],
            [
                "edge 20 -> 30 runs backwards, from stage 2 to stage 1",
                "edge 10 -> 30 runs backwards, from stage 2 to stage 1",
            ],
        ),
        # Not contiguous: 10 -> 20 -> 30 leaves the stage and comes back.
        (
            [stage({10: "vanilla", 30: "wide"}), stage({20: "vanilla"})],
            ["edge 20 -> 30 runs backwards, from stage 2 to stage 1"],
        ),
        ([FRONT, replace(BACK, data_parallel_degree=0)], ["stage 2: data-parallel degree 0 is less than 1"]),
        ([replace(FRONT, data_parallel_degree=-2), BACK], ["stage 1: data-parallel degree -2 is less than 1"]),
        (
            [FRONT, replace(BACK, data_parallel_degree=3)],
            ["stage 2: data-parallel degree 3 does not divide the 4 microbatches"],
        ),
        (
            [FRONT, replace(BACK, tensor_parallel_degree=0)],
            [
                "stage 2: tensor-parallel degree 0 is less than 1",
                "stage 2: layer 30 has no TMPC at tensor-parallel degree 0",
            ],
        ),
        (
            [FRONT, replace(BACK, tensor_parallel_degree=2)],
            ["stage 2: layer 30 has no TMPC at tensor-parallel degree 2"],
        ),
        (
            [stage({10: "vanilla", 20: "slim"}), BACK],
            ["stage 1: layer 20 has no TMPC 'slim' at tensor-parallel degree 1, only 'vanilla', 'lean'"],
        ),
        ([FRONT, replace(BACK, tmpc_ids={})], ["stage 2: layer 30 has no TMPC chosen"]),
        (
            [FRONT, replace(BACK, tmpc_ids={30: "wide", 10: "vanilla"})],
            ["stage 2: a TMPC is chosen for layer 10, not in this stage"],
        ),
        (
            [stage({10: "vanilla", 20: "vanilla"}, d=2, t=2), stage({30: "wide"}, d=4)],
            [
                "the plan uses 8 devices, 6 are there",
                "the data-parallel degrees sum to 6, more than 4, the lesser of 4 microbatches and 6 devices",
            ],
        ),
    ],
)
def test_each_violation_is_named(stages: list[Stage], expected: list[str]) -> None:
    found = violations(Plan(tuple(stages)))
    assert found == expected


def test_what_replicas_share_is_divided_by_their_number() -> None:
    """Layer 10 holds 2 * 4 + 7 and a share of 12 bytes in two replicas, 5 * 4 + 7 with a share in one."""
    shared = replace(tmpc(6, 10, 4, 7), shared_bytes=12.0)
    instance = chain(microbatches=8)
    instance = replace(instance, layers=(replace(instance.layers[0], tmpcs={1: (shared,)}), *instance.layers[1:]))
    behind = stage({20: "vanilla", 30: "wide"}, d=2)
    for d, expected in ((1, 3 * 4 + 7 + 12.0), (2, 2 * 4 + 7 + 6.0), (4, 2 * 4 + 7 + 3.0)):
        found = evaluate(instance, Plan((stage({10: "vanilla"}, d=d), behind)))
        assert found.stages[0].memory_bytes == expected
    tight = instance.replace(memory_bytes=30.9)
    assert violations(Plan((stage({10: "vanilla"}), behind)), tight) == [
        "stage 1: needs 31 bytes on each device with 3 microbatches in flight, 0.1 more than the 31 there are"
    ]


def test_a_tmpc_needs_as_many_replicas_as_it_says() -> None:
    instance = chain()
    sharded = replace(tmpc(8, 20, 1, 2, "sharded"), least_data_parallel_degree=4)
    instance = replace(instance, layers=(*instance.layers[:1], replace(instance.layers[1], tmpcs={1: (sharded,)}),
                                         *instance.layers[2:]))  # fmt: skip
    for d in (1, 2):
        assert violations(Plan((stage({10: "vanilla", 20: "sharded", 30: "wide"}, d=d),)), instance) == [
            f"stage 1: TMPC 'sharded' of layer 20 needs a data-parallel degree of at least 4, the stage has {d}"
        ]
    assert evaluate(instance, Plan((stage({10: "vanilla", 20: "sharded", 30: "wide"}, d=4),))).devices == 4


def test_a_tensor_is_paid_once_in_each_stage_with_some_of_its_ends() -> None:
    """B = 8: a tensor of 24 + 8 bytes costs 4 more wherever it is cut, in addition to the edges."""
    plain = chain(devices=3)
    tensor = Tensor((10, 20, 30), 24.0, 8.0)
    together = Plan((stage({10: "vanilla"}), stage({20: "vanilla", 30: "wide"})))
    apart = Plan((stage({10: "vanilla"}), stage({20: "vanilla"}), stage({30: "wide"})))
    for plan in (together, apart):
        for with_tensor, without in zip(
            evaluate(replace(plain, tensors=(tensor,)), plan).stages, evaluate(plain, plan).stages, strict=True
        ):
            assert with_tensor.communication_s == without.communication_s + 4.0
    whole = Plan((stage({10: "vanilla", 20: "vanilla", 30: "wide"}),))
    assert evaluate(replace(plain, tensors=(tensor,)), whole) == evaluate(plain, whole)
    # An end that is no neighbour counts as any other.
    ends = replace(plain, tensors=(Tensor((30, 10), 24.0, 8.0),))
    extra = [one.communication_s - other.communication_s for one, other in zip(
        evaluate(ends, apart).stages, evaluate(plain, apart).stages, strict=True)]  # fmt: skip
    assert extra == [4.0, 0.0, 4.0]


def test_data_parallel_degrees_may_not_sum_to_more_than_the_devices_either() -> None:
    # Two devices, d summing to 3: both limits are broken.
    plan = Plan((stage({10: "vanilla", 20: "vanilla"}, d=2), BACK))
    assert violations(plan, chain(devices=2)) == [
        "the plan uses 3 devices, 2 are there",
        "the data-parallel degrees sum to 3, more than 2, the lesser of 4 microbatches and 2 devices",
    ]


def test_memory_over_the_limit_is_told_to_the_byte() -> None:
    # d = 1 and 4: stage 1 holds y = 5 microbatches, (4 + 1) * 5 + 7 + 9 = 41; stage 2 holds 1, 2 + 1 = 3.
    plan = Plan((FRONT, replace(BACK, data_parallel_degree=4)))
    assert violations(plan, chain(memory_bytes=40.0, microbatches=8)) == [
        "stage 1: needs 41 bytes on each device with 5 microbatches in flight, 1 more than the 40 there are"
    ]


def test_all_violations_are_listed_at_once() -> None:
    plan = Plan((stage({30: "wide"}, d=3), stage({10: "thin"}, t=4), stage({})))
    assert violations(plan, chain(memory_bytes=1.0)) == [
        "stage 3 is empty",
        "layer 20 is in no stage",
        "edge 10 -> 30 runs backwards, from stage 2 to stage 1",
        "stage 1: data-parallel degree 3 does not divide the 4 microbatches",
        "the plan uses 8 devices, 6 are there",
        "the data-parallel degrees sum to 5, more than 4, the lesser of 4 microbatches and 6 devices",
        "stage 2: layer 10 has no TMPC at tensor-parallel degree 4",
        "stage 1: needs 5 bytes on each device with 2 microbatches in flight, 4 more than the 1 there are",
    ]
