"""What an evaluation asks of whoever does its work, and what that may ask of it. ``backends`` has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.kernels.types import LevelStates
from piper_ray.model.events import Listener
from piper_ray.model.solution import ClusterStats

OnProgress = Callable[[int], None]
"""Called about ten times a second with what is done so far, of downsets or whatever the caller counts; what it raises
ends the work."""


class NextBatch(NamedTuple):
    """Levels up to ``end_level`` - 1, at least one.

    here: too little to share; the caller evaluates them alone. Else the caller finishes a batch of several levels:
    stages that lie wholly inside it are left to it.
    """

    end_level: int
    here: bool


class Activity(NamedTuple):
    """What a backend is doing at this moment."""

    workers: int
    chunks_in_flight: int


class Evaluator(Protocol):
    """Who does an evaluation's work: what next, how much of it, and the fronts that come of it."""

    def next_batch(self, states: StateTables) -> NextBatch:
        """Which levels should come next, and who should do them."""
        ...

    def evaluate_downsets(self, states: StateTables, first: int, last: int, on_progress: OnProgress) -> LevelStates:
        """Fronts of downsets first .. last - 1, all in unfinished levels, over every J of a finished one: whoever does
        it returns the same arrays.

        on_progress: gets the number of these downsets done.
        """
        ...


class Backend(Evaluator, Protocol):
    """All that a solve needs. Who makes it closes it.

    >>> import piper_ray
    >>> with piper_ray.RayBackend("local") as backend:  # doctest: +SKIP
    ...     solution = piper_ray.solve("workload.toml", backend=backend)
    """

    @property
    def threads(self) -> int:
        """How many downsets are worked on at a time."""
        ...

    def listen(self, listener: Listener) -> None:
        """A solve begins: notes for the user go there, on the thread that calls the other methods, and figures count
        from now on."""
        ...

    def activity(self) -> Activity:
        """For a progress line. Notes that wait are passed on first."""
        ...

    def stats(self) -> ClusterStats | None:
        """What a cluster did for this solve; None for threads of this process."""
        ...

    def close(self) -> None:
        """Ends threads, actors and connections; nothing is asked of it after that."""
        ...
