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
    """borders: the layers that stages begin with, the first apart; replicas: d of all stages, or of each; recompute:
    all blocks do; in_flight: of each stage, where it is not the rule's; vertical_sync: under PipeDream."""

    name: str
    schedule: Schedule
    borders: tuple[int, ...]
    microbatches: int
    sleeping: bool = False
    replicas: int | tuple[int, ...] = 1
    recompute: bool = False
    in_flight: tuple[int, ...] | None = None
    vertical_sync: bool = False

    @property
    def degrees(self) -> tuple[int, ...]:
        """d of each stage."""
        stages = len(self.borders) + 1
        return (self.replicas,) * stages if isinstance(self.replicas, int) else self.replicas

    def plan(self, instance: Instance) -> Plan:
        layers = [layer.id for layer in instance.layers]
        ids = {layer.id: self._way(instance, layer.id) for layer in instance.layers}
        cuts = pairwise((0, *self.borders, len(layers)))
        stages = [
            Stage(tuple(layers[first:end]), d, 1, {layer: ids[layer] for layer in layers[first:end]})
            for (first, end), d in zip(cuts, self.degrees, strict=True)
        ]
        return Plan(tuple(stages), in_flight=self.in_flight)

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

_2BW, _PIPEDREAM = Schedule(ScheduleName.TWO_BW), Schedule(ScheduleName.PIPEDREAM)

ASYNCHRONOUS = (
    Trial("asynchronous, 4 stages", _2BW, (4, 6, 8), 12, sleeping=True),
    Trial("asynchronous, 4 stages", _PIPEDREAM, (4, 6, 8), 12, sleeping=True),
    Trial("asynchronous, 4 stages, vertical sync", _PIPEDREAM, (4, 6, 8), 12, sleeping=True, vertical_sync=True),
    Trial("asynchronous, 1, 2, 1 replicas in turn", _2BW, (4, 8), 12, sleeping=True, replicas=(1, 2, 1)),
    Trial("asynchronous, 1, 2, 1 replicas in turn", _PIPEDREAM, (4, 8), 12, sleeping=True, replicas=(1, 2, 1)),
    Trial(
        "asynchronous, 1, 2, 1, one more in flight",
        _2BW,
        (4, 8),
        12,
        sleeping=True,
        replicas=(1, 2, 1),
        in_flight=(5, 2, 1),
    ),
)

LEARNING = (
    Trial("1f1b, drained after each batch", _1F1B, (4,), 8),
    Trial("2bw", _2BW, (4,), 8),
    Trial("pipedream", _PIPEDREAM, (4,), 8),
    Trial("pipedream, vertical sync", _PIPEDREAM, (4,), 8, vertical_sync=True),
)
"""Of the GPT that learns to count: 4 blocks."""
