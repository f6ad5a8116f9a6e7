"""The baselines of equal runs: which layers repeat, what is tried, values worked out by hand, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.errors import LimitError, UsageError
from piper_ray.model.instance import Edge, Instance, Layer
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.planners import PLANNERS, DataParallel, EqualRuns, Megatron, PipeDream2BW, PiperPublished, plan
from piper_ray.planners.equal_runs import held_on
from piper_ray.planners.runs import run_order, topological_order, uniform_choices
from piper_ray.simulate.actions import ActionKind, flush_lists
from tests.instances import RECOMPUTE, VANILLA, build, equal_chain, named_instances, tmpc

ALWAYS, NEVER = Restrictions(recompute=Recompute.ALWAYS), Restrictions(recompute=Recompute.NEVER)


def named(instance: Instance, names: dict[int, str]) -> Instance:
    return replace(instance, layers=tuple(Layer(layer.id, names[layer.id], layer.tmpcs) for layer in instance.layers))


def language_model(**cluster: float) -> Instance:
    """Embedding 0 and mask 1, which every block reads, blocks 2 to 5, head 6; blocks differ a little in time."""
    tmpcs = {v: {1: [tmpc(1, 1, 1, 1)]} for v in (6, 0, 1)}
    tmpcs |= {
        v: {1: [tmpc(4 + v / 8, 1, 2, 1), tmpc(5, 1, 1, 1, RECOMPUTE)], 2: [tmpc(3, 1, 1, 1)]} for v in (2, 3, 4, 5)
    }
    edges = {(0, 2): 1.0} | {(1, v): 1.0 for v in (2, 3, 4, 5)} | {(v, v + 1): 1.0 for v in (2, 3, 4, 5)}
    names = {0: "embedding", 1: "tensor", 6: "head"} | dict.fromkeys((2, 3, 4, 5), "block")
    return replace(named(build(tmpcs, edges), names), **cluster)  # type: ignore[arg-type]


# --- which layers repeat ---------------------------------------------------------------------------------------------


def test_repeated_layers_by_name() -> None:
    order = run_order(language_model())
    assert order.repeated
    assert (order.before, order.after) == (2, 1)
    assert set(order.layers[:2]) == {0, 1}
    assert order.layers[2:] == (2, 3, 4, 5, 6)


def test_repeated_layers_by_figures_where_every_layer_has_its_own_name() -> None:
    order = run_order(equal_chain(5))
    assert order.repeated
    assert (order.layers, order.before, order.after) == ((0, 1, 2, 3, 4), 0, 0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({4: "other"}, "a layer of another kind between"),
        ({v: f"layer {v}" for v in range(7)}, "no two names or figures alike"),
    ],
)
def test_a_broken_chain_does_not_repeat(change: dict[int, str], why: str) -> None:
    instance = language_model()
    names = {layer.id: layer.name for layer in instance.layers}
    order = run_order(named(instance, names | change))
    assert not order.repeated, why
    assert (order.before, order.between) == (0, 7)


def test_repeated_layers_hold_half_of_the_work() -> None:
    def with_head(time_s: float) -> Instance:
        return build(
            {**{v: {1: [tmpc(2)]} for v in range(3)}, 3: {1: [tmpc(time_s)]}}, {(v, v + 1): 1 for v in range(3)}
        )

    assert run_order(with_head(6)).repeated
    assert not run_order(with_head(6.5)).repeated


def test_side_by_side_layers_do_not_repeat() -> None:
    assert not run_order(named_instances()["no edges"]).repeated


def test_topological_order_takes_the_last_ready_layer_first() -> None:
    # Sources 2 and 5 in file order: 5 first. It frees 1, then 4; 4 is taken first. 2 frees 3.
    layers = tuple(Layer(v, "", {1: (tmpc(1),)}) for v in (2, 5, 1, 4, 3))
    edges = tuple(Edge(u, v, 1.0) for u, v in ((5, 1), (5, 4), (2, 3)))
    assert topological_order(Instance(layers, edges, 1, 1, 1.0, 1.0)) == [5, 4, 1, 2, 3]


# --- what is tried ---------------------------------------------------------------------------------------------------


def test_one_choice_for_each_degree_and_role() -> None:
    fast, slow = tmpc(3), tmpc(5, name="offload")
    again = tmpc(6, name=RECOMPUTE)
    instance = build({0: {1: [slow, fast, again], 2: [fast]}, 1: {1: [fast], 2: [fast, again], 4: [fast]}}, {})

    def found(restrictions: Restrictions) -> list[tuple[int, str, str]]:
        return [
            (choice.degree, choice.tmpcs[0].id, choice.tmpcs[1].id)
            for choice in uniform_choices(instance, restrictions)
        ]

    v, r = VANILLA, RECOMPUTE
    assert found(Restrictions()) == [(1, v, v), (1, r, v), (2, v, v), (2, v, r)]
    assert found(Restrictions(recompute=Recompute.ALL_OR_NONE)) == found(Restrictions())
    assert found(NEVER) == [(1, v, v), (2, v, v)]
    assert found(ALWAYS) == [(1, r, v), (2, v, r)]
    assert found(Restrictions(tensor_parallelism=False)) == [(1, v, v), (1, r, v)]


def test_runs_of_repeated_layers() -> None:
    """Two runs of 2 blocks on four devices: the first stage, with embedding and mask, is the slower one.

    It computes 1 + 1 + 4.25 + 4.375 = 10.625 s and sends 2 (1 + 1 + 1) bytes (the mask twice, block 3 once) at 4 B/s:
    12.125 s. On d = 2 half of that, and 4 (1/2) 4 / (4 * 4) = 0.5 s for the weights: 6.5625 s.
    """
    grid = EqualRuns(runs=(2,), tensor_parallel_degrees=(1,))
    result = plan(language_model(), grid, restrictions=NEVER)
    assert result.plan is not None
    assert [stage.layers for stage in result.plan.stages] == [(0, 1, 2, 3), (6, 4, 5)]  # in file order
    assert result.time_per_sample_s == 6.5625
    assert result.tried == 2  # d = 1 and 2; 4 is too many
    assert result.note == "2 stages, d = 2, t = 1, no recomputation"


def test_the_last_runs_are_longer() -> None:
    result = plan(equal_chain(5, devices=3), EqualRuns(runs=(3,)))
    assert result.plan is not None
    assert [stage.layers for stage in result.plan.stages] == [(0,), (1, 2), (3, 4)]


def test_layers_before_and_after_as_stages_of_their_own() -> None:
    # Four recomputing blocks take 4 y + 4 bytes, the other layers y + 1 each. All in one stage: 8 + 3 * 2 = 14 bytes at
    # y = 1. In three stages: 2 * (3 + 1) = 8, then 4 * 2 + 4 = 12, then 2.
    instance = language_model(devices=3, memory_bytes=12.0)
    one_run = EqualRuns(runs=(1,))
    assert plan(instance, one_run).plan is None
    assert plan(instance.replace(memory_bytes=14.0), one_run).plan is not None
    result = plan(instance, replace(one_run, separate=True))
    assert result.plan is not None
    assert [stage.layers for stage in result.plan.stages] == [(0, 1), (2, 3, 4, 5), (6,)]
    assert result.note == "3 stages, d = 1, t = 1, recomputation everywhere"
    assert plan(instance, replace(one_run, separate=True), restrictions=NEVER).plan is None


def test_separate_changes_nothing_where_nothing_is_before_or_after() -> None:
    together, apart = (plan(equal_chain(5), PipeDream2BW(separate=separate)) for separate in (False, True))
    assert (together.plan, together.tried) == (apart.plan, apart.tried)


def test_each_baseline_keeps_to_its_part_of_the_grid() -> None:
    instance = equal_chain(6, devices=8, microbatches=8, bandwidth_bytes_per_s=100.0)
    shapes = {}
    for name in ("data-parallel", "tensor-parallel", "gpipe", "megatron", "pipedream-2bw"):
        result = plan(instance, name)
        assert result.plan is not None
        stages = result.plan.stages
        assert len({(stage.data_parallel_degree, stage.tensor_parallel_degree) for stage in stages}) == 1
        shapes[name] = (len(stages), stages[0].data_parallel_degree, stages[0].tensor_parallel_degree)
    assert shapes["data-parallel"] == (1, 8, 1)
    assert shapes["tensor-parallel"] == (1, 1, 2)
    assert shapes["gpipe"] == (6, 1, 1)
    assert shapes["megatron"][0] in (1, 2, 3, 6)


def test_megatron_cuts_repeated_layers_evenly_and_keeps_groups_within_a_node() -> None:
    # Five layers in one run or five; 2BW takes two or three as well. Of degrees 1, 2 and 3, 3 does not divide 8.
    layer = {1: [tmpc(6)], 2: [tmpc(2)], 3: [tmpc(1)]}
    chain = build(dict.fromkeys(range(5), layer), {(v, v + 1): 0 for v in range(4)}, devices=6, microbatches=1)
    assert plan(chain, "megatron").note == "1 stage, d = 1, t = 2, no recomputation"
    assert plan(chain, Megatron(devices_per_node=6)).note == "1 stage, d = 1, t = 3, no recomputation"
    assert plan(chain, Megatron(devices_per_node=1)).note == "1 stage, d = 1, t = 1, no recomputation"
    uneven = chain.replace(microbatches=4, devices=6)
    assert plan(uneven, "pipedream-2bw").tried > plan(uneven, Megatron(devices_per_node=6)).tried


def test_of_equally_fast_plans_the_one_on_fewest_devices() -> None:
    free = named_instances()["no cost at all"]
    result = plan(free, "pipedream-2bw")
    assert result.plan is not None
    assert (result.time_per_sample_s, result.plan.devices, len(result.plan.stages)) == (0.0, 1, 1)


# --- restrictions, and when there is no plan -------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANNERS)
def test_restrictions_are_kept(name: str) -> None:
    instance = equal_chain(4, devices=8, microbatches=8, bandwidth_bytes_per_s=100.0)
    for restrictions, role in ((ALWAYS, RECOMPUTE), (NEVER, VANILLA)):
        result = plan(instance, name, restrictions=restrictions)
        assert result.plan is not None
        assert {tmpc_id for stage in result.plan.stages for tmpc_id in stage.tmpc_ids.values()} == {role}
    alone = plan(instance, name, restrictions=Restrictions(tensor_parallelism=False, data_parallelism=False))
    assert alone.plan is not None
    assert {stage.devices for stage in alone.plan.stages} == {1}


@pytest.mark.parametrize("name", PLANNERS)
def test_nothing_fits(name: str) -> None:
    result = plan(named_instances()["does not fit"], name)
    assert (result.plan, result.evaluation, result.time_per_sample_s) == (None, None, None)
    assert result.tried > 0
    assert "fits in memory" in result.note or name == "piper-published"


@pytest.mark.parametrize("name", [name for name in PLANNERS if name != "piper-published"])
def test_no_degree_in_common(name: str) -> None:
    result = plan(named_instances()["no degree in common"], name)
    assert (result.plan, result.tried) == (None, 0)
    assert "degree" in result.note


def test_no_point_of_the_grid_within_the_devices() -> None:
    result = plan(equal_chain(4, devices=1), EqualRuns(runs=(2,)))
    assert (result.plan, result.tried) == (None, 0)
    assert result.note == "no point of the grid is within the devices and microbatches"


def test_a_named_planner_and_its_class_are_the_same() -> None:
    instance = equal_chain(4)
    by_name, by_class = plan(instance, "data-parallel"), plan(instance, DataParallel())
    assert (by_name.planner, by_class.planner) == ("data-parallel", "DataParallel()")
    assert replace(by_name, planner="") == replace(by_class, planner="")


def test_an_unknown_planner() -> None:
    with pytest.raises(UsageError, match=r"'pipedream-3bw' is unknown; expected one of pipedream-2bw, data-parallel, "):
        plan(equal_chain(2), "pipedream-3bw")


def test_a_node_needs_a_device() -> None:
    with pytest.raises(UsageError, match="at least 1, not 0"):
        Megatron(devices_per_node=0)


def test_the_published_table_has_a_limit() -> None:
    with pytest.raises(LimitError, match="the paper's table"):
        plan(equal_chain(4), PiperPublished(table_limit_bytes=100))


def test_listing_the_planners_loads_no_kernels() -> None:
    code = "import sys, piper_ray.planners; print(len(piper_ray.planners.PLANNERS), 'numba' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["7", "False"]


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [
        (Schedule(ScheduleName.INTERLEAVED, 3), 8),
        (Schedule(ScheduleName.ZB_H1), 9),
        (Schedule(ScheduleName.ZB_V), 8),
        (Schedule(ScheduleName.INTERLEAVED, 8), 40),  # whose rows no int64 stands for
    ],
)
def test_what_a_rank_holds_is_counted_along_its_list(schedule: Schedule, microbatches: int) -> None:
    for rank, actions in enumerate(flush_lists(schedule, 4, microbatches)):
        now, seen = [0] * schedule.v, set()
        for kind, chunk, _ in actions.tolist():
            now[chunk] += {ActionKind.F: 1, ActionKind.I: 0}.get(ActionKind(kind), -1)
            seen.add(tuple(now))
        assert {tuple(row) for row in held_on(schedule, 4, rank, microbatches).tolist()} == seen
