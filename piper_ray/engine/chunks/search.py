"""The search over all (d, t, p, v). First it finds quick plans of the most promising tasks, and the first bound of each
task. Then it seeks better plans. Then it seeks better bounds, always for the task of the least bound, so that the bound
of all rises.

The outcome does not depend on the workers. Nodes take turns, which are calls, and the outcome of a turn counts when the
turn is over. Meanwhile, further workers begin the next turns. These depend on nothing else that is known by then, so
their outcomes are the same whenever they began. Turns that turn out not to be needed are dropped.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice

import numpy as np

from piper_ray.cost.tolerances import PROOF
from piper_ray.engine.backends.calls import Call, Finished, Workers
from piper_ray.engine.chunks.candidates import Candidate
from piper_ray.engine.chunks.crossings import mean_of_ranks_s
from piper_ray.engine.chunks.nodes import (
    EFFORTS,
    MOST_ROUNDS,
    Node,
    Parcel,
    Taken,
    Turn,
    TurnKind,
    TurnMemo,
    TurnOutcome,
    take,
)
from piper_ray.engine.chunks.tasks import Task, TaskKey
from piper_ray.engine.ledger import TIE, Ledger, Round
from piper_ray.engine.request import Sought
from piper_ray.model.stop import StoppedBy

_HOPELESS = 1.15
"""A task is postponed if the time of a plan of equal ranks exceeds the best plan's by more than this factor."""

_HARDLY_WITHIN = 1.02
"""The same for the time that is asked for, for which another search has already found good plans."""

_REFINED = ((1.3, 32, 500), (1.1, 12, 4_000), (1.03, 4, 20_000))
_REFINED_CHAINS = ((1.3, 32, 500), (1.1, 12, 8_000), (1.03, 4, 60_000))
"""Rounds of moves before any bound: the factor of the best plan within which plans are improved, how many plans, and
how many moves for each. Chains have no further rounds."""

_FURTHER, _FURTHER_PASSES, _FAR = 3 * ((1.02, 3, 100_000),), 40_000_000, 0.99
"""Further rounds where layers have several orders, as long as the bound is not this near: of the moves that towers take
to settle on ranks, at most as many as simulate so many passes and look at so many layers, about half a second."""

_DESCENDED = 1.01, 2
"""After the first round layers are moved one by one: in plans within this factor of the best one, of this many
nodes."""

_FIRST_PLANS = 64
"""The number of promising nodes that get a plan before the first bound of each node."""

_GOALS = (0.02,)
"""Where layers have several orders, the gaps that bounds are sought for before the one that is asked for."""

_MOST_CASES = 5_000
"""The most cases into which plans are divided."""

_AHEAD = 64
"""The number of turns, in the order in which they will count, that idle workers choose from."""

_LOOK_S = 0.05
"""How often the main thread checks whether to stop."""


_Turn = tuple[int, float]
"""The index of a node, and the best time known when its turn is given."""


@dataclass(frozen=True)
class _Phase:
    """Turns of one kind, for a limited number of nodes. passes: the most that the moves of a turn simulate, with the
    layers that they look at. again: as in ``Turn``."""

    kind: TurnKind
    moves: int
    turns: Round
    passes: float = np.inf
    again: int = 0


@dataclass(frozen=True)
class WarmStart:
    """The results of searches. proved_s: for each task, the bound on all of its plans' batches. found: its best
    plan."""

    proved_s: Mapping[TaskKey, float] = field(default_factory=dict)
    found: Mapping[TaskKey, Candidate] = field(default_factory=dict)


@dataclass
class ChunkSearch:
    """The rule of a search that keeps ``ledger``. known: results of other searches of the same problem. memo: the turns
    of earlier runs of this search. seeks: what it is for; bounds lead to some plans by themselves."""

    tasks: Sequence[Task]
    workers: Workers
    ledger: Ledger[Candidate]
    known: WarmStart = field(default_factory=WarmStart)
    memo: TurnMemo | None = None
    seeks: Sought = Sought.BOTH
    seconds: float = 0.0
    bounded: int = 0
    cases: int = 0

    def __post_init__(self) -> None:
        proved_s, found = self.known.proved_s, self.known.found
        self._nodes = {
            index: Node(task, max(task.lower_s, proved_s.get(task.key, 0.0)), name=_name(task.key))
            for index, task in enumerate(self.tasks)
        }
        self._indices = count(-1, -1)  # of cases: of equal bounds, the newest is worked on first
        self._bounds = _Bounds(self._nodes.values())
        self.ledger.cases = {0: self._bounds}
        for task in self.tasks:
            if task.key in found:
                self.ledger.begin_with(found[task.key])
        self._found: dict[int, Candidate] = {}  # by node
        self._shared = {task.key: task for task in self.tasks}
        self._rounds_of: dict[str, float] = defaultdict(float)  # the parts of a case, by its name
        self._kept_of: dict[int, int] = {}  # of cases since then: the index of the node that was kept
        self._given: set[int] = set()  # nodes whose turn has been given out
        self._ready: dict[int, Taken] = {}  # whose turn is over, and does not count yet
        self._rounds = 0
        # What is known of a node holds for its last goal, which may only fall.
        self._gap = self.ledger.limits.gap
        self._left = self._plan_and_bound()

    def efforts(self) -> Generator[None, None, None]:
        """Finds quick plans of some nodes, then a bound of each; then a quick plan of each, the most promising first,
        except for those that look far worse than the best plan. Then it seeks better plans, then bounds. After a limit
        of work another run continues from there."""
        began_s = time.perf_counter()
        try:
            for _ in self._left:  # which stays as it is if this ends early
                yield
        except (KeyboardInterrupt, GeneratorExit):
            self._recall()
            if (reason := self.ledger.stopped_by) is None or reason.ends_all:
                # The moment of an interrupt or a deadline is no part of the search, so everything that is known by then
                # counts.
                for index in [*self._ready]:
                    self._take(index, self._pop(index))
            raise
        finally:
            self._recall()
            self.seconds = time.perf_counter() - began_s

    @property
    def left_open(self) -> StoppedBy:
        """Why no effort is left although the bound is not met."""
        return StoppedBy.NO_BETTER_BOUND

    def forget_done(self) -> None:
        """Drops the data that only further turns need, for nodes that get no further turn."""
        for node in self._nodes.values():
            if self._is_over(node):
                node.forget()

    @property
    def learnt(self) -> WarmStart:
        """What other searches can use: nothing is proved about plans that are worse than the best one."""
        proved_s, found, upper_s = dict(self.known.proved_s), dict(self.known.found), self.ledger.upper_s
        here: dict[TaskKey, float] = {}
        for node in self._nodes.values():
            here[node.task.key] = min(here.get(node.task.key, np.inf), node.lower_s, upper_s)
        for best in self._found.values():
            found[best.task.key] = min(found.get(best.task.key, best), best, key=lambda x: x.value_s)
        for key, lower_s in here.items():
            proved_s[key] = max(lower_s, proved_s.get(key, 0.0))
        return WarmStart(proved_s, found)

    def _plan_and_bound(self) -> Generator[None, None, None]:
        ranked = sorted(self._nodes, key=lambda index: self._nodes[index].task.about_s)
        if self.ledger.within_s == np.inf:
            yield from self._plan(TurnKind.PLAN, 0, ranked[:_FIRST_PLANS], self._is_hopeless)
        if self._target_s < np.inf and self.seeks is not Sought.PLAN:
            self._bound_by_means()
            yield from self._bound(1)
        if self.seeks is not Sought.BOUND:
            yield from self._plans(ranked)
        if self.seeks is Sought.PLAN:
            yield from self._bound(len(EFFORTS))
        else:
            yield from self._bounds_by_goals()

    def _bound_by_means(self) -> None:
        """Raises all bounds by the means of ranks: in a millisecond each, before the bounds that take longer."""
        for node in self._nodes.values():
            before_s = node.lower_s
            node.lower_s = max(before_s, min(mean_of_ranks_s(node.task, self._target_s), self._target_s))
            self._bounds.replace(before_s, [node])

    def _plans(self, ranked: Sequence[int]) -> Generator[None, None, None]:
        """Seeks plans, of the most promising nodes first. ranked: all nodes."""
        yield from self._plan(TurnKind.PLAN, 0, [index for index in ranked if index in self._nodes], self._is_hopeless)
        for round_, (within, most, moves) in enumerate(_REFINED_CHAINS if self._is_chain else _REFINED):
            yield from self._plan(TurnKind.PLAN, moves, self._promising(within)[:most])
            if round_ == 0:
                within, most = _DESCENDED
                yield from self._plan(TurnKind.DESCEND, 0, self._promising(within)[:most])
        for again, (within, most, moves) in enumerate(() if self._is_chain else _FURTHER):
            if self._bounds.lower_s < _FAR * self._target_s < np.inf and not self._is_near():
                indices = self._promising(within)[:most]
                yield from self._plan(TurnKind.PLAN, moves, indices, passes=_FURTHER_PASSES, again=again)

    def _plan(
        self,
        kind: TurnKind,
        moves: int,
        indices: Sequence[int],
        ends_at: Callable[[Node], bool] = lambda _: False,
        passes: float = np.inf,
        again: int = 0,
    ) -> Generator[None, None, None]:
        """Gives each of these nodes a turn for plans. ends_at: whether neither a node nor those after it need a
        turn."""
        phase = _Phase(kind, moves, self._next_round(len(indices)), passes, again)
        turns = deque((index, self._target_s) for index in indices)
        while turns:
            index, _ = turns[0]
            if ends_at(self._nodes[index]):
                break
            if not self._is_over(self._nodes[index]):
                self._take(index, (yield from self._outcome(phase, turns)))
            turns.popleft()
            phase.turns.tell_of_progress(len(indices) - len(turns), len(self._given))
            yield
        self._recall()
        self._ready.clear()
        phase.turns.tell_of_end()

    @property
    def _is_chain(self) -> bool:
        """Whether layers have one order alone, which is the same in all tasks."""
        return bool(self.tasks) and self.tasks[0].tables.order.is_chain

    def _next_round(self, turns: int) -> Round:
        self._rounds += 1
        return Round(self.ledger, self._rounds, turns)

    @property
    def _target_s(self) -> float:
        """Plans that take longer are of no interest. It is at most the time that is asked for."""
        return min(self.ledger.upper_s, self.ledger.within_s * (1.0 + TIE))

    def _goal_s(self, gap: float) -> float:
        """Bounds need not be higher: then the search ends at this gap."""
        return self._target_s * min(1.0, (1.0 - gap) * (1.0 + 2.0 * PROOF))

    def _promising(self, within: float) -> list[int]:
        """Nodes by the times of their plans, which take at most a multiple of the best plan's time, or of the time
        asked for."""
        most_s = within * min(self.ledger.upper_s, self.ledger.within_s)
        found = sorted((best.value_s, index) for index, best in self._found.items())
        return [index for value_s, index in found if value_s <= most_s]

    def _bounds_by_goals(self) -> Generator[None, None, None]:
        """Seeks bounds for the gap that is asked for. Where layers have several orders, a larger one comes first, as
        bounds that are not to be as high take less work. What is known of a node holds for its last goal alone, so
        after that nodes become what they were before, with the bounds since."""
        for gap in () if self._is_chain else _GOALS:
            if gap > self._gap and self._bounds.lower_s < (1.0 - gap) * self._target_s < np.inf:
                kept, cases = {index: node.copy() for index, node in self._nodes.items()}, self.cases
                self._kept_of = {index: index for index in kept}
                yield from self._bound(gap=gap)
                self._return_to(kept)
                self.cases = cases
        yield from self._bound(gap=self._gap)

    def _return_to(self, kept: Mapping[int, Node]) -> None:
        """Continues with these nodes, with the bounds that their cases have. Their turns for another goal are not those
        on record."""
        least_s: dict[int, float] = defaultdict(lambda: np.inf)
        for index, node in self._nodes.items():
            of = self._kept_of[index]
            least_s[of] = min(least_s[of], node.lower_s)
        self._nodes = {
            index: replace(node, lower_s=least_s[index], name=f"{node.name}+") for index, node in kept.items()
        }
        self._bounds = _Bounds(self._nodes.values())
        self.ledger.cases = {0: self._bounds}

    def _bound(self, efforts: int | None = None, gap: float = 0.0) -> Generator[None, None, None]:
        """Always gives a turn to the node of the least bound, with the best time known when the node's last turn was
        over, or with the bound that is near enough to it.

        efforts: the most for each node, whatever the gap; None: as many as it takes for this gap.
        """
        waiting = sorted((node.lower_s, index, self._goal_s(gap)) for index, node in self._nodes.items())
        phase = _Phase(TurnKind.BOUND, 0, self._next_round(len(waiting)))
        while waiting and (efforts is not None or not self._is_near()):
            if efforts is None and self._bounds.lower_s >= (1.0 - gap) * self._target_s:
                break
            node = self._nodes[waiting[0][1]]
            if self._is_left(node) or self._is_done(node) or self.cases > _MOST_CASES:
                break  # no other effort raises the least bound
            outcome = yield from self._outcome(phase, ((index, upper_s) for _, index, upper_s in waiting))
            _, index, _ = waiting.pop(0)
            node = self._nodes[index]
            self.bounded += node.whole and node.done == 0
            node.done += 1
            for entry in self._take(index, outcome):
                if efforts is None or self._nodes[entry].done < efforts:
                    insort(waiting, (self._nodes[entry].lower_s, entry, self._goal_s(gap)))
            enough_s = min(self.ledger.beaten_from_s, (1.0 - gap) * self._target_s)
            over = self._bounds.reached(enough_s, self.ledger.within_s)
            replace(phase.turns, count=len(self._nodes)).tell_of_progress(over, len(self._given))
            yield
        self._recall()
        self._ready.clear()
        phase.turns.tell_of_end()

    def _outcome(self, phase: _Phase, turns: Iterable[_Turn]) -> Generator[None, None, TurnOutcome]:
        """Returns the outcome of the first turn. Meanwhile, idle workers begin the turns after it."""
        turns = list(islice(turns, _AHEAD))
        first, first_s = turns[0]
        first_turn = self._turn(phase, first, first_s)
        if self.memo is not None and not self._has_begun(first) and self.memo.has(self._nodes[first], first_turn):
            return self.memo.outcome(self._nodes[first], first_turn)
        while first not in self._ready:
            # What takes long begins early: parts of plans by patterns take the least.
            for index, upper_s in (turns[0], *sorted(turns[1:], key=lambda turn: self._nodes[turn[0]].origin != "")):
                turn = self._turn(phase, index, upper_s)
                if not self._has_begun(index) and (index == first or self._is_worth_beginning(index, turn)):
                    self._give(index, turn, needed=index == first)
            self._hear(self.workers.done(_LOOK_S))
            if first not in self._ready:
                yield
        found = self._pop(first)
        if self.memo is not None:
            self.memo.record(self._nodes[first], first_turn, found)
        return found

    def _has_begun(self, index: int) -> bool:
        return index in self._given or index in self._ready

    def _give(self, index: int, turn: Turn, *, needed: bool) -> None:
        """needed: whether its outcome will count."""
        node = self._nodes[index] if needed else self._nodes[index].copy()
        what, parcel = f"a turn of {node.name}", Parcel(node.task, node)
        self.workers.give(Call(index, take, (self._shared,), (parcel, turn), what, bound_s=turn.target_s))
        self._given.add(index)

    def _hear(self, calls: Iterable[Finished]) -> None:
        for call, result, *_ in calls:
            self._given.remove(call.key)
            self._ready[call.key] = result.open(self._shared)

    def _pop(self, index: int) -> TurnOutcome:
        """Returns the outcome of a turn that is over; it counts from now on."""
        node, outcome = self._ready.pop(index)
        self._nodes[index] = node
        return outcome

    def _recall(self) -> None:
        """Ends the turns that were begun. They are lost, but they were not needed."""
        self._hear(self.workers.recall())
        self._given.clear()

    def _is_worth_beginning(self, index: int, turn: Turn) -> bool:
        node = self._nodes[index]
        if self._is_left(node) or self._is_over(node) or len(self._given) >= self.workers.width:
            return False
        return self.memo is None or not self.memo.has(node, turn)

    def _turn(self, phase: _Phase, index: int, target_s: float) -> Turn:
        node = self._nodes[index]
        if phase.kind is TurnKind.BOUND:
            return Turn(phase.kind, target_s, node.done)
        shape = node.task.shape
        of_move = 2 * shape.microbatches * shape.stages + node.task.tables.order.size
        return Turn(phase.kind, target_s, int(min(phase.moves, phase.passes / of_move)), phase.again)

    def _is_left(self, node: Node) -> bool:
        """Whether there are no more efforts for the node."""
        return node.exhausted or self._rounds_of[node.origin] > MOST_ROUNDS

    def _is_hopeless(self, node: Node) -> bool:
        ledger = self.ledger
        return node.task.about_s > min(_HOPELESS * ledger.upper_s, _HARDLY_WITHIN * ledger.within_s)

    def _is_done(self, node: Node) -> bool:
        """Whether no plan of the node is better than the best one, or of interest."""
        return node.lower_s >= self.ledger.beaten_from_s or node.lower_s > self.ledger.within_s

    def _is_over(self, node: Node) -> bool:
        """The same, where a plan of the same time on fewer devices is better."""
        ledger = self.ledger
        fewer = ledger.best is not None and node.task.devices < ledger.best.devices
        return self._is_done(node) and not (
            fewer and node.lower_s <= min(ledger.upper_s * (1.0 + TIE), ledger.within_s)
        )

    def _is_near(self) -> bool:
        """Whether the bound is good enough. Plans are improved before bounds are sought."""
        return self.ledger.is_near(min(self.ledger.upper_s, self.ledger.within_s))

    def _take(self, index: int, outcome: TurnOutcome) -> list[int]:
        """Returns the nodes to continue with."""
        found, node = outcome.best, self._nodes[index]
        before_s, node.lower_s = node.lower_s, max(node.lower_s, outcome.lower_s)
        self.ledger.passes += outcome.passes - node.counted
        node.counted = outcome.passes
        if node.origin:
            self._rounds_of[node.origin] += outcome.rounds
        if found is not None:
            if index not in self._found or found.value_s < self._found[index].value_s:
                self._found[index] = found
            self.ledger.offer(found, "search")
        self._bounds.replace(before_s, outcome.children or [node])
        if not outcome.children:
            return [index]
        self.cases += sum(not child.origin for child in outcome.children)
        added = {next(self._indices): child for child in outcome.children}
        self._nodes.update(added)
        self._kept_of.update(dict.fromkeys(added, self._kept_of.get(index, index)))
        del self._nodes[index]
        return list(added)


class _Bounds:
    """The bounds of all nodes, in order."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._ascending = sorted(node.lower_s for node in nodes)

    @property
    def lower_s(self) -> float:
        """The least bound; inf if there are no nodes."""
        return self._ascending[0] if self._ascending else np.inf

    def replace(self, before_s: float, nodes: Iterable[Node]) -> None:
        """Replaces a node of this bound by these. At no moment is the least bound above that of all nodes."""
        for node in nodes:
            insort(self._ascending, node.lower_s)
        del self._ascending[bisect_left(self._ascending, before_s)]

    def reached(self, beaten_from_s: float, within_s: float) -> int:
        """How many bounds are at least the first, or higher than the second."""
        return len(self._ascending) - min(
            bisect_left(self._ascending, beaten_from_s), bisect_right(self._ascending, within_s)
        )


def _name(key: TaskKey) -> str:
    return f"d={key.data_parallel_degree} t={key.tensor_parallel_degree} p={key.ranks} v={key.chunks}"
