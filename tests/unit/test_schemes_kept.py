"""Schemes on disk: found once, looked at again, and never believed."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from piper_ray.report.schemes import draw_scheme
from piper_ray.workloads.schemes import frontier, kept
from piper_ray.workloads.schemes.check import faults_of
from piper_ray.workloads.schemes.document import in_full
from piper_ray.workloads.schemes.frontier import schemes_of
from piper_ray.workloads.schemes.graph import REPLICATED
from piper_ray.workloads.schemes.program import SchemeProgram
from piper_ray.workloads.schemes.scheme import PricedGraph
from tests.scheme_support import RandomPrices, chain_layer, feeding_layer

_OF = PricedGraph(feeding_layer(), RandomPrices(1))


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The entry of schemes that were found."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert schemes_of(_OF, 2, (4.0,), lambda _: None)
    (path,) = (tmp_path / "piper_ray" / "schemes").iterdir()
    return path


def _never(*_: object) -> None:
    raise AssertionError("searched again")


def test_schemes_are_found_once(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kept.read_schemes(entry.name, _OF, 2)
    monkeypatch.setattr(frontier, "_searched", _never)
    assert [one.scheme for one in schemes_of(_OF, 2, (4.0,), lambda _: None)] == first
    with pytest.raises(AssertionError, match="searched again"):
        schemes_of(PricedGraph(_OF.graph, RandomPrices(2)), 2, (4.0,), lambda _: None)
    monkeypatch.setattr(kept, "__version__", "another")
    with pytest.raises(AssertionError, match="searched again"):
        schemes_of(_OF, 2, (4.0,), lambda _: None)


@pytest.mark.long
def test_what_does_not_hold_is_found_again(entry: Path) -> None:
    text = entry.read_text()
    documents = json.loads(text.partition("\n")[2])

    def whole(*changed: Any) -> str:
        told = json.dumps([*changed, *documents[1:]])
        return f"{hashlib.sha256(told.encode()).hexdigest()}\n{told}"

    quick = {**documents[0], "time_s": 1e-9, "forward_s": 1e-9}
    other_digest = f"0{text[1:]}" if text[0] != "0" else f"1{text[1:]}"
    for damaged in (text[:100], other_digest, whole(quick), whole({**documents[0], "kept": []})):
        entry.write_text(damaged)
        assert kept.read_schemes(entry.name, _OF, 2) is None
    assert schemes_of(_OF, 2, (4.0,), lambda _: None)
    assert kept.read_schemes(entry.name, _OF, 2) is not None


def test_a_scheme_is_drawn_with_its_placements(entry: Path) -> None:
    (found, *_) = schemes_of(_OF, 2, (4.0,), lambda _: None)
    picture = entry.parent / "scheme.svg"
    draw_scheme(found, _OF, picture)
    text = picture.read_text()
    assert all(f">{step.name}<" in text for step in _OF.graph.steps)
    assert f"t = 2: {found.name}" in text.replace("&#45;", "-")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("forward_s", float("nan"), "forward_s is nan"),
        ("backward_s", 0.0, "backward_s is 0"),
        ("once_a_batch_s", 9.0, "once_a_batch_s is 9"),
        ("weight_gradients_s", 9.0, "weight_gradients_s is 9"),
        ("made_again_bytes", 10**400, "too large|made_again_bytes"),
        ("copied_parameters", -1.0, "copied_parameters is -1"),
        ("border", "h", "its border is h; expected s or replicated"),
    ],
)
def test_a_document_that_says_something_else_does_not_hold(name: str, value: object, told: str) -> None:
    of = PricedGraph(chain_layer(), RandomPrices(1))
    scheme = SchemeProgram(of.graph, 2, of.prices, REPLICATED).fastest(2.0)
    assert scheme is not None
    document = in_full(scheme, of)
    assert faults_of(document) == []
    assert re.search(told, " ".join(faults_of({**document, name: value})))


def test_a_price_below_nothing_is_no_price() -> None:
    of = PricedGraph(chain_layer(), RandomPrices(1))
    scheme = SchemeProgram(of.graph, 2, of.prices, REPLICATED).fastest(2.0)
    assert scheme is not None
    document = in_full(scheme, of)
    prices: Any = document["prices"]
    next(iter(prices["steps"].values()))["forward"][0] = -1.0
    assert "takes -1.0 s" in " ".join(faults_of(document))
