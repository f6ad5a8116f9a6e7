"""Decides when dual prices are worth their time: if evaluations take long and layers are hard to pack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from piper_ray.engine.evaluation.dual_prices import DualPrices, StageCover
from piper_ray.engine.evaluation.outcome import BUCKET_S, Outcome, work_s
from piper_ray.engine.kernels.buckets import BUCKET_SIZE
from piper_ray.engine.tables.problem import Problem

_TRIAL_ROUNDS, _FULL_ROUNDS = 3, 60

_SPENT = 10.0
"""Evaluations must have taken the time of this many trials before the first trial."""

_LARGE, _GROWING = 10.0, 300
"""A trial is made early if an evaluation of all downsets would take the time of this many trials, and the last one had
at least this many downsets with states."""

_LOADING_S = 0.05
"""Time to load the kernels for the first time."""

_LIVE_SHARE = 0.2
"""Share of the time for all downsets that an evaluation is expected to take before the first plan; later ones are
cheaper."""

_WORTHWHILE = 0.4
"""Least share of the devices left over after all work that dual prices must take away; otherwise no more are sought."""

_USELESS = 0.9
"""If an infeasible evaluation with dual prices has states in more than this share of all downsets, no more are
sought."""

_ASKED, _BOUND_ROUNDS, _CLOSE = 4, 30, 2e-3
"""The number of thresholds tried for the lower bound, rounds for each, and the relative distance at which it ends."""

_PROOF = 1.0 + 1e-9


@dataclass
class Pricing:
    """Finds dual prices for a search. check: may raise, to end it.

    The decisions depend on counts of work and not on a clock, so every run of a search is the same.
    """

    problem: Problem
    check: Callable[[], None]
    _spent_s: float = 0.0
    _latest_s: float = 0.0
    _live: int = 0
    _settled: bool = False
    _bounded: bool = False
    _given_up: bool = False
    _cover: StageCover | None = None
    _last: DualPrices | None = None
    _worthwhile: bool = False

    @property
    def wanted(self) -> bool:
        """Whether dual prices are in use, or are to be tried next."""
        return self._worthwhile or (not self._given_up and self._is_due(self._round_s))

    @property
    def _round_s(self) -> float:
        return StageCover.least_round_s(self.problem) if self._cover is None else self._cover.round_s

    def record(self, outcome: Outcome) -> None:
        """Records an evaluation."""
        if self._worthwhile and not outcome.feasible and outcome.live_downsets > _USELESS * self._downsets:
            self._worthwhile, self._given_up = False, True
        self._latest_s = work_s(outcome.tested)
        self._spent_s += self._latest_s
        self._live = outcome.live_downsets
        self._settled = self._settled or outcome.feasible

    def start_anew(self) -> None:
        """Forgets the work of past evaluations: from now on evaluations are far cheaper, whatever the number of
        downsets."""
        self._spent_s, self._latest_s, self._live, self._bounded = 0.0, 0.0, 0, True

    def cover(self) -> StageCover | None:
        """Returns the cover of the layers by stages, made at the first call; None if they are too entangled."""
        if self._cover is None and not self._given_up:
            self._cover = StageCover.of(self.problem)
            self._given_up = self._cover is None
        return self._cover

    def lower_bound_s(self, threshold_s: float) -> float | None:
        """Returns a lower bound on all plans by dual prices; None if they are not worth their time, or were already
        tried.

        threshold_s: the threshold that would be evaluated next.
        """
        if self._worthwhile or not self.wanted:
            return None
        cover = self.cover()
        if cover is None or not self._is_due(cover.round_s) or not self._tried(cover, threshold_s):
            return None
        return self._bound_s(cover, threshold_s)

    def dual_prices(self, threshold_s: float) -> DualPrices | None:
        """Returns dual prices for plans that keep the threshold; None if finding them would take longer than they
        save."""
        if not self._worthwhile or self._cover is None:
            return None
        expected_s = self._latest_s if self._settled else max(self._latest_s, _LIVE_SHARE * self.whole_s)
        rounds = int(expected_s / self._cover.round_s)
        if rounds < _TRIAL_ROUNDS:
            return self._last if self._last is not None and self._last.serves(threshold_s) else None
        self._last = self._find(self._cover, threshold_s, min(_FULL_ROUNDS, rounds))
        return self._last

    def _is_due(self, round_s: float) -> bool:
        """Whether enough time has been spent on evaluations to try dual prices, at ``round_s`` seconds a round."""
        trial_s = _LOADING_S + _TRIAL_ROUNDS * round_s
        is_large = not self._bounded and self.whole_s > _LARGE * trial_s
        if is_large and self._live >= _GROWING:
            return True
        return self._spent_s > trial_s * (1.0 if is_large else _SPENT)

    @property
    def whole_s(self) -> float:
        """Rough time of an evaluation in which every downset has states."""
        return self._downsets * (self._downsets / BUCKET_SIZE) * BUCKET_S

    @property
    def _downsets(self) -> int:
        return self.problem.workload.lattice.size

    def _tried(self, cover: StageCover, threshold_s: float) -> bool:
        """Whether a few rounds of dual prices show that plans can waste far fewer devices than the work alone shows."""
        found = self._last = self._find(cover, threshold_s, _TRIAL_ROUNDS)
        devices = self.problem.cluster.devices
        by_work = float(self.problem.workload.sums.device_work_s[-1]) / threshold_s
        self._worthwhile = devices - found.devices <= (1.0 - _WORTHWHILE) * (devices - by_work)
        self._given_up = not self._worthwhile
        return self._worthwhile

    def _bound_s(self, cover: StageCover, threshold_s: float) -> float:
        devices = self.problem.cluster.devices
        # Evaluations mostly took little time so far. So the bound may take little too: it is seldom near the best
        # plan's time.
        rounds = min(_BOUND_ROUNDS, max(_TRIAL_ROUNDS, int(self._spent_s / (_ASKED * cover.round_s))))
        bound_s, self._last = bound_by_cover(cover, devices, threshold_s, self._last, self.check, rounds)
        return bound_s

    def _find(self, cover: StageCover, threshold_s: float, rounds: int) -> DualPrices:
        """Returns new dual prices. They do not start from the last ones: that takes no fewer rounds and gives lower
        values."""
        enough = self.problem.cluster.devices * _PROOF
        return cover.dual_prices(threshold_s, until=enough, rounds=rounds, check=self.check)

    def rules_out(self, dual_prices: DualPrices | None) -> bool:
        """Whether no plan keeps the dual prices' threshold."""
        return dual_prices is not None and dual_prices.devices > self.problem.cluster.devices * _PROOF


def bound_by_cover(
    cover: StageCover,
    devices: int,
    threshold_s: float,
    start: DualPrices | None,
    check: Callable[[], None],
    rounds: int = _BOUND_ROUNDS,
    record: Callable[[float], None] = lambda _: None,
) -> tuple[float, DualPrices]:
    """No plan is faster (0 if nothing was found), and the last dual prices. Begins at ``threshold_s``.

    Devices are about inverse to the threshold: that points to where all of them are needed. record: gets each bound
    as it is proved.
    """
    bound_s, last = 0.0, start
    for _ in range(_ASKED):
        last = cover.dual_prices(threshold_s, start=last, rounds=rounds, check=check)
        ratio = last.devices / devices
        if ratio > _PROOF:
            bound_s = threshold_s
            record(bound_s)
        if abs(ratio - 1.0) < _CLOSE and bound_s > 0.0:
            break
        threshold_s = max(bound_s, threshold_s * ratio * (1.0 - 0.5 * _CLOSE))
    assert last is not None
    return bound_s, last
