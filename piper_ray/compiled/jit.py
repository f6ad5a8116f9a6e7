"""The one way kernels are compiled: no Python, no GIL, and kept in a folder that is named after all their sources.

A kernel's code holds that of the kernels it calls, so an entry of the cache would be out of date when any of them
changes: the folder's name carries a hash over all sources.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import numba

from piper_ray.compiled.cache import KernelCache

_FOLDERS = (
    "certificate/kernels",
    "compiled",
    "cost",
    "engine/kernels",
    "planners/pipedream",
    "planners/published",
    "simulate/kernels",
)
"""Where kernels are written."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


@cache
def sources_digest() -> str:
    """Changes with any kernel: who has the same computes the same."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for folder in _FOLDERS:
        for source in sorted((package / folder).glob("*.py")):
            digest.update(f"{folder}/{source.name}".encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@cache
def cache_folders() -> tuple[Path, ...]:
    """Where compiled kernels may lie: beside their sources, or in the user's cache where that cannot be written.

    NUMBA_CACHE_DIR is in place of both. Nobody has made them yet, perhaps.
    """
    name = f"kernels-{sources_digest()}"
    named = os.environ.get("NUMBA_CACHE_DIR")
    if named:
        return (Path(named) / name,)
    ours = Path(__file__).parent / "__pycache__"
    # Path.exists raises where this user may not look.
    if not os.path.exists(ours / name):  # noqa: PTH110 - the first run of this version: drop what others left here
        for old in ours.glob("kernels-*"):
            shutil.rmtree(old, ignore_errors=True)
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "piper_ray"
    except RuntimeError:  # the user has none
        return (ours / name,)
    if ours.exists() and not os.access(ours, os.R_OK | os.X_OK):  # another user's alone
        return (home / name,)
    return ours / name, home / name


@contextlib.contextmanager
def one_compiles() -> Iterator[None]:
    """One process of a machine at a time, so that one compiles and the others find the code.

    Where no such turns can be taken, each compiles for itself.
    """
    with contextlib.ExitStack() as held:
        for folder in cache_folders():
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                guard = held.enter_context((folder / "compiling").open("w"))
                fcntl.flock(guard, fcntl.LOCK_EX)
                break
        yield


def is_kept(kernel_name: str) -> bool:
    """Whether an earlier run left ``module.function`` compiled, for some types of its arguments."""
    return any(any(folder.glob(f"{kernel_name}.*.nbc")) for folder in cache_folders())


def is_loaded(function: Callable[..., Any]) -> bool:
    """Whether this process has called the kernel before: a first call takes its loading, or its compiling, besides."""
    return bool(getattr(function, "overloads", True))


def kernel(function: _Function) -> _Function:
    """For Python to call. Compiles ``function`` on first call, or loads it from the cache."""
    return _compiled(function, _nrt=True)


def inner_kernel(function: _Function) -> _Function:
    """The same for one that kernels call: they have it without what reads its arguments from Python, which takes longer
    to compile than most of them do. Python, such as a test, has it compiled once more.
    """
    return _for_kernels(function, _nrt=True)


def leaf_kernel(function: _Function) -> _Function:
    """An inner one that makes no arrays: without counting references, most of the time of an inner loop."""
    return _for_kernels(function, _nrt=False)


def inlined_kernel(function: _Function) -> _Function:
    """A leaf that LLVM merges into its callers: a call passes records array by array, some five hundred words, which
    costs more than a short run of it does.
    """
    return _for_kernels(function, _nrt=False, forceinline=True)


def part_kernel(function: _Function) -> _Function:
    """A leaf with one caller, a leaf too: it is compiled as if it stood there, and not by itself."""
    return _for_kernels(function, _nrt=False, inline="always")


# Numba's stubs know neither its settings nor these flags.
_compiler: Any = numba.njit


def _compiled(function: _Function, *, what_for: str = "", **flags: Any) -> _Function:
    compiled = _compiler(nogil=True, error_model="numpy", no_cfunc_wrapper=True, **flags)(function)
    if compiled is not function:  # the compiler is not switched off
        compiled._cache = KernelCache(cast(FunctionType, function), cache_folders(), what_for)
    return cast(_Function, compiled)


def _for_kernels(function: _Function, **flags: Any) -> _Function:
    compiled: Any = _compiled(function, **flags)
    if compiled is not function:
        called: Any = _compiled(function, what_for="inner", no_cpython_wrapper=True, **flags)
        compiled.get_call_template, compiled.get_overload = called.get_call_template, called.get_overload
    return cast(_Function, compiled)
