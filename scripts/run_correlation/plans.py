"""The plans that are run: good and bad ones, of a small GPT on two cores, and of sleeping layers on 4 and 8 ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule, ScheduleName

LAYERS = 8
"""Blocks of the GPT: with its embeddings, norm and head 12 layers, numbered from 0."""


@dataclass(frozen=True)
class Trial:
    """borders: the layers that stages begin with, the first apart; replicas: d; recompute: all blocks do."""

    name: str
    schedule: Schedule
    borders: tuple[int, ...]
    microbatches: int
    sleeping: bool = False
    replicas: int = 1
    recompute: bool = False

    def plan(self, instance: Instance) -> Plan:
        layers = [layer.id for layer in instance.layers]
        ids = {layer.id: self._way(instance, layer.id) for layer in instance.layers}
        return Plan(
            tuple(
                Stage(tuple(layers[first:end]), self.replicas, 1, {layer: ids[layer] for layer in layers[first:end]})
                for first, end in pairwise((0, *self.borders, len(layers)))
            )
        )

    def _way(self, instance: Instance, layer: int) -> str:
        offered = [tmpc.id for tmpc in instance.layer_by_id[layer].tmpcs[1]]
        return "full" if self.recompute and "full" in offered else "plain"


_1F1B, _GPIPE = Schedule(ScheduleName.ONE_F_ONE_B), Schedule(ScheduleName.GPIPE)
_INTERLEAVED, _ZB_H1 = Schedule(ScheduleName.INTERLEAVED, 2), Schedule(ScheduleName.ZB_H1)

TRIALS = (
    Trial("2 stages, even", _1F1B, (6,), 8),
    Trial("2 stages, first too long", _1F1B, (9,), 8),
    Trial("2 stages, last too long", _1F1B, (3,), 8),
    Trial("2 stages, even, gpipe", _GPIPE, (6,), 8),
    Trial("2 stages, even, recomputed", _1F1B, (6,), 8, recompute=True),
    Trial("2 stages, interleaved", _INTERLEAVED, (4, 6, 9), 8),
    Trial("2 replicas, no pipeline", _1F1B, (), 8, replicas=2),
    Trial("4 stages, even", _1F1B, (4, 6, 8), 12, sleeping=True),
    Trial("4 stages, one too long", _1F1B, (2, 3, 9), 12, sleeping=True),
    Trial("4 ranks, interleaved", _INTERLEAVED, (2, 3, 4, 6, 7, 8, 10), 12, sleeping=True),
    Trial("4 stages, zero bubble", _ZB_H1, (4, 6, 8), 12, sleeping=True),
    Trial("8 stages, even", _1F1B, (3, 4, 5, 6, 7, 8, 9), 16, sleeping=True),
    Trial("8 stages, gpipe", _GPIPE, (3, 4, 5, 6, 7, 8, 9), 16, sleeping=True),
    Trial("8 stages, uneven", _1F1B, (2, 3, 4, 5, 6, 7, 10), 16, sleeping=True),
)
