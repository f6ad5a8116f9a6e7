"""What the points of one graph share, kept by each process that solves points.

Each process builds what it needs, and nothing is shipped: lattice and sums of Inception-v3's 221,565 downsets take some
30 ms, less than reading them from another machine would, and those of small graphs 2 ms. What a process holds is
bounded, and part of the memory that workers ask for (``demand``).
"""

from __future__ import annotations

from collections import OrderedDict

from piper_ray.engine.forecast import bytes_per_downset
from piper_ray.engine.preparation import PointShape, Preparation, prepare
from piper_ray.model.instance import Instance
from piper_ray.model.restrictions import Restrictions
from piper_ray.sweep.point import Point

KEPT = 8
KEPT_BYTES = 100e6
"""Of all that are kept beside the one in use."""


class Lattices:
    """By workload and shape; those used least recently go first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, PointShape], Preparation] = OrderedDict()

    def of(self, point: Point, instance: Instance) -> tuple[Preparation, float, float]:
        """With the seconds that lattice and stage costs took just now. Raises LimitError if it does not fit."""
        key = point.workload, PointShape.of(instance, point.restrictions)
        kept = self._kept.pop(key, None)
        self._make_room()
        if kept is not None and kept.serves(instance, point.restrictions):
            self._kept[key] = kept
            return kept, 0.0, 0.0
        made = self._kept[key] = prepare(instance, point.restrictions)
        return made, made.lattice_s, made.stage_costs_s

    def _make_room(self) -> None:
        while len(self._kept) >= KEPT or sum(map(_size_bytes, self._kept.values())) > KEPT_BYTES:
            self._kept.popitem(last=False)


def _size_bytes(made: Preparation) -> float:
    downsets = made.workload.lattice.size if made.workload is not None else 0
    return downsets * bytes_per_downset(made.outline.graph, len(made.outline.variants))


class KeptLattice:
    """What one point needs of ``Lattices``, once somebody asks. lattice_s, stage_costs_s: what was made for it took."""

    def __init__(self, lattices: Lattices, point: Point) -> None:
        self._lattices, self._point = lattices, point
        self.lattice_s = self.stage_costs_s = 0.0

    def prepare(self, instance: Instance, restrictions: Restrictions) -> Preparation:
        """Of the point's graph, under its restrictions. Raises LimitError if it does not fit."""
        assert restrictions == self._point.restrictions
        prepared, self.lattice_s, self.stage_costs_s = self._lattices.of(self._point, instance)
        return prepared
