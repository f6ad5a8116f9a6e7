"""Fig. 2: time per sample against the number of devices, and against the bound on the sum of data-parallel degrees."""

from __future__ import annotations

from matplotlib.figure import Figure

import piper_ray
from piper_ray.report.plots import style
from scripts.reproduction import sources
from scripts.reproduction.study import Findings, Row, Study, Tell, faults_of, milliseconds

_MICROBATCHES = (960, 512)
_MEMORY_GIB = 8
_FEWEST, _MOST = 8, 2048
_SHOWN = (8, 32, 64, 128, 256, 512, 960, 1024, 2048)


def _run(tell: Tell) -> Findings:
    rows: list[Row] = []
    faults: list[str] = []
    words: list[str] = []
    published = sources.reference("bert32a100")
    for microbatches in _MICROBATCHES:
        tell(f"BERT-32, N={microbatches}: {_MOST - _FEWEST + 1:,} numbers of devices, and every bound on the sum of d")
        instance = sources.bert(32, _MOST, microbatches, _MEMORY_GIB)
        frontier = piper_ray.frontier(instance, devices=range(_FEWEST, _MOST + 1))
        curves = {"devices": frontier.by_devices(), "bound on the sum of d": frontier.by_budget()}
        for against, curve in curves.items():
            rows += [
                {"microbatches": microbatches, "against": against, "at": at, "time_per_sample_s": time_s}
                for at, time_s in curve.items()
            ]
            values = [time_s for time_s in curve.values() if time_s is not None]
            words.append(
                f"- N={microbatches}: {len(curve):,} points along the {against}, {len(set(values)):,} different times"
            )
        for devices in _SHOWN:
            reference = published.get((devices, microbatches, _MEMORY_GIB))
            if reference is not None and devices in curves["devices"]:
                optimum_s = curves["devices"][devices]
                what = f"BERT-32 K={devices} N={microbatches} M={_MEMORY_GIB} GiB"
                faults += faults_of(what, optimum_s, {"the reference": reference["time_per_sample_s"]})
    pictures = {"staircases": _picture(rows)}
    return Findings(rows, words, pictures, _shown(rows), faults)


def _curve(rows: list[Row], microbatches: int, against: str) -> list[tuple[int, float]]:
    points = []
    for row in rows:
        at, time_s = row["at"], row["time_per_sample_s"]
        if (row["microbatches"], row["against"]) == (microbatches, against) and time_s is not None:
            assert isinstance(at, int)
            assert isinstance(time_s, float)
            points.append((at, time_s))
    return points


def _picture(rows: list[Row]) -> Figure:
    figure, panels = style.panels(
        f"BERT-32, M = {_MEMORY_GIB} GiB: the optimum at every size",
        ["against the number of devices", f"against the bound on the sum of d, K = {_MOST}"],
    )
    for axes, against in zip(panels, ("devices", "bound on the sum of d"), strict=True):
        for index, microbatches in enumerate(_MICROBATCHES):
            points = _curve(rows, microbatches, against)
            axes.step(
                [at for at, _ in points],
                [time_s * 1e3 for _, time_s in points],
                where="post",
                color=style.colour(index, len(_MICROBATCHES), ordered=False),
                label=f"N = {microbatches}",
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel(against)
        axes.set_ylabel("ms per sample")
    style.legend(figure, panels[0])
    return figure


def _shown(rows: list[Row]) -> list[Row]:
    curves = {(n, against): dict(_curve(rows, n, against)) for n in _MICROBATCHES for against in _AGAINST}
    return [
        {"K or bound": at}
        | {
            f"N={n}, {against} (ms)": milliseconds(curves[n, against].get(at))
            for n in _MICROBATCHES
            for against in _AGAINST
        }
        for at in _SHOWN
    ]


_AGAINST = ("devices", "bound on the sum of d")

STUDY = Study("staircases", "Fig. 2: time per sample at every number of devices and every bound on the sum of d", _run)
