"""The operators of a layer, before anything is divided over devices. Plain data; formulas are texts.

``Split`` says what t tensor-parallel devices do with a figure: tensor parallelism divides some parts of a Megatron
layer (Shoeybi et al. 2019), only sequence parallelism divides others (Korthikanti et al. 2022), and the rest stays
whole.

Formulas stand as they are printed: sums of products of numbers and symbols, ``2 s b h + 4 s b V / 2``. Both the
evaluation and the explanation of a figure start from this one text.

Also LoRA (Hu et al. 2021): the model's own parameters are frozen, and each matrix of its layers gets an adapter of low
rank.

As in PEFT with ``target_modules="all-linear"``: every matrix of attention, mixers, feed-forward parts, experts and
routers has one; embedding and vocabulary projection have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, Literal

Symbols = Mapping[str, float]


def evaluate(formula: str, symbols: Symbols) -> float:
    """The value of ``formula``. Words are factors, ``/`` divides by the next one, ``+`` separates the summands."""
    total: float = 0
    for summand in formula.split("+"):
        product: float = 1
        divides = False
        for word in summand.split():
            if word == "/":
                divides = True
                continue
            value = _value(word, symbols)
            product = product / value if divides else product * value
            divides = False
        total += product
    return total


def substituted(formula: str, symbols: Symbols) -> str:
    """``formula`` with numbers in the place of symbols: ``2 8192 1 16384`` becomes ``2*8192*1*16384``."""
    summands = []
    for summand in formula.split("+"):
        text = "*".join("/" if word == "/" else number_text(_value(word, symbols)) for word in summand.split())
        summands.append(text.replace("*/*", "/"))
    return " + ".join(summands)


def number_text(value: float) -> str:
    """A whole number without a point, another with six digits."""
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"


def _value(word: str, symbols: Symbols) -> float:
    return symbols[word] if word in symbols else float(word) if "." in word else int(word)


LOSS = "loss"
"""The name of the operator that turns logits into a loss."""

SOFTMAX = "softmax"
"""The end of the name of the operator that turns kept scores into weights."""

TOKEN_EMBEDDING = "token embedding"
"""The name of the operator that looks tokens up; other layers may share its table."""


class Split(Enum):
    """How t devices divide a figure.

    TENSOR: each device has 1/t. SEQUENCE: 1/t with sequence parallelism, all without. WHOLE: all. COPIES: for tokens on
    their way to experts, 1/t; if several devices share an expert, each has all copies of these devices.
    """

    WHOLE = "whole"
    SEQUENCE = "sequence"
    TENSOR = "tensor"
    COPIES = "copies"

    def parts(self, degree: int, sequence_parallel: bool) -> int:
        """The number of parts into which a figure is divided."""
        return degree if self in (Split.TENSOR, Split.COPIES) or (self is Split.SEQUENCE and sequence_parallel) else 1


@dataclass(frozen=True)
class Product:
    """``count`` products of a rows x depth with a depth x columns matrix.

    divided: the side that t devices divide; "tokens" is rows with sequence parallelism and nothing without. scan:
    whether it is part of a scan by chunks, whose kernels have a rate of their own.
    """

    rows: str
    columns: str
    depth: str
    count: str = "1"
    divided: Literal["tokens", "columns", "depth", "count"] | None = None
    scan: bool = False


@dataclass(frozen=True)
class KeptBytes:
    """Bytes kept from the forward for the backward pass. again: parts (``model.mode``) whose recomputation
    makes them again, so that they are not kept."""

    bytes: str
    split: Split
    again: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operator:
    """One step of a layer. forward_bytes, backward_bytes: through the device's memory, without the products'.

    parameters: count of numbers, divided by ``parameters_split``. backward_products: how often the work of the products
    is done in the backward pass: twice, for the gradients of both operands. matrices: how many matrices of the model
    its product multiplies by at once. frozen: its parameters are not trained. again: parts whose recomputation does it
    again. on_chip: operands and results of its products do not go through the device's memory, so that
    ``forward_bytes`` and ``backward_bytes`` are all that does.
    """

    name: str
    products: tuple[Product, ...] = ()
    forward_bytes: str = "0"
    backward_bytes: str = "0"
    split: Split = Split.TENSOR
    parameters: str = "0"
    parameters_split: Split = Split.TENSOR
    saved: tuple[KeptBytes, ...] = ()
    backward_products: float = 2.0
    again: tuple[str, ...] = ()
    on_chip: bool = False
    matrices: int = 1
    frozen: bool = False

    @cached_property
    def routed(self) -> bool:
        """Whether these are experts' products: one for each expert, on the tokens that go to it."""
        return any(product.count == "E" for product in self.products)


def linear(
    name: str,
    columns: str,
    depth: str,
    divided: Literal["tokens", "columns", "depth"],
    parameters: str,
    *,
    rows: str = "s b",
    kept_again: tuple[str, ...] = (),
    results: tuple[KeptBytes, ...] = (),
    **others: Any,
) -> Operator:
    """Tokens by a matrix of weights, and what it keeps: its input, which ``kept_again`` makes again, and ``results``.

    divided: "columns" and "depth" of a matrix that t devices share out; "tokens": each device has all of the matrix.
    others: fields of ``Operator``.
    """
    whole = divided == "tokens"
    kept = KeptBytes(f"2 {rows} {depth}", Split.TENSOR if divided == "depth" else Split.SEQUENCE, kept_again)
    return Operator(
        name,
        (Product(rows, columns, depth, divided=divided),),
        split=Split.SEQUENCE if whole else Split.TENSOR,
        parameters=parameters,
        parameters_split=Split.WHOLE if whole else Split.TENSOR,
        saved=(kept, *results),
        **others,
    )


def pointwise(
    name: str,
    numbers: str,
    moved: tuple[int, int],
    kept: int = 0,
    split: Split = Split.TENSOR,
    *,
    kept_again: tuple[str, ...] = (),
    **others: Any,
) -> Operator:
    """A step number by number. moved: bytes through memory for each of ``numbers``, forwards and backwards; kept: bytes
    of each that stay for the backward pass, which ``kept_again`` makes again. others: fields of ``Operator``.

    Parameters of what is divided by tokens are on every device.
    """
    fields: dict[str, Any] = {
        "parameters_split": Split.TENSOR if split in (Split.TENSOR, Split.COPIES) else Split.WHOLE,
        "saved": (KeptBytes(each(kept, numbers), split, kept_again),) if kept else (),
        **others,
    }
    return Operator(name, (), each(moved[0], numbers), each(moved[1], numbers), split, **fields)


def each(bytes_each: int, numbers: str) -> str:
    """The formula for ``bytes_each`` bytes of each number: 2 for "s b I + s b N" gives "2 s b I + 2 s b N"."""
    factor = "" if bytes_each == 1 else f"{bytes_each} "
    return " + ".join(factor + summand for summand in numbers.split(" + "))


@dataclass(frozen=True)
class Exchange:
    """What t devices exchange in a pass: ``bytes`` of a whole tensor, all-reduced ``forward`` and ``backward`` times.

    With sequence parallelism each all-reduce becomes a reduce-scatter and an all-gather, which take a ring as long.
    experts: tokens on their way to and from experts; with sequence parallelism an all-to-all of ``expert_bytes``.
    again: parts whose recomputation does it again.
    """

    name: str
    bytes: str
    forward: float = 1.0
    backward: float = 1.0
    expert_bytes: str = ""
    again: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer: all layers of a kind have the same figures.

    key: a short label. output: bytes it hands to each layer that reads it. checkpoint: bytes that full recomputation
    keeps, as a rule the tensors it reads. heads: what a tensor-parallel degree must divide; a layer without heads runs
    at any degree that others have. key_heads: those of keys and values, g of its formulas, of which more devices have
    a copy each; 0 without such. tensor_parallel: False for what runs at t = 1 only. recomputable: whether
    recomputing it is offered. tied: parameters that another layer has too and that are counted there.
    """

    key: str
    name: str
    symbols: Mapping[str, float]
    operators: tuple[Operator, ...]
    output: str
    checkpoint: str = "0"
    exchanges: tuple[Exchange, ...] = ()
    heads: tuple[int, ...] = ()
    key_heads: int = 0
    tensor_parallel: bool = True
    recomputable: bool = False
    tied: str = "0"

    @cached_property
    def _values(self) -> dict[str, float]:
        return {}

    @cached_property
    def _divided(self) -> dict[int, LayerKind]:
        return {}

    @cached_property
    def known(self) -> dict[Any, Any]:
        """The figures that are already computed, by formula."""
        return {}

    def value(self, formula: str) -> float:
        """The value of a formula, computed once, since each mode of a layer asks for the same ones."""
        found = self._values.get(formula)
        if found is None:
            found = self._values[formula] = evaluate(formula, self.symbols)
        return found

    def place_of(self, operator: Operator) -> int:
        """The place of an operator (itself, not an equal one) among the operators."""
        return next(place for place, one in enumerate(self.operators) if one is operator)

    def divides(self, degree: int) -> bool:
        """Whether ``degree`` devices can run it: each gets equally many heads, with their keys and values."""
        shared = not self.key_heads or self.key_heads % degree == 0 or degree % self.key_heads == 0
        return shared and all(heads % degree == 0 for heads in self.heads)

    def on(self, degree: int) -> LayerKind:
        """The kind on this many devices; if there are fewer heads of keys and values, each device has a copy."""
        if not 0 < self.key_heads < degree:
            return self
        if degree not in self._divided:
            self._divided[degree] = replace(self, symbols={**self.symbols, "g": degree})
        return self._divided[degree]

    @property
    def parts(self) -> frozenset[str]:
        """The names of the parts that can be recomputed by themselves."""
        return frozenset(part for operator in self.operators for saved in operator.saved for part in saved.again)

    def has(self, operator: str) -> bool:
        """Whether it has an operator of this name."""
        return any(one.name == operator for one in self.operators)

    @property
    def experts(self) -> int:
        """The number of experts to which tokens are routed; 0 without experts."""
        return round(self.value("E")) if any(operator.routed for operator in self.operators) else 0

    @property
    def scans(self) -> bool:
        """Whether it scans by chunks."""
        return any(product.scan for operator in self.operators for product in operator.products)

    @property
    def frozen_parameters(self) -> int:
        """The parameters that are not trained, without those of tied weights."""
        frozen = [operator for operator in self.operators if operator.frozen]
        return round(sum(self.value(operator.parameters) for operator in frozen) - self.value(self.tied) * bool(frozen))

    @property
    def parameters(self) -> int:
        """The number of parameters of the layer, including tied weights."""
        return round(sum(self.value(operator.parameters) for operator in self.operators))


@dataclass(frozen=True)
class LayerNode:
    """A layer of the graph: its kind and the indices of the layers that it reads.

    path: the module's name in Hugging Face's model of this family, its main one where it takes several (a last norm
    goes with the projection); empty where there is none. predictor: not part of the model that comes of it, as the
    predictors of further tokens.
    """

    kind: LayerKind
    inputs: tuple[int, ...] = ()
    path: str = ""
    predictor: bool = False


@dataclass(frozen=True)
class Architecture:
    """A model at a given microbatch: its layers in an order in which each reads earlier ones only.

    legend: what the symbols of the formulas stand for. sample: a microbatch in words.
    """

    name: str
    nodes: tuple[LayerNode, ...]
    sample: str
    legend: Mapping[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """The model's parameter count, tied weights counted once; without what only training has."""
        return _counted(node for node in self.nodes if not node.predictor)

    @property
    def trained_parameters(self) -> int:
        """All of them, those that only training has too, but those that are frozen while adapters train."""
        everything = self.parameters + self.predictor_parameters
        return everything - sum(node.kind.frozen_parameters for node in self.nodes)

    @property
    def predictor_parameters(self) -> int:
        """The parameters of layers that the finished model does without."""
        return _counted(node for node in self.nodes if node.predictor)

    @property
    def tied_nodes(self) -> frozenset[int]:
        """Indices of those that have the token embedding's table in common; none where it is a layer's own."""
        tied = [index for index, node in enumerate(self.nodes) if node.kind.value(node.kind.tied)]
        tables = [index for index, node in enumerate(self.nodes) if node.kind.has(TOKEN_EMBEDDING)]
        return frozenset([*tied, *tables[:1]] if tied else ())

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return tuple({node.kind.key: node.kind for node in self.nodes}.values())

    @property
    def tensors(self) -> list[tuple[dict[int, float], dict[int, float]]]:
        """For each layer the bytes of the tensors from and to each neighbour, by the neighbour's index."""
        found: list[tuple[dict[int, float], dict[int, float]]] = [({}, {}) for _ in self.nodes]
        for index, node in enumerate(self.nodes):
            for source in node.inputs:
                kind = self.nodes[source].kind
                found[index][0][source] = found[source][1][index] = kind.value(kind.output)
        return found


def _counted(nodes: Iterable[LayerNode]) -> int:
    """Parameters, those of tied weights once."""
    return sum(node.kind.parameters - round(node.kind.value(node.kind.tied)) for node in nodes)


def chain(*nodes: LayerNode) -> tuple[LayerNode, ...]:
    """Layers that each read the one before."""
    return tuple(replace(node, inputs=(index - 1,) if index else ()) for index, node in enumerate(nodes))


def stack(kinds: Iterable[LayerKind], path: str) -> list[LayerNode]:
    """Layers of a list of modules at ``path``."""
    return [LayerNode(kind, path=f"{path}.{index}") for index, kind in enumerate(kinds)]


def with_adapters(architecture: Architecture, rank: int) -> Architecture:
    """The architecture with adapters of this rank; everything else is frozen."""
    made = {kind.key: _adapted(kind, rank) for kind in architecture.kinds}
    nodes = tuple(replace(node, kind=made[node.kind.key]) for node in architecture.nodes)
    return replace(architecture, nodes=nodes)


def _adapted(kind: LayerKind, rank: int) -> LayerKind:
    operators = tuple(part for operator in kind.operators for part in _parts(operator, kind))
    return replace(kind, operators=operators, symbols={**kind.symbols, "L": rank})


def _parts(operator: Operator, kind: LayerKind) -> Iterator[Operator]:
    """The operator, frozen, and the adapter of its matrices."""
    learns = operator.products and kind.value(operator.parameters) > 0.0 and not operator.on_chip
    backward = operator.backward_products - 1.0 if learns else operator.backward_products
    yield replace(operator, frozen=True, backward_products=backward)
    if learns and kind.recomputable:
        for index, product in enumerate(operator.products):
            number = f" {index + 1}" if len(operator.products) > 1 else ""
            yield _adapter(operator, product, f"LoRA of {operator.name}{number}")


def _adapter(operator: Operator, product: Product, name: str) -> Operator:
    inner, copies = f"{operator.matrices} L", "" if product.count == "1" else f"{product.count} "
    sides = [f"{copies}{inner} {part}" for part in product.depth.split(" + ")]
    sides += [f"{copies}L {part}" for part in product.columns.split(" + ")]
    moved = " + ".join(f"4 {product.rows} {copies}{part}" for part in product.columns.split(" + "))
    within = product.divided if product.divided == "count" else "tokens"
    return Operator(
        name,
        products=(
            replace(product, columns=inner, divided=within),
            replace(product, depth="L", divided=within if product.divided == "depth" else product.divided),
        ),
        forward_bytes=moved,
        backward_bytes=moved,
        split=operator.split,
        parameters=" + ".join(sides),
        parameters_split=operator.parameters_split,
        saved=(KeptBytes(f"2 {product.rows} {copies}{inner}", Split.SEQUENCE),),
    )
