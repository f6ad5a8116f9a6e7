"""Compiled kernels on disk. Each entry is checked before it is used, and written completely or not at all.

Numba's own cache trusts its files: a damaged file ends the program, sometimes by a segmentation fault, and so does a
full disk. Here an entry is one file, which begins with a checksum of the rest and contains what it was compiled from
and for. An entry that does not match is treated as missing. If no entry can be written, the next process compiles
again. So processes may read, write and delete entries at the same time, in any order. A checksum does not stop anybody
from writing a harmful entry, and unpickling can run any code; folders that others may write to are therefore not used
(``fault_of``).

If several processes of a machine need the same kernel, one compiles it and the others wait (``claim``). Each kernel has
a lock of the operating system, on a byte of one file, so a process that ends in any way releases its locks. Kernels
call each other in one direction only, so processes never wait for each other in a circle.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, final
from uuid import uuid4

import llvmlite
import llvmlite.binding
import numba
import numba.core.runtime
from numba.core.compiler import CompileResult, compile_result
from numba.core.serialize import dumps

from piper_ray.compiled.compiler import KernelLibrary, Merged
from piper_ray.compiled.observers import COMPILING, tell
from piper_ray.storage.files import replacing

_FILE = "compiling"


def claim(folders: Sequence[Path], number: int) -> bool:
    """Takes lock ``number``, of at most 63 bits, and waits if another process holds it. Returns whether it had to wait;
    False also if no lock can be taken."""
    file = _opened(tuple(folders))
    if file is None:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
    except OSError:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX, 1, number)
        except OSError:
            return False
        return True
    return False


def release(folders: Sequence[Path], number: int) -> None:
    """Releases lock ``number``."""
    file = _opened(tuple(folders))
    if file is not None:
        with contextlib.suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN, 1, number)


@cache
def _opened(folders: tuple[Path, ...]) -> int | None:
    """The open lock file; None if no folder can be written. It stays open, because closing it would release all locks
    of the process."""
    for folder in folders:
        if fault_of(folder) is not None:
            continue
        with contextlib.suppress(OSError):
            made(folder)
            return os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    return None


_OTHERS_MAY_WRITE = 0o022
_MODE = 0o755


def fault_of(folder: Path) -> str | None:
    """Why the folder is not used, in words; None if it may be used, or does not exist yet."""
    if not hasattr(os, "getuid"):
        return None
    try:
        status = folder.stat()
    except OSError:
        return None
    if status.st_uid not in _trusted():
        return "it belongs to another user"
    if status.st_mode & _OTHERS_MAY_WRITE:
        return "others may write to it; delete it, and it is made anew"
    return None


def made(folder: Path) -> None:
    """Creates the folder so that nobody else may write to it, whatever the umask. Raises OSError."""
    folder.mkdir(_MODE, parents=True, exist_ok=True)


@cache
def _trusted() -> frozenset[int]:
    """The owners whose files are trusted: this user, root, and the owner of this installation."""
    return frozenset((os.getuid(), 0, Path(__file__).stat().st_uid))


_CHECKSUM_BYTES = hashlib.sha256().digest_size

Key = tuple[object, ...]

# Numba has no type annotations.
_runtime: Any = numba.core.runtime.rtsys  # type: ignore[attr-defined]
_dumps: Callable[[object], bytes] = dumps
_result: Callable[..., CompileResult] = compile_result


@final
class KernelCache:
    """The entries of one function, in the interface of numba's dispatchers. folders: searched in order; new entries go
    to the first that can be written.

    kind: the ``KernelCompiler``'s kind; distinguishes entries that were compiled differently.
    """

    def __init__(self, function: FunctionType, folders: Sequence[Path], kind: str = "") -> None:
        self._function = function
        self._folders = folders
        names = Path(function.__code__.co_filename).stem, function.__qualname__, kind
        self._stem = ".".join(filter(None, names))
        self._claimed: list[int] = []
        self.cache_path = str(folders[0])

    def load_overload(self, sig: Any, target_context: Any) -> CompileResult | None:
        """The entry; None if it must be compiled. Observers are then notified, and other processes wait until
        ``release``."""
        _runtime.initialize(target_context)
        key = self._key(sig, target_context.codegen())
        found = self._found(key, target_context)
        if found is None:
            self._claimed.append(int(_digest(key)[:15], 16))
            if claim(self._folders, self._claimed[-1]):
                found = self._found(key, target_context)
        if found is None:
            tell(COMPILING)
        return found

    def release(self) -> None:
        """Lets other processes continue after an attempt to compile, successful or not."""
        while self._claimed:
            release(self._folders, self._claimed.pop())

    def _found(self, key: Key, target_context: Any) -> CompileResult | None:
        for folder in self._folders:
            fault = fault_of(folder)
            if fault is not None:
                tell(f"compiled kernels in {folder} are left alone: {fault}")
                continue
            content = _content(folder / self._name(key))
            if content is not None and content[0] == key:
                result = _loaded(target_context, *content[1])
                if result is not None:
                    return result
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Writes an entry. If no folder takes it, the next process compiles again, and observers are notified."""
        key = self._key(sig, data.codegen)
        body = _dumps((key, data._reduce()))
        entry = hashlib.sha256(body).digest() + body
        faults = []
        for folder in self._folders:
            fault = fault_of(folder) or _write(folder / self._name(key), entry)
            if fault is None:
                return
            faults.append(f"{folder}: {fault}")
        tell(f"compiled kernels cannot be kept, so every run compiles them anew ({'; '.join(faults)})")

    def _key(self, sig: Any, codegen: Any) -> Key:
        """Everything that compiled code depends on, except the sources."""
        versions = numba.__version__, llvmlite.__version__, sys.implementation.cache_tag
        where = self._function.__module__, self._function.__code__.co_firstlineno
        return self._stem, where, versions, sig, codegen.magic_tuple()

    def _name(self, key: Key) -> str:
        return f"{self._stem}.{_digest(key)[:24]}.nbc"


def _digest(key: Key) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()


def _content(path: Path) -> tuple[Key, tuple[Any, ...]] | None:
    """An entry's key and code; None if there is no usable entry."""
    try:
        entry = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        tell(f"a compiled kernel in {path.parent} cannot be read ({error.strerror or error}): it is compiled anew")
        return None
    checksum, body = entry[:_CHECKSUM_BYTES], entry[_CHECKSUM_BYTES:]
    if hashlib.sha256(body).digest() == checksum:
        content: tuple[Key, tuple[Any, ...]] = pickle.loads(body)
        return content
    tell(f"a compiled kernel in {path.parent} is damaged: it is compiled anew")
    return None


def _loaded(
    target_context: Any,
    library: Any,
    function: Any,
    constants: Any,
    signature: Any,
    objectmode: bool,
    lifted: Any,
    type_annotation: str,
    *initialize: object,  # noqa: ARG001 - for parallel loops and objects, which kernels do not have
) -> CompileResult | None:
    """Does what numba's ``CompileResult._rebuild`` does with the result of its ``_reduce``."""
    restored = KernelLibrary.restored(target_context, function, library)
    if restored is None:
        return None
    return _result(
        target_context=target_context,
        typing_context=target_context.typing_context,
        library=restored,
        environment=constants,
        entry_point=Merged() if restored.is_merged else target_context.get_executable(restored, function, constants),
        fndesc=function,
        type_annotation=type_annotation,
        signature=signature,
        objectmode=objectmode,
        lifted=lifted,
        reload_init=[],
        referenced_envs=[],
    )


def _write(path: Path, entry: bytes) -> str | None:
    """Writes an entry; returns the reason if that fails."""
    try:
        made(path.parent)
        with replacing(path, path.with_name(f".{uuid4().hex}.tmp")) as unfinished:
            unfinished.write_bytes(entry)
    except OSError as error:
        return error.strerror or str(error)
    return None
