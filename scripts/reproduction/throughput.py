"""Fig. 1: throughput against the number of devices, for planners that may use less than Piper."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from matplotlib.figure import Figure

import piper_ray
from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.instance import Instance
from piper_ray.planners import plan
from piper_ray.report.plots import style
from scripts.reproduction import sources
from scripts.reproduction.study import Findings, Row, Study, Tell, faults_of, slower_than

_DEVICES = tuple(2**power for power in range(3, 12))
_MICROBATCHES = (512, 1920)
_MEMORY_GIB = (1, 2, 8, 80)
PIPER = "Piper"


def _exact(**kept: object) -> Callable[[Instance], float | None]:
    restrictions = Restrictions(**kept)  # type: ignore[arg-type]
    return lambda instance: piper_ray.solve(instance, restrictions=restrictions).time_per_sample_s


def _equi(*, tensor_parallelism: bool) -> Callable[[Instance], float | None]:
    restrictions = Restrictions(tensor_parallelism=tensor_parallelism)
    return lambda instance: plan(instance, "pipedream-2bw", restrictions=restrictions).time_per_sample_s


PLANNERS: dict[str, Callable[[Instance], float | None]] = {
    PIPER: _exact(),
    "no data parallelism": _exact(data_parallelism=False),
    "no tensor parallelism": _exact(tensor_parallelism=False),
    "no recomputation": _exact(recompute=Recompute.NEVER),
    "equi": _equi(tensor_parallelism=True),
    "equi, no tensor parallelism": _equi(tensor_parallelism=False),
}


def _run(tell: Tell) -> Findings:
    rows: list[Row] = []
    faults: list[str] = []
    published = sources.reference("bert32a100")
    for microbatches, memory_gib in product(_MICROBATCHES, _MEMORY_GIB):
        tell(f"BERT-32, N={microbatches}, M={memory_gib} GiB")
        for devices in _DEVICES:
            instance = sources.bert(32, devices, microbatches, memory_gib)
            times_s = {name: planner(instance) for name, planner in PLANNERS.items()}
            reference = published.get((devices, microbatches, memory_gib))
            what = f"BERT-32 K={devices} N={microbatches} M={memory_gib} GiB"
            others_s = {name: time_s for name, time_s in times_s.items() if name != PIPER}
            reference_s = None if reference is None else reference["time_per_sample_s"]
            others_s["the reference"] = reference_s
            faults += faults_of(what, times_s[PIPER], others_s)
            for name, time_s in times_s.items():
                rows.append(
                    {
                        "microbatches": microbatches,
                        "memory_gib": memory_gib,
                        "devices": devices,
                        "planner": name,
                        "time_per_sample_s": time_s,
                        "reference_time_per_sample_s": reference_s if name == PIPER else None,
                    }
                )
    pictures = {f"throughput-n{n}": _picture(rows, n) for n in _MICROBATCHES}
    pictures |= {f"share-n{n}": _picture(rows, n, share=True) for n in _MICROBATCHES}
    return Findings(rows, _words(rows), pictures, _shown(rows), faults)


def _of(rows: list[Row], **key: object) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in key.items())]


def _time(row: Row) -> float | None:
    value = row["time_per_sample_s"]
    assert value is None or isinstance(value, float)
    return value


def _devices(row: Row) -> int:
    value = row["devices"]
    assert isinstance(value, int)
    return value


def _picture(rows: list[Row], microbatches: int, *, share: bool = False) -> Figure:
    """share: of Piper's throughput; else samples per second."""
    title = f"BERT-32, N = {microbatches}: throughput" + (", as a share of Piper's" if share else "")
    figure, panels = style.panels(title, [f"M = {memory} GiB" for memory in _MEMORY_GIB])
    rates: list[float] = []
    for axes, memory_gib in zip(panels, _MEMORY_GIB, strict=True):
        of_piper = _of(rows, microbatches=microbatches, memory_gib=memory_gib, planner=PIPER)
        optima_s = {_devices(row): time_s for row in of_piper if (time_s := _time(row)) is not None}
        curves = {
            name: [
                (_devices(row), (optima_s[_devices(row)] if share else 1.0) / time_s)
                for row in _of(rows, microbatches=microbatches, memory_gib=memory_gib, planner=name)
                if (time_s := _time(row)) is not None
            ]
            for name in PLANNERS
        }
        widths = style.widths(list(curves.values()))
        for index, ((name, points), width) in enumerate(zip(curves.items(), widths, strict=True)):
            rates += [rate for _, rate in points]
            axes.plot(
                [devices for devices, _ in points],
                [rate for _, rate in points],
                color=style.colour(index, len(PLANNERS), ordered=False),
                marker=style.MARKERS[index],
                linestyle="-" if name == PIPER else "--",
                linewidth=width["linewidth"],
                markersize=width["markersize"],
                label=name,
            )
        style.devices_axis(axes, _DEVICES)
    figure.supylabel("of Piper's throughput" if share else "samples per second", fontsize=9)
    for axes in panels:
        if share:
            axes.set_ylim(0.0, 1.05)
        else:
            style.wide_axis(axes, rates)
    style.legend(figure, panels[-1])
    return figure


def _shown(rows: list[Row]) -> list[Row]:
    """How many times as long as the optimum each takes, at three sizes."""
    shown: list[Row] = []
    for microbatches, memory_gib, devices in product(_MICROBATCHES, _MEMORY_GIB, (64, 512, 2048)):
        found = _of(rows, microbatches=microbatches, memory_gib=memory_gib, devices=devices)
        optimum_s = next(_time(row) for row in found if row["planner"] == PIPER)
        line: Row = {"N": microbatches, "M (GiB)": memory_gib, "K": devices}
        line["Piper (samples/s)"] = "no plan" if optimum_s is None else f"{1 / optimum_s:.5g}"
        for row in found:
            if row["planner"] != PIPER:
                times = slower_than(optimum_s, _time(row))
                line[str(row["planner"])] = "-" if times is None else f"{times:.3f}"
        shown.append(line)
    return shown


def _words(rows: list[Row]) -> list[str]:
    most: dict[str, tuple[float, Row]] = {}
    without: dict[str, int] = dict.fromkeys(PLANNERS, 0)
    for row in rows:
        (best,) = _of(
            rows, microbatches=row["microbatches"], memory_gib=row["memory_gib"], devices=row["devices"], planner=PIPER
        )
        times = slower_than(_time(best), _time(row))
        name = str(row["planner"])
        if times is None:
            without[name] += _time(best) is not None
        elif times > most.get(name, (0.0, row))[0]:
            most[name] = times, row
    sentences = [
        f"{name}: up to {times:.2f} times as long (K={row['devices']}, N={row['microbatches']}, "
        f"M={row['memory_gib']} GiB), and no plan at {without[name]} points where Piper has one."
        for name, (times, row) in most.items()
        if name != PIPER
    ]
    return ["Time per sample over the optimum in the table; `-`: no plan.", *(f"- {text}" for text in sentences)]


STUDY = Study("throughput", "Fig. 1: throughput of BERT-32, and what each kind of parallelism is worth", _run)
