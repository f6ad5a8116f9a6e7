"""One setting for all layers, and whole pieces: against every plan that keeps them, found by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from random import Random

import pytest

import piper_ray
from piper_ray.engine.one_setting import settings_of, together, worth_of, worths_of
from piper_ray.engine.request import KeptSearches, SolveRequest, Sought
from piper_ray.engine.subproblems import Solver, SubProblem, best_of
from piper_ray.model.cluster import Cluster, Link
from piper_ray.model.constraints import KeepOrder, Recompute, Restrictions, SameDegrees, WholePieces
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance, Layer, Tmpc
from piper_ray.model.mode import Recomputation
from piper_ray.model.one_mode import OneMode, tmpcs_under
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.plan_rules import in_order
from piper_ray.model.schedule import Schedule, ScheduleName, StepTerms
from piper_ray.model.solution import Solution
from tests.export_support import mixture
from tests.flush_brute_force import plan_batch_s
from tests.instances import build, two_towers
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD

_IDS = ("plain", "sp", "selective", "sp+selective", "full", "sp+full", "plain+zero2", "sp+full+zero2", "offload")


def instance_of(seed: int) -> Instance:
    """A chain whose layers have some of these configurations each."""
    rng = Random(f"settings {seed}")
    count = rng.randint(2, 4)

    def row() -> list[Tmpc]:
        ids = rng.sample(_IDS, rng.randint(1, 4))
        return [
            Tmpc(
                name,
                rng.uniform(1, 9),
                rng.uniform(0, 5),
                rng.uniform(0, 4),
                rng.uniform(0, 4),
                recompute="full" in name or "selective" in name,
                least_data_parallel_degree=2 if "zero2" in name else 1,
            )
            for name in sorted(ids)
        ]

    return build(
        {v: {1: row()} for v in range(count)},
        {(v, v + 1): rng.uniform(0, 3) for v in range(count - 1)},
        devices=4,
        microbatches=rng.choice([2, 4]),
        memory_bytes=rng.choice([1e6, rng.uniform(6, 30)]),
    )


def axes(tmpc: Tmpc) -> tuple[str, bool, bool, bool]:
    words = tmpc.id.split("+")
    kind = "full" if "full" in words else "selective" if "selective" in words else "none"
    return kind, "sp" in words, "zero2" in words, "offload" in words


def is_uniform(layers: tuple[Layer, ...], chosen: dict[int, Tmpc], allowed: set[str]) -> bool:
    """Whether some setting has every layer run as chosen: sequence parallelism first, then shards, offload (there is
    none), recomputation. Who has not got it does without, who cannot do without keeps it.
    """
    for kind, sequence, sharded in product(sorted(allowed), (False, True), (False, True)):
        wanted = {1: sequence, 2: sharded, 3: False, 0: kind}
        plain = {1: False, 2: False, 3: False, 0: "none"}
        for layer in layers:
            left = [x for x in layer.tmpcs[1] if axes(x)[0] in allowed] or list(layer.tmpcs[1])
            for axis, value in wanted.items():
                has = [x for x in left if axes(x)[axis] == value]
                left = has or [x for x in left if axes(x)[axis] == plain[axis]] or left
            if chosen[layer.id] not in left:
                break
        else:
            return True
    return False


def best_s(instance: Instance, keeps: object, pieces: tuple[tuple[int, ...], ...] = ()) -> float | None:
    """Of all plans with stages in a row, one d and t = 1, whose choices ``keeps`` admits."""
    layers, n = instance.layers, len(instance.layers)
    chain, best = in_order(instance), None
    assert callable(keeps)
    for d in (x for x in range(1, instance.microbatches + 1) if instance.microbatches % x == 0):
        for cuts in (cut for size in range(n) for cut in combinations(range(1, n), size)):
            borders = [0, *cuts, n]
            if len(borders) - 1 > instance.devices // d or any(
                min(piece) < cut <= max(piece) for piece in pieces for cut in cuts
            ):
                continue
            for row in product(*(layer.tmpcs[1] for layer in layers)):
                chosen = {layer.id: tmpc for layer, tmpc in zip(layers, row, strict=True)}
                if not keeps(chosen):
                    continue
                stages = tuple(
                    Stage(tuple(range(a, b)), d, 1, {v: chosen[v].id for v in range(a, b)})
                    for a, b in pairwise(borders)
                )
                try:
                    found_s = plan_batch_s(chain, Plan(stages), "1f1b")
                except AssertionError:
                    continue
                best = found_s if best is None else min(best, found_s)
    return best


def check(instance: Instance, restrictions: Restrictions, expected_s: float | None) -> bool:
    solution = piper_ray.solve(instance, restrictions=restrictions, schedule="1f1b", options=ONE_THREAD)
    if expected_s is None:
        assert solution.plan is None
        return False
    assert solution.plan is not None
    assert solution.status.value == "optimal"
    assert solution.time_per_sample_s == pytest.approx(expected_s / instance.microbatches, rel=1e-9)
    assert list(restrictions.violations(instance, solution.plan, solution.schedule)) == []
    return True


@pytest.mark.parametrize("seeds", long_after(1, [range(start, start + 20) for start in range(0, 40, 20)]), ids=str)
def test_the_best_of_all_plans_in_one_setting(seeds: range, few: bool) -> None:
    feasible = 0
    for seed in seeds[:10] if few else seeds:
        instance = instance_of(seed)
        rng = Random(seed)
        kinds = {"none", *rng.sample(["selective", "full"], rng.randint(0, 2))}
        rule = OneMode(tuple(part for kind in kinds for part in Recomputation.of(kind).parts))
        expected_s = best_s(instance, lambda chosen, i=instance, k=kinds: is_uniform(i.layers, chosen, k))
        feasible += check(instance, Restrictions(constraints=[KeepOrder(), rule]), expected_s)
    assert feasible > len(seeds) // 3


@pytest.mark.long
def test_the_best_under_a_rule_of_recomputation() -> None:
    """Of layers that have the choice all recompute, none do, or all do the same."""
    feasible = 0
    for seed in range(24):
        instance, rule = instance_of(seed), (Recompute.ALWAYS, Recompute.NEVER, Recompute.ONE_FOR_ALL)[seed % 3]
        allowed = {Recompute.ALWAYS: [{True}], Recompute.NEVER: [{False}]}.get(rule, [{True}, {False}])

        def keeps(chosen: dict[int, Tmpc], i: Instance = instance, able: list[set[bool]] = allowed) -> bool:
            choice = [x.id for x in i.layers if len({tmpc.recompute for tmpc in x.tmpcs[1]}) > 1]
            made = {chosen[layer].recompute for layer in choice}
            return is_uniform(i.layers, chosen, {"none", "selective", "full"}) and any(made <= one for one in able)

        expected_s = best_s(instance, keeps)
        rules = Restrictions(recompute=rule, constraints=[KeepOrder(), OneMode()])
        feasible += check(instance, rules, expected_s)
    assert feasible > 12


def test_violations_are_told_of_what_the_definition_forbids() -> None:
    rule, told = OneMode(), 0
    for seed in range(24):
        instance = instance_of(seed)
        rng = Random(seed)
        chosen = {layer.id: rng.choice(layer.tmpcs[1]) for layer in instance.layers}
        plan = Plan((Stage(tuple(chosen), 2, 1, {v: x.id for v, x in chosen.items()}),))
        uniform = is_uniform(instance.layers, chosen, {"none", "selective", "full"})
        assert (not list(rule.violations(instance, plan))) == uniform, (seed, chosen)
        told += not uniform
    assert 5 < told < 38


def test_whole_pieces_stay_whole() -> None:
    feasible = 0
    for seed in range(30):
        instance = instance_of(seed)
        pieces = ((0, 1),) if len(instance.layers) < 4 else ((0, 1), (2, 3))
        instance = replace(
            instance,
            layers=tuple(replace(layer, tmpcs={1: layer.tmpcs[1][:2]}) for layer in instance.layers),
        )
        expected_s = best_s(instance, lambda _: True, pieces)
        feasible += check(instance, Restrictions(constraints=[KeepOrder(), WholePieces(pieces)]), expected_s)
    assert feasible > 10


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "zb-h1"])
def test_pieces_that_read_each_other_are_refused_by_name(schedule: str) -> None:
    """The first and the last of three layers: what lies between reads one and is read by the other."""
    instance = two_towers(3)
    apart = Restrictions(constraints=[WholePieces(((0, 2),))])
    name, between = f"{instance.layers[0].name} to {instance.layers[2].name}, 2 layers", instance.layers[1].name
    with pytest.raises(UsageError, match="pieces that are to stay whole need each other") as raised:
        piper_ray.solve(instance, restrictions=apart, schedule=schedule, options=ONE_THREAD)
    assert repr(name) in str(raised.value)
    assert repr(between) in str(raised.value)


@pytest.mark.parametrize("seed", long_after(3, range(6)))
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "2bw", Schedule(ScheduleName.INTERLEAVED, 2)])
def test_no_plan_of_a_setting_is_faster_than_its_bound(seed: int, schedule: str | Schedule) -> None:
    instance = instance_of(seed)
    rules = Restrictions(constraints=[SameDegrees()] if seed % 2 or schedule != "2bw" else [])
    worth = worth_of(instance, rules, schedule if isinstance(schedule, Schedule) else Schedule.of(schedule))
    found = piper_ray.solve(instance, restrictions=rules, schedule=schedule, options=ONE_THREAD)
    if worth.least_s == float("inf"):
        assert found.plan is None
    elif found.time_per_sample_s is not None:
        assert worth.least_s <= found.time_per_sample_s


@pytest.mark.parametrize("layers", [4, 5])
@pytest.mark.parametrize("schedule", ["1f1b", Schedule(ScheduleName.INTERLEAVED, 2)])
def test_no_plan_within_a_node_is_faster_than_the_bound(schedule: str | Schedule, layers: int) -> None:
    """Replicas sum heavy gradients over the links of their node, a hundred times faster than the others."""
    row = Tmpc("plain", 4.0, 10.0, 1.0, 1.0, least_data_parallel_degree=6)
    edges = {(v, v + 1): 0.0 for v in range(layers - 1)}
    flat = build({v: {1: [row]} for v in range(layers)}, edges, devices=12, microbatches=12)
    links = Link(flat.bandwidth_bytes_per_s, 12), Link(flat.bandwidth_bytes_per_s / 100.0)
    instance = flat.replace(cluster=Cluster(12, flat.memory_bytes, links))
    rules = Restrictions(constraints=[SameDegrees()])
    worth = worth_of(instance, rules, schedule if isinstance(schedule, Schedule) else Schedule.of(schedule))
    found = piper_ray.solve(instance, restrictions=rules, schedule=schedule, options=ONE_THREAD)
    assert found.plan is not None
    assert found.time_per_sample_s is not None
    assert {stage.data_parallel_degree for stage in found.plan.stages} == {6}
    assert worth.least_s <= found.time_per_sample_s


@pytest.mark.parametrize("schedule", long_after(1, ["1f1b", "gpipe"]))
def test_stages_in_order_rule_out_only_what_no_plan_takes(schedule: str) -> None:
    """Against solves of each setting, within the time of its best plan and within a little less."""
    rules, under, feasible, ruled_out = Restrictions(constraints=[SameDegrees()]), Schedule.of(schedule), 0, 0
    for instance in map(instance_of, range(8)):
        for one in settings_of(instance, rules.adding(OneMode())).worth_a_solve:
            found = piper_ray.solve(one.instance, restrictions=rules, schedule=schedule, options=ONE_THREAD)
            if found.time_per_sample_s is None:
                continue
            assert one.may_take(found.time_per_sample_s, rules, under)
            feasible += 1
            ruled_out += not one.may_take(0.9 * found.time_per_sample_s, rules, under)
    assert feasible > 10
    assert ruled_out > 3


@pytest.mark.parametrize("seed", long_after(3, range(18)))
def test_settings_are_bounded_together(seed: int) -> None:
    """No setting has a plan below the bound of all, and a search that begins with that bound finds its best plan."""
    instance, rules = instance_of(seed), Restrictions(constraints=[SameDegrees()])
    settings = settings_of(instance, rules.adding(OneMode())).worth_a_solve

    def solved(of: Instance, kept: KeptSearches | None = None, within_s: float | None = None) -> Solution:
        options = replace(ONE_THREAD, gap=0.0, within_s=within_s)
        return piper_ray.solve(of, restrictions=rules, schedule="interleaved", options=options, kept=kept)

    alone = [solved(one.instance) for one in settings]
    bounded = KeptSearches(seeks=Sought.BOUND)
    within_s = min((one.time_per_sample_s or math.inf for one in alone), default=math.inf)
    of_all = solved(together(settings).instance, bounded, None if within_s == math.inf else 1.1 * within_s)
    for one, found in zip(settings, alone, strict=True):
        least_s = found.lower_bound_s if found.time_per_sample_s is None else found.time_per_sample_s
        assert of_all.lower_bound_s <= least_s * (1.0 + 1e-9)
        within_s = 1.01 * (found.time_per_sample_s or 1.0)
        helped, quick = (solved(one.instance, bounded.for_parts(x), within_s) for x in (Sought.BOTH, Sought.PLAN))
        assert helped.time_per_sample_s == found.time_per_sample_s
        assert quick.time_per_sample_s is None or quick.time_per_sample_s >= least_s * (1.0 - 1e-9)
        assert max(helped.lower_bound_s, quick.lower_bound_s) <= least_s * (1.0 + 1e-9)


@pytest.mark.long
def test_settings_are_begun_in_the_order_of_their_promise_and_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mixture with context and expert parallelism and shared state, bounds rule out most settings."""
    begun: list[SolveRequest] = []
    plain = best_of

    def counted(
        request: SolveRequest, parts: Sequence[SubProblem], solve: Solver, *, are_nested: bool = False
    ) -> Solution:
        if are_nested:  # levels of links, of one setting
            return plain(request, parts, solve, are_nested=True)

        def solve_one(one: SolveRequest) -> Solution:
            begun.append(one)
            return solve(one)

        return plain(request, parts, solve_one)

    monkeypatch.setattr("piper_ray.engine.one_setting.best_of", counted)
    instance, rule = mixture(), OneMode(context=True, experts=True)
    found = piper_ray.solve(
        instance, restrictions=Restrictions(constraints=[SameDegrees(), rule]), schedule="1f1b", options=ONE_THREAD
    )
    assert found.status.value == "optimal"
    each = [
        piper_ray.solve(
            one, restrictions=Restrictions(constraints=[SameDegrees()]), schedule="1f1b", options=ONE_THREAD
        )
        for one in rule.under_each(instance, rule.modes(instance))
    ]
    assert found.time_per_sample_s == min(one.time_per_sample_s for one in each if one.time_per_sample_s is not None)
    assert len(begun) < len(each) / 2


@pytest.mark.parametrize("seed", long_after(3, range(12)))
def test_all_settings_together_are_each_by_itself(seed: int) -> None:
    instance, rule = instance_of(seed), OneMode()
    settings = rule.modes(instance)
    alone = [next(rule.under_each(instance, [setting])) for setting in settings]
    assert list(rule.under_each(instance, settings)) == alone
    for one, setting in zip(rule.under_each(instance, settings), settings, strict=True):
        for layer, mine in zip(instance.layers, one.layers, strict=True):
            assert mine.tmpcs == {t: left for t, row in layer.tmpcs.items() if (left := tmpcs_under(row, setting))}


@pytest.mark.parametrize("name", long_after(0, ["1f1b", "gpipe", "interleaved", "2bw"]))
def test_settings_valued_together_by_kinds_of_layers_are_each_by_itself(name: str) -> None:
    """Of a mixture, whose layers are of few kinds, and of chains without two layers alike."""
    rule = OneMode(context=True, experts=True)
    rules, schedule = Restrictions(constraints=[SameDegrees()]), Schedule.first_of(name)
    for instance in (mixture(), *map(instance_of, range(20))):
        settings = settings_of(instance, rules.adding(rule))
        listed = [*settings.worth_a_solve, *(one for one, _ in settings.others)]
        alone = list(rule.under_each(instance, rule.modes(instance)))
        rows = [[layer.tmpcs for layer in one.layers] for one in alone]
        for one in listed:
            own = [layer.tmpcs for layer in one.instance.layers]
            assert any(all(x.items() <= y.items() for x, y in zip(own, whole, strict=True)) for whole in rows)
        for one, worth in zip(listed, worths_of(listed, rules, schedule, StepTerms()), strict=True):
            assert worth == pytest.approx(worth_of(one.instance, rules, schedule), rel=1e-12)


def test_each_row_of_a_mode_is_in_one_setting_and_none_is_lost() -> None:
    """At t = 1 there is no sequence parallelism: modes with it and without have the same plans there."""
    instance, rule = mixture(), OneMode(context=True, experts=True)
    settings = settings_of(instance, Restrictions(constraints=[SameDegrees(), rule]))

    def rows(one: Instance, t: int) -> str:
        return repr([layer.tmpcs.get(t, ()) for layer in one.layers])

    kept = [(t, rows(one.instance, t)) for one in settings.worth_a_solve for t in one.tables]
    beaten = [(t, rows(one.instance, t)) for one, _ in settings.others for t in one.tables]
    assert len(kept) == len(set(kept))
    for narrowed in rule.under_each(instance, rule.modes(instance)):
        for t in narrowed.degrees:
            if all(layer.tmpcs.get(t) for layer in narrowed.layers):
                assert (t, rows(narrowed, t)) in {*kept, *beaten}
