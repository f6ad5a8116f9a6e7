"""Follows a forward pass with torch.fx, on real inputs.

torch.fx's own symbolic trace stops at code such as ``assert x.shape[1] <= self.length``, because its proxies have no
values. Our proxies carry the values of the example inputs. Values that are not tensors (sizes, types, devices) become
constants, so a graph is only valid for inputs of these shapes, which is all that a profile needs.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from piper_ray.model.errors import Fault, InputError, LimitError
from piper_ray.workloads.measure.factory import TrainableModel, place_of, words_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device, torch.layout)


@dataclass(frozen=True)
class Slot:
    """Stands for tensor number ``index`` among those that a model returns."""

    index: int


Trace = tuple[fx.Graph, dict[fx.Node, Any], object]


class Unusable(Exception):
    """A value that cannot be passed from layer to layer."""


class ValueTracer(fx.Tracer):
    """A tracer that computes what it follows. leaves: the modules that it does not enter.

    values: the value of each node whose value is or contains a tensor.
    """

    def __init__(self, model: TrainableModel, leaves: Collection[str]) -> None:
        super().__init__()
        self.values: dict[fx.Node, Any] = {}
        self.result: object = None
        self._model = model
        self._leaves = leaves
        self._running = False

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002 - torch calls it
        return module_qualified_name in self._leaves

    def create_args_for_root(
        self,
        root_fn: Callable[..., Any],
        is_module: bool,  # noqa: ARG002 - torch calls it
        concrete_args: Any = None,  # noqa: ARG002
    ) -> tuple[Any, list[Any]]:
        """A placeholder for each tensor of the inputs, at any depth."""
        leaves, spec = pytree.tree_flatten(self._model.inputs)
        given = [
            self._placeholder(i, leaf) if isinstance(leaf, torch.Tensor) else leaf for i, leaf in enumerate(leaves)
        ]
        args, kwargs = pytree.tree_unflatten(given, spec)

        def run(root: torch.nn.Module) -> list[fx.Proxy]:
            returned = root_fn(root, *args, **kwargs)
            proxies = list(proxies_in(returned))
            self.result = with_slots(returned, iter(map(Slot, range(len(proxies)))))
            return proxies

        return run, [self.root]

    def _placeholder(self, index: int, value: torch.Tensor) -> fx.Proxy:
        proxy = super().create_proxy("placeholder", f"input_{index}", (), {})
        self.values[proxy.node] = value
        return proxy

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return ValueProxy(node, self)

    def call_module(self, m: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self._running else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self._running else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
        """Computes the node's value, and returns the node's proxy; or the value itself if it contains no tensor."""
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **options)
        value = self._value(kind, target, *self._known((args, kwargs)))
        return self._as_seen(proxy, value)

    def _known(self, aggregate: Any) -> Any:
        def known(item: Any) -> Any:
            return self.values[item.node] if isinstance(item, fx.Proxy) else item

        return map_aggregate(aggregate, known)

    def _value(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        self._running = True
        try:
            if kind == "get_attr":
                return attribute(self.root, target)
            if kind == "call_module":
                return self.root.get_submodule(target)(*args, **kwargs)
            if kind == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            return target(*args, **kwargs)
        finally:
            self._running = False

    def _as_seen(self, proxy: fx.Proxy, value: Any) -> Any:
        """What the followed code receives: containers stay containers, with proxies for their items."""
        if isinstance(value, _PLAIN):
            self.graph.erase_node(proxy.node)
            return value
        self.values[proxy.node] = value
        if type(value) is dict:
            return {key: self._item(proxy, key, item) for key, item in value.items()}
        if isinstance(value, (tuple, list)):
            items = [self._item(proxy, index, item) for index, item in enumerate(value)]
            return items if isinstance(value, list) else _like(value, items)
        return proxy

    def _item(self, proxy: fx.Proxy, key: Any, item: Any) -> Any:
        return (
            item if isinstance(item, _PLAIN) else self.create_proxy("call_function", operator.getitem, (proxy, key), {})
        )


class ValueProxy(fx.Proxy):
    """A proxy that knows its value's length and the values of attributes that are not tensors, and that supports item
    assignment."""

    def __getattr__(self, k: str) -> Any:
        value = getattr(_value_at(self), k)
        return value if isinstance(value, _PLAIN) else super().__getattr__(k)

    def __len__(self) -> int:
        return len(_value_at(self))

    def __setitem__(self, key: Any, value: Any) -> None:
        tracer: Any = self.tracer
        self.node = tracer.create_proxy("call_function", assigned, (self, key, value), {}).node

    def __iter__(self) -> Iterator[Any]:
        tracer: Any = self.tracer
        return (tracer.create_proxy("call_function", operator.getitem, (self, i), {}) for i in range(len(self)))


def assigned(tensor: Any, key: Any, value: Any) -> Any:
    """``tensor[key] = value`` as a function."""
    tensor[key] = value
    return tensor


def _value_at(proxy: fx.Proxy) -> Any:
    tracer: Any = proxy.tracer
    return tracer.values[proxy.node]


def trace(spec: str, model: TrainableModel, leaves: Collection[str]) -> Trace:
    """The graph of a training pass with leaf modules as nodes, the values at its nodes, and its result with a ``Slot``
    for each tensor.

    Raises InputError with the place in the user's code that could not be followed, and LimitError if the device's
    memory is too small.
    """
    tracer = ValueTracer(model, leaves)
    try:
        with torch.no_grad():
            graph = tracer.trace(model.module)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(spec, "the forward pass") from error
    except Exception as error:
        raise InputError(spec, [Fault(place_of(error), _words(error, model))]) from error
    return graph, tracer.values, tracer.result


def out_of_memory(spec: str, what: str) -> LimitError:
    """The error for a model, or a layer (``what``), that does not fit on the device."""
    return LimitError(f"{spec}: {what} does not fit in the device's memory; expected a smaller --microbatch-size")


def _words(error: Exception, model: TrainableModel) -> str:
    if isinstance(error, Unusable):
        return f"{type(model.module).__name__} returns {error}"
    words = f"{type(model.module).__name__}.forward cannot be followed here: {words_of(error)}"
    if isinstance(error, (fx.proxy.TraceError, TypeError, NotImplementedError, AttributeError)):
        return (
            f"{words}; name the modules that are layers with profile --layers, so that only what is between is followed"
        )
    shapes = ", ".join(
        str(tuple(leaf.shape)) for leaf in pytree.tree_leaves(model.inputs) if isinstance(leaf, torch.Tensor)
    )
    return f"{words}; the inputs have the shapes {shapes}"


def proxies_in(value: Any) -> Iterator[fx.Proxy]:
    """The proxies in a model's result. Raises Unusable for values that may hide tensors."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, fx.Proxy):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor):
            yield from proxies_in(vars(leaf))
        elif not isinstance(leaf, (*_PLAIN, torch.Tensor)):
            raise Unusable(f"a {type(leaf).__name__}; expected tensors, or tuples, lists and dicts of them")


def with_slots(value: Any, slots: Iterator[Slot]) -> object:
    """A model's result with each of its ``proxies_in`` replaced by the next slot."""

    def slot(leaf: Any) -> object:
        return next(slots) if isinstance(leaf, fx.Proxy) else leaf

    return _mapped(value, slot)


def with_tensors(result: object, tensors: Sequence[torch.Tensor]) -> Any:
    """A result of ``with_slots`` with tensors in place of its slots."""
    return _mapped(result, lambda leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf)


def _mapped(value: Any, change: Callable[[Any], object]) -> object:
    """The value with each leaf changed, in the order of ``proxies_in``. Objects that hold tensors are copied, because
    all microbatches share them."""

    def mapped(leaf: Any) -> object:
        changed = change(leaf)
        if changed is not leaf or isinstance(leaf, (torch.Tensor, Slot)) or not hasattr(leaf, "__dict__"):
            return changed
        twin = copy.copy(leaf)
        vars(twin).update({key: _mapped(held, change) for key, held in vars(leaf).items()})
        return twin

    return pytree.tree_map(mapped, value)


def attribute(root: torch.nn.Module, path: str) -> Any:
    """A parameter, buffer or other tensor of a module, by its path."""
    value: Any = root
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _like(value: tuple[Any, ...], items: list[Any]) -> Any:
    """The items as a tuple, a named one if ``value`` is."""
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
