"""What a sweep found: comparisons by hand, tables, and plots that show what they should."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import matplotlib.image as image
import numpy as np
import pytest

from piper_ray import UsageError
from piper_ray.report.plots import style
from piper_ray.report.plots.curves import figures
from piper_ray.report.sweep import points_csv, tables
from piper_ray.report.terminal import table_lines
from piper_ray.sweep.findings import Method, Record, Scene, best_of_each, comparisons

GIB = 2.0**30
BEST = "Best plans, of equally fast ones those on the fewest devices"
SCENE = Scene("w", 8, 25e9)


def record(
    planner: str,
    devices: int,
    time_s: float | None,
    *,
    memory_gib: float = 8,
    status: str | None = None,
    without: str = "",
    error: str | None = None,
) -> Record:
    usual = "infeasible" if time_s is None else "optimal" if planner == "piper" else "feasible"
    stages = None if time_s is None else 3
    kind = None if error is None else "LimitError"
    figures_ = (time_s, None, devices, stages, kind, error, 0.25)
    return Record(SCENE, Method(planner, without), devices, memory_gib * GIB, status or usual, *figures_)


RECORDS = [
    record("piper", 4, 2.0),
    record("piper", 8, 1.0),
    record("piper", 16, 0.5, status="feasible"),
    record("piper", 8, None, memory_gib=4),
    record("piper", 8, 1.5, without="no TP"),
    record("gpipe", 4, 4.0),
    record("gpipe", 8, 1.0),
    record("gpipe", 16, None),
    record("gpipe", 32, 0.1),
    record("gpipe", 8, None, memory_gib=4, status="error", error="too | large\nby far"),
]


def test_planners_are_compared_where_both_have_a_plan() -> None:
    exact, restricted, gpipe = sorted(comparisons(RECORDS), key=lambda c: (c.method.planner == "gpipe", c.method))
    assert (exact.points, exact.proved, exact.unproved, exact.infeasible) == (4, 2, 1, 1)
    assert exact.mean_slower is restricted.mean_slower is None
    assert (gpipe.points, gpipe.unproved, gpipe.infeasible, gpipe.failed) == (5, 3, 1, 1)
    assert gpipe.mean_slower == pytest.approx(2.0**0.5)
    assert (gpipe.most_slower, gpipe.median_s) == (2.0, 0.25)


def test_the_best_of_each_memory_size() -> None:
    found = {(str(r.method), r.memory_bytes): r.devices for r in best_of_each(RECORDS)}
    assert found == {("piper", 8 * GIB): 16, ("piper, no TP", 8 * GIB): 8, ("gpipe", 8 * GIB): 32}


def test_tables_as_lines_and_as_markdown() -> None:
    by_title = {table.title: table for table in tables(RECORDS)}
    assert list(by_title) == ["Planners", BEST, "Microbatches per second: w, N = 8, B = 25 GB/s", "Errors"]
    speeds = by_title["Microbatches per second: w, N = 8, B = 25 GB/s"]
    assert speeds.heads == ("K", "piper 8 GiB", "piper 4 GiB", "piper, no TP 8 GiB", "gpipe 8 GiB", "gpipe 4 GiB")
    assert speeds.rows[1] == ("8", "1", "none", "0.66667", "1", "error")
    assert speeds.rows[3] == ("32", "", "", "", "10", "")
    errors = by_title["Errors"]
    assert errors.rows == (("w", "gpipe", "LimitError", "too | large by far", "1"),)
    assert r"| w | gpipe | LimitError | too \| large by far | 1 |" in errors.markdown()
    assert table_lines(errors.columns, errors.rows)[0].split() == [
        "workload",
        "planner",
        "kind",
        "first",
        "words",
        "points",
    ]


def test_without_errors_there_is_no_table_of_them() -> None:
    assert [table.title for table in tables(RECORDS[:1])] == ["Planners", BEST]


def test_points_as_csv_are_exact() -> None:
    rows = list(csv.DictReader(io.StringIO(points_csv(RECORDS))))
    assert len(rows) == len(RECORDS)
    assert float(rows[8]["time_per_sample_s"]) == 0.1
    assert (rows[7]["time_per_sample_s"], rows[7]["status"]) == ("", "infeasible")
    assert rows[9]["error"] == "too | large\nby far"


def test_figures_hold_the_points() -> None:
    found = dict(figures(RECORDS))
    assert list(found) == [f"{kind}-w-N8-B25GB" for kind in ("throughput", "per-device", "planners")]
    four, eight = found["throughput-w-N8-B25GB"].axes
    assert [axes.get_title() for axes in (four, eight)] == ["M = 4 GiB", "M = 8 GiB"]
    curves = {line.get_label(): line for line in eight.get_lines()}
    assert np.array_equal(np.asarray(curves["gpipe"].get_xdata()), [4, 8, 16, 32])
    assert np.allclose(np.asarray(curves["gpipe"].get_ydata(), float), [0.25, 1.0, np.nan, 10.0], equal_nan=True)
    markers = [line.get_marker() for line in eight.get_lines()]
    assert markers.count("x") == 1, "one curve has a point without a plan"
    hollow = [line for line in eight.get_lines() if line.get_markerfacecolor() == "white"]
    assert [list(np.asarray(line.get_xdata())) for line in hollow] == [[16]], "feasible, not proved"
    ratios = {line.get_label(): line for line in found["planners-w-N8-B25GB"].axes[1].get_lines()}
    assert np.allclose(np.asarray(ratios["gpipe"].get_ydata(), float), [2, 1, np.nan, np.nan], equal_nan=True)


def test_many_sizes_of_one_method_are_curves_and_an_axis() -> None:
    records = [record("piper", k, 10.0 / (k * m), memory_gib=m) for m in (2, 4, 8, 16) for k in (4, 8)]
    found = dict(figures(records))
    assert list(found) == [f"{kind}-w-N8-B25GB" for kind in ("throughput", "per-device", "memory")]
    (axes,) = found["throughput-w-N8-B25GB"].axes
    assert [line.get_label() for line in axes.get_lines()] == ["2 GiB", "4 GiB", "8 GiB", "16 GiB"]
    (axes,) = found["memory-w-N8-B25GB"].axes
    assert list(np.asarray(axes.get_lines()[0].get_xdata())) == [2, 4, 8, 16]


def test_a_planner_has_one_colour_and_marker_in_all_figures() -> None:
    other = SCENE._replace(workload="other")
    few = [replace(found, scene=other) for found in RECORDS if found.method.planner != "gpipe"]
    looks: dict[str, set[tuple[str, object]]] = {}
    for name, figure in figures([*RECORDS, *few]):
        if not name.startswith("planners"):
            for line in (line for axes in figure.axes for line in axes.get_lines()):
                if not str(line.get_label()).startswith("_"):
                    looks.setdefault(str(line.get_label()), set()).add((str(line.get_color()), line.get_marker()))
    assert len(looks) > 1
    assert all(len(found) == 1 for found in looks.values())
    assert len({colour for found in looks.values() for colour, _ in found}) == len(looks)


def test_identical_curves_are_all_seen() -> None:
    records = [record(planner, k, 10.0 / k) for planner in ("piper", "megatron", "gpipe") for k in (4, 8)]
    slow = [record("data-parallel", k, 30.0 / k) for k in (4, 8)]
    for name, figure in figures([*records, *slow]):
        (axes,) = figure.axes
        widths = {str(line.get_label()): line.get_linewidth() for line in axes.get_lines()}
        exact = "the exact plan" if name.startswith("planners") else "piper"
        assert max(widths.values()) == widths[exact]
        assert len({widths[label] for label in (exact, "gpipe", "megatron")}) == 3
        assert widths["data-parallel"] == min(widths.values())


def test_crosses_and_hollow_points_are_in_the_legend() -> None:
    points = [record("piper", 4, 2.0), record("piper", 8, 1.0), record("gpipe", 4, None), record("gpipe", 8, 3.0)]

    def words(records: list[Record]) -> list[str]:
        figure = dict(figures(records))["throughput-w-N8-B25GB"]
        return [text.get_text() for text in figure.legends[0].get_texts()]

    assert words(points) == ["piper", "gpipe", "no plan"]
    unproved = [replace(found, status="feasible") if found.method.is_exact else found for found in points]
    assert words(unproved) == ["piper", "gpipe", "no plan", "not proved"]
    assert words([replace(found, time_per_sample_s=4.0) for found in points]) == ["piper", "gpipe"]


def test_a_single_point_is_no_figure() -> None:
    assert list(figures(RECORDS[:1])) == []


def test_plots_are_drawn_without_a_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as wide as it should be, with ink of each curve's colour; the same bytes each time."""
    monkeypatch.delenv("DISPLAY", raising=False)
    for name, figure in figures(RECORDS):
        for copy in ("a", "b"):
            style.save(figure, tmp_path / f"{name}-{copy}.png")
        assert (tmp_path / f"{name}-a.png").read_bytes() == (tmp_path / f"{name}-b.png").read_bytes()
        pixels = (255 * image.imread(tmp_path / f"{name}-a.png")[:, :, :3]).round().astype(int)
        assert pixels.shape[1] == round(150 * (2 * 4.2 + 0.6))
        for axes in figure.axes:
            box = axes.get_position()
            assert box.width > 0.3, "the axes have the room"
        wanted = style.COLOURS[2]
        red, green, blue = (int(wanted[at : at + 2], 16) for at in (1, 3, 5))
        assert (pixels == [red, green, blue]).all(axis=2).sum() > 50


@pytest.mark.long
def test_a_plot_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (_, figure), *_ = figures(RECORDS)
    with pytest.raises(UsageError, match="cannot be written"):
        style.save(figure, tmp_path / "gone" / "x.png")


def test_schedules_are_scenes_of_their_own() -> None:
    """Whose plans are compared under one schedule alone, and whose figures say which."""
    scene = SCENE._replace(schedule="interleaved:4")
    other = [replace(record, scene=scene, time_per_sample_s=7.0) for record in RECORDS[:2]]
    assert {c.workload for c in comparisons([*RECORDS, *other])} == {"w", "w, interleaved:4"}
    titles = [table.title for table in tables([*RECORDS, *other])]
    assert any(title.startswith("Microbatches per second: w, interleaved:4, N = 8") for title in titles)
    names = [name for name, _ in figures([*RECORDS, *other])]
    assert any(name.startswith("throughput-w-N8-") and name.endswith("-interleaved-4") for name in names)
    rows = list(csv.DictReader(io.StringIO(points_csv([*RECORDS, *other]))))
    assert [row["schedule"] for row in rows] == ["2bw"] * len(RECORDS) + ["interleaved:4"] * 2
