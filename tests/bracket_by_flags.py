"""The bracket's rule as it was first written, with four flags in place of its phases: the twin of its proposals."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.cost.tolerances import PROOF, RESOLUTION

_FIRST_STEP = 0.0025
_LAST_STEP = 5.0
_CHAIN_QUALITY = 0.75  # a chain's best plan is seldom further from the best of all
_NARROW = 0.01
_FEWER = 0.99


@dataclass
class FlaggedBracket:
    """lower: the largest value proved infeasible, or a bound. upper: the best plan's value; None before there is one.

    ceiling: no plan is slower than this. doubtful: there may be no plan, so the ceiling is asked first.

    Near the lower bound an evaluation is cheap, because little may be wasted: so it steps up from below, by 0.25 %,
    0.5 %, 1 %, ..., until one is feasible, unless a chain's plan is far above: then it starts at 3/4 of that. Far above
    the bound the ceiling tells whether there is a plan at all. Later it halves the bracket, or goes to where the
    devices left over point, and from 1 % on it challenges the best plan by turns: an infeasible evaluation just below
    that plan ends the search.
    """

    lower: float
    ceiling: float
    upper: float | None = None
    doubtful: bool = False
    _step: float = _FIRST_STEP
    _stepping: bool = True
    _challenge: bool = False
    _guess: float | None = None

    @property
    def closed(self) -> bool:
        if self.upper is None:
            return False
        return self.lower >= self.upper * (1.0 - PROOF) or self.upper <= RESOLUTION

    @property
    def exhausted(self) -> bool:
        """The ceiling itself is infeasible: there is no plan."""
        return self.upper is None and self.lower >= self.ceiling

    def gap(self) -> float:
        if self.upper is None:
            return float("inf")
        return max(0.0, (self.upper - self.lower) / self.upper) if self.upper > 0.0 else 0.0

    def propose(self) -> float:
        """The next threshold, above ``lower`` and below ``upper``."""
        if self.upper is None:
            usual = self.lower > 0.0 and self._step <= _LAST_STEP and not self.doubtful
            return min(self.lower * (1.0 + self._step), self.ceiling) if usual else self.ceiling
        proof = self.upper * (1.0 - PROOF)
        if self._challenge:
            return proof
        if self._guess is not None and self.lower < self._guess < proof:
            return self._guess
        if self._stepping:
            return min(max(self.lower * (1.0 + self._step), _CHAIN_QUALITY * self.upper), proof)
        return min((self.lower * self.upper) ** 0.5 if self.lower > 0.0 else 0.5 * self.upper, proof)

    def record_infeasible(self, threshold: float) -> None:
        if self.upper is not None and self.lower < _CHAIN_QUALITY * self.upper <= threshold:
            self._stepping = False  # the small steps belong to the lower bound that was
        self.lower = max(self.lower, threshold)
        self._guess = None
        self._step *= 2.0
        self._challenge = not self._stepping and self.gap() < _NARROW

    def record_feasible(self, threshold: float, value: float, share: float = 1.0) -> None:
        """A plan of ``value`` came out of an evaluation at ``threshold``, with this share of the devices.

        Time is about inverse to devices: the same work on all of them would take ``share`` of the threshold.
        """
        self.record_plan(value)
        self._guess = threshold * share if share < _FEWER else None
        if threshold < self.ceiling:
            self._stepping = False
            self._challenge = not self._challenge and self.gap() < _NARROW

    def record_plan(self, value: float) -> None:
        """A plan from elsewhere."""
        if self.upper is None or value < self.upper:
            self.upper = value
