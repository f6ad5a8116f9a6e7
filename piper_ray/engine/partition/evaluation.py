"""An evaluation on all partitions: who is asked what, and when. Holds nothing of the lattice itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from piper_ray.engine.evaluation.potentials import Potentials
from piper_ray.engine.kernels.scan import CHOICES_ABANDONED, COUNTERS
from piper_ray.engine.kernels.types import BitArray, IndexArray, LevelStates
from piper_ray.engine.lattice.bits import bit_rows, members
from piper_ray.engine.partition.partition import Evaluation, Finished, FirstStage
from piper_ray.engine.partition.setting import PartitionSetting
from piper_ray.model.errors import ChoiceTooHard

Check = Callable[[int], None]
"""Called now and then, with the downsets done; what it raises ends the work."""


class PartitionLost(Exception):
    """A process is gone, and its downsets with it; or with its machine. The message says which, and why."""

    def __init__(self, message: str, *, with_machine: bool) -> None:
        super().__init__(message)
        self.with_machine = with_machine


class NoMachine(Exception):
    """No machine of a cluster can have a part. The message says why."""


class Crew(Protocol):
    """All partitions of a lattice, wherever they are. Their methods are ``Partition``'s."""

    @property
    def partitions(self) -> int:
        """How many."""
        ...

    @property
    def room(self) -> int:
        """Downsets that fit, in all."""
        ...

    def ask(self, partition: int, method: str, *arguments: object, answers: int = 1) -> Any:
        """What a call comes to, or each of so many things that it comes to: not the things themselves, but what stands
        for them in other calls, and in ``get``. A partition does one call after the other, as it is asked.
        """
        ...

    def get(self, answers: Sequence[Any], check: Callable[[], None]) -> list[Any]:
        """Waits for the things themselves. ``check`` may raise. Raises PartitionLost."""
        ...


@runtime_checkable
class Partitioning(Protocol):
    """What a backend of several machines has besides."""

    def crew(
        self,
        setting: PartitionSetting,
        bytes_per_downset: float,
        check: Callable[[], None],
    ) -> AbstractContextManager[Crew]:
        """Of the machines there are, until the context ends. ``check`` may raise. Raises NoMachine, ClusterError."""
        ...


OpenCrew = Callable[[], AbstractContextManager[Crew]]


class Border(NamedTuple):
    """A stage of a plan, from one downset (uint64[words]) to a smaller one."""

    outer: BitArray
    inner: BitArray
    variant: int
    data_parallel_degree: int
    later_sum: int


class PartitionedOutcome(NamedTuple):
    """As ``Outcome``; stages by their borders, front to back."""

    feasible: bool
    devices: int
    stages: tuple[Border, ...]
    live_downsets: int
    cells: int
    tested: IndexArray


@dataclass(frozen=True)
class PartitionedListing:
    """downsets: int64[partitions, n + 1], of each size on each."""

    downsets: IndexArray

    @property
    def total(self) -> int:
        return int(self.downsets[:, 1:].sum()) + 1

    @property
    def is_whole(self) -> bool:
        """Whether V is among them: else no plan keeps the threshold."""
        return int(self.downsets[:, -1].sum()) > 0


class PartitionedEvaluation:
    """On a crew, for a graph of ``size`` vertices. Each method raises what its ``check`` raises, and PartitionLost."""

    def __init__(self, crew: Crew, size: int) -> None:
        self._crew, self._size = crew, size
        self._all = range(crew.partitions)

    def list_downsets(self, potentials: Potentials, check: Check) -> PartitionedListing | None:
        """All that plans within the potentials' threshold can use; None if some partition has no room for its part."""
        self._each("list_anew", potentials, check=partial(check, 0))
        for size in range(self._size):
            spreading: Sequence[int] = self._all
            while spreading:
                answers = 1 + self._crew.partitions
                sent = [self._crew.ask(number, "spread", size, answers=answers) for number in spreading]
                taken = self._each_own("take_in", [[of[1 + owner] for of in sent] for owner in self._all])
                found = self._crew.get([*(of[0] for of in sent), *taken], partial(check, 0))
                if not all(found[len(sent) :]):
                    return None
                spreading = [number for number, any_left in zip(spreading, found, strict=False) if any_left]
        listed = self._crew.get([self._crew.ask(number, "listed") for number in self._all], partial(check, 0))
        return PartitionedListing(np.array(listed))

    def prepare(self, listing: PartitionedListing, check: Check) -> None:
        """Tables of what was listed last."""
        self._each("prepare", int(listing.downsets.max()), check=partial(check, 0))

    def evaluate(self, listing: PartitionedListing, evaluation: Evaluation, check: Check) -> PartitionedOutcome:
        """Of what was listed and prepared last, for potentials that hold for this threshold.

        Raises ChoiceTooHard as ``evaluate_threshold``.
        """
        self._each("begin", evaluation, check=partial(check, 1))
        live, cells, done, tested = 1, 1, 1, np.zeros(COUNTERS, np.int64)
        for size in range(1, self._size + 1):
            for finished in self._level(listing, size, partial(check, done)):
                live, cells, tested = live + finished.live, cells + finished.states, tested + finished.tested
            if tested[CHOICES_ABANDONED] > 0:
                raise ChoiceTooHard
            done += int(listing.downsets[:, size].sum())
            check(done)
        best = self._best(listing, partial(check, done))
        if best is None:
            return PartitionedOutcome(False, 0, (), live, cells, tested)
        devices = best[0] // evaluation.device_weight
        return PartitionedOutcome(True, devices, tuple(self._trace(*best, partial(check, done))), live, cells, tested)

    def _level(self, listing: PartitionedListing, size: int, check: Callable[[], None]) -> list[Finished]:
        """Each partition's downsets of this size go round, from their owner on, and come back to it."""
        owners = [number for number in self._all if listing.downsets[number, size] > 0]
        bits = {owner: self._crew.ask(owner, "of_size", size) for owner in owners}
        states: dict[int, LevelStates | None] = dict.fromkeys(owners)
        for turn in self._all:
            for owner in owners:
                number = (owner + turn) % self._crew.partitions
                states[owner] = self._crew.ask(number, "extend", bits[owner], states[owner])
        return self._crew.get([self._crew.ask(owner, "finish", states[owner]) for owner in owners], check)

    def _best(self, listing: PartitionedListing, check: Callable[[], None]) -> tuple[int, int] | None:
        if not listing.is_whole:
            return None
        owner = int(np.flatnonzero(listing.downsets[:, -1])[0])
        best: tuple[int, int] | None = self._crew.get([self._crew.ask(owner, "best_of_last")], check)[0]
        return best

    def _trace(self, tally: int, total: int, check: Callable[[], None]) -> list[Border]:
        """The stages of V's state, as ``trace_stages`` finds them on a whole lattice."""
        outer, stages = bit_rows([range(self._size)], self._size)[0], []
        while outer.any():
            asked = [self._crew.ask(number, "first_stage", outer, tally, total) for number in self._all]
            found: list[FirstStage] = [stage for stage in self._crew.get(asked, check) if stage is not None]
            if not found:
                raise AssertionError("a state has no origin")
            first = min(found, key=_place)
            tally, total = first.tally, first.data_parallel_sum
            stages.append(Border(outer, first.inner, first.variant, first.data_parallel_degree, total))
            outer = first.inner
        return stages

    def _each(self, method: str, *arguments: object, check: Callable[[], None]) -> None:
        self._crew.get([self._crew.ask(number, method, *arguments) for number in self._all], check)

    def _each_own(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        return [self._crew.ask(number, method, *own) for number, own in zip(self._all, arguments, strict=True)]


def _place(stage: FirstStage) -> tuple[int, list[int], int, int]:
    """By the order of downsets, and of the stages to one."""
    inner = members(stage.inner)
    return len(inner), inner, stage.variant, stage.data_parallel_sum
