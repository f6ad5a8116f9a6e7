"""What an evaluation requires of a backend, and what it passes to one. ``backends`` has the backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.kernels.types import LevelStates
from piper_ray.model.events import Listener
from piper_ray.model.solution import ClusterStats

OnProgress = Callable[[int], None]
"""Called about ten times a second with the number done so far, of downsets or whatever the caller counts. If it raises,
the work ends."""


class NextBatch(NamedTuple):
    """The levels up to ``end_level`` - 1, at least one.

    here: there is too little work to share, so the caller evaluates them alone. Otherwise, if the batch has several
    levels, the caller finishes it: stages that lie wholly inside the batch are left to the caller.
    """

    end_level: int
    here: bool


class Activity(NamedTuple):
    """The workers of a backend and the pieces of work they hold at this moment."""

    workers: int
    chunks_in_flight: int


class Evaluator(Protocol):
    """Does the work of an evaluation: chooses the next levels, and finds the fronts of their downsets."""

    def next_batch(self, states: StateTables) -> NextBatch:
        """Returns the levels that come next and who evaluates them."""
        ...

    def evaluate_downsets(self, states: StateTables, first: int, last: int, on_progress: OnProgress) -> LevelStates:
        """Returns the fronts of downsets first .. last - 1, all in unfinished levels, over every J of a finished one.
        The arrays do not depend on who computes them.

        on_progress: receives the number of these downsets done.
        """
        ...


class Backend(Evaluator, Protocol):
    """All that a solve needs of a backend. Whoever makes it closes it.

    >>> import piper_ray
    >>> with piper_ray.RayBackend("local") as backend:  # doctest: +SKIP
    ...     solution = piper_ray.solve("workload.toml", backend=backend)
    """

    @property
    def threads(self) -> int:
        """The number of downsets that are evaluated at a time."""
        ...

    def listen(self, listener: Listener) -> None:
        """Begins a solve: notes for the user go to ``listener``, on the thread that calls the other methods, and
        ``stats`` count from now on."""
        ...

    def activity(self) -> Activity:
        """Returns the present activity, for a progress line. Waiting notes are passed on first."""
        ...

    def stats(self) -> ClusterStats | None:
        """Returns what a cluster did for this solve; None for threads of this process."""
        ...

    def close(self) -> None:
        """Ends threads, actors and connections. No other method may be called afterwards."""
        ...
