"""The reference of the Python API: public names in the order of ``piper_ray.__all__``, in groups."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import piper_ray

GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "load": "Functions",
        "Instance": "The problem",
        "Restrictions": "What plans must keep",
        "SolveOptions": "How it is solved",
        "Listener": "What is told meanwhile",
        "Solution": "The answer",
        "StopSearch": "Errors",
    }
)
"""The first name of each group, and its title."""


def names_in_groups() -> str:
    """Markdown: a section for each group, with what autodoc makes of its names."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    missing = set(GROUPS) - set(piper_ray.__all__)
    if missing:
        raise ValueError(f"no public names: {missing}")
    for name in piper_ray.__all__:
        if name in GROUPS:
            yield f"\n## {GROUPS[name]}\n"
        yield from _entry(name)


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
