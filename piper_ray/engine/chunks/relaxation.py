"""The bound of a case of a task: the prices of the linear program of its shares.

The program grows by the longest paths of the fractional plans that it leads to. Where the hub's chunk is given, plans
are divided by counts of layers in the same program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import comb
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from piper_ray.cost.products import dot
from piper_ray.engine.chunks.crossings import (
    ChunkTransfers,
    TowerPieces,
    forced_transfers_s,
    further_beside_hub,
    least_of_ranks_s,
    rank_seconds,
    transfers_beside_hub,
    with_transfers,
    without_hub,
)
from piper_ray.engine.chunks.layer_counts import LayerCounts, counted_kinds
from piper_ray.engine.chunks.memory_seconds import fastest_options
from piper_ray.engine.chunks.rank_cover import RankCover, waits_s
from piper_ray.engine.chunks.rank_patterns import (
    STEP,
    LayerPositions,
    LayerRuns,
    PatternSearch,
    RankPatterns,
    between,
    placed,
)
from piper_ray.engine.chunks.similar_kinds import similar
from piper_ray.engine.chunks.tasks import Task
from piper_ray.engine.chunks.time_unit import TimeUnit
from piper_ray.engine.kernels import chunk_bound
from piper_ray.engine.kernels.chunk_bound import FIGURE, Costs, LayerKinds, Paths, Prices, ShapeLimits
from piper_ray.engine.kernels.chunk_program import PASSES, ChunkProgram, longest_paths, simulate_chunks
from piper_ray.engine.kernels.types import FloatArray, IndexArray

if TYPE_CHECKING:
    from piper_ray.engine.chunks.share_program import Basis, FractionalPlan, ShareProgram

_MOST_PATHS = 200
"""The most paths that a relaxation keeps from one turn to the next."""

_SLOWER = 0.25
_NEAR = 1e-4
"""Relative: a path that exceeds the batch by no more than this is not added; parts this near to 0 or 1 are whole."""

_BETWEEN = 0.0, 0.25, 0.5, 1.0
"""Paths are added that are long in plans at these parts of the way from the mean of all plans so far to the last
one."""

_FEW_ROUNDS = 5
_LITTLE = 0.01
"""Where this many rounds gain less than this part of the distance to the target, the search pauses them."""

_MOST_SETS = 100
"""The most sets of ranks that may have a tower by which plans are divided."""

_LITTLE_OF_TOWER = 0.1
"""Where one more piece of a tower raises the bound by less than this part of the distance to the target, its ranks do
not divide plans."""

_MOST_MOMENTS = 24
"""The most moments of a rank at which its memory is counted."""

_MOST_SPLITS = 40
"""The most splits of cases, one inside the other."""

_ROUNDS_OF_A_RANK = 4
"""Rounds that find out how many units a rank may have."""

_ROUNDS_OF_A_PART, _FURTHER_ROUNDS = 4, 16
"""The most rounds of a new part of plans that are divided by counts of layers, and of another effort for it."""

_ENOUGH = 0.5
"""A new part has no further rounds if its bound has risen by this part of the distance to the target."""

_LITTLE_OF_A_PART = 0.1
"""As ``_LITTLE``, of such a part: it is divided then."""

_STALLED = 0.05
"""Where counts of layers raise a bound by less than this part of the distance to the target, they divide no more."""

_MOST_COUNTED = 8
"""The most efforts that divide plans by counts of layers."""

_WHOLE = 1e-3
"""A number of units this near to a whole number counts as whole."""

_MOST_KINDS, _FEW_KINDS, _MOST_CELLS = 64, 10, 600
"""More kinds of layers than this are put together for prices, to groups times chunks of about the last number."""

_OF_A_CASE = "least_units", "most_units"
"""Limits that differ from case to case."""

_ROUNDING = 1e-10
"""Relative: the largest error of sums of prices and seconds."""


@dataclass(frozen=True)
class Case:
    """Says which plans of a task belong to the case. hub: the chunk of the layer that many others read; None: any
    chunk.

    least_units, most_units: float64[p], of each rank, in units of time; None: any number. splits: how often the plans
    were divided by these.

    pieces: the least number of pieces of the dearest tower, which are on ranks one after the other. further_s: what it
    sends and receives then, beyond what it does in all plans. tower, ranks: its layers, and those ranks that may have
    them, if these are not all.
    """

    hub: int | None = None
    least_units: FloatArray | None = None
    most_units: FloatArray | None = None
    splits: int = 0
    pieces: int = 1
    further_s: float = 0.0
    tower: Sequence[int] = ()
    ranks: tuple[int, ...] = ()


class _CountedPart(NamedTuple):
    """Plans with these counts of layers: none takes less than ``lower_s``. layers_in: as in ``Relaxation``. is_best:
    whether further rounds raise the bound by little or nothing."""

    lower_s: float
    counts: LayerCounts
    layers_in: FloatArray | None = None
    is_best: bool = False


@dataclass
class Relaxation:
    """``lower_s``: no batch of the case takes less; it rises. kinds: the merged kinds, for which prices are sought;
    members: their layers. waits_s: float64[2, p], as in ``WalkBounds``. uncounted_s: the least time of all transfers
    together, less the part that is counted with the chunks. merged: int64[exact kinds], the merged kind of each.

    counts, rank: of the paths through the event graph so far, as in ``Paths``. layers_in, units: how many layers of
    each kind each chunk has, float64[kinds, s], and units of time of each rank, in the last fractional plan, which
    keeps the limits only roughly. is_best: whether no other prices are better for the target. worked: iterations of its
    linear programs so far, times their rows. basis: the start of the next program. by_rank: the search that replaces
    them where ranks have few patterns. by_counts: the search by patterns of numbers of layers, while it goes on;
    may_list_counts: whether it may begin or go on. tried: the most steps in which patterns were sought in vain. priced:
    the last prices that were sought.
    """

    task: Task
    case: Case
    program: ChunkProgram
    limits: ShapeLimits
    exact_kinds: LayerKinds
    kinds: LayerKinds
    members: list[IndexArray]
    merged: IndexArray
    uncounted_s: float
    unit: TimeUnit
    waits_s: FloatArray
    lower_s: float
    may_list: bool
    counts: list[FloatArray] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    layers_in: FloatArray | None = None
    units: FloatArray | None = None
    is_best: bool = False
    worked: int = 0
    basis: Basis | None = None
    by_rank: PatternSearch | None = None
    tried: int = 0
    priced: tuple[Costs, Prices] | None = None
    parts: list[_CountedPart] | None = None
    are_best: bool = False
    counted: int = 0
    by_counts: PatternSearch | None = None
    may_list_counts: bool = True

    def __post_init__(self) -> None:
        self.target_s = np.inf
        self._narrow()
        self._count_transfers()
        self._exclude()
        self._look_up_paths()

    @classmethod
    def of(cls, task: Task, program: ChunkProgram, target_s: float, lower_s: float = 0.0) -> Relaxation | None:
        """The relaxation of all plans of a task that take less than ``target_s``. None if no plan fits. lower_s: a
        bound that is known."""
        shape, d = task.shape, task.data_parallel_degree
        held, moment_rank = chunk_bound.moments(program, _MOST_MOMENTS)
        crossing_s = task.tables.crossing_s(program.rank_of).sum(axis=0)
        limits = ShapeLimits(
            crossing_s,
            held,
            moment_rank,
            program.rank_of,
            task.sync_s_per_byte,
            task.memory_bytes,
            np.zeros(shape.ranks),
            np.full(shape.ranks, chunk_bound.NO_LIMIT),
        )
        stages = shape.stages
        (exact, parts), (kinds, members) = (task.tables.kinds(d, stages, merged=merged) for merged in (False, True))
        waits = waits_s(kinds, limits, program)
        lower_s, may_list, forced_s = max(task.lower_s, lower_s), kinds.layers.size <= _MOST_KINDS, 0.0
        if may_list:  # else the layers of one kind are few
            lower_s = RankCover.of(kinds, limits, program, waits).least_s(lower_s, target_s)
        if not may_list and task.tables.rank_transfers is not None:
            # Sets know the hub's edges better than the hub's chunk does: where the layers that read it are small, these
            # are all next to it, but what they send is not.
            exact, kinds = without_hub(exact), without_hub(kinds)
            forced_s = least_of_ranks_s(task, target_s)
        elif lower_s < target_s:
            forced_s = forced_transfers_s(task, target_s)
        if np.isinf(forced_s):
            forced_s, lower_s = 0.0, target_s  # no plan is quick enough
        # All transfers together are as many as are forced, and those of each chunk as its borders make them.
        uncounted_s = forced_s - float(crossing_s.sum())
        merged_of = np.empty(task.tables.order.size, np.int64)
        for kind, positions in enumerate(members):
            merged_of[positions] = kind
        merged = merged_of[[part[0] for part in parts]]
        if not may_list:
            kinds, members = similar(kinds, members, max(_FEW_KINDS, _MOST_CELLS // shape.stages))
        unit = TimeUnit.of(exact, task)
        none = Paths(np.zeros((0, shape.stages, PASSES)), np.zeros(0, np.int64))
        byte_each = 1.0 / np.bincount(moment_rank)[moment_rank]
        nothing = Prices(np.zeros(0), byte_each, np.zeros(shape.ranks), np.zeros(stages), np.zeros((0, stages)))
        # Every rank's least bytes together: above nothing if they are more than there are.
        if chunk_bound.least_priced_s(exact, limits, none, nothing)[0] > 0.0:
            return None
        exact, kinds = (unit.told(one, task) for one in (exact, kinds))
        waits += 2.0 * program.microbatches * np.bincount(program.rank_of, crossing_s, shape.ranks)
        known = uncounted_s, unit, waits, lower_s, may_list
        found = cls(task, Case(), program, limits, exact, kinds, members, merged, *known)
        found.aim(target_s)
        if not found._is_over:
            found._add_first_paths()
        return found

    def copy(self) -> Relaxation:
        """Returns a copy with prices, paths and limits of its own."""
        limits = _own(self.limits, *_OF_A_CASE)
        by_rank = None if self.by_rank is None else self.by_rank.copy()
        parts = None if self.parts is None else [*self.parts]
        by_counts = None if self.by_counts is None else self.by_counts.copy()
        found = replace(
            self,
            limits=limits,
            counts=[*self.counts],
            rank=[*self.rank],
            by_rank=by_rank,
            parts=parts,
            by_counts=by_counts,
        )
        found.target_s = self.target_s
        return found

    def with_case(self, case: Case) -> Relaxation:
        """Returns the relaxation of fewer plans of the same task. It begins with the paths found so far."""
        limits = _own(self.limits, *_OF_A_CASE)
        exact, kinds = (_own(kinds, "first_chunk", "last_chunk") for kinds in (self.exact_kinds, self.kinds))
        as_before = (case.hub, case.ranks, case.further_s) == (self.case.hub, self.case.ranks, self.case.further_s)
        found = replace(
            self,
            case=case,
            limits=limits,
            exact_kinds=exact,
            kinds=kinds,
            counts=[*self.counts],
            rank=[*self.rank],
            is_best=False,
            worked=0,
            basis=self.basis if as_before else None,
            tried=self.tried if as_before else 0,
            parts=None,
            are_best=False,
            counted=0,
            by_counts=None,
            may_list_counts=not as_before,
        )
        found.aim(self.target_s)
        return found

    def aim(self, target_s: float) -> None:
        """From now on only plans that take less than ``target_s`` matter. This limits what ranks may hold."""
        self.is_best &= target_s == self.target_s
        self.target_s = target_s
        most = self.unit.most(self.task, self.limits.crossing_s, self.limits.rank_of, target_s)
        self.limits.most_units[:] = most if self.case.most_units is None else np.minimum(most, self.case.most_units)
        if self.case.least_units is not None:
            self.limits.least_units[:] = self.case.least_units
        if (self.limits.least_units > self.limits.most_units).any():
            self.lower_s = max(self.lower_s, target_s)

    def hub_chunks(self) -> range:
        """The chunks that the hub may be in; none without a hub."""
        for kind in np.flatnonzero(self.exact_kinds.side == chunk_bound.HUB).tolist():
            return range(int(self.exact_kinds.first_chunk[kind]), int(self.exact_kinds.last_chunk[kind]) + 1)
        return range(0)

    @property
    def hub_is_open(self) -> bool:
        return self.case.hub is None and len(self.hub_chunks()) > 1

    @property
    def may_settle(self) -> bool:
        """Whether longer paths raise the bound more than cases do: where layers of few kinds have several orders,
        without a hub."""
        return self.may_list and self.by_rank is None and not self.hub_chunks() and not self.task.tables.order.is_chain

    def cases(self) -> Iterator[Case]:
        """Cases that together hold all plans of this one; none if no division helps.

        First they differ in the hub's chunk, or in the ranks that have the dearest tower. The fullest rank has at least
        the mean number of units, rounded up: either no rank has more than that, or rank r has more; and if none has
        more, rank r has exactly that many. Then they differ in the units of the rank whose number is the furthest from
        a whole one.
        """
        case, p = self.case, self.task.shape.ranks
        fullest = self._least_units_of_fullest()
        if self.by_rank is not None:
            return
        if self.hub_is_open:
            for chunk in self.hub_chunks():
                yield replace(case, hub=chunk)
        elif not np.isfinite(self.target_s):
            return
        elif self.may_settle and not case.ranks and (of_tower := [*self._by_ranks_of_tower()]):
            yield from of_tower
        elif fullest < 1.0 or case.splits == _MOST_SPLITS:
            return
        elif case.most_units is None or case.least_units is None:
            most = self.limits.most_units.max()
            if fullest < most:
                yield replace(case, most_units=np.full(p, fullest), least_units=np.zeros(p), splits=1)
            yield from self._with_full_rank(min(fullest + 1.0, most), self.limits.most_units.copy())
        elif case.least_units.max() <= 0.0 and case.most_units.max() <= fullest:
            yield from self._with_full_rank(fullest, case.most_units)
        elif self.units is not None:
            apart = np.abs(self.units - np.round(self.units))
            rank = int(apart.argmax())
            if apart[rank] > _WHOLE:
                most_units, least_units = case.most_units.copy(), case.least_units.copy()
                most_units[rank] = np.floor(self.units[rank])
                least_units[rank] = most_units[rank] + 1.0
                yield replace(case, most_units=most_units, splits=case.splits + 1)
                yield replace(case, least_units=least_units, splits=case.splits + 1)

    def _by_ranks_of_tower(self) -> Iterator[Case]:
        """The cases by the ranks that have the dearest tower, if it is in the least number of pieces; and the case that
        it is in more. None if that many pieces may be on all ranks, or if one more costs little."""
        tower, case, p = TowerPieces.dearest(self.task, self.target_s), self.case, self.task.shape.ranks
        if tower is None or np.isinf(least_s := min(tower.transfers_s)):
            return
        pieces = next((n for n in range(case.pieces, p) if tower.transfers_s[n] < np.inf), p)
        if pieces == p or comb(p, pieces) > _MOST_SETS:
            return
        now_s, more_s = tower.transfers_s[pieces], min(tower.transfers_s[pieces + 1 :])
        raised_s = 2.0 * (more_s - now_s) * self.task.shape.microbatches / p
        if raised_s < _LITTLE_OF_TOWER * (self.target_s - self.lower_s):
            return
        divided = replace(case, pieces=pieces, further_s=now_s - least_s, tower=tower.layers)
        for ranks in combinations(range(p), pieces):
            yield replace(divided, ranks=ranks)
        if np.isfinite(more_s):
            yield replace(case, pieces=pieces + 1, further_s=more_s - least_s)

    def _with_full_rank(self, units: float, most_units: FloatArray) -> Iterator[Case]:
        """The cases in which one rank has at least ``units``, for each rank in turn."""
        for rank in np.flatnonzero(self.limits.most_units >= units).tolist():
            least_units = np.zeros(most_units.size)
            least_units[rank] = units
            yield replace(self.case, most_units=most_units, least_units=least_units, splits=self.case.splits + 1)

    def _least_units_of_fullest(self) -> float:
        """The least number of units of the rank that has the most, in any plan."""
        kinds = self.exact_kinds
        least = np.minimum.reduceat(kinds.units, kinds.option_start[:-1])
        return float(np.ceil(dot(kinds.layers, least) / self.task.shape.ranks))

    def list_patterns(self, steps: int) -> None:
        """Lists the patterns of the ranks if that takes fewer than these steps. They replace the shares of layers."""
        if self.may_list and self.by_rank is None and steps > self.tried and not (self._is_over or self.is_best):
            patterns, self.tried = self._patterns(steps), steps
            self.by_rank = None if patterns is None else PatternSearch.of(patterns, self.paths)

    def improve(self, rounds: int) -> None:
        """Seeks better prices, this many times: first the best ones for the known paths, then those with a longer path
        added."""
        if self._is_over or self.is_best:
            return
        if self.by_rank is not None:
            before = self.by_rank.worked
            self.by_rank.improve(rounds, self.target_s)
            self.worked += self.by_rank.worked - before
            self.lower_s = max(self.lower_s, self.by_rank.lower_s)
            return
        if np.isinf(self._evaluate(self._even_prices())):
            return  # some layer has no place
        program = self._program()
        batches_s: list[float] = []
        for _ in range(rounds):
            found = self._solve(program)
            if found is None:
                self.is_best = True
                return
            prices, lacks = program.prices, found.lacks
            self.layers_in, self.units = found.layers_in, found.units
            batches_s.append(found.batch_s)
            if len(batches_s) > _FEW_ROUNDS and not self.may_settle:
                missing_s, gained_s = self.target_s - found.batch_s, found.batch_s - batches_s[-1 - _FEW_ROUNDS]
                if gained_s < _LITTLE * missing_s < np.inf:
                    break
            if not self._add_longer(program, found):
                self.is_best = True
                break
        self.basis = program.basis
        self._evaluate(prices)
        self.priced = self._costs(prices)
        if lacks and self._evaluate(prices._replace(path=np.zeros(prices.path.size))) > 0.0:
            self.lower_s = max(self.lower_s, self.target_s)  # at any multiple of these prices
        self._make_room(prices.path)

    @property
    def may_divide_counts(self) -> bool:
        """Whether its plans may be divided by patterns of numbers of layers (``RankPatterns``): where the hub's chunk
        is given, as long as that helps."""
        if self._is_over or not np.isfinite(self.target_s) or not self.may_list_counts:
            return False
        return self._hub >= 0 and self.may_list and self.by_rank is None

    def divide_counts(self, steps: int, rounds: int) -> bool:
        """Improves the bound by patterns of numbers of layers, which are listed first. Returns False without an effort
        if that does not help, or takes more than these steps."""
        if not self.may_divide_counts:
            return False
        if self.by_counts is None:
            patterns = self._patterns(steps, only_counts=True)
            self.by_counts = None if patterns is None else PatternSearch.of(patterns, self.paths)
        search, before_s = self.by_counts, self.lower_s
        if search is None:
            self.may_list_counts = False
            return False
        before = search.worked
        search.improve(rounds, self.target_s)
        self.worked += search.worked - before
        self.lower_s = max(before_s, search.lower_s)
        self.counted += 1
        stalled = self.lower_s - before_s < _STALLED * (self.target_s - before_s)
        if search.is_over or stalled or not search.parts:
            self.by_counts, self.may_list_counts = None, False
        else:
            search.patterns = search.parts[0].patterns  # all of them are many
        return True

    @property
    def may_count(self) -> bool:
        """Whether its plans may be divided by counts of layers: where the hub's chunk is given and that helps."""
        if self.are_best or self.counted >= _MOST_COUNTED or self._is_over or not np.isfinite(self.target_s):
            return False
        has_shares = self.may_list and self.by_rank is None and self.layers_in is not None
        return self._hub >= 0 and has_shares and counted_kinds(self.kinds).size > 0

    def count_layers(self, rounds: int) -> None:
        """Divides plans by counts of layers (``layer_counts``), always those of the least bound, for this many rounds
        or a few more."""
        program, before_s = self._program(counted_kinds(self.kinds).tolist()), self.lower_s
        if self.parts is None:
            self.parts = [_CountedPart(self.lower_s, LayerCounts.any(self.kinds, self.task.shape.stages))]
        used = 0
        while used < rounds and self.parts and not self.are_best:
            index = min(range(len(self.parts)), key=[part.lower_s for part in self.parts].__getitem__)
            part = self.parts[index]
            if part.lower_s >= self.target_s:
                break
            new, most = [part], _FURTHER_ROUNDS
            if part.is_best:
                counts = [] if part.layers_in is None else part.counts.parts(self.kinds, part.layers_in)
                new, most = [_CountedPart(part.lower_s, one) for one in counts], _ROUNDS_OF_A_PART
                self.are_best = not counts
            if new:
                del self.parts[index]
            for one in new:
                found, taken = self._with_prices(program, one, most)
                used += taken
                if found.lower_s < self.target_s:
                    self.parts.append(found)
        self.lower_s = max(before_s, min((part.lower_s for part in self.parts), default=self.target_s))
        self.are_best |= self.lower_s - before_s < _STALLED * (self.target_s - before_s)
        self.counted += 1
        self.basis = None  # it knows nothing of the paths since
        self._make_room(program.prices.path)

    def _with_prices(self, program: ShareProgram, part: _CountedPart, rounds: int) -> tuple[_CountedPart, int]:
        """Returns the part with a higher bound, and the rounds that this took."""
        program.limit_layers(part.counts)
        batches_s, is_best, enough_s = list[float](), False, np.inf
        if rounds == _ROUNDS_OF_A_PART:
            enough_s = part.lower_s + _ENOUGH * (self.target_s - part.lower_s)
        while len(batches_s) < rounds and not is_best:
            if (found := self._solve(program)) is None:
                return part._replace(is_best=True), len(batches_s) + 1
            batches_s.append(found.batch_s)
            part = part._replace(layers_in=found.layers_in)
            if found.batch_s >= enough_s:
                break
            gained_s = found.batch_s - batches_s[-min(len(batches_s), 1 + _FEW_ROUNDS)]
            is_best = len(batches_s) > _FEW_ROUNDS and gained_s < _LITTLE_OF_A_PART * (self.target_s - found.batch_s)
            is_best = is_best or not self._add_longer(program, found)
        lower_s = max(part.lower_s, min(self.target_s, self._bound_s(program.prices, part.counts)))
        return part._replace(lower_s=lower_s, is_best=is_best), len(batches_s)

    def limit_ranks(self) -> None:
        """Finds out for each rank whether it may have more units than the fullest one needs, or as many as any may
        have."""
        if (
            self.by_rank is not None
            or self._is_over
            or not np.isfinite(self.target_s)
            or (fullest := self._least_units_of_fullest()) < 1.0
        ):
            return
        most_units, program = self.limits.most_units.copy(), self._program()
        units = min(fullest + 1.0, most_units.max())
        for rank in np.flatnonzero(most_units >= units).tolist():
            before = self.limits.least_units[rank]
            program.require_units(rank, units)
            self.limits.least_units[rank] = units
            for _ in range(_ROUNDS_OF_A_RANK):
                found = self._solve(program)
                if found is None:
                    break
                if found.batch_s >= self.target_s:
                    if self._bound_s(program.prices) >= self.target_s:
                        most_units[rank] = units - 1.0
                    break
                if not self._add_longer(program, found):
                    break
            self.limits.least_units[rank] = before
            program.require_units(rank, before)
        self.basis = program.basis
        self.case = replace(self.case, most_units=most_units)
        self.is_best = False
        self.aim(self.target_s)

    @property
    def _is_over(self) -> bool:
        """Whether nothing takes any time, or no plan is quick enough."""
        return self.task.lower_s <= 0.0 or self.lower_s >= self.target_s

    def _patterns(self, steps: int, *, only_counts: bool = False) -> RankPatterns | None:
        """The patterns of the ranks, or those of numbers of layers. None if there are too many, or if the hub's chunk
        is open."""
        if self.hub_is_open or not np.isfinite(self.target_s):
            return None
        kinds, members = with_transfers(self.kinds, []), self.members
        rank_of = self.program.rank_of
        if self._hub < 0 or self.task.shape.ranks == 1:
            further_s = self.task.tables.further_s(rank_of, members)
        else:
            further_s = further_beside_hub(self.task, rank_of, kinds, members, self._hub)
        runs = LayerRuns.of(members) if self.task.tables.order.is_chain else None
        options = None
        if only_counts:
            further_s = np.minimum.reduceat(further_s, kinds.option_start[:-1], axis=2)
            kinds, options = fastest_options(kinds), kinds
        positions = LayerPositions(members, further_s, runs)
        return RankPatterns.of(self.program, self.limits, kinds, positions, self._hub, self.target_s, steps, options)

    def _program(self, counted: Sequence[int] = ()) -> ShareProgram:
        """counted: kinds whose layers in each chunk may be limited."""
        from piper_ray.engine.chunks.share_program import ShareProgram  # HiGHS is loaded where it is needed

        basis = None if counted else self.basis
        apart = self._hub, self._excluded
        return ShareProgram(self.kinds, self.limits, *apart, self.task.lower_s, self.paths, basis, counted)

    def whole_plan(self) -> tuple[IndexArray, IndexArray] | None:
        """A plan of whole layers that keeps the limits of memory, as in ``placed``; None if none is found soon. It may
        have layers in front of others that they read."""
        if self._is_over:
            return None
        kind_of = {int(one[0]): kind for kind, one in enumerate(self.members) if one.size == 1}
        before = [
            (kind_of[tail], kind_of[x])
            for x, tails in enumerate(self.task.tables.order.predecessors)
            for tail in tails
            if x in kind_of and tail in kind_of
        ]
        program = self._program()
        found = program.whole(before)
        self.worked += program.worked
        return None if found is None else placed(found, self.kinds, self.members)

    def _solve(self, program: ShareProgram) -> FractionalPlan | None:
        before = program.worked
        found = program.solve(self.target_s)
        self.worked += program.worked - before
        return found

    def _add_longer(self, program: ShareProgram, found: FractionalPlan) -> bool:
        """Returns whether the batch of a fractional plan is shorter than a path, and than the target. If so, adds such
        paths."""
        if found.batch_s >= self.target_s:
            return False
        now_s = found.passes_s, found.sync_s
        if simulate_chunks(self.program, *now_s, np.empty(self.program.kind.size + 1)) <= found.batch_s * (1.0 + _NEAR):
            return False
        # Paths that are long in plans between this one and the earlier ones cut off more than this plan's own paths do.
        program.core_s = now_s if program.core_s is None else between(program.core_s, now_s, STEP)
        before = len(self.rank)
        for step in _BETWEEN:
            self._add_paths(*between(program.core_s, now_s, step))
        program.add(_some(self.paths, slice(before, None)))
        return len(self.rank) > before

    def chunk_of(self) -> IndexArray:
        """int64[n]: the chunk of each layer by the last fractional plan, where layers of a kind follow one another."""
        assert self.layers_in is not None
        shape, found = self.task.shape, np.zeros(self.task.tables.order.size, np.int64)
        for positions, in_chunks in zip(self.members, self.layers_in, strict=False):  # the last may be of transfers
            found[positions] = np.searchsorted(np.cumsum(in_chunks), np.arange(len(positions)) + 0.5)
        return np.minimum(found, shape.stages - 1)

    @property
    def paths(self) -> Paths:
        """The paths found so far."""
        shape = len(self.counts), self.task.shape.stages, PASSES
        return Paths(np.array(self.counts).reshape(shape), np.array(self.rank, np.int64))

    def _even_prices(self) -> Prices:
        """The same price for each path, and no other prices."""
        s, p, moments = self.task.shape.stages, self.task.shape.ranks, self.limits.moment_rank.size
        paths = len(self.rank)
        return Prices(np.full(paths, 1.0 / paths), np.zeros(moments), np.zeros(p), np.zeros(s), np.zeros((0, s)))

    def _costs(self, prices: Prices) -> tuple[Costs, Prices]:
        paths = _some(self.paths, slice(prices.path.size))
        return chunk_bound.costs_of(self.limits, paths, prices.path, prices.memory), prices

    def _evaluate(self, prices: Prices) -> float:
        """The bound of these prices, which may refer only to the first of the paths. It may raise ``lower_s``."""
        found_s = self._bound_s(prices)
        self.lower_s = max(self.lower_s, min(found_s, self.target_s))
        return found_s

    def priced_s(self, figures: FloatArray) -> tuple[float, FloatArray]:
        """No plan that is sought takes less than the first, and float64[options, s] for each layer, by its option and
        its chunk. figures: those of the options. Hubs' edges are left out."""
        if self._is_over:
            return 0.0, np.zeros((len(figures), self.task.shape.stages))
        limits = self.limits
        costs, prices = self.priced or self._costs(self._even_prices())
        seconds = rank_seconds(figures, self.task)
        units = np.floor(seconds / self.unit.seconds) if self.unit.seconds > 0.0 else np.zeros(seconds.size)
        there_s = costs.passes[:, :2].sum(axis=1)
        most_units = np.where(prices.units > 0.0, limits.most_units, limits.least_units)
        of_units = np.where(prices.units != 0.0, prices.units * most_units, 0.0).sum()
        fixed_s = dot(there_s, limits.crossing_s) + prices.filled.sum() - of_units
        fixed_s += sum(x.seconds * there_s[x.first_chunk : x.last_chunk + 1].min() for x in self._transfers)
        held_s = self.task.memory_bytes * prices.memory.sum()
        each_s = dot(figures[:, FIGURE.forward_s : FIGURE.weight_s + 1], costs.passes.T) - prices.filled
        for column, price in (("weights", costs.sync), ("activation", costs.activation), ("fixed", costs.fixed)):
            each_s += np.outer(figures[:, getattr(FIGURE, column)], price)
        each_s += np.outer(units, prices.units[limits.rank_of])
        return float(fixed_s - held_s - _ROUNDING * (self.target_s + held_s + abs(of_units))), each_s

    def _bound_s(self, prices: Prices, counts: LayerCounts | None = None) -> float:
        """The bound of these prices. counts: the limits of those of layers."""
        paths = _some(self.paths, slice(prices.path.size))
        of_layers_s = size_s = 0.0
        if self.case.ranks:  # counts are None then: they divide plans only where there is a hub
            prices = prices._replace(layers=np.where(self._excluded, np.inf, 0.0)[self._merged_and_transfers])
        if counts is not None:
            limit = np.where(prices.layers > 0.0, counts.most, counts.least)
            of_layers_s = float((prices.layers * limit).sum())
            size_s = float((np.abs(prices.layers) * (limit + counts.most)).sum())
            prices = prices._replace(layers=prices.layers[self._merged_and_transfers])
        found_s, _ = chunk_bound.least_priced_s(self.exact_kinds, self.limits, paths, prices)
        limited = self.limits.most_units < chunk_bound.NO_LIMIT
        priced_s = self.task.memory_bytes * prices.memory.sum()
        priced_s += float(self.exact_kinds.layers.sum() * prices.filled.sum())
        priced_s += float((np.abs(prices.units) * np.where(limited, self.limits.most_units, 1.0)).sum())
        found_s, priced_s = found_s - of_layers_s, priced_s + size_s
        return float(found_s - _ROUNDING * (abs(found_s) + priced_s)) if np.isfinite(found_s) else float(found_s)

    def _narrow(self) -> None:
        """The windows of layers next to a hub whose chunk is given."""
        hub = self.case.hub
        if hub is None:
            hub = next(iter(self.hub_chunks()), -1) if len(self.hub_chunks()) == 1 else -1
        self._hub = hub
        if hub < 0:
            return
        for kinds in (self.exact_kinds, self.kinds):
            for kind in range(kinds.layers.size):
                kinds.first_chunk[kind], kinds.last_chunk[kind] = chunk_bound.window(kinds, kind, hub)

    def _count_transfers(self) -> None:
        """Has a layer for each of the transfers that chunks make beyond ``crossing_s``."""
        found = [] if self._hub < 0 else transfers_beside_hub(self.task, self._hub, self.limits.crossing_s)
        left_s = self.uncounted_s + self.case.further_s - sum(one.seconds for one in found)
        if left_s > 0.0:
            found.append(ChunkTransfers(left_s, 0, self.task.shape.stages - 1))
        self._transfers = found
        self.exact_kinds, self.kinds = (with_transfers(one, found) for one in (self.exact_kinds, self.kinds))
        # Of each exact kind the merged one; those of transfers are the last ones in both.
        kinds = self.kinds.layers.size
        self._merged_and_transfers = np.append(self.merged, np.arange(kinds - len(found), kinds))

    def _exclude(self) -> None:
        """Says where kinds of the dearest tower may not be: in chunks of ranks that do not have it in this case."""
        shape = self.kinds.layers.size, self.task.shape.stages
        self._excluded = np.zeros(shape, np.bool_)
        if self.case.ranks:
            of_tower = [np.isin(positions, self.case.tower).all() for positions in self.members]
            self._excluded[: len(self.members)] = np.outer(of_tower, ~np.isin(self.limits.rank_of, self.case.ranks))

    def _add_first_paths(self) -> None:
        """For each rank the path that is the longest if this rank has more to do and all else is even."""
        s, kinds = self.task.shape.stages, self.kinds
        fastest_s = kinds.figures[kinds.option_start[:-1], FIGURE.forward_s : FIGURE.weight_s + 1]
        even = np.broadcast_to(dot(kinds.layers, fastest_s) / s, (s, PASSES))
        for rank in range(min(self.task.shape.ranks, _MOST_PATHS // 2)):
            slower = even.copy()
            slower[self.program.stage_of[rank]] *= 1.0 + _SLOWER
            self._add_paths(slower, np.zeros(self.task.shape.ranks))

    def _add_paths(self, passes_s: FloatArray, sync_s: FloatArray) -> None:
        """The longest paths of a fractional plan: two where there are several."""
        counts, ranks = np.empty((2, *passes_s.shape)), np.empty(2, np.int64)
        longest_paths(self.program, passes_s, sync_s, counts, ranks)
        for path, rank in zip(counts, ranks.tolist(), strict=True):
            mark = path.tobytes(), rank
            if mark not in self._known:
                self._known.add(mark)
                self.counts.append(path)
                self.rank.append(rank)

    def _look_up_paths(self) -> None:
        self._known = {(path.tobytes(), rank) for path, rank in zip(self.counts, self.rank, strict=True)}

    def _make_room(self, prices: FloatArray) -> None:
        """Drops the paths of the least price when there are too many; the last ones may have no price yet."""
        more = len(self.rank) - _MOST_PATHS
        if more > 0:
            price = np.append(prices, np.full(len(self.rank) - prices.size, np.inf))
            of_paths = np.sort(np.argsort(-price, kind="stable")[:_MOST_PATHS])
            if self.basis is not None:
                self.basis = self.basis.with_paths(of_paths, len(self.rank))
            kept = of_paths.tolist()
            self.counts, self.rank = [self.counts[n] for n in kept], [self.rank[n] for n in kept]
            self._look_up_paths()


def _some(paths: Paths, which: slice) -> Paths:
    return Paths(paths.counts[which], paths.rank[which])


R = TypeVar("R", LayerKinds, ShapeLimits)


def _own(record: R, *names: str) -> R:
    """Returns a copy of the record with arrays of its own under these names."""
    return record._replace(**{name: getattr(record, name).copy() for name in names})
