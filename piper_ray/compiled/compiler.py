# mypy: disable-error-code="no-untyped-call"
"""Numba's compiler, for kernels that call kernels: nothing is optimised or made into machine code twice.

By itself numba optimises each function three times, makes machine code of it, and puts all that it calls into it, where
the same happens again: what lies six calls deep seven times. Here a kernel is one of two things. What is *merged* stays
as it was written until it is part of what calls it, and is optimised with that, once. All others have machine code,
which other kernels call where it lies.
"""

from __future__ import annotations

import gc
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
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
    """What a library was made of. kind: of ``KernelCompiler``. arguments: numba's types of them."""

    module: str
    name: str
    kind: str
    arguments: tuple[Any, ...]


dispatchers: dict[tuple[str, str, str], Any] = {}
"""Of all kernels of this process, by module, name and kind."""


@final
class KernelLibrary(JITCodeLibrary):
    """The code of one kernel for arguments of some types. calls: those whose machine code it needs where it is used.
    symbol: by which others call it."""

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
        """What is merged brings its calls along."""
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
        if self.counts_references:  # numba takes those out that are not needed, amid its passes
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
        """For ``restored``; numba calls it so."""
        self._ensure_finalized()
        machine_code = b"" if self.is_merged else self._get_compiled_object()
        bitcode = self._get_module_for_linking().as_bitcode()
        calls = tuple((origin, library.symbol) for origin, library in self.calls.items())
        return self.name, self._origin, machine_code, bitcode, calls

    @classmethod
    def restored(cls, target_context: Any, function: Any, state: Any) -> KernelLibrary | None:
        """function: numba's description. state: from ``serialize_using_object_code``.

        What LLVM needs for compiling it into a caller is read if that is ever asked for, and the machine code that it
        calls comes first. None where that goes by another name now: it would jump to nowhere.
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
            # Numba reads the bitcode to know which symbols there are.
            codegen._engine._defined_symbols.update((library.symbol, function.llvm_cpython_wrapper_name))
        library._finalize_final_module()
        return library


def _library_of(origin: Origin) -> KernelLibrary:
    """Loaded, or compiled if need be."""
    importlib.import_module(origin.module)
    dispatcher = dispatchers[origin.module, origin.name, origin.kind]
    dispatcher.compile(origin.arguments)
    library: KernelLibrary = dispatcher.overloads[origin.arguments].library
    return library


@final
class Merged:
    """In place of the address of a kernel that has none."""


class _KernelLower(Lower):
    """What a function begins with, such as its arguments, stays a value in all of it. Numba keeps what several blocks
    use in memory: records of some five hundred words, which it reads as a whole for each field. Where references are
    counted it has to, as it may end a variable twice."""

    def _find_singly_assigned_variable(self) -> None:
        super()._find_singly_assigned_variable()
        if self.context.enable_nrt:
            return
        assigned = Counter(each.target.name for block in self.blocks.values() for each in block.find_insts(ir.Assign))
        begin = self.blocks[min(self.blocks)].find_insts(ir.Assign)
        self._singly_assigned_vars |= {each.target.name for each in begin if assigned[each.target.name] == 1}


@contextmanager
def _indexing_from_the_front() -> Iterator[None]:
    """No index that a kernel works out is negative, only constants may be. Numba looks at the sign of each, and keeps
    the lengths of all arrays at hand for that."""
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
        # Numba tells functions of one name apart by a number, which other processes would not give them.
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
    """For Python to call."""

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
    """For kernels to call where it lies."""

    kind = "shared"


@final
class MergedCompiler(KernelCompiler):
    """For kernels to hold."""

    kind = "inner"


@contextmanager
def by_itself() -> Iterator[None]:
    """What is compiled within is the same whatever it is compiled for: a caller's settings would be part of its name.

    Without the garbage collector: the compiler's data are many and stay, and looking through them takes a third of its
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
