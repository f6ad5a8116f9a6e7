"""Piper as published: the paper's table with upstream's greedy choice of TMPCs."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.model.constraints import Recompute
from piper_ray.model.instance import Instance
from piper_ray.model.restrictions import Restrictions
from piper_ray.model.solution import Forecast
from piper_ray.planners.planner import Needs, Proposal
from piper_ray.planners.published.paper_table import (
    DEFAULT_TABLE_LIMIT_BYTES,
    TmpcChoice,
    bytes_per_downset,
    checked_limit_bytes,
    paper_table,
)


@dataclass(frozen=True)
class PiperPublished:
    """dp[I][k][s] over all downsets, on one thread: seconds to minutes at thousands of devices.

    Raises LimitError when the table would take more than ``table_limit_bytes``.
    """

    table_limit_bytes: int = DEFAULT_TABLE_LIMIT_BYTES

    def __post_init__(self) -> None:
        object.__setattr__(self, "table_limit_bytes", checked_limit_bytes(self.table_limit_bytes))

    def propose(self, instance: Instance, restrictions: Restrictions) -> Proposal:
        if restrictions.recompute in (Recompute.FIRST_K, Recompute.ONE_FOR_ALL):
            restrictions = restrictions.with_recompute(Recompute.ALL_OR_NONE)  # as far as the table can go
        table = paper_table(
            instance,
            restrictions=restrictions,
            choice=TmpcChoice.GREEDY,
            table_limit_bytes=self.table_limit_bytes,
        )
        size = f"table of {table.downsets:,} downsets and {table.pairs:,} pairs"
        if table.plan is None:
            return Proposal(None, table.pairs, f"no plan in a {size}")
        return Proposal(table.plan, table.pairs, f"{size}, greedy choice of TMPCs: {table.time_per_sample_s:.6g} s")

    def needs(self, lattice: Forecast, devices: int, microbatches: int) -> Needs:
        table_bytes = float(bytes_per_downset(devices, min(devices, microbatches))) * (lattice.downsets or 0)
        return Needs.of_tables(min(table_bytes, self.table_limit_bytes))
