"""The one way kernels are compiled: no Python, no GIL, and a cache that notices every change.

Numba keys its cache by the file of the compiled function alone, so a change in a kernel that another file calls would
go unnoticed. Ours lies in a folder named by a hash over all kernel sources.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])


@cache
def sources_digest() -> str:
    """Changes with any kernel: who has the same computes the same."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@cache
def cache_directory() -> str:
    """Where compiled kernels lie; its last part changes with any of their sources."""
    here = Path(__file__).parent
    folder = f"kernels-{sources_digest()}"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "piper_ray"
    named = os.environ.get("NUMBA_CACHE_DIR")
    candidates = [Path(named)] if named else [here / "__pycache__", home]
    for base in candidates:
        try:
            (base / folder).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(base / folder, os.W_OK):
            if base.parent == here:  # ours alone: drop what other versions of this checkout left
                for old in base.glob("kernels-*"):
                    if old.name != folder:
                        shutil.rmtree(old, ignore_errors=True)
            return str(base / folder)
    return tempfile.mkdtemp(prefix="piper_ray-")


def is_compiled() -> bool:
    """Whether an earlier run left compiled kernels in the cache."""
    return any(Path(cache_directory()).glob("**/evaluation.evaluate_levels*.nbc"))


def kernel(function: _Function) -> _Function:
    """Compiles ``function`` on first call, or loads it from the cache."""
    return _compiled(function, _nrt=True)


def leaf_kernel(function: _Function) -> _Function:
    """The same for one that makes no arrays: without counting references, most of the time of an inner loop."""
    return _compiled(function, _nrt=False)


def inlined_kernel(function: _Function) -> _Function:
    """A leaf that LLVM merges into its callers: a call passes records array by array, some five hundred words, which
    costs more than a short run of it does.
    """
    return _compiled(function, _nrt=False, forceinline=True)


def _compiled(function: _Function, **flags: bool | str) -> _Function:
    # Numba's stubs know neither its settings nor these flags.
    config: Any = numba.config
    compiler: Any = numba.njit
    before = config.CACHE_DIR
    config.CACHE_DIR = cache_directory()
    try:
        return cast(_Function, compiler(cache=True, nogil=True, error_model="numpy", **flags)(function))
    finally:
        config.CACHE_DIR = before
