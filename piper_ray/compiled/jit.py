"""The one way kernels are compiled: no Python, no GIL, and kept in a folder that is named after all their sources.

A kernel's code holds that of the kernels it calls, so an entry of the cache would be out of date when any of them
changes: the folder's name carries a hash over all sources.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import numba

from piper_ray.compiled.cache import KernelCache
from piper_ray.compiled.compiler import KernelCompiler, Merged, MergedCompiler, SharedCompiler, by_itself, dispatchers

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


def is_loaded(function: Callable[..., Any]) -> bool:
    """Whether this process has called the kernel before: a first call takes its loading, or its compiling, besides."""
    return bool(getattr(function, "overloads", True))


def kernel(function: _Function) -> _Function:
    """For Python to call. Compiles ``function`` on first call, or loads it from the cache. Kernels call its machine
    code where it lies."""
    return _compiled(function, KernelCompiler, _nrt=True)


def shared_kernel(function: _Function) -> _Function:
    """The same for kernels alone: for what is long and seldom called, by several of them at best."""
    return _for_kernels(function, SharedCompiler, _nrt=True)


def inner_kernel(function: _Function) -> _Function:
    """For kernels, whose code gets a copy of its own. Python, such as a test, has it compiled once more."""
    return _for_kernels(function, MergedCompiler, _nrt=True)


def leaf_kernel(function: _Function) -> _Function:
    """An inner one that makes no arrays: without counting references, most of the time of an inner loop."""
    return _for_kernels(function, MergedCompiler, _nrt=False)


def inlined_kernel(function: _Function) -> _Function:
    """A leaf that stands in its callers' own code: a call passes records array by array, some five hundred words, which
    costs more than a short run of it does.
    """
    return _for_kernels(function, MergedCompiler, _nrt=False, forceinline=True)


# Numba's stubs know neither its settings nor these flags.
_compiler: Any = numba.njit
_unliteral: Callable[[Any], Any] = numba.types.unliteral


def _compiled(function: _Function, compiler: type[KernelCompiler], **flags: Any) -> _Function:
    compiled = _compiler(nogil=True, error_model="numpy", no_cfunc_wrapper=True, pipeline_class=compiler, **flags)(
        function
    )
    if compiled is not function:  # the compiler is not switched off
        prepare(compiled, KernelCache(cast(FunctionType, function), cache_folders(), compiler.kind))
        dispatchers[function.__module__, function.__qualname__, compiler.kind] = compiled
    return cast(_Function, compiled)


def prepare(dispatcher: Any, cache: KernelCache) -> None:
    """For a dispatcher of numba's with a ``KernelCompiler``: it keeps what it compiles in ``cache``, and for kernels
    that call it with a literal, such as 0 or True, compiles nothing of its own."""
    compile_or_load, add_overload = dispatcher.compile, dispatcher.add_overload
    call_template = dispatcher.get_call_template
    dispatcher._cache = cache

    def compile_claimed(signature: Any) -> Any:
        with by_itself():
            try:
                return compile_or_load(signature)
            finally:
                cache.release()

    def add(result: Any) -> None:
        if isinstance(result.entry_point, Merged):  # Python cannot call it
            dispatcher.overloads[tuple(result.signature.args)] = result
        else:
            add_overload(result)

    def template_for(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        any_value = {name: _unliteral(of_type) for name, of_type in keywords.items()}
        return call_template(tuple(map(_unliteral, arguments)), any_value)

    dispatcher.compile, dispatcher.add_overload, dispatcher.get_call_template = compile_claimed, add, template_for


def _for_kernels(function: _Function, compiler: type[KernelCompiler], **flags: Any) -> _Function:
    compiled: Any = _compiled(function, KernelCompiler, **flags)
    if compiled is not function:
        called: Any = _compiled(function, compiler, no_cpython_wrapper=True, **flags)
        compiled.get_call_template, compiled.get_overload = called.get_call_template, called.get_overload
    return cast(_Function, compiled)
