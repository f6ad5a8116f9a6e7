"""The page itself: one HTML file that needs nothing beside it, no network and no script."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from piper_ray.model.figures import percent_text, plural, printable, size_text, time_text
from piper_ray.report.page.assumptions import assumptions
from piper_ray.report.page.memory import memory_picture
from piper_ray.report.page.placement import COLOURS, placement
from piper_ray.report.page.subject import Subject
from piper_ray.report.page.tables import (
    Column,
    Table,
    comparison_table,
    count_text,
    rank_groups,
    rank_table,
    singles,
    stage_groups,
    stage_table,
)
from piper_ray.report.simulation.findings import findings
from piper_ray.report.simulation.picture import timeline_element
from piper_ray.report.speed import speed_text
from piper_ray.report.summary import instance_lines, schedule_line
from piper_ray.version import __version__


@dataclass(frozen=True)
class KeyFigure:
    """One of the figures on top. value: itself, in s, bytes, or as a share."""

    name: str
    head: str
    text: str
    value: float
    more: str = ""
    warns: bool = False


def page_html(subject: Subject) -> str:
    """The same bytes for the same subject."""
    found = subject.valued
    instance, simulation = found.instance, found.simulation
    name = printable(instance.name) or "workload"
    stages = len(found.plan.stages)
    by_stage, by_rank = stage_groups(found), rank_groups(found)
    return _template().render(
        title=f"{name}: a plan of {plural(stages, 'stage')} under {simulation.schedule.text}",
        style=Markup(_resource("page.css")),
        facts=[line.split(None, 1) for line in (*instance_lines(instance), schedule_line(simulation.schedule))],
        figures=key_figures(subject),
        faults=[printable(fault) for fault in found.faults],
        findings=[printable(text) for text in findings(simulation)],
        placement=placement(instance, simulation),
        colours=COLOURS,
        stages=stage_table(found, by_stage),
        all_stages=stage_table(found, singles(stages)) if len(by_stage) < stages else None,
        timeline=Markup(timeline_element(simulation)),
        memory=memory_picture(simulation, by_rank),
        ranks=rank_table(found, by_rank),
        all_ranks=rank_table(found, singles(len(simulation.ranks))) if len(by_rank) < len(simulation.ranks) else None,
        comparison=comparison_table(subject),
        origin=_origin(subject),
        assumptions=assumptions(instance, found.plan, simulation),
        notes=[printable(note) for note in (*subject.notes, *simulation.notes, *instance.notes)],
        digest=instance.digest,
        version=__version__,
        count_text=count_text,
        numbers=_numbers,
    )


def key_figures(subject: Subject) -> list[KeyFigure]:
    """The step, what was promised and proved of it, and what it leaves unused."""
    found = subject.valued
    simulation, batch = found.simulation, found.instance.batch
    time_s = simulation.time_per_sample_s
    kept = simulation.keeps_promise is not False
    shown = [
        KeyFigure(
            "step_s",
            "Simulated step",
            time_text(simulation.step_s),
            simulation.step_s,
            speed_text(batch, time_s).rpartition(", ")[0],
            warns=not kept,
        ),
        KeyFigure("time_per_sample_s", "Simulated, a microbatch", time_text(time_s), time_s),
    ]
    if simulation.promised_s is not None:
        promised_s = simulation.promised_s
        slower = (
            f"the simulation is {percent_text(simulation.step_s / promised_s - 1.0)} slower" if not kept else "kept"
        )
        shown.append(
            KeyFigure("promised_s", "Promised step", time_text(promised_s), promised_s, slower, warns=not kept)
        )
    if subject.lower_bound_s is not None and subject.gap is not None:
        bound_s = subject.lower_bound_s
        of = "promised" if simulation.promised_s is not None else "simulated"
        shown.append(
            KeyFigure(
                "lower_bound_s",
                "Proved lower bound, a microbatch",
                time_text(bound_s),
                bound_s,
                f"no plan is faster: {time_text(batch.step_s(bound_s))}/step",
            )
        )
        shown.append(KeyFigure("gap", "Gap", percent_text(subject.gap), subject.gap, f"of the {of} time to the bound"))
    peak_bytes = max(rank.peak_memory_bytes for rank in simulation.ranks)
    devices = found.plan.devices // simulation.schedule.v
    return [
        *shown,
        KeyFigure("bubble_share", "Idle", f"{100.0 * simulation.bubble_share:.1f} %", simulation.bubble_share),
        KeyFigure(
            "peak_memory_bytes",
            "Peak memory",
            size_text(peak_bytes),
            peak_bytes,
            f"of {size_text(simulation.memory_limit_bytes)} a device",
            warns=bool(simulation.memory_violations),
        ),
        KeyFigure("devices", "Devices", f"{devices:,}", devices, f"of {found.instance.devices:,}"),
    ]


def _origin(subject: Subject) -> str:
    claims = subject.claims
    if claims.planner is not None:
        made = f"The plan is that of {printable(claims.planner)}"
        return f"{made} ({printable(claims.note)})." if claims.note else f"{made}."
    if subject.lower_bound_s is not None:
        return f"The plan is the exact planner's: {printable(claims.status or 'feasible')}."
    return ""


def _numbers(table: Table) -> list[tuple[Column, bool]]:
    """Each column, and whether its figures are drawn as bars, too."""
    return [
        (column, any(row[index].bar is not None for row in table.rows)) for index, column in enumerate(table.columns)
    ]


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_resource("page.html.jinja"))


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
