"""The tables of GNMT and ResNet-50: every K and M of the authors' experiments, with the baselines."""

from __future__ import annotations

import time
from itertools import product

import piper_ray
from piper_ray.model.errors import LimitError
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.planners import plan
from scripts.reproduction import sources
from scripts.reproduction.study import Findings, Row, Study, Tell, faults_of, slower_than

_GNMT = (
    (2, 2.5), (2, 3.5), (4, 1.2), (4, 2.5), (8, 0.6), (8, 1.2), (8, 2.4), (16, 0.3), (16, 0.6), (16, 1.2), (32, 0.3),
    (32, 0.8), (64, 0.3),
)  # fmt: skip
_RESNET = tuple(product((8, 16, 32, 64, 128), (1.0, 1.5, 2.0, 4.0, 8.0, 16.0)))
_BASELINES = ("pipedream-2bw", "pipedream", "data-parallel", "gpipe")
_LIMIT_S = 60.0


def _run(tell: Tell) -> Findings:
    rows: list[Row] = []
    faults: list[str] = []
    for model, points in (("gnmt", _GNMT), ("resnet", _RESNET)):
        tell(f"{model}: {len(points)} points")
        published = sources.reference(model)
        for devices, memory_gib in points:
            instance = sources.published(model, devices, memory_gib)
            began = time.perf_counter()
            solution = piper_ray.solve(instance, options=SolveOptions(time_limit_s=_LIMIT_S))
            solve_s = time.perf_counter() - began
            others_s = {name: _baseline(instance, name) for name in _BASELINES}
            reference = published.get((devices, None, memory_gib))
            if reference is not None:
                others_s["reference"] = reference["time_per_sample_s"]
            what = f"{model} K={devices} M={memory_gib} GiB"
            faults += faults_of(what, solution.time_per_sample_s, others_s)
            rows.append(
                {
                    "model": model,
                    "devices": devices,
                    "microbatches": instance.microbatches,
                    "memory_gib": memory_gib,
                    "status": solution.status.value,
                    "time_per_sample_s": solution.time_per_sample_s,
                    "lower_bound_s": solution.lower_bound_s,
                    "solve_s": solve_s,
                    **{f"{name}_s": others_s.get(name) for name in (*_BASELINES, "reference")},
                    "reference_cpu_s": reference["cpu_s"] if reference else None,
                }
            )
    return Findings(rows, _words(rows), {}, [_shown(row) for row in rows], faults)


def _baseline(instance: Instance, name: str) -> float | None:
    try:
        return plan(instance, name).time_per_sample_s
    except LimitError:
        return None


def _number(row: Row, name: str) -> float | None:
    value = row[name]
    return value if isinstance(value, float) else None


def _shown(row: Row) -> Row:
    optimum_s = _number(row, "time_per_sample_s")
    line: Row = {
        "model": row["model"],
        "K": row["devices"],
        "M (GiB)": row["memory_gib"],
        "s per sample": row["status"] if optimum_s is None else f"{optimum_s:.6g}",
        "solve (s)": f"{_number(row, 'solve_s') or 0.0:.3g}",
    }
    for name in ("reference", *_BASELINES):
        times = slower_than(optimum_s, _number(row, f"{name}_s"))
        line[f"{name} / ours"] = "-" if times is None else f"{times:.4f}" if name == "reference" else f"{times:.2f}"
    return line


def _words(rows: list[Row]) -> list[str]:
    lower = [
        (times, row)
        for row in rows
        if (times := slower_than(_number(row, "time_per_sample_s"), _number(row, "reference_s"))) is not None
        and times > 1.0 + 1e-9
    ]
    words = [
        (
            "N is the file's own. The reference is the authors' code, with its greedy choice of TMPCs; `-`: no plan, "
            "or not in the published set."
        ),
    ]
    if lower:
        listed = ", ".join(
            f"{row['model']} K={row['devices']} M={row['memory_gib']} GiB by {100 * (times - 1):.2f} %"
            for times, row in lower
        )
        words.append(f"Ours are below the reference's where its greedy choice is not the best: {listed}.")
    limited = sum(row["status"] == "feasible" for row in rows)
    if limited:
        words.append(f"{limited} searches ended at the limit of {_LIMIT_S:.0f} s, with the gap that their bounds show.")
    return words


STUDY = Study("tables", "Tables: GNMT and ResNet-50", _run)
