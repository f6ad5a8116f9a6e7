"""What ``solve`` proposes for the clusters of published runs, as a table and as data."""

from __future__ import annotations

from collections.abc import Sequence

from piper_ray.model.figures import plural
from piper_ray.report.comparison import ComparedPlan, reasons
from piper_ray.validate.proposals import Proposal, RunPlan

_EQUAL = 5e-5
"""Shares that are shown as 0.00 %."""


def proposal_lines(found: Sequence[tuple[str, Proposal | str]]) -> list[str]:
    """In Markdown: a row for each cluster, then what could not be compared, with the reason. found: ids of runs, and
    what came of them."""
    lines = [
        "| run | its layout | as | step | proposed | as | step | less | chiefly because of |",
        "|---|---|---|---:|---|---|---:|---:|---|",
    ]
    rows = [(run, one) for run, one in found if isinstance(one, Proposal)]
    lines += [_row(run, one) for run, one in rows]
    slower = sum(one.gain < -_EQUAL for _, one in rows)
    equal = sum(abs(one.gain) <= _EQUAL for _, one in rows)
    faster = len(rows) - slower - equal
    lines += ["", f"{plural(len(rows), 'cluster')}: faster in {faster}, equal in {equal}, slower in {slower}."]
    others = [(run, one) for run, one in found if isinstance(one, str)]
    return [*lines, *(["", "Not compared:", "", *(f"- {run}: {why}" for run, why in others)] if others else [])]


def proposal_dict(run: str, found: Proposal | str) -> dict[str, object]:
    """The same for programs."""
    if isinstance(found, str):
        return {"id": run, "reason": found}
    return {
        "id": run,
        "published": _plan_dict(found, found.published),
        "proposed": _plan_dict(found, found.proposed),
        "gain": found.gain,
        "lower_bound_step_s": found.solution.lower_bound_s * found.instance.microbatches,
        "because": reasons(found.published.simulation, found.proposed.simulation),
        "memory_is_its_own": found.memory_is_its_own,
    }


def _row(run: str, found: Proposal) -> str:
    cells = [run]
    for one in (found.published, found.proposed):
        named = _named(one)
        cells += [named.shape_text, named.ids_text(found.instance), f"{one.step_s:.4g} s"]
    because = reasons(found.published.simulation, found.proposed.simulation) if found.gain > _EQUAL else []
    cells += [f"{100.0 * found.gain:.2f} %", because[0] if because else "-"]
    return f"| {' | '.join(cells)} |"


def _plan_dict(found: Proposal, one: RunPlan) -> dict[str, object]:
    named = _named(one)
    return {"layout": named.shape_text, "runs_as": named.ids_text(found.instance), "step_s": one.step_s}


def _named(one: RunPlan) -> ComparedPlan:
    return ComparedPlan("", one.plan, one.simulation)
