"""Rows for each model: seconds of a step, promised, bounded and simulated."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path

import piper_ray
from piper_ray.model.figures import percent_text
from piper_ray.planners import PLANNERS

MODELS = ("gpt3-175b", "llama3-70b", "llama3-405b", "mixtral-8x22b", "t5-11b")
"""The large models of inputs/."""

HEAD = (
    "| model, GPUs | 2bw promised | simulated | that plan under 1f1b | 1f1b bound | simulated | gap | best baseline |",
    "|---|---:|---:|---:|---:|---:|---:|---|",
)

CHUNKED_HEAD = (
    "| model, GPUs | interleaved | bound | simulated | gap | best baseline |",
    "|---|---|---:|---:|---:|---|",
)

_LIMIT_S = 60.0
_CHUNKS = range(1, 9)
"""The numbers of chunks that the search tries, too."""

_OF_ONE_DEGREE = [name for name in PLANNERS if name != "piper-published"]
"""The paper's table plans for 2bw, with a d for each stage: no such plan has chunks."""

_INPUTS = Path(__file__).resolve().parents[2] / "inputs"


def row(name: str) -> str:
    """The row of a model: 2bw's promise, that plan run under 2bw and 1F1B, then the plan for 1F1B, and the fastest plan
    of another planner for 1F1B."""
    instance = piper_ray.load(_INPUTS / f"{name}.toml")
    paper = piper_ray.solve(instance, schedule="2bw")
    ours = piper_ray.solve(instance, schedule="1f1b")
    assert paper.plan is not None
    assert ours.plan is not None
    assert paper.time_per_sample_s is not None
    simulated = piper_ray.simulate(instance, ours.plan, "1f1b")
    bound_s = ours.lower_bound_s * instance.microbatches
    cells = [
        f"{name}, {instance.devices:,}",
        _seconds(instance.batch.step_s(paper.time_per_sample_s)),
        _seconds(piper_ray.simulate(instance, paper.plan, "2bw").step_s),
        _seconds(piper_ray.simulate(instance, paper.plan, "1f1b").step_s),
        _seconds(bound_s),
        _seconds(simulated.step_s),
        percent_text(max(0.0, 1.0 - bound_s / simulated.step_s)),
        _best_baseline(instance, [piper_ray.Schedule.of("1f1b")], PLANNERS),
    ]
    return f"| {' | '.join(cells)} |"


def chunked_row(name: str) -> str:
    """The row of a model: the plan found for interleaved 1F1B within a minute, its number of chunks, the bound, and the
    fastest plan of another planner with any number of chunks."""
    instance = piper_ray.load(_INPUTS / f"{name}.toml")
    options = piper_ray.SolveOptions(time_limit_s=_LIMIT_S)
    ours = piper_ray.solve(instance, schedule="interleaved", options=options)
    assert ours.plan is not None
    simulated = piper_ray.simulate(instance, ours.plan, ours.schedule)
    bound_s = ours.lower_bound_s * instance.microbatches
    cells = [
        f"{name}, {instance.devices:,}",
        f"v = {ours.schedule.v}",
        _seconds(bound_s),
        _seconds(simulated.step_s),
        percent_text(max(0.0, 1.0 - bound_s / simulated.step_s)),
        _best_baseline(instance, [piper_ray.Schedule(ours.schedule.name, v) for v in _CHUNKS], _OF_ONE_DEGREE),
    ]
    return f"| {' | '.join(cells)} |"


def _best_baseline(
    instance: piper_ray.Instance, schedules: Iterable[piper_ray.Schedule], planners: Iterable[str]
) -> str:
    """The planner whose plan has the shortest simulated step; of equal ones the first. The paper's table may be too
    large for a model."""
    found = {}
    for schedule, name in product(schedules, planners):
        try:
            result = piper_ray.baselines.plan(instance, name, schedule=schedule)
        except piper_ray.LimitError:
            continue
        if result.plan is not None:
            found[schedule, name] = piper_ray.simulate(instance, result.plan, schedule).step_s
    (schedule, name), step_s = min(found.items(), key=lambda one: one[1])
    chunks = f", v = {schedule.v}" if schedule.v > 1 else ""
    return f"{_seconds(step_s)}, {name}{chunks}"


def _seconds(step_s: float) -> str:
    return f"{step_s:.4g} s"
