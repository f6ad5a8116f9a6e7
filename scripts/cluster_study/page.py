"""The page about a study, its table of points and its pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from piper_ray.model.figures import time_text
from piper_ray.report.plots.curves import plan_figures
from piper_ray.report.plots.style import save
from piper_ray.report.sweep_plans import plan_tables, plans_csv
from piper_ray.sweep import plan_findings
from piper_ray.sweep.dataset import read_dataset
from piper_ray.sweep.plan_findings import PlanRecord, plan_records_of
from piper_ray.version import __version__


@dataclass(frozen=True)
class StudyRun:
    """One run of the script. done, left: points of this run. worker_s: of all workers, each while it was there. cpu_s:
    the processors' time of all points. killed_at, joined_at: points done when a machine was killed, and another one
    worked; -1: none was."""

    points: int
    done: int
    left: int
    wall_s: float
    start_s: float
    run_s: float
    worker_s: float
    solving_s: float
    cpu_s: float
    killed_at: int
    joined_at: int
    warnings: list[str]


_PAGE = """\
# A study on a cluster

`{sweep}` asks `piper-ray plan` for the best plan of each model on each GPU, number of nodes, batch, precision and
runtime: {points:,} points. {planned:,} have a plan, {infeasible:,} do not fit, {refused:,} are refused because the GPU
or the runtime cannot do what is asked, and {failed:,} failed. A plan's gap limits how much faster any other
combination can be: {median_gap:.2f} % in the median, {most_gap:.2f} % at most.

`scripts/study` runs it and writes this page. [A table](study.csv) has every point. [How to
sweep](how-to/sweep.md#plans) shows how to run your own. All steps are estimates of piper_ray {version}; those of other
versions differ.

## What it took

A machine is a set of Linux namespaces on one computer, with its own address and processes, as in `tests/faults`.

| | |
|---|---|
| points done | {done:,}, {ran} |
| wall time | {wall_s:,.0f} s, {start_s:,.0f} s of it to start the driver |
| workers' time | {worker_s:,.0f} s in {run_s:,.0f} s: of each worker, from its start to its loss |
| worker share | {cpu_share:.2f}: CPU of points over the workers' time; {share:.2f} by the clock |
| cost of a point | {mean} of CPU in the mean, {median} in the median, {most} at most |
| points sent again | {again:,}: those of a lost or late machine |
| machines | two of one CPU each, the driver on a third{events} |
| on | {facts} |
{told}
## What it shows
"""

_PICTURES = {
    "step": "step of the best plan",
    "cost": "GPU hours of a billion tokens",
    "ways": "runtimes and precisions",
}


def write_study(sweep: Path, storage: Path, runs: Sequence[StudyRun], facts: str, out: Path) -> list[Path]:
    """study.md, study.csv and three pictures, of the training with most plans; the paths."""
    table = read_dataset(storage, [*plan_findings.COLUMNS, "attempts"])
    records = plan_records_of(table)
    out.mkdir(parents=True, exist_ok=True)
    (out / "study.csv").write_text(plans_csv(records))
    planned = Counter(record.training for record in records if record.step_s is not None)
    shown = max(planned, key=lambda training: (planned[training], training.model, training.batch))
    again = sum(attempts > 1 for attempts in table["attempts"].to_pylist())
    figures = {**_found(records), **_taken(runs, records)}
    lines = [_PAGE.format(sweep=sweep, version=__version__, facts=facts, again=again, **figures)]
    pictures = []
    for name, figure in plan_figures([record for record in records if record.training == shown], {}):
        kind = name.partition("-")[0]
        pictures.append(out / f"study-{kind}.svg")
        save(figure, pictures[-1])
        lines.append(f"![{shown.text}: {_PICTURES[kind]}, against the GPUs of the cluster]({pictures[-1].name})\n")
    same = [record for record in records if record.training.batch == shown.batch]
    tables = plan_tables(same, {})
    others = sorted({one.training.model for one in records} - {one.training.model for one in same})
    asked = f"; of {', '.join(others)}, asked with other batches, the table of points has the plans" if others else ""
    lines += [f"Of a batch of {shown.batch:,} samples{asked}:\n"]
    lines += [found.markdown(level=3) for found in tables if found.title not in ("Plans", "Without a plan")]
    (out / "study.md").write_text("\n".join(lines))
    return [out / "study.md", out / "study.csv", *pictures]


def _found(records: Sequence[PlanRecord]) -> dict[str, float]:
    statuses = Counter(record.status for record in records)
    gaps = sorted(100.0 * record.gap for record in records if record.gap is not None)
    return {
        "points": len(records),
        "planned": len(gaps),
        "infeasible": statuses["infeasible"],
        "refused": statuses["refused"],
        "failed": statuses["error"],
        "median_gap": gaps[len(gaps) // 2],
        "most_gap": gaps[-1],
    }


def _taken(runs: Sequence[StudyRun], records: Sequence[PlanRecord]) -> dict[str, object]:
    done, cpu_s = sum(run.done for run in runs), sum(run.cpu_s for run in runs)
    worker_s = sum(run.worker_s for run in runs)
    costs = sorted(record.cpu_s for record in records if record.cpu_s is not None)
    warnings = "".join(f"- {text}\n" for run in runs for text in run.warnings)
    events = ""
    for run in runs:
        if run.killed_at >= 0:
            events += f"; one killed when {run.killed_at:,} of {run.done:,} points were done"
        if run.joined_at >= 0:
            events += f", another one at work when {run.joined_at:,} were"
    return {
        "done": done,
        "ran": "in one run" if len(runs) == 1 else f"in {len(runs)} runs, each going on with the one before",
        "wall_s": sum(run.wall_s for run in runs),
        "start_s": sum(run.start_s for run in runs),
        "run_s": sum(run.run_s for run in runs),
        "worker_s": worker_s,
        "cpu_share": cpu_s / worker_s,
        "share": sum(run.solving_s for run in runs) / worker_s,
        "mean": time_text(cpu_s / done, 3),
        "median": time_text(costs[len(costs) // 2], 3),
        "most": time_text(costs[-1], 3),
        "events": events,
        "told": f"\nWarnings meanwhile:\n\n{warnings}" if warnings else "",
    }
