"""What the kernels' tests share: small problems by seed, and the stages of their lattices as sets of layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from piper_ray.engine.kernels.types import Threshold
from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.layer_graph import members
from piper_ray.engine.tables.problem import Problem
from piper_ray.model.instance import Instance
from tests.brute_force import brute_force, least_stage_time
from tests.instances import random_instance
from tests.solver_support import Tables, tables

Layers = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A small instance, its tables without contraction, and its downsets as sets of vertices."""

    instance: Instance
    whole: Tables
    sets: tuple[frozenset[int], ...]

    @property
    def problem(self) -> Problem:
        return self.whole.problem

    @property
    def divisors(self) -> list[int]:
        found: list[int] = self.problem.cluster.divisors.tolist()
        return found

    def layers(self, i: int, j: int) -> Layers:
        """Of the stage I \\ J."""
        return tuple(self.whole.graph.layer_ids[v] for v in sorted(self.sets[i] - self.sets[j]))

    def variants(self, layers: Layers) -> Iterator[int]:
        """Those in which each of the layers has an option."""
        for r, variant in enumerate(self.problem.workload.options.variants):
            if all(variant.tmpcs[layer] for layer in layers):
                yield r

    def degrees(self, r: int) -> Iterator[tuple[int, int]]:
        """(index, d) of the data-parallel degrees that a stage of the variant may have."""
        first, end = self.problem.cluster.first_divisor[r], self.problem.cluster.end_divisor[r]
        return ((index, d) for index, d in enumerate(self.divisors) if first <= index < end)

    def time_s(self, layers: Layers, r: int, d: int, y: int) -> Fraction | None:
        """The least time of the stage with y microbatches in flight, by trying every choice; None: none fits."""
        return least_stage_time(self.instance, layers, d, int(self.problem.options.degree[r]), y)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """(I, J) of all stages, by definition."""
        for i, outer in enumerate(self.sets):
            for j, inner in enumerate(self.sets):
                if inner < outer:
                    yield i, j


def case(instance: Instance) -> Case:
    whole = tables(instance, contraction=without_contraction())
    return Case(instance, whole, tuple(frozenset(members(row)) for row in whole.lattice.arrays.bits))


def random_case(seed: int, *, most_layers: int = 4, most_devices: int = 8, most_tmpcs: int = 3) -> Case:
    """With at least one variant that the devices suffice for."""
    while True:
        made = case(
            random_instance(seed, most_layers=most_layers, most_devices=most_devices, most_tmpcs=most_tmpcs).replace(
                devices=most_devices
            )
        )
        if made.problem.options.degree.size > 0:
            return made
        seed += 1000


def some_threshold_s(made: Case, factor: float) -> float:
    """``factor`` times the optimum; of what all layers take one after the other, where there is none."""
    best = brute_force(made.instance)
    if best is not None and best.time_per_sample_s > 0:
        return factor * float(best.time_per_sample_s)
    times = [min(x.time_per_sample_s for row in layer.tmpcs.values() for x in row) for layer in made.instance.layers]
    return factor * max(1.0, sum(times))


def target_of(made: Case, threshold_s: float, *, device_weight: int = 1, stage_weight: int = 0) -> Threshold:
    """Every downset may take all devices, and the whole sum of data-parallel degrees."""
    downsets, cluster = len(made.sets), made.problem.cluster
    return Threshold(
        threshold_s=threshold_s,
        device_weight=device_weight,
        stage_weight=stage_weight,
        device_limit=_constant(downsets, cluster.devices),
        data_parallel_limit=_constant(downsets, cluster.data_parallel_limit),
    )


def _constant(size: int, value: int) -> np.ndarray:
    """Read-only, as the tables that kernels are compiled for."""
    array = np.full(size, value, np.int64)
    array.setflags(write=False)
    return array


def least_work_s(made: Case, i: int, j: int, r: int) -> float:
    """What the stage I \\ J takes on one device at least: each layer its least time, each crossing edge the least
    that it is charged at its end in the stage, each tensor with ends in the stage and outside once.
    """
    instance, options = made.instance, made.problem.workload.options.tmpcs[r]
    vertex = {layer: v for v, layer in enumerate(made.whole.graph.layer_ids)}
    stage = set(made.layers(i, j))
    bandwidth = instance.bandwidth_bytes_per_s
    total = sum(min(x.time_per_sample_s for x in options[vertex[layer]]) for layer in stage)
    for edge in instance.edges:
        if edge.target in stage and edge.source not in stage:
            extra = min(x.forward_sync_bytes[edge.source] for x in options[vertex[edge.target]])
            total += 2 * (edge.communication_bytes + extra) / bandwidth
        if edge.source in stage and edge.target not in stage:
            extra = min(x.backward_sync_bytes[edge.target] for x in options[vertex[edge.source]])
            total += 2 * (edge.communication_bytes + extra) / bandwidth
    for tensor in instance.tensors:
        if stage & set(tensor.layers) and set(tensor.layers) - stage:
            total += (tensor.forward_bytes + tensor.backward_bytes) / bandwidth
    return float(total)
