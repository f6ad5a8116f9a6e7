"""What the tests of the solver share: its tables for an instance, what every solution must keep, odd instances."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from random import Random

import pytest

from piper_ray.cost.variants import stage_variants
from piper_ray.engine.backends.local import LocalBackend
from piper_ray.engine.evaluation.backend import Activity, NextBatch, OnProgress
from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.kernels.types import LevelStates
from piper_ray.engine.lattice.contraction import Contraction, contract
from piper_ray.engine.lattice.downsets import Lattice, build_lattice
from piper_ray.engine.lattice.layer_graph import LayerGraph, build_graph
from piper_ray.engine.tables.problem import LatticeTables, Problem, build_problem
from piper_ray.engine.tables.tmpc_options import build_options
from piper_ray.evaluate import evaluate
from piper_ray.model.constraints import Restrictions
from piper_ray.model.events import Listener
from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from piper_ray.model.options import SolveOptions
from piper_ray.model.solution import Solution, Status

ONE_THREAD = SolveOptions(threads=1)
PROOF = 1e-9
MANY = 10**7


@dataclass(frozen=True)
class Tables:
    """The solver's own tables of an instance."""

    contraction: Contraction
    graph: LayerGraph
    lattice: Lattice
    problem: Problem


def tables(
    instance: Instance, restrictions: Restrictions = Restrictions(), contraction: Contraction | None = None
) -> Tables:
    """As ``solve`` builds them; with another contraction if one is given."""
    variants = [v for v in stage_variants(instance, restrictions) if v.degree <= instance.devices]
    contraction = contract(instance, variants) if contraction is None else contraction
    graph = build_graph(instance, contraction)
    lattice = build_lattice(graph, MANY)
    workload = LatticeTables.build(lattice, build_options(instance, graph, variants))
    return Tables(
        contraction, graph, lattice, build_problem(workload, instance, restrictions.data_parallel_degrees(instance))
    )


def assert_optimal(instance: Instance, solution: Solution) -> None:
    """Proved, and the plan is worth what the solution says."""
    assert solution.status is Status.OPTIMAL
    assert solution.stopped_by is None
    assert solution.infeasibility is None
    assert solution.gap is not None
    assert solution.gap <= PROOF * (1 + 1e-6)
    assert_plan_is_worth_its_value(instance, solution)


def assert_plan_is_worth_its_value(instance: Instance, solution: Solution) -> None:
    assert solution.plan is not None
    assert solution.time_per_sample_s is not None
    assert evaluate(instance, solution.plan).time_per_sample_s == solution.time_per_sample_s
    assert solution.lower_bound_s <= solution.time_per_sample_s


def same_answer(one: Solution, other: Solution) -> bool:
    """Byte for byte, all but the clock."""

    def answer(solution: Solution) -> tuple[object, ...]:
        return (
            solution.status,
            solution.time_per_sample_s,
            solution.lower_bound_s,
            solution.plan and solution.plan.to_dict(),
            solution.infeasibility,
            [replace(evaluation, seconds=0.0) for evaluation in solution.stats.evaluations],
        )

    return answer(one) == answer(other)


@dataclass
class RecordingBackend:
    """A LocalBackend that keeps the states of the last evaluation, (tally, data-parallel sum), by downset."""

    threads: int = 1
    levels: int = 0
    fronts: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._local = LocalBackend(self.threads)

    def next_batch(self, states: StateTables) -> NextBatch:
        return self._local.next_batch(states)

    def listen(self, listener: Listener) -> None:
        self._local.listen(listener)

    def activity(self) -> Activity:
        return self._local.activity()

    def stats(self) -> None:
        return None

    def evaluate_downsets(self, states: StateTables, first: int, last: int, on_progress: OnProgress) -> LevelStates:
        found = self._local.evaluate_downsets(states, first, last, on_progress)
        self.levels += 1
        pairs = list(zip(found.tallies.tolist(), found.sums.tolist(), strict=True))
        for downset, count in enumerate(found.counts.tolist(), start=first):
            self.fronts[downset], pairs = pairs[:count], pairs[count:]
        assert not pairs
        return found

    def close(self) -> None:
        self._local.close()


def send_every_level_to_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small levels too, which otherwise stay with the caller."""
    monkeypatch.setattr("piper_ray.engine.backends.local._SMALL_LEVEL_S", 0.0)


def downsets_by_definition(instance: Instance) -> list[frozenset[int]]:
    """All sets of layer ids closed under successors."""
    ids = [layer.id for layer in instance.layers]
    subsets = (frozenset(subset) for size in range(len(ids) + 1) for subset in combinations(ids, size))
    return [s for s in subsets if all(edge.target in s for edge in instance.edges if edge.source in s)]


def random_graph(rng: Random, layers: int, density: float) -> Instance:
    """A random DAG whose layers cost next to nothing to describe; layers and edges in random order."""
    ids = rng.sample(range(1000), layers)
    pairs = [(u, v) for u, v in combinations(ids, 2) if rng.random() < density]
    rng.shuffle(pairs)
    return graph_only(rng.sample(ids, layers), pairs)


def graph_only(ids: Iterable[int], pairs: Sequence[tuple[int, int]]) -> Instance:
    """Layers of one second each, on one device."""

    def layer(v: int) -> Layer:
        forward = {tail: 0.0 for tail, head in pairs if head == v}
        backward = {head: 0.0 for tail, head in pairs if tail == v}
        return Layer(v, f"layer{v}", {1: (Tmpc("vanilla", 1.0, 0.0, 0.0, 0.0, forward, backward),)})

    return Instance(tuple(map(layer, ids)), tuple(Edge(u, v, 1.0) for u, v in pairs), 4, 4, 1e6, 4.0)


def renumbered(instance: Instance, rng: Random) -> Instance:
    """The same workload under other ids, with layers, edges and degrees in another order."""
    ids = [layer.id for layer in instance.layers]
    new = dict(zip(ids, rng.sample(range(-500, 500), len(ids)), strict=True))

    def rename(tmpc: Tmpc) -> Tmpc:
        return replace(
            tmpc,
            forward_sync_bytes={new[u]: size for u, size in tmpc.forward_sync_bytes.items()},
            backward_sync_bytes={new[w]: size for w, size in tmpc.backward_sync_bytes.items()},
        )

    layers = [
        Layer(
            new[layer.id],
            layer.name,
            {t: tuple(map(rename, layer.tmpcs[t])) for t in rng.sample(list(layer.tmpcs), len(layer.tmpcs))},
        )
        for layer in instance.layers
    ]
    edges = [Edge(new[edge.source], new[edge.target], edge.communication_bytes) for edge in instance.edges]
    return replace(
        instance,
        layers=tuple(rng.sample(layers, len(layers))),
        edges=tuple(rng.sample(edges, len(edges))),
        tensors=tuple(
            replace(tensor, layers=tuple(rng.sample([new[layer] for layer in tensor.layers], len(tensor.layers))))
            for tensor in rng.sample(instance.tensors, len(instance.tensors))
        ),
    )
