"""Schemes on disk: found once, looked at again, and never believed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from piper_ray.report.schemes import draw_scheme
from piper_ray.workloads.schemes import frontier, kept
from piper_ray.workloads.schemes.frontier import schemes_of
from piper_ray.workloads.schemes.scheme import PricedGraph
from tests.lengths import long_after
from tests.scheme_support import RandomPrices, feeding_layer

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


@pytest.mark.parametrize("damage", long_after(1, ["cut", "checksum", "figures", "placements"]))
def test_what_does_not_hold_is_found_again(entry: Path, damage: str) -> None:
    text = entry.read_text()
    documents = json.loads(text.partition("\n")[2])
    if damage == "figures":
        documents[0]["time_s"] = documents[0]["forward_s"] = 1e-9
    if damage == "placements":
        documents[0]["kept"] = []
    changed = json.dumps(documents)
    whole = f"{hashlib.sha256(changed.encode()).hexdigest()}\n{changed}"
    entry.write_text(
        {"cut": text[:100], "checksum": f"0{text[1:]}" if text[0] != "0" else f"1{text[1:]}"}.get(damage, whole)
    )
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
