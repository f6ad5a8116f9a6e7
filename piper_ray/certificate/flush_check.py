"""Checks whether a certificate proves its bound under a schedule with a flush.

All stages of such a plan have one d and one t, so each pair of these is checked separately. Nothing has to be proved of
a pair if some layer cannot run, or its work alone takes as long as the bound. For other pairs the certificate may have
prices: of seconds of passes, as a mean of paths through the passes (``passes``), and of bytes held at passes. Each
stage holds no more than the memory. So every plan takes at least the sum over the layers, each with the choice and at
the stage where it costs least, minus the price of all memory. This holds for any prices, whoever found them.

Under 1f1b and gpipe a pipeline with fewer stages is one with empty stages in front: an empty stage passes a microbatch
on once it has it and has begun no more than it may, and the stage behind it may begin fewer; so it delays nothing. One
set of prices covers all numbers of stages. Plans that prices do not rule out are enumerated, tail by tail and then plan
by plan, over all tails of the workload (``kernels.flush_plans``).

Under schedules with chunks there are only prices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from piper_ray.certificate.certificate import Certificate, PassPrices, charged, free_bytes, levels_of, ways_of
from piper_ray.certificate.flush_tables import FlushTails, OnDegrees, StagePrices, least_priced_s, pairs_of, shape_of
from piper_ray.certificate.kernels.flush_plans import look_through
from piper_ray.certificate.kernels.flush_states import ENDED, FOUND, PROVED, TOO_MANY, Lookup
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import CertificateRefused, UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import FLUSHED, Schedule, StepTerms
from piper_ray.model.stop import Stop
from piper_ray.simulate.actions import check_shape

_BYTES_OF_FIGURES = 8
_MOST_DOWNSETS = 300_000
"""Largest number of downsets to enumerate: more need too many comparisons, unless prices leave almost none."""

_MOST_LOOKS = 64
"""Largest number of enumerations for a pair in which rates of edges depend on where their ends are."""

_LOOK_S = 0.1
"""Seconds between two checks for a request to stop."""

Key = tuple[int, int, int, int, int]
"""Devices, d, t, ranks and chunks of a set of prices."""


@dataclass(frozen=True)
class Counts:
    """pairs: of d and t that a plan may have. by_prices: those settled by prices or work alone. downsets, tails: of the
    enumerated pairs; tails counts states."""

    pairs: int = 0
    by_prices: int = 0
    downsets: int = 0
    tails: int = 0


@dataclass
class FlushProblem:
    """All plans of an instance under one schedule, pair by pair. schedule: with its chunks."""

    instance: Instance
    restrictions: Restrictions
    schedule: Schedule
    step: StepTerms
    _tails: dict[int, FlushTails] = field(default_factory=dict)

    def pairs(self) -> list[OnDegrees]:
        """Returns the pairs on each group of devices with a link of its own, and on all devices."""
        found: list[OnDegrees] = []
        for level in levels_of(charged(self.instance, self.restrictions)):
            ways = ways_of(level, self.restrictions)
            degrees = self.restrictions.data_parallel_degrees(level)
            found += pairs_of(level, self.schedule, self.step, ways, degrees)
        return [pair for pair in found if pair.is_possible]

    @property
    def is_whole(self) -> bool:
        """Whether tails and plans can be enumerated."""
        return self.schedule.name in FLUSHED

    def tails_of(self, pair: OnDegrees) -> FlushTails:
        """Returns the tails. Raises LimitError if the downsets do not fit in memory."""
        devices = pair.instance.devices
        if devices not in self._tails:
            neighbours = len({*range(len(pair.degrees)), *(x for own in pair.ranks_of_kind for x in own.borders)}) ** 2
            figures = 40 * (len(pair.ways) * neighbours + 1) + 2 * pair.most_ranks
            fit = max(2, int(free_bytes() / (_BYTES_OF_FIGURES * figures)))
            self._tails[devices] = FlushTails(pair.instance, pair.layers, min(_MOST_DOWNSETS, fit))
        return self._tails[devices]

    def look(
        self, pair: OnDegrees, prices: StagePrices | None, limit_s: float, control: Any
    ) -> tuple[int, float, Counts]:
        """Searches the tails and plans of a pair for a plan that takes at most the limit, as ``look_through`` does.

        If rates depend on the kinds of devices at the ends of edges that skip stages, a plan found at the fastest rates
        may not exist: then the plans with an open end on each kind are searched separately.
        """
        tails, looks, total = self.tails_of(pair), 0, 0
        left = [(np.inf, pair)]  # each with a bound on its plans
        while left:
            (_, part), looks = left.pop(), looks + 1
            tables, order, open_ends = tails.of(part)
            search = Lookup(tables, shape_of(part, limit_s), tails.priced(part, prices, order))
            status, least_s, states = look_through(search, control)
            total += int(states)
            if status == PROVED:
                continue
            if status == ENDED or not open_ends or looks >= _MOST_LOOKS or least_s == 0.0:
                code = TOO_MANY if status == FOUND and open_ends else int(status)
                return (
                    code,
                    float(min(least_s, *(bound_s for bound_s, _ in left), np.inf)),
                    Counts(1, 0, tails.size, total),
                )
            parts = [part.on_kind(open_ends[0], kind) for kind in pair.instance.cluster.kind_names]
            left += [(least_s, x) for x in parts if x.is_possible]
        return PROVED, limit_s, Counts(1, 0, tails.size, total)


def batch_limit_s(instance: Instance, step: StepTerms, bound_s: float) -> float:
    """Returns the limit on a batch's passes and synchronisation if a microbatch takes ``bound_s`` with its share of the
    optimizer."""
    return bound_s * instance.microbatches - step.optimizer_s


def shapes_of(pair: OnDegrees) -> list[int]:
    """Returns the numbers of ranks that need prices: under 1f1b and gpipe one set covers all."""
    if pair.schedule.name in FLUSHED:
        return [pair.most_ranks]
    return [ranks for ranks in range(1, pair.most_ranks + 1) if _can_run(pair, ranks)]


def _can_run(pair: OnDegrees, ranks: int) -> bool:
    try:
        check_shape(pair.schedule, ranks, pair.microbatches)
    except UsageError:
        return False
    return True


def least_on_ranks(pair: OnDegrees, ranks: int) -> float:
    """Returns a lower bound on a batch on ``ranks`` ranks: some rank has its share of all work."""
    return max(pair.least_s, pair.work_s * pair.microbatches / ranks)


def proved_by(prices: StagePrices, pair: OnDegrees) -> float:
    """Returns the bound on a batch that the prices prove; inf if the prices of memory alone prove that no plan fits."""
    return np.inf if least_priced_s(pair, prices.of_memory_alone) > 0.0 else least_priced_s(pair, prices)


def check_flush(instance: Instance, certificate: Certificate, threads: int, stop: Stop[Any]) -> Counts:
    """Checks a certificate under a flush. Raises CertificateRefused if a plan may be faster, LimitError if more tails
    occur than fit in memory."""
    problem = FlushProblem(instance, certificate.restrictions, certificate.schedule, certificate.step)
    limit_s = batch_limit_s(instance, certificate.step, certificate.bound_s)
    known = {_key(prices): prices for prices in certificate.prices}
    if limit_s <= 0.0 or certificate.bound_s == 0.0:
        return Counts()
    pairs = problem.pairs()
    left: list[tuple[OnDegrees, StagePrices | None]] = []
    for pair in pairs:
        stop.check()
        if pair.least_s >= limit_s:
            continue
        is_proved, prices = _by_prices(pair, known, limit_s)
        if not is_proved:
            left.append((pair, prices))
    control = np.zeros(1)

    def look(number: int) -> Counts:
        pair, prices = left[number]
        status, _, counts = problem.look(pair, prices, limit_s, control)
        if status != PROVED:
            raise CertificateRefused(_unproved(pair, status))
        return counts

    for pair, _ in left:
        problem.tails_of(pair)
    found = in_threads(look, len(left), threads, stop, control)
    downsets, tails = max((x.downsets for x in found), default=0), sum(x.tails for x in found)
    return Counts(len(pairs), len(pairs) - len(left), downsets, tails)


def _by_prices(pair: OnDegrees, known: Mapping[Key, PassPrices], limit_s: float) -> tuple[bool, StagePrices | None]:
    """Whether the prices prove the limit; and the prices for the enumeration of tails, if any. Raises
    CertificateRefused if tails cannot prove it either."""
    for ranks in shapes_of(pair):
        given = known.get((pair.instance.devices, pair.data_parallel_degree, pair.degrees[0], ranks, pair.schedule.v))
        prices = None if given is None else StagePrices.of(pair, given)
        if prices is not None and proved_by(prices, pair) >= limit_s:
            continue
        if pair.schedule.name in FLUSHED:
            return False, prices
        if least_on_ranks(pair, ranks) < limit_s:
            raise CertificateRefused(f"the certificate does not prove its bound for {_words(pair)} on {ranks} ranks")
    return True, None


def _key(prices: PassPrices) -> Key:
    return prices.devices, prices.data_parallel_degree, prices.degree, prices.ranks, prices.chunks


def _words(pair: OnDegrees) -> str:
    names = pair.instance.cluster.kind_names
    of_kinds = [f"t = {t}{f' on {name}' if name else ''}" for name, t in zip(names, pair.degrees, strict=True) if t > 0]
    return f"d = {pair.data_parallel_degree} and {', '.join(of_kinds)}"


def _unproved(pair: OnDegrees, status: int) -> str:
    if status == FOUND:
        return f"the certificate does not prove its bound: a plan with {_words(pair)} is faster"
    return f"the certificate does not prove its bound: with {_words(pair)} there are too many plans to look through"


def in_threads(look: Callable[[int], Any], count: int, threads: int, stop: Stop[Any], control: Any) -> list[Any]:
    """Returns look(0) .. look(count - 1). If one raises or the stop is requested, control[0] tells the others to
    end."""
    with ThreadPoolExecutor(threads) as pool:
        futures: list[Future[Any]] = [pool.submit(look, number) for number in range(count)]
        try:
            pending = set(futures)
            while pending:
                stop.check()
                done, pending = wait(pending, _LOOK_S, FIRST_COMPLETED)
                for one in done:
                    one.result()
        except BaseException:
            control[0] = 1.0
            for one in futures:
                one.cancel()
            raise
    return [one.result() for one in futures]
