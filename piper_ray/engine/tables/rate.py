"""Measures how fast work is done: the time of a bucket bound differs a thousandfold between problems."""

from __future__ import annotations

from dataclasses import dataclass, field

_ENOUGH_BOUNDS, _ENOUGH_S = 10_000, 2e-4
"""Calls with fewer bounds and fewer seconds than these are not measured: most of their time is the call itself."""

_LEAST_S = 1e-12
_WEIGHT = 0.3  # of the newest figure in the running mean


@dataclass
class Rate:
    """Seconds that one thread takes for a bucket bound, with the work that follows from it. A guess until it is
    measured."""

    s_per_bound: float = 8e-9
    measured: bool = False

    def record(self, bounds: int, seconds: float) -> None:
        """Records a measurement. bounds: as estimated beforehand, the number of downsets times that of buckets."""
        if bounds <= 0 or seconds <= 0 or (bounds < _ENOUGH_BOUNDS and seconds < _ENOUGH_S):
            return
        newest = max(seconds / bounds, _LEAST_S)
        self.s_per_bound += (_WEIGHT if self.measured else 1.0) * (newest - self.s_per_bound)
        self.measured = True

    def seconds(self, bounds: int) -> float:
        return bounds * self.s_per_bound

    def bounds_within(self, seconds: float) -> float:
        """Returns the number of bounds that a kernel call should make within ``seconds``; a small number until one is
        measured."""
        return seconds / self.s_per_bound if self.measured and self.s_per_bound > 0 else _ENOUGH_BOUNDS


@dataclass
class Rates:
    """The rates of one problem. far: over finished levels. near: among the levels of a batch, where stages are short
    and more of them fit.
    """

    far: Rate = field(default_factory=Rate)
    near: Rate = field(default_factory=lambda: Rate(3e-8))
