"""What ``piper-ray plan`` writes: workload, plan, what was searched, what the runtime reads, and a page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import piper_ray
from piper_ray import Instance, Status
from piper_ray.calibrate.layouts import SHARDINGS
from piper_ray.cli.interrupts import current
from piper_ray.cli.telling import note, working, write_document
from piper_ray.export.files import NO_FILES, Export, Target
from piper_ray.export.targets import export_plan, exportable
from piper_ray.model.errors import UsageError, require
from piper_ray.model.figures import time_text
from piper_ray.model.mode import found_schemes
from piper_ray.proposal.demand import Figures, Proposed
from piper_ray.proposal.layout_words import layout_words
from piper_ray.proposal.propose import FoundPlans
from piper_ray.report.document import plan_document, proof_document
from piper_ray.report.estimate import file_text
from piper_ray.report.proposal import listed_plans
from piper_ray.report.proposal_document import search_document
from piper_ray.runtimes.meshes import gpus_per_node_of
from piper_ray.storage.files import write_atomically
from piper_ray.workloads.formats.load import plan_claims

WORKLOAD, PLAN, SEARCH, MEASURED = "workload.toml", "plan.json", "search.json", "measured.json"


def on_whole_gpus(found: FoundPlans, one: Proposed) -> Instance:
    """The instance with the memory that was set aside or left free."""
    return one.instance.replace(cluster=one.instance.cluster.with_memory(found.demand.whole_bytes))


def launch_of(found: FoundPlans, one: Proposed) -> Export:
    """What the runtime reads of a plan; no files where it can say the plan and not the model."""
    demand = found.demand
    node = gpus_per_node_of(one.instance, None if demand.further else demand.request.gpus_per_node)
    target = Target(demand.runtime.name.value)
    if new := found_schemes(tmpc_id for stage in one.plan.stages for tmpc_id in stage.tmpc_ids.values()):
        note(f"no launch file: no runtime here takes {', '.join(new)}, which plan.json has in full")
        return NO_FILES
    if one.instance.model is not None and exportable(one.instance.model, target) is not None:
        return NO_FILES
    return export_plan(on_whole_gpus(found, one), one.plan, one.solution.schedule, target, node)


def write_plan(found: FoundPlans, one: Proposed, launch: Export, out: Path, command: str) -> list[Path]:
    """Workload, plan, and what the runtime reads. Raises UsageError where a file cannot be."""
    demand, schedule = found.demand, one.solution.schedule
    instance, proof = on_whole_gpus(found, one), proof_document(one.solution)
    if demand.set_aside_bytes or demand.headroom:  # nothing is proved of plans that leave less
        proof |= {"status": Status.FEASIBLE.value, "lower_bound_s": None, "gap": None}
    written = launch.write(out)
    workload, plan_file = out / WORKLOAD, out / PLAN
    made = one.estimate.kinds or (replace(one.estimate, instance=instance),)
    write_atomically(workload, file_text(instance, made, command))
    evaluation = piper_ray.evaluate(instance, one.plan, schedule=schedule, step=demand.step)
    document = plan_document(instance, one.plan, evaluation, proof, schedule)
    write_document(plan_file, document)
    return [workload, plan_file, *written]


def write_search(found: FoundPlans, out: Path) -> Path:
    """Writes every cell, with the way in which it was closed."""
    out.mkdir(parents=True, exist_ok=True)
    write_document(out / SEARCH, search_document(found))
    return out / SEARCH


def write_page(found: FoundPlans, figures: Figures, out: Path) -> list[Path]:
    """The files written; none after an interrupt or without matplotlib. Raises KeyboardInterrupt for one meanwhile."""
    if current().number is not None:
        note("report.html is left out after an interrupt; piper-ray report makes it")
        return []
    try:
        require("matplotlib", "report.html")
    except UsageError as error:  # the plan and its launch files are worth more
        note(str(error))
        return []

    from piper_ray.report.page.planned import planned_of
    from piper_ray.report.page.render import write_page
    from piper_ray.report.page.subject import subject_of, valued

    best, page = found.best, out / "report.html"
    claims = replace(plan_claims(out / PLAN), lower_bound_s=None)  # the page has the bound of all combinations
    schedule = best.solution.schedule
    with working("report.html"):
        subject = current().run(
            lambda _: subject_of(valued(best.instance, best.plan, schedule, claims.step_under(schedule)), claims, ())
        )
    write_page(subject, page, planned_of(found, figures))
    return [page]


def write_candidates(found: FoundPlans, count: int, out: Path, command: str) -> list[Path]:
    """A job in a folder for each of the best plans whose launch fits, and what is to be done with them."""
    written: list[Path] = []
    rows: list[str] = []
    runs: list[dict[str, object]] = []
    for _, one in listed_plans(found, found.found):
        launch = launch_of(found, one)
        if launch.excess:
            note(f"no job for {layout_words(one).text}: {launch.excess[0]}")
            continue
        folder = out / str(len(rows) + 1)
        write_plan(found, one, launch, folder, command)
        written.append(folder)
        run_by = f"`{launch.command}`" if launch.command else f"no launch file is written; {PLAN} has the plan"
        rows.append(f"| {folder.name} | {time_text(one.step_s, 3)} | {layout_words(one).text} | {run_by} |")
        runs.append({"id": folder.name, **run_document(found, one)})
        if len(rows) == count:
            break
    if len(rows) < count:
        note(f"{len(rows)} of {count} candidates: no others are proved to be among the best")
    lines = [
        f"# {found.demand.model.name}: plans to measure",
        "",
        "An estimate is right within some per cent, and these plans are closer to each other than that. Measure a few",
        "dozen steps of each of these, then plan again with what was measured:",
        "",
        "| job | estimated step | layout | command |",
        "|---|---|---|---|",
        *rows,
        "",
        f"1. Run each job in its folder, and put its mean seconds a step into `step_s` of `{MEASURED}` here.",
        f"2. `{command} --calibrate {MEASURED}`, with the path of that file, fits the few constants that these steps",
        "   determine, and ranks all plans again.",
        "",
    ]
    write_atomically(out / "README.md", "\n".join(lines))
    write_atomically(out / MEASURED, json.dumps({"runs": runs}, indent=1) + "\n")
    return [*written, out / "README.md", out / MEASURED]


def run_document(found: FoundPlans, one: Proposed) -> dict[str, object]:
    """The layout as ``--calibrate`` reads it, with a step that is still to be measured."""
    words, batch = layout_words(one), one.instance.batch
    spread = {} if words.expert is None else {"ep": words.expert, "etp": words.expert_tensor}
    chunks = {"vpp": words.chunks} if words.chunks > 1 else {}
    recomputation = words.recomputation
    nodes = one.estimate.architecture.nodes
    blocks = [sum(nodes[layer].kind.recomputable for layer in stage.layers) for stage in one.plan.stages]
    return {
        "tp": words.tensor,
        "cp": words.context,
        "pp": words.pipeline,
        "dp": words.data,
        **spread,
        **chunks,
        "gpus": one.devices,
        "microbatch": words.microbatch,
        "global_batch": one.batch,
        "seq": batch.tokens_per_sample,
        "stages": blocks,
        "optimizer_sharding": next(name for name, kind in SHARDINGS.items() if name and kind is words.sharding),
        "optimizer_on_host": words.optimizer_on_host,
        "sequence_parallel": words.sequence_parallel,
        "recompute": "selective" if recomputation is None else recomputation.id,
        "precision": found.demand.request.precision,
        "step_s": None,
    }
