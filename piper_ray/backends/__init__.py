"""Executors of a batch of downsets of an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from piper_ray.kernels.types import LevelStates
from piper_ray.state_tables import StateTables

Heartbeat = Callable[[int], None]


class Backend(Protocol):
    """Computes fronts of a range of downsets over all finished levels; every backend returns the same arrays."""

    @property
    def threads(self) -> int:
        """How many downsets are worked on at a time."""
        ...

    def end_of_batch(self, states: StateTables) -> int:
        """The level up to which the next batch should go, at least one past ``states.level``.

        A batch of several levels is finished by the caller: stages that lie wholly inside it are left to it.
        """
        ...

    def evaluate_downsets(self, states: StateTables, first: int, last: int, heartbeat: Heartbeat) -> LevelStates:
        """Fronts of downsets first .. last - 1, all in unfinished levels, over every J of a finished one.

        Calls ``heartbeat`` about ten times a second with the number of downsets done; what it raises ends the work.
        """
        ...
