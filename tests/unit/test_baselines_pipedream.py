"""PipeDream's planner: values worked out by hand, NOAM, levels, and what it refuses."""

from __future__ import annotations

import pytest

from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.errors import InfeasibleError, LimitError, UsageError
from piper_ray.model.instance import Instance
from piper_ray.planners import Level, Partition, PipeDream, States, plan
from piper_ray.planners.pipedream import optimum as states_module
from tests.instances import build, equal_chain, named_instances, parallel_branches, tmpc, two_towers


def uneven_pair(**cluster: float) -> Instance:
    """Two layers: 6 s without weights, then 2 s with 8 bytes of them; 1 byte between, 4 bytes/s."""
    return build({0: {1: [tmpc(6)]}, 1: {1: [tmpc(2, 8)]}}, {(0, 1): 1.0}, **cluster)  # type: ignore[arg-type]


def test_a_partition_by_hand() -> None:
    # One stage on 4 machines: (8 + 4 * 3 * 8 / (4 * 4)) / 4 = 3.5 s. Cut: 6 / 3 = 2 s, and 2 s alone on one machine
    # that receives for 2 * 1 / 4 = 0.5 s.
    found = PipeDream().partition(uneven_pair(devices=4))
    assert found == Partition(stages=((0,), (1,)), replication=(3, 1), time_per_stage_s=2.0, states=2)
    assert found.noam == 2  # 4 machines / 3, rounded up


def test_activations_count_unless_they_are_left_out() -> None:
    instance = build({0: {1: [tmpc(4, 8)]}, 1: {1: [tmpc(2, 8)]}}, {(0, 1): 12.0}, devices=2)
    # Whole: (6 + 4 * 16 / (4 * 2)) / 2 = 7 s, or 6 s on one machine. Cut: 4 s, but 2 * 12 / 4 = 6 s to transfer.
    assert PipeDream().partition(instance).time_per_stage_s == 6.0
    assert PipeDream(activation_compression_ratio=None).partition(instance).time_per_stage_s == 4.0
    assert PipeDream(activation_compression_ratio=1.25).partition(instance).time_per_stage_s == pytest.approx(4.8)


@pytest.mark.parametrize(
    ("replication", "noam"), [((1,), 1), ((4,), 1), ((3, 1), 2), ((1, 1, 1, 1), 4), ((13, 2, 1), 2), ((2, 5), 4)]
)
def test_optimal_number_of_minibatches_in_flight(replication: tuple[int, ...], noam: int) -> None:
    assert Partition(((0,),) * len(replication), replication, 1.0, 1).noam == noam


def test_two_levels_by_hand() -> None:
    """Machines of 2 devices at 8 bytes/s, two of them at 1 byte/s, without activations.

    In one machine: both layers twice (8 + 4 * 8 / (8 * 2)) / 2 = 5 s, or cut, 6 s. On both machines the whole would
    take (5 + 4 * 8 / (1 * 2 * 2)) / 2 = 6.5 s; cut, the first layer twice in its machine takes 3 s and the second
    (2 + 4 * 8 / (8 * 2)) / 2 = 2 s.
    """
    levels = (Level(2, 8.0), Level(2, 1.0))
    found = PipeDream(levels, activation_compression_ratio=None).partition(uneven_pair(devices=4))
    assert found == Partition(stages=((0,), (1,)), replication=(2, 2), time_per_stage_s=3.0, states=2)


def test_replications_of_a_plan_divide_the_batch() -> None:
    # N = 4: three replicas are not allowed; (2, 1) with 6 / 2 = 3 s is next.
    result = plan(uneven_pair(devices=4, microbatches=4), "pipedream")
    assert result.plan is not None
    assert [stage.data_parallel_degree for stage in result.plan.stages] == [2, 1]
    assert "replication 2, 1, NOAM 2, no recomputation, 2 states; PipeDream's own estimate 3 s" in result.note


def test_no_more_replicas_than_microbatches() -> None:
    result = plan(uneven_pair(devices=4, microbatches=3), PipeDream((Level(4, 4.0),)))
    assert result.plan is not None
    assert result.plan.data_parallel_sum <= 3


def test_recomputation_where_nothing_fits_without() -> None:
    # All layers in one stage at y = 1 take 3 * (5 + 6) = 33 bytes, recomputing 3 * (1 + 8) = 27.
    instance = equal_chain(3, devices=1, memory_bytes=27.0)
    assert "recomputation everywhere" in plan(instance, "pipedream").note
    never = plan(instance, "pipedream", restrictions=Restrictions(recompute=Recompute.NEVER))
    assert (never.plan, never.note) == (None, "no recomputation: no partition fits in memory")


def test_without_data_parallelism() -> None:
    restrictions = Restrictions(data_parallelism=False)
    assert set(PipeDream().partition(equal_chain(6, devices=4), restrictions).replication) == {1}


def test_layers_that_cost_nothing() -> None:
    found = PipeDream().partition(named_instances()["no cost at all"])
    assert (found.time_per_stage_s, found.replication) == (0.0, (1,))


def test_states_that_pipedream_grows_start_from_one_source() -> None:
    towers = two_towers(2)  # 10 downsets but the empty one; PipeDream's are the same: one source reaches all
    assert PipeDream(states=States.SINGLE_SOURCE).partition(towers).states == 10
    assert PipeDream().partition(towers).states == 10
    # Two chains of two layers: from the first source the second chain is not reached, but the end is a state too.
    apart = named_instances()["disconnected"]
    assert PipeDream(states=States.SINGLE_SOURCE).partition(apart).states == 3
    assert PipeDream().partition(apart).states == 8
    assert PipeDream(states=States.ORDER).partition(apart).states == 4


def test_only_one_tensor_parallel_degree() -> None:
    with pytest.raises(InfeasibleError, match="no TMPC at tensor-parallel degree 1"):
        PipeDream().partition(named_instances()["no t = 1"])
    assert plan(named_instances()["no t = 1"], "pipedream").plan is None


def test_more_machines_than_devices() -> None:
    with pytest.raises(UsageError, match="the levels make 8 machines, but there are 4 devices"):
        plan(equal_chain(2, devices=4), PipeDream((Level(2, 1.0), Level(4, 1.0))))


@pytest.mark.parametrize(("machines", "bandwidth"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_levels_that_make_no_sense(machines: int, bandwidth: float) -> None:
    with pytest.raises(UsageError, match="at least 1 machine"):
        Level(machines, bandwidth)


def test_a_ratio_that_makes_no_sense() -> None:
    with pytest.raises(UsageError, match="ratio must be above 0, not 0"):
        PipeDream(activation_compression_ratio=0.0)


@pytest.mark.parametrize("states", [States.DOWNSETS, States.SINGLE_SOURCE])
@pytest.mark.parametrize("limit", ["STATE_LIMIT", "PAIR_LIMIT"])
def test_too_many_states(states: States, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_module, limit, 100)
    instance = parallel_branches(1, 8)
    with pytest.raises(LimitError, match=rf"of kind '{states.value}'.*states='order'"):
        plan(instance, PipeDream(states=states))
    assert plan(instance, PipeDream(states=States.ORDER)).plan is not None


def test_too_much_work_for_lower_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper_ray.planners.pipedream.optimum._SEGMENT_WORK_LIMIT", 100.0)
    with pytest.raises(LimitError, match="with levels of machines has too many states, 9"):
        plan(equal_chain(8), PipeDream((Level(2, 1.0), Level(2, 1.0))))
    assert plan(equal_chain(8), PipeDream((Level(4, 1.0),))).plan is not None
