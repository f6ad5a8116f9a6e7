"""What a solve returns: the plan, what is proved about it, and what finding it cost."""

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

    live_downsets: downsets that kept a state. cells: states kept, over all downsets.
    buckets_tested, candidates_tested: bounds computed on whole buckets of downsets and on single ones.
    stages_costed: pairs that survived both and had their TMPC choice examined.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> evaluations = piper_ray.solve(bert, schedule="2bw", threads=1).stats.evaluations
    >>> evaluations[-1].threshold_s <= min(one.threshold_s for one in evaluations if one.feasible)
    True
    """

    threshold_s: float
    feasible: bool
    seconds: float
    live_downsets: int
    cells: int
    buckets_tested: int
    candidates_tested: int
    stages_costed: int


@dataclass(frozen=True)
class NodeStats:
    """One machine of a cluster, by its host's name. chunks: of a level's downsets, answered. fetched_bytes: of tables.

    held_bytes: most at a time.

    >>> NodeStats("a", chunks=40, fetched_bytes=10**9, held_bytes=10**9).chunks
    40
    """

    host: str
    chunks: int
    fetched_bytes: int
    held_bytes: int


@dataclass(frozen=True)
class ClusterStats:
    """What a cluster did. put_bytes: by the driver, once for each table. worked_s: of all workers together.

    waited_s: of the driver, for batches; the rest of the search is its own work. unused: why nothing was sent to it;
    None if something was.

    >>> ClusterStats(2, 5, 40, 10**9, 12.0, 1.5, (NodeStats("a", 40, 10**9, 10**9),)).nodes[0].host
    'a'
    """

    workers: int
    batches: int
    chunks: int
    put_bytes: int
    worked_s: float
    waited_s: float
    nodes: tuple[NodeStats, ...]
    unused: str | None = None


@dataclass(frozen=True)
class DegreeStats:
    """What a search with one d and one t for all stages looked at.

    pairs: (d, t) that fit the cluster. searched: those that no bound ruled out. looked_through: those whose plans were
    looked at one by one. states: pipeline tails kept, over all pairs.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1)
    >>> solution.stats.degrees.searched <= solution.stats.degrees.pairs
    True
    """

    pairs: int
    searched: int
    looked_through: int
    states: int


@on_demand("pairs")
@dataclass(frozen=True)
class SolveStats:
    """What each step of a solve cost. ``pairs`` counts nested downset pairs before any pruning (None: not counted); of
    large lattices that is done when it is first asked for.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1)
    >>> solution.stats.layers, solution.stats.threads
    (26, 1)
    """

    layers: int
    contracted_layers: int
    downsets: int
    levels: int
    pairs: int | None
    threads: int
    lattice_s: float
    stage_costs_s: float
    search_s: float
    evaluations: tuple[EvaluationStats, ...]
    cluster: ClusterStats | None = None
    degrees: DegreeStats | None = None


@dataclass(frozen=True)
class BlockStats:
    """What merging operators into blocks gave up.

    downsets_before: of the layers (None: too many to count). downsets: of the blocks.
    largest_share: of the largest block in the work of all layers, or in their memory.
    choices_dropped: combinations of TMPCs within blocks that were left out.
    time_per_sample_s: of the best plan of whole blocks (None: none was found). proved: that it is the best of them.

    >>> stats = BlockStats(4000, 60, None, 1200, largest_share=0.04, choices_dropped=0)
    >>> f"{stats.layers} layers in {stats.blocks} blocks"
    '4000 layers in 60 blocks'
    """

    layers: int
    blocks: int
    downsets_before: int | None
    downsets: int
    largest_share: float
    choices_dropped: int
    time_per_sample_s: float | None = None
    proved: bool = False

    time_per_sample = renamed("time_per_sample", "time_per_sample_s")


@dataclass(frozen=True)
class Forecast:
    """What a solve will take, known before it starts; None where a figure could not be had cheaply.

    downsets, pairs: of the lattice. memory_bytes: peak of the process. seconds: of one thread on this machine; where
    downsets are too many to list them all, of a solve that lists those alone that plans as good as the best can use.

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

    reason: a sentence for the user. least_memory_bytes: the least memory per device (within 1 byte or 1e-9
    relative) with which this instance has a plan; None when no memory helps.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> found = piper_ray.solve(bert, memory_bytes="100MiB", threads=1).infeasibility
    >>> f"{found.least_memory_bytes / 2**20:.0f} MiB"
    '875 MiB'
    """

    reason: str
    least_memory_bytes: float | None


@dataclass(frozen=True)
class Solution:
    """What a solve found, and what it proved.

    time_per_sample_s: of ``plan`` as ``evaluate`` computes it; None without a plan.

    lower_bound_s: no plan is faster. gap: (time_per_sample_s - lower_bound_s) / time_per_sample_s.
    stopped_by: what ended the search before a proof; None when it ended by itself.
    blocks: what was given up when layers were merged into blocks; None if they were not. Its plans are of the layers,
    and ``lower_bound_s`` holds for all plans of these, whole blocks or not.
    schedule: what value and bound are of. Under a flush the value is the simulated time of a batch over N, and the
    bound one on every plan's. step: the terms of such a step.
    An OPTIMAL plan that was stopped is the best in time, but perhaps not the one of fewest devices and stages.

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
