"""The only way kernels are compiled: without Python objects, without the GIL, and cached in a folder named by a hash of
all sources.

A kernel's code contains that of the kernels it calls, so a cached entry is out of date when any of them changes.
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
"""The folders with kernels' source code."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


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


def is_loaded(function: Callable[..., Any]) -> bool:
    """Whether this process has called the kernel before. A first call also takes the time to load or compile it."""
    return bool(getattr(function, "overloads", True))


def kernel(function: _Function) -> _Function:
    """Makes a kernel for Python to call. ``function`` is compiled on the first call, or loaded from the cache. Other
    kernels call its machine code."""
    return _compiled(function, KernelCompiler, _nrt=True)


def shared_kernel(function: _Function) -> _Function:
    """Makes a kernel for other kernels to call: for long functions that are seldom called, preferably by several
    kernels."""
    return _for_kernels(function, SharedCompiler, _nrt=True)


def inner_kernel(function: _Function) -> _Function:
    """Makes a kernel that other kernels copy into their code. If Python calls it, as in a test, it is compiled once
    more."""
    return _for_kernels(function, MergedCompiler, _nrt=True)


def leaf_kernel(function: _Function) -> _Function:
    """An inner kernel without arrays, so that it needs no reference counts, which would take most of its time."""
    return _for_kernels(function, MergedCompiler, _nrt=False)


def inlined_kernel(function: _Function) -> _Function:
    """A leaf kernel that is inlined into its callers. A call passes records array by array, about five hundred words,
    which can cost more than the work of a short function.
    """
    return _for_kernels(function, MergedCompiler, _nrt=False, forceinline=True)


# Numba's stubs know neither its settings nor these flags.
_compiler: Any = numba.njit
_unliteral: Callable[[Any], Any] = numba.types.unliteral


def _compiled(function: _Function, compiler: type[KernelCompiler], **flags: Any) -> _Function:
    compiled = _compiler(nogil=True, error_model="numpy", no_cfunc_wrapper=True, pipeline_class=compiler, **flags)(
        function
    )
    if compiled is not function:  # compilation is switched on
        prepare(compiled, KernelCache(cast(FunctionType, function), cache_folders(), compiler.kind))
        dispatchers[function.__module__, function.__qualname__, compiler.kind] = compiled
    return cast(_Function, compiled)


def prepare(dispatcher: Any, cache: KernelCache) -> None:
    """Prepares one of numba's dispatchers with a ``KernelCompiler``: it caches its results in ``cache``, and a call
    with a literal, such as 0 or True, uses the same code as a call with a value of its type."""
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
