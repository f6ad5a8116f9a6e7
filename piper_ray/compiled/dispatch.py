"""Numba's dispatchers of kernels: they compile without Python objects and without the GIL, and keep the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import numba

from piper_ray.compiled.cache import KernelCache
from piper_ray.compiled.compiler import KernelCompiler, Merged, MergedCompiler, SharedCompiler, by_itself, dispatchers

# Numba's stubs know neither its settings nor these flags.
_compiler: Any = numba.njit
_unliteral: Callable[[Any], Any] = numba.types.unliteral

_FOR_KERNELS = {compiler.kind: compiler for compiler in (SharedCompiler, MergedCompiler)}


def dispatcher_of(function: Callable[..., Any], kind: str, folders: tuple[Path, ...], **flags: bool) -> Any:
    """Returns a dispatcher for Python and for other kernels. These call its machine code or, if ``kind`` is that of a
    compiler, what that one makes. Returns ``function`` itself if compilation is switched off."""
    dispatcher = _compiled(function, KernelCompiler, folders, **flags)
    if kind and dispatcher is not function:
        called = _compiled(function, _FOR_KERNELS[kind], folders, no_cpython_wrapper=True, **flags)
        dispatcher.get_call_template, dispatcher.get_overload = called.get_call_template, called.get_overload
    return dispatcher


def _compiled(
    function: Callable[..., Any], compiler: type[KernelCompiler], folders: tuple[Path, ...], **flags: bool
) -> Any:
    compiled = _compiler(nogil=True, error_model="numpy", no_cfunc_wrapper=True, pipeline_class=compiler, **flags)(
        function
    )
    if compiled is not function:
        prepare(compiled, KernelCache(cast(FunctionType, function), folders, compiler.kind))
        dispatchers[function.__module__, function.__qualname__, compiler.kind] = compiled
    return compiled


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
