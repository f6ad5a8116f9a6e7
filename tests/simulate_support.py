"""Instances and plans to simulate, small and made by hand; and lists of passes as the twin reads them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.simulate.actions import Actions, stage_of_chunk
from piper_ray.simulate.kernels.events import Floats
from piper_ray.simulate.stages import Hop, StageLoad
from piper_ray.simulate.timeline import PassSeconds, SimulatedRanks, Timeline, layout, program_of, run_program
from tests.simulate_twin import Link, Pass, Pipeline

GIB = 2.0**30

FLUSHED = [name for name in ScheduleName if name not in (ScheduleName.TWO_BW, ScheduleName.PIPEDREAM)]


def chain(
    times_s: Sequence[float],
    *,
    degrees: Sequence[int] = (1,),
    microbatches: int = 8,
    devices: int = 64,
    weights_bytes: float = 0.0,
    activation_bytes: float = GIB / 4,
    fixed_bytes: float = GIB,
    edge_bytes: float = 0.0,
    memory_bytes: float = 8 * GIB,
) -> Instance:
    """Layers in a row: forward and backward take so long together, the same at each tensor-parallel degree."""
    tmpc = [Tmpc("vanilla", time_s, weights_bytes, activation_bytes, fixed_bytes) for time_s in times_s]
    layers = tuple(Layer(i, f"layer_{i}", dict.fromkeys(degrees, (tmpc[i],))) for i in range(len(times_s)))
    edges = tuple(Edge(i, i + 1, edge_bytes) for i in range(len(times_s) - 1))
    return Instance(layers, edges, devices, microbatches, memory_bytes, GIB, name="chain")


def cut(sizes: Sequence[int], degrees: Sequence[int] | int = 1, tensor_parallel: int = 1) -> Plan:
    """The chain cut into stages of these numbers of layers."""
    stages, first = [], 0
    for number, size in enumerate(sizes):
        d = degrees if isinstance(degrees, int) else degrees[number]
        layers = tuple(range(first, first + size))
        stages.append(Stage(layers, d, tensor_parallel, dict.fromkeys(layers, "vanilla")))
        first += size
    return Plan(tuple(stages))


def placed(schedule: Schedule, replicas: Sequence[int]) -> SimulatedRanks:
    return layout(schedule, [StageLoad(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, d, 1) for d in replicas])


def run(
    where: SimulatedRanks,
    lists: Sequence[Actions],
    microbatches: int,
    seconds: Floats,
    hops: Sequence[Hop] | None = None,
    latency_s: float = 0.0,
) -> Timeline:
    """seconds: float64[stages, 4], of F, B, I, W. hops: free ones from each stage to the next, if not given."""
    if hops is None:
        hops = [Hop(j, j + 1, 0.0, 0.0) for j in range(len(seconds) - 1)]
    none = np.zeros_like(seconds)
    return run_program(where, program_of(where, lists, microbatches, PassSeconds(seconds, none), hops, latency_s), none)


def twin_of(
    where: SimulatedRanks, lists: Sequence[Actions], seconds: Floats, hops: Sequence[Hop], latency_s: float
) -> Pipeline:
    """The same for the twin, numbered its way."""
    passes: list[list[Pass]] = []
    for rank, actions in zip(where.ranks, lists, strict=True):
        passes.append(
            [
                (kind, rank.stages[chunk], k * where.replicas[rank.stages[chunk]] + rank.replica)
                for kind, chunk, k in actions.tolist()
            ]
        )
    ranks = [
        [number for number, rank in enumerate(where.ranks) if stage in rank.stages]
        for stage in range(len(where.replicas))
    ]
    links = [Link(hop.source, hop.target, hop.forward_s, hop.backward_s) for hop in hops]
    return Pipeline(passes, seconds.tolist(), ranks, links, latency_s)


def random_seconds(rng: random.Random, stages: int) -> Floats:
    """Forward, backward and its two parts, unrelated between stages."""
    rows = []
    for _ in range(stages):
        forward, inputs, weights = (rng.choice([0.0, 1.0, 2.0, rng.random(), 3 * rng.random()]) for _ in range(3))
        rows.append([forward, inputs + weights, inputs, weights])
    return np.array(rows)


def stage_passes(schedule: Schedule, ranks: int, rank: int, actions: Actions) -> list[Pass]:
    """With the plan's stages in place of the rank's chunks."""
    return [(kind, stage_of_chunk(schedule, ranks, rank, chunk), k) for kind, chunk, k in actions.tolist()]
