# mypy: disable-error-code="no-untyped-call"
"""Numba's compiler, changed for kernels that call kernels, so that nothing is optimised or compiled to machine code
twice.

Numba by itself optimises each function three times, makes machine code of it, and copies all its callees into it, where
the same happens again: a function six calls deep is processed seven times. Here a kernel is one of two things. A
*merged* kernel stays unoptimised until it is part of its caller, and is optimised once, together with it. All other
kernels have machine code, which their callers call.
"""

from __future__ import annotations

import gc
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, final

import llvmlite.binding
from llvmlite.ir import Constant
from numba.core import ir, types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder, Flags
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.lowering import Lower
from numba.core.targetconfig import ConfigStack
from numba.core.typed_passes import NativeLowering
from numba.np import arrayobj


class Origin(NamedTuple):
    """The source of a library. kind: of ``KernelCompiler``. arguments: numba's types of the arguments."""

    module: str
    name: str
    kind: str
    arguments: tuple[Any, ...]


dispatchers: dict[tuple[str, str, str], Any] = {}
"""The dispatchers of this process, by module, name and kind. That of a kernel is there once it is used."""


@final
class KernelLibrary(JITCodeLibrary):
    """The code of one kernel for arguments of certain types. calls: the kernels whose machine code it calls.
    symbol: the name by which others call it."""

    def __init__(self, codegen: Any, name: str, origin: Origin, *, is_merged: bool) -> None:
        super().__init__(codegen, name)
        self.enable_object_caching()
        self.calls: dict[Origin, KernelLibrary] = {}
        self.counts_references = False
        self.symbol = ""
        self._origin = origin
        self._restored_module: Callable[[], Any] | None = None
        self.is_merged = is_merged

    def add_linking_library(self, library: Any) -> None:
        """Adds a callee; a merged one also adds its own calls."""
        if isinstance(library, KernelLibrary):
            if not library.is_merged:
                self.calls[library._origin] = library
                return
            self.calls |= library.calls
        super().add_linking_library(library)

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        if self.is_merged:
            return
        if self.counts_references:  # numba removes unneeded reference counts between its passes
            super()._optimize_final_module()
            return
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)

    def _finalize_final_module(self) -> None:
        if self.is_merged:
            self._finalize_dynamic_globals()
            self._finalized = True
        else:
            super()._finalize_final_module()

    def _get_module_for_linking(self) -> Any:
        return super()._get_module_for_linking() if self._restored_module is None else self._restored_module()

    def serialize_using_object_code(self) -> tuple[Any, ...]:
        """The state for ``restored``. Numba defines the name of this method."""
        self._ensure_finalized()
        machine_code = b"" if self.is_merged else self._get_compiled_object()
        bitcode = self._get_module_for_linking().as_bitcode()
        calls = tuple((origin, library.symbol) for origin, library in self.calls.items())
        return self.name, self._origin, machine_code, bitcode, calls

    @classmethod
    def restored(cls, target_context: Any, function: Any, state: Any) -> KernelLibrary | None:
        """function: numba's description. state: from ``serialize_using_object_code``.

        LLVM's bitcode, needed to compile the kernel into a caller, is only parsed when it is used. The machine code
        that the kernel calls is loaded first. Returns None if that has another symbol now, because the call would go
        nowhere.
        """
        name, origin, machine_code, bitcode, calls = state
        codegen = target_context.codegen()
        library = cls(codegen, name, origin, is_merged=not machine_code)
        library.symbol = function.llvm_func_name
        library.calls = {called: _library_of(called) for called, _ in calls}
        if any(library.calls[called].symbol != symbol for called, symbol in calls):
            return None
        library._restored_module = cache(lambda: llvmlite.binding.parse_bitcode(bitcode))
        if machine_code:
            library._set_compiled_object(machine_code)
            # Numba parses the bitcode to learn its symbols.
            codegen._engine._defined_symbols.update((library.symbol, function.llvm_cpython_wrapper_name))
        library._finalize_final_module()
        return library


def _library_of(origin: Origin) -> KernelLibrary:
    """The library, loaded from disk or compiled."""
    attrgetter(origin.name)(importlib.import_module(origin.module)).dispatcher()
    dispatcher = dispatchers[origin.module, origin.name, origin.kind]
    dispatcher.compile(origin.arguments)
    library: KernelLibrary = dispatcher.overloads[origin.arguments].library
    return library


@final
class Merged:
    """Stands for the address of a kernel that has none."""


class _KernelLower(Lower):
    """Keeps variables that are assigned once at the start of a function, such as its arguments, as values everywhere.
    Numba keeps variables that several blocks use in memory; for records of about five hundred words it would then read
    the whole record for each field. With reference counts numba has to, because it may end a variable twice."""

    def _find_singly_assigned_variable(self) -> None:
        super()._find_singly_assigned_variable()
        if self.context.enable_nrt:
            return
        assigned = Counter(each.target.name for block in self.blocks.values() for each in block.find_insts(ir.Assign))
        begin = self.blocks[min(self.blocks)].find_insts(ir.Assign)
        self._singly_assigned_vars |= {each.target.name for each in begin if assigned[each.target.name] == 1}


@contextmanager
def _indexing_from_the_front() -> Iterator[None]:
    """Compiles indexing on the assumption that no index computed by a kernel is negative; only constants may be. Numba
    checks the sign of each index, and needs the lengths of all arrays for that."""
    wrapping = arrayobj.fix_integer_index

    def fix_integer_index(context: Any, builder: Any, index_type: Any, index: Any, size: Any) -> Any:
        if index_type.signed and not isinstance(index, Constant):
            return context.cast(builder, index, index_type, types.intp)
        return wrapping(context, builder, index_type, index, size)

    arrayobj.fix_integer_index = fix_integer_index
    try:
        yield
    finally:
        arrayobj.fix_integer_index = wrapping


@register_pass(mutates_CFG=True, analysis_only=False)
class _KernelLowering(NativeLowering):
    _name = "kernel_lowering"

    @property
    def lowering_class(self) -> type[Lower]:
        return _KernelLower

    def run_pass(self, state: Any) -> bool:
        function, kind = state.func_id.func, state.pipeline.kind
        origin = Origin(function.__module__, function.__qualname__, kind, tuple(state.args))
        # Numba numbers functions that have the same name, and other processes would number them differently.
        state.func_ir.func_id.unique_id = int(sha256(repr(origin[:3]).encode()).hexdigest()[:8], 16)
        is_merged = kind == MergedCompiler.kind
        library = state.library = KernelLibrary(
            state.targetctx.codegen(), function.__qualname__, origin, is_merged=is_merged
        )
        library.counts_references = state.flags.nrt
        state.flags.no_compile = is_merged
        with _indexing_from_the_front():
            super().run_pass(state)
        library.symbol = state["cr"].fndesc.llvm_func_name
        if is_merged:
            library.finalize()
            merged = Merged()
            state.targetctx.insert_user_function(merged, state["cr"].fndesc, [library])
            state["cr"] = state["cr"]._replace(cfunc=merged)
        return True


class KernelCompiler(CompilerBase):
    """Compiles kernels that Python calls."""

    kind: ClassVar[str] = ""

    def define_pipelines(self) -> list[Any]:
        passes, state = PassManager("kernel"), self.state
        passes.passes.extend(DefaultPassBuilder.define_untyped_pipeline(state).passes)
        passes.passes.extend(DefaultPassBuilder.define_typed_pipeline(state).passes)
        for each, what_for in DefaultPassBuilder.define_nopython_lowering_pipeline(state).passes:
            passes.add_pass(_KernelLowering if each is NativeLowering else each, what_for)
        passes.finalize()
        return [passes]


@final
class SharedCompiler(KernelCompiler):
    """Compiles kernels that other kernels call by their machine code."""

    kind = "shared"


@final
class MergedCompiler(KernelCompiler):
    """Compiles kernels that become part of their callers."""

    kind = "inner"


@contextmanager
def by_itself() -> Iterator[None]:
    """Compiles independently of the caller, whose settings would otherwise become part of the name.

    The garbage collector is off: the compiler makes many objects that stay, and examining them takes a third of its
    time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with ConfigStack().enter(Flags()):
            yield
    finally:
        if collects:
            gc.enable()
