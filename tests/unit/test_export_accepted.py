"""Exports, held against each runtime's own code: what it reads in them is the plan."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from random import Random

import pytest

from piper_ray.export.files import Target
from piper_ray.export.megatron_layout import parse_layout
from piper_ray.export.targets import export_plan
from piper_ray.export.torchtitan import own_division
from piper_ray.model.errors import UnsupportedPlan, UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.mode import ALL_REPLICAS, Mode, Recomputation
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.simulate.actions import ActionKind, flush_lists
from tests.export_support import llama, mixture, plan_in, plan_of, random_counts, runtime_says
from tests.lengths import long_after

FULL, PARTS = Mode(Recomputation.FULL), Mode(Recomputation.of("selective-mlp"))


def exported(folder: Path, instance: Instance, plan: Plan, schedule: Schedule, target: Target) -> Path:
    export_plan(instance, plan, schedule, target, 8).write(folder)
    return folder


def letters(stages: list[list[str]]) -> list[str]:
    return ["".join({"embedding": "E", "decoder": "t", "loss": "L"}[piece] for piece in stage) for stage in stages]


def expected_letters(plan: Plan) -> list[str]:
    """By hand: layer 0 is the embedding, 13 the head."""
    return ["".join({0: "E", 13: "L"}.get(layer, "t") for layer in stage.layers) for stage in plan.stages]


@pytest.mark.long
def test_megatron_reads_layouts_and_recomputation(tmp_path: Path) -> None:
    instance, sharded = llama(), llama(zero_shards=2)
    sequence = Mode(Recomputation.NONE, sequence_parallel=True)
    interleaved = plan_of(instance, [1, 2, 2, 3, 1, 2, 2, 1], d=2, t=2, setting=sequence)
    v2, v1 = Schedule(ScheduleName.INTERLEAVED, 2), Schedule(ScheduleName.ONE_F_ONE_B)
    cases = [
        (FULL, None, ["full", "uniform", 1, ["core_attn"]]),
        (PARTS, None, ["selective", None, None, ["mlp"]]),
        (Mode(), 2, ["full", "block", 2, ["core_attn"]]),
    ]
    plans = [plan_of(instance, [4, 3, 4, 3], setting=setting, first_k=first) for setting, first, _ in cases]
    bridged = plan_of(
        sharded,
        [1, 2, 2, 3, 1, 2, 2, 1],
        d=2,
        t=2,
        setting=Mode(Recomputation.FULL, sequence_parallel=True, optimizer_shards=2),
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
    assert (chunked["chunks"], chunked["sequence_parallel"], chunked["recompute"]) == (
        2,
        True,
        [None, None, None, ["core_attn"]],
    )
    assert chunked["group"] == 4
    for (_, _, expected), plan, found in zip(cases, plans, recomputed, strict=True):
        assert (found["recompute"], found["chunks"]) == (expected, None)
        assert letters(found["stages"]) == expected_letters(plan)
    assert letters(recipe["stages"]) == expected_letters(bridged)
    assert (recipe["chunks"], recipe["recompute"]) == (2, ["full", "uniform", 1, ["core_attn"]])
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


OWN_DIVISIONS = list(product(range(1, 17), range(4), range(4)))
"""Stages, and what the ends count as."""


def own_names(stages: int, first: int, last: int) -> list[list[str]] | None:
    """As ``own_division`` has it, of 12 layers."""
    try:
        found = own_division(12, stages, chunked=False, per_stage=None, first_less=first, last_less=last)
    except UsageError:
        return None
    names = ["tok_embeddings", *(f"layers.{index}" for index in range(12)), "norm"]
    parts = [[names[piece] for piece in stage] for stage in found]
    parts[-1].append("lm_head")
    return parts


@pytest.mark.long
def test_torchtitan_splits_and_schedules(tmp_path: Path) -> None:
    cases = [
        (Schedule(ScheduleName.ONE_F_ONE_B), [4, 3, 3, 4], "Schedule1F1B"),
        (Schedule(ScheduleName.GPIPE), [5, 2, 3, 4], "ScheduleGPipe"),
        (Schedule(ScheduleName.INTERLEAVED, 2), [2, 2, 1, 2, 2, 2, 2, 1], "_PipelineScheduleRuntime"),
        (Schedule(ScheduleName.ZB_V), [2, 2, 1, 2, 2, 2, 2, 1], "_PipelineScheduleRuntime"),
    ]
    instance = llama()
    setting = Mode(Recomputation.FULL, sequence_parallel=True)
    plans = [plan_of(instance, counts, d=2, t=2, setting=setting) for _, counts, _ in cases]
    folders = [
        exported(tmp_path / schedule.name.value, instance, plan, schedule, Target.TORCHTITAN)
        for (schedule, _, _), plan in zip(cases, plans, strict=True)
    ]
    (tmp_path / "divisions").write_text(json.dumps(OWN_DIVISIONS))
    *answers, theirs = runtime_says(
        "torchtitan",
        *(("torchtitan", folder, 12) for folder in folders),
        ("torchtitan_divisions", tmp_path / "divisions", 12),
    )
    for case, found in zip(OWN_DIVISIONS, theirs, strict=True):
        assert found == own_names(*case)
    for (schedule, _, name), plan, found in zip(cases, plans, answers, strict=True):
        assert (found["schedule"], found["microbatches"], found["policy"]) == (name, 16, "FullAC.Config")
        assert found["training"] == {"local": 16, "global": 32}
        parallelism = found["parallelism"]
        assert (parallelism["data_parallel_replicate_degree"], parallelism["data_parallel_shard_degree"]) == (2, 1)
        rank_of = {stage: rank for rank in range(4) for stage in schedule.stages_of_rank(rank, 4)}
        for number, stage in enumerate(plan.stages):
            blocks = [str(layer - 1) for layer in stage.layers if 0 < layer < 13]
            assert found["parts"][str(number)] == [rank_of[number], blocks, 0 in stage.layers]


@pytest.mark.parametrize(
    "schedules",
    long_after(
        1,
        [
            [Schedule(ScheduleName.ONE_F_ONE_B), Schedule(ScheduleName.INTERLEAVED, 3), Schedule(ScheduleName.ZB_V)],
            [
                Schedule(ScheduleName.GPIPE),
                Schedule(ScheduleName.LOOPED_BFS, 2),
                Schedule(ScheduleName.ZB_H1),
                Schedule(ScheduleName.DUALPIPE_V),
            ],
        ],
    ),
    ids=["three", "the others"],
)
def test_torch_validates_the_passes_and_builds_the_stages(tmp_path: Path, schedules: list[Schedule]) -> None:
    instance, folders = llama(), []
    for schedule in schedules:
        counts = random_counts(Random(schedule.text), len(instance.layers), 4 * schedule.v)
        plan = plan_of(instance, counts, d=2, setting=FULL)
        folders.append(exported(tmp_path / schedule.name.value, instance, plan, schedule, Target.TORCH))
    answers = runtime_says("torch", *(("torch_pipelining", folder, 12) for folder in folders))
    for schedule, found in zip(schedules, answers, strict=True):
        ranks = {str(stage): rank for rank in range(4) for stage in schedule.stages_of_rank(rank, 4)}
        assert found["stage_of_rank"] == ranks
        assert found["built"] == {str(rank): ["PlannedSchedule", schedule.v] for rank in (0, 2, 4, 6)}


def test_deepspeed_divides_and_runs_as_planned(tmp_path: Path) -> None:
    instance = llama()
    plan = plan_of(instance, [2, 5, 3, 4], d=2, t=2, setting=FULL)
    schedule = Schedule(ScheduleName.ONE_F_ONE_B)
    exported(tmp_path, instance, plan, schedule, Target.DEEPSPEED)
    (found,) = runtime_says("deepspeed", ("deepspeed", tmp_path, 12))
    assert found["parts"] == [list(pair) for pair in pairwise([0, 2, 7, 10, 14])]
    lists = ["".join(ActionKind(kind).name for kind, _, _ in one.tolist()) for one in flush_lists(schedule, 4, 16)]
    assert found["passes"] == lists
    assert (found["batch"], found["zero"]) == ([32, 1, 16], 1)
    rows = (tmp_path / "ranks.csv").read_text().splitlines()[1:]
    for row, place in zip(rows, found["ranks"], strict=True):
        _, _, _, pipeline_rank, _, replica, _, shard = row.split(",")
        assert place == {"pipe": int(pipeline_rank), "data": int(replica), "model": int(shard)}


MOE = Mode(sequence_parallel=True, optimizer_shards=ALL_REPLICAS, context=2, experts=8)


@pytest.mark.long
def test_megatron_makes_the_groups_of_context_and_expert_parallelism(tmp_path: Path) -> None:
    """By hand: 2 pipeline ranks, 2 replicas, 2 groups that share a sequence, 4 shards; experts over 8 ranks, or over
    the 4 shards where nothing is said of them."""
    instance, schedule = mixture(), Schedule(ScheduleName.ONE_F_ONE_B)
    spread = plan_in(instance, MOE, t=8, d=2)
    within = plan_in(instance, replace(MOE, experts=None), t=8, d=2)
    folders = [
        exported(tmp_path / name, instance, plan, schedule, Target.MEGATRON)
        for name, plan in (("spread", spread), ("within", within))
    ]
    bridge = exported(tmp_path / "bridge", instance, within, schedule, Target.MEGATRON_BRIDGE)
    found, inside, recipe = runtime_says(
        "megatron", *(("megatron_groups", folder, 4) for folder in folders), ("megatron_bridge", bridge, 4)
    )
    assert (found["context"], found["experts"]) == (2, [8, 1])
    assert (inside["context"], inside["experts"]) == (2, [4, 1])
    assert (recipe["context"], recipe["experts"]) == (2, [4, 1])
    same = {"tensor": [0, 1, 2, 3], "context": [0, 4], "replicas": [0, 8], "pipeline": [0, 16]}
    assert found["ranks"] == {**same, "experts": list(range(8))}
    assert inside["ranks"] == {**same, "experts": list(range(4))}
    places = list(csv.DictReader((folders[0] / "ranks.csv").read_text().splitlines()))
    columns = {"tensor": "shard", "context": "context", "replicas": "replica", "pipeline": "pipeline_rank"}
    for name, own in columns.items():
        members = [places[rank] for rank in found["ranks"][name]]
        assert [place[own] for place in members] == [str(number) for number in range(len(members))]
        assert all(place[other] == "0" for place in members for other in columns.values() if other != own)


@pytest.mark.long
def test_torchtitan_makes_the_meshes_of_context_and_expert_parallelism(tmp_path: Path) -> None:
    instance, schedule = mixture(), Schedule(ScheduleName.ONE_F_ONE_B)
    cases = [
        (plan_in(instance, MOE, t=8, d=2), {"cp": 2, "tp": 4, "ep": 8, "pp": 2, "dp_shard": 2, "efsdp": 2}),
        (plan_in(instance, replace(MOE, experts=None), t=8, d=2), {"ep": 4, "efsdp": 4}),
        # Replicas that share nothing but experts: torchtitan spreads these over shards alone.
        (plan_in(instance, Mode(experts=8), t=1, d=8), {"ep": 8, "dp_shard": 8, "efsdp": 1, "dp_replicate": 1}),
        (
            plan_in(instance, Mode(sequence_parallel=True, experts=8), t=4, d=4),
            {"ep": 8, "dp_shard": 2, "dp_replicate": 2},
        ),
    ]
    folders = [
        exported(tmp_path / str(number), instance, plan, schedule, Target.TORCHTITAN)
        for number, (plan, _) in enumerate(cases)
    ]
    answers = runtime_says("torchtitan", *(("torchtitan", folder, 4) for folder in folders))
    for (_, meshes), found in zip(cases, answers, strict=True):
        assert {name: found["meshes"][name] for name in meshes} == meshes


@pytest.mark.long
def test_what_torchtitan_refuses_is_refused_here(tmp_path: Path) -> None:
    """Tied ends on several ranks, heads of keys and values that t does not divide; and another depth than planned."""
    schedule, alone, tied, few = Schedule(ScheduleName.ONE_F_ONE_B), llama(), llama(tied=True), llama(key_heads=2)
    split = exported(tmp_path / "split", alone, plan_of(alone, [7, 7]), schedule, Target.TORCHTITAN)
    whole = exported(tmp_path / "whole", tied, plan_of(tied, [14]), schedule, Target.TORCHTITAN)
    over = exported(tmp_path / "over", alone, plan_of(alone, [7, 7], t=4), schedule, Target.TORCHTITAN)
    within = exported(tmp_path / "within", few, plan_of(few, [7, 7], t=2), schedule, Target.TORCHTITAN)
    answers = runtime_says(
        "torchtitan",
        ("torchtitan_tied", split, 12),
        ("torchtitan_tied", whole, 12),
        ("torchtitan_key_heads", over, 12),
        ("torchtitan_key_heads", within, 12),
        ("torchtitan_other_depth", within, 12),
    )
    assert answers == [
        "Weight tying is not supported with Pipeline Parallel.",
        None,
        "tensor_parallel_degree (4) must divide n_kv_heads (2).",
        None,
        "the plan is of 12 layers, the config of 13",
    ]
    for instance, plan, told in (
        (tied, plan_of(tied, [7, 7]), "embedding and head have a weight in common; this plan has 2 ranks"),
        (few, plan_of(few, [7, 7], t=4), "degree 4 does not divide the model's 2 heads of keys and values"),
    ):
        with pytest.raises(UnsupportedPlan, match=told):
            export_plan(instance, plan, schedule, Target.TORCHTITAN, 8)
