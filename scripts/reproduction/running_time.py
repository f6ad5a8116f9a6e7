"""Fig. 3: how long a solve takes, against the number of devices."""

from __future__ import annotations

import time
from itertools import product
from statistics import median

from matplotlib.figure import Figure

import piper_ray
from piper_ray.report.plots import style
from scripts.reproduction import sources
from scripts.reproduction.study import Findings, Row, Study, Tell

_BLOCKS = (32, 48, 64, 96)
_MICROBATCHES = (480, 512, 1920, 2048)
_DEVICES = tuple(2**power for power in range(6, 12))
_MEMORY_GIB = 8
_REPEATS = 3


def _run(tell: Tell) -> Findings:
    rows: list[Row] = []
    published = sources.reference("bert32a100")
    piper_ray.solve(sources.bert(32, 64, 480, _MEMORY_GIB))  # the kernels are there from now on
    for blocks, microbatches in product(_BLOCKS, _MICROBATCHES):
        tell(f"BERT-{blocks}, N={microbatches}")
        for devices in _DEVICES:
            instance = sources.bert(blocks, devices, microbatches, _MEMORY_GIB)
            times_s = []
            for _ in range(_REPEATS):
                began = time.perf_counter()
                piper_ray.solve(instance)
                times_s.append(time.perf_counter() - began)
            reference = published.get((devices, microbatches, _MEMORY_GIB)) if blocks == 32 else None
            rows.append(
                {
                    "blocks": blocks,
                    "microbatches": microbatches,
                    "devices": devices,
                    "solve_s": median(times_s),
                    "reference_cpu_s": reference["cpu_s"] if reference else None,
                }
            )
    return Findings(rows, _words(rows), {"running-time": _picture(rows)}, _shown(rows))


def _seconds(rows: list[Row], column: str, blocks: int, microbatches: int) -> list[tuple[int, float]]:
    points = []
    for row in rows:
        devices, seconds = row["devices"], row[column]
        if (row["blocks"], row["microbatches"]) == (blocks, microbatches) and isinstance(seconds, float):
            assert isinstance(devices, int)
            points.append((devices, seconds))
    return points


def _picture(rows: list[Row]) -> Figure:
    figure, panels = style.panels("Time of a solve, M = 8 GiB", [f"BERT-{blocks}" for blocks in _BLOCKS])
    every_s: list[float] = []
    for axes, blocks in zip(panels, _BLOCKS, strict=True):
        for index, microbatches in enumerate(_MICROBATCHES):
            colour = style.colour(index, len(_MICROBATCHES), ordered=False)
            for column, marker, label in (
                ("solve_s", style.MARKERS[index], f"N = {microbatches}"),
                ("reference_cpu_s", "x", f"reference, N = {microbatches}"),
            ):
                points = _seconds(rows, column, blocks, microbatches)
                if points:
                    devices, seconds = zip(*points, strict=True)
                    every_s += seconds
                    line = "-" if column == "solve_s" else ":"
                    axes.plot(devices, seconds, color=colour, marker=marker, linestyle=line, label=label)
        style.devices_axis(axes, _DEVICES)
    for axes in panels:
        style.wide_axis(axes, every_s)
    figure.supylabel("seconds", fontsize=9)
    style.legend(figure, panels[0])
    return figure


def _shown(rows: list[Row]) -> list[Row]:
    shown: list[Row] = []
    for blocks, microbatches in product(_BLOCKS, _MICROBATCHES):
        line: Row = {"model": f"BERT-{blocks}", "N": microbatches}
        for devices, seconds in _seconds(rows, "solve_s", blocks, microbatches):
            line[f"K={devices} (ms)"] = f"{seconds * 1e3:.3g}"
        shown.append(line)
    return shown


def _words(rows: list[Row]) -> list[str]:
    times = []
    for row in rows:
        solve_s, reference_s = row["solve_s"], row["reference_cpu_s"]
        if isinstance(solve_s, float) and isinstance(reference_s, float):
            times.append(reference_s / solve_s)
    words = [f"Median of {_REPEATS} solves, lattice and stage costs included, on all threads of this machine."]
    if times:
        words.append(
            f"The reference's CPU times are set figures from another machine: {min(times):,.0f} to {max(times):,.0f} "
            "times as long at the points that both have."
        )
    return words


STUDY = Study("running-time", "Fig. 3: running time against the number of devices", _run)
