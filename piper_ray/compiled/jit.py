"""The decorators of kernels, and where compiled kernels are kept: in a folder named by a hash of all sources.

A kernel's code contains that of the kernels it calls, so a cached entry is out of date when any of them changes. Numba
is imported when the first kernel is called, because commands that call none spend a third of their start on it.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
from collections.abc import Callable
from functools import cache, update_wrapper
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar, cast, final

_FOLDERS = (
    "certificate/kernels",
    "compiled",
    "cost",
    "engine/kernels",
    "planners/pipedream",
    "planners/published",
    "simulate/kernels",
)
"""The folders with kernels' source code."""

_Function = TypeVar("_Function", bound=Callable[..., Any])

_dispatching = RLock()


@cache
def sources_digest() -> str:
    """A hash over all kernels: processes with equal hashes compute the same results."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for folder in _FOLDERS:
        for source in sorted((package / folder).glob("*.py")):
            digest.update(f"{folder}/{source.name}".encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@cache
def cache_folders() -> tuple[Path, ...]:
    """The folders for compiled kernels: next to their sources, or in the user's cache if that cannot be written.

    NUMBA_CACHE_DIR replaces both. The folders may not exist yet.
    """
    name = f"kernels-{sources_digest()}"
    named = os.environ.get("NUMBA_CACHE_DIR")
    if named:
        return (Path(named) / name,)
    ours = Path(__file__).parent / "__pycache__"
    # Path.exists raises if this user may not look there.
    if not os.path.exists(ours / name):  # noqa: PTH110 - the first run of this version: delete those of others
        for old in ours.glob("kernels-*"):
            shutil.rmtree(old, ignore_errors=True)
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "piper_ray"
    except RuntimeError:  # the user has no home
        return (ours / name,)
    if ours.exists() and not os.access(ours, os.R_OK | os.X_OK):  # only another user may read it
        return (home / name,)
    return ours / name, home / name


@final
class Kernel:
    """A function that numba compiles on the first call, or loads from the cache. kind: see ``dispatcher_of``."""

    def __init__(self, function: Callable[..., Any], kind: str, **flags: bool) -> None:
        update_wrapper(self, function)
        self._function, self._kind, self._flags = function, kind, flags
        self._dispatcher: Any = None

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return (self._dispatcher or self.dispatcher())(*arguments, **keywords)

    @property
    def _numba_type_(self) -> Any:
        """Numba asks for it where a kernel calls another one by its name."""
        return self.dispatcher()._numba_type_

    def dispatcher(self) -> Any:
        """Numba's dispatcher; the function itself if compilation is switched off."""
        with _dispatching:
            if self._dispatcher is None:
                from piper_ray.compiled.dispatch import dispatcher_of

                self._dispatcher = dispatcher_of(self._function, self._kind, cache_folders(), **self._flags)
        return self._dispatcher


def make_ready() -> None:
    """Imports numba, which the first call of a kernel does otherwise."""
    importlib.import_module("piper_ray.compiled.cache")


def is_loaded(function: Callable[..., Any]) -> bool:
    """Whether this process has called the kernel before. A first call also takes the time to load or compile it."""
    return bool(getattr(cast(Kernel, function).dispatcher(), "overloads", True))


def kernel(function: _Function) -> _Function:
    """Makes a kernel for Python to call. Other kernels call its machine code."""
    return cast(_Function, Kernel(function, "", _nrt=True))


def shared_kernel(function: _Function) -> _Function:
    """Makes a kernel for other kernels to call: for long functions that are seldom called, preferably by several
    kernels."""
    return cast(_Function, Kernel(function, "shared", _nrt=True))


def inner_kernel(function: _Function) -> _Function:
    """Makes a kernel that other kernels copy into their code. If Python calls it, as in a test, it is compiled once
    more."""
    return cast(_Function, Kernel(function, "inner", _nrt=True))


def leaf_kernel(function: _Function) -> _Function:
    """An inner kernel without arrays, so that it needs no reference counts, which would take most of its time."""
    return cast(_Function, Kernel(function, "inner", _nrt=False))


def inlined_kernel(function: _Function) -> _Function:
    """A leaf kernel that is inlined into its callers. A call passes records array by array, about five hundred words,
    which can cost more than the work of a short function.
    """
    return cast(_Function, Kernel(function, "inner", _nrt=False, forceinline=True))
