"""What a solve returns: the plan, what is proved about it, and what finding it cost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from piper_ray.model.plan import Plan


class Status(str, Enum):
    """OPTIMAL: proved. FEASIBLE: stopped early, ``gap`` says how far off it can be. INFEASIBLE: proved, no plan.

    UNKNOWN: stopped before a plan was found and before it was proved that there is none.
    """

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class EvaluationStats:
    """One threshold evaluation: is there a plan with every stage at most ``threshold_s``?

    live_downsets: downsets that kept a state. cells: states kept, over all downsets.
    blocks_tested, candidates_tested: bounds computed on whole blocks of downsets and on single ones.
    stages_costed: pairs that survived both and had their TMPC choice examined.
    """

    threshold_s: float
    feasible: bool
    seconds: float
    live_downsets: int
    cells: int
    blocks_tested: int
    candidates_tested: int
    stages_costed: int


@dataclass(frozen=True)
class NodeStats:
    """One machine of a cluster, by its host's name. blocks: answered. fetched_bytes: of tables. held_bytes: most at a
    time."""

    host: str
    blocks: int
    fetched_bytes: int
    held_bytes: int


@dataclass(frozen=True)
class ClusterStats:
    """What a cluster did. put_bytes: by the driver, once for each table. worked_s: of all workers together.

    waited_s: of the driver, for batches; the rest of the search is its own work.
    """

    workers: int
    batches: int
    blocks: int
    put_bytes: int
    worked_s: float
    waited_s: float
    nodes: tuple[NodeStats, ...]


@dataclass(frozen=True)
class SolveStats:
    """What each step of a solve cost. ``pairs`` counts nested downset pairs before any pruning (None: not counted)."""

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


@dataclass(frozen=True)
class BlockStats:
    """What merging operators into blocks gave up.

    downsets_before: of the layers (None: too many to count). downsets: of the blocks.
    largest_share: of the largest block in the work of all layers, or in their memory.
    choices_dropped: combinations of TMPCs within blocks that were left out.
    time_per_sample: of the best plan of whole blocks, in s (None: none was found). proved: that it is the best of them.
    """

    layers: int
    blocks: int
    downsets_before: int | None
    downsets: int
    largest_share: float
    choices_dropped: int
    time_per_sample: float | None = None
    proved: bool = False


@dataclass(frozen=True)
class Forecast:
    """What a solve will take, known before it starts; None where a figure could not be had cheaply.

    downsets, pairs: of the lattice. memory_bytes: peak of the process. seconds: of wall time on this machine.
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
    """

    reason: str
    least_memory_bytes: float | None


@dataclass(frozen=True)
class Solution:
    """time_per_sample: of ``plan``, in s, as ``evaluate`` computes it; None without a plan.

    lower_bound: no plan is faster, in s. gap: (time_per_sample - lower_bound) / time_per_sample.
    stopped_by: what ended the search before a proof ("time limit", "gap", "interrupt",
    "TMPC choice too hard", "blocks of operators"); None when it ended by itself.
    blocks: what was given up when layers were merged into blocks; None if they were not. Its plans are of the layers,
    and ``lower_bound`` holds for all plans of these, whole blocks or not.
    An OPTIMAL plan that was stopped is the best in time, but perhaps not the one of fewest devices and stages.
    """

    status: Status
    time_per_sample: float | None
    lower_bound: float
    plan: Plan | None
    stats: SolveStats
    infeasibility: Infeasibility | None = None
    stopped_by: str | None = None
    blocks: BlockStats | None = None

    @property
    def gap(self) -> float | None:
        if self.time_per_sample is None:
            return None
        if self.time_per_sample == 0.0:
            return 0.0
        return max(0.0, (self.time_per_sample - self.lower_bound) / self.time_per_sample)
