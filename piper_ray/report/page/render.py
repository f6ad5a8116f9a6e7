"""The page itself: one HTML file that needs nothing beside it, no network and no script."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from markupsafe import Markup

from piper_ray.model.figures import (
    given_size_text,
    percent_text,
    plural,
    printable,
    rate_text,
    share_text,
    size_text,
    time_text,
)
from piper_ray.model.instance import Instance
from piper_ray.model.passes import passes_of
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import CHUNKED
from piper_ray.report.document import speed_document
from piper_ray.report.page.pictures import COLOURS, memory_picture, placement
from piper_ray.report.page.subject import Subject, Valued
from piper_ray.report.page.tables import (
    comparison_table,
    count_text,
    rank_groups,
    rank_table,
    singles,
    stage_groups,
    stage_table,
)
from piper_ray.report.plots.timeline import timeline_element
from piper_ray.report.simulated import findings
from piper_ray.report.summary import instance_lines, schedule_line
from piper_ray.report.templates import template
from piper_ray.simulate.result import Simulation
from piper_ray.storage.files import write_atomically
from piper_ray.version import __version__


@dataclass(frozen=True)
class KeyFigure:
    """One of the figures on top. value: itself, in s, bytes, or as a share. more: what it comes to otherwise, a figure
    with a name if that is not empty."""

    name: str
    head: str
    value: float
    text: str
    more: str = ""
    more_name: str = ""
    more_value: float = 0.0
    warns: bool = False


def page_html(subject: Subject) -> str:
    """The same bytes for the same subject."""
    found = subject.valued
    instance, simulation = found.instance, found.simulation
    name = printable(instance.name) or "workload"
    stages = len(found.plan.stages)
    by_stage, by_rank = stage_groups(found), rank_groups(found)
    return template(__package__, "page.html.jinja").render(
        title=f"{name}: a plan of {plural(stages, 'stage')} under {simulation.schedule.text}",
        style=Markup(files(__package__).joinpath("page.css").read_text(encoding="utf-8")),
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
    )


def write_page(subject: Subject, path: Path) -> None:
    """Whole or not at all. Raises UsageError if the file cannot be written."""
    write_atomically(path, page_html(subject))


def key_figures(subject: Subject) -> list[KeyFigure]:
    """The step as it was proved, promised and simulated, and what is left unused."""
    found = subject.valued
    instance, simulation = found.instance, found.simulation
    bound_s, promised_s = subject.lower_bound_s, simulation.promised_s
    kept = simulation.keeps_promise is not False
    shown = []
    if bound_s is not None:
        shown.append(_step("Proved: no plan is faster", "lower_bound", instance.batch.step_s(bound_s), bound_s))
    if promised_s is not None:
        shown.append(_step("Promised step", "promised", promised_s, found.value_s))
    shown.append(_step("Simulated step", "", simulation.step_s, simulation.time_per_sample_s, warns=not kept))
    if subject.gap is not None:
        of = "simulated" if promised_s is None else "promised"
        shown.append(KeyFigure("gap", "Gap", subject.gap, percent_text(subject.gap), f"{of} against proved"))
    if promised_s is not None and promised_s > 0.0:
        slower = simulation.step_s / promised_s - 1.0
        text = "kept" if kept else f"{share_text(slower)} slower"
        shown.append(KeyFigure("slower", "Promise", slower, text, "simulated against promised", warns=not kept))
    peak_bytes = simulation.peak_memory_bytes
    return [
        *shown,
        KeyFigure("bubble_share", "Idle", simulation.bubble_share, share_text(simulation.bubble_share)),
        KeyFigure(
            "peak_memory_bytes",
            "Peak memory",
            peak_bytes,
            size_text(peak_bytes),
            f"of {size_text(simulation.memory_limit_bytes)} a device",
            warns=bool(simulation.memory_violations),
        ),
        KeyFigure(
            "devices", "Devices", simulation.devices, f"{simulation.devices:,}", f"of {found.instance.devices:,}"
        ),
        *_rates(found),
    ]


def _step(head: str, name: str, step_s: float, time_per_sample_s: float, *, warns: bool = False) -> KeyFigure:
    """name: in front of the names of both figures, as in ``lower_bound_step_s``."""
    prefix = f"{name}_" if name else ""
    more = f"{time_text(time_per_sample_s)}/microbatch"
    per_microbatch = f"{prefix}s" if name == "lower_bound" else f"{prefix}time_per_sample_s"
    return KeyFigure(f"{prefix}step_s", head, step_s, time_text(step_s), more, per_microbatch, time_per_sample_s, warns)


def _rates(found: Valued) -> list[KeyFigure]:
    rates = speed_document(found.instance.batch, found.simulation.time_per_sample_s)
    names = ("samples_per_s", "tokens_per_s") if rates["samples_per_s"] is not None else ("microbatches_per_s",)
    shown = []
    for name in names:
        rate = rates[name]
        if isinstance(rate, float):
            head = name.removesuffix("_per_s").title() + "/s"
            shown.append(KeyFigure(name, head, rate, rate_text(rate), "simulated"))
    return shown


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
    chosen = [
        passes_of(tmpc)
        for stage in plan.stages
        for layer, wanted in stage.tmpc_ids.items()
        for tmpc in instance.layer_by_id[layer].tmpcs[stage.tensor_parallel_degree]
        if tmpc.id == wanted
    ]
    rate = instance.cluster.holding(simulation.devices).bandwidth_bytes_per_s
    inner = [f"{given_size_text(x.bandwidth_bytes_per_s)}/s within {x.devices}" for x in instance.cluster.links[:-1]]
    sentences = template(__package__, "assumptions.txt.jinja").render(
        plan=plan,
        schedule=simulation.schedule,
        options=simulation.options,
        chunked=simulation.schedule.name in CHUNKED,
        replicated=any(stage.data_parallel_degree > 1 for stage in simulation.stages),
        assumed=sum(passes.assumed for passes in chosen),
        unsplit=any(passes.weight_s is None for passes in chosen),
        bandwidth=f"{given_size_text(rate)}/s",
        groups=", ".join(inner),
    )
    return tuple(sentences.splitlines())
