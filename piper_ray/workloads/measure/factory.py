"""The user's factory: finds and calls it, and makes its inputs fit the microbatch.

Inputs may be declared on the command line: ``--input SHAPE[:DTYPE[:LIMIT]]``. Instead of a traceback users see the line
of their code where an error occurred, and the error in words.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import _pytree as pytree

from piper_ray.model.errors import Fault, InputError, UsageError
from piper_ray.workloads.formats.documents import refuse

_SHAPE = re.compile(r"\d+(x\d+)*|scalar")
_WORDS = "SHAPE[:DTYPE[:LIMIT]] of one sample, such as 3x224x224 or 1024:int64:50257"
_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_INTEGERS = {"int64": torch.int64, "int32": torch.int32, "bool": torch.bool}


@dataclass(frozen=True)
class Declared:
    """A random input. shape: of one sample. below: integers are less than this."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    below: int

    def tensor(self, microbatch: int) -> torch.Tensor:
        if self.dtype.is_floating_point:
            return torch.randn(microbatch, *self.shape).to(self.dtype)
        return torch.randint(self.below, (microbatch, *self.shape)).to(self.dtype)


def parse_input(text: str) -> Declared:
    """The input that a text declares. Raises UsageError."""
    shape, _, rest = text.partition(":")
    dtype, _, limit = rest.partition(":")
    dtypes = _FLOATS | _INTEGERS
    dtype = dtype or "float32"
    if not _SHAPE.fullmatch(shape) or dtype not in dtypes or (limit and not limit.isdigit()) or limit == "0":
        raise UsageError(f"--input {text}: expected {_WORDS}; DTYPE is one of {', '.join(dtypes)}")
    sides = () if shape == "scalar" else tuple(map(int, shape.split("x")))
    return Declared(sides, dtypes[dtype], int(limit) if limit else 2)


_OURS = Path(__file__).resolve().parents[2]
_TORCH = Path(torch.__file__).resolve().parent
_IMPORT = Path(traceback.__file__).resolve().parent / "importlib"


def place_of(error: BaseException) -> str:
    """``file.py:12``: the innermost line outside our code and torch's; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        generated = frame.filename.startswith("<")
        if not generated and not any(above in path.resolve().parents for above in (_OURS, _TORCH, _IMPORT)):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def words_of(error: BaseException) -> str:
    """``ValueError: no such size``, in one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


_TENSOR_PARALLEL, _MICROBATCH = "tensor_parallel", "microbatch"


Inputs = tuple[tuple[object, ...], dict[str, object]]
"""The arguments of one call of a model: (args, kwargs)."""


@dataclass(frozen=True)
class TrainableModel:
    """A model in training mode with one microbatch of inputs, both on the device.

    loss: a function of the model's result and its inputs, ``loss(output, *args, **kwargs)``; None if the factory
    returns none. further: an iterator of the microbatches after the first; None if the factory has no others.
    """

    module: torch.nn.Module
    inputs: Inputs
    loss: Callable[..., object] | None = None
    further: Iterator[object] | None = None


@dataclass(frozen=True)
class Factory:
    """spec: the factory as the user wrote it. path: its file; None if it is not in a file."""

    spec: str
    call: Callable[..., object]
    arguments: Mapping[str, object]
    path: Path | None

    @property
    def name(self) -> str:
        return self.spec.rpartition(":")[2]

    @property
    def takes_tensor_parallel(self) -> bool:
        return _TENSOR_PARALLEL in _parameters(self.call)

    def build(
        self, microbatch: int, device: torch.device, declared: Sequence[Declared], degree: int = 1
    ) -> TrainableModel:
        """The model at a tensor-parallel degree. Raises InputError for errors of the factory or of its result."""
        known = _parameters(self.call)
        arguments = dict(self.arguments)
        if _MICROBATCH in known:
            arguments.setdefault(_MICROBATCH, microbatch)
        if _TENSOR_PARALLEL in known:
            arguments[_TENSOR_PARALLEL] = degree
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                with device if device.type == "meta" else nullcontext():
                    made = self.call(**arguments)
            except Exception as error:
                raise InputError(self.spec, [Fault(place_of(error), words_of(error))]) from error
            module, given, loss = self._parts(made)
            further = given if isinstance(given, Iterator) and not declared else None
            if declared:
                given = tuple(one.tensor(microbatch) for one in declared)
            elif further is not None:
                given = self.next_of(further)
            inputs = self.fitted(given, microbatch)
        if not any(True for _ in module.parameters()):
            refuse(self.spec, "", f"{type(module).__name__} has no parameters; expected a model that can be trained")
        try:
            moved = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs)
            return TrainableModel(module.to(device).train(), moved, loss, further)
        except NotImplementedError as error:  # parameters on the meta device have no data
            raise InputError(self.spec, [Fault("", f"{words_of(error)}; expected parameters with data")]) from error

    def build_within(
        self, microbatch: int, device: torch.device, declared: Sequence[Declared], room_bytes: float, degree: int = 1
    ) -> TrainableModel:
        """``build``, on the meta device if the model needs more than ``room_bytes``."""
        try:
            bare = self.build(microbatch, torch.device("meta"), declared, degree)
        except InputError:  # for example from a factory that reads values
            return self.build(microbatch, device, declared, degree)
        held_bytes = sum(one.nbytes for one in [*bare.module.parameters(), *bare.module.buffers()])
        return bare if held_bytes > room_bytes else self.build(microbatch, device, declared, degree)

    def fitted(self, given: object, microbatch: int) -> Inputs:
        """The factory's inputs, cut or repeated to ``microbatch`` samples. Raises InputError if that is not
        possible."""
        return _fitted(self.spec, as_call(given), microbatch, takes_microbatch=_MICROBATCH in _parameters(self.call))

    def next_of(self, further: Iterator[object]) -> object:
        """The factory's next microbatch. Raises InputError if there is none, or if making it fails."""
        try:
            return next(further)
        except StopIteration:
            refuse(self.spec, "", "gives no more example inputs; expected an iterator that does not end")
        except Exception as error:
            raise InputError(self.spec, [Fault(place_of(error), words_of(error))]) from error

    def _parts(self, made: object) -> tuple[torch.nn.Module, object, Callable[..., object] | None]:
        module, given, loss = (*made, None, None)[:3] if isinstance(made, tuple) else (made, None, None)
        if not isinstance(module, torch.nn.Module) or (isinstance(made, tuple) and len(made) not in (2, 3)):
            expected = "a torch.nn.Module, or (module, example inputs), or (module, example inputs, loss)"
            refuse(self.spec, "", f"returns {_kind(made)}; expected {expected}")
        if loss is not None and not callable(loss):
            refuse(
                self.spec, "", f"returns {_kind(loss)} as its loss; expected a function of the output and the inputs"
            )
        return module, given, loss


def find_factory(spec: str, arguments: Mapping[str, object]) -> Factory:
    """The factory of ``module:factory`` or ``file.py:factory``. Raises UsageError, or InputError for errors in its
    module."""
    where, _, name = spec.rpartition(":")
    if not where or not name.isidentifier():
        raise UsageError(f"{spec}: expected module:factory or file.py:factory, such as models/small_gpt.py:small_gpt")
    module = _imported(spec, where)
    call = getattr(module, name, None)
    if not callable(call):
        others = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        what = "is not callable" if hasattr(module, name) else "is not there"
        raise UsageError(f"{spec}: {name} {what}; {where} has {', '.join(others[:10]) or 'no callables'}")
    known = _parameters(call)
    taken = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for key in arguments:
        if key not in known and not taken:
            raise UsageError(f"--arg {key}: {name} has no such argument; expected one of {', '.join(known) or 'none'}")
    for key, parameter in known.items():
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if needed and key not in (*arguments, _MICROBATCH, _TENSOR_PARALLEL):
            raise UsageError(f"{spec}: {name} needs {key}; expected --arg {key}=VALUE")
    path = getattr(module, "__file__", None)
    return Factory(spec, call, arguments, None if path is None else Path(path))


def _imported(spec: str, where: str) -> ModuleType:
    try:
        if where.endswith(".py"):
            return _imported_file(spec, Path(where))
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(where)
        finally:
            sys.path.remove(str(Path.cwd()))
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            raise UsageError(
                f"{spec}: no module {error.name} here; expected module:factory or file.py:factory"
            ) from None
        raise InputError(spec, [Fault(place_of(error), words_of(error))]) from error
    except Exception as error:
        raise InputError(spec, [Fault(place_of(error), words_of(error))]) from error


def _imported_file(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"{spec}: no file {path}; expected module:factory or file.py:factory")
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules.setdefault(path.stem, module)  # dataclasses look up their module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        found.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _parameters(call: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(call).parameters


def as_call(given: object) -> Inputs:
    """Inputs as arguments of a call: a tuple or list by position, a mapping by name, any other value as the only
    argument."""
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, (tuple, list)):
        return tuple(given), {}
    return ((given,), {}) if given is not None else ((), {})


def _fitted(spec: str, inputs: Inputs, microbatch: int, *, takes_microbatch: bool) -> Inputs:
    """Inputs with ``microbatch`` samples along their first side, repeated or cut unless the factory made them so."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        refuse(spec, "", f"returns no example inputs; expected (module, example inputs), or --input {_WORDS}")
    if takes_microbatch:
        return inputs
    sides = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    if len(sides) > 1 or None in sides or 0 in sides:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        refuse(spec, "", f"example inputs of shapes {shapes} are no samples along their first side; expected a factory "
                         "that takes `microbatch` and returns inputs of that many samples")  # fmt: skip
    chosen = torch.arange(microbatch) % tensors[0].shape[0]
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[chosen.to(tensor.device)], inputs)


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
