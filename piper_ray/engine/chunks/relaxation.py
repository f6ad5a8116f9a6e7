"""The bound of a case of a task: prices of paths, improved against the fractional plans that they lead to."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from piper_ray.engine.chunks.crossings import forced_transfers_s, rank_seconds, with_transfers
from piper_ray.engine.chunks.tasks import Task
from piper_ray.engine.kernels import chunk_bound
from piper_ray.engine.kernels.chunk_bound import FIGURE, FrequentKind, LayerKinds, Paths, Prices, ShapeLimits
from piper_ray.engine.kernels.chunk_prices import PriceSteps, better_prices, spread
from piper_ray.engine.kernels.chunk_program import PASSES, ChunkProgram, critical_path, simulate_chunks
from piper_ray.engine.kernels.types import FloatArray, IndexArray

_MOST_PATHS = 160
_SLOWER = 0.25
_MOST_MOMENTS = 24
"""Of a rank, that its memory is looked at."""
_ROUNDING = 1e-10
"""Relative: what sums of prices and seconds may be off."""


@dataclass(frozen=True)
class Case:
    """Which plans of a task are meant. hub: the chunk of the layer that many read; None: any.

    least_units, most_units: float64[p], of each rank, in units of time; None: any number.
    """

    hub: int | None = None
    least_units: FloatArray | None = None
    most_units: FloatArray | None = None


@dataclass
class _Prices:
    """Paths through the event graph so far, what they and the ranks' limits are priced, and the shares beside.

    weight: see ``better_prices``.
    """

    counts: FloatArray
    rank: IndexArray
    paths: int
    path: FloatArray
    memory: FloatArray
    units: FloatArray
    filled: FloatArray
    share: FloatArray
    weight: float = 1.0


@dataclass
class Relaxation:
    """``lower_s``: no batch of the case takes less; it rises. ``layers_in``: how many layers each chunk has in the last
    fractional plan, which keeps the limits only about."""

    task: Task
    case: Case
    program: ChunkProgram
    limits: ShapeLimits
    exact_kinds: LayerKinds
    kinds: LayerKinds
    unit: TimeUnit
    lower_s: float
    prices: _Prices
    layers_in: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        self._end_s = np.empty(self.program.kind.size + 1)
        self._target_s = np.inf
        self._hub = -1
        self._narrow()
        self.layers_in = self._count_layers(self.prices.share)

    @classmethod
    def of(cls, task: Task, program: ChunkProgram, target_s: float) -> Relaxation | None:
        """All plans of a task that take less than ``target_s``. None if none fits."""
        shape, d = task.shape, task.data_parallel_degree
        p = shape.ranks
        held, moment_rank = chunk_bound.moments(program, _MOST_MOMENTS)
        forced_s = forced_transfers_s(task, target_s)
        if np.isinf(forced_s):
            return None
        crossing_s = task.tables.crossing_s(program.rank_of)
        # All transfers together are as many as are forced, and those of each chunk as its borders make them.
        beside_s = max(0.0, forced_s - float(crossing_s.sum()))
        limits = ShapeLimits(
            crossing_s,
            held,
            moment_rank,
            program.rank_of,
            task.sync_s_per_byte,
            task.memory_bytes,
            np.zeros(p),
            np.full(p, chunk_bound.NO_LIMIT),
        )
        exact, kinds = (
            with_transfers(task.tables.kinds(shape.stages, d, rounded=rounded), beside_s, shape.stages)
            for rounded in (False, True)
        )
        none = Paths(np.zeros((0, shape.stages, PASSES)), np.zeros(0, np.int64))
        byte_each = Prices(
            np.zeros(0), 1.0 / np.bincount(moment_rank)[moment_rank], np.zeros(p), np.zeros(shape.stages)
        )
        # Every rank's least bytes together: above nothing if they are more than there are.
        if chunk_bound.least_priced_s(exact, limits, none, byte_each)[0] > 0.0:
            return None
        unit = TimeUnit.of(exact, task)
        exact = unit.told(exact, task)
        kinds = unit.told(kinds, task)
        prices = _Prices(
            np.zeros((_MOST_PATHS, shape.stages, PASSES)),
            np.zeros(_MOST_PATHS, np.int64),
            0,
            np.zeros(_MOST_PATHS),
            np.zeros(moment_rank.size),
            np.zeros(p),
            np.zeros(shape.stages),
            _even_shares(kinds),
        )
        found = cls(task, Case(), program, limits, exact, kinds, unit, task.lower_s, prices)
        found.aim(target_s)
        found._add_first_paths()
        return found

    def with_case(self, case: Case) -> Relaxation:
        """Fewer plans of the same task, beginning with the prices found so far."""
        limits, prices = _own(self.limits, "least_units", "most_units"), deepcopy(self.prices)
        exact, kinds = (_own(kinds, "first_chunk", "last_chunk") for kinds in (self.exact_kinds, self.kinds))
        found = replace(self, case=case, limits=limits, exact_kinds=exact, kinds=kinds, prices=prices)
        found.aim(self._target_s)
        return found

    def aim(self, target_s: float) -> None:
        """From now on only plans that take less than ``target_s`` matter: that limits what ranks hold."""
        self._target_s = target_s
        most = self.unit.most(self.task, self.limits.crossing_s, self.limits.rank_of, target_s)
        self.limits.most_units[:] = most if self.case.most_units is None else np.minimum(most, self.case.most_units)
        if self.case.least_units is not None:
            self.limits.least_units[:] = self.case.least_units

    def hub_chunks(self) -> range:
        """Those that the hub may be in; none without a hub."""
        for kind in np.flatnonzero(self.exact_kinds.side == chunk_bound.HUB).tolist():
            return range(int(self.exact_kinds.first_chunk[kind]), int(self.exact_kinds.last_chunk[kind]) + 1)
        return range(0)

    @property
    def hub_is_open(self) -> bool:
        return self.case.hub is None and len(self.hub_chunks()) > 1

    def cases(self) -> Iterator[Case]:
        """Cases that hold all plans of this one together; none if there are none worth telling apart.

        First the hub's chunk. Then: no rank has as many units as the best known plan would let it, or rank r has.
        """
        if self.hub_is_open:
            for chunk in self.hub_chunks():
                yield replace(self.case, hub=chunk)
        elif self.case.most_units is None and np.isfinite(self._target_s):
            most = self.limits.most_units.max()
            p = self.task.shape.ranks
            yield replace(self.case, most_units=np.full(p, most - 1.0), least_units=np.zeros(p))
            for rank in range(p):
                if self.limits.most_units[rank] >= most:
                    least = np.zeros(p)
                    least[rank] = most
                    yield replace(self.case, most_units=np.full(p, most), least_units=least)

    def try_single_paths(self) -> None:
        """Takes the path of one rank alone for all, where that gives a better bound.

        So it is where that rank has more to do than any other, and those are full.
        """
        if self.task.lower_s <= 0.0:
            return
        prices = self.prices
        found_s, best = self._evaluate(self._priced()), self._priced()
        for path in range(min(prices.paths, 2 * self.task.shape.ranks)):
            alone = Prices(np.zeros(prices.paths), prices.memory * 0.0, prices.units * 0.0, prices.filled * 0.0)
            alone.path[path] = 1.0
            self._price_full_ranks(alone)
            alone_s = self._evaluate(alone)
            if alone_s > found_s:
                found_s, best = alone_s, alone
        prices.path[: prices.paths] = best.path
        prices.memory, prices.units, prices.filled = best.memory, best.units, best.filled

    def improve(self, rounds: int) -> None:
        """Looks for better prices, and adds the longest paths of the fractional plan on the way."""
        if self.task.lower_s <= 0.0:
            return  # nothing takes any time
        prices = self.prices
        priced = self._priced()
        prices.weight = better_prices(
            self.kinds,
            self.limits,
            self._hub,
            self.paths,
            priced,
            prices.share,
            PriceSteps(self.task.lower_s, rounds, prices.weight),
        )
        found_s = self._evaluate(priced)
        full = priced._replace(units=priced.units.copy())
        self._price_full_ranks(full)
        if self._evaluate(full) > found_s:
            prices.units = full.units
        self.layers_in = self._count_layers(prices.share)
        held, _, _ = spread(self.kinds, self.limits, prices.share, self._hub)
        held[:, FIGURE.forward_s] += self.limits.crossing_s
        held[:, FIGURE.input_s] += self.limits.crossing_s
        self._make_room()
        self._add_paths(held)

    @property
    def paths(self) -> Paths:
        """Those found so far."""
        return Paths(self.prices.counts[: self.prices.paths], self.prices.rank[: self.prices.paths])

    def _priced(self) -> Prices:
        prices = self.prices
        return Prices(prices.path[: prices.paths], prices.memory, prices.units, prices.filled)

    def _evaluate(self, prices: Prices) -> float:
        """The bound of these prices, which may raise ``lower_s``."""
        found_s, self._hub = chunk_bound.least_priced_s(self.exact_kinds, self.limits, self.paths, prices)
        found_s = found_s * (1.0 - _ROUNDING)
        self.lower_s = max(self.lower_s, min(found_s, self._target_s))
        return found_s

    def _price_full_ranks(self, prices: Prices) -> None:
        if np.isfinite(self._target_s):
            chunk_bound.price_full_ranks(
                self.exact_kinds,
                self.limits,
                self._hub,
                self.paths,
                prices,
                FrequentKind(self.unit.first_option, self.unit.end_option, self.unit.layers),
                self.task.lower_s,
            )

    def _narrow(self) -> None:
        """Windows beside a hub whose chunk is given."""
        hub = self.case.hub
        if hub is None:
            return
        self._hub = hub
        for kinds in (self.exact_kinds, self.kinds):
            for kind in range(kinds.layers.size):
                kinds.first_chunk[kind], kinds.last_chunk[kind] = chunk_bound.window(kinds, kind, hub)
        self.prices.share = _even_shares(self.kinds)

    def _add_first_paths(self) -> None:
        """The path of each rank that has more to do than others, where all else is even."""
        held, _, _ = spread(self.kinds, self.limits, self.prices.share, -1)
        even = np.broadcast_to(held.mean(axis=0), held.shape)
        for rank in range(min(self.task.shape.ranks, _MOST_PATHS // 2 - 1)):
            slower = even.copy()
            slower[self.program.stage_of[rank]] *= 1.0 + _SLOWER
            self._add_paths(slower)
        self.prices.path[: self.prices.paths] = 1.0 / self.prices.paths

    def _add_paths(self, held: FloatArray) -> None:
        """The longest of what the chunks hold: two where there are several."""
        prices = self.prices
        weights = np.bincount(self.program.rank_of, held[:, FIGURE.weights], self.task.shape.ranks)
        sync_s = (weights * self.limits.sync_s_per_byte).astype(np.float64)
        simulate_chunks(self.program, held[:, FIGURE.forward_s : FIGURE.weight_s + 1], sync_s, self._end_s)
        for along_rank in (True, False):
            at = prices.paths
            if at == _MOST_PATHS:
                return
            prices.rank[at] = critical_path(self.program, sync_s, self._end_s, along_rank, prices.counts[at])
            if not any(np.array_equal(prices.counts[at], prices.counts[other]) for other in range(max(0, at - 16), at)):
                prices.path[at] = 0.0
                prices.paths += 1

    def _make_room(self) -> None:
        """Drops the paths of the least price, so that those of a look find room."""
        prices = self.prices
        if prices.paths + 2 <= _MOST_PATHS:
            return
        kept = np.sort(np.argsort(-prices.path[: prices.paths], kind="stable")[: _MOST_PATHS * 3 // 4])
        prices.paths = kept.size
        for values in (prices.counts, prices.rank, prices.path):
            values[: kept.size] = values[kept]

    def _count_layers(self, share: FloatArray) -> FloatArray:
        """Of each chunk, float64[s]."""
        found = np.zeros(self.task.shape.stages)
        at = 0
        for count, first, width, options in _windows(self.kinds):
            of_kind = share[at : at + width * options].reshape(width, options)
            found[first : first + width] += count * of_kind.sum(axis=1)
            at += width * options
        return found


R = TypeVar("R", LayerKinds, ShapeLimits)


def _own(record: R, *names: str) -> R:
    """With arrays of its own by these names."""
    return record._replace(**{name: getattr(record, name).copy() for name in names})


def _windows(kinds: LayerKinds) -> Iterator[tuple[int, int, int, int]]:
    """For each kind how many layers, their first chunk, how many chunks they may be in, and their options."""
    options = np.diff(kinds.option_start)
    width = np.maximum(0, kinds.last_chunk - kinds.first_chunk + 1)
    return zip(kinds.layers.tolist(), kinds.first_chunk.tolist(), width.tolist(), options.tolist(), strict=True)


def _even_shares(kinds: LayerKinds) -> FloatArray:
    """Each layer evenly over the chunks that it may be in, with its fastest option."""
    share = np.zeros(sum(width * options for _, _, width, options in _windows(kinds)))
    at = 0
    for _, _, width, options in _windows(kinds):
        share[at : at + width * options : options] = 1.0 / max(1, width)
        at += width * options
    return share


_A_LITTLE_LESS = 1.0 - 1e-9
"""Of what a layer takes: so that rounding leaves it a whole unit."""


@dataclass(frozen=True)
class TimeUnit:
    """What the most frequent layer takes of its rank for a microbatch, synchronisation included; 0 s if it takes none.

    first_option, end_option: its options, a unit each at least. layers: how many of its kind there are.
    """

    seconds: float
    first_option: int
    end_option: int
    layers: int

    @classmethod
    def of(cls, kinds: LayerKinds, task: Task) -> TimeUnit:
        """Layers are of one kind here that take and hold the same, wherever they may be."""
        alike: dict[bytes, tuple[int, int, int]] = {}
        ranges = zip(kinds.option_start[:-1].tolist(), kinds.option_start[1:].tolist(), strict=True)
        for (first, end), count in zip(ranges, kinds.layers.tolist(), strict=True):
            key = kinds.figures[first:end, : FIGURE.fixed].tobytes()
            start, stop, layers = alike.get(key, (first, end, 0))
            alike[key] = start, stop, layers + count
        first, end, layers = max(alike.values(), key=lambda found: (found[2], -found[0]))
        return cls(float(rank_seconds(kinds.figures, task)[first:end].min()) * _A_LITTLE_LESS, first, end, layers)

    def told(self, kinds: LayerKinds, task: Task) -> LayerKinds:
        """The kinds with their options' whole units."""
        if self.seconds <= 0.0:
            return kinds
        return kinds._replace(units=np.floor(rank_seconds(kinds.figures, task) / self.seconds))

    def most(self, task: Task, crossing_s: FloatArray, rank_of: IndexArray, target_s: float) -> FloatArray:
        """float64[p]: the most that a rank can have in plans that take less than ``target_s``."""
        p = task.shape.ranks
        if self.seconds <= 0.0 or not np.isfinite(target_s):
            return np.full(p, chunk_bound.NO_LIMIT)
        room_s = target_s / task.shape.microbatches - np.bincount(rank_of, 2.0 * crossing_s, p)
        found: FloatArray = np.floor(room_s / self.seconds)
        return found
