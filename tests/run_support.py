"""Jobs for tests of runs, and ranks as processes of their own."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.run.job import Job, LayerJob, Replicas
from piper_ray.simulate.steady import rule_in_flight

ROOT = Path(__file__).resolve().parents[1]
RANKS_TIMEOUT_S = 300
GPT_PATHS = ("word_embedding", "position_embedding", *(f"blocks.{i}" for i in range(4)), "norm", "head")


def job(
    schedule: ScheduleName,
    borders: tuple[int, ...],
    *,
    model: str = "gpt",
    paths: tuple[str, ...] = GPT_PATHS,
    replicas: int | tuple[int, ...] = 1,
    microbatches: int = 4,
    recompute: tuple[int, ...] = (),
    sharing: Replicas = Replicas.DDP,
    chunks: int | None = None,
    steps: int = 1,
    vertical_sync: bool = False,
) -> Job:
    """borders: numbers of the layers that stages begin with, the first apart. recompute: of layers that do."""
    layers = [LayerJob(path, paths[:number].count(path), number in recompute) for number, path in enumerate(paths)]
    degrees = (replicas,) * (len(borders) + 1) if isinstance(replicas, int) else replicas
    of_schedule = Schedule(schedule, chunks)
    return Job(
        model=f"tests.run_models:{model}",
        arguments={},
        inputs=(),
        stages=tuple(tuple(layers[first:end]) for first, end in pairwise((0, *borders, len(paths)))),
        schedule=of_schedule,
        degrees=degrees,
        in_flight=rule_in_flight(degrees) if of_schedule.asynchronous else (),
        microbatches=microbatches,
        microbatch=2,
        device="cpu",
        sharing=sharing,
        steps=steps,
        warm_up=0,
        threads=1,
        vertical_sync=vertical_sync,
    )


def results_of_ranks(
    module: str, folder: Path, ranks: int, document: Mapping[str, object], *, strict: bool = True
) -> list[Any]:
    """What each rank writes to RESULTS/RANK.json, as ``main(JOB.json, RANK)`` of ``tests.MODULE``.

    JOB.json: the document with "ranks", "results" (this folder), "rendezvous" (a path that gloo may use) and "port" (a
    free one). strict: warnings are errors.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job_file = folder / "job.json"
    meeting = {"ranks": ranks, "results": str(folder), "rendezvous": str(folder / "rendezvous"), "port": port}
    job_file.write_text(json.dumps(meeting | dict(document)))
    jobs, replies = _original()
    jobs.write(json.dumps([module, str(job_file), ranks, strict]) + "\n")
    jobs.flush()
    group = int(replies.readline())
    timer = threading.Timer(RANKS_TIMEOUT_S, os.killpg, [group, signal.SIGKILL])
    timer.start()
    try:
        assert int(replies.readline()) == 0
    finally:
        timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@cache
def _original() -> tuple[IO[str], IO[str]]:
    """Where the process that all ranks are copies of takes jobs and tells of their ends; it ends with this one."""
    reader, writer = os.pipe()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.ranks", str(writer)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, text=True, pass_fds=[writer], start_new_session=True
    )
    os.close(writer)
    assert process.stdin is not None
    jobs, replies = process.stdin, os.fdopen(reader)

    @atexit.register
    def end() -> None:
        jobs.close()
        replies.close()
        process.wait()

    return jobs, replies


def loopback() -> str:
    """The interface that gloo is to use."""
    return "lo0" if sys.platform == "darwin" else "lo"


def imported(file: Path) -> Any:
    """A Python file that was exported, under its own name."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
