"""What plan searched and answers, as documents: schemas, and the bound of all out of the cells."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from piper_ray.model.mode import ALL_REPLICAS
from piper_ray.proposal.layout_words import layout_words
from piper_ray.proposal.plan import figures_of
from piper_ray.proposal.propose import FoundPlans, Help, propose
from piper_ray.report.document import to_text
from piper_ray.report.proposal_document import planned_document, search_document
from piper_ray.workloads.estimate.modes import Offer
from tests.unit.test_plan_documents import assert_described
from tests.unit.test_propose import demand


@pytest.fixture(scope="module")
def proposal(tmp_path_factory: pytest.TempPathFactory) -> FoundPlans:
    asked = demand(tmp_path_factory.mktemp("model"))
    return propose(replace(asked, request=replace(asked.request, offer=Offer(zero=ALL_REPLICAS))))


def test_the_bound_of_all_is_the_least_of_the_cells(proposal: FoundPlans) -> None:
    document = json.loads(to_text(search_document(proposal)))
    assert_described(document, "search.schema.json")
    cells = document["cells"]
    bounds = [math.inf if cell["lower_bound_s"] is None else cell["lower_bound_s"] for cell in cells]
    assert min(document["step_s"], *bounds) == document["lower_bound_s"] == proposal.lower_s
    assert document["gap"] == 1.0 - document["lower_bound_s"] / document["step_s"]
    others = document["never_better"]
    assert others
    assert document["combinations"] == len(cells) + len(document["schedules"]) * len(others)
    listed = {(cell["microbatch"], cell["mode"]) for cell in cells}
    assert len({tuple(cell.values()) for cell in cells}) == len(cells) == len(listed) * len(document["schedules"])
    for other in others:
        assert (other["microbatch"], other["than"]) in listed
        assert (other["microbatch"], other["mode"]) not in listed
    steps_s = [cell["step_s"] for cell in cells if cell["step_s"] is not None]
    assert min(steps_s) == document["step_s"] == proposal.best.step_s
    for cell in cells:
        assert (cell["closing"] == "no plan") == (cell["lower_bound_s"] is None)
        assert cell["step_s"] is None or cell["closing"] == "searched"
        if cell["closing"] == "bound":
            assert cell["lower_bound_s"] >= document["step_s"]


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
