"""Why a schedule with chunks has no plan, and what memory would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from piper_ray.engine.chunks.candidates import Candidates, all_plans
from piper_ray.engine.chunks.tables import ModelOrder
from piper_ray.engine.chunks.tasks import PlanSpace, Task, list_tasks
from piper_ray.engine.kernels.chunk_program import ChunkProgram
from piper_ray.model.figures import plural, size_text
from piper_ray.model.instance import Instance
from piper_ray.model.solution import Infeasibility

_STEPS = 1_000_000
"""Layers placed, for each task: if no more are enough for all, the least memory is known."""

_FEW_LAYERS = 24
"""Of larger models that is not tried."""

_TRIED = 8
"""Tasks of larger models that are tried with more memory: those whose ranks hold the least on average."""

_NEAR = 1.001


def explain(instance: Instance, order: ModelOrder, space: PlanSpace, ends: Callable[[], bool]) -> Infeasibility:
    """For a space that is proved to hold no plan, where every layer may run something. ends: whether to leave it."""
    name, layers = space.schedules[0].name.value, len(instance.layers)
    chunks = min(schedule.v for schedule in space.schedules)
    if chunks > layers:
        return Infeasibility(
            f"{name} with {plural(chunks, 'chunk')} on each rank cuts a model into {chunks:,} stages at least, none of "
            f"them empty; this one has {plural(layers, 'layer')}",
            None,
        )
    every = "all " if space.all_devices else ""
    ranks = "" if space.ranks is None else f" on {plural(space.ranks, 'rank')}"
    on = f"{every}{instance.devices:,} devices with {instance.microbatches:,} microbatches"
    tasks = list_tasks(instance.replace(memory_bytes=_most_bytes(instance)), order, space)
    if not tasks:
        return Infeasibility(f"no plan{ranks} runs {name} on {on}, whatever the memory", None)
    on += f" and {size_text(instance.memory_bytes)} on each"
    least_bytes = _least_bytes(tasks, ends) if layers <= _FEW_LAYERS else None
    enough = ""
    if least_bytes is None:
        enough_bytes = _enough_bytes(tasks, instance.memory_bytes, ends)
        enough = "" if enough_bytes is None else f"; {size_text(enough_bytes)} would do, perhaps less"
    return Infeasibility(f"no plan{ranks} fits under {name} on {on}{enough}", least_bytes)


def _most_bytes(instance: Instance) -> float:
    """More than any plan holds on a device."""
    return instance.memory_bytes + sum(
        max(x.activation_bytes * instance.microbatches + x.fixed_bytes + x.shared_bytes for x in rows)
        for layer in instance.layers
        if (rows := [tmpc for row in layer.tmpcs.values() for tmpc in row])
    )


def _least_bytes(tasks: Sequence[Task], ends: Callable[[], bool]) -> float | None:
    """With which there is a plan; None if these are too many to look at all."""
    least_bytes, control = np.inf, np.array([np.inf, 0.0])
    for task in _by_bytes(tasks):
        program = task.shape.program()
        if program is None:
            continue
        found = all_plans(task, program, _STEPS, np.inf, control, memory_bytes=least_bytes, by_bytes=True)
        if found is None or not found.is_least or ends():
            return None
        least_bytes = min(least_bytes, found.value)
    return least_bytes if np.isfinite(least_bytes) else None


def _enough_bytes(tasks: Sequence[Task], memory_bytes: float, ends: Callable[[], bool]) -> float | None:
    """With which a quick plan is found, more than ``memory_bytes``."""
    tried = [(task, program) for task in _by_bytes(tasks)[:_TRIED] if (program := task.shape.program()) is not None]
    most_bytes = high = tasks[0].memory_bytes
    low = memory_bytes
    while high > _NEAR * low:
        if ends():
            return None
        middle = min((low * high) ** 0.5 if low > 0.0 else high / 2.0, high)
        fits = any(_fits(task, program, middle) for task, program in tried)
        low, high = (low, middle) if fits else (middle, high)
    return high if high < most_bytes else None


def _fits(task: Task, program: ChunkProgram, memory_bytes: float) -> bool:
    candidates = Candidates(replace(task, memory_bytes=memory_bytes), program)
    candidates.cut_evenly()
    return candidates.best is not None


def _by_bytes(tasks: Sequence[Task]) -> list[Task]:
    return sorted(tasks, key=lambda task: (task.least_fixed_bytes / task.shape.ranks, task.shape.stages, task.lower_s))
