"""Outcomes of turns as a checkpoint keeps them: plain, and every figure to the last bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from piper_ray.engine.checkpoint import Checkpoint
from piper_ray.engine.chunks.candidates import Candidate
from piper_ray.engine.chunks.nodes import Node, Turn, TurnOutcome
from piper_ray.engine.chunks.tasks import Task


@dataclass(frozen=True)
class TurnMemo:
    """Those of one solve: its checkpoint's identity says of which."""

    checkpoint: Checkpoint

    def has(self, node: Node, turn: Turn) -> bool:
        """Whether it is on record."""
        return self.checkpoint.result(_key(node, turn)) is not None

    def outcome(self, node: Node, turn: Turn) -> TurnOutcome:
        """On record; the node owes itself the turn, until another one needs what this would have left."""
        row: Any = self.checkpoint.result(_key(node, turn))
        node.owed.append(turn)
        lower_s, best = float.fromhex(row["lower_s"]), row["best"]
        return TurnOutcome(
            lower_s,
            None if best is None else _candidate(node.task, best),
            [node.case(index, done) for index, done in enumerate(row["children"])],
        )

    def record(self, node: Node, turn: Turn, outcome: TurnOutcome) -> None:
        """Raises CheckpointLost if another solve has taken the checkpoint over."""
        best = None if outcome.best is None else _row(node.task, outcome.best)
        children = [child.done for child in outcome.children]
        row = {"lower_s": float(outcome.lower_s).hex(), "best": best, "children": children}
        self.checkpoint.record_result(_key(node, turn), row)


def _key(node: Node, turn: Turn) -> str:
    return f"{node.name} {turn.kind.value} {turn.number} {float(turn.target_s).hex()}"


def _row(task: Task, found: Candidate) -> dict[str, object]:
    """choice: the number of what all layers decide alike; -1: chunks decide each for itself."""
    choice = next((index for index, tables in enumerate(task.choices) if tables is found.tables), -1)
    return {
        "choice": choice,
        "chunk_of": found.chunk_of.tolist(),
        "options": found.choice.tolist(),
        "value_s": found.value_s.hex(),
    }


def _candidate(task: Task, row: Any) -> Candidate:
    tables = task.mixed.tables if row["choice"] < 0 else task.choices[row["choice"]]
    chunk_of, options = (np.array(row[name], np.int64) for name in ("chunk_of", "options"))
    return Candidate(task, tables, chunk_of, options, float.fromhex(row["value_s"]))
