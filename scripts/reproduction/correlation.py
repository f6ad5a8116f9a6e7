"""Fig. 4, y axis: what the cost model says of the equal partitions that the paper's authors ran on real machines."""

from __future__ import annotations

from matplotlib.figure import Figure

from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.planners import EqualRuns, plan
from piper_ray.report.plots import style
from scripts.reproduction import sources
from scripts.reproduction.sources import GIB
from scripts.reproduction.study import TOLERANCE, Findings, Row, Study, Tell, milliseconds
from tests.data import goldens

_DEVICES = 64
_BANDWIDTH = (300 + 25) / 2 * GIB
_MEMORY_GIB = 80.0
_MICROBATCHES = (128, 512)
_BLOCKS = 32


def _points(microbatches: int) -> list[tuple[int, int, int]]:
    """(d, t, stages) with d t stages = K, stages of 2 blocks at least, d dividing N and at most 32, t up to 8."""
    return [
        (d, t, _DEVICES // (d * t))
        for t in (1, 2, 4, 8)
        for d in (32, 16, 8, 4, 2, 1)
        if _DEVICES % (d * t) == 0 and _DEVICES // (d * t) <= _BLOCKS and microbatches % d == 0
    ]


def _run(tell: Tell) -> Findings:
    tell("equal partitions of BERT-32 on 64 devices")
    known = {}
    for record in goldens("correlation"):
        key = record["microbatches"], record["data_parallel"], record["tensor_parallel"], record["stages"]
        known[key] = record["time_per_sample_s"]
    rows: list[Row] = []
    faults: list[str] = []
    for microbatches in _MICROBATCHES:
        instance = sources.bert(_BLOCKS, _DEVICES, microbatches, _MEMORY_GIB).replace(bandwidth_bytes_per_s=_BANDWIDTH)
        for d, t, stages in _points(microbatches):
            one = EqualRuns(runs=(stages,), data_parallel_degrees=(d,), tensor_parallel_degrees=(t,))
            found_s = plan(instance, one, restrictions=Restrictions(recompute=Recompute.ALWAYS)).time_per_sample_s
            if found_s is None:
                continue
            reference_s = known.get((microbatches, d, t, stages))
            if reference_s is not None and abs(found_s - reference_s) > TOLERANCE * reference_s:
                faults.append(f"N={microbatches} d={d} t={t}: {found_s} s, the reference {reference_s} s")
            rows.append(
                {
                    "microbatches": microbatches,
                    "data_parallel_degree": d,
                    "tensor_parallel_degree": t,
                    "stages": stages,
                    "time_per_sample_s": found_s,
                    "reference_time_per_sample_s": reference_s,
                }
            )
    compared = sum(row["reference_time_per_sample_s"] is not None for row in rows)
    words = [
        (
            f"All stages with the same d and t, recomputation everywhere, B = (300 + 25) / 2 GiB/s. {compared} of "
            f"{len(rows)} points are in the published set, {'all' if not faults else 'not all'} of them equal to it."
        ),
        "The x axis, the throughput measured on the authors' machines, is not ours to reproduce.",
    ]
    shown: list[Row] = [
        {
            "N": row["microbatches"],
            "d": row["data_parallel_degree"],
            "t": row["tensor_parallel_degree"],
            "stages": row["stages"],
            "ms per sample": milliseconds(_seconds(row)),
        }
        for row in rows
    ]
    return Findings(rows, words, {"correlation": _picture(rows)}, shown, faults)


def _seconds(row: Row) -> float:
    value = row["time_per_sample_s"]
    assert isinstance(value, float)
    return value


def _picture(rows: list[Row]) -> Figure:
    figure, panels = style.panels(
        "BERT-32 on 64 devices: equal partitions", [f"N = {microbatches}" for microbatches in _MICROBATCHES]
    )
    for axes, microbatches in zip(panels, _MICROBATCHES, strict=True):
        of_panel = [row for row in rows if row["microbatches"] == microbatches]
        names = [
            f"{row['data_parallel_degree']} x {row['tensor_parallel_degree']} x {row['stages']}" for row in of_panel
        ]
        axes.barh(names, [_seconds(row) * 1e3 for row in of_panel], color=style.COLOURS[0])
        axes.invert_yaxis()
        axes.set_xlabel("ms per sample")
        axes.set_ylabel("d x t x stages")
        axes.tick_params(axis="y", labelsize=7, labelleft=True)
    return figure


STUDY = Study("correlation", "Fig. 4 (y axis): the cost model on equal partitions", _run)
