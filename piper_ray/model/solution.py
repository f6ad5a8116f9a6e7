"""What a solve returns: the plan, what is proved about it, and what finding it cost.

Documents hold the statistics as they are (``plan_schema``), so each field is described by itself. Null in a document
is None here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from piper_ray.model.fields import on_demand, renamed
from piper_ray.model.figures import html_table, percent_text, plural, printable, relative_gap, size_text, time_text
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule, StepTerms
from piper_ray.model.stop import StoppedBy


class Status(str, Enum):
    """OPTIMAL: proved. FEASIBLE: stopped early, ``gap`` says how far off it can be. INFEASIBLE: proved, no plan.

    UNKNOWN: stopped before a plan was found and before it was proved that there is none.

    >>> Status("optimal")
    <Status.OPTIMAL: 'optimal'>
    """

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class EvaluationStats:
    """One threshold evaluation: is there a plan with every stage at most ``threshold_s``?

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> evaluations = piper_ray.solve(bert, schedule="2bw", threads=1).stats.evaluations
    >>> evaluations[-1].threshold_s <= min(one.threshold_s for one in evaluations if one.feasible)
    True
    """

    threshold_s: float
    """The time that was asked about: is there a plan with every stage at most this?"""
    feasible: bool
    """The answer."""
    seconds: float
    """The wall time that it took."""
    live_downsets: int
    """The downsets that kept a state."""
    cells: int
    """The states kept, over all downsets."""
    buckets_tested: int
    """The bounds computed on whole buckets of downsets."""
    candidates_tested: int
    """The bounds computed on single downsets."""
    stages_costed: int
    """The pairs of downsets that passed both bounds and had their TMPC choice examined."""


@dataclass(frozen=True)
class NodeStats:
    """One machine of a cluster.

    >>> NodeStats("a", chunks=40, fetched_bytes=10**9, held_bytes=10**9).chunks
    40
    """

    host: str
    """The machine's name."""
    chunks: int
    """The chunks of a level's downsets that the machine answered."""
    fetched_bytes: int
    """The bytes of tables that the machine fetched."""
    held_bytes: int
    """The most bytes of tables that the machine held at a time."""


@dataclass(frozen=True)
class ClusterStats:
    """What a cluster did.

    >>> ClusterStats(2, 5, 40, 10**9, 12.0, 1.5, (NodeStats("a", 40, 10**9, 10**9),)).nodes[0].host
    'a'
    """

    workers: int
    """The number of workers."""
    batches: int
    """The batches handed out."""
    chunks: int
    """The chunks of a level's downsets handed out."""
    put_bytes: int
    """The bytes of tables that the driver put into the object store, each table once."""
    worked_s: float
    """The time that all workers together worked."""
    waited_s: float
    """The time that the driver waited for batches; the rest of the search is its own work."""
    nodes: tuple[NodeStats, ...]
    """What each machine did."""
    unused: str | None = None
    """Why no work was sent to the cluster; null: some was."""


@dataclass(frozen=True)
class DegreeStats:
    """What a search with one d and one t for all stages looked at.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1)
    >>> solution.stats.degrees.searched <= solution.stats.degrees.pairs
    True
    """

    pairs: int
    """The pairs (d, t) that fit the cluster."""
    searched: int
    """The pairs that no bound ruled out."""
    looked_through: int
    """The pairs whose plans were looked at one by one."""
    states: int
    """The pipeline tails kept, over all pairs."""
    passes: int = 0
    """The passes that a search under a schedule with chunks simulated, and what counts as such: its work, as
    ``passes_limit`` counts it."""


@on_demand("pairs")
@dataclass(frozen=True)
class SolveStats:
    """What each step of a solve cost. Pairs of large lattices are counted when ``pairs`` is first asked for.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1)
    >>> solution.stats.layers, solution.stats.threads
    (26, 1)
    """

    layers: int
    """The layers of the instance."""
    contracted_layers: int
    """The layers that are left when those that cost nothing have joined a neighbour."""
    downsets: int
    """The downsets of these layers."""
    levels: int
    """The levels of the lattice of downsets."""
    pairs: int | None
    """The pairs of nested downsets, before any pruning; null: they were not counted."""
    threads: int
    """The threads that worked."""
    lattice_s: float
    """The wall time of the lattice."""
    stage_costs_s: float
    """The wall time of the stage costs."""
    search_s: float
    """The wall time of the search."""
    evaluations: tuple[EvaluationStats, ...]
    """The threshold evaluations, in their order."""
    cluster: ClusterStats | None = None
    """What a cluster did; null: there was none."""
    degrees: DegreeStats | None = None
    """What the search with one d and one t for all stages did; null: it was not asked for."""


@dataclass(frozen=True)
class BlockStats:
    """What merging operators into blocks gave up.

    >>> stats = BlockStats(4000, 60, None, 1200, largest_share=0.04, choices_dropped=0)
    >>> f"{stats.layers} layers in {stats.blocks} blocks"
    '4000 layers in 60 blocks'
    """

    layers: int
    """The number of layers."""
    blocks: int
    """The number of blocks."""
    downsets_before: int | None
    """The downsets of the layers; null: too many to count."""
    downsets: int
    """The downsets of the blocks."""
    largest_share: float
    """The share of the largest block in the work of all layers, or in their memory."""
    choices_dropped: int
    """The combinations of TMPCs within blocks that were left out."""
    time_per_sample_s: float | None = None
    """The time of the best plan of whole blocks; null: none was found."""
    proved: bool = False
    """Whether it is proved that no plan of whole blocks is faster."""

    time_per_sample = renamed("time_per_sample", "time_per_sample_s")


@dataclass(frozen=True)
class Forecast:
    """What a solve will take, known before it starts; None where a figure could not be had cheaply.

    downsets, pairs: the numbers of the lattice. memory_bytes: the peak of the process. seconds: the time of one thread
    on this machine; where downsets are too many to list them all, that of a solve that lists those alone that plans as
    good as the best can use.

    >>> Forecast(downsets=83, pairs=3403, memory_bytes=2e8, seconds=0.01).downsets
    83
    """

    downsets: int | None
    pairs: int | None
    memory_bytes: float | None
    seconds: float | None


@dataclass(frozen=True)
class Infeasibility:
    """Why there is no plan, and what would be needed.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> found = piper_ray.solve(bert, memory_bytes="100MiB", threads=1).infeasibility
    >>> f"{found.least_memory_bytes / 2**20:.0f} MiB"
    '875 MiB'
    """

    reason: str
    """A sentence that says why there is no plan."""
    least_memory_bytes: float | None
    """The least memory with which there is a plan, within 1 byte or 1e-9 relative; null: no memory helps."""


@dataclass(frozen=True)
class Solution:
    """What a solve found, and what it proved.

    time_per_sample_s: the time of ``plan`` as ``evaluate`` computes it; None without a plan.

    lower_bound_s: no plan is faster. gap: (time_per_sample_s - lower_bound_s) / time_per_sample_s. stopped_by: what
    ended the search before a proof; None when it ended by itself. blocks: what was given up when layers were merged
    into blocks; None if they were not. Its plans are of the layers, and ``lower_bound_s`` holds for all plans of these,
    whole blocks or not. schedule: the schedule that value and bound are for. Under a flush the value is the simulated
    time of a batch over N, and the bound one on every plan's. step: the terms of such a step. An OPTIMAL plan that was
    stopped is the best in time, but perhaps not the one of fewest devices and stages.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1)
    >>> solution.status, solution.gap
    (<Status.OPTIMAL: 'optimal'>, 0.0)
    """

    status: Status
    time_per_sample_s: float | None
    lower_bound_s: float
    plan: Plan | None
    stats: SolveStats
    infeasibility: Infeasibility | None = None
    stopped_by: StoppedBy | None = None
    blocks: BlockStats | None = None
    schedule: Schedule = PAPERS_SCHEDULE
    step: StepTerms = StepTerms()

    time_per_sample = renamed("time_per_sample", "time_per_sample_s")
    lower_bound = renamed("lower_bound", "lower_bound_s")

    @property
    def gap(self) -> float | None:
        """(time_per_sample_s - lower_bound_s) / time_per_sample_s; None without a plan."""
        if self.time_per_sample_s is None:
            return None
        return relative_gap(self.time_per_sample_s, self.lower_bound_s)

    def __repr__(self) -> str:
        return f"Solution({self._status_text} under {self.schedule.text}: {self._found_text})"

    def _repr_html_(self) -> str:
        rows = [("schedule", self.schedule.text)]
        if self.time_per_sample_s is not None:
            rows.append(("time per microbatch", time_text(self.time_per_sample_s)))
        if self.infeasibility is not None:
            rows.append(("reason", self.infeasibility.reason))
            if self.infeasibility.least_memory_bytes is not None:
                rows.append(("least memory with a plan", size_text(self.infeasibility.least_memory_bytes, 6)))
        else:
            rows.append(("no plan is faster than", time_text(self.lower_bound_s)))
        if self.gap is not None:
            rows.append(("gap", percent_text(self.gap)))
        if self.plan is not None:
            rows.append(("plan", f"{self._plan_text(self.plan)}; d x t: {self.plan.degrees_text}"))
        return html_table(f"Solution: {self._status_text}", rows)

    @property
    def _status_text(self) -> str:
        return self.status.value + ("" if self.stopped_by is None else f" (stopped by: {self.stopped_by})")

    @property
    def _found_text(self) -> str:
        if self.infeasibility is not None:
            return printable(self.infeasibility.reason)
        if self.time_per_sample_s is None or self.gap is None:
            return f"no plan found so far; none is faster than {time_text(self.lower_bound_s)}/microbatch"
        text = f"{time_text(self.time_per_sample_s)}/microbatch, gap {percent_text(self.gap)}"
        return text if self.plan is None else f"{text}, {self._plan_text(self.plan)}"

    def _plan_text(self, plan: Plan) -> str:
        """Chunks of a rank share its devices."""
        devices = plan.devices // self.schedule.v
        return f"{plural(len(plan.stages), 'stage')} on {plural(devices, 'device')}"
