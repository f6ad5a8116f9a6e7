"""The JSON documents: of an instance, of a solve, of a check, and the plan file in upstream's form with our figures.

Also the machine that plans are charged for: groups of devices with their links, stage borders, and rings of replicas.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from piper_ray.evaluate import Evaluation
from piper_ray.model import arguments
from piper_ray.model.cluster import Cluster, DeviceKind
from piper_ray.model.constraints import Restrictions
from piper_ray.model.fields import plain_data, plain_fields
from piper_ray.model.figures import given_size_text, printable, time_text
from piper_ray.model.instance import Batch, Instance
from piper_ray.model.options import Contract, SolveOptions
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import FLUSHED, PAPERS_SCHEDULE, Schedule, StepTerms
from piper_ray.model.solution import BlockStats, Forecast, Solution
from piper_ray.report.terminal import Column
from piper_ray.workloads.formats.load import instance_of
from piper_ray.workloads.formats.plans import Document, header, stage_documents

if TYPE_CHECKING:
    from piper_ray.engine.frontier.result import Frontier, FrontierPoint
    from piper_ray.planners.planner import BaselineResult
    from piper_ray.simulate.result import Simulation
    from piper_ray.workloads.formats.load import Source


_Facts = dict[str, Any]
_SIZE_BYTES = 1e9


def machine_document(instance: Instance) -> list[_Facts]:
    """For each kind of devices, or for all: its groups, the smallest first, and the seconds that a device takes for a
    gigabyte: to hand it to the next stage, and to sum it over replicas of one device each, in a plan of one stage. With
    several sites the groups are those of one site, and rings go through all sites."""
    cluster = instance.cluster
    stages = 1 if Schedule.first_of(instance.schedule).name in FLUSHED else None
    found: list[_Facts] = []
    for kind in cluster.kinds or (DeviceKind("", cluster),):
        own = cluster.of_kind(kind.name) if cluster.kinds else cluster.levels()[-1]
        found.append(
            {
                "kind": kind.name,
                "devices": own.devices,
                "groups": [_group(own, level) for level in range(len(own.links))],
                "border_s_per_gb": own.transfer_s(_SIZE_BYTES),
                "ring_s_per_gb": {
                    str(d): own.replicas_link(d, 1, stages).resync_s(_SIZE_BYTES, 1) * (d - 1) / d for d in _rings(own)
                },
            }
        )
    return found


def machine_table(instance: Instance) -> tuple[list[Column], list[list[str]]]:
    """The same, a column for each kind."""
    found, between_bytes_per_s = machine_document(instance), instance.cluster.between_bytes_per_s
    rows = [["groups", *(", ".join(map(_group_text, one["groups"])) for one in found)]]
    uplinks = [_uplinks_text(one["groups"]) for one in found]
    rows += [["shared uplinks", *uplinks]] if any(uplinks) else []
    where = "" if between_bytes_per_s is None else " (1f1b, gpipe)"
    rows += [
        [f"to the next stage, within {devices:,}{where}", *(_within_text(one, devices) for one in found)]
        for devices in sorted({group["devices"] for one in found for group in one["groups"][:-1]})
    ]
    rows.append(["to the next stage", *(_time(one["border_s_per_gb"]) for one in found)])
    if any(uplinks):
        alone_s = [one["groups"][-1]["lone_border_s_per_gb"] for one in found]
        rows.append(["the same, if one of a group sends (1f1b, gpipe)", *map(_time, alone_s)])
    if between_bytes_per_s is not None:
        rows.append([f"to another {instance.kind_word}", *[_time(_SIZE_BYTES / between_bytes_per_s)] * len(found)])
    for d in sorted({int(d) for one in found for d in one["ring_s_per_gb"]}):
        times_s = [one["ring_s_per_gb"].get(str(d)) for one in found]
        rows.append([f"summed over {d:,} replicas", *("" if x is None else _time(x) for x in times_s)])
    columns = [Column("A GB of a device"), *(Column(printable(one["kind"]) or "time", right=True) for one in found)]
    return columns, rows


def _time(seconds: float) -> str:
    return time_text(seconds, 4)


def _group(own: Cluster, level: int) -> _Facts:
    """border_s_per_gb: between devices that no smaller group holds, where all devices of smaller groups send at once.
    lone_border_s_per_gb: where one of each does."""
    link, alone_bytes_per_s = own.links[level], own.level_bytes_per_s(level, 1)
    return {
        "devices": min(link.devices or own.at_site.devices, own.at_site.devices),
        "bandwidth_bytes_per_s": alone_bytes_per_s,
        "uplink_bytes_per_s": link.uplink_bytes_per_s,
        "border_s_per_gb": _SIZE_BYTES / own.level_bytes_per_s(level),
        "lone_border_s_per_gb": _SIZE_BYTES / alone_bytes_per_s,
    }


def _within_text(one: _Facts, devices: int) -> str:
    return next((_time(x["border_s_per_gb"]) for x in one["groups"][:-1] if x["devices"] == devices), "")


def _group_text(group: _Facts) -> str:
    return f"{group['devices']:,} at {given_size_text(group['bandwidth_bytes_per_s'])}/s"


def _uplinks_text(groups: list[_Facts]) -> str:
    shared = ((group["uplink_bytes_per_s"], group["devices"]) for group in groups)
    return ", ".join(f"{given_size_text(rate)}/s of {devices:,}" for rate, devices in shared if rate is not None)


def _rings(cluster: Cluster) -> list[int]:
    """Powers of two, full groups, and all devices."""
    sizes = {link.devices for link in cluster.links if link.devices is not None and link.devices <= cluster.devices}
    sizes |= {2**k for k in range(1, cluster.devices.bit_length())} | {cluster.devices}
    return sorted(size for size in sizes - {1} if size % (len(cluster.sites) or 1) == 0)


def solution_document(
    instance: Instance,
    restrictions: Restrictions,
    options: SolveOptions,
    solution: Solution,
    evaluation: Evaluation | None,
    simulation: Simulation | None = None,
) -> Document:
    """Everything about a solve, with or without a plan. Times in s, sizes in bytes; null: not known or without end."""
    return {
        **header("solution", instance, solution.plan),
        "restrictions": restrictions.to_dict(),
        "options": plain_data(options),
        **proof_document(solution),
        "stopped_by": plain_data(solution.stopped_by),
        **_valued(instance, solution.plan, evaluation, solution.schedule),
        "simulated": _simulated_document(instance, simulation),
        "infeasibility": plain_data(solution.infeasibility),
        "blocks": _blocks_document(solution.blocks),
        "stats": plain_data(solution.stats),
    }


def plan_document(
    instance: Instance,
    plan: Plan,
    evaluation: Evaluation | None,
    origin: Document,
    schedule: Schedule = PAPERS_SCHEDULE,
) -> Document:
    """The plan file: upstream's ``stages`` first, with our figures in each, then what they hold for.

    evaluation: None for a plan of another schedule than Piper's. origin: what is known of the plan: ``proof_document``
    of a solve, or ``baseline_facts`` of another planner.
    """
    time_s = {} if evaluation is None else {"time_per_sample_s": evaluation.time_per_sample_s}
    return {
        **_plan_with_figures(instance, plan, evaluation, schedule),
        **header("plan", instance, plan),
        **time_s,
        **origin,
    }


def proof_document(solution: Solution) -> Document:
    """What a solve proved about its plan."""
    return {
        **solution.schedule.to_dict(),
        "step": _step_document(solution.step),
        "time_per_sample_s": solution.time_per_sample_s,
        "status": solution.status.value,
        "lower_bound_s": plain_data(solution.lower_bound_s),
        "gap": solution.gap,
    }


def workload_text(instance: Instance, header: Iterable[str]) -> str:
    """The instance as TOML under lines that say how it was made and how to read it."""
    from piper_ray.workloads.formats.load import to_toml

    comment = "".join(f"# {printable(line)}".rstrip() + "\n" for line in header)
    return f"{comment}\n{to_toml(instance)}"


def _step_document(step: StepTerms) -> object:
    return None if step == StepTerms() else plain_data(step)


def baseline_facts(result: BaselineResult) -> Document:
    """The planner that made the plan, out of how many candidates, and what it says of the plan."""
    facts = {"planner": result.planner, "tried": result.tried, "note": result.note}
    return {**result.schedule.to_dict(), **facts}


def baseline_document(instance: Instance, restrictions: Restrictions, result: BaselineResult) -> Document:
    """Everything about another planner's answer, with or without a plan."""
    return {
        **header("baseline", instance),
        "restrictions": restrictions.to_dict(),
        **baseline_facts(result),
        "time_per_sample_s": result.time_per_sample_s,
        **_valued(instance, result.plan if result.evaluation else None, result.evaluation, result.schedule),
    }


def frontier_document(
    instance: Instance,
    restrictions: Restrictions,
    options: SolveOptions,
    frontier: Frontier,
    budgets: Sequence[FrontierPoint],
) -> Document:
    """All points of both curves; ``budgets``: those along the bound on the sum of data-parallel degrees, if any."""
    return {
        **header("frontier", instance),
        "restrictions": restrictions.to_dict(),
        "options": plain_data(options),
        **frontier.schedule.to_dict(),
        **({"chunks": None} if frontier.chunks_differ else {}),
        "stopped_by": plain_data(frontier.stopped_by),
        "reason": frontier.reason,
        "by_devices": [plain_fields(point, _POINT) for point in frontier.points()],
        "by_budget": [plain_fields(point, _POINT) for point in budgets],
        "stats": plain_data(frontier.stats),
    }


def kind_document(
    instance: Instance, restrictions: Restrictions, options: SolveOptions, schedule: Schedule, rows: Sequence[Document]
) -> Document:
    """A table over the devices of two kinds."""
    return {
        **header("frontier", instance),
        "restrictions": restrictions.to_dict(),
        "options": plain_data(options),
        **schedule.to_dict(),
        "by_kinds": [*rows],
    }


def verification_document(
    instance: Instance,
    plan: Plan,
    schedule: Schedule,
    evaluation: Evaluation | None,
    simulation: Simulation | None,
    violations: tuple[str, ...],
) -> Document:
    """What ``verify`` found: the plan's cost under a schedule, or every rule it breaks."""
    found = evaluation or simulation
    return {
        **header("verification", instance),
        **schedule.to_dict(),
        "valid": found is not None,
        "violations": list(violations),
        "time_per_sample_s": None if found is None else found.time_per_sample_s,
        "simulated": _simulated_document(instance, simulation),
        **_valued(instance, plan, evaluation, schedule),
    }


def to_text(document: Mapping[str, object]) -> str:
    """The document as strict JSON: no NaN and no infinity."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def speed_document(batch: Batch, time_per_sample_s: float) -> dict[str, object]:
    """How fast a plan is; null: not known, or without end."""

    def rate(count: int | None) -> float | None:
        return None if count is None or time_per_sample_s <= 0 else count / time_per_sample_s

    return {
        "step_s": batch.step_s(time_per_sample_s),
        "microbatches_per_s": rate(1),
        "samples_per_s": rate(batch.samples_per_microbatch),
        "tokens_per_s": rate(batch.tokens_per_microbatch),
    }


_FIGURES = (
    "devices", "time_s", "compute_s", "communication_s", "resync_s", "memory_bytes", "in_flight_microbatches"
)  # fmt: skip
_POINT = ("devices", "data_parallel_budget", "status", "time_per_sample_s", "lower_bound_s", "gap")
_RANK = ("replica", "devices", "compute_s", "communication_s", "waiting_s", "bubble_s", "in_flight")


def _valued(instance: Instance, plan: Plan | None, evaluation: Evaluation | None, schedule: Schedule) -> Document:
    """A plan and what it costs, as far as there are such."""
    return {
        "plan": None if plan is None else _plan_with_figures(instance, plan, evaluation, schedule),
        "evaluation": None
        if evaluation is None
        else {
            "time_per_sample_s": evaluation.time_per_sample_s,
            **speed_document(instance.batch, evaluation.time_per_sample_s),
            **plain_fields(evaluation, ("devices", "data_parallel_sum")),
            "stages": len(evaluation.stages),
            "bottleneck": evaluation.bottleneck,
        },
    }


def _plan_with_figures(instance: Instance, plan: Plan, evaluation: Evaluation | None, schedule: Schedule) -> Document:
    stages = stage_documents(instance, plan, schedule)
    for written, stage in zip(stages, evaluation.stages if evaluation else (), strict=evaluation is not None):
        written["figures"] = {**plain_fields(stage, _FIGURES), "binds": list(stage.binding)}
    return {"stages": stages, **plan.rule_dict()}


def _simulated_document(instance: Instance, simulation: Simulation | None) -> Document | None:
    return (
        None
        if simulation is None
        else {
            "time_per_sample_s": simulation.time_per_sample_s,
            **speed_document(instance.batch, simulation.time_per_sample_s),
            "bubble_share": simulation.bubble_share,
            "peak_memory_bytes": [rank.peak_memory_bytes for rank in simulation.ranks],
        }
    )


def simulation_document(instance: Instance, simulation: Simulation) -> Document:
    """Everything but the events: ``Simulation.trace`` has those. Times in s, sizes in bytes."""
    from piper_ray.report.simulated import findings

    seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for part in simulation.critical_path:  # how long it stays on each rank, and with what
        seconds[part.rank][part.what] += part.duration_s
    of_batch = plain_fields(simulation.batch, ("samples_per_microbatch", "tokens_per_sample"))
    rates = ("samples_per_s", "tokens_per_s")
    return {
        **header("simulation", instance),
        **simulation.schedule.to_dict(),
        "options": {**plain_fields(simulation.options), **of_batch},
        **plain_fields(simulation, ("step_s", "time_per_sample_s")),
        **(plain_fields(simulation, rates) if simulation.step_s > 0 else dict.fromkeys(rates)),
        **plain_fields(
            simulation,
            ("promised_s", "keeps_promise", "steady", "pipelines", "window_s", "bubble_share", "in_flight"),
        ),
        "sustaining_in_flight": plain_data(simulation.sustaining),
        "ranks": [
            {
                "stages": [stage + 1 for stage in rank.stages],
                **plain_fields(rank, (*_RANK, "peak_memory_bytes")),
                "weight_versions": plain_data(rank.versions),
            }
            for rank in simulation.ranks
        ],
        "critical_path": [{"rank": rank, "seconds": dict(seconds[rank])} for rank in sorted(seconds)],
        "findings": list(findings(simulation)),
        "notes": list(simulation.notes),
    }


def _blocks_document(blocks: BlockStats | None) -> Document | None:
    """The document of the blocks, with the old name of its time for one more version."""
    if blocks is None:
        return None
    return {**plain_fields(blocks), "time_per_sample": blocks.time_per_sample_s}


def info(instance: Instance | Source, *, contract: Contract = Contract.SAFE) -> dict[str, object]:
    """The document of ``info --json``: the instance's figures, its TMPCs by degree, and the forecast of a solve.

    contract: as in ``SolveOptions``. Raises InputError for an instance that is not sound, UsageError for arguments that
    make no sense.

    >>> import piper_ray
    >>> found = piper_ray.info(piper_ray.estimate("bert-large", "A100-80"))
    >>> found["instance"]["layers"], found["forecast"]["downsets"]
    (26, 27)
    """
    from piper_ray.engine.preview import lattice_input

    found, contract = instance_of(instance), arguments.choice("contract", contract, Contract)
    planned = lattice_input(found, contract)
    return info_document(found, planned.forecast, planned.blocks)


def info_document(instance: Instance, forecast: Forecast, blocks: BlockStats | None) -> Document:
    """What ``info`` found."""
    return {
        **header("info", instance),
        "tensor_parallel_degrees": list(instance.degrees),
        "tmpcs": degree_rows(instance),
        "blocks": None if blocks is None else dataclasses.asdict(blocks),
        "forecast": dataclasses.asdict(forecast),
        "machine": machine_document(instance),
    }


def degree_rows(instance: Instance) -> list[Document]:
    """For each tensor-parallel degree: how many layers and TMPCs have it, and how many of these recompute."""
    rows: list[Document] = []
    for degree in instance.degrees:
        lists = [layer.tmpcs.get(degree, ()) for layer in instance.layers]
        tmpcs = [tmpc for tmpcs in lists for tmpc in tmpcs]
        rows.append(
            {
                "tensor_parallel_degree": degree,
                "layers": sum(1 for tmpcs_of_layer in lists if tmpcs_of_layer),
                "tmpcs": len(tmpcs),
                "recompute": sum(tmpc.recompute for tmpc in tmpcs),
            }
        )
    return rows
