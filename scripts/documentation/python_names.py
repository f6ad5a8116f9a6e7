"""The reference of the Python API: public names in the order of ``piper_ray.__all__``, in groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import piper_ray

GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "load": "Functions",
        "Instance": "The problem",
        "Restrictions": "What plans must keep",
        "SolveOptions": "How it is solved",
        "Listener": "Events",
        "Solution": "The answer",
        "StopSearch": "Errors",
    }
)
"""The first name of each group, and its title."""


def names_in_groups() -> str:
    """Markdown: a section for each group, with what autodoc makes of its names."""
    return "\n".join(_lines("", _entry))


def names_with_meaning() -> str:
    """Markdown: a section for each group, a table of names and the first sentence of each one's docstring."""
    return "\n".join(_lines("| name | what it is |\n|---|---|", _row))


def _lines(head: str, lines_of: Callable[[str], Iterator[str]]) -> Iterator[str]:
    missing = set(GROUPS) - set(piper_ray.__all__)
    if missing:
        raise ValueError(f"no public names: {missing}")
    for name in piper_ray.__all__:
        if name in GROUPS:
            yield f"\n## {GROUPS[name]}\n"
            yield head
        yield from lines_of(name)


def _row(name: str) -> Iterator[str]:
    value = getattr(piper_ray, name)
    if name.startswith("__"):
        return
    about = inspect.getdoc(value) if inspect.isroutine(value) or inspect.isclass(value) else None
    if inspect.ismodule(value):
        about = inspect.getdoc(value)
    text = " ".join((about or "").partition("\n\n")[0].split()).replace("``", "`") or f"`{value!r}`"
    shown = text.replace("|", "\\|")
    yield f"| `{name}` | {shown} |"


def _entry(name: str) -> Iterator[str]:
    value = getattr(piper_ray, name)
    if inspect.ismodule(value):
        yield f"\n```{{eval-rst}}\n.. automodule:: {value.__name__}\n   :no-members:\n\n"
        for public in value.__all__:
            yield f".. {_kind(getattr(value, public))}:: {value.__name__}.{public}\n   :no-index:\n"
        yield "```\n"
    elif not name.startswith("__"):
        yield f"```{{eval-rst}}\n.. {_kind(value)}:: piper_ray.{name}\n```\n"


def _kind(value: object) -> str:
    if inspect.isclass(value):
        return "autoexception" if issubclass(value, BaseException) else "autoclass"
    return "autofunction" if inspect.isfunction(value) else "autodata"
