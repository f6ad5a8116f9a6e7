"""Exports, held against each runtime's own code: what it reads in them is the plan."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random

from piper_ray.export.megatron_layout import parse_layout
from piper_ray.export.target import Target
from piper_ray.export.targets import export_plan
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.settings import Recomputation, Setting
from piper_ray.simulate.actions import ActionKind, flush_lists
from tests.export_support import llama, plan_of, random_counts, runtime_says

FULL, SELECTIVE = Setting(Recomputation.FULL), Setting(Recomputation.SELECTIVE)


def exported(folder: Path, instance: Instance, plan: Plan, schedule: Schedule, target: Target) -> Path:
    export_plan(instance, plan, schedule, target, 8).write(folder)
    return folder


def letters(stages: list[list[str]]) -> list[str]:
    return ["".join({"embedding": "E", "decoder": "t", "loss": "L"}[piece] for piece in stage) for stage in stages]


def expected_letters(plan: Plan) -> list[str]:
    """By hand: layer 0 is the embedding, 13 the head."""
    return ["".join({0: "E", 13: "L"}.get(layer, "t") for layer in stage.layers) for stage in plan.stages]


def test_megatron_reads_layouts_and_recomputation(tmp_path: Path) -> None:
    instance, sharded = llama(), llama(zero_shards=2)
    sequence = Setting(Recomputation.NONE, sequence_parallel=True)
    interleaved = plan_of(instance, [1, 2, 2, 3, 1, 2, 2, 1], d=2, t=2, setting=sequence)
    v2, v1 = Schedule(ScheduleName.INTERLEAVED, 2), Schedule(ScheduleName.ONE_F_ONE_B)
    cases = [
        (FULL, None, ["full", "uniform", 1]),
        (SELECTIVE, None, ["selective", None, None]),
        (Setting(), 2, ["full", "block", 2]),
    ]
    plans = [plan_of(instance, [4, 3, 4, 3], setting=setting, first_k=first) for setting, first, _ in cases]
    bridged = plan_of(
        sharded,
        [1, 2, 2, 3, 1, 2, 2, 1],
        d=2,
        t=2,
        setting=Setting(Recomputation.FULL, sequence_parallel=True, optimizer_shards=2),
    )
    folder = exported(tmp_path / "interleaved", instance, interleaved, v2, Target.MEGATRON)
    folders = [exported(tmp_path / str(index), instance, plan, v1, Target.MEGATRON) for index, plan in enumerate(plans)]
    bridge = exported(tmp_path / "bridge", sharded, bridged, v2, Target.MEGATRON_BRIDGE)
    lines = layout_lines()
    (tmp_path / "layouts").write_text("\n".join(lines) + "\n")
    chunked, *recomputed, recipe, theirs = runtime_says(
        "megatron",
        ("megatron", folder, 12),
        *(("megatron", one, 12) for one in folders),
        ("megatron_bridge", bridge, 12),
        ("megatron_layouts", tmp_path / "layouts", 0),
    )

    assert letters(chunked["stages"]) == expected_letters(interleaved)
    assert (chunked["chunks"], chunked["sequence_parallel"], chunked["recompute"]) == (2, True, [None, None, None])
    assert chunked["group"] == 4
    for (_, _, expected), plan, found in zip(cases, plans, recomputed, strict=True):
        assert (found["recompute"], found["chunks"]) == (expected, None)
        assert letters(found["stages"]) == expected_letters(plan)
    assert letters(recipe["stages"]) == expected_letters(bridged)
    assert (recipe["chunks"], recipe["recompute"]) == (2, ["full", "uniform", 1])
    assert recipe["train"] == {"micro_batch_size": 1, "global_batch_size": 32}
    assert recipe["refuses_other_depth"]
    read = [(line, found, stages) for line, stages in zip(lines, theirs, strict=True) if (found := parsed(line))]
    assert len(read) > 500
    for line, found, stages in read:
        assert found == stages, line  # and so: what Megatron refuses we refuse


def layout_lines() -> list[str]:
    """Random ones, most of them broken, and some by hand."""
    rng = Random(13)
    lines = ["".join(rng.choice("EtL|(())**123,m x") for _ in range(rng.randrange(1, 14))) for _ in range(20_000)]
    return [*lines, "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", "Ettt|(tt|)*29,m|L", "t*1,2|L", "(t*3)*2|", "E|t*0|L"]


def parsed(line: str) -> list[str] | None:
    try:
        return list(parse_layout(line))
    except UsageError:
        return None


def test_torchtitan_splits_and_schedules(tmp_path: Path) -> None:
    cases = [
        (Schedule(ScheduleName.ONE_F_ONE_B), [4, 3, 3, 4], "Schedule1F1B"),
        (Schedule(ScheduleName.GPIPE), [5, 2, 3, 4], "ScheduleGPipe"),
        (Schedule(ScheduleName.INTERLEAVED, 2), [2, 2, 1, 2, 2, 2, 2, 1], "_PipelineScheduleRuntime"),
        (Schedule(ScheduleName.ZB_V), [2, 2, 1, 2, 2, 2, 2, 1], "_PipelineScheduleRuntime"),
    ]
    instance = llama()
    setting = Setting(Recomputation.FULL, sequence_parallel=True)
    plans = [plan_of(instance, counts, d=2, t=2, setting=setting) for _, counts, _ in cases]
    folders = [
        exported(tmp_path / schedule.name.value, instance, plan, schedule, Target.TORCHTITAN)
        for (schedule, _, _), plan in zip(cases, plans, strict=True)
    ]
    answers = runtime_says("torchtitan", *(("torchtitan", folder, 12) for folder in folders))
    for (schedule, _, name), plan, found in zip(cases, plans, answers, strict=True):
        assert (found["schedule"], found["microbatches"], found["policy"]) == (name, 16, "FullAC.Config")
        assert found["training"] == {"local": 16, "global": 32}
        parallelism = found["parallelism"]
        assert (parallelism["data_parallel_replicate_degree"], parallelism["data_parallel_shard_degree"]) == (2, 1)
        rank_of = {stage: rank for rank in range(4) for stage in schedule.stages_of_rank(rank, 4)}
        for number, stage in enumerate(plan.stages):
            blocks = [str(layer - 1) for layer in stage.layers if 0 < layer < 13]
            assert found["parts"][str(number)] == [rank_of[number], blocks, 0 in stage.layers]


def test_torch_validates_the_passes_and_builds_the_stages(tmp_path: Path) -> None:
    schedules = [
        Schedule(ScheduleName.ONE_F_ONE_B),
        Schedule(ScheduleName.GPIPE),
        Schedule(ScheduleName.INTERLEAVED, 3),
        Schedule(ScheduleName.LOOPED_BFS, 2),
        Schedule(ScheduleName.ZB_H1),
        Schedule(ScheduleName.ZB_V),
        Schedule(ScheduleName.DUALPIPE_V),
    ]
    instance, folders = llama(), []
    for schedule in schedules:
        counts = random_counts(Random(schedule.text), len(instance.layers), 4 * schedule.v)
        plan = plan_of(instance, counts, d=2, setting=FULL)
        folders.append(exported(tmp_path / schedule.name.value, instance, plan, schedule, Target.TORCH))
    answers = runtime_says("torch", *(("torch_pipelining", folder, 12) for folder in folders))
    for schedule, found in zip(schedules, answers, strict=True):
        ranks = {str(stage): rank for rank in range(4) for stage in schedule.stages_of_rank(rank, 4)}
        assert found["stage_of_rank"] == ranks
        assert found["built"] == {str(rank): ["_PipelineScheduleRuntime", schedule.v] for rank in (0, 2, 4, 6)}


def test_deepspeed_divides_and_runs_as_planned(tmp_path: Path) -> None:
    instance = llama()
    plan = plan_of(instance, [2, 5, 3, 4], d=2, t=2, setting=FULL)
    schedule = Schedule(ScheduleName.ONE_F_ONE_B)
    exported(tmp_path, instance, plan, schedule, Target.DEEPSPEED)
    (found,) = runtime_says("deepspeed", ("deepspeed", tmp_path, 12))
    assert found["parts"] == [list(pair) for pair in pairwise([0, 2, 7, 10, 14])]
    lists = ["".join(ActionKind(kind).name for kind, _, _ in one.tolist()) for one in flush_lists(schedule, 4, 16)]
    assert found["passes"] == lists
    assert (found["batch"], found["zero"]) == ([32, 1, 16], 0)
    rows = (tmp_path / "ranks.csv").read_text().splitlines()[1:]
    for row, place in zip(rows, found["ranks"], strict=True):
        _, _, _, pipeline_rank, _, replica, _, shard = row.split(",")
        assert place == {"pipe": int(pipeline_rank), "data": int(replica), "model": int(shard)}
