"""``piper_ray.run``: turns a user's arguments into a job for ranks, determines the promised time that the run is
compared with, and measures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from piper_ray.model import arguments
from piper_ray.model.cores import machine_load
from piper_ray.model.errors import UsageError, require
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule, ScheduleName, StepTerms
from piper_ray.model.stop import Stop
from piper_ray.run.job import Job, JobOptions, Replicas, Run, job_of
from piper_ray.run.launch import launch
from piper_ray.simulate.run import SimulationOptions, simulate
from piper_ray.workloads.formats.load import Source, instance_of, load_plan, plan_claims, planned
from piper_ray.workloads.formats.plans import plan_document
from piper_ray.workloads.measure.arguments import PARAMETERS

if TYPE_CHECKING:
    from piper_ray.simulate.result import Simulation


@arguments.named_as_parameters(PARAMETERS)
def run(
    model: str,
    plan: Plan | Source,
    instance: Instance | Source | None = None,
    *,
    schedule: Schedule | ScheduleName | str | None = None,
    steps: int = 20,
    warm_up: int = 3,
    device: str = "cpu",
    sharing: str = "ddp",
    microbatches: int | None = None,
    microbatch_size: int | None = None,
    arguments_of_model: Mapping[str, object] | None = None,
    inputs: Iterable[str] = (),
    vertical_sync: bool = False,
) -> Run:
    """Trains a PyTorch model by a plan, in processes on this machine, and measures it.

    model, arguments_of_model, inputs: as in ``profile``. plan: of a workload with module paths. A ``Plan`` needs its
    ``instance``, which also gives the promised time that the run is compared with; without an instance, the plan's
    document gives it. schedule: None: the plan's own. steps: the number of measured ones, after ``warm_up`` others.
    device: "cpu" or "cuda", where each rank takes a GPU. sharing: "ddp" or "fully-shard", how replicas of a stage share
    their work.
    microbatches, microbatch_size: N, and samples of one, in place of the plan's. vertical_sync: under pipedream, all
    stages use the version of the weights that was newest when a microbatch entered.

    Raises UsageError for a plan that torch's pipelines cannot run, InputError for a model that the plan does not fit
    and for errors in it, LimitError if memory is too small, and ClusterError if a process is lost.

    >>> import piper_ray
    >>> piper_ray.run("models.py:small_gpt", "plan.json", "workload.toml", steps=5)  # doctest: +SKIP
    """
    options = JobOptions(
        model=model,
        arguments=arguments_of_model or {},
        inputs=tuple(inputs),
        microbatches=microbatches,
        microbatch=microbatch_size,
        device=device,
        sharing=Replicas(arguments.choice("sharing", sharing, Replicas)),
        steps=steps,
        warm_up=warm_up,
        vertical_sync=vertical_sync,
    )
    job, promise = prepared(plan, instance, schedule, options)
    stop: Stop[Any] = Stop()
    return promise.given_to(launch(job, lambda _done, _all: None, stop))


@dataclass(frozen=True)
class Promise:
    """What a ``Run`` is compared with, by the names of its fields. load: the load of this machine before anything is
    started."""

    promised_s: float | None
    simulation: Simulation | None
    measured_threads: int | None
    load: float | None

    def given_to(self, run: Run) -> Run:
        """The run with the promised figures."""
        return replace(run, **vars(self))


def prepared(
    plan: Plan | Source,
    instance: Instance | Source | None,
    schedule: Schedule | ScheduleName | str | None,
    options: JobOptions,
) -> tuple[Job, Promise]:
    """Prepares ``run`` without starting anything. Raises UsageError, InputError and InvalidPlan."""
    load = machine_load()
    require("torch", "run")
    known = None if instance is None else _with_batch(instance_of(instance), options.microbatches)
    document, terms, of_plan = _document(plan, known)
    chosen = Schedule.first_of(schedule, of_plan, None if known is None else known.schedule)
    read = planned(document)
    job = job_of(read, chosen, options)
    if known is not None:
        made = plan if isinstance(plan, Plan) else load_plan(plan, known)
        flush_terms = StepTerms() if chosen.asynchronous else terms
        simulation = simulate(known, made, chosen, options=SimulationOptions.of(flush_terms))
        return job, Promise(simulation.step_s, simulation, read.measured_threads, load)
    as_planned = read.time_per_sample_s is not None and (job.microbatches, chosen) == (read.microbatches, of_plan)
    step_s = read.time_per_sample_s * job.microbatches if as_planned else None  # type: ignore[operator]
    return job, Promise(step_s, None, read.measured_threads, load)


def _with_batch(instance: Instance, microbatches: int | None) -> Instance:
    return instance if microbatches is None else instance.replace(microbatches=microbatches)


def _document(plan: Plan | Source, instance: Instance | None) -> tuple[Source, StepTerms, Schedule | None]:
    """The plan's document, complete if the instance is known; the terms of its step; its schedule."""
    if isinstance(plan, Plan):
        if instance is None:
            raise UsageError("a Plan does not say which modules its layers are; expected its instance too")
        return plan_document(instance, plan, None), StepTerms(), None
    if not isinstance(plan, (str, os.PathLike, Mapping)):
        raise UsageError(f"plan must be a Plan, a path or a document, not {arguments.shown(plan)}")
    claims = plan_claims(plan)
    document = plan if instance is None else plan_document(instance, load_plan(plan, instance), None)
    return document, claims.step, claims.schedule
