"""The axes that ``plan`` tries by itself: devices that share an expert, and groups of replicas that share weights."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from piper_ray.engine.solve import solve
from piper_ray.export.files import Target
from piper_ray.export.import_plan import import_plan
from piper_ray.export.run_as import RunAs
from piper_ray.export.targets import export_plan
from piper_ray.model.mode import ALL_REPLICAS, Recomputation, Sharding
from piper_ray.model.one_mode import OneMode
from piper_ray.model.options import SolveOptions
from piper_ray.model.schedule import ScheduleName
from piper_ray.proposal.cells import cells_of
from piper_ray.proposal.demand import PlanDemand, Proposed
from piper_ray.proposal.offers import with_offers
from piper_ray.proposal.propose import propose
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from piper_ray.simulate.run import SimulationOptions, simulate
from piper_ray.workloads.estimate.build import EstimateRequest
from piper_ray.workloads.estimate.config import read_model
from piper_ray.workloads.estimate.exchanges import Group, all_gather_s, all_reduce_s, exchange_s, in_passes_s, reduced
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.memory import kept_bytes, numbers_on_device
from piper_ray.workloads.estimate.modes import LayerMode, Offer
from tests.estimate_support import estimated

DENSE = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
}
ROUTED = {**DENSE, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 2}


def demand(folder: Path, config: dict[str, object], name: RuntimeName, samples: int | None = 1) -> PlanDemand:
    """On four nodes of two GPUs each."""
    file, runtime = folder / "config.json", RUNTIMES[name]
    file.write_text(json.dumps(config))
    model = read_model(str(file))
    request = EstimateRequest(nodes=4, gpus_per_node=2, tokens=512, samples=samples, batch=32)
    request = replace(request, offer=Offer(zero=ALL_REPLICAS))
    request = with_offers(request, model, runtime, 2, (1,), None)
    return PlanDemand(model, load_hardware(), "A100-80", request, runtime, (ScheduleName.ONE_F_ONE_B,))


def spread_as(found: Proposed) -> set[tuple[int | None, int]]:
    rows = {layer.id: layer for layer in found.instance.layers}
    return {
        tmpc.mode.spread
        for stage in found.plan.stages
        for layer, name in stage.tmpc_ids.items()
        for tmpc in rows[layer].tmpcs[stage.tensor_parallel_degree]
        if tmpc.id == name
    }


def best_by_a_solve_of_each(asked: PlanDemand) -> float:
    """The slow twin: a solve of each cell by itself, to no gap."""
    estimates, _ = asked.estimates()
    steps_s = []
    for cell in cells_of(asked, estimates).cells:
        found = solve(
            cell.setting.instance,
            restrictions=cell.restrictions,
            options=SolveOptions(gap=0.0),
            schedule=cell.schedule,
            step=asked.step,
        )
        if found.plan is None:
            continue
        step_s = simulate(
            cell.setting.instance, found.plan, found.schedule, options=SimulationOptions.of(asked.step)
        ).step_s
        assert cell.lower_s < math.inf
        assert step_s >= cell.lower_s * (1.0 - 1e-9)
        steps_s.append(step_s)
    return min(steps_s)


@pytest.mark.long
def test_devices_that_share_an_expert_are_tried_and_nothing_is_slower_for_it(tmp_path: Path) -> None:
    asked = demand(tmp_path, ROUTED, RuntimeName.MEGATRON)
    assert asked.request.offer.spreads == ((2, 1), (2, 2), (1, 2))
    offer = replace(asked.request.offer, spreads=())
    fewer = replace(asked, request=replace(asked.request, offer=offer))
    found = propose(asked)
    assert found.best.step_s == pytest.approx(best_by_a_solve_of_each(asked), rel=2e-4)
    assert found.best.step_s <= propose(fewer).best.step_s * (1.0 + 1e-4)


@pytest.mark.long
def test_shared_experts_are_launched_as_they_are_priced(tmp_path: Path) -> None:
    """A plan of each spread, through its files and back."""
    asked = demand(tmp_path, ROUTED, RuntimeName.MEGATRON)
    seen = set()
    for found in propose(asked, listed=40).found:
        spread = next((one for one in spread_as(found) if one[0] is not None), (None, 1))
        launch = export_plan(found.instance, found.plan, found.solution.schedule, Target.MEGATRON, 2)
        words = launch.files["megatron.args"].split()
        t = found.plan.stages[0].tensor_parallel_degree
        ranks, each = spread[0] or t, spread[1]
        assert words[words.index("--expert-model-parallel-size") + 1] == str(ranks)
        assert words[words.index("--expert-tensor-parallel-size") + 1] == str(each)
        again = import_plan(found.instance, launch.files["megatron.args"], RunAs(world=found.devices))
        assert (again.plan, again.notes) == (found.plan, ())
        seen.add(spread)
    assert any(each > 1 for _, each in seen)


def test_what_devices_that_share_an_expert_tell_each_other() -> None:
    """After an all-to-all they gather the copies that all of them got; with one rank there is no all-to-all, and no
    busiest one."""
    result = estimated(read_model("mixtral-8x7b"), "H100-SXM", offer=Offer(spreads=((8, 1), (1, 8), (4, 2))))
    stack = result.setting.stack
    kind = next(kind for kind in result.architecture.kinds if kind.experts)
    exchange = next(one for one in kind.exchanges if one.expert_bytes)
    alone, shared = LayerMode(experts=8), LayerMode(experts=1, expert_tensor=8)
    copies_bytes = kind.value("2 s b e h")
    gathered_s = 2.0 * all_gather_s(8.0 * copies_bytes, Group(8), stack.gpu, 8)
    assert exchange_s(exchange, kind, shared, stack) > gathered_s * (1.0 - stack.software.expert_overlap)
    assert exchange_s(exchange, kind, shared, stack) > exchange_s(exchange, kind, alone, stack)
    kept = [kept_bytes(kind, mode, stack.traits) for mode in (alone, LayerMode(experts=4, expert_tensor=2), shared)]
    assert kept[1] - kept[0] == copies_bytes
    assert kept[2] - kept[0] == 7.0 * copies_bytes


def test_groups_that_share_weights_sum_gradients_in_every_pass() -> None:
    """HSDP on one rank of a pipeline: nothing once a batch, and plans of all devices alone."""
    result = estimated(read_model("llama3-8b"), "H100-SXM", nodes=4, offer=Offer(sharded_over=(32, 8), summed_over=32))
    stack, training = result.setting.stack, result.setting.training
    kind = result.architecture.nodes[1].kind
    whole = LayerMode(optimizer_shards=32, sharding=Sharding.WEIGHTS, groups=1)
    grouped = LayerMode(optimizer_shards=8, sharding=Sharding.WEIGHTS, groups=4)
    assert {whole, grouped} <= set(result.modes[kind.key])
    assert whole.least_data_parallel_degree == grouped.least_data_parallel_degree == 32
    assert list(reduced(kind, grouped, stack, training)) == []
    once = replace(grouped, groups=0)
    assert list(reduced(kind, once, stack, training))
    gradients = sum(x.trained for x in numbers_on_device(kind, grouped))
    gradients *= stack.software.reduced_bytes(stack.precision, training) / 8.0
    sum_s = all_reduce_s(gradients, Group(4, 8), stack.gpu, 8)
    forward_s, backward_s = in_passes_s(kind, once, stack, training)
    assert in_passes_s(kind, grouped, stack, training) == pytest.approx((forward_s, backward_s + sum_s))


@pytest.mark.long
def test_groups_that_share_weights_are_launched_as_they_are_priced(tmp_path: Path) -> None:
    asked = demand(tmp_path, DENSE, RuntimeName.TORCHTITAN, 4)
    assert (asked.request.offer.sharded_over, asked.request.offer.summed_over) == ((8, 2, 4), 8)
    estimates, _ = asked.estimates()
    shapes = set()
    for cell in cells_of(asked, estimates).cells:
        found = solve(cell.setting.instance, restrictions=cell.restrictions, schedule=cell.schedule, step=asked.step)
        if found.plan is None or len(found.plan.stages) > 1 or "+fsdp" not in cell.setting.text:
            continue
        (stage,) = found.plan.stages
        modes = {
            tmpc.mode for layer in cell.setting.instance.layers for tmpc in layer.tmpcs[stage.tensor_parallel_degree]
        }
        shards = {mode.optimizer_shards for mode in modes if mode.sharding is Sharding.WEIGHTS}
        if not shards:
            continue
        launch = export_plan(estimates[4].instance, found.plan, found.schedule, Target.TORCHTITAN, 2)
        parallelism = json.loads(launch.files["torchtitan.json"])["parallelism"]
        assert {parallelism["data_parallel_shard_degree"]} == shards
        d = stage.data_parallel_degree
        assert d * stage.tensor_parallel_degree == 8
        assert parallelism["data_parallel_replicate_degree"] * parallelism["data_parallel_shard_degree"] == d
        assert parallelism["fsdp_reshard_after_forward"] == "always"
        again = import_plan(estimates[4].instance, launch.files["torchtitan.json"], RunAs())
        assert (again.plan, again.notes) == (found.plan, ())
        shapes.add((d, *shards))
    assert any(d > shards for d, shards in shapes)


def test_exchanges_beside_passes_keep_to_what_megatron_runs(tmp_path: Path) -> None:
    """Several pipeline ranks run interleaved alone then, and neither whole layers nor moe are computed again."""
    asked = demand(tmp_path, ROUTED, RuntimeName.MEGATRON)
    asked = replace(asked, schedules=(ScheduleName.ONE_F_ONE_B, ScheduleName.INTERLEAVED))
    beside = replace(asked, request=replace(asked.request, overlaps=("experts",)))
    instance = beside.estimated(1).instance
    assert [beside.restrictions(instance, name).stage_count for name in beside.schedules] == [1, None]
    assert [asked.restrictions(instance, name).stage_count for name in asked.schedules] == [None, None]
    rule = next(
        one for one in beside.restrictions(instance, beside.schedules[0]).constraints if isinstance(one, OneMode)
    )
    assert rule.may_recompute(Recomputation.of_parts(["core_attn"]))
    assert not any(map(rule.may_recompute, (Recomputation.FULL, Recomputation.of_parts(["moe"]))))
    found = propose(beside)
    assert any("only interleaved" in text for text in found.refused)
    for one in found.found:
        ranks = len(one.plan.stages) // one.simulation.schedule.v
        assert ranks == 1 or one.simulation.schedule.v > 1
        words = export_plan(one.instance, one.plan, one.simulation.schedule, Target.MEGATRON, 2).files["megatron.args"]
        spread = "--expert-model-parallel-size 2\n" in words
        assert ("--overlap-moe-expert-parallel-comm\n" in words) == spread
    dense = demand(tmp_path, DENSE, RuntimeName.MEGATRON)
    dense = replace(dense, request=replace(dense.request, overlaps=("experts",)))
    assert dense.restrictions(dense.estimated(1).instance, dense.schedules[0]).stage_count is None
