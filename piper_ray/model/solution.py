"""What a solve returns: the plan, what is proved about it, and the cost of finding it.

Documents contain the statistics unchanged (``plan_schema``), so each field has a description of its own. Null in a
document is None here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from piper_ray.model.fields import on_demand
from piper_ray.model.figures import html_table, percent_text, plural, printable, relative_gap, size_text, time_text
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule, StepTerms
from piper_ray.model.stop import StoppedBy


class Status(str, Enum):
    """OPTIMAL: proved. FEASIBLE: stopped early; ``gap`` limits the distance to the optimum. INFEASIBLE: proved that
    there is no plan. UNKNOWN: stopped before a plan was found, and before it was proved that there is none.

    >>> Status("optimal")
    <Status.OPTIMAL: 'optimal'>
    """

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class EvaluationStats:
    """One threshold evaluation: is there a plan whose stages all take at most ``threshold_s``?

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> evaluations = piper_ray.solve(bert, schedule="2bw", threads=1).stats.evaluations
    >>> evaluations[-1].threshold_s <= min(one.threshold_s for one in evaluations if one.feasible)
    True
    """

    threshold_s: float
    """The threshold: is there a plan whose stages all take at most this time?"""
    feasible: bool
    """The answer."""
    seconds: float
    """The wall time of the evaluation."""
    live_downsets: int
    """The downsets that kept a state."""
    cells: int
    """The states kept, over all downsets."""
    buckets_tested: int
    """The bounds computed for whole buckets of downsets."""
    candidates_tested: int
    """The bounds computed for single downsets."""
    stages_costed: int
    """The pairs of downsets that passed both bounds, and whose TMPC choice was examined."""


@dataclass(frozen=True)
class NodeStats:
    """The work of one machine of a cluster.

    >>> NodeStats("a", chunks=40, fetched_bytes=10**9, held_bytes=10**9).chunks
    40
    """

    host: str
    """The machine's name."""
    chunks: int
    """The chunks of a level's downsets that the machine computed."""
    fetched_bytes: int
    """The bytes of tables that the machine fetched."""
    held_bytes: int
    """The most bytes of tables that the machine held at one time."""


@dataclass(frozen=True)
class ClusterStats:
    """The work of a cluster.

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
    """The working time of all workers together."""
    waited_s: float
    """The time that the driver waited for batches; it worked itself for the rest of the search."""
    nodes: tuple[NodeStats, ...]
    """The work of each machine."""
    unused: str | None = None
    """Why no work was sent to the cluster; null if some was."""


@dataclass(frozen=True)
class DegreeStats:
    """The work of a search with one d and one t for all stages.

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
    """The pairs whose plans were examined one by one."""
    states: int
    """The pipeline tails kept, over all pairs."""
    passes: int = 0
    """The passes that a search under a schedule with chunks simulated, and further work counted as passes;
    ``passes_limit`` limits this number."""


@on_demand("pairs")
@dataclass(frozen=True)
class SolveStats:
    """The cost of each step of a solve. For large lattices ``pairs`` is counted when it is first read.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1)
    >>> solution.stats.layers, solution.stats.threads
    (26, 1)
    """

    layers: int
    """The layers of the instance."""
    contracted_layers: int
    """The layers that are left after those that cost nothing have joined a neighbour."""
    downsets: int
    """The downsets of these layers."""
    levels: int
    """The levels of the lattice of downsets."""
    pairs: int | None
    """The pairs of nested downsets, before any pruning; null if they were not counted."""
    threads: int
    """The number of worker threads."""
    lattice_s: float
    """The wall time of the lattice."""
    stage_costs_s: float
    """The wall time of the stage costs."""
    search_s: float
    """The wall time of the search."""
    evaluations: tuple[EvaluationStats, ...]
    """The threshold evaluations, in their order."""
    cluster: ClusterStats | None = None
    """The work of a cluster; null if there was none."""
    degrees: DegreeStats | None = None
    """The work of the search with one d and one t for all stages; null if there was none."""


@dataclass(frozen=True)
class BlockStats:
    """What was given up when operators were merged into blocks.

    >>> stats = BlockStats(4000, 60, None, 1200, largest_share=0.04, choices_dropped=0)
    >>> f"{stats.layers} layers in {stats.blocks} blocks"
    '4000 layers in 60 blocks'
    """

    layers: int
    """The number of layers."""
    blocks: int
    """The number of blocks."""
    downsets_before: int | None
    """The downsets of the layers; null if they are too many to count."""
    downsets: int
    """The downsets of the blocks."""
    largest_share: float
    """The largest block's share of the work of all layers, or of their memory."""
    choices_dropped: int
    """The combinations of TMPCs within blocks that were left out."""
    time_per_sample_s: float | None = None
    """The time of the best plan of whole blocks; null if none was found."""
    proved: bool = False
    """Whether it is proved that no plan of whole blocks is faster."""


@dataclass(frozen=True)
class Forecast:
    """The cost of a solve, predicted before it starts; None for figures that are expensive to predict.

    downsets, pairs: the numbers of the lattice. memory_bytes: the peak of the process. seconds: the time of one thread
    on this machine. If there are too many downsets to list them all, it is the time of a solve that lists only those
    that a plan as good as the best can use.

    >>> Forecast(downsets=83, pairs=3403, memory_bytes=2e8, seconds=0.01).downsets
    83
    """

    downsets: int | None
    pairs: int | None
    memory_bytes: float | None
    seconds: float | None


@dataclass(frozen=True)
class Infeasibility:
    """Why there is no plan, and how much memory a plan would need.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> found = piper_ray.solve(bert, memory_bytes="100MiB", threads=1).infeasibility
    >>> f"{found.least_memory_bytes / 2**20:.0f} MiB"
    '875 MiB'
    """

    reason: str
    """A sentence that explains why there is no plan."""
    least_memory_bytes: float | None
    """The least memory for which there is a plan, within 1 byte or 1e-9 relative; null if no memory suffices
    or it is not known."""


@dataclass(frozen=True)
class Solution:
    """The result of a solve: what it found and what it proved.

    time_per_sample_s: the time of ``plan`` as ``evaluate`` computes it; None without a plan.

    lower_bound_s: no plan is faster. gap: (time_per_sample_s - lower_bound_s) / time_per_sample_s. stopped_by: what
    ended the search before a proof; None if it ended by itself. blocks: what was given up when layers were merged into
    blocks; None if they were not. The plan still consists of layers, and ``lower_bound_s`` holds for all plans of
    layers, whether or not they keep blocks whole. schedule: the schedule of the time and the bound. Under a schedule
    that flushes, the time is the simulated time of a batch divided by N, and the bound holds for every plan. step: the
    terms of such a step. An OPTIMAL plan of a stopped search has the best time, but another plan may need fewer devices
    or stages.

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
        """The stages and devices of the plan. Chunks of a rank share its devices."""
        devices = plan.devices // self.schedule.v
        return f"{plural(len(plan.stages), 'stage')} on {plural(devices, 'device')}"
