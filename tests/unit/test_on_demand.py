"""Fields that are found when they are asked for: once, and for whoever looks at the object in any way."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import pytest

from piper_ray.engine.solve import solve
from piper_ray.model.fields import on_demand, when_asked
from tests.instances import two_towers


@on_demand("figure")
@dataclass(frozen=True)
class Told:
    name: str
    figure: int | None


class Finder:
    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> int:
        self.asked += 1
        return 7


def test_found_once_when_asked() -> None:
    find = Finder()
    told = Told("a", when_asked(find))
    assert find.asked == 0
    assert (told.figure, told.figure, find.asked) == (7, 7, 1)
    assert Told("a", None).figure is None


@pytest.mark.parametrize(
    "look",
    [
        lambda told: told == Told("a", 7),
        lambda told: hash(told) == hash(Told("a", 7)),
        lambda told: repr(told) == "Told(name='a', figure=7)",
        lambda told: asdict(told) == {"name": "a", "figure": 7},
        lambda told: replace(told, name="b") == Told("b", 7),
        lambda told: vars(pickle.loads(pickle.dumps(told))) == {"name": "a", "figure": 7},
        lambda told: vars(copy.copy(told)) == {"name": "a", "figure": 7},
    ],
)
def test_whoever_looks_has_the_value(look: Callable[[Told], bool]) -> None:
    assert look(Told("a", when_asked(Finder())))


def test_a_solve_does_not_count_pairs_until_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Finder()
    monkeypatch.setattr("piper_ray.engine.preparation.listed_pairs", lambda _: asked())
    stats = solve(two_towers(2)).stats
    assert asked.asked == 0
    assert (stats.pairs, asked.asked) == (7, 1)
