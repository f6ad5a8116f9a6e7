"""A PyTorch module as a graph of operators for schemes: the graph of torch.export, with a name for each axis.

Two sides of tensors are one axis where an operator goes along both. A side that is split, as a projection is into
heads, has its axis in the first factor that is not just a pack of a few projections. Sides that are cut into parts, or
joined one behind the other, stay one axis, and a device has its share of each part. A value that an operator makes only
from constants is given to each device.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from piper_ray.model.errors import UsageError
from piper_ray.workloads.estimate.roofline import MatrixProducts
from piper_ray.workloads.formats.documents import package_table
from piper_ray.workloads.measure.factory import TrainableModel, find_factory, parse_input, place_of, words_of
from piper_ray.workloads.measure.graph import holds_stack, layers_of, signature_of
from piper_ray.workloads.schemes.graph import OperatorFamily, OperatorGraph, Step, Value
from piper_ray.workloads.schemes.layers import OTHER_TOKENS, TOKENS
from piper_ray.workloads.schemes.prices import TracedGraph, TracedWork

_PACKED = 4
"""The most projections that are packed in one matrix."""

_HEAD = 256
"""The largest width of a head."""

_NUMBER_BYTES = 2.0
"""Bytes of a number in training on GPUs."""

Axes = tuple[int | None, ...]
"""An axis for each side of a tensor; None for sides of 1."""

_OPERATORS = package_table("piper_ray.workloads.measure", "operators.toml")


def _named(*groups: str) -> frozenset[str]:
    return frozenset(name for group in groups for name in _OPERATORS[group]["names"])


SAME, RESHAPED, SPATIAL = map(_named, ("same", "reshaped", "spatial"))
PRODUCTS = _named("products", "spatial")
_LINEAR, _SUMS, _RESIZED, _WIDENED = map(_named, ("linear", "sums", "resized", "widened"))
_ALONG = {name: said["place"] for said in _OPERATORS.values() if "place" in said for name in said["names"]}
"""Operators along some sides, by the place of the argument that names these sides; along all sides if it is missing."""


@dataclass
class _AxisTable:
    """Axes, of which some are joined. size: the number that shards of an axis divide; 1: no shards. length: of each
    side. spans: of sides (one, other, start, width) where the other side is that span of the one, with all lengths in
    proportion.

    Where a side is cut or joined into parts, device r of t has the r-th share of each part, if t divides each. So it
    has the r-th share of a part also where the part is a side of its own, and cutting and joining need no other device.
    An operator that works along the side place by place, or sums over it, gives the same result for any order of the
    places.
    """

    parent: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    spans: list[tuple[int, int, int, int]] = field(default_factory=list)
    name: list[str] = field(default_factory=list)

    def new(self, size: int, name: str) -> int | None:
        if size == 1:
            return None
        self.parent.append(len(self.parent))
        self.size.append(size)
        self.length.append(size)
        self.name.append(name)
        return len(self.parent) - 1

    def root(self, axis: int) -> int:
        while self.parent[axis] != axis:
            axis = self.parent[axis]
        return axis

    def join(self, one: int | None, other: int | None, start: int = 0, width: int = 0) -> None:
        """Joins two sides. start, width: the span of the one side that the other is; without a width, all of it."""
        if one is None or other is None:
            return
        self.spans.append((one, other, start, width or self.length[one]))
        first, second = sorted((self.root(one), self.root(other)))
        self.parent[second] = first
        self.size[first] = math.gcd(self.size[first], self.size[second])

    def parts(self) -> list[tuple[int, ...]]:
        """The lengths of the parts of each side. Sizes then divide each part."""
        cuts: list[set[Fraction]] = [set() for _ in self.parent]
        spans: dict[int, list[tuple[int, int, int, int]]] = {}
        for span in self.spans:
            spans.setdefault(self.root(span[0]), []).append(span)
        for root, own in spans.items():
            grows = True
            while grows and self.size[root] > 1:
                grows = False
                for one, other, start, width in own:
                    ratio, end = Fraction(width, self.length[other]), start + width
                    inner = {Fraction(start), Fraction(end), *(start + cut * ratio for cut in cuts[other])}
                    outer = {(cut - start) / ratio for cut in cuts[one] if start < cut < end}
                    for axis, places in ((one, inner - {0, self.length[one]}), (other, outer)):
                        new = places - cuts[axis]
                        grows |= bool(new)
                        cuts[axis] |= new
                        self.size[root] = math.gcd(self.size[root], *(int(x) if x.denominator == 1 else 1 for x in new))
        lengths = []
        for axis, (length, places) in enumerate(zip(self.length, cuts, strict=True)):
            ends = [0, *sorted(int(place) for place in places), length]
            lengths.append(tuple(end - start for start, end in itertools.pairwise(ends)))
            self.size[self.root(axis)] = math.gcd(self.size[self.root(axis)], *lengths[-1])
        return lengths

    def block(self, axis: int | None) -> None:
        if axis is not None:
            self.size[self.root(axis)] = 1


@dataclass
class _TracedValue:
    """What a node stands for. name: of its value. learned: whether it has a gradient. constant: whether each device has
    all of it, because it is made only from given values."""

    name: str
    axes: Axes
    shape: tuple[int, ...]
    learned: bool
    parameter: bool = False
    constant: bool = False


@dataclass(frozen=True)
class TracedProgram:
    """A layer as torch sees it, its steps, and the inputs of one call."""

    path: str
    model: TrainableModel
    exported: torch.export.ExportedProgram
    trace: _Trace
    traced: TracedGraph


def traced_layers(spec: str, samples: int) -> list[TracedGraph]:
    """See ``traced_programs``."""
    return [one.traced for one in traced_programs(spec, samples)]


def traced_programs(
    spec: str,
    samples: int,
    arguments: Mapping[str, object] | None = None,
    inputs: Iterable[str] = (),
    *,
    exact: bool = False,
) -> list[TracedProgram]:
    """The programs of a factory's model, each once. If the model has a list of blocks, each block has a program, and so
    has each module beside the list; else the whole model has one. arguments, inputs: as in ``profile``. exact: in
    numbers of 64 bits, without dropout.

    Raises UsageError and InputError.
    """
    declared = [parse_input(text) for text in inputs]
    model = find_factory(spec, arguments or {}).build(samples, torch.device("cpu"), declared)
    if exact:
        model.module.double().eval()
        inputs_ = pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, model.inputs)
        model = replace(model, inputs=inputs_)
    if not holds_stack(model.module):
        return [traced_program(spec, type(model.module).__name__, model)]
    found = {}
    for layer in layers_of(spec, model, ()):
        signature = signature_of(layer, [tensor.is_floating_point() for tensor in layer.inputs])
        if signature not in found:
            one = TrainableModel(layer.module, (layer.inputs, {}))
            found[signature] = traced_program(spec, layer.path, one)
    return [*found.values()]


def traced_program(spec: str, name: str, model: TrainableModel) -> TracedProgram:
    """A module's operators. Raises UsageError for a module that is not a single graph, or that uses a weight twice."""
    trace = _Trace(name)
    for node in (exported := exported_module(spec, name, model)).graph.nodes:
        trace.follow(node, exported)
    return TracedProgram(name, model, exported, trace, trace.finished(spec))


def exported_module(
    spec: str, name: str, model: TrainableModel, calls: tuple[str, ...] = ()
) -> torch.export.ExportedProgram:
    """The module's operators as torch has them. calls: paths of modules whose arguments are kept. Raises UsageError for
    a module that is not a single graph."""
    args, kwargs = model.inputs
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # the error says what torch would log
    try:
        with (
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):  # torch prints the graph
            warnings.simplefilter("ignore")
            found = torch.export.export(model.module, args, kwargs, strict=False, preserve_module_call_signature=calls)
            if any(getattr(getattr(x.target, "_schema", None), "is_mutable", False) for x in found.graph.nodes):
                found = found.run_decompositions({})  # an operator that writes into a tensor makes another one
    except Exception as error:  # noqa: BLE001 - of the user's code, and of torch's about it
        text = f"{spec}: {name} is no one graph of operators: {words_of(error).partition(' (unhinted')[0][:300]}"
        raise UsageError(
            f"{text}\nexpected code that does the same for all numbers in its inputs{_at(error)}"
        ) from None
    finally:
        logging.disable(before)
    for node in found.graph.nodes:
        shapes = [x.shape for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]
        if any(not isinstance(size, int) for shape in shapes for size in shape):
            raise UsageError(
                f"{spec}: {name}: how much {operator_of(node)} makes depends on numbers in its inputs\n"
                "expected code whose tensors have the same shapes for all numbers in its inputs"
            )
    return found


def _at(error: BaseException) -> str:
    place = place_of(error)
    return f" ({place})" if place else ""


class _Trace:
    """notes: operators that no rule divides."""

    def __init__(self, name: str) -> None:
        self.name, self.axes = name, _AxisTable()
        self.made: dict[fx.Node, _TracedValue | list[_TracedValue]] = {}
        self.values: dict[str, tuple[Axes, float, float, bool]] = {}
        self.steps: list[tuple[Step, TracedWork, tuple[int | None, ...]]] = []
        self.arriving: list[str] = []
        self.leaving: list[str] = []
        self.notes: list[str] = []
        self.tokens: int | None = None
        self.nodes: dict[str, fx.Node] = {}
        self.whole: dict[str, _TracedValue] = {}
        self.names: dict[int, str] = {}
        self.parts: list[tuple[int, ...]] = []
        self.unequal: list[tuple[int, list[tuple[int, int, int, int]]]] = []
        self.samples: tuple[int | None, int] = None, 0
        self.batched: set[int | None] = set()

    def follow(self, node: Any, exported: Any) -> None:
        if node.op == "placeholder":
            self._given(node, exported.graph_signature)
        elif node.op == "call_function" and "getitem" in str(node.target):
            source, index = self.made[node.args[0]], node.args[1]
            self.made[node] = source[index] if isinstance(source, list) else source
        elif node.op == "call_function":
            self._called(node)
        elif node.op == "output":
            outputs = exported.graph_signature.user_outputs
            flat = [arg for arg in node.args[0] if isinstance(arg, fx.Node) and arg.name in outputs]
            found = [self.made[arg] for arg in flat]
            self.leaving = list(
                dict.fromkeys(one.name for one in found if isinstance(one, _TracedValue) and one.learned)
            )

    def _given(self, node: Any, signature: Any) -> None:
        tensor = node.meta["val"]
        shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else ()
        path = signature.inputs_to_parameters.get(node.name)
        floating = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        arrives = node.name in signature.user_inputs and floating
        sides = ("samples", TOKENS, "width") if arrives and len(shape) == 3 else ()
        names = [*sides] or [
            f"{path.rpartition('.')[0] or path} {i}" if path else f"{node.name} {i}" for i in range(len(shape))
        ]
        if path:
            names = [path.rpartition(".")[0] or path, *names[1:]]
        if arrives and len(shape) > 3:  # images
            names[0] = "samples"
        axes = tuple(self.axes.new(size, side) for size, side in zip(shape, names, strict=True))
        if arrives and sides:
            self.tokens = axes[1] if self.tokens is None else self.tokens
            self.axes.block(axes[2])
            self.samples = axes[0], shape[0]
        learned = bool(path) or arrives
        self.made[node] = made = self._value(path or node.name, axes, shape, learned, parameter=bool(path), of=tensor)
        made.constant = not learned
        if arrives:
            self.arriving.append(node.name)

    def _value(
        self, name: str, axes: Axes, shape: tuple[int, ...], learned: bool, parameter: bool = False, of: Any = None
    ) -> _TracedValue:
        whole = isinstance(of, torch.Tensor) and not of.is_floating_point()
        size = math.prod(shape) * (of.element_size() if whole else _NUMBER_BYTES)
        self.values[name] = (axes, size, float(math.prod(shape)) if parameter else 0.0, learned)
        self.whole[name] = _TracedValue(name, axes, shape, learned, parameter)
        return self.whole[name]

    def _new(self, node: Any, axes: Sequence[int | None], tensor: Any, number: int | None = None) -> _TracedValue:
        name = node.name if number is None else f"{node.name} {number}"
        learned = tensor.is_floating_point() or tensor.is_complex()
        return self._value(name, tuple(axes), tuple(tensor.shape), learned, of=tensor)

    def _called(self, node: Any) -> None:
        operator = operator_of(node)
        read = [one for arg in (*_nodes(node.args), *_nodes(node.kwargs)) for one in as_list(self.made[arg])]
        tensor = node.meta.get("val")
        results = [
            x for x in (tensor if isinstance(tensor, (list, tuple)) else [tensor]) if isinstance(x, torch.Tensor)
        ]
        fresh = operator.endswith("_like") or operator.startswith("new_")  # only the shape of its input matters
        if fresh or all(one.constant for one in read) or not results:
            made = [self._new(node, self._fresh(node, x.shape), x, i) for i, x in enumerate(results)]
            for one in made:
                one.learned, one.constant = False, True
                self.values[one.name] = (*self.values[one.name][:3], False)
            self.made[node] = made if isinstance(tensor, (list, tuple)) or not made else made[0]
            return
        rule = _RULES.get(operator)
        if rule is None or not rule(self, node, operator, read, results):
            self._opaque(node, operator, read, results)

    def _fresh(self, node: Any, shape: Iterable[int]) -> list[int | None]:
        return [self.axes.new(size, f"{node.name} {i}") for i, size in enumerate(shape)]

    def _step(
        self,
        node: Any,
        family: OperatorFamily,
        read: Sequence[_TracedValue],
        made: Sequence[_TracedValue],
        *,
        along: Sequence[int | None] = (),
        keeps: Sequence[_TracedValue] = (),
        name: str = "",
        work: TracedWork | None = None,
    ) -> None:
        """read: constants are left out, as each device has all of them."""
        inputs = tuple(dict.fromkeys(one.name for one in read if not one.constant or family in _NUMBERED))
        keeps_names = tuple(dict.fromkeys(one.name for one in keeps if not one.constant or one.name in inputs))
        step = Step(name or node.name, family, inputs, tuple(one.name for one in made), (), keeps_names)
        self.steps.append((step, work or TracedWork(), tuple(along)))
        self.nodes[step.name] = node
        if node not in self.made:
            self.made[node] = made[0] if len(made) == 1 else list(made)

    def _opaque(self, node: Any, operator: str, read: list[_TracedValue], results: list[Any]) -> bool:
        made = [
            self._new(node, self._fresh(node, x.shape), x, i if len(results) > 1 else None)
            for i, x in enumerate(results)
        ]
        along = [axis for one in (*read, *made) for axis in one.axes]
        self._step(node, OperatorFamily.ROWS, read, made, along=along, keeps=read, work=TracedWork(opaque=operator))
        return True

    def same(self, node: Any, _: str, read: list[_TracedValue], __: list[Any]) -> bool:
        self.made[node] = read[0]
        return True

    def permuted(self, node: Any, _: str, read: list[_TracedValue], results: list[Any]) -> bool:
        told = torch.empty((*range(2, 2 + len(read[0].axes)),), device="meta")
        sides = [length - 2 for length in node.target(told, *node.args[1:], **node.kwargs).shape]
        axes = tuple(read[0].axes[side] for side in sides)
        self.made[node] = _TracedValue(read[0].name, axes, tuple(results[0].shape), read[0].learned, read[0].parameter)
        return True

    def reshaped(self, node: Any, _: str, read: list[_TracedValue], results: list[Any]) -> bool:
        """Groups of sides with the same number of elements; the axis of a group is in its first side, before and
        after."""
        source, shape = read[0], tuple(results[0].shape)
        if math.prod(source.shape) != math.prod(shape):  # it is repeated along new sides
            axes = self._fresh(node, shape)
            for ours, theirs in zip(reversed(axes), reversed(source.axes), strict=False):
                if theirs is not None:
                    self.axes.join(theirs, ours)
            made = self._new(node, axes, results[0])
            self._step(node, OperatorFamily.POINTWISE, [source], [made])
            return True
        axes = [None] * len(shape)
        for before, after in _groups(source.shape, shape):
            ours, theirs = _lead(after, shape), _lead(before, source.shape)
            samples, length = self.samples
            if samples is not None and theirs is not None and before:
                wide = [side for side in before if source.shape[side] > 1]
                if len(wide) > 1 and self._is(source.axes[wide[0]], {samples}):  # tokens of all samples
                    theirs = wide[1]
                    self.batched |= {source.axes[theirs]}
                wide = [side for side in after if shape[side] > 1]
                if len(wide) > 1 and shape[wide[0]] == length and self._is(source.axes[theirs], self.batched):
                    ours = wide[1]
            for side in before:
                if side != theirs:
                    self.axes.block(source.axes[side])
            if theirs is not None and ours is not None:
                axes[ours] = fresh = self.axes.new(shape[ours], f"{node.name} {ours}")
                packs = math.prod(source.shape[side] for side in before if side < theirs)
                packed = math.prod(shape[side] for side in after if side < ours)
                if packs == packed:
                    self.axes.join(source.axes[theirs], fresh)
                elif packs == 1:
                    self._packed(source.axes[theirs], [fresh] * packed)
                elif packed == 1:
                    self._packed(fresh, [source.axes[theirs]] * packs)
                else:
                    self.axes.block(source.axes[theirs])
        self.made[node] = _TracedValue(source.name, tuple(axes), shape, source.learned, source.parameter)
        return True

    def _packed(self, whole: int | None, parts: Sequence[int | None]) -> None:
        """A side consists of this many equal parts, one behind the other."""
        if whole is None:
            return
        width, rest = divmod(self.axes.length[whole], len(parts))
        for number, part in enumerate(parts):
            self.axes.join(whole, part, number * width, width)
        if rest:
            self.axes.block(whole)

    def _is(self, axis: int | None, some: Iterable[int | None]) -> bool:
        return axis is not None and self.axes.root(axis) in self._roots(some)

    def pointwise(self, node: Any, operator: str, read: list[_TracedValue], results: list[Any]) -> bool:
        axes = self._fresh(node, results[0].shape)
        for one in read:
            self._alike(axes, one)
        made = self._new(node, axes, results[0])
        tensors = [one for one in read if not one.constant]
        if operator in _SUMS and len(tensors) == sum(1 for x in node.args if not isinstance(x, bool)):
            self._step(node, OperatorFamily.SUM, tensors, [made])
            return True
        linear = operator in _SUMS or (operator in _LINEAR and len(tensors) == 1 and read[0] is tensors[0])
        made_of_it = [made]
        if linear and "dropout" in operator:
            mask = torch.empty(results[0].shape, dtype=torch.bool, device="meta")
            made_of_it.append(self._value(f"{node.name} mask", tuple(axes), tuple(mask.shape), False, of=mask))
            self.made[node] = made
        self._step(node, OperatorFamily.POINTWISE, tensors, made_of_it, keeps=made_of_it[1:] if linear else tensors)
        return True

    def _alike(self, axes: Sequence[int | None], one: _TracedValue) -> None:
        """The sides of a result are those of the value it is made from; a side without an axis stays without one."""
        for ours, theirs, length in zip(reversed(axes), reversed(one.axes), reversed(one.shape), strict=False):
            self.axes.join(theirs, ours)
            if theirs is None and length > 1:
                self.axes.block(ours)

    def copied(self, node: Any, operator: str, read: list[_TracedValue], results: list[Any]) -> bool:
        """Only the shape of the first input matters."""
        return self.reshaped(node, operator, read[1:], results)

    def repeated(self, node: Any, _: str, read: list[_TracedValue], results: list[Any]) -> bool:
        """Repeats each part of a side several times, as keys for groups of queries: shards stay together."""
        if len(read) > 1 or len(results[0].shape) != len(read[0].shape):
            return False
        axes = self._fresh(node, results[0].shape)
        self._alike(axes, read[0])
        self._step(node, OperatorFamily.POINTWISE, read, [self._new(node, axes, results[0])])
        return True

    def rows(self, node: Any, operator: str, read: list[_TracedValue], results: list[Any]) -> bool:
        """Works row by row along one side, or along the last ones of norms."""
        source = read[0]
        count = len(source.shape)
        if operator in _ALONG:
            place = _ALONG[operator]
            names = (node.kwargs[name] for name in ("dim", "dims") if name in node.kwargs)
            given: Any = node.args[place] if len(node.args) > place else next(names, None)
            if isinstance(given, fx.Node):  # two tensors
                return self.pointwise(node, operator, read, results)
            if given is None or given == []:
                given = {"topk": -1, "sort": -1, "slice_scatter": 0}.get(operator, [*range(count)])
            sides = {int(side) % count for side in (given if isinstance(given, (list, tuple)) else [given])}
        elif operator in _RESIZED:
            sides = {side for side in range(count) if source.shape[side] != results[0].shape[side - count]}
        elif operator in _WIDENED:
            sides = {count - 1} if operator == "view_as_complex" else set()
        elif operator in ("layer_norm", "rms_norm", "native_layer_norm"):
            sides = {count - 1 - i for i in range(len(node.args[1]))}
        elif operator == "group_norm":
            sides = set(range(2, count))
            if source.axes[1] is not None:
                root = self.axes.root(source.axes[1])
                self.axes.size[root] = math.gcd(self.axes.size[root], int(node.args[1]))
        elif operator in ("batch_norm", "instance_norm"):
            sides = {0, *range(2, count)}
        else:
            sides = set(range(2, count))  # pools
        along = [source.axes[side] for side in sides]
        made = []
        for number, result in enumerate(results):
            axes = self._fresh(node, result.shape)
            first = len(axes) - count if operator in _RESIZED else 0
            kept = [side for side in range(count) if len(axes) >= count or side not in sides]
            along += [axis for place, axis in enumerate(axes) if not first <= place < first + len(kept)]
            for place, side in enumerate(kept, first):
                if side not in sides or result.shape[place] == source.shape[side]:
                    self.axes.join(source.axes[side], axes[place])
                if side in sides:
                    along.append(axes[place])
            made.append(self._new(node, axes, result, number if len(results) > 1 else None))
        for other in read[1:]:
            if operator in ("group_norm", "batch_norm"):
                self.axes.join(other.axes[0], source.axes[1])
                continue
            for side in range(-len(other.axes), 0):
                if operator in _ALONG and (side % count in sides or other.shape[side] != source.shape[side]):
                    along += [other.axes[side], source.axes[side]]
                else:
                    self.axes.join(other.axes[side], source.axes[side])
        self._step(node, OperatorFamily.ROWS, read, made, along=along, keeps=read)
        return True

    def cut(self, node: Any, operator: str, read: list[_TracedValue], results: list[Any]) -> bool:
        """Cuts a side into equal or other parts. glu: multiplies one half by a function of the other."""
        source = read[0]
        removes = operator in ("unbind", "select")
        place = 1 if removes or operator in ("slice", "narrow", "glu") else 2
        side = node.args[place] if len(node.args) > place else node.kwargs.get("dim", -1 if operator == "glu" else 0)
        side, count = int(side) % len(source.shape), 2 if operator == "glu" else len(results)
        made, parts = [], []
        for number, result in enumerate(results):
            kept = [axis for i, axis in enumerate(source.axes) if i != side or not removes]
            axes = self._fresh(node, result.shape)
            for i, (ours, theirs) in enumerate(zip(axes, kept, strict=True)):
                if i != side or removes:
                    self.axes.join(ours, theirs)
            parts += [] if removes else [axes[side]]
            made.append(self._new(node, axes, result, number if len(results) > 1 else None))
        sizes, along = [one.shape[side] for one in made if not removes], list[int | None]()
        start = start_of(node, operator, source.shape[side])
        if operator == "glu" or (sum(sizes) == source.shape[side] and len({*sizes}) == 1):
            self._packed(source.axes[side], parts * (count // max(1, len(parts))))
        elif parts:
            along = self._unequal(source.axes[side], parts, start)
        keeps = read if operator == "glu" else []
        self._step(node, OperatorFamily.POINTWISE, [source], made, along=along, keeps=keeps)
        return True

    def _unequal(self, whole: int | None, parts: Sequence[int | None], start: int | None) -> list[int | None]:
        """Relates a side and its parts, one behind the other, for the next step. start: of the first part; None if a
        part is not a single span. Returns the sides that the step goes along, where they cannot be one axis."""
        known = [part for part in parts if part is not None]
        if start is None or whole is None or len(known) < len(parts):
            return [whole, *parts]
        lengths = [self.axes.length[part] for part in known]
        starts = itertools.accumulate(lengths, initial=start)
        spans = [(whole, part, at, length) for part, at, length in zip(known, starts, lengths, strict=False)]
        self.unequal.append((len(self.steps), spans))
        return []

    def _join_unequal(self) -> None:
        """Sides that are cut or joined unevenly become one axis where this leaves an axis that can be divided, keeps
        all shards of tokens, and gives no value the axis on two sides. Otherwise those steps go along the sides."""
        self.axes.parts()
        entangled = self._entangled_steps()
        for number, spans in self.unequal:
            before = copy.deepcopy(self.axes)
            for span in spans:
                self.axes.join(*span)
            self.axes.parts()
            tokens = [axis for axis, name in enumerate(self.axes.name) if name == TOKENS]
            fewer = any(self.axes.size[self.axes.root(x)] < before.size[before.root(x)] for x in tokens)
            found = self._entangled_steps()
            if fewer or found != entangled or self.axes.size[self.axes.root(spans[0][0])] == 1:
                self.axes = before
                step, work, along = self.steps[number]
                self.steps[number] = step, work, (*along, *dict.fromkeys(x for span in spans for x in span[:2]))

    def _entangled_steps(self) -> int:
        return sum(any(self._entangled(step, work)) for step, work, _ in self.steps)

    def joined(self, node: Any, operator: str, read: list[_TracedValue], results: list[Any]) -> bool:
        """Joins tensors one behind the other, or along a new side."""
        axes = self._fresh(node, results[0].shape)
        side = int(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(axes)
        stacked = operator == "stack"
        packed = [*axes[:side], *axes[side + 1 :]] if stacked else axes
        for one in read:
            for i, (ours, theirs) in enumerate(zip(packed, one.axes, strict=True)):
                if i != side or stacked:
                    self.axes.join(ours, theirs)
        parts, along = [one.axes[side] for one in read], [axes[side]]
        if not stacked and len({one.shape[side] for one in read}) == 1 < read[0].shape[side]:
            self._packed(axes[side], parts)
            along = []
        elif not stacked:
            along = self._unequal(axes[side], parts, 0)
        made = self._new(node, axes, results[0])
        self._step(node, OperatorFamily.POINTWISE, read, [made], along=along)
        return True

    def product(self, node: Any, operator: str, read: list[_TracedValue], results: list[Any]) -> bool:
        """Tokens times a matrix, or a convolution; a separate step adds the bias."""
        if operator == "addmm":
            if not read[0].parameter:
                return False
            read = [*read[1:], read[0]]
        source, weight = read[:2]
        axes = self._fresh(node, results[0].shape)
        summed: list[int | None]
        along: Axes = ()
        if operator in SPATIAL:
            groups = groups_of(node, operator)
            out, into = (1, 0) if "transpose" in operator else (0, 1)
            self.axes.join(source.axes[0], axes[0])
            self.axes.join(weight.axes[out], axes[1])
            self.axes.join(weight.axes[into], source.axes[1])
            if groups > 1:
                self.axes.join(source.axes[1], axes[1])
                root = self.axes.root(axes[1]) if axes[1] is not None else None
                if root is not None:
                    self.axes.size[root] = math.gcd(self.axes.size[root], groups)
            along = (*axes[2:], *source.axes[2:], *weight.axes[2:])
            rows, columns = results[0].numel() // results[0].shape[1], results[0].shape[1]
            depth = weight.parameter and math.prod(weight.shape) // weight.shape[out]
            summed = [source.axes[1]] if groups == 1 else []
        else:
            transposed = operator == "linear"
            wide, deep = (weight.axes[::-1][1], weight.axes[-1]) if transposed else (weight.axes[-1], weight.axes[-2])
            for ours, theirs in zip(axes[:-1], source.axes[:-1], strict=True):
                self.axes.join(ours, theirs)
            self.axes.join(axes[-1], wide)
            self.axes.join(source.axes[-1], deep)
            for ours, theirs in zip(weight.axes[:-2], axes[-2 - len(weight.axes[:-2]) : -2], strict=False):
                self.axes.join(ours, theirs)
            columns, depth = results[0].shape[-1], source.shape[-1]
            rows = results[0].numel() // columns
            summed = [source.axes[-1]]
        path = weight.name.removesuffix(".weight") if weight.parameter else node.name
        product = self._new(node, axes, results[0])
        work = TracedWork(
            (MatrixProducts(rows, columns, float(depth), 1.0),),
            columns=(axes[1 if operator in SPATIAL else -1],),
            depth=tuple(summed),
        )
        self._step(
            node,
            OperatorFamily.CONTRACTION,
            [source, weight],
            [product],
            along=along,
            keeps=[source, weight],
            name=path,
            work=work,
        )
        for bias in (one for one in read[2:] if one.parameter):
            self.axes.join(bias.axes[-1], axes[1 if operator in SPATIAL else -1])
            made = self._value(f"{product.name} and bias", product.axes, product.shape, learned=True)
            free = TracedWork(free=True)
            self._step(node, OperatorFamily.SUM, [product, bias], [made], name=f"{path} bias", work=free)
            self.made[node] = made
        return True

    def contracted(self, node: Any, operator: str, read: list[_TracedValue], results: list[Any]) -> bool:
        """An einsum, or a sum over sides."""
        if operator == "einsum":
            text = str(node.args[0]).replace(" ", "")
            if "..." in text or "->" not in text:
                return False
            parts, result = text.split("->")
            letters: dict[str, int | None] = {}
            sizes: dict[str, int] = {}
            for part, one in zip(parts.split(","), read, strict=True):
                for letter, axis, size in zip(part, one.axes, one.shape, strict=True):
                    self.axes.join(letters.setdefault(letter, axis), axis)
                    sizes[letter] = size
            made = self._new(node, [letters[letter] for letter in result], results[0])
            depth = math.prod(size for letter, size in sizes.items() if letter not in result)
            columns = math.prod(sizes[x] for x in result if x not in parts.split(",")[0]) or 1
            work = TracedWork(
                (MatrixProducts(results[0].numel() / columns, columns, depth, 1.0),),
                columns=tuple(letters[x] for x in result if x not in parts.split(",")[0]),
                depth=tuple(axis for letter, axis in letters.items() if letter not in result),
            )
            self._step(node, OperatorFamily.CONTRACTION, read, [made], keeps=read, work=work)
            return True
        given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        count = len(read[0].shape)
        sides = (
            range(count)
            if given is None
            else [int(x) % count for x in (given if isinstance(given, (list, tuple)) else [given])]
        )
        left = [axis for i, axis in enumerate(read[0].axes) if i not in sides]
        kept = len(results[0].shape) == count
        axes = [None if i in sides else axis for i, axis in enumerate(read[0].axes)] if kept else left
        summed = TracedWork(depth=tuple(axis for i, axis in enumerate(read[0].axes) if i in sides))
        self._step(node, OperatorFamily.CONTRACTION, read[:1], [self._new(node, axes, results[0])], work=summed)
        return True

    def attention(self, node: Any, _: str, read: list[_TracedValue], results: list[Any]) -> bool:
        q, k, v = read[:3]
        if any(not one.constant for one in read[3:]):  # a mask that is learned
            return False
        axes = self._fresh(node, results[0].shape)
        for one in (q, k, v):
            for side in range(len(axes) - 2):
                self.axes.join(one.axes[side], axes[side])
        self.axes.join(q.axes[-2], axes[-2])
        self.axes.join(v.axes[-1], axes[-1])
        self.axes.join(k.axes[-2], v.axes[-2])
        for axis in (q.axes[-1], k.axes[-1]):
            self.axes.block(axis)
        made = self._new(node, axes, results[0])
        causal = bool(node.args[5]) if len(node.args) > 5 else bool(node.kwargs.get("is_causal", False))
        count = math.prod(q.shape[:-2]) * (0.5 if causal else 1.0)
        products = (
            MatrixProducts(q.shape[-2], k.shape[-2], q.shape[-1], count),
            MatrixProducts(q.shape[-2], v.shape[-1], k.shape[-2], count),
        )
        work = TracedWork(products, on_chip=True)
        self._step(
            node, OperatorFamily.ATTENTION, [q, k, v], [made], along=q.axes[-2:-1], keeps=[q, k, v, made], work=work
        )
        return True

    def lookup(self, node: Any, _: str, read: list[_TracedValue], results: list[Any]) -> bool:
        table, numbers = read[:2]
        made = self._new(node, (*numbers.axes, table.axes[-1]), results[0])
        self._step(
            node,
            OperatorFamily.LOOKUP,
            [numbers, table],
            [made],
            keeps=[numbers],
            name=table.name.removesuffix(".weight"),
        )
        return True

    def loss(self, node: Any, _: str, read: list[_TracedValue], __: list[Any]) -> bool:
        logits, targets = read[:2]
        if len(logits.shape) != 2 or targets.learned:
            return False
        self.axes.join(logits.axes[0], targets.axes[0])
        made = self._value(node.name, logits.axes[:1], logits.shape[:1], learned=False)
        self._step(node, OperatorFamily.LOSS, [logits, targets], [made], keeps=[logits, targets])
        return True

    def finished(self, spec: str) -> TracedGraph:
        """Raises UsageError for a weight that two operators read."""
        readers: dict[str, list[str]] = {}
        for step, _, _ in self.steps:
            for name in step.inputs:
                readers.setdefault(name, []).append(step.name)
        used = {*readers, *(name for step, _, _ in self.steps for name in step.outputs), *self.arriving}
        for name, (_, _, parameters, _) in self.values.items():
            if parameters and len(readers.get(name, [])) > 1:
                raise UsageError(
                    f"{spec}: {name} is read by two operators ({', '.join(readers[name][:2])}): no rule is for a "
                    "module that is called twice, or for tied weights; expected each module to be called once"
                )
        self._join_unequal()
        self.parts = self.axes.parts()
        self.names = names = self._names()

        def named(axes: Iterable[int | None]) -> tuple[str, ...]:
            return tuple(dict.fromkeys(names[self.axes.root(axis)] for axis in axes if axis is not None))

        values = {}
        for name, (axes, size, parameters, learned) in self.values.items():
            if name not in used:
                continue
            own = tuple(sorted(named(axes), key=lambda axis: axis not in (TOKENS, OTHER_TOKENS)))
            values[name] = Value(name, own, size, parameters, has_gradient=learned)
        steps = tuple(
            replace(step, along=named((*along, *self._entangled(step, work)))) for step, work, along in self.steps
        )
        works = {step.name: work.named(named) for step, work, _ in self.steps}
        there = {
            axis
            for step in steps
            if works[step.name].products or step.family in _NUMBERED
            for name in (*step.inputs, *step.outputs)
            for axis in values[name].axes
            if step.family is OperatorFamily.ATTENTION or axis not in step.along
        } or {axis for value in values.values() for axis in value.axes}  # what no product is divided along helps little
        sizes = {names[root]: self.axes.size[root] for root in names if names[root] in there}
        sizes = {axis: size for axis, size in sizes.items() if size > 1 and axis != "samples"}  # for data parallelism
        graph = OperatorGraph(self.name, values, steps, tuple(self.arriving), tuple(self.leaving), sizes)
        return TracedGraph(graph, works)

    def sides(self, one: _TracedValue) -> list[tuple[str, int, tuple[int, ...]]]:
        """For each side of a value or of a view of it: the axis, the length, and the lengths of its parts."""
        axes = zip(one.axes, one.shape, strict=True)
        return [
            ("", length, (length,)) if axis is None else (self.names[self.axes.root(axis)], length, self.parts[axis])
            for axis, length in axes
        ]

    def _entangled(self, step: Step, work: TracedWork) -> Iterator[int]:
        """Axes that a value has on two sides, or that are summed over and also in the result: a single axis cannot
        express such a placement."""
        sides = {name: self._roots(self.values[name][0]) for name in (*step.inputs, *step.outputs)}
        for roots in sides.values():
            yield from (root for root in roots if roots.count(root) > 1)
        summed = self._roots(work.depth)
        yield from (root for name in step.outputs for root in sides[name] if root in summed)

    def _roots(self, axes: Iterable[Any]) -> list[int]:
        return [self.axes.root(axis) for axis in axes if axis is not None]

    def _names(self) -> dict[int, str]:
        """A name for each axis: that of the first side in it; those of inputs and weights come first."""
        found: dict[int, str] = {}
        tokens = None if self.tokens is None else self.axes.root(self.tokens)
        for axis in range(len(self.axes.parent)):
            root = self.axes.root(axis)
            if root not in found:
                members = [self.axes.name[one] for one in range(len(self.axes.parent)) if self.axes.root(one) == root]
                first = next((x for x in ("samples", "width", TOKENS) if x in members), members[0])
                name = TOKENS if root == tokens else OTHER_TOKENS if first == TOKENS else first
                found[root] = name if name not in found.values() else f"{name} ({root})"
        return found


_NUMBERED = (OperatorFamily.LOOKUP, OperatorFamily.LOSS)
"""Families that read numbers of rows."""


def as_list(made: _TracedValue | list[_TracedValue]) -> list[_TracedValue]:
    """All results of a node, as a list."""
    return made if isinstance(made, list) else [made]


def _nodes(arguments: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_arg(arguments, found.append)
    return found


def operator_of(node: Any) -> str:
    """``linear`` of ``aten::linear``."""
    return str(getattr(getattr(node.target, "_schema", None), "name", node.target)).rpartition("::")[2]


def shares(parts: Sequence[int], degree: int) -> list[int]:
    """The places of a side in the devices' order: the first device's share of each part comes first."""
    starts = itertools.accumulate(parts, initial=0)
    own = [range(start, start + length) for start, length in zip(starts, parts, strict=False)]
    return [
        place
        for rank in range(degree)
        for part in own
        for place in part[rank * len(part) // degree : (rank + 1) * len(part) // degree]
    ]


def start_of(node: Any, operator: str, length: int) -> int | None:
    """Where on its side the first part of a cut begins; None if the cut takes every n-th place."""
    if operator not in ("slice", "narrow"):
        return 0
    start = node.args[2] if len(node.args) > 2 else node.kwargs.get("start")
    step = node.args[4] if len(node.args) > 4 else node.kwargs.get("step", 1)
    start = 0 if start is None else start
    if not isinstance(start, int) or step != 1:
        return None
    return min(length, max(0, start + length if start < 0 else start))


def groups_of(node: Any, operator: str) -> int:
    """The number of groups of a convolution."""
    place = 8 if operator == "convolution" else 7 if "transpose" in operator else 6
    groups = node.args[place] if len(node.args) > place else node.kwargs.get("groups", 1)
    return int(groups)


def _lead(sides: Sequence[int], shape: Sequence[int]) -> int | None:
    """The side of a group that holds the group's axis."""
    wide = [side for side in sides if shape[side] > 1]
    if len(wide) > 1 and shape[wide[0]] <= _PACKED and (len(wide) > 2 or shape[wide[1]] > _HEAD):
        return wide[1]
    return wide[0] if wide else None


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Groups of sides with the same number of elements, as small as possible."""
    found, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        one, other = [i] if i < len(before) else [], [j] if j < len(after) else []
        left = before[i] if one else 1
        right = after[j] if other else 1
        i, j = i + len(one), j + len(other)
        while left != right:
            if left < right:
                left, one, i = left * before[i], [*one, i], i + 1
            else:
                right, other, j = right * after[j], [*other, j], j + 1
        found.append((one, other))
    return found


_Rule = Callable[[_Trace, fx.Node, str, list[_TracedValue], list[Any]], bool]
_RULES: Mapping[str, _Rule] = {
    name: getattr(_Trace, said["rule"]) for said in _OPERATORS.values() for name in said["names"]
}
