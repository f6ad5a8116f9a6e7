"""What the dispatcher is given to have done: a batch of levels, in chunks, or a call, which is one chunk."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from piper_ray.engine.backends.calls import Call
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.backends.ray.coordinator import MOST_DEATHS
from piper_ray.engine.backends.ray.publication import Stored, array_bytes
from piper_ray.engine.backends.ray.worker import wide
from piper_ray.engine.evaluation.state_tables import StateTables, joined
from piper_ray.engine.kernels.types import LevelStates
from piper_ray.model.errors import ClusterError

_KEYS = itertools.count()


class CallLost(ClusterError):
    """The call ended ``deaths`` workers in turn, or failed on them; ``cause`` is what the last one said."""

    def __init__(self, text: str, deaths: int, cause: str) -> None:
        super().__init__(text)
        self.deaths, self.cause = deaths, cause


@dataclass(eq=False)
class GivenWork:
    """Chunks whose answers belong together. expected_s: of each. worked_s: of all threads together. answered_s: when,
    by ``time.perf_counter``.
    """

    expected_s: float
    most_deaths: int = MOST_DEATHS
    answer: Future[Any] = field(default_factory=Future)
    worked_s: float = 0.0
    answered_s: float = 0.0
    first_chunk: int = 0
    attempts: int = 1

    @property
    def count(self) -> int:
        """Of its chunks."""
        return 1

    @property
    def chunks(self) -> range:
        return range(self.first_chunk, self.first_chunk + self.count)

    def compute(self, chunk: int, here: LocalBackend) -> tuple[Any, float]:
        """The chunk's answer by this process, and the seconds of all threads."""
        raise NotImplementedError

    def take(self, chunk: int, found: Any) -> None:  # noqa: ARG002 - of one of several, in another class
        """The answer to one of the chunks."""
        self.answered_s = time.perf_counter()
        self.answer.set_result(found)

    def give_up(self, chunk: int, deaths: int, cause: str) -> None:
        """A chunk has ended so many workers: there is no answer."""
        what, size_bytes = self.described(chunk)
        text = (
            f"{what} ended {deaths} workers in turn, or failed on them; the last said: {cause}. "
            f"Their tables take {size_bytes / 1e6:,.0f} MB in each worker; if "
            "memory ran out, use machines with more of it, or fewer workers on each (--cpus-per-worker)"
        )
        self.answer.set_exception(CallLost(text, deaths, cause))

    def described(self, chunk: int) -> tuple[str, float]:
        """A chunk in words, and the bytes of its tables."""
        raise NotImplementedError


@dataclass(eq=False, kw_only=True)
class ChunkBatch(GivenWork):
    """Of levels ``first_level`` .. end_level - 1, over the first ``buckets`` buckets, which are those of the levels
    below ``level``. answer: their states.
    """

    states: StateTables
    first_level: int
    end_level: int
    level: int
    buckets: int
    edges: Sequence[int]
    found: dict[int, LevelStates] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.edges) - 1

    @property
    def done(self) -> int:
        """Downsets answered. Asked for on another thread: ``list`` looks at the dict in one go."""
        return sum(part.counts.size for part in list(self.found.values()))

    def span(self, chunk: int) -> tuple[int, int]:
        place = chunk - self.first_chunk
        return self.edges[place], self.edges[place + 1]

    def compute(self, chunk: int, here: LocalBackend) -> tuple[LevelStates, float]:
        return here.evaluate(self.states, *self.span(chunk), lambda _: None, buckets=self.buckets)

    def take(self, chunk: int, found: LevelStates) -> None:
        self.found[chunk] = wide(found)
        if len(self.found) == self.count:
            super().take(chunk, joined([self.found[chunk] for chunk in self.chunks]))

    def described(self, chunk: int) -> tuple[str, float]:
        first, last = self.span(chunk)
        return f"downsets {first:,} to {last - 1:,}", sum(array.nbytes for array in self.states.grown)


@dataclass(eq=False)
class Shared:
    """What many calls take; put into the object store with the first of them, and gone with this."""

    value: Any
    key: int = field(default_factory=lambda: next(_KEYS))
    stored: Stored | None = None


@dataclass(eq=False, kw_only=True)
class GivenCall(GivenWork):
    """turn: calls of one turn share bounds, and the wish to stop. bound_s: falls. control: where it runs here."""

    call: Call
    shared: tuple[Shared, ...]
    turn: int
    bound_s: float
    control: Any = None

    def compute(self, chunk: int, here: LocalBackend) -> tuple[Any, float]:  # noqa: ARG002 - it is one chunk
        began_s = time.perf_counter()
        self.control = np.array([self.bound_s, 0.0])
        found = self.call.function(*(shared.value for shared in self.shared), *self.call.arguments, self.control)
        return found, time.perf_counter() - began_s

    def tell(self, bound_s: float, *, stop: bool) -> None:
        """To one that runs here or is still to be sent."""
        self.bound_s = min(self.bound_s, bound_s)
        if self.control is not None:
            self.control[0] = min(self.control[0], bound_s)
            self.control[1] = float(stop) or self.control[1]

    def described(self, chunk: int) -> tuple[str, float]:  # noqa: ARG002 - it is one chunk
        return self.call.what, sum(array_bytes(shared.value) for shared in self.shared)
