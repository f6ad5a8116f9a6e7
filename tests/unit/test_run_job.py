"""Which plans torch's pipelines can run, and what their ranks are told."""

from __future__ import annotations

import dataclasses
import os
import pickle
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import _Action, _validate_schedule

import piper_ray
from piper_ray.model.errors import InputError, UsageError
from piper_ray.model.schedule import V_SHAPED, Schedule, ScheduleName
from piper_ray.run.job import Job, JobOptions, LayerJob, PipelinePlan, pass_stream
from piper_ray.run.run import Promise, prepared
from piper_ray.simulate.actions import ActionKind
from tests.run_support import job

FLUSHED = [name for name in ScheduleName if not Schedule(name).asynchronous]


def instance(layers: int = 4, t: int = 1) -> piper_ray.Instance:
    ways = [
        piper_ray.Tmpc("plain", forward_s=1.0, backward_s=2.0),
        piper_ray.Tmpc("full", forward_s=1.0, backward_s=3.0, recompute=True),
    ]
    return piper_ray.Instance(
        [piper_ray.Layer(number, "Layer", {t: tuple(ways)}, f"layers.{number}") for number in range(layers)],
        [piper_ray.Edge(number, number + 1, 8.0) for number in range(layers - 1)],
        cluster=piper_ray.Cluster(8, 1e9, (piper_ray.Link(1e9),)),
        batch=piper_ray.Batch(8, 2),
        schedule="1f1b",
    )


def plan(degrees: tuple[int, ...] = (1, 1), t: int = 1, ways: str = "ppff") -> piper_ray.Plan:
    """Two layers a stage; ways: p plain, f full."""
    names = {"p": "plain", "f": "full"}
    stages = []
    for number, degree in enumerate(degrees):
        layers = (2 * number, 2 * number + 1)
        stages.append(piper_ray.Stage(layers, degree, t, {layer: names[ways[layer]] for layer in layers}))
    return piper_ray.Plan(tuple(stages))


def made(given: Any, known: piper_ray.Instance | None = None, **options: Any) -> tuple[Job, float | None]:
    found, promise = prepared_of(given, known, **options)
    return found, promise.promised_s


def prepared_of(given: Any, known: piper_ray.Instance | None = None, **options: Any) -> tuple[Job, Promise]:
    defaults: dict[str, Any] = {
        "schedule": None,
        "steps": 3,
        "warm_up": 1,
        "device": "cpu",
        "sharing": "ddp",
        "microbatches": None,
        "microbatch": None,
        "arguments": {},
        "inputs": (),
        "vertical_sync": False,
    }
    own = {"model": "model.py:build", **defaults, **options}
    schedule = own.pop("schedule")
    return prepared(given, known, schedule, JobOptions(**own))


def test_a_job_has_what_the_plan_says(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    piper_ray.dump_plan(plan((2, 2)), path, instance())
    found, promised_s = made(path)
    assert found.stages == (
        (LayerJob("layers.0", 0, False), LayerJob("layers.1", 0, False)),
        (LayerJob("layers.2", 0, True), LayerJob("layers.3", 0, True)),
    )
    assert (found.places, found.replicas, found.ranks, found.microbatches, found.microbatch) == (2, 2, 4, 8, 2)
    assert found.microbatches_of_replica == 4
    assert found.schedule == Schedule(ScheduleName.ONE_F_ONE_B)
    assert [found.stages_of(rank) for rank in range(4)] == [(0,), (0,), (1,), (1,)]
    assert [found.name_of(rank) for rank in (0, 3)] == ["rank 0 (stage 1, replica 0)", "rank 3 (stage 2, replica 1)"]
    assert promised_s is None
    assert pickle.loads(pickle.dumps(found)) == found


def test_an_asynchronous_job_has_its_degrees_and_what_is_in_flight() -> None:
    found, promise = prepared_of(plan((2, 1)), instance(), schedule="pipedream", vertical_sync=True)
    assert (found.degrees, found.in_flight, found.ranks, found.vertical_sync) == ((2, 1), (2, 1), 3, True)
    assert [found.seat(rank) for rank in range(3)] == [(0, 0), (0, 1), (1, 0)]
    assert [found.rank_of(*found.seat(rank)) for rank in range(3)] == [0, 1, 2]
    assert [found.name_of(rank) for rank in (1, 2)] == ["rank 1 (stage 1, replica 1)", "rank 2 (stage 2)"]
    assert promise.promised_s == piper_ray.simulate(instance(), plan((2, 1)), "pipedream").step_s
    assert pass_stream(found).batches == found.steps_before + found.steps + 1
    raised = piper_ray.Plan(plan((2, 1)).stages, in_flight=(3, 2))
    assert made(raised, instance(), schedule="2bw")[0].in_flight == (3, 2)


def test_the_promise_is_the_simulation_s_or_the_document_s() -> None:
    known = instance()
    _, promised_s = made(plan(), known)
    assert promised_s == piper_ray.simulate(known, plan(), "1f1b").step_s > 0
    solution = piper_ray.solve(known)
    assert solution.plan is not None
    document = {**solution_document(known, solution)}
    found, of_document = made(document)
    assert of_document == pytest.approx(piper_ray.simulate(known, solution.plan, "1f1b").step_s)
    assert found.schedule == solution.schedule
    assert made(document, microbatches=16)[1] is None  # nobody promised anything for another batch
    assert made(document, known, microbatches=16)[1] == pytest.approx(
        piper_ray.simulate(known.replace(microbatches=16), solution.plan, "1f1b").step_s
    )


@pytest.mark.parametrize(
    ("measured", "cores", "threads"),
    [(None, 8, 4), (None, 1, 1), (2, 8, 2), (4, 8, 4), (3, 4, 2), (8, 2, 1)],
)
def test_ranks_have_the_threads_that_times_were_measured_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: int | None, cores: int, threads: int
) -> None:
    """If two ranks can have them on so many cores; a plan's document says how many they were."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    known = dataclasses.replace(instance(), measured_threads=measured)
    piper_ray.dump_plan(plan(), tmp_path / "plan.json", known)
    for given, of in ((tmp_path / "plan.json", None), (plan(), known)):
        job, promise = prepared_of(given, of)
        assert (job.threads, promise.measured_threads) == (threads, measured)
        assert promise.load is not None


def solution_document(known: piper_ray.Instance, solution: piper_ray.Solution) -> dict[str, object]:
    from piper_ray.report.document import plan_document, proof_document

    assert solution.plan is not None
    evaluation = piper_ray.evaluate(known, solution.plan, schedule=solution.schedule)
    return plan_document(known, solution.plan, evaluation, proof_document(solution), solution.schedule)


def test_layers_of_one_module_are_its_calls() -> None:
    known = instance()
    layers = [piper_ray.Layer(layer.id, layer.name, layer.tmpcs, "shared") for layer in known.layers]
    found, _ = made(plan(), piper_ray.Instance(layers, known.edges, cluster=known.cluster, batch=known.batch,
                                               schedule="gpipe"))  # fmt: skip
    assert [layer.call for stage in found.stages for layer in stage] == [0, 1, 2, 3]


def test_arguments_stay_what_they_are() -> None:
    arguments = {"sizes": (1, 2.5), "name": "x", "on": True, "none": None, "deep": {"a": [1, (2,)]}}
    found, _ = made(plan(), instance(), arguments=arguments)
    assert pickle.loads(pickle.dumps(found)).arguments == arguments
    with pytest.raises(UsageError, match=r"argument model of the model: <object object at .*> is no number, text"):
        made(plan(), instance(), arguments={"model": object()})


@pytest.mark.parametrize(
    ("given", "known", "options", "words"),
    [
        (plan(t=2), instance(t=2), {}, "stage 1 has tensor-parallel degree 2: run cuts models at layers"),
        (plan((1, 2)), instance(), {"schedule": "gpipe"}, "the stages have data-parallel degrees 1, 2: torch's"),
        (plan(), instance(), {"schedule": "2bw", "device": "cuda"}, "schedule 2bw runs over gloo alone; expected"),
        (plan(), instance(), {"schedule": "pipedream", "sharing": "fully-shard"}, "expected --replicas ddp"),
        (plan(), instance(), {"schedule": "2bw", "microbatches": 1}, "stage 1 keeps 2 microbatches in flight, and a"),
        (plan(), instance(), {"schedule": "2bw", "vertical_sync": True}, "vertical sync: schedule 2bw has one version"),
        (
            piper_ray.Plan(plan((1, 4)).stages, in_flight=(1, 2)),
            instance(),
            {"schedule": "pipedream"},
            "with 1, 2 microbatches in flight stages of data-parallel degrees 1, 4 wait for each other",
        ),
        (plan((1,)), instance(2), {"schedule": "interleaved"}, "puts 2 stages on each rank; the plan has 1"),
        (plan(), instance(), {"schedule": "dualpipe-v", "microbatches": 1}, "needs at least 2 microbatches a replica"),
        (plan((2, 2)), instance(), {"microbatches": 3}, "3 microbatches cannot be shared by 2 replicas"),
        (plan(), None, {}, "a Plan does not say which modules its layers are; expected its instance too"),
        (3, None, {}, "plan must be a Plan, a path or a document, not 3"),
        (plan(), instance(), {"device": "tpu"}, "device must be 'cpu' or 'cuda', not 'tpu'"),
        (plan(), instance(), {"sharing": "zero"}, "sharing 'zero' is unknown; expected one of ddp, fully-shard"),
        (plan(), instance(), {"microbatch": 0}, "microbatch must be at least 1, not 0"),
        (plan(), instance(), {"warm_up": -1}, "warm_up must be at least 0, not -1"),
    ],
)
def test_what_torch_cannot_run_is_refused(
    given: Any, known: piper_ray.Instance | None, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError) as told:
        made(given, known, **options)
    assert words in str(told.value)


def test_a_plan_without_paths_needs_its_workload() -> None:
    with pytest.raises(
        InputError, match="not the module paths of all layers; expected a plan of a workload with paths"
    ):
        made(plan().to_dict(), schedule="1f1b")
    assert made(plan().to_dict(), instance())[0].stages[1][0] == LayerJob("layers.2", 0, True)


def test_a_plan_that_does_not_say_its_batch_is_told() -> None:
    document: dict[str, Any] = {
        "stages": [{"nodes": [0], "dataParallelDegree": 1, "tensorParallelDegree": 1, "TMPCids": {"0": "x"},
                    "paths": ["a"]}],
        "schedule": "gpipe",
    }  # fmt: skip
    with pytest.raises(UsageError, match="how many microbatches a batch has; expected --microbatches N"):
        made(document)
    with pytest.raises(UsageError, match="how many samples a microbatch has; expected --microbatch-size SAMPLES"):
        made(document, microbatches=4)
    assert made(document, microbatches=4, microbatch=2)[0].ranks == 1
    with pytest.raises(UsageError, match="how many microbatches a batch has; expected microbatches N"):
        piper_ray.run("models.py:build", document)


@pytest.mark.parametrize("name", FLUSHED)
def test_torch_accepts_every_table(name: ScheduleName) -> None:
    chunked = Schedule(name).v > 1
    for places, microbatches, chunks in product((1, 2, 3), (1, 2, 4, 6, 7), (1, 2, 3)):
        if (name in V_SHAPED and chunks != 2) or (not chunked and name is not ScheduleName.ZB_H1 and chunks > 1):
            continue
        if name is ScheduleName.DUALPIPE_V and microbatches < 2 * places:
            continue
        stages = places * chunks
        wanted = job(
            name,
            tuple(range(1, stages)),
            paths=tuple(f"layers.{number}" for number in range(stages)),
            microbatches=microbatches,
            chunks=chunks,
        )
        actions = {
            place: [_Action.from_str(f"{stage}{kind.name}{k}") for kind, stage, k in passes]
            for place, passes in enumerate(PipelinePlan.of(wanted).passes)
        }
        placed = _validate_schedule(actions, places, stages, microbatches)
        assert placed == {stage: place for place in range(places) for stage in wanted.stages_of(place)}
        for place, passes in enumerate(PipelinePlan.of(wanted).passes):
            forwards = sorted((stage, k) for kind, stage, k in passes if kind is ActionKind.F)
            assert forwards == sorted(product(wanted.stages_of(place), range(microbatches)))
