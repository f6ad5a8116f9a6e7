"""Appendix C: how often the greedy choice of TMPCs that the authors' code makes is not the best, and by how much."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

import piper_ray
from piper_ray.model.instance import Instance
from piper_ray.report.plots import style
from piper_ray.workloads.formats.load import load
from scripts.reproduction import sources
from scripts.reproduction.study import Findings, Row, Study, Tell, faults_of, slower_than
from tests.data import goldens

_EQUAL = 1e-9


def _run(tell: Tell) -> Findings:
    rows: list[Row] = []
    faults: list[str] = []

    def compare(group: str, name: str, instance: Instance, greedy_s: float | None) -> None:
        exact_s = piper_ray.solve(instance).time_per_sample_s
        faults.extend(faults_of(name, exact_s, {"the greedy choice": greedy_s}))
        rows.append(
            {
                "set": group,
                "instance": name,
                "exact_s": exact_s,
                "greedy_s": greedy_s,
                "greedy_over_exact": slower_than(exact_s, greedy_s),
            }
        )

    for record in goldens("published"):
        model, devices, memory_gib = record["workload"], record["devices"], record["memory_gib"]
        if record["cpu_s"] > 100.0 and model == "gnmt":
            tell(f"GNMT K={devices} M={memory_gib} GiB")
        instance = sources.published(model, devices, memory_gib, record["microbatches"])
        name = f"{model} K={devices} N={instance.microbatches} M={memory_gib} GiB"
        compare("published", name, instance, record["time_per_sample_s"])
    random = [record for record in goldens("random") if record.get("reference_s") is not None]
    tell(f"{len(random)} random instances")
    for number, record in enumerate(random):
        compare("random", f"random {number}", load(record["instance"]), record["reference_s"])
    shown = sorted((row for row in rows if _ratio(row) > 1.0 + _EQUAL), key=lambda row: (str(row["set"]), -_ratio(row)))
    table: list[Row] = [
        {"instance": row["instance"], "greedy / exact": f"{_ratio(row):.4f}"}
        for row in [*(r for r in shown if r["set"] == "published"), *[r for r in shown if r["set"] == "random"][:5]]
    ]
    return Findings(rows, _words(rows), {"greedy": _picture(rows)}, table, faults)


def _ratio(row: Row) -> float:
    value = row["greedy_over_exact"]
    return value if isinstance(value, float) else 1.0


def _words(rows: list[Row]) -> list[str]:
    words = [
        (
            "The authors' code starts from the fastest TMPCs and takes, until the stage fits, the best exchange each "
            "time. Its values are those of the published code; ours are proved."
        )
    ]
    for group in ("published", "random"):
        of_group = [row for row in rows if row["set"] == group]
        with_plan = [row for row in of_group if row["exact_s"] is not None]
        without = sum(row["greedy_s"] is None for row in with_plan)
        worse = [_ratio(row) for row in with_plan if _ratio(row) > 1.0 + _EQUAL]
        text = f"- {group}: {len(with_plan)} instances with a plan; the greedy choice loses on {len(worse)}"
        if worse:
            text += (
                f", by {100 * (np.mean(worse) - 1):.2f} % on average there and {100 * (max(worse) - 1):.2f} % at most"
            )
        words.append(text + f"; on {without} it finds no plan.")
    return words


def _picture(rows: list[Row]) -> Figure:
    figure, (axes,) = style.panels("Greedy against exact choice of TMPCs", [""])
    for index, group in enumerate(("published", "random")):
        losses = np.sort(
            [100 * (_ratio(row) - 1) for row in rows if row["set"] == group and row["greedy_s"] is not None]
        )
        share = 100 * np.arange(1, losses.size + 1) / max(1, losses.size)
        axes.step(
            np.concatenate([[0.0], losses]),
            np.concatenate([[0.0], share]),
            where="post",
            color=style.COLOURS[index],
            label=f"{group}, {losses.size} instances",
        )
    axes.set_xlabel("loss of the greedy choice, % of the optimum's time")
    axes.set_ylabel("% of instances with at most that loss")
    axes.set_ylim(80, 101)
    axes.legend()
    return figure


STUDY = Study("greedy", "Appendix C: greedy against exact choice of TMPCs", _run)
