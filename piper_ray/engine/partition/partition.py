"""One partition of a lattice: the downsets that a machine has, with their states, and what it is asked about them.

First they are listed, each made by whichever partition reaches it and kept by its owner. Then, level by level, the
fronts of new downsets are sought over those that each partition has, one partition after the other; the owner keeps
what came of it. So no machine ever has more than its share, and the guests of a level.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from piper_ray.engine.evaluation.backend import OnProgress
from piper_ray.engine.evaluation.completion import limits_by_potential
from piper_ray.engine.evaluation.potentials import Potentials, StageCover, kept_s
from piper_ray.engine.evaluation.reach import Reach
from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.evaluation.threshold import limits_by_work
from piper_ray.engine.kernels.evaluation import find_first_stage
from piper_ray.engine.kernels.selection import make_step_cache
from piper_ray.engine.kernels.types import BitArray, Earlier, FloatArray, IndexArray, LevelStates, Target
from piper_ray.engine.partition.listing import Arrivals, PartitionListing
from piper_ray.engine.partition.rows import DownsetRows
from piper_ray.engine.partition.setting import PartitionSetting


class Worked(Protocol):
    """What ``Work`` comes to."""

    @property
    def states(self) -> LevelStates: ...


class Work(Protocol):
    """Fronts of a range of downsets over all finished levels, by threads: ``LocalBackend``."""

    def evaluate(
        self,
        states: StateTables,
        first: int,
        last: int,
        on_progress: OnProgress,
        *,
        buckets: int | None = None,
        earlier: Earlier | None = None,
    ) -> Worked: ...

    def number_anew(self) -> None: ...


class Finished(NamedTuple):
    """Of a level's downsets here: how many have states, how many states, and what these took."""

    live: int
    states: int
    tested: IndexArray


class FirstStage(NamedTuple):
    """The stage that heads a state: what is behind it, uint64[words], and the state of that."""

    inner: BitArray
    variant: int
    data_parallel_degree: int
    tally: int
    data_parallel_sum: int


class Evaluation(NamedTuple):
    """What the partitions evaluate, as ``Target`` has it. potentials: hold for this threshold."""

    threshold_s: float
    device_weight: int
    stage_weight: int
    potentials: Potentials


class Partition:
    """number: of this one, of so many. room: downsets that fit here, at least one."""

    def __init__(self, setting: PartitionSetting, number: int, partitions: int, room: int, work: Work) -> None:
        self._setting, self._number, self._partitions, self._room, self._work = setting, number, partitions, room, work
        self._chain = setting.chain()
        cover = StageCover.of(self._chain, setting.most_cells)
        if cover is None:
            raise AssertionError("layers so entangled have no listing to be partitioned")
        self._paths, self._reach = cover.paths, Reach(self._chain, cover)
        self._listing: PartitionListing | None = None
        self._own: BitArray | None = None
        self._rows: DownsetRows | None = None
        self._states: StateTables | None = None
        self._evaluation: Evaluation | None = None
        self._limits: tuple[IndexArray, IndexArray] | None = None

    @property
    def size_bytes(self) -> int:
        """Of what it has by now."""
        arrays = [] if self._listing is None else self._listing.arrays
        if self._rows is not None:
            arrays += self._rows.arrays
        if self._states is not None:
            arrays += self._states.grown
        return sum(array.nbytes for array in arrays)

    def list_anew(self, potentials: Potentials) -> None:
        """What was listed or evaluated before is forgotten."""
        self._rows = self._states = None
        self._listing = PartitionListing(
            self._reach, self._paths, potentials, self._number, self._partitions, self._room
        )

    def spread(self, size: int) -> tuple[bool | Arrivals, ...]:
        """As ``PartitionListing.spread``: whether there was any, then what goes to each partition."""
        assert self._listing is not None
        any_left, arrivals = self._listing.spread(size)
        return (any_left, *arrivals)

    def take_in(self, *arrivals: Arrivals) -> bool:
        """As ``PartitionListing.take_in``."""
        assert self._listing is not None
        return self._listing.take_in(arrivals)

    def listed(self) -> IndexArray:
        """int64[n + 1]: how many downsets of each size are here. The listing is over."""
        assert self._listing is not None
        own = self._listing.downsets()
        self._own, self._listing = own, None
        sizes = np.bitwise_count(own).sum(axis=1, dtype=np.int64)
        return np.bincount(sizes, minlength=self._setting.graph.size + 1)

    def prepare(self, guests: int) -> None:
        """Tables of what is listed here. guests: at most so many will come at a time."""
        own, self._own = self._own, None
        assert own is not None
        self._rows = DownsetRows(self._setting, self._chain, own, guests)

    def begin(self, evaluation: Evaluation) -> None:
        """From the empty set."""
        rows = self._rows
        assert rows is not None
        self._states = None
        limits = np.zeros((2, rows.own + rows.guests + 1), np.int64)
        self._limits = limits[0], limits[1]
        seen = limits.view()
        seen.setflags(write=False)
        self._evaluation = evaluation._replace(
            potentials=Potentials(evaluation.potentials.threshold_s, np.array(evaluation.potentials.of_vertex))
        )
        target = Target(
            threshold_s=kept_s(evaluation.threshold_s),
            device_weight=evaluation.device_weight,
            stage_weight=evaluation.stage_weight,
            device_limit=seen[0],
            data_parallel_limit=seen[1],
        )
        self._states = StateTables(rows.tables, target)

    def of_size(self, size: int) -> BitArray:
        """uint64[.., words]: the downsets of this size here."""
        assert self._rows is not None
        return self._rows.own_of(size)

    def extend(self, bits: BitArray, earlier: LevelStates | None) -> LevelStates:
        """The fronts of downsets of the first unfinished level, over those here besides what is known of them."""
        states, rows = self._invite(np.array(bits))
        known = None if earlier is None else Earlier(0, _ours(earlier))
        return self._work.evaluate(states, rows.own, rows.own + bits.shape[0], _ignore, earlier=known).states

    def finish(self, states: LevelStates) -> Finished:
        """Keeps the fronts of the next downsets here, all of one size."""
        assert self._states is not None
        kept = _ours(states)
        self._states.take(kept)
        return Finished(int(np.count_nonzero(kept.counts)), int(kept.counts.sum()), kept.tested)

    def best_of_last(self) -> tuple[int, int] | None:
        """Tally and data-parallel sum of the state of fewest devices of the last downset here, if it has any."""
        assert self._states is not None
        fronts = self._states.fronts
        last = fronts.start[-1] + fronts.states[-1] - 1
        return (int(fronts.tally[last]), int(fronts.data_parallel_sum[last])) if fronts.states[-1] > 0 else None

    def first_stage(self, outer: BitArray, tally: int, total: int) -> FirstStage | None:
        """Of the stages that head a state of ``outer`` with a downset of here behind them, the first in order."""
        states, rows = self._invite(np.array(outer)[None, :])
        j, variant, degree, behind = find_first_stage(
            rows.own, tally, total, states.arrays, make_step_cache(states.tables)
        )
        if j < 0:
            return None
        fronts = states.fronts
        return FirstStage(
            rows.bits(j), int(variant), int(degree), int(fronts.tally[behind]), int(fronts.data_parallel_sum[behind])
        )

    def _invite(self, bits: BitArray) -> tuple[StateTables, DownsetRows]:
        """Guests, with their limits."""
        rows, states, evaluation = self._rows, self._states, self._evaluation
        assert rows is not None
        assert states is not None
        assert evaluation is not None
        assert self._limits is not None
        sums, cluster, all_sums = rows.put_guests(bits), self._chain.cluster, self._chain.workload.sums
        own = rows.potential_of_guests(bits.shape[0], evaluation.potentials.of_vertex)
        keep_s = states.target.threshold_s

        def by_work(available: int, work_s: FloatArray, of_all_s: FloatArray) -> IndexArray:
            return limits_by_work(available, work_s, float(of_all_s[-1]), keep_s)

        device_limit, sum_limit = self._limits
        guests = slice(rows.own, rows.own + bits.shape[0])
        device_limit[guests] = np.minimum(
            by_work(cluster.devices, sums.device_work_s, all_sums.device_work_s),
            limits_by_potential(cluster.devices, own, evaluation.potentials.devices),
        )
        sum_limit[guests] = by_work(cluster.data_parallel_limit, sums.replica_work_s, all_sums.replica_work_s)
        states.tables = rows.tables
        self._work.number_anew()
        return states, rows


def _ours(states: LevelStates) -> LevelStates:
    """As arrays that may be written, as kernels are compiled for them: those from another process may not."""
    return LevelStates(*(np.array(values) for values in states))


def _ignore(done: int) -> None:
    pass
