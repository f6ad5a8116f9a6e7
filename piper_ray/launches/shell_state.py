"""The values that a shell script has set at one point, and those assumed from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from tree_sitter import Node

from piper_ray.launches.unseen import unseen

Variable = str | list[str]
_Value = TypeVar("_Value")


@dataclass
class Outside:
    """The input of a script. variables: set by the user, like environment variables. taken_as_unset: collects the names
    of others that were read. path: of the script, if it is a file. uses_yq: whether a script reads words from YAML."""

    variables: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None
    taken_as_unset: dict[str, str] = field(default_factory=dict)
    gets_arguments: bool = False
    uses_yq: bool = False
    not_found: list[str] = field(default_factory=list)


@dataclass
class State:
    """Variables, functions and written files. arguments: of the script or the function; None if unknown."""

    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Node] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    arguments: list[str] | None = None

    def copied(self) -> State:
        """A copy that can change independently. Values are never changed in place."""
        return replace(self, variables=dict(self.variables), functions=dict(self.functions), files=dict(self.files))

    def become(self, others: Sequence[State], line: int) -> None:
        """Takes the state after one of the others, when it is unknown which. line: of the condition."""
        self.variables = _common([one.variables for one in others], lambda name: unseen(f"{name} (see line {line})"))
        self.functions = {name: body for one in others for name, body in one.functions.items()}
        self.files = _common([one.files for one in others], lambda name: unseen(f"{name} (see line {line})"))
        if any(one.arguments != others[0].arguments for one in others):
            self.arguments = None
        else:
            self.arguments = others[0].arguments


def _common(tables: Sequence[Mapping[str, _Value]], differing: Callable[[str], _Value]) -> dict[str, _Value]:
    found: dict[str, _Value] = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table.get(name) for table in tables]
        first = values[0]
        same = first is not None and all(value == first for value in values)
        found[name] = first if same and first is not None else differing(name)
    return found
