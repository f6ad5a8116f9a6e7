"""A sweep on Ray: the same dataset, through workers that die and points that kill them."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from piper_ray.engine.backends.ray import calls, machines
from piper_ray.model.errors import ClusterError
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.sweep import run
from piper_ray.sweep.answer import Report, solve_points
from piper_ray.sweep.dataset import read_dataset
from piper_ray.sweep.demand import Demand
from piper_ray.sweep.point import Point
from tests.sweep_support import content, write_plans, write_small

pytestmark = pytest.mark.usefixtures("local_ray")


def undisturbed(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    source = write_small(folder)
    run.run_sweep(source, folder / "here")
    return source, content(folder / "here")


@pytest.mark.long
def test_plans_on_ray_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config is sent with the model: workers need not find it."""
    source = write_plans(tmp_path)
    progress = run.run_sweep(source, tmp_path / "ray", address="local")
    assert (progress.done, progress.failed, progress.refused, progress.infeasible) == (5, 0, 1, 1)
    assert min(progress.cpu_s, progress.worker_s) > 0.0
    monkeypatch.setattr(run, "_HERE_S", math.inf)
    run.run_sweep(source, tmp_path / "here")
    assert content(tmp_path / "ray") == content(tmp_path / "here")


def workers_that_die(monkeypatch: pytest.MonkeyPatch, folder: Path, deaths: int, devices: int) -> None:
    """The first ``deaths`` that are given a point of so many devices by the exact solver, in the chain."""

    # Local, so that Ray ships it whole: workers cannot import the tests.
    def mortal(graph: Instance, points: tuple[Point, ...], options: SolveOptions, control: object) -> Report:
        for point in points:
            if (point.devices, point.workload, point.planner) == (devices, "chain", "piper"):
                for death in range(deaths):
                    if not (folder / str(death)).exists():
                        (folder / str(death)).touch()
                        os.kill(os.getpid(), signal.SIGKILL)
        return solve_points(graph, points, options, control)

    monkeypatch.setattr(run, "solve_points", mortal)


@pytest.mark.long
def test_workers_that_die_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, expected = undisturbed(tmp_path)
    workers_that_die(monkeypatch, tmp_path, 2, devices=4)
    run.run_sweep(source, tmp_path / "ray", address="local")
    assert (tmp_path / "1").exists()
    assert content(tmp_path / "ray") == expected


@pytest.mark.long
def test_a_point_that_kills_every_worker_is_a_failed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[workloads]\nchain = "chain.json"\n[grid]\nmemory = 40\nbandwidth = 4\ndevices = "2..9"\n'
    source = write_small(tmp_path, text)
    monkeypatch.setattr(calls, "MOST_DEATHS", 2)  # each worker takes seconds to start
    workers_that_die(monkeypatch, tmp_path, 100, devices=5)
    told: list[str] = []
    progress = run.run_sweep(source, tmp_path / "ray", address="local", on_warning=told.append)
    assert (progress.done, progress.errors) == (8, {"WorkerLost": 1})
    (row,) = [row for row in read_dataset(tmp_path / "ray").to_pylist() if row["status"] == "error"]
    assert (row["devices"], row["attempts"]) == (5, 2)
    host = re.escape(f"{socket.gethostname()} (127.0.0.1)")
    death = rf"its process on {host} was killed or crashed .*; it had asked for 0\.\d\d GB"
    assert re.fullmatch(rf"2 workers died with this point, the last one so: {death}", row["error"])
    for text in [text for text in told if "is lost" in text]:
        assert re.fullmatch(rf"a worker on {host} is lost, \d left; what it had goes to others: {death}", text)
    deaths = len([path for path in tmp_path.iterdir() if path.name.isdigit()])
    assert deaths in (2, 3)  # one more if it was first in a batch with others


@pytest.mark.long
def test_a_cluster_where_every_worker_dies_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_MOST_DEATHS", 2)
    monkeypatch.setattr(calls, "MOST_DEATHS", 2)
    workers_that_die(monkeypatch, tmp_path, 100, devices=2)
    text = '[workloads]\nchain = "chain.json"\n[grid]\nmemory = [40, 41]\nbandwidth = 4\ndevices = 2\n'
    source = write_small(tmp_path, text)
    with pytest.raises(ClusterError, match="2 workers in a row died"):
        run.run_sweep(source, tmp_path / "ray", address="local")
    assert read_dataset(tmp_path / "ray").num_rows == 0


def test_a_cluster_without_a_good_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {**machines.software(), "numba": "0.1"}
    monkeypatch.setattr(machines, "software", lambda: ours)
    host = socket.gethostname()
    told: list[str] = []
    with pytest.raises(
        ClusterError, match=rf"no machine of the cluster can work:\n  {host} .*: it has numba .*0\.1 here"
    ):
        run.run_sweep(write_small(tmp_path), tmp_path / "ray", address="local", on_warning=told.append)
    (text,) = [text for text in told if "left out" in text]
    assert text.startswith(f"{host} (127.0.0.1) is left out: it has numba ")


def test_a_machine_that_started_a_worker_before_it_was_asked_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers say what they run: nothing is given to one that is another."""
    from piper_ray.engine.backends.ray.machines import Machines
    from piper_ray.engine.backends.ray.worker import Hello, Worker

    class Other(Worker):
        def hello(self) -> Hello:
            hello = super().hello()
            return hello._replace(software={**hello.software, "piper_ray": "0.0.9"})

    monkeypatch.setattr(Machines, "have_cores", False)  # a worker may start anywhere, then
    monkeypatch.setattr(Machines, "_answered", lambda *_: None)
    monkeypatch.setattr(run, "_FIRST_ANSWERS_S", 0.0)
    monkeypatch.setattr("piper_ray.engine.backends.ray.worker.Worker", Other)
    with pytest.raises(ClusterError, match=r"it has piper_ray 0\.0\.9"):
        run.run_sweep(write_small(tmp_path), tmp_path / "ray", address="local")
    assert read_dataset(tmp_path / "ray").num_rows == 0


@pytest.mark.long
def test_a_worker_that_cannot_work_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_package(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'piper_ray'")

    monkeypatch.setattr(run, "solve_points", without_the_package)
    with pytest.raises(ClusterError, match=r"it cannot work: ModuleNotFoundError: No module named 'piper_ray'"):
        run.run_sweep(write_small(tmp_path), tmp_path / "ray", address="local")


@pytest.mark.long
def test_a_worker_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two, as after Ctrl-Z: what it has others do too."""
    source, expected = undisturbed(tmp_path)
    hung = tmp_path / "hung"

    def hanging(graph: Instance, points: tuple[Point, ...], options: SolveOptions, control: object) -> Report:
        if any((point.devices, point.workload) == (4, "towers") for point in points):
            with contextlib.suppress(FileExistsError), hung.open("x") as file:
                file.write(str(os.getpid()))
                file.flush()
                os.kill(os.getpid(), signal.SIGSTOP)
        return solve_points(graph, points, options, control)

    monkeypatch.setattr(run, "_LEAST_EXPECTED_S", 0.25)
    monkeypatch.setattr(run, "_UNMEASURED_S", 1.5)  # it hangs amid the first of a kind, or with one in line
    monkeypatch.setattr(run, "solve_points", hanging)
    told: list[str] = []
    try:
        run.run_sweep(source, tmp_path / "ray", address="local", on_warning=told.append)
    finally:
        with contextlib.suppress(ProcessLookupError):  # it ends with the sweep
            os.kill(int(hung.read_text()), signal.SIGKILL)
    assert content(tmp_path / "ray") == expected
    assert any("is slow or hangs" in text for text in told)  # on a busy machine the others may seem to, too


def test_points_too_large_for_a_worker_go_to_the_whole_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By memory, and long ones that are too few to keep the workers busy."""
    text = '[workloads]\ntowers = "towers.json"\n[grid]\nmemory = 40\nbandwidth = 4\ndevices = [2, 3]\n'
    source = write_small(tmp_path, text)
    run.run_sweep(source, tmp_path / "here")
    monkeypatch.setattr(Demand, "memory_bytes", lambda _self, _point: 1e18)
    run.run_sweep(source, tmp_path / "memory", address="local")
    monkeypatch.undo()
    one = write_small(tmp_path, text.replace("[2, 3]", "2"))
    monkeypatch.setattr("piper_ray.sweep.demand._LONG_S", 0.0)
    run.run_sweep(one, tmp_path / "time", address="local")
    assert content(tmp_path / "memory") == content(tmp_path / "here")
    assert content(tmp_path / "time") == content(tmp_path / "here")[:1]
    for name in ("memory", "time"):
        assert set(read_dataset(tmp_path / name, ["spread"]).column("spread").to_pylist()) == {True}
