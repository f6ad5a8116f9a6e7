"""The search over all (d, t, p, v): first for plans, a quick one of each, the best of which are made better; then for
bounds, always of the task whose bound is the least, which so rises for all.

It is the same whatever the number of threads. Nodes take turns, and what one has come to counts when its turn is over.
Further threads begin what comes next meanwhile; nothing in that depends on what else is known by then, so it is the
same whenever it began. What turns out not to be needed is left.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.chunks.candidates import Candidate, Candidates
from piper_ray.engine.chunks.relaxation import Case, Relaxation
from piper_ray.engine.chunks.tasks import Task, TaskKey
from piper_ray.engine.kernels.chunk_program import ChunkProgram
from piper_ray.engine.kernels.types import FloatArray
from piper_ray.engine.ledger import TIE, Ledger
from piper_ray.model.stop import StoppedBy

_HOPELESS = 1.15
"""By so much what a plan of equal ranks would take must exceed the best plan for the task to be left until later."""

_REFINED = ((1.3, 32, 500), (1.1, 12, 4_000), (1.03, 4, 20_000))
"""Rounds of moves before any bound: for plans within so many times the best one, so many of them, how many moves."""

_DESCENDED = 1.01, 2
"""After the first round layers are moved one by one in plans within so many times the best, of so many nodes."""

_PROMISING = 1.1
"""Later moves are for plans within so many times the best one."""

_LOOK_S = 0.05
"""How often the main thread looks whether to stop."""


class Effort(NamedTuple):
    """looks, rounds: for better prices, see ``Relaxation.improve``. moves: of the task's best plans."""

    looks: int
    rounds: int
    moves: int


EFFORTS = (Effort(1, 60, 200), Effort(6, 80, 1_000), Effort(20, 100, 8_000))
"""What is done for a case each time that it is the one of the least bound; then it is split."""

LAST_EFFORTS = (Effort(20, 150, 10_000), Effort(30, 300, 20_000), Effort(40, 600, 20_000))
"""What follows for a case that cannot be split."""


_FEW_LAYERS = 24
_STEPS = {0: 20_000, 2: 1_000_000}
"""After so many efforts all plans of a model of few layers are looked at, if so many steps are enough."""


@dataclass
class Node:
    """A case of a task. lower_s, done: what is proved of it and efforts made, both up to its last turn.

    program, candidates: None before the first plan; relaxation: before the first effort.
    """

    task: Task
    lower_s: float
    done: int = 0
    program: ChunkProgram | None = None
    relaxation: Relaxation | None = None
    candidates: Candidates | None = None
    whole: bool = True  # all plans of the task

    def plan(self, moves: int, control: FloatArray) -> Outcome:
        """A quick plan, or so many moves of the best one. control: as in ``run``."""
        if self.candidates is None:
            self.program = self.task.shape.program()
            if self.program is None:
                return Outcome(np.inf)
            self.candidates = Candidates(self.task, self.program)
            self.candidates.cut_evenly()
        self.candidates.move(moves, control)
        return Outcome(self.lower_s, self.candidates.best)

    def descend(self, control: FloatArray) -> Outcome:
        """Its best plans made better layer by layer."""
        if self.candidates is None:
            return Outcome(self.lower_s)
        self.candidates.descend(control)
        return Outcome(self.lower_s, self.candidates.best)

    def run(self, control: FloatArray) -> Outcome:
        """The next effort, or the cases to go on with. control: the best time known; not zero for a wish to stop."""
        target_s = control[0]
        if self.relaxation is None:
            if self.candidates is None:
                self.plan(0, control)
            if self.program is not None:
                self.relaxation = Relaxation.of(self.task, self.program, target_s)
            if self.relaxation is None:
                return Outcome(np.inf)
        assert self.candidates is not None
        if self.splits:
            children = [self._child(case, self.candidates) for case in self.relaxation.cases()]
            if children:
                return Outcome(self.lower_s, None, children)
        if self.whole and (proved_s := self._try_all(_STEPS.get(self.done, 0), control)) is not None:
            return Outcome(max(self.lower_s, proved_s), self.candidates.best)
        effort = (*EFFORTS, *LAST_EFFORTS)[self.done]
        lower_s = self._prove(effort, control)
        if lower_s >= target_s * (1.0 - PROOF):
            return Outcome(lower_s)
        found = self.candidates.like(self.relaxation.layers_in)
        if not self.whole:
            return Outcome(lower_s, min(found.values(), key=lambda x: x.batch_s, default=None))
        self.candidates.take(found)
        best = self.candidates.best
        if best is not None and best.batch_s <= target_s * _PROMISING:
            self.candidates.move(effort.moves, control)
        return Outcome(lower_s, self.candidates.best)

    def _prove(self, effort: Effort, control: FloatArray) -> float:
        """What is proved then, if not before of all plans that take less than ``control[0]``."""
        relaxation, target_s = self.relaxation, control[0]
        assert relaxation is not None
        relaxation.aim(target_s)
        relaxation.try_single_paths()
        for _ in range(effort.looks):
            if control[1] != 0.0 or max(self.lower_s, relaxation.lower_s) >= target_s * (1.0 - PROOF):
                break
            relaxation.improve(effort.rounds)
            relaxation.aim(target_s)
        return max(self.lower_s, relaxation.lower_s)

    def _try_all(self, most_steps: int, control: FloatArray) -> float | None:
        """What no plan of a small model takes less than, if all of them could be looked at."""
        assert self.candidates is not None
        if most_steps == 0 or self.task.tables.order.size > _FEW_LAYERS:
            return None
        target_s = control[0]
        if not self.candidates.try_all(most_steps, target_s, control):
            return None
        best = self.candidates.best
        return float(target_s if best is None else min(target_s, best.batch_s))

    @property
    def splits(self) -> bool:
        """Where many layers read one, little is proved as long as that may be anywhere."""
        if self.relaxation is None:
            return False
        return self.done == len(EFFORTS) or (self.done == 1 and self.relaxation.hub_is_open)

    def _child(self, case: Case, candidates: Candidates) -> Node:
        assert self.relaxation is not None
        done = 0 if self.relaxation.hub_is_open else 1
        return Node(
            self.task, self.lower_s, done, self.program, self.relaxation.with_case(case), candidates, whole=False
        )

    @property
    def exhausted(self) -> bool:
        return self.done == len(EFFORTS) + len(LAST_EFFORTS)


class Outcome(NamedTuple):
    """Of a node's turn. lower_s: what is proved of it. best: the best plan found so far. children: cases that take its
    place; none: it stays."""

    lower_s: float
    best: Candidate | None = None
    children: Sequence[Node] = ()


class _Begun(NamedTuple):
    """What a thread does for a node. control: as in ``Node.run``."""

    outcome: Future[Outcome]
    control: FloatArray


_Effort = Callable[[Node, FloatArray], Outcome]
_Turn = tuple[int, float]
"""Of a node by its index, and the best time known that it goes by."""


@dataclass(frozen=True)
class Known:
    """What searches have found. proved_s: of each task, what no plan's batch takes less than. found: its best plan."""

    proved_s: Mapping[TaskKey, float] = field(default_factory=dict)
    found: Mapping[TaskKey, Candidate] = field(default_factory=dict)


@dataclass
class ChunkSearch:
    """One search, which keeps ``ledger``. known: of other searches of the same problem."""

    tasks: Sequence[Task]
    threads: int
    ledger: Ledger[Candidate]
    known: Known = field(default_factory=Known)
    seconds: float = 0.0
    bounded: int = 0
    cases: int = 0

    def __post_init__(self) -> None:
        proved_s, found = self.known.proved_s, self.known.found
        self._set_nodes(
            {index: Node(task, max(task.lower_s, proved_s.get(task.key, 0.0))) for index, task in enumerate(self.tasks)}
        )
        for task in self.tasks:
            if task.key in found:
                self.ledger.begin_with(found[task.key])
        self._found: dict[int, Candidate] = {}  # by node
        self._begun: dict[int, _Begun] = {}

    def _set_nodes(self, nodes: dict[int, Node]) -> None:
        self._nodes = self.ledger.cases = nodes

    def run(self) -> None:
        """Until the bound is met or gets no further, or the gap, the deadline or a wish to stop comes first; so does
        KeyboardInterrupt."""
        began_s = time.perf_counter()
        try:
            with ThreadPoolExecutor(self.threads) as pool:
                try:
                    self._search(pool)
                finally:
                    self._end_begun()
        except KeyboardInterrupt:
            self.ledger.stopped_by = StoppedBy.INTERRUPT
        if self.ledger.stopped_by in (StoppedBy.INTERRUPT, StoppedBy.TIME_LIMIT):
            # When these come is no matter of the search, so all counts that is known.
            for index, begun in self._begun.items():
                if begun.outcome.done():
                    self._take(index, begun.outcome.result())
        if self.ledger.stopped_by is None and not self.ledger.proved:
            self.ledger.stopped_by = StoppedBy.NO_BETTER_BOUND
        self.seconds = time.perf_counter() - began_s

    @property
    def learnt(self) -> Known:
        """What is known now, for other searches: nothing is proved of plans that are worse than the best one."""
        proved_s, found, upper_s = dict(self.known.proved_s), dict(self.known.found), self.ledger.upper_s
        here: dict[TaskKey, float] = {}
        for node in self._nodes.values():
            here[node.task.key] = min(here.get(node.task.key, np.inf), node.lower_s, upper_s)
        for best in self._found.values():
            found[best.task.key] = min(found.get(best.task.key, best), best, key=lambda x: x.batch_s)
        for key, lower_s in here.items():
            proved_s[key] = max(lower_s, proved_s.get(key, 0.0))
        return Known(proved_s, found)

    def _search(self, pool: ThreadPoolExecutor) -> None:
        """A quick plan of each node, those that look best first; of those that look far worse than the best plan when
        their bound's turn comes. Then better plans, then bounds."""
        ranked = sorted(self._nodes, key=lambda index: self._nodes[index].task.about_s)
        self._plan(pool, _moved(0), ranked, self._is_hopeless)
        for round_, (within, most, moves) in enumerate(_REFINED):
            self._plan(pool, _moved(moves), self._promising(within)[:most])
            if round_ == 0:
                within, most = _DESCENDED
                self._plan(pool, Node.descend, self._promising(within)[:most])
        self._bound(pool)

    def _plan(
        self,
        pool: ThreadPoolExecutor,
        effort: _Effort,
        indices: Iterable[int],
        ends_at: Callable[[Node], bool] = lambda _: False,
    ) -> None:
        """An effort for plans of each. ends_at: whether neither a node nor those after it are worth one."""
        turns = deque((index, self.ledger.upper_s) for index in indices)
        while turns and not self.ledger.ends():
            index, _ = turns[0]
            if ends_at(self._nodes[index]):
                break
            if not self._is_over(self._nodes[index]):
                outcome = self._outcome(pool, effort, turns)
                if outcome is None:
                    return
                self._take(index, outcome)
            turns.popleft()
        self._end_begun()
        wait([begun.outcome for begun in self._begun.values()])
        if self.ledger.stopped_by is None:
            self._begun.clear()

    def _promising(self, within: float) -> list[int]:
        """Nodes by the times of their plans, which take at most so many times the best one's, or what is asked for."""
        most_s = within * min(self.ledger.upper_s, self.ledger.within_s)
        found = sorted((best.batch_s, index) for index, best in self._found.items())
        return [index for batch_s, index in found if batch_s <= most_s]

    def _bound(self, pool: ThreadPoolExecutor) -> None:
        """It is always the least bound's turn, with the best time known when the node's turn before was over."""
        waiting = [(node.lower_s, index, self.ledger.upper_s) for index, node in self._nodes.items()]
        heapq.heapify(waiting)
        while waiting and not self._bounded():
            node = self._nodes[waiting[0][1]]
            if node.exhausted or self._is_done(node):
                return  # no other effort raises the least bound
            turns = [(index, upper_s) for _, index, upper_s in heapq.nsmallest(2 * self.threads, waiting)]
            outcome = self._outcome(pool, Node.run, turns)
            if outcome is None:
                return
            _, index, _ = heapq.heappop(waiting)
            self.bounded += node.whole and node.done == 0
            node.done += 1
            for entry in self._take(index, outcome):
                heapq.heappush(waiting, (self._nodes[entry].lower_s, entry, self.ledger.upper_s))

    def _outcome(self, pool: ThreadPoolExecutor, effort: _Effort, turns: Iterable[_Turn]) -> Outcome | None:
        """Of the first turn. Threads that have nothing to do meanwhile begin those after it. None: the search ends."""
        turns = list(islice(turns, 2 * self.threads))
        first, _ = turns[0]
        while True:
            for index, upper_s in turns:
                busy = sum(not begun.outcome.done() for begun in self._begun.values())
                wanted = index == first or (busy < self.threads and not self._nodes[index].exhausted)
                if index not in self._begun and wanted:
                    control = np.array([upper_s, 0.0])
                    self._begun[index] = _Begun(pool.submit(effort, self._nodes[index], control), control)
            done, _ = wait([self._begun[first].outcome], timeout=_LOOK_S)
            if done:
                return self._begun.pop(first).outcome.result()
            if self.ledger.ends():
                return None

    def _end_begun(self) -> None:
        for begun in self._begun.values():
            begun.control[1] = 1.0

    def _is_hopeless(self, node: Node) -> bool:
        return node.task.about_s > _HOPELESS * min(self.ledger.upper_s, self.ledger.within_s)

    def _is_done(self, node: Node) -> bool:
        """Whether no plan of it is better than the best one, or of interest."""
        return node.lower_s >= self.ledger.beaten_from_s or node.lower_s > self.ledger.within_s

    def _is_over(self, node: Node) -> bool:
        """The same, where one as good with fewer devices is better."""
        ledger = self.ledger
        fewer = ledger.best is not None and node.task.devices < ledger.best.devices
        return self._is_done(node) and not (
            fewer and node.lower_s <= min(ledger.upper_s * (1.0 + TIE), ledger.within_s)
        )

    def _bounded(self) -> bool:
        """Whether the bound is good enough; plans are made good before anybody asks for bounds."""
        ledger = self.ledger
        return ledger.ends() or ledger.is_near(min(ledger.upper_s, ledger.within_s))

    def _take(self, index: int, outcome: Outcome) -> list[int]:
        """The nodes to go on with."""
        found, node = outcome.best, self._nodes[index]
        node.lower_s = max(node.lower_s, outcome.lower_s)
        if found is not None:
            if index not in self._found or found.batch_s < self._found[index].batch_s:
                self._found[index] = found
            self.ledger.offer(found, "search")
        if not outcome.children:
            return [index]
        self.cases += len(outcome.children)
        first = max(self._nodes) + 1
        added = dict(enumerate(outcome.children, first))
        nodes = {**self._nodes, **added}
        del nodes[index]
        self._set_nodes(nodes)
        return list(added)


def _moved(moves: int) -> _Effort:
    return lambda node, control: node.plan(moves, control)
