"""Levels of the lattice as calls: a batch of them in chunks, what these share, and how a worker evaluates a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from piper_ray.engine.backends.calls import Call
from piper_ray.engine.backends.local import LocalBackend, Worked
from piper_ray.engine.backends.ray.calls import OF_WORKER, GivenCall, Shared
from piper_ray.engine.evaluation.state_tables import StateTables, joined, narrow, wide
from piper_ray.engine.kernels.types import ClusterArrays, LevelStates, Tables, Threshold, frozen


class LevelChunk(NamedTuple):
    """Downsets first .. last - 1 of an evaluation, over the first ``buckets`` buckets of the levels below ``level``."""

    level: int
    buckets: int
    first: int
    last: int


class FinishedLevels(NamedTuple):
    """The states of levels ``level`` .. end_level - 1, ``narrow``."""

    level: int
    end_level: int
    states: LevelStates


class ChunkThreads:
    """The threads of a worker for chunks, with the finished levels of the evaluation of its last chunk."""

    def __init__(self, threads: int) -> None:
        self.backend = LocalBackend(threads)
        self._states: StateTables | None = None

    def states_of(self, tables: tuple[Any, ...], cluster: ClusterArrays, target: Threshold) -> StateTables:
        """Returns the states of an evaluation, with all levels finished that its chunks have needed so far."""
        if self._states is None or self._states.target is not target:
            lattice, costs, options = tables
            found = Tables(frozen(lattice), frozen(costs), frozen(options), frozen(cluster))
            self._states = StateTables(found, frozen(target))
        return self._states


def evaluate_chunk(
    threads: ChunkThreads, tables: tuple[Any, ...], evaluation: tuple[ClusterArrays, Threshold], *rest: Any
) -> Worked:
    """Returns the states of a chunk, ``narrow``. rest: ``FinishedLevels``, the chunk, and a control that is not
    used."""
    *spans, chunk, _ = rest
    states = threads.states_of(tables, *evaluation)
    for span in spans:
        if span.level == states.level:
            states.take(wide(span.states))
    if states.level != chunk.level:
        raise RuntimeError(f"levels below {states.level} are here, not those below {chunk.level}")
    found = threads.backend.evaluate(states, chunk.first, chunk.last, lambda _: None, buckets=chunk.buckets)
    return found._replace(states=narrow(found.states))


_CHUNK_THREADS = Shared(None, OF_WORKER)


class SharedLevels:
    """What chunks share, each sent once: tables of a workload, limits of an evaluation, and spans of its finished
    levels."""

    def __init__(self) -> None:
        self._tables: Shared | None = None
        self._evaluations: WeakKeyDictionary[StateTables, list[Shared]] = WeakKeyDictionary()

    def calls(
        self, states: StateTables, edges: Sequence[int], expected_s: float, here: LocalBackend
    ) -> list[GivenCall]:
        """Makes calls for chunks of downsets between the edges, over all levels finished by now. here: used without
        workers."""
        shared, level, buckets = self._of(states), states.level, states.buckets_used
        calls = []
        for first, last in pairwise(edges):
            what = f"downsets {first:,} to {last - 1:,}"
            call = Call(None, evaluate_chunk, (), (LevelChunk(level, buckets, first, last),), what)
            at_hand = partial(here.evaluate, states, first, last, lambda _: None, buckets=buckets)
            calls.append(GivenCall(call, shared, expected_s, here=at_hand))
        return calls

    def _of(self, states: StateTables) -> tuple[Shared, ...]:
        """Returns what the chunks of an evaluation share, with all of its levels finished by now."""
        lattice, costs, options, cluster = states.tables
        if self._tables is None or self._tables.value[1] is not costs or self._tables.value[2] is not options:
            self._tables = Shared((lattice, costs, options))
        shared = self._evaluations.setdefault(states, [_CHUNK_THREADS, self._tables, Shared((cluster, states.target))])
        level = shared[-1].value.end_level if len(shared) > 3 else 1
        if level < states.level:
            found = narrow(states.finished(level, states.level))
            shared.append(Shared(FinishedLevels(level, states.level, found)))
        return tuple(shared)


@dataclass(eq=False)
class ChunkBatch:
    """Levels from ``first_level`` on, over the first ``buckets`` buckets. edges: between the chunks, each of which is a
    call."""

    states: StateTables
    first_level: int
    buckets: int
    edges: Sequence[int]
    calls: Sequence[GivenCall]

    @property
    def done(self) -> int:
        """The number of downsets answered."""
        spans = zip(self.calls, pairwise(self.edges), strict=True)
        return sum(end - begin for call, (begin, end) in spans if call.answer.done())

    @property
    def worked_s(self) -> float:
        """The time of all threads together, once all is answered."""
        return sum(float(call.answer.result().seconds) for call in self.calls)

    @property
    def answered_s(self) -> float:
        """The time of the last answer, by ``time.perf_counter``."""
        return max(call.answered_s for call in self.calls)

    @cached_property
    def found(self) -> LevelStates:
        """Returns the states, once all is answered."""
        return joined([wide(call.answer.result().states) for call in self.calls])
