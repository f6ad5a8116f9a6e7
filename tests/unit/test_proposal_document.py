"""What plan searched and answers, as documents: schemas, and the bound of all out of the cells."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from piper_ray.model.headroom import Headroom
from piper_ray.model.mode import ALL_REPLICAS
from piper_ray.model.schedule import ScheduleName
from piper_ray.proposal.demand import figures_of
from piper_ray.proposal.layout_words import layout_words
from piper_ray.proposal.propose import FoundPlans, Help, propose
from piper_ray.report.document import to_text
from piper_ray.report.proposal_document import planned_document, search_document
from piper_ray.workloads.estimate.modes import Offer
from tests.search_referee import disproofs_of, faults_of
from tests.unit.test_plan_documents import assert_described
from tests.unit.test_propose import demand


@pytest.fixture(scope="module")
def proposal(tmp_path_factory: pytest.TempPathFactory) -> FoundPlans:
    asked = demand(tmp_path_factory.mktemp("model"))
    return propose(replace(asked, request=replace(asked.request, offer=Offer(zero=ALL_REPLICAS))))


def test_the_bound_of_all_is_the_least_of_the_cells(proposal: FoundPlans) -> None:
    document = json.loads(to_text(search_document(proposal)))
    assert_described(document, "search.schema.json")
    assert document["lower_bound_s"] == proposal.lower_s
    assert document["step_s"] == proposal.best.step_s
    assert document["never_better"]
    listed = {(cell["microbatch"], cell["optimizer_on_host"], cell["mode"]) for cell in document["cells"]}
    assert len(listed) * len(document["schedules"]) == len(document["cells"])
    assert not list(faults_of(document))


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [(None, "lower_bound_s", 1e-9), (None, "gap", 0.5), (None, "combinations", 1), (0, "lower_bound_s", 1e-9)],
)
def test_the_referee_sees_a_changed_figure(proposal: FoundPlans, place: int | None, key: str, value: object) -> None:
    document = json.loads(to_text(search_document(proposal)))
    (document if place is None else document["cells"][place])[key] = value
    assert list(faults_of(document))


@pytest.mark.long
def test_no_plan_made_by_hand_is_faster_than_its_combination_s_bound(tmp_path: Path) -> None:
    asked = replace(demand(tmp_path), schedules=(ScheduleName.ONE_F_ONE_B, ScheduleName.INTERLEAVED))
    asked = replace(asked, headroom=Headroom(share=0.985))
    asked = replace(asked, request=replace(asked.request, offer=Offer(zero=ALL_REPLICAS)))
    document = json.loads(to_text(search_document(propose(asked))))
    instances = {
        (samples, on_host): (one.on_host if on_host else one).instance
        for samples, one in asked.estimates()[0].items()
        for on_host in (False, True)
    }
    rules = {name: asked.restrictions(instances[1, False], name) for name in asked.schedules}
    assert not list(disproofs_of(document, instances, rules))
    for cell in document["cells"]:
        cell["lower_bound_s"] = None
    assert len(list(disproofs_of(document, instances, rules))) > 10


def test_the_answer_keeps_its_schema(proposal: FoundPlans) -> None:
    best, slower = proposal.found[:2]
    helps = [Help("8 % less memory", slower), Help("25 % more memory", None)]
    others = {"fp16": slower, "fp8": None}
    made = planned_document(proposal, figures_of(best, 1e9, 2.0), others, helps, None, [], [Path("out/plan.json")])
    document: dict[str, Any] = json.loads(to_text(made))
    assert_described(document, "planned.schema.json")
    assert document["best"]["step_s"] == best.step_s
    assert document["best"]["layout"]["tensor"] == layout_words(best).tensor
    assert [one["step_s"] for one in document["alternatives"]] == [one.step_s for one in proposal.found[1:6]]
    assert [change["plan"] is None for change in document["changes"]] == [False, True]
    assert document["likely_s"][0] < best.step_s < document["likely_s"][1]
