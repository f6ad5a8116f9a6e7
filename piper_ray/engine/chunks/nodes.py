"""Cases of a task (d, t, p, v): what is done for one when it is its turn, how it travels, and its record.

A turn's outcome depends on the node's turns before and on nothing else: not on the thread, nor on what else is known.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.checkpoint import Checkpoint
from piper_ray.engine.chunks.candidates import Candidate, Candidates
from piper_ray.engine.chunks.relaxation import Relaxation
from piper_ray.engine.chunks.tasks import Task, TaskKey
from piper_ray.engine.kernels.chunk_program import ChunkProgram
from piper_ray.engine.kernels.types import FloatArray

V = TypeVar("V")

Tasks = Mapping[TaskKey, Task]


@dataclass(frozen=True, eq=False)
class Parcel(Generic[V]):
    """Of ``task``. Within a process it is the value itself; pickled, it leaves out what is the task's."""

    task: Task
    value: V

    def open(self, tasks: Tasks) -> V:  # noqa: ARG002 - as a parcel that has travelled
        return self.value

    def __reduce__(self) -> tuple[Any, ...]:
        content = io.BytesIO()
        _Pickler(content, self.task).dump(self.value)
        return Travelled, (self.task.key, content.getvalue())


@dataclass(frozen=True)
class Travelled:
    """A parcel in another process. content: pickled."""

    key: TaskKey
    content: bytes

    def open(self, tasks: Tasks) -> Any:
        """tasks: those of this process."""
        return _Unpickler(io.BytesIO(self.content), tasks[self.key]).load()


def _parts(task: Task) -> list[object]:
    """What values of a task refer to, in the same order everywhere."""
    return [task, task.shape, task.tables, task.mixed, task.mixed.tables, *task.choices, task.tables.order]


class _Pickler(pickle.Pickler):
    def __init__(self, content: io.BytesIO, task: Task) -> None:
        super().__init__(content, pickle.HIGHEST_PROTOCOL)
        self._numbers = {id(part): number for number, part in enumerate(_parts(task))}

    def persistent_id(self, value: Any) -> int | None:
        return self._numbers.get(id(value))


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: io.BytesIO, task: Task) -> None:
        super().__init__(content)
        self._parts = _parts(task)

    def persistent_load(self, number: Any) -> object:
        return self._parts[number]


_PASSES_TO_BUILD = 60
"""Simulations of a shape that take about as long as building its linear program, ..."""

_PASSES_OF_AN_ITERATION = 30
"""... and simulated passes that take as long as an iteration of it, for each of its rows."""

_PROMISING = 1.1
"""Later moves are for plans within this factor of the best one."""

_OF_A_PARENT = threading.RLock()
"""Cases of one node may come to their turns on several threads."""


class Effort(NamedTuple):
    """rounds: for better prices, see ``Relaxation.improve``. moves: of the task's best plans."""

    rounds: int
    moves: int


EFFORTS = (Effort(20, 200), Effort(60, 1_000))
"""What is done for a case each time that it is the one of the least bound; then it is split."""

LAST_EFFORTS = (Effort(500, 10_000), Effort(1_000, 20_000))
"""What follows for a case that cannot be split."""


_ROUNDS_BEFORE_HUB = 4
"""Instead, while the hub may be anywhere."""

_FEW_LAYERS = 24
_STEPS = {0: 20_000, 1: 1_000_000}
"""Before such an effort all plans of a model of few layers are enumerated, if this many steps are enough."""


class TurnKind(Enum):
    """PLAN: a quick plan, or moves of the best one. DESCEND: its best plans made better layer by layer. BOUND: the next
    effort for its bound, or the cases to go on with."""

    PLAN = "plan"
    DESCEND = "descend"
    BOUND = "bound"


class Turn(NamedTuple):
    """What is done for a node. target_s: the best time known, that it goes by. number: of moves, or of the effort."""

    kind: TurnKind
    target_s: float
    number: int = 0


@dataclass
class Node:
    """A case of a task. lower_s, done: what is proved of it and efforts made, both up to its last turn.

    name: the same in every run. program, candidates: None before the first plan; relaxation: before the first effort.
    owed: turns whose outcomes were known without them, made up for when another one comes. parent: the node that it is
    a case of, with the number of the case, until the node has its own relaxation. passes: its work so far, without that
    of its candidates; counted: the part of all its work that counts.
    """

    task: Task
    lower_s: float
    done: int = 0
    name: str = ""
    whole: bool = True  # all plans of the task
    program: ChunkProgram | None = None
    relaxation: Relaxation | None = None
    candidates: Candidates | None = None
    owed: list[Turn] = field(default_factory=list)
    parent: tuple[Node, int] | None = None
    passes: int = 0
    counted: int = 0

    def take(self, turn: Turn, control: FloatArray) -> TurnOutcome:
        """control: the best time known, as the turn has it; not zero for a wish to stop."""
        self._make_up(control)
        return self._take(turn, control)

    def case(self, index: int, done: int) -> Node:
        """One of the cases that take its place. done: efforts that it need not make."""
        return Node(self.task, self.lower_s, done, f"{self.name}/{index}", whole=False, parent=(self, index))

    def copy(self) -> Node:
        """That may take a turn which turns out not to be needed, and of which nothing may be left then."""
        return replace(
            self,
            relaxation=None if self.relaxation is None else self.relaxation.copy(),
            candidates=self.candidates.copy() if self.whole and self.candidates is not None else self.candidates,
            owed=[*self.owed],
        )

    def _make_up(self, control: FloatArray) -> None:
        if self.parent is not None:
            (parent, index), self.parent = self.parent, None
            with _OF_A_PARENT:
                parent._make_up(control)
            assert parent.relaxation is not None
            self.program, self.candidates = parent.program, parent.candidates
            self.relaxation = parent.relaxation.with_case(list(parent.relaxation.cases())[index])
        owed, self.owed = self.owed, []
        for turn in owed:
            self._take(turn, control)

    def _take(self, turn: Turn, control: FloatArray) -> TurnOutcome:
        control[0] = turn.target_s
        if turn.kind is TurnKind.PLAN:
            outcome = self._plan(turn.number, control)
        else:
            outcome = self._descend(control) if turn.kind is TurnKind.DESCEND else self._bound(turn.number, control)
        return outcome._replace(passes=self._all_passes)

    @property
    def _all_passes(self) -> int:
        """Cases of a node share its candidates, and simulate little."""
        return self.passes + (self.candidates.passes if self.whole and self.candidates is not None else 0)

    def _plan(self, moves: int, control: FloatArray) -> TurnOutcome:
        if self.candidates is None:
            self.program = self.task.shape.program()
            if self.program is None:
                return TurnOutcome(np.inf)
            self.passes += _PASSES_TO_BUILD * self.program.kind.size
            self.candidates = Candidates(self.task, self.program)
        self.candidates.cut_evenly()
        self.candidates.move(moves, control)
        return TurnOutcome(self.lower_s, self.candidates.best)

    def _descend(self, control: FloatArray) -> TurnOutcome:
        if self.candidates is None:
            return TurnOutcome(self.lower_s)
        self.candidates.descend(control)
        return TurnOutcome(self.lower_s, self.candidates.best)

    def _bound(self, number: int, control: FloatArray) -> TurnOutcome:
        target_s = control[0]
        if self.relaxation is None:
            if self.program is None and (program := self.task.shape.program()) is not None:
                self.program = program
                self.passes += _PASSES_TO_BUILD * program.kind.size
            if self.program is not None:
                self.relaxation = Relaxation.of(self.task, self.program, target_s)
            if self.relaxation is None:
                return TurnOutcome(np.inf)
        if self.whole and (proved_s := self._try_all(_STEPS.get(number, 0), control)) is not None:
            assert self.candidates is not None
            return TurnOutcome(max(self.lower_s, proved_s), self.candidates.best)
        relaxation = self.relaxation
        # Where many layers read one, little is proved as long as that may be anywhere.
        if number == len(EFFORTS) or (number > 0 and relaxation.hub_is_open):
            children = [self.case(index, 0) for index, _ in enumerate(relaxation.cases())]
            if children:
                return TurnOutcome(self.lower_s, None, children)
        effort, before = (*EFFORTS, *LAST_EFFORTS)[number], relaxation.worked
        relaxation.aim(target_s)
        if number == 1 and relaxation.case.splits == 0:
            relaxation.limit_ranks()
        relaxation.improve(_ROUNDS_BEFORE_HUB if relaxation.hub_is_open else effort.rounds)
        self.passes += _PASSES_OF_AN_ITERATION * (relaxation.worked - before)
        lower_s = max(self.lower_s, relaxation.lower_s)
        by_rank, layers_in = relaxation.by_rank, relaxation.layers_in
        if by_rank is None and (lower_s >= target_s * (1.0 - PROOF) or layers_in is None):
            return TurnOutcome(lower_s)
        if self.candidates is None:
            self.candidates = Candidates(self.task, relaxation.program)
        if by_rank is not None:
            found = self.candidates.chosen(by_rank)
        else:
            assert layers_in is not None
            found = self.candidates.like(layers_in.sum(axis=0), relaxation.chunk_of())
        if not self.whole:
            return TurnOutcome(lower_s, min(found.values(), key=lambda x: x.value_s, default=None))
        self.candidates.take(found)
        best = self.candidates.best
        if best is not None and best.value_s <= target_s * _PROMISING:
            self.candidates.move(effort.moves, control)
        return TurnOutcome(lower_s, self.candidates.best)

    def _try_all(self, most_steps: int, control: FloatArray) -> float | None:
        """What no plan of a small model takes less than, if all of them could be looked at."""
        if most_steps == 0 or self.task.tables.order.size > _FEW_LAYERS:
            return None
        if self.candidates is None:
            assert self.program is not None
            self.candidates = Candidates(self.task, self.program)
            self.candidates.cut_evenly()
        target_s = control[0]
        if not self.candidates.try_all(most_steps, target_s, control):
            return None
        best = self.candidates.best
        return float(target_s if best is None else min(target_s, best.value_s))

    @property
    def exhausted(self) -> bool:
        return self.done == len(EFFORTS) + len(LAST_EFFORTS)


class TurnOutcome(NamedTuple):
    """Of a node's turn. lower_s: what is proved of it. best: the best plan found so far. children: cases that take its
    place; none: it stays. passes: simulated in all its turns, and what counts as such."""

    lower_s: float
    best: Candidate | None = None
    children: Sequence[Node] = ()
    passes: int = 0


Taken = tuple[Node, TurnOutcome]
"""A node after its turn, and what has come of that."""


def take(tasks: Tasks, asked: Parcel[Node], turn: Turn, control: FloatArray) -> Parcel[Taken]:
    """A node's turn, on any thread or machine. control: see ``Call``."""
    node = asked.open(tasks)
    return Parcel(node.task, (node, node.take(turn, control)))


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
            row["passes"],
        )

    def record(self, node: Node, turn: Turn, outcome: TurnOutcome) -> None:
        """Raises CheckpointLost if another solve has taken the checkpoint over."""
        best = None if outcome.best is None else _row(node.task, outcome.best)
        children = [child.done for child in outcome.children]
        row = {"lower_s": float(outcome.lower_s).hex(), "best": best, "children": children, "passes": outcome.passes}
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
