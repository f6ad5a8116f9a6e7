"""Bounds on buckets of downsets: what they say, written plainly, and that they rule out no stage that fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import cycle
from random import Random

import numpy as np
import pytest

from piper_ray.engine.evaluation.state_tables import StateTables
from piper_ray.engine.kernels.scan import (
    UNREACHABLE,
    Scratch,
    crosses_much,
    find_jumping,
    jumped_s,
    jumping_s,
    list_jumps,
    make_scratch,
    open_among,
    priced_devices,
    refine,
    sum_crossing,
)
from piper_ray.engine.kernels.types import BucketArrays, GroupArrays, Threshold
from piper_ray.engine.lattice.layer_graph import bit_rows, members
from piper_ray.model.instance import Instance
from tests.instances import build, equal_chain, parallel_branches, random_instance, two_towers
from tests.kernel_support import Case, case, random_case, some_threshold_s, target_of
from tests.lengths import long_after

INSTANCES: dict[str, Instance] = {
    "towers": two_towers(4, devices=8, microbatches=12, memory_bytes=60.0),
    "branches": parallel_branches(2, 4, devices=9, microbatches=8, memory_bytes=70.0),
    **{
        f"random {seed}": random_instance(seed, most_layers=6, most_tmpcs=2).replace(devices=9)
        for seed in (0, 2, 3, 5, 7, 11, 12, 14)
    },
}


@dataclass
class Scan:
    """Fronts and buckets below a level, and room to work in. Target: whatever the devices allow."""

    made: Case
    target: Threshold
    states: StateTables
    scratch: Scratch

    def open(self, i: int, begin: int = 0, end: int | None = None) -> dict[int, tuple[int, int]]:
        """Least tally and sum of each bucket that work alone leaves open."""
        return self._open(i, self.states.buckets, begin, self.states.buckets_used if end is None else end)

    def open_groups(self, i: int) -> dict[int, tuple[int, int]]:
        """So of groups of buckets."""
        return self._open(i, self.states.groups, 0, int(self.states.groups.used[0]))

    def _open(self, i: int, parts: BucketArrays | GroupArrays, begin: int, end: int) -> dict[int, tuple[int, int]]:
        arrays, scratch = self.states.arrays, self.scratch
        listed = scratch.open_buckets
        list_jumps(i, arrays.tables.lattice, scratch)
        middle = (begin + end) // 2
        count = open_among(i, parts, begin, middle, arrays, scratch, listed, 0)
        count = open_among(i, parts, middle, end, arrays, scratch, listed, count)
        return {int(listed.number[at]): (int(listed.tally[at]), int(listed.total[at])) for at in range(count)}

    def refine(self, i: int, chosen: list[int]) -> dict[int, tuple[int, int, bool]]:
        """Least tally and sum of those that sharper bounds leave, and whether anything can jump."""
        arrays, scratch = self.states.arrays, self.scratch
        list_jumps(i, arrays.tables.lattice, scratch)
        sum_crossing(i, arrays.tables.lattice, arrays.tables.costs, scratch)
        found = {bucket: refine(i, bucket, arrays, scratch) for bucket in chosen}
        return {
            bucket: (int(tally), int(total), bool(touches))
            for bucket, (tally, total, touches) in found.items()
            if tally != UNREACHABLE
        }

    def priced(self, i: int, bucket: int, touches: bool) -> int:
        """The fewest devices of a stage, by a price on memory; ``refine`` has looked at I."""
        return int(priced_devices(i, bucket, touches, self.states.arrays, self.scratch))

    def members(self, bucket: int) -> list[int]:
        buckets = self.states.buckets
        found: list[int] = self.states.members.downset[
            buckets.member_start[bucket] : buckets.member_start[bucket + 1]
        ].tolist()
        return found

    def level(self, bucket: int) -> int:
        return len(self.made.sets[self.members(bucket)[0]])


def scans(made: Case, threshold_s: float, device_weight: int = 1) -> Iterator[tuple[Scan, int]]:
    """(scan, I) for each downset I, with all levels below its own finished."""
    target = target_of(made, threshold_s, device_weight=device_weight, stage_weight=int(device_weight > 1))
    states = StateTables(made.problem.tables, target)
    level_start = made.problem.lattice.level_start
    while states.level < level_start.size - 1:
        scratch = make_scratch(states.tables, max(1, states.buckets_used), made.problem.scratch)
        for i in range(level_start[states.level], level_start[states.level + 1]):
            yield Scan(made, target, states, scratch), i
        states.evaluate(states.level + 1, made.problem.scratch)


def jumps(made: Case, i: int, r: int, inner: frozenset[int]) -> float:
    """By definition: edges from outside I into ``inner``, and tensors that both cut, which a stage with an end of
    them pays once."""
    lattice, both_s = made.problem.lattice, made.problem.costs.both_s
    outer = made.sets[i]
    total = 0.0
    for e, (tail, head) in enumerate(zip(lattice.edge_tail.tolist(), lattice.edge_head.tolist(), strict=True)):
        if tail not in outer and head in outer & inner:
            total += both_s[r, e]
    for tensor, row in enumerate(lattice.tensor_bits):
        ends = set(members(row))
        if ends - outer and ends & outer & inner:
            in_stage = bool((ends & outer) - inner)
            total += both_s[r, lattice.edge_tail.size + tensor] * (0.5 if in_stage else 1.0)
    return total


@pytest.mark.parametrize("name", INSTANCES)
def test_what_jumps_over_a_stage(name: str) -> None:
    made = case(INSTANCES[name])
    lattice, costs = made.problem.lattice, made.problem.costs
    rng, size = Random(name), made.whole.graph.size
    for i in range(len(made.sets)):
        # Any set may stand for J, as the join of a bucket's members does.
        inner = frozenset(rng.sample(range(size), rng.randint(0, size)))
        rows = bit_rows([set(), inner], size)
        for r in range(made.problem.options.degree.size):
            assert jumping_s(i, r, rows, 1, lattice, costs) == pytest.approx(jumps(made, i, r, inner))
            assert jumping_s(i, r, rows, 0, lattice, costs) == 0.0


def mask_into_every_layer(length: int) -> Instance:
    """A chain whose first layer sends something to all others, as an attention mask is."""
    layers = {layer.id: {t: list(row) for t, row in layer.tmpcs.items()} for layer in equal_chain(length).layers}
    edges = {(v, v + 1): 1.0 for v in range(length - 1)} | {(0, v): 2.0 + v % 3 for v in range(2, length)}
    return build(layers, edges, name="mask")


@pytest.mark.parametrize("name", long_after(4, ["mask", *INSTANCES]))
def test_what_jumps_is_found_for_all_variants_at_once(name: str) -> None:
    """Where much crosses; for any set in J's place: of few layers, of most, and of all up to one of them."""
    made = case(INSTANCES[name] if name in INSTANCES else mask_into_every_layer(70))
    lattice, costs = made.problem.lattice, made.problem.costs
    rng, size, variants = Random(name), made.whole.graph.size, made.problem.options.degree.size
    much = 0
    for scan, i in scans(made, some_threshold(made, 1.1)):
        sum_crossing(i, lattice, costs, scan.scratch)
        sets = [frozenset(rng.sample(range(size), rng.randint(0, size))) for _ in range(3)]
        sets += [frozenset(range(rng.randint(0, size))) - frozenset(rng.sample(range(size), few)) for few in (0, 1)]
        rows = bit_rows([set(), *sets], size)
        for row, inner in enumerate([frozenset[int](), *sets]):
            if crosses_much(i, lattice, costs):
                find_jumping(i, rows, row, lattice, costs, scan.scratch)
                much += 1
            found = [jumped_s(i, r, rows, row, lattice, costs, scan.scratch) for r in range(variants)]
            assert found == pytest.approx([jumps(made, i, r, inner) for r in range(variants)], abs=1e-12)
    assert (much > 0) == (name == "mask")


def may_jump(made: Case, i: int, r: int, level: int) -> float:
    """Of what crosses into I, all that a downset of the level may hold some end of, by its size alone."""
    lattice, both_s = made.problem.lattice, made.problem.costs.both_s
    outer, total = made.sets[i], 0.0
    for e, (tail, head) in enumerate(zip(lattice.edge_tail.tolist(), lattice.edge_head.tolist(), strict=True)):
        if tail not in outer and head in outer and lattice.vertex_level[head] <= level:
            total += both_s[r, e]
    for tensor, row in enumerate(lattice.tensor_bits):
        ends = set(members(row))
        if ends - outer and any(lattice.vertex_level[v] <= level for v in ends & outer):
            total += both_s[r, lattice.edge_tail.size + tensor]
    return total


def test_level_of_a_vertex_is_the_size_of_the_least_downset_with_it() -> None:
    for instance in INSTANCES.values():
        made = case(instance)
        for v, level in enumerate(made.problem.lattice.vertex_level.tolist()):
            assert level == min(len(downset) for downset in made.sets if v in downset)


@pytest.mark.parametrize(("name", "device_weight"), long_after(2, zip(INSTANCES, cycle([1, 10]), strict=False)))
def test_open_buckets_by_their_formula(name: str, device_weight: int) -> None:
    made = case(INSTANCES[name])
    for factor in (0.7, 1.1, 3.0):
        for scan, i in scans(made, some_threshold(made, factor), device_weight):
            expected = opened_plainly(scan, i)
            assert scan.open(i) == expected
            middle = scan.states.buckets_used // 2
            some = scan.open(i, 0, middle) | scan.open(i, middle)
            assert some == expected, "in two parts"
            assert_groups_bound(scan, i, expected)


def assert_groups_bound(scan: Scan, i: int, buckets: dict[int, tuple[int, int]]) -> None:
    """No bucket that is open is in a group that is not, nor has less than its group."""
    groups, open_groups = scan.states.groups, scan.open_groups(i)
    for bucket, (tally, total) in buckets.items():
        group = int(np.searchsorted(groups.bucket_start[: int(groups.used[0])], bucket, side="right")) - 1
        assert open_groups[group][0] <= tally
        assert open_groups[group][1] <= total


def some_threshold(made: Case, factor: float) -> float:
    """A share of what all layers take on one device: brute force is too slow for the larger ones."""
    work = float(made.problem.workload.sums.replica_work_s[-1])
    return factor * max(1.0, work / 4)


def opened_plainly(scan: Scan, i: int) -> dict[int, tuple[int, int]]:
    made, target, buckets = scan.made, scan.target, scan.states.buckets
    costs, degrees = made.problem.costs, made.problem.options.degree.tolist()
    degrees_of_all = made.problem.cluster.divisors.tolist()
    expected = {}
    for bucket in range(scan.states.buckets_used):
        devices = math.inf
        for r, t in enumerate(degrees):
            largest_cap_s = max(float(costs.cap_s[j, r]) for j in scan.members(bucket))
            work_s = float(costs.need_s[i, r]) - largest_cap_s - may_jump(made, i, r, scan.level(bucket))
            replicas = max(1, math.ceil(work_s / target.threshold_s - 1e-9))
            devices = min(devices, t * next((d for d in degrees_of_all if d >= replicas), math.inf))
        if devices == math.inf:
            continue
        stage = int(devices)
        total = int(buckets.least_sum[bucket]) + math.ceil(stage / max(degrees))
        if buckets.least_devices[bucket] + stage <= target.device_limit[i] and total <= target.data_parallel_limit[i]:
            tally = int(buckets.least_tally[bucket]) + stage * target.device_weight + target.stage_weight
            expected[bucket] = tally, total
    return expected


@pytest.mark.parametrize("name", long_after(1, INSTANCES))
def test_refined_bounds_by_their_formula(name: str) -> None:
    """Between the formula in exact arithmetic and the same with a hair more time and memory."""
    made = case(INSTANCES[name])
    kept = rejected = 0
    for factor in (0.7, 1.1, 3.0):
        for scan, i in scans(made, some_threshold(made, factor)):
            chosen = list(range(scan.states.buckets_used))
            found = scan.refine(i, chosen)
            assert list(found) == sorted(found)
            for bucket in chosen:
                strict, loose = refined_plainly(scan, i, bucket, 0.0), refined_plainly(scan, i, bucket, 1e-6)
                if bucket in found:
                    tally, total, touches = found[bucket]
                    assert loose is not None
                    assert loose[0] <= tally
                    assert loose[1] <= total
                    assert strict is None or (tally <= strict[0] and total <= strict[1])
                    assert touches == any_can_jump(scan, i, bucket)
                    kept += 1
                else:
                    assert strict is None
                    rejected += 1
    assert kept > 0
    assert rejected > 0


def refined_plainly(scan: Scan, i: int, bucket: int, hair: float) -> tuple[int, int] | None:
    """Least tally and sum; None where no stage of a variant can be."""
    made, target = scan.made, scan.target
    costs, cluster = made.problem.costs, made.problem.cluster
    downsets = scan.members(bucket)
    meet = frozenset.intersection(*(made.sets[j] for j in downsets))
    join = frozenset.union(*(made.sets[j] for j in downsets))
    if not meet <= made.sets[i]:
        return None
    least_sum = min(int(scan.states.fronts.data_parallel_sum[scan.states.fronts.start[j]]) for j in downsets)
    memory = Fraction(cluster.memory_bytes) * (1 + Fraction(hair))
    threshold = Fraction(target.threshold_s) * (1 + Fraction(hair))
    stage_devices, stage_sum = [], []
    for r, t in enumerate(made.problem.options.degree.tolist()):
        if costs.missing[i, r] > max(int(costs.missing[j, r]) for j in downsets):
            continue

        def most(values: np.ndarray, r: int = r) -> Fraction:
            """What I has more of than the member with the most."""
            return Fraction(float(values[i, r])) - max(Fraction(float(values[j, r])) for j in downsets)

        work = Fraction(float(costs.need_s[i, r])) - max(Fraction(float(costs.cap_s[j, r])) for j in downsets)
        work -= Fraction(jumps(made, i, r, join)) + Fraction(hair)
        resync = max(Fraction(0), most(costs.resync_s) - Fraction(hair))
        shared = most(costs.least_shared) if costs.least_shared.size else Fraction(0)
        for _, d in made.degrees(r):
            y = -(-(least_sum + d) // d)
            fits = most(costs.least_a) * y + most(costs.least_b) + max(Fraction(0), shared) / d <= memory
            if fits and work + (d - 1) * resync <= threshold * d:
                stage_devices.append(t * d)
                stage_sum.append(d)
                break
    if not stage_devices:
        return None
    devices = int(scan.states.buckets.least_devices[bucket]) + min(stage_devices)
    total = least_sum + min(stage_sum)
    if devices > target.device_limit[i] or total > target.data_parallel_limit[i]:
        return None
    tally = (
        int(scan.states.buckets.least_tally[bucket]) + min(stage_devices) * target.device_weight + target.stage_weight
    )
    return tally, total


def any_can_jump(scan: Scan, i: int, bucket: int) -> bool:
    """Whether a vertex of some member has an edge, or a tensor, that crosses into I."""
    made, lattice = scan.made, scan.made.problem.lattice
    join = frozenset.union(*(made.sets[j] for j in scan.members(bucket)))
    outer = made.sets[i]
    edges = zip(lattice.edge_tail.tolist(), lattice.edge_head.tolist(), strict=True)
    heads = {head for tail, head in edges if tail not in outer and head in outer}
    for row in lattice.tensor_bits:
        ends = set(members(row))
        if ends - outer:
            heads |= ends & outer
    return bool(heads & join)


@pytest.mark.parametrize("seed", long_after(1, range(4)))
def test_no_stage_that_fits_is_ruled_out(seed: int) -> None:
    """Tried one by one: every state of I through a member of a bucket costs what the bounds say, or more."""
    made = random_case(seed)
    states = 0
    for factor in (1.0, 2.5):
        threshold_s = some_threshold_s(made, factor)
        for scan, i in scans(made, threshold_s * (1 + 1e-10)):
            opened = scan.open(i)
            near = scan.refine(i, sorted(opened))
            for bucket in range(scan.states.buckets_used):
                for devices, total in states_through(scan, i, bucket, Fraction(threshold_s)):
                    assert opened[bucket][0] <= near[bucket][0] <= devices
                    assert opened[bucket][1] <= total
                    assert near[bucket][1] <= total
                    fewest = int(scan.states.buckets.least_devices[bucket])
                    assert fewest + scan.priced(i, bucket, near[bucket][2]) <= devices
                    states += 1
    assert states > 0


@pytest.mark.long
def test_a_price_on_memory_asks_for_more_devices_where_memory_is_tight() -> None:
    """Than work and the least memory of each layer do: for some stages, and not for all."""
    more = no_more = 0
    for seed in range(40):
        made = random_case(seed, most_tmpcs=4)
        for factor in (0.5, 1.0, 1.5):
            for scan, i in scans(made, some_threshold_s(made, factor)):
                for bucket, (tally, _, touches) in scan.refine(i, list(range(scan.states.buckets_used))).items():
                    stage = tally - int(scan.states.buckets.least_tally[bucket])
                    more += scan.priced(i, bucket, touches) > stage
                    no_more += scan.priced(i, bucket, touches) <= stage
    assert more > 10
    assert no_more > 10


def states_through(scan: Scan, i: int, bucket: int, threshold: Fraction) -> Iterator[tuple[int, int]]:
    made, fronts, cluster = scan.made, scan.states.fronts, scan.made.problem.cluster
    for j in scan.members(bucket):
        if not made.sets[j] < made.sets[i]:
            continue
        layers = made.layers(i, j)
        for r in made.variants(layers):
            t = int(made.problem.options.degree[r])
            for state in range(fronts.start[j], fronts.start[j] + fronts.states[j]):
                later_sum, later_devices = int(fronts.data_parallel_sum[state]), int(fronts.tally[state])
                for _, d in made.degrees(r):
                    devices, total = later_devices + d * t, later_sum + d
                    if devices > cluster.devices or total > cluster.data_parallel_limit:
                        continue
                    time = made.time_s(layers, r, d, -(-total // d))
                    if time is not None and time <= threshold:
                        yield devices, total
