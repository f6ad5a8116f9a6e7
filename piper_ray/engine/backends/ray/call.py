"""One call of a function of arrays on the workers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from piper_ray.engine.backends.ray.worker import CallReply, Function

if TYPE_CHECKING:
    from piper_ray.engine.backends.ray.publication import Stored

_KEYS = itertools.count()


@dataclass(eq=False)
class Shared:
    """Arrays that many calls take, by name; put into the object store with the first of them, and gone with this."""

    arrays: Mapping[str, Any]
    key: int = field(default_factory=lambda: next(_KEYS))
    stored: Stored | None = None


@dataclass(eq=False)
class Call:
    """function(*shared, *arguments, control), on a worker or here: see ``worker.Function``. what: in words.

    bound_s: that it begins with; it falls. turn: calls of one turn share bounds, and the wish to stop.
    """

    function: Function
    shared: tuple[Shared, ...]
    arguments: tuple[object, ...]
    what: str
    turn: int
    bound_s: float
    expected_s: float
    answer: Future[Any] = field(default_factory=Future)
    worked_s: float = 0.0
    first_chunk: int = 0
    control: Any = None  # where it runs here: float64[2], as the function takes it

    @property
    def chunks(self) -> range:
        return range(self.first_chunk, self.first_chunk + 1)

    def compute(self) -> CallReply:
        """Here."""
        began_s = time.perf_counter()
        self.control = np.array([self.bound_s, 0.0])
        found = self.function(*(shared.arrays for shared in self.shared), *self.arguments, self.control)
        return CallReply(found, time.perf_counter() - began_s)

    def tell(self, bound_s: float, *, stop: bool) -> None:
        """As ``Calls.tell``, to one that runs here or is still to be sent."""
        self.bound_s = min(self.bound_s, bound_s)
        if self.control is not None:
            self.control[0] = min(self.control[0], bound_s)
            self.control[1] = float(stop) or self.control[1]
