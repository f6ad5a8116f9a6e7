"""Options for a solve on a Ray cluster, and what they mean."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import typer

from piper_ray import Solution, Status, Stop, StoppedBy, UsageError
from piper_ray.cli import outliving
from piper_ray.cli.options import flag, option
from piper_ray.cli.telling import say
from piper_ray.model.events import DegreesSearched, EvaluationFinished, Event, IncumbentFound, Listener

if TYPE_CHECKING:
    from piper_ray.engine.evaluation.backend import Backend


class Alone(str, Enum):
    """As backends.ray.WithoutWorkers, which brings Ray with it."""

    CONTINUE = "continue"
    WAIT = "wait"


@dataclass(frozen=True)
class ClusterOptions:
    """Where a solve runs, and where its state is kept."""

    address: str | None = option(
        "ADDR",
        "Solve on the Ray cluster at ADDR (host:port, or auto); local starts a Ray on this machine. Without it the "
        "threads of this process do the work.",
        envvar="RAY_ADDRESS",
    )
    workers: int | None = option("W", "Ray workers, spread over the machines; one on each machine if not given.")
    cpus_per_worker: int | None = option(
        "C", "Cores, and so threads, of each Ray worker; all of its machine's, or its share of them, if not given."
    )
    without_workers: Alone = option(
        "RULE",
        "When the last Ray worker is lost: continue in the driver, or wait for a new one.",
        default=Alone.CONTINUE,
    )
    checkpoint: str | None = option(
        "DIR-or-URI",
        "Keep the solve's state there (a folder, or a file://, s3:// or gs:// URI), and take up what is there.",
    )
    supervise: bool = flag("Start the solve again when it dies, from where it was. Needs --checkpoint.")

    @contextmanager
    def backend(self, threads: int | None) -> Iterator[Backend | None]:
        """The cluster; None without an address. Raises UsageError for options that do not go together."""
        if not self.address:
            if self.workers is not None:
                raise UsageError("--workers needs --address: the Ray cluster whose workers they are, or local")
            yield None
            return
        from piper_ray.engine.backends import ray
        from piper_ray.engine.backends.ray import services

        if outliving.has_parent():
            services.observe(outliving.tell_of_services)
        backend = ray.RayBackend(
            self.address,
            workers=self.workers,
            cpus_per_worker=self.cpus_per_worker,
            threads=threads,
            without_workers=ray.WithoutWorkers(self.without_workers.value),
        )
        with closing(backend):
            yield backend


def told(listener: Listener, stop: Stop[Solution]) -> Listener:
    """The listener, which tells the parent of each better answer too. stop: knows the answer so far."""
    if not outliving.has_parent():
        return listener

    def tell(event: Event) -> None:
        listener(event)
        if isinstance(event, (IncumbentFound, EvaluationFinished, DegreesSearched)):
            so_far = stop.answer()
            if so_far is not None:
                tell_of(so_far)

    return tell


def tell_of(solution: Solution) -> None:
    """To the parent, without what takes long to count."""
    if outliving.has_parent():
        outliving.tell(replace(solution, stats=replace(solution.stats, pairs=None)))


def left_solution(heritage: outliving.Left, checkpoint: str | None) -> Solution:
    """The last of a process that was ended. Ends this one with what happened if there is none."""
    found: Solution | None = heritage.answer
    if found is None:
        say(f"{heritage.cause}; nothing had been found yet{going_on(checkpoint)}")
        raise typer.Exit(heritage.exit_code)
    is_final = found.status in (Status.OPTIMAL, Status.INFEASIBLE)
    return found if is_final else replace(found, stopped_by=StoppedBy.PROCESS_LOST)


def going_on(checkpoint: str | None) -> str:
    """How, in words."""
    return "" if checkpoint is None else "; the same command goes on from the checkpoint"


@contextmanager
def others_on_stderr(wanted: bool) -> Iterator[None]:
    """What other processes and libraries print on stdout meanwhile, Ray's among them, goes to stderr."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
