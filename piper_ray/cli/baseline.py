"""``piper-ray solve --planner``: the plan of a simpler planner, to compare with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import typer

from piper_ray.cli.interrupts import current
from piper_ray.cli.options import option
from piper_ray.cli.telling import Unwritten, say, working
from piper_ray.model.errors import EXIT_SOLVED, InfeasibleError, UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.options import EXACT
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.schedule import Schedule


@dataclass(frozen=True)
class PlannerOption:
    """Who plans."""

    planner: str = option(
        "NAME",
        "piper, the exact one, or one to compare with: pipedream-2bw, megatron, gpipe, data-parallel, tensor-parallel, "
        "pipedream, piper-published. Some take settings, as NAME:KEY=VALUE (the documentation lists them).",
        default=EXACT,
    )


_EXACT_ALONE = (
    "gap", "time_limit", "contract", "memory_limit", "address", "checkpoint", "chunks", "sustained", "all_reduce",
    "all_reduce_overlap", "optimizer", "runtime", "plans", "certificate",
)  # fmt: skip


def refuse_search_options(planner: str, given: Collection[str]) -> None:
    """Raises UsageError for an unknown planner, and for options that only the exact one knows."""
    from piper_ray.planners import planner_of

    planner_of(planner)
    for name in _EXACT_ALONE:
        if name in given:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} is for the exact planner; --planner {planner} knows nothing of it")


def solve_by_baseline(
    instance: Instance, schedule: Schedule, restrictions: Restrictions, planner: str, out: Path | None, *, json: bool
) -> int:
    """Prints the planner's plan, writes it to ``out``, and returns the exit status."""
    from piper_ray.planners import plan
    from piper_ray.report.document import baseline_document, baseline_facts, plan_document, to_text, write_atomically
    from piper_ray.report.layout import console
    from piper_ray.report.stages import print_plan
    from piper_ray.report.summary import cost_text, instance_lines, print_speed, schedule_line

    screen = console(stderr=json)
    for line in [*instance_lines(instance), schedule_line(schedule)]:
        screen.print(line, soft_wrap=True, highlight=False)
    with working(planner):
        result = current().run(lambda _: plan(instance, planner, restrictions=restrictions, schedule=schedule))
    screen.print()
    unwritten = Unwritten()
    if result.plan is None or result.evaluation is None:
        screen.print(f"{planner}: no plan: {result.note}", soft_wrap=True, markup=False, highlight=False)
        if out is not None:
            say(f"there is no plan to write to {out}")
    else:
        if not json:
            print_plan(screen, instance, result.plan, result.evaluation)
            screen.print()
        cost = cost_text(instance, result.evaluation.time_per_sample_s, result.evaluation.devices)
        screen.print(
            f"{planner}: {cost}; not proved to be the best",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
        print_speed(screen, instance, result.evaluation.time_per_sample_s)
        screen.print(f"{result.note}; best of {result.tried:,}", soft_wrap=True, markup=False, highlight=False)
        if out is not None:
            document = plan_document(instance, result.plan, result.evaluation, baseline_facts(result), result.schedule)
            with unwritten.noted():
                write_atomically(out, to_text(document))
    if json:
        typer.echo(to_text(baseline_document(instance, restrictions, result)), nl=False)
    unwritten.report()
    return EXIT_SOLVED if result.plan is not None else InfeasibleError.exit_code
