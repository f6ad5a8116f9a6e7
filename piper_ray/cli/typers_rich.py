"""What typer draws help and complaints with, ``typer.rich_utils``, without two parts of rich that it imports for uses
which no command here has: help in Markdown, and tracebacks in colour. They take a third of the time of ``--help``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any

_UNUSED: Mapping[str, str] = MappingProxyType({"rich.markdown": "Markdown", "rich.traceback": "Traceback"})
"""Modules, and the class that typer takes from each."""


def rich_utils() -> ModuleType:
    """``typer.rich_utils``, loaded if need be."""
    with _loaded_on_use(_UNUSED):
        return import_module("typer.rich_utils")


@contextmanager
def _loaded_on_use(classes: Mapping[str, str]) -> Iterator[None]:
    """Who imports one of these classes meanwhile gets what is as good, and loads its module only once it is used."""
    stand_ins = {module: _Module(module, name) for module, name in classes.items() if module not in sys.modules}
    sys.modules |= stand_ins
    try:
        yield
    finally:
        for module, stand_in in stand_ins.items():
            if sys.modules.get(module) is stand_in:
                del sys.modules[module]


def _really(module: str) -> ModuleType:
    if isinstance(sys.modules.get(module), _Module):
        del sys.modules[module]
    return import_module(module)


class _Module(ModuleType):
    """Stands in for a module; all but the class is the module's own."""

    def __init__(self, module: str, class_name: str) -> None:
        super().__init__(module)
        self.__dict__[class_name] = _Class(class_name, (), {"__module__": module})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by importing
            raise AttributeError(name)
        return getattr(_really(self.__name__), name)


class _Class(type):
    """Of a class that stands in for another: it makes instances of that one, and has what that one has."""

    def __call__(cls, *args: Any, **more: Any) -> Any:
        return cls._itself()(*args, **more)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # asked for in annotations
            raise AttributeError(name)
        return getattr(cls._itself(), name)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls._itself())

    def _itself(cls) -> type:
        found: type = getattr(_really(cls.__module__), cls.__name__)
        return found
