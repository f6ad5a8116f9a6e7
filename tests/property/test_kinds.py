"""On devices of several kinds: the value is that of all plans simulated, and what holds of kinds among themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import piper_ray
from piper_ray.engine.flush import solve as flush_solve
from piper_ray.engine.one_setting import AlikeLayers, ModeSetting, worth_of
from piper_ray.model.cluster import Cluster, DeviceKind, Link
from piper_ray.model.constraints import Restrictions, SameDegrees, SameDegreesByKind, TensorParallelDegrees
from piper_ray.model.errors import CertificateRefused, UsageError
from piper_ray.model.instance import Batch, Edge, Instance, Layer, Tmpc
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import StoppedBy
from piper_ray.planners import KIND_PLANNERS
from piper_ray.planners import plan as baseline
from piper_ray.workloads.formats.upstream import to_upstream
from piper_ray.workloads.formats.workload_writer import to_toml
from tests.data import goldens
from tests.kinds_brute_force import least_batch_s, levelled_kinds, random_kinds
from tests.lengths import long_after

SCHEDULES = ("1f1b", "gpipe")


def solved(instance: Instance, schedule: str = "1f1b", threads: int = 1) -> Solution:
    return piper_ray.solve(instance, schedule=schedule, threads=threads)


@pytest.mark.parametrize("schedule", long_after(1, SCHEDULES))
@pytest.mark.parametrize("seeds", long_after(1, [range(10), range(10, 20)]), ids=str)
def test_two_kinds(seeds: range, schedule: str) -> None:
    assert sum(assert_best(with_levels_or_not(seed), schedule) for seed in seeds) > 4


@pytest.mark.parametrize("schedule", long_after(0, SCHEDULES))
def test_three_kinds(schedule: str) -> None:
    assert sum(assert_best(with_levels_or_not(seed, kinds=3), schedule) for seed in range(12)) > 3


def with_levels_or_not(seed: int, kinds: int = 2) -> Instance:
    """In turns."""
    return (levelled_kinds if seed % 2 else random_kinds)(seed, kinds)


def assert_best(instance: Instance, schedule: str) -> bool:
    """Whether there is a plan."""
    expected_s, found = least_batch_s(instance, schedule), solved(instance, schedule)
    if expected_s is None:
        assert found.status is Status.INFEASIBLE
        return False
    assert found.status is Status.OPTIMAL
    assert found.time_per_sample_s == pytest.approx(expected_s / instance.microbatches, rel=1e-9)
    assert found.plan is not None
    evaluated = piper_ray.evaluate(instance, found.plan, schedule=schedule)
    assert evaluated.time_per_sample_s == pytest.approx(found.time_per_sample_s, rel=1e-9)
    return True


@pytest.mark.long
def test_kept_instances() -> None:
    """Each other one, found by trying and simulating every plan, elsewhere; in Piper's JSON with kinds."""
    for record in goldens("kinds")[::2]:
        found = piper_ray.solve(record["instance"], schedule="1f1b", threads=1)
        if record["value_s"] is None:
            assert found.status is Status.INFEASIBLE
        else:
            assert found.status is Status.OPTIMAL
            assert found.time_per_sample_s == pytest.approx(record["value_s"], rel=1e-8)


@pytest.mark.parametrize("schedule", long_after(0, SCHEDULES))
def test_a_gap_that_is_met_is_said(schedule: str) -> None:
    """Whether or not edges that skip stages leave the rates open."""
    ended = 0
    for seed in range(16):
        made = random_kinds(seed)
        found = piper_ray.solve(made, schedule=schedule, threads=1, gap=0.5)
        assert found.stopped_by in (None, StoppedBy.GAP)
        assert (found.status is Status.FEASIBLE) is (found.stopped_by is StoppedBy.GAP)
        if found.gap is not None:
            assert found.gap <= 0.5
            best_s = solved(made, schedule).time_per_sample_s
            assert best_s is not None
            assert found.lower_bound_s <= best_s * (1 + 1e-9)
        ended += found.stopped_by is StoppedBy.GAP
    assert ended > 3


@pytest.mark.long
def test_two_equal_kinds_give_what_one_gives() -> None:
    """Of one t, as each kind has its own; and with whole stages of any d on each, as a stage lies on one kind."""
    plans = 0
    for seed in range(30):
        made = random_kinds(seed)
        own = replace(made.cluster.kinds[0].cluster, devices=12)  # what each d divides that divides N
        assert 12 % made.microbatches == 0
        rows = {x.id: tuple(y for y in x.tmpcs[1] if y.kind == "a") for x in made.layers}
        one = with_rows(made, replace(own, devices=24), {v: named(row, "") for v, row in rows.items()})
        cluster = Cluster.of_kinds([DeviceKind("a", own), DeviceKind("b", own)], own.bandwidth_bytes_per_s)
        two = with_rows(made, cluster, {v: named(row, "a") + named(row, "b") for v, row in rows.items()})
        alone, together = solved(one), solved(two)
        assert together.status is alone.status
        if alone.time_per_sample_s is not None:
            plans += 1
            assert together.time_per_sample_s == pytest.approx(alone.time_per_sample_s, rel=1e-9)
    assert plans > 10


def with_rows(instance: Instance, cluster: Cluster, rows: dict[int, tuple[piper_ray.Tmpc, ...]]) -> Instance:
    """rows: of t = 1."""
    layers = [replace(layer, tmpcs={1: rows[layer.id]}) for layer in instance.layers]
    return Instance(layers, instance.edges, cluster=cluster, batch=instance.batch, tensors=instance.tensors)


def named(row: tuple[piper_ray.Tmpc, ...], kind: str) -> tuple[piper_ray.Tmpc, ...]:
    return tuple(replace(tmpc, kind=kind) for tmpc in row)


@pytest.mark.parametrize("schedule", long_after(1, ["2bw", *SCHEDULES]))
def test_the_order_of_kinds_changes_nothing(schedule: str, few: bool) -> None:
    """Plans of the same value are many."""
    for seed in range(4 if few else 7):
        made = random_kinds(seed, 2 + seed % 2) if schedule == "2bw" else with_levels_or_not(seed, 2 + seed % 2)
        one, other = (solved(x, schedule) for x in (made, with_kinds_reversed(made)))
        assert (other.plan, other.time_per_sample_s) == (one.plan, one.time_per_sample_s)
        assert other.lower_bound_s == one.lower_bound_s


def with_kinds_reversed(made: Instance) -> Instance:
    kinds, between_bytes_per_s = made.cluster.kinds, made.cluster.between_bytes_per_s
    layers = [
        replace(x, tmpcs={t: tuple(sorted(row, key=lambda x: x.kind, reverse=True)) for t, row in x.tmpcs.items()})
        for x in made.layers
    ]
    return replace(made, layers=tuple(layers), cluster=Cluster.of_kinds(kinds[::-1], between_bytes_per_s or 0.0))


@pytest.mark.long
@pytest.mark.parametrize("what", long_after(2, ["devices", "memory", "link", "between"]))
def test_more_of_anything_is_never_slower(what: str) -> None:
    for seed in range(15):
        made = random_kinds(seed)
        first, second = made.cluster.kinds
        own, between = first.cluster, made.cluster.between_bytes_per_s or 0.0
        if what == "devices":
            own = replace(own, devices=own.devices + 2)
        elif what == "memory":
            own = replace(own, memory_bytes=own.memory_bytes * 2)
        elif what == "link":
            own = replace(own, links=(replace(own.links[0], bandwidth_bytes_per_s=own.bandwidth_bytes_per_s * 2),))
        else:
            between *= 2
        cluster = Cluster.of_kinds([DeviceKind("a", own), second], between)
        more = Instance(made.layers, made.edges, cluster=cluster, batch=made.batch, tensors=made.tensors)
        before_s, after_s = (solved(x).time_per_sample_s for x in (made, more))
        if before_s is not None:
            assert after_s is not None
            assert after_s <= before_s * (1 + 1e-9)


@pytest.mark.parametrize("schedule", long_after(0, SCHEDULES))
def test_one_t_for_all_kinds_is_the_best_of_each_t(schedule: str) -> None:
    """And no plan is faster than the bound by which settings for all layers are ruled out."""
    asked, differing = Restrictions(constraints=[SameDegrees()]), 0
    for seed in (*range(10), 30, 40, 70, 94, 113):  # the latter have better plans with two t
        made = random_kinds(seed)
        found, free = piper_ray.solve(made, schedule=schedule, restrictions=asked, threads=1), solved(made, schedule)
        each_s = [
            piper_ray.solve(
                made, schedule=schedule, restrictions=Restrictions(constraints=[TensorParallelDegrees((t,))]), threads=1
            ).time_per_sample_s
            for t in made.degrees
        ]
        assert found.time_per_sample_s == min((x for x in each_s if x is not None), default=None)
        for rules, best in ((asked, found), (Restrictions(), free)):
            worth = worth_of(made, rules, Schedule.of(schedule))
            assert worth.least_s <= (best.time_per_sample_s or worth.least_s)
            assert worth.least_s < float("inf") or best.plan is None
        if found.plan is not None:
            assert not [*asked.violations(made, found.plan)]
        if free.plan is not None:
            assert not [*SameDegreesByKind().violations(made, free.plan)]
        differing += found.time_per_sample_s != free.time_per_sample_s
    assert differing > 2


@pytest.mark.parametrize("schedule", long_after(1, SCHEDULES))
def test_stages_that_hold_all_layers_rule_out_only_what_no_plan_takes(schedule: str) -> None:
    """Within the time of the best plan; and within less if one kind has little memory."""
    ample, tight = (Cluster(2, memory_bytes, (Link(1e9),)) for memory_bytes in (99.0, 3.0))
    tmpcs = {1: tuple(Tmpc("plain", 1.0, activation_bytes=1.0, fixed_bytes=1.0, kind=kind) for kind in "ab")}
    chain = Instance(
        [Layer(v, "block", tmpcs) for v in range(8)],
        [Edge(v, v + 1, 0.0) for v in range(7)],
        cluster=Cluster.of_kinds([DeviceKind("a", ample), DeviceKind("b", tight)], 1e9),
        batch=Batch(16),
    )
    feasible = 0
    for made in (chain, *(random_kinds(seed, kinds=2 + seed % 2) for seed in range(12))):
        kinds, under = AlikeLayers.of(made), (Restrictions(), Schedule.of(schedule))
        setting, found_s = ModeSetting(kinds, kinds.sample, {}), solved(made, schedule).time_per_sample_s
        assert found_s is None or setting.may_take(found_s, *under)
        feasible += found_s is not None
        if made is chain and found_s is not None:
            assert worth_of(made, *under).least_s < 0.8 * found_s
            assert not setting.may_take(0.8 * found_s, *under)
    assert feasible > 10


def test_threads_and_forms_of_files_give_the_same_plan(tmp_path: Path) -> None:
    for seed in range(6):
        made = with_levels_or_not(seed)
        path = tmp_path / f"{seed}.toml"
        path.write_text(to_toml(made), encoding="utf-8")
        read, other = piper_ray.load(path), piper_ray.load(to_upstream(made))
        assert read.digest == other.digest
        assert read.cluster == other.cluster == made.cluster
        assert solved(read).plan == solved(other, threads=2).plan


def test_a_certificate_is_of_plans_whose_kinds_differ_in_t_too() -> None:
    made = with_levels_or_not(30, kinds=2)
    found = solved(made, "1f1b")
    plan, time_s = found.plan, found.time_per_sample_s
    assert plan is not None
    assert time_s is not None
    assert [stage.tensor_parallel_degree for stage in plan.stages] == [1, 2]
    certified = piper_ray.verify_certificate(made, piper_ray.certify(made, found, threads=1), threads=1)
    assert certified.silent_on(made, plan, time_s, Schedule.of("1f1b")) == ()
    assert certified.gap(time_s) == pytest.approx(0.0, abs=3e-9)


@pytest.mark.parametrize("schedule", long_after(1, SCHEDULES))
@pytest.mark.parametrize("kinds", long_after(1, [2, 3]))
def test_certificates_are_of_every_plan_and_no_more_is_proved(kinds: int, schedule: str) -> None:
    """The check's own look at all plans agrees with trying and simulating each; what is above it is refused."""
    plans = 0
    for seed in range(12 // kinds):
        made = with_levels_or_not(seed, kinds=kinds)
        certificate = piper_ray.certify(made, solved(made, schedule), threads=1)
        assert not certificate.prices
        bound_s, expected_s = (
            piper_ray.verify_certificate(made, certificate, threads=1).bound_s,
            least_batch_s(made, schedule),
        )
        if expected_s is None:
            assert bound_s == float("inf")
            continue
        plans += 1
        assert bound_s * made.microbatches == pytest.approx(expected_s, rel=3e-9)
        for off in (1e-8, 0.1, float("inf")):
            with pytest.raises(CertificateRefused, match="is faster"):
                piper_ray.verify_certificate(made, replace(certificate, bound_s=bound_s * (1 + off)), threads=1)
        with pytest.raises(CertificateRefused, match="leaves out plans"):
            piper_ray.verify_certificate(made, replace(certificate, schedule=PAPERS_SCHEDULE), threads=1)
    assert plans > 2


@pytest.mark.long
def test_nobody_by_hand_is_faster_than_the_solver() -> None:
    """Each plan is one that the restrictions of a flush allow, on kinds that are there; and some are as good."""
    slower = as_good = 0
    for seed in range(12):
        made = random_kinds(seed)
        best_s = solved(made).time_per_sample_s
        for name in KIND_PLANNERS:
            found = baseline(made, name, schedule="1f1b").time_per_sample_s
            if found is not None:
                assert best_s is not None
                assert found >= best_s * (1 - 1e-9)
                slower += found > best_s * 1.001
                as_good += found <= best_s * 1.001
        assert baseline(made, "piper", schedule="1f1b").time_per_sample_s == best_s
        with pytest.raises(UsageError, match="for devices that are alike, and these are of several kinds"):
            baseline(made, "megatron", schedule="1f1b")
    assert min(slower, as_good) > 3
    with pytest.raises(UsageError, match="for devices of several kinds, and these are alike"):
        baseline(piper_ray.estimate("bert-large", "A100-80"), "one-kind", schedule="1f1b")


@pytest.mark.parametrize(("seed", "schedule"), [(42, "gpipe"), (49, "1f1b"), (59, "1f1b")])
def test_bounds_over_borders_are_for_one_kind_alone(seed: int, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made for large graphs: here for each."""
    for limit in ("_CHAIN_SHARE", "_BORDERS_FROM"):
        monkeypatch.setattr(flush_solve, limit, 0)
    assert assert_best(random_kinds(seed), schedule)
