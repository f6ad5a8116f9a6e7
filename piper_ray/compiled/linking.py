"""One piece of machine code for what Python calls, with all kernels that it calls linked into it.

Numba makes machine code of every function that compiled code calls, with wrappers for Python, and optimises it anew
within each of its callers, and theirs: what lay six calls deep was optimised seven times, which was most of the time of
compiling. Here a function that a kernel calls is typed and lowered, and no more. Whoever is called by Python links it,
and LLVM optimises the whole once. There every other function is private, so that LLVM drops what has been inlined and
may pass a record's arrays as it likes: the code is smaller, and faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite.binding import Linkage
from numba._dynfunc import make_function
from numba.core.codegen import CPUCodeLibrary, JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.typed_passes import NativeLowering

# Numba has no types.
_LinkableBase: Any = CPUCodeLibrary
_WholeBase: Any = JITCodeLibrary
_Compiler: Any = CompilerBase
_Lowering: Any = NativeLowering
_Passes: Any = PassManager
_builder: Any = DefaultPassBuilder
_njit: Any = numba.njit
_register: Callable[..., Any] = register_pass


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """``numba.njit(**options)(function)``, for Python to call and for kernels to link. options: no pipeline_class."""
    whole = _njit(pipeline_class=_WholeCompiler, no_cfunc_wrapper=True, **options)(function)
    if whole is not function:  # the compiler is not switched off
        linkable = _njit(pipeline_class=_LinkableCompiler, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)(
            function
        )
        whole.get_call_template = linkable.get_call_template
        whole.get_overload = linkable.get_overload
    return whole


class _Whole(_WholeBase):  # type: ignore[misc]
    """Machine code of a function with all that it calls."""

    def _optimize_final_module(self) -> None:
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == Linkage.linkonce_odr:
                function.linkage = Linkage.internal
        super()._optimize_final_module()


class _WholeCompiler(_Compiler):  # type: ignore[misc]
    def define_pipelines(self) -> list[Any]:
        self.state.library = _Whole(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        self.state.library.enable_object_caching()
        return [_builder.define_nopython_pipeline(self.state)]


class _Linkable(_LinkableBase):  # type: ignore[misc]
    """LLVM's code for a function and for all that it calls, not yet optimised as a whole."""

    def finalize(self) -> None:
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True


@_register(mutates_CFG=True, analysis_only=False)
class _LinkableLowering(_Lowering):  # type: ignore[misc]
    _name = "linkable_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _Linkable(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        changed: bool = super().run_pass(state)
        # Callers find the function by the object that Python would call if there were machine code.
        lowered = state["cr"]
        module, name = lowered.fndesc.lookup_module(), lowered.fndesc.qualname
        entry = make_function(module, name, "linked into its callers", 0, lowered.env, (state.library,))
        state.targetctx.insert_user_function(entry, lowered.fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=entry)
        return changed


class _LinkableCompiler(_Compiler):  # type: ignore[misc]
    def define_pipelines(self) -> list[Any]:
        usual = _builder.define_nopython_pipeline(self.state).passes
        linkable = _Passes("linkable")
        linkable.passes.extend((_LinkableLowering if one is NativeLowering else one, purpose) for one, purpose in usual)
        linkable.finalize()
        return [linkable]
