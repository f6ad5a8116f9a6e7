"""The paper's table from an instance, and the plan read back from it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from piper_ray.evaluate import MEMORY_TOLERANCE
from piper_ray.model import arguments
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import LimitError
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan, Stage
from piper_ray.planners.published.kernel import Arrays, Floats, enumerate_downsets, flatten
from piper_ray.workloads.formats.load import Source, instance_of

if TYPE_CHECKING:
    from piper_ray.planners.published.kernel import Choosing, Constants

DEFAULT_TABLE_LIMIT_BYTES = 4 * 2**30


class TmpcChoice(str, Enum):
    """GREEDY: upstream's heuristic, whose value is at or above the optimum. EXACT: the best choice that fits."""

    GREEDY = "greedy"
    EXACT = "exact"


@dataclass(frozen=True)
class PaperTableResult:
    """time_per_sample_s: the time that the table says; None when there is no plan.

    downsets, pairs: rows of the table, and nested pairs of downsets. table_bytes: what the table took.
    seconds: wall time of all of it (compilation too, when it is the first).
    """

    time_per_sample_s: float | None
    plan: Plan | None
    downsets: int
    pairs: int
    table_bytes: int
    seconds: float


def bytes_per_downset(devices: int, data_parallel_limit: int) -> int:
    """The bytes of the table: dp[I], a number for each k and s."""
    return 8 * (devices + 1) * (data_parallel_limit + 1)


def paper_table(
    instance: Instance | Source,
    *,
    restrictions: Restrictions | None = None,
    choice: TmpcChoice = TmpcChoice.EXACT,
    table_limit_bytes: int = DEFAULT_TABLE_LIMIT_BYTES,
) -> PaperTableResult:
    """Piper's dynamic program as published: dp[I][k][s] over all downsets, on one thread.

    With GREEDY the value is what the published implementation finds, which treats times within 1e-9 s as equal.
    Raises LimitError when the table would take more than ``table_limit_bytes``, InputError for an instance that is not
    sound and UsageError for arguments that make no sense.
    """
    begin = time.perf_counter()
    if restrictions is None:
        restrictions = Restrictions()
    arguments.of_kind("restrictions", restrictions, Restrictions, "Restrictions")
    choice = arguments.choice("choice", choice, TmpcChoice)
    table_limit_bytes = checked_limit_bytes(table_limit_bytes)
    instance = instance_of(instance)
    row_bytes = bytes_per_downset(instance.devices, instance.data_parallel_limit)
    most = table_limit_bytes // row_bytes
    downsets = enumerate_downsets(instance, most)
    if len(downsets) > most:
        raise LimitError(
            f"the paper's table takes {row_bytes:,} bytes for each downset, and there are more than {most:,}: "
            f"over the limit of {table_limit_bytes:,} bytes; raise table_limit_bytes, or use the threshold solver"
        )
    arrays = flatten(instance, downsets, restrictions)
    cluster = _cluster(instance, restrictions)
    from piper_ray.planners.published.kernel import Choosing, fill

    table = np.empty((len(downsets), instance.devices + 1, instance.data_parallel_limit + 1))
    choosing = Choosing(exact=False, lower_s=0.0, upper_s=np.inf)
    pairs = fill(arrays, table, cluster, choosing)
    if choice is TmpcChoice.EXACT and table[-1, -1, -1] < np.inf:
        # A hair wider than the bounds themselves, which are rounded sums.
        choosing = Choosing(
            exact=True,
            lower_s=_work_bound_s(instance, arrays) * (1.0 - 1e-12),
            upper_s=table[-1, -1, -1] * (1.0 + 1e-12),
        )
        fill(arrays, table, cluster, choosing)
    plan = _plan(instance, arrays, table, cluster, choosing) if table[-1, -1, -1] < np.inf else None
    return PaperTableResult(
        time_per_sample_s=None if plan is None else float(table[-1, -1, -1]),
        plan=plan,
        downsets=len(downsets),
        pairs=pairs,
        table_bytes=table.nbytes,
        seconds=time.perf_counter() - begin,
    )


def checked_limit_bytes(given: object) -> int:
    """``table_limit_bytes`` as a whole number. Raises UsageError."""
    return int(arguments.number_from("table_limit_bytes", given, 1.0, "a number of bytes of at least 1"))


def _cluster(instance: Instance, restrictions: Restrictions) -> Constants:
    from piper_ray.planners.published.kernel import Constants

    degrees = restrictions.data_parallel_degrees(instance)
    return Constants(
        devices=instance.devices,
        data_parallel_limit=instance.data_parallel_limit,
        microbatches=instance.microbatches,
        memory_bytes=float(instance.memory_bytes * (1.0 + MEMORY_TOLERANCE)),
        bandwidth_bytes_per_s=float(instance.cluster.holding(instance.devices).bandwidth_bytes_per_s),
        data_parallel_degrees=np.array(degrees, dtype=np.int64),
    )


def _work_bound_s(instance: Instance, arrays: Arrays) -> float:
    """No plan is faster than all devices busy all the time with each layer's least t * p."""
    layers = len(instance.layers)
    work = np.full(layers, np.inf)
    for i, t in enumerate(arrays.degrees):
        for v in range(layers):
            options = slice(arrays.option_start[i * layers + v], arrays.option_start[i * layers + v + 1])
            work[v] = min(work[v], np.min(t * arrays.time_s[options], initial=np.inf))
    return float(work.sum()) / instance.devices


def _plan(instance: Instance, arrays: Arrays, table: Floats, cluster: Constants, choosing: Choosing) -> Plan:
    from piper_ray.planners.published.kernel import find_stage

    layers = len(instance.layers)
    stages = []
    big, k, s = (size - 1 for size in table.shape)
    while big > 0:
        # A cell may have its value from a smaller budget: go to the smallest, where a stage attains it.
        while table[big, k - 1, s] == table[big, k, s]:
            k -= 1
        while table[big, k, s - 1] == table[big, k, s]:
            s -= 1
        small, degree, d, options = find_stage(arrays, table, (big, k, s), cluster, choosing)
        t = int(arrays.degrees[degree])
        members = np.flatnonzero(arrays.member[big] & ~arrays.member[small])
        tmpc_ids = {
            instance.layers[v].id: instance.layers[v].tmpcs[t][option - arrays.option_start[degree * layers + v]].id
            for v, option in zip(members, options, strict=True)
        }
        stages.append(Stage(tuple(tmpc_ids), int(d), t, tmpc_ids))
        big, k, s = small, k - t * d, s - d
    return Plan(tuple(stages))
