"""Decides which threshold to try next. It uses no clock, so every run tries the same thresholds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from piper_ray.cost.tolerances import PROOF, RESOLUTION
from piper_ray.engine.ledger import Inexact
from piper_ray.model.figures import relative_gap

_FIRST_STEP = 0.0025
_LAST_STEP = 5.0
_CHAIN_QUALITY = 0.75  # the best plan on a chain is seldom further from the best of all
_NARROW = 0.01
_FEWER = 0.99
_OFF = 1e-8  # relative: far more than a plan differs from its threshold by rounding
_FIRST_DESCENT = 4e-4
_LONGER = 4.0

_QUICKLY = 4.0
"""Factor by which steps grow if evaluations report how far their states reached."""

_FURTHER, _STILL_FURTHER = 0.05, 1.5
"""Near the optimum a feasible evaluation takes little longer than an infeasible one, and its result is worth more. So a
step ends this share above the estimated optimum, and this factor more each time the estimate falls short."""


class Phase(Enum):
    """How a bracket closes.

    DOUBTING: there may be no plan, so the ceiling is tried first; the phase ends with the first plan.
    STEPPING: an evaluation near the lower bound is cheap, because stages may waste little. So thresholds rise from
    below by 0.25 %, 0.5 %, 1 %, ..., until one is feasible. If a chain's plan is far above the bound, thresholds start
    at 3/4 of its value. Once the step is large, the ceiling is tried, to see whether there is a plan at all. If
    evaluations report how far their states reached, steps grow fourfold and end a little above the threshold at which
    the states would reach all layers.
    HALVING: halves the bracket, once a step was feasible.
    CHALLENGING: tries a threshold just below the best plan, where an infeasible evaluation ends the search. Below a gap
    of 1 % it alternates with HALVING.
    DESCENDING: starts from a plan that is likely to be near the best. Tries just below it, then 0.04 %, 0.16 %, 0.64 %,
    ... below each new plan, until a threshold is infeasible; or one stride below each new plan.
    """

    DOUBTING = auto()
    STEPPING = auto()
    HALVING = auto()
    CHALLENGING = auto()
    DESCENDING = auto()


@dataclass
class Bracket:
    """The single case of a search for a threshold (``ledger.OpenCase``).

    lower: the largest value proved infeasible, or a bound. upper: the best plan's value; None before there is one.
    ceiling: no plan is slower than this. work: the time that all layers take if nothing is wasted; 0 if evaluations do
    not report how far their states reached.

    If a plan leaves devices unused, the time it would take on all of them is tried next, in all phases but CHALLENGING
    and DESCENDING.
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
        """The value that no plan is below; inf: there is no plan. The value of a closed bracket does not depend on the
        thresholds that were tried.
        """
        if self.exhausted:
            return float("inf")
        return max(self._first, self.upper * (1.0 - PROOF)) if self.closed and self.upper is not None else self.lower

    def gap(self) -> float:
        return float("inf") if self.upper is None else relative_gap(self.upper, self.lower)

    def is_done(self, gap: float = 0.0) -> bool:
        """Whether no threshold is left to try: the bracket is closed, exhausted, or no wider than ``gap``."""
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
        """Records that no plan keeps the threshold. reach: the largest share of all work that a state had."""
        if self._asks_how_far:
            self._step_further(threshold, reach)
            return
        strode = self.phase is Phase.DESCENDING and self._stride > 0.0
        if self.upper is not None and self.lower < _CHAIN_QUALITY * self.upper <= threshold:
            self.phase = Phase.HALVING  # the small steps were for the previous lower bound
        self.lower = max(self.lower, threshold)
        self._pointed = None
        self._step *= 2.0
        if self.phase in (Phase.HALVING, Phase.CHALLENGING, Phase.DESCENDING):
            # An evaluation far below a plan is quick, and so is one halfway; one just below the plan is not.
            self.phase = self._closing(may_challenge=not strode)

    def _step_further(self, threshold: float, reach: float) -> None:
        """Estimates the next threshold from ``reach``.

        States end when they have wasted all that the threshold leaves to waste. If the remaining work wastes the same
        share, this tells how much must be wasted to reach all layers.
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
        """Records a bound for all plans. It is close, so steps above it begin small."""
        if value > self.lower:
            self.record_infeasible(value)
            self._step = _FIRST_STEP

    def record_feasible(self, threshold: float, value: float, share: float = 1.0) -> None:
        """Records a plan of ``value`` from an evaluation at ``threshold``, which uses ``share`` of the devices.

        Time is about inverse to devices: on all of them the same work would take ``share`` of the threshold. Raises
        Inexact if the plan takes longer than the threshold, because sums over layers are inexact.
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
        """Records a plan that did not come from an evaluation of this bracket."""
        if self.upper is None or value < self.upper:
            self.upper = value
        if self.phase is Phase.DOUBTING:
            self.phase = Phase.STEPPING

    def settle(self, value: float) -> None:
        """Takes the value of the preferred plan, which differs from the best value only by rounding."""
        self.upper, self.lower = value, max(self.lower, value * (1.0 - PROOF))

    def forget(self) -> None:
        """Drops all bounds but the first: inexact sums of many layers may have ruled out plans wrongly."""
        self.lower = self._first

    def descend(self, stride: float = 0.0) -> None:
        """Starts DESCENDING from the best plan. stride: relative distance below each plan; 0: the growing steps of
        DESCENDING."""
        self.phase, self._descent, self._stride = Phase.DESCENDING, stride, stride

    def challenge(self) -> None:
        """Starts CHALLENGING from a plan that is likely to be the best."""
        self.phase = Phase.CHALLENGING

    def doubt(self) -> None:
        """Starts DOUBTING if there is no plan: a quick search that usually finds plans found none."""
        if self.upper is None:
            self.phase = Phase.DOUBTING

    def _closing(self, *, may_challenge: bool) -> Phase:
        return Phase.CHALLENGING if may_challenge and self.gap() < _NARROW else Phase.HALVING
