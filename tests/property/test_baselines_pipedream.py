"""PipeDream's planner against its recurrence, written down plainly, and against trying all partitions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from random import Random

import pytest

from piper_ray.evaluate import evaluate
from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.errors import InvalidPlan
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.plan import Plan, Stage
from piper_ray.planners import Level, PipeDream, Recurrence, States, plan
from piper_ray.planners.runs import uniform_choices
from tests.instances import equal_chain, random_instance
from tests.lengths import long_after
from tests.solver_support import downsets_by_definition

NEVER = Restrictions(recompute=Recompute.NEVER)


# The state after each stage, front to back, with the stage's replication.
Pieces = list[tuple[frozenset[int], int]]


class Profile:
    """An instance as PipeDream sees it. A state is the set of layers up to some point."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        (self.choice,) = (
            choice
            for choice in uniform_choices(instance, NEVER)
            if choice.degree == choice.least_data_parallel_degree == 1
        )
        layers = frozenset(layer.id for layer in instance.layers)
        self.all = layers
        self.states = sorted((layers - tail for tail in downsets_by_definition(instance)), key=len)

    def total(self, figure: str, layers: frozenset[int]) -> float:
        return float(sum(getattr(self.choice.tmpcs[layer], figure) for layer in layers))

    def leaving_bytes(self, state: frozenset[int]) -> float:
        """What the layers of a state hand to others, each layer's activation once, and each tensor."""
        sizes: dict[int, float] = {}
        crossing = {edge.source for edge in self.instance.edges if edge.source in state and edge.target not in state}
        for edge in self.instance.edges:
            sizes[edge.source] = max(sizes.get(edge.source, 0.0), edge.communication_bytes)
        tensors = (x for x in self.instance.tensors if set(x.layers) & state and set(x.layers) - state)
        return sum(sizes[layer] for layer in crossing) + sum(tensor.forward_bytes for tensor in tensors)


def has_one_degree(instance: Instance) -> bool:
    """PipeDream knows t = 1 only, and TMPCs that any number of replicas may run."""
    return all(any(x.least_data_parallel_degree == 1 for x in layer.tmpcs.get(1, ())) for layer in instance.layers)


def recurrence_s(
    profile: Profile, levels: Sequence[Level], ratio: float | None, recurrence: Recurrence = Recurrence.PROGRAM
) -> float:
    """A[i][j][c] by definition, each level on top of the one below."""
    papers = recurrence is Recurrence.PAPER

    @cache
    def best_s(number: int, i: frozenset[int], j: frozenset[int], c: int) -> float:
        """At most c machines of level ``number`` for the layers between i and j."""
        bandwidth = levels[number].bandwidth_bytes_per_s
        below = levels[number - 1].machines if number else 1
        values = []
        for machines in range(1, c + 1):
            weights = profile.total("weights_bytes", j - i)
            if papers:
                values.append(
                    max(below_s(number, i, j), 2 * (machines - 1) * weights / (bandwidth * machines)) / machines
                )
                continue
            values.append(
                (below_s(number, i, j) + 4 * (machines - 1) * weights / (bandwidth * machines * below)) / machines
            )
        for k in profile.states:
            if not i < k < j:
                continue
            for m in range(1, c):
                weights = profile.total("weights_bytes", j - k)
                stage = (below_s(number, k, j) + 4 * (m - 1) * weights / (bandwidth * m)) / m
                if papers:
                    stage = max(below_s(number, k, j), 2 * (m - 1) * weights / (bandwidth * m)) / m
                if ratio is not None:
                    transfers = (profile.leaving_bytes(k), profile.leaving_bytes(j))
                    links = 1 if papers else m
                    stage = max(stage, *(2 * size / (bandwidth * links * ratio) for size in transfers))
                values.append(max(best_s(number, i, k, c - m), stage))
        return min(values)

    def below_s(number: int, i: frozenset[int], j: frozenset[int]) -> float:
        if number == 0:
            return profile.total("time_per_sample_s", j - i)
        return best_s(number - 1, i, j, levels[number - 1].machines)

    return best_s(len(levels) - 1, frozenset(), profile.all, levels[-1].machines)


def all_partitions(profile: Profile, machines: int, degrees: Sequence[int]) -> Iterator[Pieces]:
    def extend(state: frozenset[int], left: int) -> Iterator[Pieces]:
        if state == profile.all:
            yield []
            return
        for degree in degrees:
            if degree <= left:
                for longer in profile.states:
                    if state < longer:
                        for rest in extend(longer, left - degree):
                            yield [(longer, degree), *rest]

    yield from extend(frozenset(), machines)


def partition_s(profile: Profile, partition: Pieces) -> float:
    """PipeDream's value of a partition in one level of the instance's bandwidth, with r = 1."""
    bandwidth = profile.instance.bandwidth_bytes_per_s
    slowest, before = 0.0, frozenset[int]()
    for state, m in partition:
        layers = state - before
        weights = profile.total("weights_bytes", layers)
        stage = (profile.total("time_per_sample_s", layers) + 4 * (m - 1) * weights / (bandwidth * m)) / m
        if before:
            sent = max(profile.leaving_bytes(before), profile.leaving_bytes(state))
            stage = max(stage, 2 * sent / (bandwidth * m))
        slowest, before = max(slowest, stage), state
    return slowest


def as_plan(profile: Profile, partition: Pieces) -> Plan:
    stages, before = [], frozenset[int]()
    for state, degree in partition:
        layers = tuple(layer.id for layer in profile.instance.layers if layer.id in state - before)
        tmpcs: dict[int, Tmpc] = {layer: profile.choice.tmpcs[layer] for layer in layers}
        stages.append(Stage(layers, degree, 1, {layer: tmpc.id for layer, tmpc in tmpcs.items()}))
        before = state
    return Plan(tuple(stages))


@pytest.mark.parametrize("recurrence", Recurrence)
@pytest.mark.parametrize("ratio", [1.0, 0.5, None])
@pytest.mark.parametrize("machines", long_after(1, [[1], [4], [2, 3], [3, 2], [2, 1, 2]]))
def test_the_recurrence(machines: list[int], ratio: float | None, recurrence: Recurrence) -> None:
    checked = 0
    for seed in range(40):
        rng = Random(seed)
        instance = random_instance(seed).replace(devices=math.prod(machines))
        if not has_one_degree(instance):
            continue
        levels = tuple(Level(m, float(rng.choice([1, 2, 8]))) for m in machines)
        planner = PipeDream(levels, activation_compression_ratio=ratio, recurrence=recurrence)
        found = planner.partition(instance, NEVER)
        expected = recurrence_s(Profile(instance), levels, ratio, recurrence)
        assert found.time_per_stage_s == pytest.approx(expected, rel=1e-9, abs=0.0)
        assert sum(found.replication) <= math.prod(machines)
        checked += 1
    assert checked >= 15


@pytest.mark.long
def test_the_best_partition_that_fits_with_replications_that_divide_the_batch() -> None:
    feasible = tight = 0
    for seed in range(150):
        instance = random_instance(seed, most_layers=4)
        if not has_one_degree(instance):
            continue
        profile = Profile(instance)
        degrees = [d for d in range(1, instance.devices + 1) if instance.microbatches % d == 0]
        fitting, values = [], []
        for partition in all_partitions(profile, instance.data_parallel_limit, degrees):
            value = partition_s(profile, partition)
            values.append(value)
            try:
                evaluate(instance, as_plan(profile, partition))
            except InvalidPlan:
                continue
            fitting.append(value)
        result = plan(instance, "pipedream", restrictions=NEVER)
        assert (result.plan is None) == (not fitting), seed
        if result.plan is not None:
            feasible += 1
            tight += min(fitting) > min(values)
            before: frozenset[int] = frozenset()
            proposed = []
            for stage in result.plan.stages:
                before |= frozenset(stage.layers)
                proposed.append((before, stage.data_parallel_degree))
            assert partition_s(profile, proposed) == pytest.approx(min(fitting), rel=1e-9, abs=0.0)
    assert feasible >= 40
    assert tight >= 5


def test_levels_of_machines_propose_plans_that_evaluate() -> None:
    feasible = 0
    for seed in range(60):
        instance = random_instance(seed).replace(devices=8, memory_bytes=1e6)
        levels = (Level(2, 8.0), Level(4, 1.0))
        result = plan(instance, PipeDream(levels))
        if has_one_degree(instance):
            # Only replications that divide N and sum to no more than N can come out, unless a group alone is too large.
            assert (result.plan is None) == (instance.microbatches == 1 and "sum to 2" in result.note), result.note
        feasible += result.plan is not None
    assert feasible >= 30


def test_fewer_states_are_never_better() -> None:
    worse = 0
    for seed in range(60):
        instance = random_instance(seed, most_layers=7).replace(devices=5)
        if has_one_degree(instance):
            times = {states: PipeDream(states=states).partition(instance).time_per_stage_s for states in States}
            assert times[States.DOWNSETS] <= min(times.values()) * (1 + 1e-9)
            worse += max(times.values()) > times[States.DOWNSETS] * (1 + 1e-9)
    assert worse >= 3


def test_on_a_chain_all_states_are_the_same() -> None:
    found = [PipeDream(states=states).partition(equal_chain(7, devices=5)) for states in States]
    assert len({partition.time_per_stage_s for partition in found}) == 1
    assert [partition.states for partition in found] == [7, 7, 7]
