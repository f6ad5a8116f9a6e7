"""The hard families of scripts/bench: what graphs they are, the same for the same seed, and what is asked of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from piper_ray.engine.lattice.contraction import without_contraction
from piper_ray.engine.lattice.layer_graph import build_graph, count_downsets
from piper_ray.engine.solve import solve
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import PAPERS_SCHEDULE, Schedule
from scripts.benchmarks.cases import ROWS
from scripts.benchmarks.families import cells, chain, mixture, operators, tower_edges, towers
from scripts.benchmarks.subjects import (
    CELLS,
    CHAINS,
    FAMILIES,
    KINDS,
    MIXTURES,
    OPERATORS,
    TOWERS,
    Subject,
    of_rows,
    select_families,
)
from tests.brute_force import brute_force
from tests.lengths import long_after

Seeded = Callable[[int], Instance]
SMALL: dict[str, Seeded] = {
    TOWERS: lambda seed: towers(2, 2, seed),
    MIXTURES: lambda seed: mixture(1, 3, seed),
    CELLS: lambda seed: cells(1, 1, seed),
    CHAINS: lambda seed: chain(5, seed, degrees=(1, 2)),
}


def downsets(instance: Instance) -> int | None:
    return count_downsets(build_graph(instance, without_contraction()))


@pytest.mark.parametrize("family", SMALL)
def test_a_seed_makes_one_graph(family: str) -> None:
    make = SMALL[family]
    assert make(3) == make(3)
    assert make(3) != make(4)


def test_operators_are_those_of_the_decoder_with_other_times() -> None:
    instance = operators(2, 1, seed=3)
    assert len(instance.layers) == 2 * 16 + 4
    assert instance == operators(2, 1, seed=3)
    assert instance != operators(2, 1, seed=4)
    exact, off = operators(2, 1, seed=3, jitter=0.0), operators(2, 1, seed=3, jitter=0.01)
    for layer, other in zip(exact.layers, off.layers, strict=True):
        assert other.tmpcs[1][0].time_per_sample_s == pytest.approx(layer.tmpcs[1][0].time_per_sample_s, rel=0.01)
    assert exact.edges == off.edges


@pytest.mark.parametrize(
    ("instance", "layers", "expected"),
    [
        (towers(2, 5, 1), 12, 6**2 + 2),
        (towers(3, 4, 1), 14, 5**3 + 2),
        (mixture(3, 4, 1), 16, 3 * 2**4 + 2),
        (chain(40, 1), 40, 41),
        (cells(3, 5, 1), 2 + 3 * 16, None),
    ],
    ids=["two towers", "three towers", "mixture", "chain", "cells"],
)
def test_how_large_they_are(instance: Instance, layers: int, expected: int | None) -> None:
    assert len(instance.layers) == layers
    if expected is None:  # each cell has five sums of two operators side by side, and some of the next one beside them
        assert (downsets(instance) or 0) > 3 * 5 * 3
    else:
        assert downsets(instance) == expected


def test_a_cell_reads_the_two_before_it_and_all_of_it_is_read() -> None:
    instance = cells(6, 5, seed=8)
    read = {edge.source for edge in instance.edges}
    assert {layer.id for layer in instance.layers} - read == {len(instance.layers) - 1}
    assert any(edge.target - edge.source > 16 for edge in instance.edges), "no cell reads that before its neighbour"
    assert all(edge.source < edge.target <= edge.source + 3 * 16 for edge in instance.edges)


def test_edges_of_towers_are_asked_for_one_by_one() -> None:
    sizes = iter(range(100))
    edges = tower_edges(2, 2, lambda: float(next(sizes)), lambda: -1.0)
    assert edges == {(1, 2): 0.0, (3, 4): 1.0, (0, 1): -1.0, (2, 5): -1.0, (0, 3): -1.0, (4, 5): -1.0}


@pytest.mark.parametrize("seed", long_after(1, range(2)))
@pytest.mark.parametrize("family", SMALL)
def test_small_ones_have_the_optimum_of_brute_force(family: str, seed: int) -> None:
    """With memory to spare and with hardly any."""
    graph = SMALL[family](seed)
    for memory_bytes in (1e12, 0.8 * sum(layer.tmpcs[1][0].fixed_bytes for layer in graph.layers)):
        instance = graph.replace(devices=3, microbatches=4, memory_bytes=memory_bytes, bandwidth_bytes_per_s=4e10)
        best, found = brute_force(instance), solve(instance).time_per_sample_s
        assert (best is None) == (found is None)
        if best is not None:
            assert found == pytest.approx(float(best.time_per_sample_s), rel=1e-9)


@pytest.mark.parametrize("subject", [subject for subject in FAMILIES if subject.quick], ids=lambda subject: subject.id)
def test_titles_say_what_is_measured(subject: Subject) -> None:
    instance = subject.make()
    if subject.family == KINDS:
        kinds = {kind.name: kind.cluster.devices for kind in instance.cluster.kinds} or {"H100-SXM": instance.devices}
        words = " + ".join(f"{devices} {name}" for name, devices in kinds.items())
        assert subject.title.endswith(f" {words} N={instance.microbatches}")
        assert instance.schedule == Schedule.of("1f1b")
        return
    words = f"K={instance.devices} N={instance.microbatches} M={instance.memory_bytes / 2**30:g}GiB"
    assert subject.title.endswith(words)
    assert instance.schedule is None


def test_all_are_solved_under_pipers_schedule() -> None:
    (imagebind,) = (subject for subject in FAMILIES if subject.id == "imagebind")
    assert imagebind.make().schedule == PAPERS_SCHEDULE


def test_every_family_has_something_quick_and_a_goal() -> None:
    of_family: dict[str, list[Subject]] = {}
    for subject in FAMILIES:
        of_family.setdefault(subject.family, []).append(subject)
    assert {TOWERS, MIXTURES, CELLS, CHAINS, OPERATORS} < set(of_family)
    for subjects in of_family.values():
        assert any(subject.goal is not None for subject in subjects)
        assert len(subjects) == 1 or any(subject.quick for subject in subjects)
    assert len({subject.id for subject in FAMILIES}) == len(FAMILIES)
    for subject in FAMILIES:
        assert subject.goal is None or subject.limit_s >= subject.goal.seconds


def test_names_choose() -> None:
    assert select_families([], quick=False) == FAMILIES
    assert {subject.id for subject in select_families(["chain", "towers-2x50"], quick=False)} == {
        *("chain-250", "chain-1000", "chain-5000", "towers-2x50")
    }
    assert [subject.id for subject in select_families(["chain"], quick=True)] == ["chain-250"]
    with pytest.raises(UsageError, match=r"there is no bert32 in --families; expected some of towers-2x25, "):
        select_families(["bert32"], quick=False)


def test_yardsticks_are_subjects_on_one_thread() -> None:
    subjects = of_rows(ROWS)
    assert [subject.title for subject in subjects] == [row.case.title for row in ROWS]
    assert {subject.threads for subject in subjects} == {1}
    assert subjects[0].make().devices == ROWS[0].case.devices
    assert not {subject.id for subject in subjects} & {subject.id for subject in FAMILIES}
