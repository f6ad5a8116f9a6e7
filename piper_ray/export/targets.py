"""A plan in each of the forms of export, with a README and the map of its ranks."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from piper_ray.export.deepspeed import export_deepspeed
from piper_ray.export.files import RANKS, Export, Target, noted, rendered
from piper_ray.export.job import ExportJob, make_job
from piper_ray.export.megatron import export_bridge, export_flagscale, export_megatron, require_bridge_model
from piper_ray.export.megatron_model import require_flagscale_model, require_megatron_model
from piper_ray.export.stage_documents import export_torch, export_yaml
from piper_ray.export.torchtitan import export_torchtitan
from piper_ray.export.torchtitan_model import require_titan_model
from piper_ray.export.training import TRAINING
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import bytes_text, plural
from piper_ray.model.instance import Instance, TrainedModel
from piper_ray.model.mode import Sharding
from piper_ray.model.one_mode import OneMode
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.runtimes.runtime import RUNTIMES, RankPlace, Runtime, RuntimeName, rank_lines, rank_places
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.run import simulate
from piper_ray.workloads.estimate.decoder_shape import decoder_shape

_ANY_RUNTIME = Runtime(
    RuntimeName.TORCH,
    "a launcher of your own",
    tuple(ScheduleName),
    OneMode(
        by_layer=True,
        offload=True,
        context=True,
        experts=True,
        expert_tensor=True,
        gathered=True,
        most_sharding=Sharding.WEIGHTS,
    ),
    blocks=False,
)
"""The rules for a plan without a runtime: one d and one t, and layers in order."""


def _any_model(model: TrainedModel) -> None:
    """Accepts any model, for forms that do not describe the model."""


@dataclass(frozen=True)
class _Form:
    """How a form of export expresses a plan. runtime: the runtime whose rules the plan keeps. require: raises
    UsageError for a model that the form cannot express.
    groups: whether only some replicas can divide the optimizer's state; otherwise all do, or none."""

    runtime: Runtime
    write: Callable[[ExportJob], Export]
    require: Callable[[TrainedModel], object] = _any_model
    groups: bool = False


_FORMS = {
    Target.MEGATRON: _Form(RUNTIMES[RuntimeName.MEGATRON], export_megatron, require_megatron_model),
    Target.MEGATRON_BRIDGE: _Form(RUNTIMES[RuntimeName.MEGATRON], export_bridge, require_bridge_model),
    Target.TORCHTITAN: _Form(RUNTIMES[RuntimeName.TORCHTITAN], export_torchtitan, require_titan_model, groups=True),
    Target.TORCH: _Form(RUNTIMES[RuntimeName.TORCH], export_torch),
    Target.DEEPSPEED: _Form(RUNTIMES[RuntimeName.DEEPSPEED], export_deepspeed),
    Target.FLAGSCALE: _Form(RUNTIMES[RuntimeName.FLAGSCALE], export_flagscale, require_flagscale_model),
    Target.YAML: _Form(_ANY_RUNTIME, export_yaml, groups=True),
}


def _check_model(model: TrainedModel, target: Target) -> None:
    """Raises UsageError for a model that the form cannot express, or that its runtime cannot train in the planned
    way."""
    if broken := list(TRAINING[target].broken_by(model)):
        raise UsageError("; ".join(broken))
    _FORMS[target].require(model)


def exportable(model: TrainedModel, target: Target) -> str | None:
    """Why the form cannot express the model, whatever the plan; None if it can."""
    try:
        _check_model(model, target)
    except UsageError as error:
        return str(error)
    return None


def export_plan(instance: Instance, plan: Plan, schedule: Schedule, target: Target, gpus_per_node: int) -> Export:
    """The plan in a target's form, with ``README.md`` and ``ranks.csv``.

    Raises UsageError for what the form cannot hold, by name, UnsupportedPlan for a plan that the runtime cannot run,
    and InvalidPlan for one that breaks a rule of the problem. A lack of memory is noted (``Export.excess``).
    """
    form = _FORMS[target]
    job = make_job(instance, plan, schedule, form.runtime, gpus_per_node)
    if instance.model is not None:
        _check_model(instance.model, target)
    written = form.write(job)
    simulation = simulate(instance, plan, schedule)
    excess = (*simulation.memory_violations, *_violations_beyond(written, simulation))
    too_much = (f"more memory is needed than there is: {text}" for text in excess)
    of_all = noted("notes.jinja", job=job, groups=form.groups, plural=plural)
    notes = (*too_much, *written.notes, *of_all, *_assumed(instance.model, form))
    found = replace(written, notes=notes, excess=excess)
    return replace(found, files={**found.files, RANKS: _ranks_csv(job), "README.md": _readme(job, target, found)})


def _assumed(model: TrainedModel | None, form: _Form) -> Iterator[str]:
    """A sentence on figures of the model that its config does not state, for forms that describe the model."""
    shape = None if model is None or form.require is _any_model else decoder_shape(model)
    if shape is not None and shape.assumed:
        yield (
            f"the model's config does not say {', '.join(shape.assumed)}: usual figures are launched, perhaps not the "
            "model's own; take its own config.json, or change them"
        )


_MIB = 2.0**20


def _violations_beyond(written: Export, simulation: Simulation) -> Iterator[str]:
    """Sentences about ranks that fit by the plan's figures, but not with the runtime's additional memory."""
    for rank in simulation.ranks:
        limit_bytes = rank.memory_limit_bytes
        room = limit_bytes - rank.peak_memory_bytes
        beyond = written.beyond_bytes[rank.stages[0]] if written.beyond_bytes else 0.0
        if 0.0 <= room < beyond:
            yield (
                f"{rank.name} needs {bytes_text(rank.peak_memory_bytes)} on each device and {bytes_text(beyond)} more "
                f"for the runtime itself, {bytes_text(beyond - room)} more than it has (a plan made with --memory "
                f"{max(limit_bytes - beyond, 0.0) // _MIB:.0f}MiB leaves room for as much)"
            )


def _ranks_csv(job: ExportJob) -> str:
    kinds, text = bool(job.instance.cluster.kinds), io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow((*RankPlace._fields, *["kind"] * kinds))
    for place in rank_places(job.meshes, job.schedule, job.context_parallel):
        fields = place._asdict() | {"stages": " ".join(map(str, place.stages))}
        lines.writerow((*fields.values(), *[job.plan.stages[place.stages[0]].kind] * kinds))
    return text.getvalue()


def _readme(job: ExportJob, target: Target, export: Export) -> str:
    lines = rank_lines(job.meshes, job.schedule, job.context_parallel)
    return rendered("README.md.jinja", job=job, target=target.value, export=export, lines=lines, plural=plural)
