"""What ``solve --runtime`` and ``--plans`` add: a runtime's rules, what they cost, the next best plans, ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

import piper_ray
from piper_ray import Instance, Restrictions, Schedule, ScheduleName, Solution, SolveOptions, Status, Stop
from piper_ray.cli.interrupts import current
from piper_ray.cli.options import option
from piper_ray.cli.shared import ScheduleOptions
from piper_ray.cli.telling import Unwritten, note, working
from piper_ray.model.errors import PiperRayError, UsageError
from piper_ray.model.figures import least_text, percent_text, plural, size_text, time_text
from piper_ray.model.one_mode import context_of
from piper_ray.model.stop import StoppedBy
from piper_ray.runtimes.meshes import domain_of, gpus_per_node_of, meshes_of, node_sizes
from piper_ray.runtimes.runtime import RUNTIMES, Runtime, RuntimeName, rank_lines

if TYPE_CHECKING:
    from rich.console import Console

    from piper_ray import StepTerms
    from piper_ray.planners.alternatives import Alternatives
    from piper_ray.planners.apart import KindsApart
    from piper_ray.simulate.result import Simulation

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class NodeOption:
    """How ranks lie on nodes."""

    panel: ClassVar[str] = "Runtime"

    gpus_per_node: int | None = option("COUNT", "GPUs of a node, in place of the input's; 8 if it knows none.", min=1)


@dataclass(frozen=True)
class RuntimeOptions(NodeOption):
    """The runtime that plans are for, and how many of the best there are to be."""

    runtime: RuntimeName | None = option(
        None,
        "Find a plan that this training framework can run: its schedules, its recomputation, layers in the model's "
        "order, tensor parallelism within a node. Also says how much faster a plan without these rules could be.",
    )
    plans: int = option(
        "COUNT",
        "Also list the best plans of COUNT shapes (d, t, chunks), and what separates them. For schedules that flush "
        "each batch.",
        default=1,
        min=1,
    )
    tolerance: float = option(
        "SHARE",
        "With --plans: plans count as equally fast if they take at most this share longer than the fastest, such as "
        "0.01 for 1 %. Of these the one on the fewest devices is listed first, then the one of the simplest layout, "
        "then the one with the most memory to spare.",
        default=1e-3,
        min=0.0,
        max=1.0,
    )


_FREE_GAP = 5e-4
"""Gap of the plan without the runtime's rules: what the rules cost is shown to a tenth of a per cent."""

_FREE_LEAST_PASSES = 2_500_000_000
"""The passes that the search of the free plan may simulate at least, or work counted as such; it may do as much as that
of the runtime's own plan, where this is more."""


@dataclass(frozen=True)
class RuntimeSolve:
    """A solve for a runtime. free: the user's own restrictions."""

    runtime: Runtime
    gpus_per_node: int
    schedule: Schedule | ScheduleName
    restrictions: Restrictions
    free: Restrictions

    @classmethod
    def of(
        cls, asked: RuntimeOptions, instance: Instance, scheduled: ScheduleOptions, restrictions: Restrictions
    ) -> RuntimeSolve:
        """Raises UsageError for a schedule that the runtime has not got, and a model that it does not know."""
        assert asked.runtime is not None
        runtime = RUNTIMES[asked.runtime]
        node = gpus_per_node_of(instance, asked.gpus_per_node)
        schedule = runtime.schedule(scheduled.schedule, instance.schedule)
        name = schedule.name if isinstance(schedule, Schedule) else schedule
        kept = runtime.restricted(restrictions, instance, name, domain_of(instance, node))
        if (alone := runtime.on_one_rank(instance)) is not None:
            note(f"{alone}: plans have one rank")
        if scheduled.chunks is not None:
            schedule = Schedule(name, scheduled.chunks)
        return cls(runtime, node, schedule, kept, restrictions)

    def with_room(self, instance: Instance, solve: Callable[[Instance], Solution], stop: Stop[Solution]) -> Solution:
        """The best plan whose launch fits, with what is proved of all plans. solve: under the runtime's rules."""
        first: Solution | None = None

        def find(set_aside_bytes: float) -> Solution:
            nonlocal first
            if first is None:
                first = solve(instance)
                return first
            # Until a plan leaves this much memory, only the first one is known.
            stop.offer(lambda: first)
            if set_aside_bytes >= min(own.memory_bytes for own in instance.cluster.alike):
                return first
            left = instance.cluster.with_memory(lambda own_bytes: own_bytes - set_aside_bytes)
            return _bounded(solve(instance.replace(cluster=left)), first)

        def missing_bytes(found: Solution) -> float:
            reason = found.stopped_by
            ended = stop.requested or (reason is not None and reason.ends_all)
            return 0.0 if ended else self._missing_bytes(instance, found)

        return with_room(self.runtime.title, find, missing_bytes)

    def _missing_bytes(self, instance: Instance, found: Solution) -> float:
        from piper_ray.export.files import Target
        from piper_ray.export.targets import export_plan

        if found.plan is None:
            return 0.0
        target = Target(self.runtime.name.value)
        try:
            return export_plan(instance, found.plan, found.schedule, target, self.gpus_per_node).missing_bytes
        except PiperRayError:  # the export itself says what it cannot hold
            return 0.0

    def without_rules(self, instance: Instance, solution: Solution, options: SolveOptions) -> Solution:
        """The plan that the runtime's rules keep us from, under the same schedule."""
        degrees = solution.stats.degrees
        passes = max(_FREE_LEAST_PASSES, 0 if degrees is None else degrees.passes)
        asked = replace(options, gap=max(options.gap, _FREE_GAP), resume=None, passes_limit=passes)

        def search(stop: Stop[Solution]) -> Solution:
            found = piper_ray.solve(
                instance,
                restrictions=self.free,
                options=asked,
                stop=stop,
                schedule=self.schedule,
                step=solution.step,
            )
            stop.conclude(found)
            return found

        with working(f"the best plan without {self.runtime.title}'s rules"):
            return current().run(search)

    def cost_text(self, solution: Solution, free: Solution) -> str:
        """``1.8 % slower than without Megatron's rules``."""
        mine_s, free_s = solution.time_per_sample_s, free.time_per_sample_s
        rules = f"without {self.runtime.title}'s rules"
        if mine_s is None:
            return f"a plan {rules} is there" if free_s is not None else f"no plan {rules} was found either"
        ended = "" if free.stopped_by is not StoppedBy.TIME_LIMIT else "; the search for it met its time limit"
        if free_s is None:
            return f"no plan was found {rules}{ended}"
        most = mine_s / free.lower_bound_s - 1.0 if free.lower_bound_s > 0 else float("inf")
        least = mine_s / free_s - 1.0
        if least < 0.0:
            bound = "" if most == float("inf") else f"; they cost {_percent(max(0.0, most))} at most"
            return f"no faster plan {rules} was found{bound}{ended}"
        known = most - least <= 2.0 * _FREE_GAP
        if known and least < _FREE_GAP:
            return f"as fast as the best plan {rules}"
        bound = "" if known or most == float("inf") else f", {_percent(most)} at most"
        how = f"{time_text(free_s)}/microbatch with {_differs(free)}"
        return f"{_percent(least)} slower than {rules}{bound}: {how}{ended}"

    def document(self, solution: Solution, free: Solution) -> dict[str, object]:
        """The document for ``solve --json``. The runtime's own plan is one without its rules, too."""
        known_s = [s for s in (solution.time_per_sample_s, free.time_per_sample_s) if s is not None]
        return {
            "name": self.runtime.name.value,
            "gpus_per_node": self.gpus_per_node,
            "rank_order": self.runtime.rank_order,
            "without_rules": {
                "time_per_sample_s": min(known_s, default=None),
                "lower_bound_s": free.lower_bound_s if math.isfinite(free.lower_bound_s) else None,
            },
        }

    def receives_lines(self, instance: Instance, solution: Solution, simulation: Simulation | None) -> list[str]:
        """What receives that the runtime posts early would cost, in a line; none where that is nothing."""
        from piper_ray.report.simulated import early_receives_text

        if simulation is None or solution.plan is None or not self.runtime.one_stream:
            return []
        text = early_receives_text(instance, solution.plan, simulation)
        return [f"receives: {text}"] if text else []

    def rank_lines(self, instance: Instance, solution: Solution, most: int | None) -> list[str]:
        """The lines that say where each rank of the plan is. most: see ``shortened``."""
        from piper_ray.report.terminal import left_out_text, shortened

        if solution.plan is None:
            return []
        context = context_of(instance, solution.plan)
        nodes = node_sizes(instance, self.gpus_per_node)
        meshes = meshes_of(solution.plan, solution.schedule, nodes, instance.cluster)
        lines = rank_lines(meshes, solution.schedule, context)
        head = f"ranks in {self.runtime.title}'s order, {self.runtime.rank_order}:"
        return [head, *(f"  {line}" for line in shortened(lines, left_out_text(len(lines), most or 0), most))]


def with_room(runtime: str, find: Callable[[float], _Found], missing_bytes: Callable[[_Found], float]) -> _Found:
    """Finds a plan whose launch fits although the runtime holds memory besides a plan's figures.

    find: finds the best plan with a number of bytes of each device set aside. missing_bytes: what has to be set aside
    for the launch of what was found to fit; 0 where it does, or nobody waits for more. runtime: its title.
    """
    set_aside_bytes, found = 0.0, find(0.0)
    while (wanted_bytes := missing_bytes(found)) > set_aside_bytes:
        note(
            f"the best plan leaves less than the {size_text(wanted_bytes)} that {runtime} needs for itself: the "
            "search starts again with that set aside"
        )
        set_aside_bytes, found = wanted_bytes, find(wanted_bytes)
    return found


def _percent(share: float) -> str:
    return f"{100.0 * share:.1f} %"


def _differs(free: Solution) -> str:
    plan = free.plan
    assert plan is not None
    ids = sorted({tmpc_id for stage in plan.stages for tmpc_id in stage.tmpc_ids.values()})
    ranks = plan.by_rank(free.schedule)
    stage = plan.stages[0]
    degrees = f"d={stage.data_parallel_degree} t={stage.tensor_parallel_degree}"
    return f"{plural(len(ranks.stages), 'rank')}, {degrees}, layers run as {', '.join(ids[:6])}"


def _bounded(found: Solution, first: Solution) -> Solution:
    """A plan of those that leave some memory, with the bound of all; the first one if there is none."""
    if found.plan is None or found.time_per_sample_s is None:
        return first
    return replace(found, status=Status.FEASIBLE, lower_bound_s=min(first.lower_bound_s, found.time_per_sample_s))


def refuse_alternatives(asked: RuntimeOptions, schedule: Schedule | ScheduleName) -> None:
    """Raises UsageError where more plans than one are asked for under a schedule without a flush."""
    if asked.plans > 1 and Schedule.of(schedule).asynchronous:
        raise UsageError("--plans is for schedules with a flush: add --schedule or --runtime")


def find_alternatives(
    instance: Instance,
    restrictions: Restrictions,
    schedule: Schedule | ScheduleName,
    asked: RuntimeOptions,
    given: SolveOptions,
    solution: Solution,
) -> Alternatives:
    """The next best plans, for a schedule that ``refuse_alternatives`` lets pass."""
    from piper_ray.planners.alternatives import best_plans

    options = replace(given, resume=None)
    with working("the next best plans"):
        return current().run(
            lambda stop: best_plans(
                instance,
                restrictions,
                schedule,
                solution,
                count=asked.plans,
                tolerance=asked.tolerance,
                options=options,
                stop=stop,
            )
        )


def find_apart(
    instance: Instance, restrictions: Restrictions, schedule: Schedule, step: StepTerms, options: SolveOptions
) -> KindsApart | None:
    """The best pipelines of one kind of devices each; None where none fit."""
    from piper_ray.planners.apart import kinds_apart

    asked = replace(options, resume=None, gap=max(options.gap, _FREE_GAP), time_limit_s=None)
    with working("pipelines of one kind each"):
        # In a tuple, as that none fit is an answer: None means that a stopped search had found nothing.
        (found,) = current().run(lambda stop: (kinds_apart(instance, restrictions, schedule.name, step, asked, stop),))
    return found


def print_alternatives(
    console: Console, instance: Instance, found: Alternatives, tolerance: float, layouts: int | None
) -> None:
    """The plans, and what separates each from the first one. layouts: of so many plans, in Megatron's letters; None:
    of all."""
    from piper_ray.report.comparison import ComparedPlan, print_against_first, print_comparison, print_layouts
    from piper_ray.report.terminal import print_lines

    plans = [ComparedPlan(str(number), one.plan, one.simulation) for number, one in enumerate(found.found, start=1)]
    console.print(
        f"the best {plural(len(plans), 'plan')} of different degrees and chunks ({plural(found.looked_at, 'solve')}):"
    )
    if not plans:
        return
    print_comparison(console, instance, plans)
    if len(plans) > 1:
        print_against_first(console, plans, [one.spare_bytes for one in found.found])
    print_layouts(console, instance, plans[:layouts])
    lines = []
    if found.tied > 1:
        lines.append(
            f"1 to {found.tied} are within {percent_text(tolerance)} of each other: fewest devices first, then the "
            "simplest layout, then the most memory to spare"
        )
    if found.left_from_s is not None:
        least = least_text(found.left_from_s)
        lines.append(f"time limit: no shape that is left takes less than {least}/microbatch")
    print_lines(console, lines)


def alternatives_document(instance: Instance, found: Alternatives) -> list[dict[str, object]]:
    """The alternatives' figures and stages, for ``solve --json``."""
    from piper_ray.report.comparison import ComparedPlan, comparison_document
    from piper_ray.workloads.formats.plans import stage_documents

    plans = [ComparedPlan(str(number), one.plan, one.simulation) for number, one in enumerate(found.found, start=1)]
    return [
        document | {"plan": {"stages": stage_documents(instance, x.plan, x.simulation.schedule), **x.plan.rule_dict()}}
        for document, x in zip(comparison_document(instance, plans), plans, strict=True)
    ]


def write_alternatives(out: Path, instance: Instance, found: Alternatives, unwritten: Unwritten) -> None:
    """``plan-1.json`` and so on, next to ``plan.json``."""
    for number, one in enumerate(found.found, start=1):
        with unwritten.noted():
            piper_ray.dump_plan(one.plan, out.with_stem(f"{out.stem}-{number}"), instance, one.simulation.schedule)
