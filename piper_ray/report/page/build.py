"""From a workload and a plan to the page that is written."""

from __future__ import annotations

from pathlib import Path

from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import Schedule
from piper_ray.report.page.comparison import OnPlanner, compare
from piper_ray.report.page.render import page_html
from piper_ray.report.page.subject import Subject, subject_of, valued
from piper_ray.storage.files import write_atomically
from piper_ray.workloads.formats.claims import PlanClaims


def report_subject(
    instance: Instance,
    plan: Plan,
    schedule: Schedule,
    claims: PlanClaims,
    on_planner: OnPlanner = lambda done, total, name: None,  # noqa: ARG005
) -> Subject:
    """Simulates the plan and those of other planners. Raises as ``simulate`` does for the plan itself.

    Terms of a step are those that the plan was made with, as ``verify`` and ``simulate`` have them.
    """
    step = claims.step_under(schedule)
    found = valued(instance, plan, schedule, step)
    return subject_of(found, claims, compare(instance, schedule, step, on_planner=on_planner))


def write_page(subject: Subject, path: Path) -> None:
    """Whole or not at all. Raises UsageError if the file cannot be written."""
    write_atomically(path, page_html(subject))
