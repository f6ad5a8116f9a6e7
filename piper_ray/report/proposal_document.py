"""What ``piper-ray plan`` found, as documents: ``search.json``, and the whole answer for ``--json``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from piper_ray.planners.apart import KindsApart
from piper_ray.proposal.cells import Cell
from piper_ray.proposal.clusters import ClusterPlan
from piper_ray.proposal.demand import Figures, Proposed, figures_of
from piper_ray.proposal.layout_words import LayoutWords, differences, layout_words
from piper_ray.proposal.propose import FoundPlans, Help, Theirs
from piper_ray.report.apart import apart_document
from piper_ray.report.clusters import spare_document
from piper_ray.report.proposal import why_not
from piper_ray.version import __version__
from piper_ray.workloads.formats.plans import stage_documents
from piper_ray.workloads.schemes.document import claim_document

_VERSION = 1


def _header(kind: str) -> dict[str, object]:
    return {"schema": f"piper-ray/{kind}", "schema_version": _VERSION, "tool_version": __version__}


def search_document(proposal: FoundPlans) -> dict[str, object]:
    """The cells with how each was closed, and the bound of all."""
    demand, best = proposal.demand, proposal.best if proposal.found else None
    first = proposal.cells.cells[0].estimate.instance if best is None else best.instance
    return {
        **_header("search"),
        "model": demand.model.name,
        "gpu": " + ".join(dict.fromkeys(gpu for _, gpu, _ in demand.kinds)),
        "gpus": first.devices,
        "runtime": demand.runtime.name.value,
        "precision": demand.request.precision,
        "batch": first.batch.samples,
        "left_free_bytes": demand.whole_bytes(first.memory_bytes) - first.memory_bytes,
        "combinations": proposal.cells.count,
        "step_s": None if best is None else best.step_s,
        "lower_bound_s": proposal.lower_s,
        "gap": None if best is None else proposal.gap,
        "schemes": None
        if proposal.schemes_save is None
        else {**claim_document(), "save_at_most": proposal.schemes_save},
        "cells": [_cell_document(cell) for cell in proposal.cells.cells],
        "schedules": [name.value for name in proposal.cells.schedules],
        "never_better": [
            {"microbatch": samples, "optimizer_on_host": on_host, "mode": mode.text, "than": better.text}
            for on_host in proposal.cells.on_host
            for samples, _, settings in proposal.cells.settings
            for mode, better in settings.others
        ],
        "refused": list(proposal.refused),
    }


def _cell_document(cell: Cell) -> dict[str, object]:
    return {
        "microbatch": cell.samples,
        "schedule": cell.schedule.value,
        "mode": cell.setting.text,
        "optimizer_on_host": cell.priced_on_host,
        "lower_bound_s": cell.lower_s if math.isfinite(cell.lower_s) else None,
        "closing": cell.closing.value,
        "step_s": None if cell.found is None else cell.found.step_s,
    }


def planned_document(
    proposal: FoundPlans,
    figures: Figures,
    others: Mapping[str, Proposed | None],
    helps: Iterable[Help],
    theirs: Theirs | None,
    fewer: Sequence[ClusterPlan],
    files: Sequence[Path],
    apart: KindsApart | None = None,
) -> dict[str, object]:
    """All that ``plan`` has to say. others: the best plans in other precisions that were asked for. theirs: the plan
    of people's own, if any. fewer: the plan and those for fewer nodes, where these were asked for. apart:
    pipelines of one kind each."""
    best = proposal.best
    words = layout_words(best)
    schedule = best.simulation.schedule
    return {
        **_header("planned"),
        "best": priced_document(best, words),
        "stages": {"stages": stage_documents(best.instance, best.plan, schedule), **best.plan.rule_dict()},
        "ranks_memory_bytes": [rank.peak_memory_bytes for rank in best.simulation.ranks],
        "memory_limit_bytes": proposal.demand.whole_bytes(best.instance.memory_bytes),
        "likely_s": list(best.estimate.doubt.range_s(best.step_s)),
        "likely_memory_bytes": list(best.estimate.doubt.memory.range_bytes(best.simulation.peak_memory_bytes)),
        "training_days": figures.days,
        "training_cost": figures.cost,
        "alternatives": [priced_document(one, words) for one in proposal.listed[1:]],
        "precisions": {name: _or_none(one, words) for name, one in others.items()},
        "changes": [{"what": one.what, "plan": _or_none(one.found, words)} for one in helps],
        "search": search_document(proposal),
        "files": [str(path) for path in files],
        "against": None if theirs is None else against_document(proposal, theirs),
        "fewer_nodes": spare_document(fewer),
        "apart": apart_document(apart),
    }


def _or_none(one: Proposed | None, best: LayoutWords) -> dict[str, object] | None:
    return None if one is None else priced_document(one, best)


def priced_document(one: Proposed, best: LayoutWords) -> dict[str, object]:
    """A layout with what a step of it takes, and what it is simpler in than the best one."""
    words, figures = layout_words(one), figures_of(one)
    plain = ("microbatch", "tensor", "context", "pipeline", "data", "expert", "expert_tensor", "sequence_parallel")
    return {
        "layout": {
            **{name: getattr(words, name) for name in (*plain, "offload", "optimizer_on_host", "schedule", "chunks")},
            "sharing": words.sharing,
            "recomputation": words.recomputed,
            "each_site": words.each_site,
        },
        "step_s": one.step_s,
        "batch": one.batch,
        "gpus": one.devices,
        "tokens_per_s": figures.tokens_per_s,
        "mfu": figures.mfu,
        "memory_bytes": one.simulation.peak_memory_bytes,
        "simpler_in": words.simpler_in(best),
    }


def against_document(proposal: FoundPlans, theirs: Theirs) -> dict[str, object]:
    """A plan of the user's own, compared with the best one."""
    words = layout_words(proposal.best)
    return {
        "name": theirs.name,
        "plan": priced_document(theirs.plan, words),
        "fits": theirs.fits,
        "differs_in": differences(layout_words(theirs.plan), words),
        "why_not": why_not(proposal, theirs),
        "notes": list(theirs.notes),
    }
