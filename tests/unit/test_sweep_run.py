"""A sweep in this process: its rows are the solver's answers, errors are rows too, and nothing is done twice."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import piper_ray
from piper_ray import Restrictions, baselines, evaluate, load_plan
from piper_ray.model.constraints import Recompute
from piper_ray.sweep.dataset import Dataset, read_dataset
from piper_ray.sweep.point import Point, Progress
from piper_ray.sweep.read import read_sweep
from piper_ray.sweep.run import run_sweep
from tests.sweep_support import SMALL_POINTS, content, graphs_of, write_small


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Progress]:
    """The small sweep: its file, its dataset, and what it told at the end."""
    folder = tmp_path_factory.mktemp("sweep")
    source = write_small(folder)
    return source, folder / "dataset", run_sweep(source, folder / "dataset")


def test_each_row_is_what_solve_answers(done: tuple[Path, Path, Progress]) -> None:
    source, location, _ = done
    graphs = graphs_of(source)
    rows = [row for row in content(location) if row["planner"] == "piper"]
    assert len(rows) == 64
    for row in rows:
        instance = graphs[row["workload"]].replace(
            devices=row["devices"], microbatches=row["microbatches"], memory_bytes=row["memory_bytes"]
        )
        restrictions = Restrictions(recompute=Recompute(row["recompute"]))
        solution = piper_ray.solve(instance, restrictions=restrictions)
        assert row["status"] == solution.status.value
        assert (row["time_per_sample_s"], row["gap"]) == (solution.time_per_sample_s, solution.gap)
        plan = None if solution.plan is None else solution.plan.to_dict()
        assert (None if row["plan"] is None else json.loads(row["plan"])) == plan
        assert row["lower_bound_s"] == (solution.lower_bound_s if plan else None)
        least = solution.infeasibility.least_memory_bytes if solution.infeasibility else None
        assert row["least_memory_bytes"] == least
        size = (row["downsets"], row["levels"], row["pairs"])
        stats = solution.stats
        assert size == (stats.downsets, stats.levels, stats.pairs)
    assert {row["status"] for row in rows} == {"optimal", "infeasible"}


def test_each_row_of_a_baseline_is_its_answer(done: tuple[Path, Path, Progress]) -> None:
    source, location, _ = done
    graphs = graphs_of(source)
    rows = [row for row in content(location) if row["planner"] == "gpipe"]
    assert len(rows) == 64
    for row in rows:
        instance = graphs[row["workload"]].replace(
            devices=row["devices"], microbatches=row["microbatches"], memory_bytes=row["memory_bytes"]
        )
        result = baselines.plan(instance, "gpipe", restrictions=Restrictions(recompute=Recompute(row["recompute"])))
        assert row["status"] == ("infeasible" if result.plan is None else "feasible")
        assert (row["time_per_sample_s"], row["tried"], row["note"]) == (
            result.time_per_sample_s,
            result.tried,
            result.note,
        )
        if row["plan"] is not None:
            plan = load_plan(json.loads(row["plan"]), instance)
            assert evaluate(instance, plan).time_per_sample_s == row["time_per_sample_s"]


def test_a_failing_point_is_a_row_and_stops_nothing(done: tuple[Path, Path, Progress]) -> None:
    _, location, progress = done
    (row,) = [row for row in content(location) if row["status"] == "error"]
    assert (row["planner"], row["error_kind"], row["plan"]) == ("piper-published", "LimitError", None)
    assert "over the limit" in row["error"]
    assert (progress.done, progress.failed, progress.left) == (SMALL_POINTS, 1, 0)
    assert progress.errors == {"LimitError": 1}


def test_the_best_and_the_shares_of_time_are_told(done: tuple[Path, Path, Progress]) -> None:
    _, location, progress = done
    for label, best in progress.best.items():
        times = [row["time_per_sample_s"] for row in content(location) if row["workload"] == label]
        assert best.time_per_sample_s == min(time for time in times if time is not None)
        assert best.point.workload == label
    assert 0.0 < progress.solving_s <= progress.run_s


def test_points_of_one_shape_share_a_lattice(done: tuple[Path, Path, Progress]) -> None:
    """One for each workload, recomputation and set of degrees: K = 1 leaves out t = 2."""
    table = read_dataset(done[1], ["planner", "lattice_s"])
    built = [row for row in table.to_pylist() if row["lattice_s"]]
    assert len(built) == 2 * 2 * 2


def test_nothing_is_repeated(done: tuple[Path, Path, Progress], monkeypatch: pytest.MonkeyPatch) -> None:
    source, location, _ = done
    before = read_dataset(location)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("solved again")

    monkeypatch.setattr("piper_ray.sweep.run.answer", never)
    again = run_sweep(source, location, resume=True)
    assert (again.recorded, again.done, again.left) == (SMALL_POINTS, 0, 0)
    assert read_dataset(location).equals(before)


def test_a_larger_sweep_does_only_what_is_new(tmp_path: Path) -> None:
    text = '[workloads]\nchain = "chain.json"\n[grid]\nmemory = 40\nbandwidth = 4\ndevices = [2, 3]\n'
    run_sweep(write_small(tmp_path, text), tmp_path / "d")
    more = run_sweep(write_small(tmp_path, text.replace("[2, 3]", '"2..5"')), tmp_path / "d", resume=True)
    assert (more.recorded, more.done) == (2, 2)
    run_sweep(tmp_path / "small.toml", tmp_path / "other")
    assert content(tmp_path / "d") == content(tmp_path / "other")


@pytest.mark.long
def test_points_are_on_record_while_the_sweep_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper_ray.sweep.run._WRITE_EVERY_S", 0.0)
    seen: list[tuple[int, int]] = []

    def listen(progress: Progress) -> None:
        if progress.done % 16 == 0:
            seen.append((progress.done, read_dataset(tmp_path / "d", ["status"]).num_rows))

    run_sweep(write_small(tmp_path), tmp_path / "d", listener=listen)
    assert len(seen) >= 8
    assert all(done == written for done, written in seen)


def test_an_interrupt_keeps_what_is_done(tmp_path: Path) -> None:
    source = write_small(tmp_path)

    def listen(progress: Progress) -> None:
        if progress.done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(source, tmp_path / "d", listener=listen)
    assert read_dataset(tmp_path / "d").num_rows == 20
    assert run_sweep(source, tmp_path / "d", resume=True).recorded == 20
    run_sweep(source, tmp_path / "other")
    assert content(tmp_path / "d") == content(tmp_path / "other")


@pytest.mark.parametrize(
    "place", ["piper_ray.engine.search.search.Search._evaluate", "piper_ray.engine.layers.explain"]
)
def test_an_interrupted_solve_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """At Ctrl-C the solver returns what it has: its best plan, or a proof without the memory that would do."""

    def interrupted(*_: object, **__: object) -> Any:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(write_small(tmp_path), tmp_path / "d")
    statuses = read_dataset(tmp_path / "d", ["status"]).column("status").to_pylist()
    assert set(statuses) <= {"optimal"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_storage_that_fails_ends_the_sweep_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Dataset, "_write", full)
    with pytest.raises(piper_ray.CheckpointRefused, match="No space left on device; what was written before is kept"):
        run_sweep(write_small(tmp_path), tmp_path / "d")


SCHEDULES = """
[workloads]
chain = "chain.json"
towers = "towers.json"

[grid]
devices = "1..8*2"
microbatches = 4
memory = 40
bandwidth = 4
schedules = ["2bw", "1f1b", "gpipe"]
planners = ["piper", "megatron"]

[[points]]
workload = "chain"
schedule = "zb-v:3"

[[points]]
workload = "chain"
devices = 3
schedule = "pipedream"
"""


@pytest.mark.long
def test_rows_are_of_the_schedules_asked_for(tmp_path: Path) -> None:
    text = SCHEDULES.replace('schedule = "zb-v:3"', 'schedule = "gpipe"')
    source, location = write_small(tmp_path, text), tmp_path / "dataset"
    progress = run_sweep(source, location)
    graphs, rows = graphs_of(source), content(location)
    assert len(rows) == 2 * 4 * 3 * 2 + 2, "the grid, and two points"
    for row in rows:
        instance = graphs[row["workload"]].replace(
            devices=row["devices"], microbatches=row["microbatches"], memory_bytes=row["memory_bytes"]
        )
        if row["planner"] == "piper":
            solution = piper_ray.solve(instance, schedule=row["schedule"])
            assert row["time_per_sample_s"] == solution.time_per_sample_s
            assert row["status"] == solution.status.value
            plan = None if solution.plan is None else solution.plan.to_dict()
            assert (None if row["plan"] is None else json.loads(row["plan"])) == plan
        else:
            result = baselines.plan(instance, row["planner"], schedule=row["schedule"])
            assert row["time_per_sample_s"] == result.time_per_sample_s
    assert len({row["input_hash"] for row in rows}) == len(rows)
    under_1f1b = [row for row in rows if (row["workload"], row["schedule"]) == ("chain", "1f1b")]
    assert progress.best["chain, 1f1b"].time_per_sample_s == min(
        row["time_per_sample_s"] for row in under_1f1b if row["time_per_sample_s"] is not None
    )
    again = run_sweep(source, location, resume=True)
    assert (again.recorded, again.done) == (len(rows), 0)
    assert content(location) == rows


def test_a_workload_may_say_the_schedule(tmp_path: Path) -> None:
    source = write_small(tmp_path, '[workloads]\nchain = "chain.json"\n[grid]\ndevices = [1, 2]\n')
    chain = tmp_path / "chain.json"
    chain.write_text(json.dumps(json.loads(chain.read_text()) | {"schedule": "1f1b"}))
    assert {point.schedule.name.value for point in read_sweep(source).points if isinstance(point, Point)} == {"1f1b"}


@pytest.mark.parametrize(("schedule", "words"), [("zb-v:3", "two chunks"), ("1f2b", "one of"), ("1f1b:x", "chunks")])
def test_a_schedule_that_is_none_is_a_fault(tmp_path: Path, schedule: str, words: str) -> None:
    with pytest.raises(piper_ray.InputError, match=words):
        read_sweep(write_small(tmp_path, SCHEDULES.replace("zb-v:3", schedule)))
