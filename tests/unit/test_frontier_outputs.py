"""The table of a frontier, its plot, and the numbers that a user asks for."""

from __future__ import annotations

from pathlib import Path

import pyarrow.csv
import pyarrow.parquet
import pytest

from piper_ray.engine.frontier.frontier import frontier
from piper_ray.engine.frontier.result import parse_numbers
from piper_ray.model.constraints import AllDevices, Restrictions
from piper_ray.model.errors import UsageError
from piper_ray.report.document import frontier_document
from piper_ray.report.frontier import print_frontier
from piper_ray.report.frontier_table import BUDGETS, COLUMNS, DEVICES, PlanEntry, frontier_table, write_table
from piper_ray.report.plots.curves import frontier_figure
from piper_ray.report.plots.style import save
from tests.lengths import long_after
from tests.report_cases import small_instance, string_console
from tests.solver_support import ONE_THREAD


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("8", (8,)),
        ("8,16,32", (8, 16, 32)),
        ("3..6", (3, 4, 5, 6)),
        ("8..30:8", (8, 16, 24)),
        (" 5 , 2..3,3", (2, 3, 5)),
    ],
)
def test_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_numbers(text, "--devices") == numbers


@pytest.mark.parametrize("text", ["", "8..", "..8", "8-16", "0..4", "9..8", "1..9:0", "-3", "1..9000000", "8,,9"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(UsageError, match="--devices"):
        parse_numbers(text, "--devices")


def test_devices_must_rise() -> None:
    for devices in ([], [0], [3, 3], [4, 2]):
        with pytest.raises(UsageError, match="number of devices"):
            frontier(small_instance(), devices=devices)


def test_what_was_not_asked_for() -> None:
    found = frontier(small_instance(), devices=[2, 4], options=ONE_THREAD)
    with pytest.raises(UsageError, match="not asked for 3 devices"):
        found.plan(3)
    with pytest.raises(UsageError, match="more than min"):
        found.by_budget([5])


def test_schema_is_stable() -> None:
    assert [(field.name, str(field.type), field.nullable) for field in COLUMNS] == [
        ("curve", "string", False),
        ("devices", "int64", False),
        ("data_parallel_budget", "int64", False),
        ("status", "string", False),
        ("time_per_sample_s", "double", True),
        ("lower_bound_s", "double", True),
        ("gap", "double", True),
        ("throughput_samples_per_s", "double", True),
        ("is_step", "bool", False),
        ("plan_devices", "int64", True),
        ("plan_data_parallel_sum", "int64", True),
        ("plan_stages", "int64", True),
        ("plan_file", "string", True),
        ("schedule", "string", False),
    ]


def test_tables_hold_every_point(tmp_path: Path) -> None:
    instance = small_instance().replace(memory_bytes=2.0 * 2**30)
    found = frontier(instance, options=ONE_THREAD)
    assert found.points()[0].status.value == "infeasible"
    plan = found.plan(4)
    assert plan is None  # six layers of a GiB and more, four devices of two
    instance = small_instance()
    found = frontier(instance, options=ONE_THREAD)
    plan = found.plan(4)
    assert plan is not None
    points = {DEVICES: found.points(), BUDGETS: found.budget_points()}
    table = frontier_table(found.instance, points, {4: PlanEntry(plan, "devices-00004.json")})
    for name in ("table.parquet", "table.csv"):
        write_table(table, tmp_path / name)
    read = pyarrow.parquet.read_table(tmp_path / "table.parquet")
    assert read.equals(table)
    assert read.schema.metadata[b"schema"] == b"piper-ray/frontier"
    assert read.schema.metadata[b"schema_version"] == b"1"
    assert read.schema.metadata[b"instance_digest"].decode() == instance.digest
    rows = read.to_pylist()
    assert [row["devices"] for row in rows if row["curve"] == DEVICES] == [1, 2, 3, 4]
    assert {row["devices"] for row in rows if row["curve"] == BUDGETS} == {4}
    last = rows[3]
    assert last["time_per_sample_s"] * last["throughput_samples_per_s"] == pytest.approx(1.0)
    assert (last["plan_devices"], last["plan_stages"]) == (plan.devices, len(plan.stages))
    assert last["plan_file"] == "devices-00004.json"
    assert pyarrow.csv.read_csv(tmp_path / "table.csv").column_names == COLUMNS.names
    with pytest.raises(UsageError, match=r"\.parquet or \.csv"):
        write_table(table, tmp_path / "table.xlsx")
    with pytest.raises(UsageError, match="cannot be written"):
        write_table(table, tmp_path / "nowhere" / "table.csv")


@pytest.mark.long
@pytest.mark.parametrize(
    ("suffix", "head"), long_after(1, [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
)
def test_plots_are_the_same_each_time(tmp_path: Path, suffix: str, head: bytes) -> None:
    found = frontier(small_instance(), options=ONE_THREAD)
    files = [tmp_path / f"{name}{suffix}" for name in ("one", "other")]
    for file in files:
        figure = frontier_figure(found.instance, found.points(), found.budget_points())
        assert figure is not None
        assert [axes.get_xlabel() for axes in figure.axes] == [
            "devices K",
            "devices K",
            "bound on the sum of data-parallel degrees",
        ]
        save(figure, file)
    one, other = (file.read_bytes() for file in files)
    assert one == other
    assert one.startswith(head)
    assert sorted(tmp_path.iterdir()) == sorted(files)


def test_curves_are_named_and_other_formats_refused(tmp_path: Path) -> None:
    found = frontier(small_instance(), options=ONE_THREAD)
    figure = frontier_figure(found.instance, found.points(), ())
    assert figure is not None
    save(figure, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    for word in ("N = 8", "optimum", "perfect speedup over K = 1"):
        assert f">{word}</text>" in text
    with pytest.raises(UsageError, match=r"\.png, \.svg, \.pdf"):
        save(figure, tmp_path / "plot.gif")
    assert frontier_figure(found.instance, (), ()) is None


def test_outputs_say_the_schedule() -> None:
    found = frontier(small_instance(), options=ONE_THREAD, schedule="1f1b")
    table = frontier_table(found.instance, {DEVICES: found.points()}, schedule=found.schedule)
    assert set(table.column("schedule").to_pylist()) == {"1f1b"}
    figure = frontier_figure(found.instance, found.points(), (), found.schedule)
    assert figure is not None
    assert [axes.get_title() for axes in figure.axes] == ["N = 8, 1f1b"] * 2
    document = frontier_document(found.instance, found.restrictions, found.options, found, ())
    assert (document["schedule"], document["chunks"]) == ("1f1b", 1)
    console, output = string_console(100)
    print_frontier(console, found, ())
    assert " solves" in output.getvalue()


def test_points_without_a_plan_are_no_part_of_a_step() -> None:
    """With all devices in use there are gaps between numbers that have plans."""
    restrictions = Restrictions(constraints=[AllDevices()])
    found = frontier(
        small_instance().replace(devices=9), restrictions=restrictions, options=ONE_THREAD, schedule="1f1b"
    )
    without = [point.devices for point in found.points() if point.time_per_sample_s is None]
    assert 7 in without, "neither 7 stages of 6 layers nor 7 replicas of 8 microbatches"
    console, output = string_console(100)
    print_frontier(console, found, ())
    rows = [line.split()[:2] for line in output.getvalue().splitlines() if " ms " in line]
    assert ["6", "6"] in rows
    assert ["8", "8"] in rows
