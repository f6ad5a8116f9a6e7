"""The search over all (d, t, p, v): first for plans, a quick one of each, the best of which are made better; then for
bounds, always of the task whose bound is the least, which so rises for all."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
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
from piper_ray.engine.search.limits import Limits
from piper_ray.model.stop import StoppedBy

_AT_ONCE = 16
_HOPELESS = 1.15
"""By so much what a plan of equal ranks would take must exceed the best plan for the task to be left until later."""

_REFINED = ((1.3, 32, 500), (1.1, 12, 4_000), (1.03, 4, 20_000))
"""Rounds of moves before any bound: for plans within so many times the best one, so many of them, how many moves."""

_DESCENDED = 1.01
"""After the first round layers are moved one by one in plans within so many times the best, of a node a thread."""

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
    """A case of a task. done: efforts made. program, candidates: None before the first plan; relaxation: before the
    first effort."""

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
                self.lower_s = np.inf
                return Outcome(None, [])
            self.candidates = Candidates(self.task, self.program)
            self.candidates.cut_evenly()
        self.candidates.move(moves, control)
        return self._found(control)

    def descend(self, control: FloatArray) -> Outcome:
        """Its best plans made better layer by layer."""
        if self.candidates is None:
            return Outcome(None, [])
        self.candidates.descend(control)
        return self._found(control)

    def run(self, control: FloatArray) -> Outcome:
        """The next effort, or the cases to go on with. control: the best time known; not zero for a wish to stop."""
        if self.relaxation is None:
            if self.candidates is None:
                self.plan(0, control)
            if self.program is not None:
                self.relaxation = Relaxation.of(self.task, self.program, control[0])
            if self.relaxation is None:
                self.lower_s = np.inf
                return Outcome(None, [])
        assert self.relaxation is not None
        assert self.candidates is not None
        if self.splits:
            children = [self._child(case, self.candidates) for case in self.relaxation.cases()]
            if children:
                return Outcome(None, children)
        if self.whole and self._try_all(_STEPS.get(self.done, 0), control):
            return self._found(control)
        effort = (*EFFORTS, *LAST_EFFORTS)[self.done]
        self.done += 1
        self.relaxation.aim(control[0])
        self.relaxation.try_single_paths()
        for _ in range(effort.looks):
            self.lower_s = max(self.lower_s, self.relaxation.lower_s)
            if self.lower_s >= control[0] * (1.0 - PROOF):
                return Outcome(None, [])
            if control[1] != 0.0:
                break
            self.relaxation.improve(effort.rounds)
            self.relaxation.aim(control[0])
        self.lower_s = max(self.lower_s, self.relaxation.lower_s)
        with self.candidates.lock:
            self.candidates.cut_like(self.relaxation.layers_in)
            best = self.candidates.best
            if self.whole and best is not None and best.batch_s <= control[0] * _PROMISING:
                self.candidates.move(effort.moves, control)
        return self._found(control)

    def _try_all(self, most_steps: int, control: FloatArray) -> bool:
        """Whether all plans of a small model could be looked at."""
        assert self.candidates is not None
        if most_steps == 0 or self.task.tables.order.size > _FEW_LAYERS:
            return False
        target_s = control[0]
        if self.candidates.try_all(most_steps, target_s, control):
            best = self.candidates.best
            self.lower_s = max(self.lower_s, target_s if best is None else min(target_s, best.batch_s))
            return True
        return False

    def _found(self, control: FloatArray) -> Outcome:
        assert self.candidates is not None
        best = self.candidates.best
        if best is not None:
            control[0] = min(control[0], best.batch_s)
        return Outcome(best, [])

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
    """best: the task's best plan so far. children: cases that take the node's place; none: it stays."""

    best: Candidate | None
    children: list[Node]


@dataclass(frozen=True)
class Known:
    """What searches have found. proved_s: of each task, what no plan's batch takes less than. found: its best plan."""

    proved_s: Mapping[TaskKey, float] = field(default_factory=dict)
    found: Mapping[TaskKey, Candidate] = field(default_factory=dict)


@dataclass
class ChunkSearch:
    """One search. ``best`` and ``lower_s`` are valid at every moment, for other threads too.

    microbatches: of a batch. on_found: hears of each better plan, and of the bound at that moment. known: of other
    searches of the same problem.
    """

    tasks: Sequence[Task]
    threads: int
    microbatches: int
    limits: Limits = field(default_factory=Limits)
    on_found: Callable[[Candidate, float], None] | None = None
    known: Known = field(default_factory=Known)
    best: Candidate | None = None
    seconds: float = 0.0
    stopped_by: StoppedBy | None = None
    bounded: int = 0
    cases: int = 0

    def __post_init__(self) -> None:
        proved_s, found = self.known.proved_s, self.known.found
        self.best = min((found[task.key] for task in self.tasks if task.key in found), key=_rank, default=None)
        self._control = np.array([self.upper_s, 0.0])
        self._nodes = {
            index: Node(task, max(task.lower_s, proved_s.get(task.key, 0.0))) for index, task in enumerate(self.tasks)
        }
        self._running: dict[Future[Outcome], int] = {}

    @property
    def upper_s(self) -> float:
        return np.inf if self.best is None else self.best.batch_s

    @property
    def lower_s(self) -> float:
        """No plan's batch takes less. inf: there is no plan."""
        return min([self.upper_s, *(node.lower_s for node in list(self._nodes.values()))])

    @property
    def within_s(self) -> float:
        """Of a batch: slower plans are of no interest."""
        return self.limits.within_s * self.microbatches

    @property
    def proved(self) -> bool:
        return self.lower_s >= self.upper_s * (1.0 - PROOF)

    def run(self) -> None:
        """Until the bound is met or gets no further, or the gap, the deadline or a wish to stop comes first."""
        began_s = time.perf_counter()
        with ThreadPoolExecutor(self.threads) as pool:
            try:
                self._plan_first(pool)
                for round_, (within, most, moves) in enumerate(_REFINED):
                    self._plan(pool, moves, self._promising(within)[:most])
                    if round_ == 0:
                        self._descend(pool)
                self._bound(pool)
            finally:
                self._control[1] = 1.0  # for those that still run, if it ends early
        for future, index in self._running.items():
            self._take(index, future.result())
        if self.stopped_by is None and not self.proved:
            self.stopped_by = StoppedBy.NO_BETTER_BOUND
        self.seconds = time.perf_counter() - began_s

    @property
    def learnt(self) -> Known:
        """What is known now, for other searches: nothing is proved of plans that are worse than the best one."""
        proved_s, found, upper_s = dict(self.known.proved_s), dict(self.known.found), self.upper_s
        here: dict[TaskKey, float] = {}
        for node in self._nodes.values():
            here[node.task.key] = min(here.get(node.task.key, np.inf), node.lower_s, upper_s)
            best = None if node.candidates is None else node.candidates.best
            if best is not None:
                found[node.task.key] = min(found.get(node.task.key, best), best, key=_rank)
        for key, lower_s in here.items():
            proved_s[key] = max(lower_s, proved_s.get(key, 0.0))
        return Known(proved_s, found)

    def _plan_first(self, pool: ThreadPoolExecutor) -> None:
        """A quick plan of each node, those that look best first; of those that look far worse than the best plan when
        their bound's turn comes."""
        ranked = sorted(self._nodes, key=lambda index: self._nodes[index].task.about_s)
        waiting = iter(ranked)
        for some in iter(lambda: list(islice(waiting, _AT_ONCE)), []):
            if self._nodes[some[0]].task.about_s > _HOPELESS * min(self.upper_s, self.within_s):
                return
            self._plan(pool, 0, some)

    def _plan(self, pool: ThreadPoolExecutor, moves: int, indices: Iterable[int]) -> None:
        """So many moves for plans of each; a quick one where there is none."""
        waiting = list(reversed(list(indices)))
        while (waiting or self._running) and not self._ends():
            while waiting and len(self._running) < self.threads:
                index = waiting.pop()
                node = self._nodes[index]
                if not self._is_done(node):
                    self._running[pool.submit(node.plan, moves, self._control)] = index
            self._wait()

    def _descend(self, pool: ThreadPoolExecutor) -> None:
        """The best nodes' plans, layer by layer."""
        for index in self._promising(_DESCENDED)[: self.threads]:
            if not self._is_done(self._nodes[index]):
                self._running[pool.submit(self._nodes[index].descend, self._control)] = index
        while self._running and not self._ends():
            self._wait()

    def _promising(self, within: float) -> list[int]:
        """Nodes by the times of their plans, which take at most so many times the best one's, or what is asked for."""
        found = [
            (node.candidates.best.batch_s, index)
            for index, node in self._nodes.items()
            if node.candidates is not None and node.candidates.best is not None
        ]
        most_s = within * min(self.upper_s, self.within_s)
        return [index for batch_s, index in sorted(found) if batch_s <= most_s]

    def _bound(self, pool: ThreadPoolExecutor) -> None:
        """It is always the least bound's turn."""
        waiting = [(node.lower_s, index) for index, node in self._nodes.items()]
        heapq.heapify(waiting)
        while (waiting or self._running) and not self._bounded():
            while waiting and len(self._running) < self.threads:
                _, index = heapq.heappop(waiting)
                node = self._nodes[index]
                if node.exhausted or self._is_done(node):
                    waiting.clear()  # no other effort raises the least bound
                    continue
                self.bounded += node.whole and node.done == 0
                self._running[pool.submit(node.run, self._control)] = index
            for entry in self._wait():
                heapq.heappush(waiting, (self._nodes[entry].lower_s, entry))

    def _wait(self) -> list[int]:
        """Takes what has ended; the nodes to go on with."""
        done, _ = wait(self._running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
        return [entry for future in done for entry in self._take(self._running.pop(future), future.result())]

    def _is_done(self, node: Node) -> bool:
        """Whether no plan of it is better than the best one, or of interest."""
        return node.lower_s >= self.upper_s * (1.0 - PROOF) or node.lower_s > self.within_s

    def _bounded(self) -> bool:
        """Whether the bound is good enough; plans are made good before anybody asks for bounds."""
        wanted_s = min(self.upper_s, self.within_s)
        enough = np.isfinite(wanted_s) and self.lower_s >= wanted_s * (1.0 - self.limits.gap) and not self.proved
        if not self._ends() and enough:
            self.stopped_by = StoppedBy.GAP
        return self.stopped_by is not None

    def _ends(self) -> bool:
        self.stopped_by = self.limits.reached
        if self.stopped_by is None and self.upper_s > self.lower_s > self.within_s:
            self.stopped_by = StoppedBy.TOO_SLOW
        return self.stopped_by is not None

    def _take(self, index: int, outcome: Outcome) -> list[int]:
        """The nodes to go on with."""
        found = outcome.best
        if found is not None and (self.best is None or _rank(found) < _rank(self.best)):
            self.best = found
            if self.on_found is not None:
                self.on_found(found, self.lower_s)
        if not outcome.children:
            return [index]
        self.cases += len(outcome.children)
        first = max(self._nodes) + 1
        added = dict(enumerate(outcome.children, first))
        nodes = {**self._nodes, **added}
        del nodes[index]
        self._nodes = nodes
        return list(added)


def _rank(found: Candidate) -> tuple[float, int, int]:
    """Of plans that take the same the one of fewest devices, then of fewest chunks."""
    return found.batch_s, found.task.devices, found.task.shape.stages
