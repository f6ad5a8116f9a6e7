"""Graphs whose downsets are made as states reach them have the answers of those whose downsets are all listed."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import piper_ray
from piper_ray.engine import preparation
from piper_ray.engine.evaluation.cell_cover import CellCover
from piper_ray.engine.ledger import Ledger
from piper_ray.engine.preparation import Outline
from piper_ray.engine.search import wide
from piper_ray.engine.search.cells import bound_by_cells
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import LimitError
from piper_ray.model.events import Event, Listener, Note, silent
from piper_ray.model.instance import Instance
from piper_ray.model.options import SolveOptions
from piper_ray.model.solution import Solution, Status
from piper_ray.model.stop import StoppedBy, StopSearch
from tests.brute_force import brute_force
from tests.instances import equal_chain, parallel_branches, random_instance, two_towers
from tests.lengths import long_after
from tests.link_rates import with_levels
from tests.operator_graphs import traced_towers
from tests.solver_support import ONE_THREAD, assert_optimal, assert_plan_is_worth_its_value


def solved_wide(instance: Instance, monkeypatch: pytest.MonkeyPatch, **options: float) -> Solution:
    """As if its downsets were too many to list."""

    def refused(*_: object, **__: object) -> None:
        raise LimitError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "lattice_within", refused)
        return piper_ray.solve(instance, options=SolveOptions(threads=1, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("bucket", long_after(1, range(2)))
def test_brute_force(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0
    for seed in range(15 * bucket, 15 * (bucket + 1)):
        instance = random_instance(seed, most_layers=4, most_devices=8, most_tmpcs=3)
        best = brute_force(instance)
        found = solved_wide(instance, monkeypatch)
        if best is None:
            assert found.status is Status.INFEASIBLE
            continue
        seen += 1
        assert found.status is Status.OPTIMAL
        assert_plan_is_worth_its_value(instance, found)
        assert found.time_per_sample_s == pytest.approx(float(best.time_per_sample_s), rel=2e-9)
        assert found.lower_bound_s <= float(best.time_per_sample_s) * (1 + 1e-12)
    assert seen >= 8


@pytest.mark.parametrize(
    "instance",
    long_after(
        3,
        [
            two_towers(9, devices=8, memory_bytes=60.0),
            two_towers(12, devices=16),
            parallel_branches(3, 4, devices=6),
            equal_chain(12, devices=5, memory_bytes=40.0),
            *(random_instance(seed, most_layers=9, most_devices=12) for seed in range(200, 216)),
            random_instance(1, most_layers=3).replace(devices=1),
        ],
    ),
    ids=lambda instance: instance.name,
)
def test_the_plan_is_that_of_the_whole_lattice(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = piper_ray.solve(instance, options=ONE_THREAD)
    if whole.status is Status.INFEASIBLE:
        assert solved_wide(instance, monkeypatch).status is Status.INFEASIBLE
        return
    found = solved_wide(instance, monkeypatch)
    assert_optimal(instance, found)
    assert found.plan == whole.plan
    assert found.time_per_sample_s == pytest.approx(whole.time_per_sample_s, rel=2e-9)


@pytest.mark.long
def test_too_many_of_these_leave_a_plan_and_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = two_towers(12, devices=7, memory_bytes=50.0)
    whole = piper_ray.solve(instance, options=ONE_THREAD)
    monkeypatch.setattr(wide, "_SOME_STEPS", 1)
    monkeypatch.setattr(wide, "_MOST_STEPS", 1)
    monkeypatch.setattr(wide, "_FEW_STEPS", 1)
    found = solved_wide(instance, monkeypatch)
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.TOO_MANY_DOWNSETS)
    assert_plan_is_worth_its_value(instance, found)
    assert whole.time_per_sample_s is not None
    assert found.lower_bound_s <= whole.time_per_sample_s <= found.time_per_sample_s  # type: ignore[operator]


def test_a_gap_that_is_enough_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = solved_wide(two_towers(12, devices=7, memory_bytes=50.0), monkeypatch, gap=0.9)
    assert (found.status, found.stopped_by) == (Status.FEASIBLE, StoppedBy.GAP)


class Log:
    """The notes among all events."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Note):
            self.notes.append(event.text)


def solved_with_many(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, listener: Listener = silent, **options: Any
) -> Solution:
    """As if 20 downsets were too many to list them all."""
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_MANY", 20)
        patch.setattr(preparation, "_MANY_A_LAYER", 1)
        return piper_ray.solve(instance, options=SolveOptions(threads=1, **options), listener=listener)


MANY = parallel_branches(2, 5, devices=6)


def test_how_many_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    some, many = (Outline.of(parallel_branches(1, branches), Restrictions()) for branches in (12, 21))
    assert not preparation.is_wide(some)
    assert preparation.is_wide(many)
    monkeypatch.setattr(preparation, "_MANY_A_LAYER", 100_000)
    assert not preparation.is_wide(many)


@pytest.mark.parametrize("seed", long_after(3, range(300, 306)))
def test_many_are_not_all_listed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = with_levels(Random(seed), random_instance(seed, most_layers=9, most_devices=12, density=0.2))
    assert same_result(solved_with_many(instance, monkeypatch), piper_ray.solve(instance, options=ONE_THREAD))


def test_of_many_those_are_listed_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    found, whole = solved_with_many(MANY, monkeypatch, log), piper_ray.solve(MANY, options=ONE_THREAD)
    assert same_result(found, whole)
    assert found.stats.downsets < whole.stats.downsets == 66
    assert log.notes == ["66 downsets: only those that a best plan can use are listed"]
    assert found.stats.evaluations


def test_all_are_listed_where_those_that_count_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = piper_ray.solve(MANY, options=ONE_THREAD)
    monkeypatch.setattr(wide, "_SOME_STEPS", 1)
    monkeypatch.setattr(wide, "_MOST_STEPS", 1)
    monkeypatch.setattr(wide, "_FEW_STEPS", 1)
    found = solved_with_many(MANY, monkeypatch)
    assert same_result(found, whole)
    assert found.stats.downsets == whole.stats.downsets


def test_a_checkpoint_is_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = solved_with_many(MANY, monkeypatch, resume=str(tmp_path / "kept"))
    assert same_result(found, piper_ray.solve(MANY, options=ONE_THREAD))
    assert found.stats.downsets == 66
    log = Log()
    solved_with_many(MANY, monkeypatch, log, resume=str(tmp_path / "kept"))
    assert any("are on record" in note for note in log.notes)


def test_a_layer_without_a_tmpc_has_no_plan_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = parallel_branches(1, 6)
    none = replace(instance.layers[3], tmpcs={4: instance.layers[3].tmpcs[1]})
    instance = replace(instance, layers=(*instance.layers[:3], none, *instance.layers[4:])).replace(devices=3)
    found = solved_with_many(instance, monkeypatch)
    assert found.status is Status.INFEASIBLE
    assert found.infeasibility == piper_ray.solve(instance, options=ONE_THREAD).infeasibility


def test_why_there_is_no_plan_is_told_where_all_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = parallel_branches(2, 5, devices=2, memory_bytes=20.0)
    found, whole = solved_with_many(instance, monkeypatch), piper_ray.solve(instance, options=ONE_THREAD)
    assert found.status is whole.status is Status.INFEASIBLE
    assert found.infeasibility == whole.infeasibility
    assert found.infeasibility is not None
    assert found.infeasibility.least_memory_bytes is not None
    refused = solved_wide(instance, monkeypatch)
    assert refused.status is Status.INFEASIBLE
    assert refused.infeasibility is not None
    assert "too wide to find how much memory" in refused.infeasibility.reason


@pytest.mark.parametrize("seen", [0, 1, 3, 30, 100])
def test_a_limit_leaves_a_bound_that_holds(seen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is reached after ``seen`` looks at it."""
    whole = piper_ray.solve(MANY, options=ONE_THREAD)
    looks = 0

    def check(self: Ledger[Any], done: int = 0) -> None:  # noqa: ARG001 - as the method has it
        nonlocal looks
        looks += 1
        if looks > seen:
            raise StopSearch(StoppedBy.TIME_LIMIT)

    monkeypatch.setattr(Ledger, "check", check)
    found = solved_with_many(MANY, monkeypatch)
    assert found.stopped_by is StoppedBy.TIME_LIMIT
    assert whole.time_per_sample_s is not None
    assert 0.0 < found.lower_bound_s <= whole.time_per_sample_s
    if found.plan is None:
        assert found.status is Status.UNKNOWN
    else:
        assert found.status is Status.FEASIBLE
        assert_plan_is_worth_its_value(MANY, found)


def test_a_search_ends_once_no_plan_is_fast_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = piper_ray.solve(MANY, options=ONE_THREAD)
    assert whole.time_per_sample_s is not None
    found = solved_with_many(MANY, monkeypatch, within_s=whole.time_per_sample_s * 0.9)
    assert found.stopped_by is StoppedBy.TOO_SLOW
    assert whole.time_per_sample_s * 0.9 < found.lower_bound_s <= whole.time_per_sample_s


def same_result(one: Solution, other: Solution) -> bool:
    """But for what it took."""
    return (one.status, one.time_per_sample_s, one.lower_bound_s, one.plan, one.stopped_by) == (
        other.status,
        other.time_per_sample_s,
        other.lower_bound_s,
        other.plan,
        other.stopped_by,
    )


def test_orders_with_runs_elsewhere_give_a_faster_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bounds and lists, only chains are searched."""
    instance = traced_towers(2, 3, 2, devices=12)
    best = piper_ray.solve(instance, options=ONE_THREAD)
    monkeypatch.setattr(wide, "bound_by_cells", lambda *_: ())
    monkeypatch.setattr(wide.WideSearch, "_live", lambda *_: None)
    varied = solved_wide(instance, monkeypatch)
    monkeypatch.setattr(wide, "_IN_VAIN", 0)
    alone = solved_wide(instance, monkeypatch)
    assert best.time_per_sample_s is not None
    assert varied.time_per_sample_s is not None
    assert alone.time_per_sample_s is not None
    assert best.time_per_sample_s <= varied.time_per_sample_s < alone.time_per_sample_s
    assert_plan_is_worth_its_value(instance, varied)


@pytest.mark.parametrize(("most_steps", "orders_are_last"), [(0, False), (10**12, True)])
def test_further_orders_come_once_and_before_long_grids(
    most_steps: int, orders_are_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grids after them go on from those before, and bound the better plan."""
    instance, events = traced_towers(2, 3, 2, devices=12), list[str]()
    grids, orders = bound_by_cells, wide.WideSearch._vary_order

    def watched_grids(*given: Any) -> Iterator[CellCover]:
        for known in grids(*given):
            events.append("grid")
            yield known

    def watched_orders(search: wide.WideSearch) -> Generator[None, None, None]:
        events.append("orders")
        return orders(search)

    monkeypatch.setattr(wide, "bound_by_cells", watched_grids)
    monkeypatch.setattr(wide.WideSearch, "_vary_order", watched_orders)
    monkeypatch.setattr(wide.WideSearch, "_live", lambda *_: None)
    monkeypatch.setattr(wide, "_LONG", most_steps)
    found, best = solved_wide(instance, monkeypatch), piper_ray.solve(instance, options=ONE_THREAD)
    assert events.count("orders") == 1
    assert events.count("grid") > 1
    assert events.index("orders") == (len(events) - 1 if orders_are_last else 1)
    assert best.time_per_sample_s is not None
    assert found.time_per_sample_s is not None
    assert found.lower_bound_s <= best.time_per_sample_s <= found.time_per_sample_s


@pytest.mark.parametrize("seed", [164, 184])
def test_a_smaller_plan_is_sought_on_chains(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proved plan of the first chains has more devices, and dual prices are not tried."""
    instance = random_instance(seed, most_layers=8, most_devices=12, most_tmpcs=3)
    whole = piper_ray.solve(instance, options=ONE_THREAD).plan
    monkeypatch.setattr(wide, "_PREFERRED_S", 0.0)
    found = solved_wide(instance, monkeypatch).plan
    monkeypatch.setattr(wide, "_SMALLER", 0)
    alone = solved_wide(instance, monkeypatch).plan
    assert whole is not None
    assert found is not None
    assert alone is not None
    assert (found.devices, len(found.stages)) == (whole.devices, len(whole.stages))
    assert found.devices < alone.devices


@pytest.mark.parametrize("seed", [164, 184])
def test_none_is_sought_once_cells_show_that_there_is_none(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = random_instance(seed, most_layers=8, most_devices=12, most_tmpcs=3)
    monkeypatch.setattr(wide, "_PREFERRED_S", 0.0)
    monkeypatch.setattr(wide, "is_smallest", lambda *_: True)
    found = solved_wide(instance, monkeypatch).plan
    monkeypatch.setattr(wide, "_SMALLER", 0)
    assert found == solved_wide(instance, monkeypatch).plan
