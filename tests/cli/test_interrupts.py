"""SIGINT, SIGTERM and SIGHUP to a command: it ends with what it has found, whatever it is doing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import piper_ray
from piper_ray.cli import main
from piper_ray.cli.interrupts import Interrupts
from piper_ray.evaluate import evaluate
from piper_ray.model.events import IncumbentFound
from piper_ray.model.stop import Stop, StopSearch
from tests.cli_cases import ROOT, run, without_notes, write_small
from tests.interrupt_support import HANG_S, SIGNALS, long_solve, started, wait_for, write_long
from tests.lengths import long_after
from tests.report_cases import small_instance
from tests.sweep_support import SMALL_POINTS
from tests.sweep_support import write_small as write_sweep


@pytest.fixture
def long(tmp_path: Path) -> Path:
    return write_long(tmp_path)


def assert_solution(output: str, out: Path, memory_bytes: float | None = None) -> None:
    """A document with a plan, valid and worth what it says, in the file too."""
    document = json.loads(output)
    assert (document["status"], document["stopped_by"]) == ("feasible", "interrupt")
    instance = long_solve() if memory_bytes is None else long_solve().replace(memory_bytes=memory_bytes)
    for plan in (piper_ray.load_plan(document, instance), piper_ray.load_plan(out, instance)):
        assert evaluate(instance, plan).time_per_sample_s == document["time_per_sample_s"]
    assert 0 < document["lower_bound_s"] < document["time_per_sample_s"]


# How a supervisor passes each signal on is in test_supervise.py.
@pytest.mark.parametrize(
    ("number", "supervised"),
    long_after(1, [(signal.SIGINT, []), (signal.SIGTERM, ["--supervise"])]),
)
def test_a_search_ends_with_its_plan_and_its_checkpoint(
    long: Path, tmp_path: Path, number: signal.Signals, supervised: list[str]
) -> None:
    out, kept = tmp_path / "plan.json", tmp_path / "kept"
    with started("solve", long, "--json", "--out", out, "--checkpoint", kept, *supervised) as process:
        wait_for(process, "   1  ")  # the first evaluation is on record
        process.send_signal(number)
        output, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == 128 + number
    assert_solution(output, out)
    told: list[str] = []
    stop: Stop[piper_ray.Solution] = Stop()

    def listener(event: object) -> None:
        told.append(str(getattr(event, "text", "")))
        if isinstance(event, IncumbentFound):
            stop.request()

    piper_ray.solve(long_solve(), checkpoint=kept, listener=listener, stop=stop)
    assert any("evaluations are on record" in text for text in told), told


# What follows the first plan does not look at the flag: as a kernel, a compilation or a storage that hangs.
_STUCK = """
import time
from piper_ray.engine.search.search import Search
def stuck(*_, **__):
    print("stuck", file=sys.stderr, flush=True)
    time.sleep(1e6)
Search._evaluate = stuck
"""


def test_a_search_that_hangs_is_given_up_and_keeps_its_plan(long: Path, tmp_path: Path) -> None:
    out, kept = tmp_path / "plan.json", tmp_path / "kept"
    with started("solve", long, "--json", "--out", out, "--checkpoint", kept, setup=_STUCK) as process:
        wait_for(process, "stuck")
        process.terminate()
        output, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == 128 + signal.SIGTERM
    assert_solution(output, out)
    assert not list(kept.glob("lease.*")), "the checkpoint is given up, too"


_FAILS = """
import time
from piper_ray.model.errors import ClusterError
from piper_ray.engine.search.search import Search
def fails(search, *_, **__):
    print("waiting", file=sys.stderr, flush=True)
    while not search.ledger.limits.stop.requested:
        time.sleep(0.01)
    raise ClusterError("the cluster was told to end, too")
Search._evaluate = fails
"""


@pytest.mark.long
def test_what_fails_because_of_the_signal_costs_no_plan(long: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    with started("solve", long, "--json", "--out", out, setup=_FAILS) as process:
        wait_for(process, "waiting")
        process.terminate()
        output, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == 128 + signal.SIGTERM
    assert_solution(output, out)
    assert errors.startswith("piper-ray: terminated; the cluster was told to end, too\n")


_FEW_BLOCKS = """
import piper_ray.engine.blocks.solve
piper_ray.engine.blocks.block_instance.MOST_DOWNSETS = 300
"""


@pytest.mark.long
def test_operators_in_blocks_keep_a_plan_of_layers(long: Path, tmp_path: Path) -> None:
    out, setup = tmp_path / "plan.json", _STUCK + _FEW_BLOCKS
    options = ("--json", "--out", out, "--memory", "1kB", "--contract", "operators")
    with started("solve", long, *options, setup=setup) as process:
        wait_for(process, "stuck")
        process.terminate()
        output, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == 128 + signal.SIGTERM
    assert_solution(output, out, memory_bytes=1e3)
    assert json.loads(output)["blocks"]["layers"] == len(long_solve().layers)


_NOTHING_YET = """
import time
import piper_ray.engine.solve
def stuck(*_, **__):
    print("stuck", file=sys.stderr, flush=True)
    time.sleep(1e6)
piper_ray.engine.layers.prepare = stuck
"""


@pytest.mark.long
def test_before_anything_is_found_nothing_is_lost(long: Path) -> None:
    with started("solve", long, "--json", setup=_NOTHING_YET) as process:
        wait_for(process, "stuck")
        process.terminate()
        output, errors = process.communicate(timeout=HANG_S)
        assert (process.returncode, output) == (128 + signal.SIGTERM, "")
        assert errors == "piper-ray: terminated; nothing had been found yet, so nothing is lost\n"


@pytest.mark.long
def test_a_search_for_the_least_memory_keeps_the_proof(long: Path) -> None:
    setup = _STUCK.replace(
        "Search._evaluate = stuck",
        "import piper_ray.engine.layers; piper_ray.engine.layers.explain = stuck",
    )
    with started("solve", long, "--memory", "20B", "--json", setup=setup) as process:
        wait_for(process, "stuck")
        process.terminate()
        output, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == 128 + signal.SIGTERM
    assert json.loads(output)["status"] == "infeasible"


# An answer that no pipe holds, and nobody reads.
_BLOCKED = """
import piper_ray.report.document as document
to_text = document.to_text
def long_text(*arguments):
    print("writing", file=sys.stderr, flush=True)
    return to_text(*arguments) + " " * 10**6
document.to_text = long_text
"""


@pytest.mark.long
def test_a_pipe_that_nobody_reads_does_not_keep_it(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    with started("solve", write_small(tmp_path), "--json", "--out", out, setup=_BLOCKED, loaded=False) as process:
        wait_for(process, "writing")  # the plan
        wait_for(process, "writing")  # the answer
        process.terminate()
        assert process.wait(HANG_S) == 128 + signal.SIGTERM
    assert piper_ray.load_plan(out, small_instance()).stages


@pytest.mark.long
def test_what_it_was_started_to_ignore_stays_ignored(long: Path) -> None:
    with started("solve", long, "--json", ignored=signal.SIGHUP) as process:
        wait_for(process, "   1  ")
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=HANG_S)
        assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.long
def test_more_signals_than_one_change_nothing(long: Path, tmp_path: Path) -> None:
    """Of some that are there at once the system says which is the first."""
    out = tmp_path / "plan.json"
    with started("solve", long, "--json", "--out", out) as process:
        wait_for(process, "   1  ")
        for _ in range(20):
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=HANG_S)
        assert process.returncode in (128 + signal.SIGHUP, 128 + signal.SIGINT)
    assert_solution(output, out)


_TOLD_FRONTIER = """
from piper_ray.engine.evaluation.evaluations import Evaluations
evaluate = Evaluations.evaluate
def told(*arguments, **options):
    print("evaluating", file=sys.stderr, flush=True)
    return evaluate(*arguments, **options)
Evaluations.evaluate = told
"""


def test_a_frontier_ends_with_its_bounds(long: Path, tmp_path: Path) -> None:
    table = tmp_path / "points.csv"
    with started("frontier", long, "--devices", "8..48:8", "--json", "--out", table, setup=_TOLD_FRONTIER) as process:
        wait_for(process, "evaluating")
        process.terminate()
        output, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == 128 + signal.SIGTERM
    document = json.loads(output)
    assert document["stopped_by"] == "interrupt"
    assert [point["devices"] for point in document["by_devices"]] == list(range(8, 49, 8))
    assert document["by_devices"][-1]["time_per_sample_s"] > document["by_devices"][-1]["lower_bound_s"] > 0
    assert len(table.read_text().splitlines()) == 7


@pytest.mark.long
def test_a_frontier_under_a_flush_ends_with_its_bounds(long: Path) -> None:
    options = ("--schedule", "1f1b", "--devices", "8..48:8", "--json")
    with started("frontier", long, *options) as process:
        wait_for(process, "stage costs")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == 128 + signal.SIGTERM
    document = json.loads(output)
    assert document["stopped_by"] == "interrupt"
    assert [point["devices"] for point in document["by_devices"]] == list(range(8, 49, 8))
    assert document["by_devices"][-1]["lower_bound_s"] > 0


_STUCK_FRONTIER = """
import time
from piper_ray.engine.evaluation.evaluations import Evaluations
def stuck(*_, **__):
    print("stuck", file=sys.stderr, flush=True)
    time.sleep(1e6)
Evaluations.evaluate = stuck
"""


@pytest.mark.long
def test_a_frontier_that_hangs_is_given_up_and_keeps_its_bounds(long: Path) -> None:
    with started("frontier", long, "--devices", "8..48:8", "--json", setup=_STUCK_FRONTIER) as process:
        wait_for(process, "stuck")
        process.terminate()
        output, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == 128 + signal.SIGTERM
    point = json.loads(output)["by_devices"][-1]
    assert point["time_per_sample_s"] > point["lower_bound_s"] > 0


_SLOW_SWEEP = """
import time
import piper_ray.sweep.run as run
answer, answered = run.answer, []
def slow(*arguments, **options):
    answered.append(1)
    if len(answered) == 10:
        print("stuck", file=sys.stderr, flush=True)
        time.sleep({pause_s})
    return answer(*arguments, **options)
run.answer = slow
"""


@pytest.mark.parametrize(("number", "pause_s"), long_after(1, [(signal.SIGHUP, 0.0), (signal.SIGTERM, 1e6)]))
def test_a_sweep_can_go_on_from_where_it_was(tmp_path: Path, number: signal.Signals, pause_s: float) -> None:
    """Also where the point in work does not end."""
    source, storage = write_sweep(tmp_path), tmp_path / "dataset"
    with started("sweep", source, "--storage", storage, setup=_SLOW_SWEEP.format(pause_s=pause_s)) as process:
        wait_for(process, "stuck")
        process.send_signal(number)
        output, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == 128 + number
    assert f"; to go on: piper-ray sweep {source} --storage {storage} --resume" in errors
    recorded = int(output.split()[0])
    assert 9 <= recorded < SMALL_POINTS
    assert piper_ray.read_dataset(storage).num_rows == recorded
    result = run("sweep", source, "--storage", storage, "--resume")
    assert (result.returncode, without_notes(result.stderr)) == (0, "")
    assert f"{SMALL_POINTS} points of {SMALL_POINTS} on record ({recorded} of them before)" in result.stdout


_SWEEP_ON_RAY = """
from piper_ray.engine.backends.ray.calls import ClusterWorkers
done = ClusterWorkers.done
def told(*arguments):
    print("at work", file=sys.stderr, flush=True)
    return done(*arguments)
ClusterWorkers.done = told
"""


@pytest.mark.long
def test_signals_stay_ours_once_ray_is_there(tmp_path: Path) -> None:
    """Ray has a handler of its own for SIGTERM, which prints a stack and aborts; where it cannot set it, it says so."""
    arguments = ("sweep", write_sweep(tmp_path), "--storage", tmp_path / "dataset", "--address", "local")
    with started(*arguments, setup=_SWEEP_ON_RAY) as process:
        before = wait_for(process, "at work")
        process.terminate()
        _, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM" not in before + errors
    assert "to go on: piper-ray sweep" in errors


_AS_IT_IS_IMPORTED = """
import importlib.abc, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests were started to ignore
class Interrupted(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupted())
"""


@pytest.mark.parametrize(
    "name",
    long_after(
        1,
        ["piper_ray.cli", "typer", "piper_ray.cli.interrupts", "piper_ray.model.errors", "piper_ray.cli.app", "json"],
    ),
)
def test_ctrl_c_while_the_command_is_loaded_shows_no_traceback(name: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_AS_IT_IS_IMPORTED.format(name=name))
    result = subprocess.run(
        [sys.executable, "-m", "piper_ray", "info", str(write_small(tmp_path))],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
    )
    assert result.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert result.stderr in ("", "piper-ray: interrupted\n")


_RAISED_ANEW = """
import os, signal
class Descriptor:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGTERM)
class Loaded(dict):
    def __getitem__(self, name):
        type("Owner", (), {"field": Descriptor()})
import piper_ray.cli.app
piper_ray.cli.app.app = lambda prog_name: Loaded()["app"]
"""


def test_a_signal_that_becomes_another_error_is_told_as_a_signal() -> None:
    """As Python 3.11 makes a RuntimeError of what is raised in ``__set_name__``, as amid the loading of pydantic."""
    with started("info", "bert64", setup=_RAISED_ANEW, loaded=False) as process:
        _, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == 128 + signal.SIGTERM
    assert errors == "piper-ray: terminated\n"


_COMMANDS = {
    "solve": ("solve", "{long}", "--json", "--checkpoint", "{folder}/kept"),
    "frontier": ("frontier", "{long}", "--devices", "8..48:8", "--json"),
    "sweep": ("sweep", "{sweep}", "--storage", "{folder}/dataset", "--resume"),
    "estimate": ("estimate", "llama3-405b", "--gpu", "H100-SXM", "--nodes", "64"),
}


@pytest.mark.parametrize("name", long_after(0, _COMMANDS))
def test_at_random_moments(name: str, long: Path, tmp_path: Path) -> None:
    """From the moment on at which the program itself has begun: before, the system ends it."""
    places = {"long": long, "sweep": write_sweep(tmp_path), "folder": tmp_path}
    arguments = [argument.format(**places) for argument in _COMMANDS[name]]
    rng = random.Random(name)
    setup = "print('begun', file=sys.stderr, flush=True)"
    for _ in range(2):
        number = rng.choice(SIGNALS)
        with started(*arguments, setup=setup) as process:
            wait_for(process, "begun")
            time.sleep(0.05 + rng.random() * 2)
            process.send_signal(number)
            output, errors = process.communicate(timeout=HANG_S)
            assert process.returncode in (0, 128 + number), errors
        assert "Traceback" not in errors
        if "--json" in arguments and output:
            json.loads(output)


def test_work_that_asks_is_stopped_and_its_answer_returned() -> None:
    interrupts = Interrupts()

    def work(stop: Stop[str]) -> str:
        stop.offer(lambda: "so far")
        interrupts.stop(signal.SIGTERM)
        stop.check()
        raise AssertionError("unreachable")

    assert interrupts.run(work) == "so far"
    assert interrupts.exit_code == 143


def test_what_work_raises_reaches_the_caller() -> None:
    def work(stop: Stop[str]) -> str:  # noqa: ARG001
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Interrupts().run(work)


def test_handlers_are_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["piper-ray", "info", str(write_small(tmp_path))])
    before = [signal.getsignal(number) for number in SIGNALS]
    assert main() == 0
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_stop_that_is_asked_for_before_the_search() -> None:
    stop: Stop[piper_ray.Solution] = Stop()
    stop.request()
    with pytest.raises(StopSearch):
        piper_ray.solve(long_solve(), stop=stop)


def test_a_solution_is_offered_while_the_search_goes_on() -> None:
    stop: Stop[piper_ray.Solution] = Stop()
    seen: list[piper_ray.Solution] = []

    def listen(event: object) -> None:
        if type(event).__name__ == "IncumbentFound":
            so_far = stop.answer()
            assert so_far is not None
            seen.append(so_far)
            stop.request()

    instance = long_solve()
    solution = piper_ray.solve(instance, listener=listen, stop=stop)
    assert (solution.status, solution.stopped_by) == (piper_ray.Status.FEASIBLE, "interrupt")
    (so_far,) = seen
    assert so_far.plan == solution.plan
    assert so_far.stopped_by == "interrupt"


def test_what_comes_after_the_conclusion_is_left_undone() -> None:
    """A cluster that is let go may take the process with it, before the answer is written."""
    interrupts = Interrupts()
    done: list[str] = []

    def work(stop: Stop[str]) -> str:
        interrupts.stop(signal.SIGTERM)
        stop.conclude("all there is")
        done.append("cluster closed")
        return "never"

    assert interrupts.run(work) == "all there is"
    assert done == []


_AMID_A_CALLBACK = """
import os, signal, weakref
import piper_ray
class Held: pass
load = piper_ray.load
def told(*arguments, **options):
    held = Held()
    weak = weakref.ref(held, lambda _: os.kill(os.getpid(), signal.SIGINT))
    del held
    return load(*arguments, **options)
piper_ray.load = told
"""


@pytest.mark.long
def test_a_signal_where_nothing_can_be_raised_is_no_traceback(long: Path) -> None:
    with started("solve", long, setup=_AMID_A_CALLBACK, loaded=False) as process:
        _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    assert "piper-ray: interrupted" in errors
