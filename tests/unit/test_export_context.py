"""Plans with context and expert parallelism for runtimes: degrees, places of ranks, and layouts read back."""

from __future__ import annotations

import json

import pytest

from piper_ray.evaluate import evaluate
from piper_ray.export.files import Target
from piper_ray.export.import_plan import import_plan
from piper_ray.export.run_as import RunAs
from piper_ray.export.targets import export_plan
from piper_ray.model.errors import UnsupportedPlan, UsageError
from piper_ray.model.mode import ALL_REPLICAS, Mode
from piper_ray.model.one_mode import OneMode, context_of
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.runtimes.meshes import meshes_of
from piper_ray.runtimes.runtime import rank_places
from tests.export_support import mixture, plan_in

ONE = Schedule(ScheduleName.ONE_F_ONE_B)


SETTING = Mode(sequence_parallel=True, optimizer_shards=ALL_REPLICAS, context=2, experts=8)


def test_megatron_is_told_t_of_each_group_and_reads_the_same_plan_back() -> None:
    instance = mixture()
    plan = plan_in(instance, SETTING, t=8, d=2)
    assert context_of(instance, plan) == 2
    found = export_plan(instance, plan, ONE, Target.MEGATRON, 8)
    lines = found.files["megatron.args"].splitlines()
    for line in (
        "--tensor-model-parallel-size 4",
        "--context-parallel-size 2",
        "--expert-model-parallel-size 8",
        "--expert-tensor-parallel-size 1",
        "--pipeline-model-parallel-size 2",
        "--sequence-parallel",
        "--use-distributed-optimizer",
    ):
        assert line in lines
    back = import_plan(instance, found.files["megatron.args"], RunAs(data_parallel=2))
    assert back.plan == plan
    evaluate(instance, back.plan, schedule=ONE)
    recipe = export_plan(instance, plan, ONE, Target.MEGATRON_BRIDGE, 8).files["piper_plan.py"]
    assert "cfg.model.context_parallel_size = 2" in recipe
    assert "cfg.model.expert_model_parallel_size = 8" in recipe


def test_the_other_forms_hold_it_too() -> None:
    instance = mixture()
    plan = plan_in(instance, SETTING, t=8, d=2)
    found = json.loads(export_plan(instance, plan, ONE, Target.TORCHTITAN, 8).files["torchtitan.json"])["parallelism"]
    names = (
        "tensor_parallel_degree",
        "context_parallel_degree",
        "data_parallel_shard_degree",
        "expert_parallel_degree",
    )
    assert [found[name] for name in names] == [4, 2, 2, 8]
    text = export_plan(instance, plan, ONE, Target.YAML, 8).files["plan.yaml"]
    for line in ("context_parallel_degree: 2", "tensor_parallel_degree: 4", "expert_parallel_degree: 8"):
        assert line in text
    with pytest.raises(UnsupportedPlan) as error:
        export_plan(instance, plan, ONE, Target.DEEPSPEED, 8)
    assert str(error.value).startswith("DeepSpeed cannot run this plan:")
    what = [text.partition(" is not possible")[0] for text in error.value.violations]
    assert what == ["context parallelism 2", "sequence parallelism", "experts over 8 ranks"]


def test_groups_that_share_a_sequence_lie_between_shards_and_replicas() -> None:
    """By hand: 2 pipeline ranks, 2 replicas, 2 groups of 2 shards."""
    instance = mixture()
    plan = plan_in(instance, Mode(sequence_parallel=True, context=2), t=4, d=2)
    places = list(rank_places(meshes_of(plan, ONE, {"": 8}, instance.cluster), ONE, 2))
    found = [(x.pipeline_rank, x.replica, x.context, x.shard) for x in places]
    assert found == [(p, d, c, t) for p in range(2) for d in range(2) for c in range(2) for t in range(2)]


def test_what_a_workload_has_no_times_of_is_not_read() -> None:
    instance = mixture()
    megatron = (
        "--pipeline-model-parallel-layout Ett|ttL --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"
    )
    with pytest.raises(UsageError, match=r"estimate --context-parallel 4"):
        import_plan(instance, f"{megatron} --context-parallel-size 4", RunAs(data_parallel=1))
    with pytest.raises(UsageError, match=r"estimate --expert-parallel 4"):
        import_plan(instance, f"{megatron} --expert-model-parallel-size 4", RunAs(data_parallel=1))


def test_a_setting_has_one_context_for_all_layers() -> None:
    instance, rule = mixture(), OneMode(context=True, experts=True)
    contexts = {setting.context for setting in rule.modes(instance)}
    assert contexts == {1, 2}
    assert {setting.context for setting in OneMode().modes(instance)} == {1}
    two = next(rule.under_each(instance, [Mode(context=2)]))
    assert all("cp2" in tmpc.id for layer in two.layers for row in layer.tmpcs.values() for tmpc in row)
    mixed = plan_in(instance, SETTING, t=4, d=2)
    other = plan_in(instance, Mode(sequence_parallel=True), t=4, d=2)
    both = Plan((mixed.stages[0], other.stages[1]), keeps_order=True)
    assert list(rule.violations(instance, mixed)) == []
    assert list(rule.violations(instance, both))
