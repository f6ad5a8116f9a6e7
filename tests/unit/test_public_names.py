"""Everything that a public signature names is public, so that a user can import and write down what functions take."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType

import pytest

import piper_ray

ROOT = Path(piper_ray.__file__).parent


@cache
def declared() -> tuple[frozenset[str], tuple[str, ...]]:
    """Classes and type aliases of the package by name, and the names of all its classes."""
    found, classes = set[str](), list[str]()
    for path in ROOT.rglob("*.py"):
        text = path.read_text("utf-8")
        classes += re.findall(r"^ *class (\w+)[(:]", text, re.MULTILINE)
        found.update(re.findall(r"^class (\w+)[(:]", text, re.MULTILINE))
        found.update(re.findall(r"^([A-Z]\w*) = (?!\w+\()", text, re.MULTILINE))  # type variables are calls
    return frozenset(name for name in found if not name.startswith("_") and not name.isupper()), tuple(classes)


def named_types() -> frozenset[str]:
    return declared()[0]


def functions_of(value: object) -> Iterator[FunctionType]:
    """A function itself; of a class, its own public methods, its properties and what it is made with."""
    if isinstance(value, FunctionType):
        yield value
    elif inspect.isclass(value):
        for name, member in vars(value).items():
            plain = member.fget if isinstance(member, property) else inspect.unwrap(getattr(member, "__func__", member))
            if isinstance(plain, FunctionType) and (name in ("__init__", "__call__") or not name.startswith("_")):
                yield plain


def names_in(annotation: object) -> set[str]:
    """Identifiers that an annotation names, in texts too."""
    if not isinstance(annotation, str):
        return {annotation.__name__} if isinstance(annotation, type) else set()
    return {node.id for node in ast.walk(ast.parse(annotation, mode="eval")) if isinstance(node, ast.Name)}


OPAQUE = {
    "Preparation": "made and read by the engine alone",
    "Backend": "its methods are called by the engine alone",
    "RayBackend": "likewise",
    "Timeline": "events as arrays, which Simulation.trace writes",
}
"""Classes that users hand over as they are."""

MADE_BY_THE_PACKAGE = {"Frontier.__init__"}
"""What nobody else calls."""


def unnamed() -> Iterator[str]:
    types = named_types()
    for public in piper_ray.__all__:
        value = getattr(piper_ray, public)
        if not getattr(value, "__module__", "").startswith("piper_ray"):
            continue
        for function in () if public in OPAQUE else functions_of(value):
            if function.__qualname__ in MADE_BY_THE_PACKAGE:
                continue
            used = set().union(*map(names_in, function.__annotations__.values())) if function.__annotations__ else set()
            for name in sorted((used & types) - set(piper_ray.__all__)):
                yield f"{name}, in {public}: {function.__qualname__}"


def test_no_two_classes_have_one_name() -> None:
    found = Counter(declared()[1])
    assert found
    assert [name for name, times in found.items() if times > 1] == []


def test_everything_that_a_public_signature_names_is_public() -> None:
    assert list(unnamed()) == []


def undocumented() -> Iterator[str]:
    """Public functions, classes, and public methods that neither say what they do nor inherit it."""
    for public in piper_ray.__all__:
        value = getattr(piper_ray, public)
        if not getattr(value, "__module__", "").startswith("piper_ray") or not callable(value):
            continue
        text = inspect.getdoc(value) or ""
        if not text or text.startswith(f"{public}("):  # as dataclass writes where there is none
            yield public
        if inspect.isclass(value) and public not in OPAQUE:
            for name, member in vars(value).items():
                if not name.startswith("_") and (callable(member) or isinstance(member, property | classmethod)):
                    bases = (vars(base).get(name) for base in value.__mro__)
                    if not any(getattr(base, "__doc__", None) for base in bases):
                        yield f"{public}.{name}"


def test_everything_public_says_what_it_is() -> None:
    assert list(undocumented()) == []


def test_the_walk_sees_what_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piper_ray.Plan, "devices", property(lambda _: 0))
    monkeypatch.setattr(piper_ray.solve, "__doc__", None)
    assert sorted(undocumented()) == ["Plan.devices", "solve"]


def test_the_walk_sees_signatures() -> None:
    assert {"Instance", "Plan", "Backend", "Listener", "Source"} <= named_types()
    assert "Listener" in {name for note in piper_ray.solve.__annotations__.values() for name in names_in(note)}
    made = {name for function in functions_of(piper_ray.StageEvaluation) for name in function.__annotations__}
    assert "binding" in made
