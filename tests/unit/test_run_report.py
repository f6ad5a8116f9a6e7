"""What a run shows: table, sentences, document and trace, of figures made up."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
from typing import Any

import pytest
from rich.console import Console

import piper_ray
from piper_ray.model.schedule import ScheduleName
from piper_ray.report.run import print_run, promised_share, run_document
from piper_ray.run.job import RankRun, Run, Stretch
from piper_ray.run.trace import run_trace, write_run_trace
from piper_ray.simulate.run import SimulationOptions
from tests.run_support import job
from tests.unit.test_run_job import instance, plan

MIB = 2.0**20
ROOM = (
    "note: torch keeps room to receive all microbatches of a batch: up to 1 MiB of a rank's memory, not in the promise"
)


def made_up(*, simulated: bool = True, optimizer_s: float = 0.0, replicas: int = 1) -> Run:
    """Two ranks with two microbatches; a step of 20 s and two others."""
    wanted = job(ScheduleName.GPIPE, (2,), paths=("a", "b", "c", "d"), microbatches=2 * replicas, replicas=replicas)
    known = instance().replace(microbatches=2 * replicas)
    degrees = (replicas, replicas)
    options = SimulationOptions(optimizer_s=optimizer_s)
    simulation = piper_ray.simulate(known, plan(degrees, ways="pppp"), "gpipe", options=options)
    ranks = []
    for rank in range(2 * replicas):
        stage, replica = divmod(rank, replicas)
        passes = [("F", 0, 0.0, 3.0), ("F", 1, 3.0, 5.0), ("B", 0, 10.0, 12.0), ("B", 1, 12.0, 17.0)]
        stretches = [Stretch(what, stage, k * replicas + replica, start_s, end_s) for what, k, start_s, end_s in passes]
        stretches += [
            Stretch("all-reduce", stage, None, 17.0, 17.5),
            Stretch("optimizer", None, None, 17.5, 20.0 - stage),
        ]
        ranks.append(RankRun(wanted.name_of(rank), (stage,), replica, tuple(stretches), 3 * MIB, stage * MIB))
    return Run(
        job=wanted,
        device="CPU",
        threads=1,
        steps_s=(22.0, 20.0, 18.0),
        losses=(3.0, 2.5, 2.0, 1.5),
        shown=1,
        ranks=tuple(ranks),
        promised_s=simulation.step_s if simulated else None,
        simulation=simulation if simulated else None,
    )


def shown(run: Run) -> list[str]:
    file = io.StringIO()
    print_run(Console(file=file, width=120, highlight=False, markup=False), run)
    return file.getvalue().splitlines()


def test_what_a_person_sees() -> None:
    assert shown(made_up()) == [
        "Model     tests.run_models:gpt",
        "Ranks     2 on CPU, 1 thread each: 2 stages, gpipe",
        "Batch     2 microbatches of 2 samples",
        "",
        "rank  stages            compute  waiting  gradients  optimizer  peak memory",
        "0     1       measured  12.00 s   5.00 s     0.50 s     2.50 s    3.000 MiB",
        "              promised  12.00 s   6.00 s     0.00 s     0.00 s    0.000 MiB",
        "1     2       measured  12.00 s   6.00 s     0.50 s     1.50 s    3.000 MiB",
        "              promised  12.00 s   6.00 s     0.00 s     0.00 s    0.000 MiB",
        "",
        "step 20.00 s (median of 3 steps, 18.00 s to 22.00 s, spread 2.00 s): 0.2 samples/s",
        "promised 18.00 s: measured 11.1 % longer",
        "  of it the optimizer's 2.500 s, which the promise leaves out",
        "loss 3 in the first step, 1.5 in the last of 4",
        ROOM,
    ]


def test_without_a_simulation_there_is_nothing_promised_to_show() -> None:
    lines = shown(made_up(simulated=False))
    assert not any("promised" in line for line in lines[:-1])


def test_threads_that_differ_from_the_profile_s_and_the_load_are_told() -> None:
    run = dataclasses.replace(made_up(), measured_threads=4, load=1.5)
    lines = shown(run)
    assert lines[3].startswith("Machine   load 1.50 on ")
    assert lines[3].endswith(" in the minute before")
    assert lines[-1] == (
        "note: the plan's times were measured with 4 threads, and each rank had 1: OMP_NUM_THREADS=1 piper-ray profile "
        "measures times for such ranks"
    )
    document = run_document(run)
    assert [document[key] for key in ("threads", "measured_threads", "load", "spread_s")] == [1, 4, 1.5, 2.0]
    assert shown(dataclasses.replace(run, measured_threads=1))[-1] == ROOM
    on_gpus = dataclasses.replace(run, job=dataclasses.replace(run.job, device="cuda"))
    assert shown(on_gpus)[-1] == ROOM
    assert dataclasses.replace(run, steps_s=(3.0,), shown=0).spread_s == 0.0


def test_an_optimizer_that_was_promised_is_no_excuse() -> None:
    run = made_up(optimizer_s=1.5)
    assert not any("leaves out" in line for line in shown(run))
    share = promised_share(run, 0)
    assert share is not None
    assert [share.compute_s, share.optimizer_s, share.waiting_s] == pytest.approx([12.0, 1.5, 6.0])


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_document_has_every_figure(replicas: int) -> None:
    run = made_up(replicas=replicas)
    document: Any = json.loads(json.dumps(run_document(run)))
    assert (document["step_s"], document["steps_s"], document["losses"][-1]) == (20.0, [22.0, 20.0, 18.0], 1.5)
    assert len(document["ranks"]) == 2 * replicas
    for rank in document["ranks"]:
        for share, step_s in ((rank["measured"], 20.0), (rank["promised"], document["promised_s"])):
            times_s = [share[f"{name}_s"] for name in ("compute", "waiting", "gradients", "optimizer")]
            assert sum(times_s) == pytest.approx(step_s)
        stage = rank["stages"][0]
        assert rank["passes_median_s"] == {f"F stage {stage}": 2.5, f"B stage {stage}": 3.5}


def test_a_run_travels() -> None:
    run = made_up(simulated=False)
    again = pickle.loads(pickle.dumps(run))
    assert vars(again) == vars(run)
    assert repr(again) == "Run(gpipe: 3 steps on 2 ranks, step 20.0 s)"
    assert repr(made_up()) == "Run(gpipe: 3 steps on 2 ranks, step 20.0 s, promised 18.0 s)"


def test_measured_and_promised_tracks_lie_side_by_side(tmp_path: Any) -> None:
    run = made_up(replicas=2)
    write_run_trace(run, tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document == json.loads(json.dumps(run_trace(run)))
    events = document["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [names[track] for track in sorted(names)] == [
        "measured rank 0 (stage 1, replica 0)",
        "measured rank 1 (stage 1, replica 1)",
        "promised rank 0: stage 1",
        "measured rank 2 (stage 2, replica 0)",
        "measured rank 3 (stage 2, replica 1)",
        "promised rank 1: stage 2",
    ]
    own = [event for event in events if event["pid"] == 1 and event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in own] == [
        ("F1", 0.0, 3e6),
        ("F3", 3e6, 2e6),
        ("B1", 10e6, 2e6),
        ("B3", 12e6, 5e6),
        ("all-reduce", 17e6, 0.5e6),
        ("optimizer", 17.5e6, 2.5e6),
    ]
    assert {event["tid"] for event in own[:4]} == {0}
    assert {event["tid"] for event in own[4:]} == {1}
    assert document["otherData"]["step_s"] == 20.0
    without = run_trace(made_up(simulated=False))["traceEvents"]
    assert {event["pid"] for event in without} == {0, 2}  # type: ignore[attr-defined]
