"""The page itself: one HTML file that needs no other file, no network and no script."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from markupsafe import Markup

from piper_ray.model.constraints import choices_made
from piper_ray.model.figures import given_size_text, plural, printable
from piper_ray.model.instance import Instance
from piper_ray.model.passes import passes_of
from piper_ray.model.plan import Plan
from piper_ray.model.plan_rules import lies_in_groups, stage_borders
from piper_ray.model.schedule import CHUNKED
from piper_ray.report.document import speed_document
from piper_ray.report.page import tables
from piper_ray.report.page.pictures import memory_picture, placements
from piper_ray.report.page.planned import PlannedPage
from piper_ray.report.page.subject import Subject
from piper_ray.report.plots.timeline import timeline_element
from piper_ray.report.simulated import findings
from piper_ray.report.summary import instance_lines, schedule_line
from piper_ray.report.templates import template
from piper_ray.simulate.result import Simulation
from piper_ray.storage.files import write_atomically
from piper_ray.version import __version__


def page_html(subject: Subject, planned: PlannedPage | None = None) -> str:
    """The same bytes for the same subject. planned: of a plan that ``piper-ray plan`` found; None compares with other
    planners."""
    found = subject.valued
    instance, simulation = found.instance, found.simulation
    name = printable(instance.name) or "workload"
    stages = len(found.plan.stages)
    title = f"{name}: a plan of {plural(stages, 'stage')} under {simulation.schedule.text}"
    by_stage, by_rank = tables.stage_groups(found), tables.rank_groups(found)
    return template(__package__, "page.html.jinja").render(
        title=planned.title if planned else title,
        planned=planned,
        style=Markup(files(__package__).joinpath("page.css").read_text(encoding="utf-8")),
        facts=[line.split(None, 1) for line in (*instance_lines(instance), schedule_line(simulation.schedule))],
        subject=subject,
        rates=speed_document(instance.batch, simulation.time_per_sample_s),
        faults=[printable(fault) for fault in found.faults],
        findings=[printable(text) for text in findings(simulation)],
        placements=placements(instance, found.plan, simulation),
        stages=tables.stage_table(found, by_stage),
        all_stages=tables.stage_table(found, tables.singles(stages)) if len(by_stage) < stages else None,
        timeline=Markup(timeline_element(simulation)),
        memory=memory_picture(simulation, by_rank),
        ranks=tables.rank_table(found, by_rank),
        all_ranks=tables.rank_table(found, tables.singles(len(simulation.ranks)))
        if len(by_rank) < len(simulation.ranks)
        else None,
        comparison=None if planned else tables.comparison_table(subject),
        origin=_origin(subject),
        assumptions=assumptions(instance, found.plan, simulation),
        notes=[printable(note) for note in (*subject.notes, *simulation.notes, *instance.notes)],
        digest=instance.digest,
        version=__version__,
        count_text=tables.count_text,
    )


def write_page(subject: Subject, path: Path, planned: PlannedPage | None = None) -> None:
    """Whole or not at all. Raises UsageError if the file cannot be written."""
    write_atomically(path, page_html(subject, planned))


def _origin(subject: Subject) -> str:
    claims = subject.claims
    if claims.planner is not None:
        made = f"The plan is that of {printable(claims.planner)}"
        return f"{made} ({printable(claims.note)})." if claims.note else f"{made}."
    if subject.lower_bound_s is not None:
        return f"The plan is the exact planner's: {printable(claims.status or 'feasible')}."
    return ""


def assumptions(instance: Instance, plan: Plan, simulation: Simulation) -> tuple[str, ...]:
    """What the figures assume of the schedule, the times and the cluster: sentences, the schedule's first."""
    chosen = [passes_of(tmpc) for stage in plan.stages for _, _, tmpc in choices_made(instance, stage)]
    cluster, schedule = instance.cluster, simulation.schedule
    rates = {x.bandwidth_bytes_per_s for x in stage_borders(cluster, plan, schedule)}
    rates = rates or {cluster.holding(simulation.devices).bandwidth_bytes_per_s}
    inner = {
        f"{given_size_text(link.bandwidth_bytes_per_s)}/s within {link.devices}": None
        for own in cluster.alike
        for link in own.links[:-1]
    }
    sentences = template(__package__, "assumptions.txt.jinja").render(
        plan=plan,
        schedule=schedule,
        options=simulation.options,
        chunked=schedule.name in CHUNKED,
        replicated=any(stage.data_parallel_degree > 1 for stage in simulation.stages),
        assumed=sum(passes.assumed for passes in chosen),
        unsplit=any(passes.weight_s is None for passes in chosen),
        rates=[f"{given_size_text(rate)}/s" for rate in sorted(rates)],
        groups=", ".join(inner),
        in_groups=lies_in_groups(cluster, plan, schedule),
        kinds=cluster.kinds,
        kind_word=instance.kind_word,
        sites=cluster.sites,
    )
    return tuple(sentences.splitlines())
