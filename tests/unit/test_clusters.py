"""What moves between plans when nodes are lost, by a count of single shares of parameters; tables over clusters."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from piper_ray.model.headroom import Headroom
from piper_ray.model.mode import ALL_REPLICAS
from piper_ray.model.stop import Stop
from piper_ray.proposal.clusters import batches_between, plans_of
from piper_ray.proposal.demand import Proposed
from piper_ray.proposal.layout_words import layout_words
from piper_ray.proposal.moved import moved_between
from piper_ray.proposal.propose import _ways_of, priced, propose
from piper_ray.report.clusters import (
    CSV_COLUMNS,
    all_used_text,
    clusters_csv,
    print_clusters,
    print_spare,
    spare_document,
)
from piper_ray.report.proposal import change_text
from piper_ray.workloads.estimate.config import read_model
from piper_ray.workloads.estimate.hardware import Training
from piper_ray.workloads.estimate.modes import Offer
from tests.unit.test_propose import CONFIG, demand

SHARES = 96
"""Of a layer's parameters, each of which is held as a whole or not: a multiple of all products of degrees here."""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> list[Proposed]:
    asked = demand(tmp_path_factory.mktemp("model"))
    shared = replace(asked, request=replace(asked.request, offer=Offer(zero=ALL_REPLICAS)))
    return [*propose(asked).found, *propose(shared).found]


def held(one: Proposed, of_state: bool) -> list[set[tuple[int, int]]]:
    """By GPU, pairs of a layer and a share of its parameters: weights, or optimizer's state."""
    words = layout_words(one)
    found = []
    for rank in range(words.pipeline):
        layers = [(layer, one.plan.stages[rank].tmpc_ids[layer]) for layer in one.plan.stages[rank].layers]
        for replica in range(words.data):
            for shard in range(words.tensor):
                mine = set()
                for layer, tmpc_id in layers:
                    shared = words.data if "zero" in tmpc_id.split("+") and of_state else 1
                    size = SHARES // words.tensor // shared
                    first = shard * (SHARES // words.tensor) + (replica % shared) * size
                    mine |= {(layer, share) for share in range(first, first + size)}
                found.append(mine)
    return found


def moves(plans: list[Proposed], training: Training) -> Iterator[tuple[Proposed, Proposed, bool, float, float]]:
    """From each plan to each: whether of optimizer's state, or else of weights; bytes of a parameter; bytes moved."""
    for before, after in product(plans, plans):
        moved = moved_between(before, after)
        yield before, after, False, training.weight_bytes, moved.weights_bytes
        yield before, after, True, training.optimizer_bytes, moved.state_bytes


@pytest.mark.long
def test_what_moves_is_what_was_not_there(plans: list[Proposed]) -> None:
    kinds = plans[0].estimate.architecture.nodes
    training = plans[0].estimate.setting.training
    for before, after, of_state, each_bytes, got in moves(plans, training):
        old, new = held(before, of_state), held(after, of_state)
        old += [set()] * (len(new) - len(old))
        missing = [pair for had, has in zip(old, new, strict=False) for pair in has - had]
        counted = sum(each_bytes * kinds[layer].kind.parameters / SHARES for layer, _ in missing)
        assert got == pytest.approx(counted, abs=1.0)
    assert moved_between(plans[0], plans[0]).weights_bytes == moved_between(plans[0], plans[0]).state_bytes == 0.0
    assert any(moved_between(plans[0], one).weights_bytes > 0.0 for one in plans)


def held_experts(one: Proposed, of_state: bool, routed_share: float) -> list[dict[tuple[int, bool, int], float]]:
    """By GPU, the weight of each share of dense parameters, and of each expert in shares, that it holds."""
    words = layout_words(one)
    assert words.expert is not None
    found = []
    for rank in range(words.pipeline):
        for within in range(words.data * words.tensor):
            mine: dict[tuple[int, bool, int], float] = {}
            for layer in one.plan.stages[rank].layers:
                kind = one.estimate.architecture.nodes[layer].kind
                groups = [(False, words.tensor, 1.0 - (routed_share if kind.experts else 0.0))]
                groups += [(True, words.expert, routed_share)] if kind.experts else []
                for routed, parts, weight in groups:
                    copies = words.data * words.tensor // parts
                    shared = copies if of_state and words.sharing == "ZeRO-1" else 1
                    size = SHARES // parts // shared
                    first = within % parts * (SHARES // parts) + within // parts % shared * size
                    whole = kind.parameters * weight / SHARES
                    mine |= {(layer, routed, share): whole for share in range(first, first + size)}
            found.append(mine)
    return found


@pytest.mark.long
def test_experts_that_are_spread_move_as_they_lie(tmp_path: Path) -> None:
    """Plans whose experts lie over 1, 2 and 4 GPUs, with shared state and without, by a count of shares."""
    mixture = {**CONFIG, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    asked = demand(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(mixture))
    asked = replace(asked, model=read_model(str(tmp_path / "config.json")))
    plans = []
    for degree, zero in ((1, ALL_REPLICAS), (2, ALL_REPLICAS), (4, ALL_REPLICAS), (1, 1), (2, 1)):
        offer = Offer(zero=zero, experts=(degree,))
        found = propose(replace(asked, request=replace(asked.request, offer=offer, samples=2)))
        plans.append(next(one for one in found.found if layout_words(one).expert == degree))
    training, node = plans[0].estimate.setting.training, plans[0].estimate.architecture.nodes[1]
    routed_share = sum(node.kind.value(x.parameters) for x in node.kind.operators if x.routed) / node.kind.parameters
    assert 0.5 < routed_share < 1.0
    for before, after, of_state, each_bytes, got in moves(plans, training):
        old, new = (held_experts(one, of_state, routed_share) for one in (before, after))
        missing = [has[x] for had, has in zip(old, new, strict=True) for x in has.keys() - had.keys()]
        assert got == pytest.approx(each_bytes * sum(missing), rel=1e-9, abs=1.0)
    assert moved_between(plans[2], plans[0]).weights_bytes > moved_between(plans[0], plans[2]).weights_bytes == 0.0
    assert moved_between(plans[1], plans[3]).state_bytes > 0.0


@pytest.mark.parametrize(
    ("span", "devices", "some"),
    [((960, 1056), 56, {960, 1008, 1024, 1056}), ((7, 7), 64, {7}), ((1, 100), 12, {1, 12, 64, 100}), ((5, 6), 8, {5})],
)
def test_a_curve_has_a_dozen_batches_at_most_both_ends_and_the_roundest(
    span: tuple[int, int], devices: int, some: set[int]
) -> None:
    found = batches_between(*span, devices)
    assert len(found) <= 12
    assert some | set(span) <= set(found)
    assert all(span[0] <= batch <= span[1] for batch in found)
    assert list(found) == sorted(set(found))


@pytest.mark.long
def test_what_is_known_of_more_memory_holds_for_less(tmp_path: Path) -> None:
    """A table of rooms is what a search of each finds, with bounds that are no lower; and less room is never slower."""
    asked = demand(tmp_path, gpu="A100-40")
    whole = propose(asked).best
    shares = [
        1.0 - part * whole.simulation.peak_memory_bytes / whole.instance.memory_bytes for part in (1.1, 0.97, 0.9)
    ]
    rooms = [replace(asked, headroom=Headroom(share=share)) for share in (0.0, *shares)]
    table = list(plans_of(rooms, Stop()))
    steps_s = []
    for one, room in zip(table, rooms, strict=True):
        assert one.found is not None
        alone = propose(room)
        assert one.found.best.step_s == pytest.approx(alone.best.step_s, rel=2e-4)
        assert alone.lower_s * (1.0 - 2e-4) <= one.found.lower_s <= one.found.best.step_s
        assert not one.found.best.simulation.memory_violations
        steps_s.append(one.found.best.step_s)
    assert steps_s == sorted(steps_s)
    assert steps_s[0] == steps_s[1] < steps_s[-1]
    assert table[0].found is not None
    assert table[1].found is not None
    assert table[1].found.best.solution is table[0].found.best.solution, "what still fits is not sought again"
    console = Console(width=100, record=True, file=io.StringIO())
    print_clusters(console, table, [None] * 4, None, "rooms")
    rows = console.export_text().splitlines()[1:]
    assert [float(line.split()[0]) for line in rows] == pytest.approx([0.0, *(100.0 * x for x in shares)], rel=1e-2)


def test_a_batch_that_leaves_no_gpu_idle_is_said(tmp_path: Path) -> None:
    asked = demand(tmp_path)
    eleven = replace(asked, request=replace(asked.request, gpus_per_node=11, samples=1))
    demands = [replace(eleven, request=replace(eleven.request, batch=batch)) for batch in (20, 22)]
    plans = list(plans_of(demands, Stop()))
    few, all_of = (one.found.best for one in plans if one.found is not None)
    assert few.idle_devices > 0 == all_of.idle_devices
    (text,) = all_used_text(plans)
    gain = change_text(few.step_s / 20 * 22 / all_of.step_s - 1.0)
    assert text == f"a batch of 22 uses all 11 GPUs: {gain} tokens/s on the best that leaves some idle"
    assert all_used_text(plans[:1]) == []


def test_the_table_for_fewer_nodes_fits(tmp_path: Path) -> None:
    asked = demand(tmp_path)
    counts = [replace(asked, request=replace(asked.request, nodes=nodes, samples=2)) for nodes in (2, 1)]
    plans = list(plans_of(counts, Stop()))
    console = Console(width=100, record=True, file=io.StringIO())
    print_spare(console, plans)
    print_clusters(console, plans, [2.0, 2.0], 1e12)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 100
    assert [line.split()[:2] for line in lines[1:3]] == [["2", "8"], ["1", "4"]]
    steps = [one.found.best.step_s for one in plans if one.found is not None]
    assert change_text(steps[1] / steps[0] - 1.0) in lines[2]
    first, second = spare_document(plans)
    assert first["step_s"] == steps[0]
    assert second["all_bytes"] == plans[1].moved_from(plans[0]).all_bytes


def test_fewer_nodes_share_prices_where_layers_cost_the_same(tmp_path: Path) -> None:
    asked = demand(tmp_path)
    two, one, many = (replace(asked, request=replace(asked.request, nodes=nodes)) for nodes in (2, 1, 128))
    ((way,), cells), (_, alone) = _ways_of(one, Stop(), priced(two, Stop())), _ways_of(one, Stop())
    figures = [
        [(x.text, x.lower_s, x.about_s, x.restrictions, x.setting.instance) for x in of.cells] for of in (cells, alone)
    ]
    assert figures[0] == figures[1]
    assert [*way.estimates.values()] == [*one.estimates()[0].values()]
    assert one.prices_like(two)
    assert not many.prices_like(two), "there layers wait for the slowest of many GPUs"
    assert not replace(one, request=replace(one.request, batch=32)).prices_like(two)


def test_a_cluster_without_a_plan_has_a_reason(tmp_path: Path) -> None:
    asked = demand(tmp_path)
    none = replace(asked, request=replace(asked.request, precision="fp8"))  # which an A100 has no units for
    fits, fails = plans_of([asked, none], Stop())
    assert fits.found is not None
    assert fails.found is None
    assert fails.reason
    head, first, second = clusters_csv([fits, fails], [None, None], None).splitlines()
    assert head.split(",") == list(CSV_COLUMNS)
    assert first.startswith("A100-80,1,4,")
    assert fails.reason.split(",")[0] in second
