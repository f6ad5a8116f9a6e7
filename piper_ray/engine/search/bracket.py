"""Which threshold to try next. No clock, no tables: the bracket alone decides, so every run takes the same way."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from piper_ray.cost.tolerances import PROOF, RESOLUTION
from piper_ray.engine.ledger import Inexact
from piper_ray.model.figures import relative_gap

_FIRST_STEP = 0.0025
_LAST_STEP = 5.0
_CHAIN_QUALITY = 0.75  # a chain's best plan is seldom further from the best of all
_NARROW = 0.01
_FEWER = 0.99
_OFF = 1e-8  # relative: far above what thresholds and their plans differ by
_FIRST_DESCENT = 4e-4
_LONGER = 4.0

_QUICKLY = 4.0
"""How steps grow where evaluations say when to stop growing."""

_FURTHER, _STILL_FURTHER = 0.05, 1.5
"""A feasible evaluation takes little longer than an infeasible one as near the optimum, and tells more: so steps go
further than to where the optimum seems to be, and still further each time that falls short."""


class Phase(Enum):
    """How a bracket closes. DOUBTING: there may be no plan, so the ceiling is asked first; it ends with the first plan.

    STEPPING: near the lower bound an evaluation is cheap, because little may be wasted: so it steps up from below, by
    0.25 %, 0.5 %, 1 %, ..., until one is feasible, unless a chain's plan is far above: then it starts at 3/4 of that.
    Far above the bound the ceiling tells whether there is a plan at all. Where it is known how far the states of an
    evaluation reached, steps grow by four times, and end a little above where they would reach all layers.
    HALVING: the bracket, once a step was feasible.
    CHALLENGING: the best plan, by turns with halving from 1 % on: an infeasible evaluation just below it ends the
    search.
    DESCENDING: from a plan that is likely to be near the best: just below it, then 0.04 %, 0.16 %, 0.64 %, ... below
    the one that came out, until one is infeasible; or, in strides, as far below each as was said.
    """

    DOUBTING = auto()
    STEPPING = auto()
    HALVING = auto()
    CHALLENGING = auto()
    DESCENDING = auto()


@dataclass
class Bracket:
    """The one case of a search for a threshold (``ledger.OpenCase``).

    lower: the largest value proved infeasible, or a bound. upper: the best plan's value; None before there is one.

    ceiling: no plan is slower than this. Where a plan leaves devices over, all phases but CHALLENGING ask first for
    what these point to. work: what all layers take if nothing is wasted; 0 where nobody tells how far states reach.
    """

    lower: float
    ceiling: float
    upper: float | None = None
    phase: Phase = Phase.STEPPING
    work: float = 0.0
    _step: float = _FIRST_STEP
    _further: float = _FURTHER
    _pointed: float | None = None
    _descent: float = 0.0
    _stride: float = 0.0

    def __post_init__(self) -> None:
        self._first = self.lower
        if self.upper is not None and self.phase is Phase.DOUBTING:
            self.phase = Phase.STEPPING

    @property
    def closed(self) -> bool:
        if self.upper is None:
            return False
        return self.lower >= self.upper * (1.0 - PROOF) or self.upper <= RESOLUTION

    @property
    def exhausted(self) -> bool:
        """The ceiling itself is infeasible: there is no plan."""
        return self.upper is None and self.lower >= self.ceiling

    @property
    def lower_s(self) -> float:
        """What is proved of all plans; inf: there is none. Once closed it is the same whatever the search began with,
        and whichever way it took.
        """
        if self.exhausted:
            return float("inf")
        return max(self._first, self.upper * (1.0 - PROOF)) if self.closed and self.upper is not None else self.lower

    def gap(self) -> float:
        return float("inf") if self.upper is None else relative_gap(self.upper, self.lower)

    def is_done(self, gap: float = 0.0) -> bool:
        """Whether there is nothing left to ask: closed, exhausted, or no wider than ``gap``."""
        return self.closed or self.exhausted or self.gap() <= gap

    def propose(self) -> float:
        """The next threshold, above ``lower`` and below ``upper``."""
        if self.upper is None:
            return self._below_any_plan()
        proof = self.upper * (1.0 - PROOF)
        if self.phase is Phase.CHALLENGING:
            return proof
        if self.phase is Phase.DESCENDING:
            return max(min(proof, self.upper * (1.0 - self._descent)), self.lower)
        if self._pointed is not None and self.lower < self._pointed < proof:
            return self._pointed
        if self.phase is Phase.STEPPING:
            return min(max(self.lower * (1.0 + self._step), _CHAIN_QUALITY * self.upper), proof)
        return min((self.lower * self.upper) ** 0.5 if self.lower > 0.0 else 0.5 * self.upper, proof)

    def _below_any_plan(self) -> float:
        if self.phase is Phase.DOUBTING or self.lower <= 0.0 or self._step > _LAST_STEP:
            return self.ceiling
        step = self.lower * (1.0 + self._step)
        return min(step if self._pointed is None else min(step, self._pointed), self.ceiling)

    @property
    def _asks_how_far(self) -> bool:
        return self.work > 0.0 and self.upper is None and self.phase is Phase.STEPPING

    def record_infeasible(self, threshold: float, reach: float = 0.0) -> None:
        """No plan keeps the threshold. reach: the largest share of all work that some state had."""
        if self._asks_how_far:
            self._step_further(threshold, reach)
            return
        strode = self.phase is Phase.DESCENDING and self._stride > 0.0
        if self.upper is not None and self.lower < _CHAIN_QUALITY * self.upper <= threshold:
            self.phase = Phase.HALVING  # the small steps belong to the lower bound that was
        self.lower = max(self.lower, threshold)
        self._pointed = None
        self._step *= 2.0
        if self.phase in (Phase.HALVING, Phase.CHALLENGING, Phase.DESCENDING):
            # Far below a plan an evaluation was quick, and one halfway will be, unlike one just below the plan.
            self.phase = self._closing(may_challenge=not strode)

    def _step_further(self, threshold: float, reach: float) -> None:
        """States end where they have wasted what a threshold leaves to waste. If the rest wastes as much of its work
        as they did, all is reached where so much may be wasted.
        """
        if self._pointed is not None and threshold >= self._pointed:
            self._further *= _STILL_FURTHER
        else:
            self._step *= _QUICKLY
        self.lower = max(self.lower, threshold)
        wasted = 1.0 - self.work / self.lower
        needed = wasted / reach if reach > 0.0 else 1.0
        self._pointed = self.work / (1.0 - needed) * (1.0 + self._further) if needed < 1.0 else None

    def record_bound(self, value: float) -> None:
        """No plan is faster, by a bound that is close: so steps above it begin small."""
        if value > self.lower:
            self.record_infeasible(value)
            self._step = _FIRST_STEP

    def record_feasible(self, threshold: float, value: float, share: float = 1.0) -> None:
        """A plan of ``value`` came out of an evaluation at ``threshold``, with this share of the devices.

        Time is about inverse to devices: the same work on all of them would take ``share`` of the threshold. Raises
        LimitError where sums over layers are so far off that the plan takes longer than the threshold.
        """
        if value > threshold * (1.0 + _OFF) + RESOLUTION:
            raise Inexact(f"stages that are to take {threshold:.6g} s take {value:.6g} s")
        self.record_plan(value)
        self._pointed = threshold * share if share < _FEWER else None
        if self.phase is Phase.DESCENDING:
            self._descent = self._stride or max(_FIRST_DESCENT, _LONGER * self._descent)
        elif threshold < self.ceiling:
            self.phase = self._closing(may_challenge=self.phase is not Phase.CHALLENGING)

    def record_plan(self, value: float) -> None:
        """A plan from elsewhere."""
        if self.upper is None or value < self.upper:
            self.upper = value
        if self.phase is Phase.DOUBTING:
            self.phase = Phase.STEPPING

    def settle(self, value: float) -> None:
        """The plan preferred among the best takes so much: as much as these, but for rounding."""
        self.upper, self.lower = value, max(self.lower, value * (1.0 - PROOF))

    def forget(self) -> None:
        """All bounds but the first one: sums of many layers may have ruled out what is there."""
        self.lower = self._first

    def descend(self, stride: float = 0.0) -> None:
        """From the best plan. stride: how far each time, relative, if not from just below it on."""
        self.phase, self._descent, self._stride = Phase.DESCENDING, stride, stride

    def doubt(self) -> None:
        """A search that finds plans where there are some found none."""
        if self.upper is None:
            self.phase = Phase.DOUBTING

    def _closing(self, *, may_challenge: bool) -> Phase:
        return Phase.CHALLENGING if may_challenge and self.gap() < _NARROW else Phase.HALVING
