"""Cases of a task (d, t, p, v): what one turn of a case does, how a case is sent to other processes, and its record.

The outcome of a turn depends only on the node's earlier turns: not on the thread, nor on what else is known.
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
from piper_ray.engine.chunks.candidates import Candidate, Candidates, walk_bounds
from piper_ray.engine.chunks.crossings import mean_of_ranks_s
from piper_ray.engine.chunks.rank_patterns import PatternSearch
from piper_ray.engine.chunks.relaxation import Relaxation
from piper_ray.engine.chunks.tasks import Task, TaskKey
from piper_ray.engine.kernels.chunk_program import ChunkProgram
from piper_ray.engine.kernels.types import FloatArray

V = TypeVar("V")

Tasks = Mapping[TaskKey, Task]


@dataclass(frozen=True, eq=False)
class Parcel(Generic[V]):
    """A value that belongs to ``task``. Within a process it is the value itself; pickled, it leaves out the parts that
    the task has too."""

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
    """A parcel that another process made. content: pickled."""

    key: TaskKey
    content: bytes

    def open(self, tasks: Tasks) -> Any:
        """tasks: the tasks of this process."""
        return _Unpickler(io.BytesIO(self.content), tasks[self.key]).load()


def _parts(task: Task) -> list[object]:
    """Returns the objects that values of a task refer to, in the same order everywhere."""
    return [task, task.shape, task.tables, task.mixed, task.mixed.tables, *task.choices, task.tables.order]


_PROGRAM = -1
"""Stands for the program of the task's shape, which each process builds for itself."""


class _Pickler(pickle.Pickler):
    def __init__(self, content: io.BytesIO, task: Task) -> None:
        super().__init__(content, pickle.HIGHEST_PROTOCOL)
        self._numbers = {id(part): number for number, part in enumerate(_parts(task))}

    def persistent_id(self, value: Any) -> int | None:
        return _PROGRAM if isinstance(value, ChunkProgram) else self._numbers.get(id(value))


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: io.BytesIO, task: Task) -> None:
        super().__init__(content)
        self._parts, self._shape = _parts(task), task.shape

    def persistent_load(self, number: Any) -> object:
        return self._shape.program() if number == _PROGRAM else self._parts[number]


_PASSES_TO_BUILD = 60
"""Simulations of a shape that take about as long as building its linear program, ..."""

_PASSES_OF_AN_ITERATION = 30
"""... and simulated passes that take as long as an iteration of it, for each of its rows."""

_PROMISING = 1.1
"""Later moves are for plans within this factor of the best one."""

_OF_A_PARENT = threading.RLock()
"""Held while a parent makes up for turns: cases of one node may get their turns on several threads."""


class Effort(NamedTuple):
    """rounds: for better prices, see ``Relaxation.improve``. moves: of the task's best plans."""

    rounds: int
    moves: int


EFFORTS = (Effort(20, 200), Effort(60, 1_000))
"""The efforts of a case: one each time that it has the least bound. After these it is split."""

LAST_EFFORTS = 15 * (Effort(100, 2_000),)
"""The further efforts of a case that cannot be split."""

MOST_ROUNDS = 6_000
"""The most rounds of all parts of a case's plans by patterns: about a minute."""

_ROUNDS_BEFORE_HUB = 4
"""The rounds of an effort while the hub may be in any chunk."""

_FIRST_ROUNDS = 6
"""The rounds of the first effort where layers are of many kinds: they gain most of what there is to gain."""

_STEPS_OF_PATTERNS, _STEPS_BY_HUB = (1_000_000, 10_000_000, 40_000_000), (0, 1_000_000, 10_000_000)
"""The steps that may list patterns in each of the first efforts and from then on: where there is no hub, and where its
chunk is given, because most of its chunks are ruled out without patterns. A million steps take some 0.05 s."""

_STEPS_OF_COUNTS, _ROUNDS_OF_COUNTS = 1_000_000, 40
"""The steps that may list patterns of numbers of layers, and the rounds of an effort that divides plans by such
patterns or by counts of layers in chunks."""

_FEW_LAYERS = 24
_STEPS = 20_000, 1_000_000
"""The steps that may enumerate all plans of a model of few layers before the first efforts."""

_LAST_STEPS, _HOPEFUL = (10_000_000, 100_000_000), 0.01
"""The same before a task is divided into cases. The further steps follow if the first ones looked at this share of all
plans, or if no plan is known."""


class TurnKind(Enum):
    """PLAN: finds a quick plan, or makes moves in the best one. DESCEND: improves its best plans layer by layer. BOUND:
    makes the next effort for its bound, or splits it into cases."""

    PLAN = "plan"
    DESCEND = "descend"
    BOUND = "bound"


class Turn(NamedTuple):
    """One turn of a node. target_s: the best time known when the turn begins. number: of moves, or of the effort.
    again: how many rounds with as many moves came before."""

    kind: TurnKind
    target_s: float
    number: int = 0
    again: int = 0


@dataclass
class Node:
    """A case of a task. lower_s, done: its proved bound and the number of efforts made, both up to its last turn.

    name: the same in every run. program, candidates: None before the first plan; relaxation: None before the first
    effort. origin: if the node is a part of the plans by patterns, the name of the case whose patterns these are;
    part: these plans, which replace the relaxation. owed: turns whose outcomes were read from a record, so that they
    have to be made up for when another turn comes. parent: the node that it is a case or a part of, with its number,
    until it has its own relaxation or part. passes: its work so far, without that of its candidates; counted: the part
    of all its work that counts.
    """

    task: Task
    lower_s: float
    done: int = 0
    name: str = ""
    whole: bool = True  # all plans of the task
    origin: str = ""
    program: ChunkProgram | None = None
    relaxation: Relaxation | None = None
    candidates: Candidates | None = None
    part: PatternSearch | None = None
    owed: list[Turn] = field(default_factory=list)
    parent: tuple[Node, int] | None = None
    passes: int = 0
    counted: int = 0

    def take(self, turn: Turn, control: FloatArray) -> TurnOutcome:
        """control: the best time that this turn knows; an entry that is not zero asks it to stop."""
        self._make_up(control)
        return self._take(turn, control)

    def case(self, index: int, lower_s: float, origin: str = "") -> Node:
        """Returns one of the cases or parts that replace this one."""
        name = f"{self.name}/{index}"
        done = len(EFFORTS) if origin else 0
        return Node(self.task, lower_s, done, name, whole=False, origin=origin, parent=(self, index))

    def forget(self) -> None:
        """Drops the data that only further turns need."""
        self.program = self.candidates = self.relaxation = self.part = self.parent = None

    def copy(self) -> Node:
        """Returns a copy for a turn that may turn out not to be needed, so that the turn leaves no trace in this
        node."""
        return replace(
            self,
            relaxation=None if self.relaxation is None else self.relaxation.copy(),
            candidates=self.candidates.copy() if self.whole and self.candidates is not None else self.candidates,
            part=None if self.part is None else self.part.copy(),
            owed=[*self.owed],
        )

    def _make_up(self, control: FloatArray) -> None:
        if self.parent is not None:
            (parent, index), self.parent = self.parent, None
            with _OF_A_PARENT:
                parent._make_up(control)
            self.program, self.candidates = parent.program, parent.candidates
            if self.origin:
                assert parent._by_pattern is not None
                self.part = parent._by_pattern.apart()[index]
            else:
                assert parent.relaxation is not None
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
    def _by_pattern(self) -> PatternSearch | None:
        """The search of the node's plans by patterns, if these are listed."""
        return self.part if self.relaxation is None else self.relaxation.by_rank

    @property
    def _all_passes(self) -> int:
        """The passes simulated for the node. Those of the candidates count only for a whole task, because cases share
        the candidates of their node, and simulate little."""
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
        target_s = float(control[0])
        if self.part is not None:
            return self._divide(self.part, target_s)
        if self.relaxation is None:
            if (lower_s := max(self.lower_s, mean_of_ranks_s(self.task, target_s))) >= target_s:
                return TurnOutcome(max(self.lower_s, target_s))
            if self.program is None and (program := self.task.shape.program()) is not None:
                self.program = program
                self.passes += _PASSES_TO_BUILD * program.kind.size
            if self.program is not None:
                self.relaxation = Relaxation.of(self.task, self.program, target_s, lower_s)
            if self.relaxation is None:
                return TurnOutcome(np.inf)
        relaxation = self.relaxation
        relaxation.aim(target_s)
        number, before = number - relaxation.counted, relaxation.worked
        # Where many layers read one, little is proved as long as that may be anywhere.
        divides = number == len(EFFORTS) or (number > 0 and relaxation.hub_is_open)
        if relaxation.may_settle:
            divides = number >= len(EFFORTS) and relaxation.is_best
        if (proved_s := self._try_all(number, divides, control)) is not None:
            assert self.candidates is not None
            return TurnOutcome(max(self.lower_s, proved_s), self.candidates.best)
        if number == 1 and relaxation.divide_counts(_STEPS_OF_COUNTS, _ROUNDS_OF_COUNTS):
            self.passes += _PASSES_OF_AN_ITERATION * (relaxation.worked - before)
            return TurnOutcome(max(self.lower_s, relaxation.lower_s))
        steps = _STEPS_BY_HUB if relaxation.hub_chunks() else _STEPS_OF_PATTERNS
        relaxation.list_patterns(steps[min(number, len(EFFORTS))])
        if number == 1 and relaxation.may_count:
            relaxation.count_layers(_ROUNDS_OF_COUNTS)
            self.passes += _PASSES_OF_AN_ITERATION * (relaxation.worked - before)
            return TurnOutcome(max(self.lower_s, relaxation.lower_s))
        if relaxation.by_rank is not None and number >= len(EFFORTS):
            return self._divide(relaxation.by_rank, target_s)
        if divides:
            children = [self.case(index, self.lower_s) for index, _ in enumerate(relaxation.cases())]
            if children:
                return TurnOutcome(self.lower_s, None, children)
        effort = (*EFFORTS, *LAST_EFFORTS)[number]
        if number == 1 and relaxation.case.splits == 0 and relaxation.may_list:
            relaxation.limit_ranks()
        first = _FIRST_ROUNDS if number == 0 and not relaxation.may_list else effort.rounds
        relaxation.improve(_ROUNDS_BEFORE_HUB if relaxation.hub_is_open else first)
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
        if best is None and np.isinf(target_s) and number < len(EFFORTS):
            before = relaxation.worked
            self.candidates.take(self.candidates.whole(relaxation))
            self.passes += _PASSES_OF_AN_ITERATION * (relaxation.worked - before)
            best = self.candidates.best
        if best is not None and best.value_s <= target_s * _PROMISING:
            self.candidates.move(effort.moves, control)
        return TurnOutcome(lower_s, self.candidates.best)

    def _divide(self, search: PatternSearch, target_s: float) -> TurnOutcome:
        """Improves the bound of the plans by patterns, then divides them into parts: some hundredths of a second."""
        before = search.worked
        rounds = search.improve(LAST_EFFORTS[0].rounds, target_s, until_divided=True)
        self.passes += _PASSES_OF_AN_ITERATION * (search.worked - before)
        if self.candidates is None:
            self.candidates = Candidates(self.task, search.patterns.program)
        best = self.candidates.chosen(search).get(0)
        parts = [] if search.is_over else search.apart()
        origin = self.origin or self.name
        children = [self.case(index, max(self.lower_s, part.lower_s), origin) for index, part in enumerate(parts)]
        for child, part in zip(children, parts, strict=True):
            child.parent, child.candidates, child.part = None, self.candidates, part
        return TurnOutcome(max(self.lower_s, search.lower_s), best, children, rounds=rounds)

    def _try_all(self, number: int, divides: bool, control: FloatArray) -> float | None:
        """A bound on all plans of a small model, if all of them could be enumerated. number: of the effort. divides:
        whether the task is divided into cases after this."""
        turns = (*_STEPS[number : number + 1], *(_LAST_STEPS if divides else ()))
        if not self.whole or not turns or self.task.tables.order.size > _FEW_LAYERS:
            return None
        assert self.program is not None
        if self.candidates is None:
            self.candidates = Candidates(self.task, self.program)
            self.candidates.cut_evenly()
        target_s, share = control[0], 0.0
        bounds = walk_bounds(self.task, self.program, self.relaxation)
        for steps in turns:
            if steps == _LAST_STEPS[-1] and share < _HOPEFUL and np.isfinite(target_s):
                break
            share = self.candidates.try_all(bounds, steps, target_s, control)
            if share == 1.0:
                best = self.candidates.best
                return float(target_s if best is None else min(target_s, best.value_s))
        return None

    @property
    def exhausted(self) -> bool:
        return self.done == len(EFFORTS) + len(LAST_EFFORTS)


class TurnOutcome(NamedTuple):
    """The outcome of a node's turn. lower_s: the proved bound. best: the best plan found so far. children: the cases
    that replace the node; if there are none, it stays. passes: the passes simulated in all its turns, and work counted
    as such. rounds: of a part of plans by patterns, as in ``PatternSearch.improve``."""

    lower_s: float
    best: Candidate | None = None
    children: Sequence[Node] = ()
    passes: int = 0
    rounds: float = 0.0


Taken = tuple[Node, TurnOutcome]
"""A node after its turn, and the outcome of the turn."""


def take(tasks: Tasks, asked: Parcel[Node], turn: Turn, control: FloatArray) -> Parcel[Taken]:
    """A node's turn, on any thread or machine. control: see ``Call``."""
    node = asked.open(tasks)
    return Parcel(node.task, (node, node.take(turn, control)))


@dataclass(frozen=True)
class TurnMemo:
    """The recorded turns of one solve; the checkpoint's identity says which solve."""

    checkpoint: Checkpoint

    def has(self, node: Node, turn: Turn) -> bool:
        """Whether the turn is on record."""
        return self.checkpoint.result(_key(node, turn)) is not None

    def outcome(self, node: Node, turn: Turn) -> TurnOutcome:
        """Returns the recorded outcome. The node owes itself the turn, until another turn needs the state that this one
        would have left."""
        row: Any = self.checkpoint.result(_key(node, turn))
        node.owed.append(turn)
        lower_s, best = float.fromhex(row["lower_s"]), row["best"]
        return TurnOutcome(
            lower_s,
            None if best is None else _candidate(node.task, best),
            [node.case(index, float.fromhex(lower_s), row["origin"]) for index, lower_s in enumerate(row["children"])],
            row["passes"],
            float.fromhex(row["rounds"]),
        )

    def record(self, node: Node, turn: Turn, outcome: TurnOutcome) -> None:
        """Raises CheckpointLost if another solve has taken the checkpoint over."""
        best = None if outcome.best is None else _row(node.task, outcome.best)
        row = {
            "lower_s": float(outcome.lower_s).hex(),
            "best": best,
            "children": [float(child.lower_s).hex() for child in outcome.children],
            "origin": outcome.children[0].origin if outcome.children else "",
            "passes": outcome.passes,
            "rounds": float(outcome.rounds).hex(),
        }
        self.checkpoint.record_result(_key(node, turn), row)


def _key(node: Node, turn: Turn) -> str:
    return f"{node.name} {turn.kind.value} {turn.number} {turn.again} {float(turn.target_s).hex()}"


def _row(task: Task, found: Candidate) -> dict[str, object]:
    """choice: the number of the choice that all layers make together; -1: each chunk chooses for itself."""
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
