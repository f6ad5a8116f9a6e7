"""What solves of one workload on several numbers of devices share: lattice, tables, bounds and plans."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from piper_ray.engine.request import SolveRequest
from piper_ray.engine.series import Series, new_series
from piper_ray.model.schedule import Schedule
from piper_ray.model.solution import Solution, Status

_KEPT = 8
"""Of restated workloads, each of which is made anew for each number of devices."""


@dataclass
class Shared:
    """A series of solves for each workload, links and restrictions. schedules: of one name, with the numbers of chunks
    that may be. preparation_s: what is shared took so long to make.
    """

    schedules: Sequence[Schedule]
    preparation_s: float = 0.0
    _series: dict[Hashable, _Kept] = field(default_factory=dict)

    def solve(self, request: SolveRequest) -> Solution:
        """As ``engine.solve`` does, once restated and on one level of links. A proved answer is given again: that on
        one node is asked for with each number of nodes.
        """
        instance, cluster = request.instance, request.instance.cluster
        key = id(instance.layers), id(instance.edges), cluster.links, type(cluster), request.restrictions
        if key not in self._series:
            if len(self._series) >= _KEPT:
                del self._series[next(iter(self._series))]
            self._series[key] = _Kept(request, new_series(request, self.schedules))
        kept = self._series[key]
        point = instance.devices, request.data_parallel_limit
        if point in kept.proved:
            return kept.proved[point]
        found = kept.series.solve(request)
        if found.status in (Status.OPTIMAL, Status.INFEASIBLE):
            kept.proved[point] = found
        self.preparation_s += kept.series.preparation_s
        kept.series.preparation_s = 0.0
        return found


@dataclass
class _Kept:
    """first: whose layers and edges stay, so that no others get their id. proved: answers, by point."""

    first: SolveRequest
    series: Series
    proved: dict[Hashable, Solution] = field(default_factory=dict)
