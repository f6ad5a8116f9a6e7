"""What moves between plans when nodes are lost, by a count of single shares of parameters; tables over clusters."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from piper_ray.model.mode import ALL_REPLICAS
from piper_ray.model.stop import Stop
from piper_ray.proposal.clusters import moved_between, plans_of
from piper_ray.proposal.demand import Proposed
from piper_ray.proposal.layout_words import layout_words
from piper_ray.proposal.propose import propose
from piper_ray.report.clusters import CSV_COLUMNS, clusters_csv, print_clusters, print_spare, spare_document
from piper_ray.report.proposal import change_text
from piper_ray.workloads.estimate.modes import Offer
from tests.unit.test_propose import demand

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


def test_what_moves_is_what_was_not_there(plans: list[Proposed]) -> None:
    kinds = plans[0].estimate.architecture.nodes
    training = plans[0].estimate.setting.training
    for before in plans:
        for after in plans:
            moved = moved_between(before, after)
            for of_state, each_bytes, got in (
                (False, training.weight_bytes, moved.weights_bytes),
                (True, training.optimizer_bytes, moved.state_bytes),
            ):
                old, new = held(before, of_state), held(after, of_state)
                old += [set()] * (len(new) - len(old))
                missing = [pair for had, has in zip(old, new, strict=False) for pair in has - had]
                counted = sum(each_bytes * kinds[layer].kind.parameters / SHARES for layer, _ in missing)
                assert got == pytest.approx(counted, abs=1.0)
    assert moved_between(plans[0], plans[0]).weights_bytes == moved_between(plans[0], plans[0]).state_bytes == 0.0
    assert any(moved_between(plans[0], one).weights_bytes > 0.0 for one in plans)


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
    assert second["all_bytes"] == moved_between(*(one.found.best for one in plans if one.found is not None)).all_bytes


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
