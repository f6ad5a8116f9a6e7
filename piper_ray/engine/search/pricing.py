"""Dual prices for a search, where they are worth their time: evaluations take long, and layers are hard to pack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from piper_ray.engine.evaluation.dual_prices import DualPrices, StageCover
from piper_ray.engine.evaluation.outcome import BUCKET_S, Outcome, work_s
from piper_ray.engine.kernels.buckets import BUCKET_SIZE
from piper_ray.engine.tables.problem import Problem

_TRIAL_ROUNDS, _FULL_ROUNDS = 3, 60

_SPENT = 10.0
"""So many trials evaluations must have been worth before there is one."""

_LARGE, _GROWING = 10.0, 300
"""One will do where a single evaluation may be worth so many, or none once so many downsets were live in one."""

_LOADING_S = 0.05
"""Of the kernels, the first time."""

_LIVE_SHARE = 0.2
"""Of what an evaluation of all downsets takes: expected until the first plan, after which they get cheaper."""

_WORTHWHILE = 0.4
"""Of the devices that work over threshold leaves over: a trial that takes fewer away is the last."""

_USELESS = 0.9
"""Of all downsets: where so many have states despite dual prices, these are not looked for again."""

_ASKED, _BOUND_ROUNDS, _CLOSE = 4, 30, 2e-3
"""Thresholds at which the lower bound is looked for, rounds at each, and how close (relative) is close."""

_PROOF = 1.0 + 1e-9


@dataclass
class Pricing:
    """check: may raise, to end it. What evaluations tested decides, and no clock: every run of a search is the same."""

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
        """An evaluation was made."""
        if self._worthwhile and not outcome.feasible and outcome.live_downsets > _USELESS * self._downsets:
            self._worthwhile, self._given_up = False, True
        self._latest_s = work_s(outcome.tested)
        self._spent_s += self._latest_s
        self._live = outcome.live_downsets
        self._settled = self._settled or outcome.feasible

    def start_anew(self) -> None:
        """Evaluations are far cheaper from now on: what they took tells nothing, nor how many downsets there are."""
        self._spent_s, self._latest_s, self._live, self._bounded = 0.0, 0.0, 0, True

    def lower_bound_s(self, threshold_s: float) -> float | None:
        """No plan is faster, by dual prices; None where they are not worth their time, and once it was asked for.

        threshold_s: what would be evaluated next.
        """
        if self._worthwhile or not self.wanted:
            return None
        if self._cover is None:
            self._cover = StageCover.of(self.problem)
            if self._cover is None:
                self._given_up = True
                return None
        if not self._is_due(self._cover.round_s) or not self._tried(self._cover, threshold_s):
            return None
        return self._bound_s(self._cover, threshold_s)

    def dual_prices(self, threshold_s: float) -> DualPrices | None:
        """For plans that keep the threshold; None where finding them would take longer than they save."""
        if not self._worthwhile or self._cover is None:
            return None
        expected_s = self._latest_s if self._settled else max(self._latest_s, _LIVE_SHARE * self._whole_s)
        rounds = int(expected_s / self._cover.round_s)
        if rounds < _TRIAL_ROUNDS:
            return self._last if self._last is not None and self._last.serves(threshold_s) else None
        self._last = self._find(self._cover, threshold_s, min(_FULL_ROUNDS, rounds))
        return self._last

    def _is_due(self, round_s: float) -> bool:
        """Whether a search that has spent so much on evaluations tries them, in rounds of ``round_s``."""
        trial_s = _LOADING_S + _TRIAL_ROUNDS * round_s
        is_large = not self._bounded and self._whole_s > _LARGE * trial_s
        if is_large and self._live >= _GROWING:
            return True
        return self._spent_s > trial_s * (1.0 if is_large else _SPENT)

    @property
    def _whole_s(self) -> float:
        """Of an evaluation in which every downset is live, roughly."""
        return self._downsets * (self._downsets / BUCKET_SIZE) * BUCKET_S

    @property
    def _downsets(self) -> int:
        return self.problem.workload.lattice.size

    def _tried(self, cover: StageCover, threshold_s: float) -> bool:
        """Whether a few rounds leave much less to waste than work alone does."""
        found = self._last = self._find(cover, threshold_s, _TRIAL_ROUNDS)
        devices = self.problem.cluster.devices
        by_work = float(self.problem.workload.sums.device_work_s[-1]) / threshold_s
        self._worthwhile = devices - found.devices <= (1.0 - _WORTHWHILE) * (devices - by_work)
        self._given_up = not self._worthwhile
        return self._worthwhile

    def _bound_s(self, cover: StageCover, threshold_s: float) -> float:
        devices = self.problem.cluster.devices
        # Evaluations took little so far, mostly: so may a bound, which seldom is near the best plan's time.
        rounds = min(_BOUND_ROUNDS, max(_TRIAL_ROUNDS, int(self._spent_s / (_ASKED * cover.round_s))))
        bound_s, self._last = bound_by_cover(cover, devices, threshold_s, self._last, self.check, rounds)
        return bound_s

    def _find(self, cover: StageCover, threshold_s: float, rounds: int) -> DualPrices:
        """Not from the last ones on: that takes no fewer rounds, and ends lower."""
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
