"""A small solved instance, made by hand, and a console that writes to a string: for the tests of the reports."""

from __future__ import annotations

import io

from rich.console import Console

from piper_ray.evaluate import evaluate
from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.solution import EvaluationStats, Infeasibility, Solution, SolveStats, Status
from piper_ray.model.stop import StoppedBy

GIB = 2.0**30


def _tmpcs(index: int, seconds: float) -> tuple[Tmpc, ...]:
    """The two configurations of a layer of the chain: a fast one and one that keeps a quarter of the activations."""
    before = {index - 1: 0.0} if index > 0 else {}
    after = {index + 1: 0.0} if index < 5 else {}
    vanilla = Tmpc("vanilla", seconds, GIB / 16, 0.5 * GIB, GIB, before, after)
    return (vanilla, Tmpc("activation recomp", 1.25 * seconds, GIB / 16, GIB / 8, GIB, before, after, recompute=True))


def small_instance() -> Instance:
    """An embedding, four equal blocks and a head in a row, on 4 devices of 8 GiB with 8 microbatches."""
    names = ["Embedding", *(f"Block_{number}" for number in range(4)), "Head"]
    layers = tuple(
        Layer(index, name, {1: _tmpcs(index, 0.004 if name.startswith("Block") else 0.001)})
        for index, name in enumerate(names)
    )
    edges = tuple(Edge(index, index + 1, 0.001 * GIB) for index in range(5))
    return Instance(layers, edges, 4, 8, 8 * GIB, 25 * GIB, name="small")


def small_plan() -> Plan:
    """Most of the chain on two devices, the rest on one: a valid plan of ``small_instance``."""
    front = {0: "vanilla", 1: "activation recomp", 2: "activation recomp", 3: "vanilla"}
    return Plan(
        (
            Stage((0, 1, 2, 3), 2, 1, front),
            Stage((4, 5), 1, 1, {4: "vanilla", 5: "vanilla"}),
        )
    )


def solution(
    status: Status = Status.OPTIMAL,
    *,
    plan: Plan | None = None,
    lower_bound_s: float = 0.0,
    stopped_by: StoppedBy | None = None,
    infeasibility: Infeasibility | None = None,
) -> Solution:
    """A solution with stats that add up to 1.5 s; its time is that of its plan."""
    time_s = None if plan is None else evaluate(small_instance(), plan).time_per_sample_s
    evaluation = EvaluationStats(0.008, True, 0.5, 7, 12, 3, 20, 9)
    stats = SolveStats(6, 6, 7, 7, 28, 2, 0.25, 0.25, 1.0, (evaluation, evaluation))
    bound = time_s if status is Status.OPTIMAL and time_s is not None else lower_bound_s
    return Solution(status, time_s, bound, plan, stats, infeasibility, stopped_by)


def string_console(width: int = 80, *, encoding: str = "utf-8", terminal: bool = False) -> tuple[Console, io.StringIO]:
    """A console of the given width and the string that it writes to."""

    class Output(io.StringIO):
        @property
        def encoding(self) -> str:  # type: ignore[override]
            return encoding_name

    encoding_name = encoding
    output = Output()
    console = Console(
        file=output, width=width, force_terminal=terminal, highlight=False, markup=False, emoji=False, _environ={}
    )
    return console, output
