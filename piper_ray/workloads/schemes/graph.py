"""A layer as a graph of operators on values with named axes, and where a value lies on t devices. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class OperatorFamily(Enum):
    """What an operator does, as far as placements are concerned (``rules``).

    CONTRACTION: a sum of products over axes: matrix products, tokens copied to experts, sums over these. SUM: a sum of
    its inputs, and views. POINTWISE: number by number. ROWS: along some axes, row by row of the others: norms, softmax,
    routers, scans along tokens. ATTENTION: queries read keys and values of all tokens. LOOKUP: rows of a table by their
    numbers. LOSS: of rows of logits.
    """

    CONTRACTION = "contraction"
    SUM = "sum"
    POINTWISE = "pointwise"
    ROWS = "rows"
    ATTENTION = "attention"
    LOOKUP = "lookup"
    LOSS = "loss"


@dataclass(frozen=True, order=True)
class TensorPlacement:
    """The placement of a value on t devices. axis: each device has 1/t of it along that axis; "": each has all of it
    or, if partial, a summand of its shape."""

    axis: str = ""
    partial: bool = False

    @property
    def text(self) -> str:
        """``replicated``, ``partial sum``, or the axis."""
        return self.axis or ("partial sum" if self.partial else "replicated")


REPLICATED, PARTIAL = TensorPlacement(), TensorPlacement(partial=True)


@dataclass(frozen=True)
class Value:
    """A tensor. bytes: of the whole tensor, as it is moved and kept. parameters: its numbers, if it is a weight, else
    0. has_gradient: False for tokens' numbers, masks and other tensors through which nothing is learned.
    sent_to_experts: copies of tokens, which go from shards of tokens to shards of experts by an exchange of their
    own."""

    name: str
    axes: tuple[str, ...]
    bytes: float
    parameters: float = 0.0
    has_gradient: bool = True
    sent_to_experts: bool = False


@dataclass(frozen=True)
class Step:
    """An operator. inputs: weights too. along: axes that ROWS go along, and the tokens of ATTENTION.
    backward_reads: values that its backward pass needs. on_ring: whether keys and values of ATTENTION may go around."""

    name: str
    family: OperatorFamily
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    along: tuple[str, ...] = ()
    backward_reads: tuple[str, ...] = ()
    on_ring: bool = False


@dataclass(frozen=True)
class OperatorGraph:
    """A layer. steps: ordered so that each step reads what is there. arriving, leaving: the values between layers. A
    value that no step makes and that does not arrive is given to each device, as tokens are. sizes: of axes that may be
    sharded."""

    name: str
    values: Mapping[str, Value]
    steps: tuple[Step, ...]
    arriving: tuple[str, ...]
    leaving: tuple[str, ...]
    sizes: Mapping[str, int]

    @cached_property
    def weights(self) -> tuple[Value, ...]:
        """Values that are trained."""
        return tuple(value for value in self.values.values() if value.parameters)

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Step, ...]]:
        """The steps that read each value."""
        return {name: tuple(step for step in self.steps if name in step.inputs) for name in self.values}

    @cached_property
    def given(self) -> tuple[str, ...]:
        """What each device has from the start, besides weights."""
        made = {name for step in self.steps for name in step.outputs} | {*self.arriving}
        return tuple(name for name, value in self.values.items() if not value.parameters and name not in made)

    def at_border(self, name: str, border: TensorPlacement) -> TensorPlacement:
        """The placements of a value between layers: all of it, or shards on its first axis, its tokens."""
        first = self.values[name].axes[0]
        return TensorPlacement(first) if border.axis and first in self.sizes else REPLICATED

    def placements(self, name: str, degree: int) -> tuple[TensorPlacement, ...]:
        """The placements of a value on a number of devices, apart from partial sums."""
        axes = self.values[name].axes
        return REPLICATED, *(TensorPlacement(axis) for axis in axes if self.sizes.get(axis, 1) % degree == 0)
