"""Results of tasks as a checkpoint keeps them: plain, and every figure to the last bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from piper_ray.engine.checkpoint import Checkpoint
from piper_ray.engine.flush.plans import ChosenStages
from piper_ray.engine.flush.task_search import TaskResult
from piper_ray.engine.flush.tasks import DegreePair
from piper_ray.engine.kernels.flush_types import FlushTask
from piper_ray.model.stop import StoppedBy


@dataclass(frozen=True)
class TaskMemo:
    """Those of one solve: its checkpoint's identity says of which."""

    checkpoint: Checkpoint

    def result(self, task: DegreePair, cutoff_s: float) -> TaskResult | None:
        """Of a search for plans of at most so many seconds a batch, if it is on record."""
        found: Any = self.checkpoint.result(_key(task, cutoff_s))
        return None if found is None else _result(task.arrays, found)

    def record(self, task: DegreePair, cutoff_s: float, result: TaskResult) -> None:
        """Raises CheckpointLost if another solve has taken the checkpoint over."""
        self.checkpoint.record_result(_key(task, cutoff_s), _row(result))


def _key(task: DegreePair, cutoff_s: float) -> str:
    d, t = task.degrees
    return f"d={d} t={t} {float(cutoff_s).hex()}"


def _row(result: TaskResult) -> dict[str, object]:
    found = result.found
    return {
        "lower_s": float(result.lower_s).hex(),
        "states": int(result.states),
        "looked_through": bool(result.looked_through),
        "left_open": None if result.left_open is None else result.left_open.value,
        "found": None if found is None else _stages_row(found),
    }


def _stages_row(found: ChosenStages) -> dict[str, object]:
    return {
        "batch_s": float(found.value_s).hex(),
        "variant": found.variant.tolist(),
        "options": [of_stage.tolist() for of_stage in found.options],
        "seconds": [[value.hex() for value in row] for row in found.seconds.tolist()],
    }


def _result(task: FlushTask, row: Any) -> TaskResult:
    left_open, found = row["left_open"], row["found"]
    return TaskResult(
        float.fromhex(row["lower_s"]),
        row["states"],
        row["looked_through"],
        None if found is None else _stages(task, found),
        None if left_open is None else StoppedBy(left_open),
    )


def _stages(task: FlushTask, row: Any) -> ChosenStages:
    return ChosenStages(
        task,
        np.array(row["variant"], np.int64),
        tuple(np.array(of_stage, np.int64).reshape(-1, 2) for of_stage in row["options"]),
        np.array([[float.fromhex(value) for value in values] for values in row["seconds"]]),
        float.fromhex(row["batch_s"]),
    )
