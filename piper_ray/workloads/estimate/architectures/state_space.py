"""Parts that mix tokens without attention: Mamba and Mamba-2, gated delta nets, short convolutions.

Scans are priced as memory traffic, and chunk-wise scans also as the products within and between chunks (Dao and Gu
2024, section 6), at the rate that their kernels reach. t devices divide the inner width, as in Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from piper_ray.workloads.estimate.architectures.layers import BlockStyle, Part, Symbols, all_reduce
from piper_ray.workloads.estimate.operators import Exchange, KeptBytes, Operator, Product, Split, linear, pointwise


@dataclass(frozen=True)
class Mamba:
    """Mamba (Gu and Dao 2023). parameter_norms: whether time step and states have norms, as Jamba's have."""

    inner: int
    state: int
    kernel: int
    rank: int
    bias: bool = False
    kernel_bias: bool = True
    parameter_norms: bool = False
    word: str = "mamba"

    def part(self, style: BlockStyle, symbols: Symbols) -> Part:  # noqa: ARG002
        own = {"I": self.inner, "N": self.state, "K": self.kernel, "R": self.rank}
        steps = (
            _product("states and time steps", "R + 2 N", "I", "depth", "I R + 2 I N", "2 s b R + 4 s b N", Split.WHOLE),
            Operator(
                "norms of states and time steps",
                forward_bytes="4 s b R + 8 s b N",
                backward_bytes="6 s b R + 12 s b N",
                parameters="R + 2 N",
                parameters_split=Split.WHOLE,
            ),
            _product("time steps of channels", "I", "R", "columns", "R I + I", "2 s b I", Split.TENSOR),
        )
        operators = (
            _into("2 I", style, self.bias),
            _convolution("I", self.kernel_bias),
            *(steps if self.parameter_norms else steps[::2]),
            Operator(
                "selective scan",
                forward_bytes="8 s b I + 4 s b N",
                backward_bytes="16 s b I + 8 s b N",
                parameters="I N + I",
                saved=(KeptBytes("2 s b I", Split.TENSOR),),
            ),
            _out_of("I"),
        )
        states = Exchange("states and time steps", "2 s b R + 4 s b N")
        return _mixer(operators, (self.inner,), own, self.bias, states)


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2 (Dao and Gu 2024): heads with a time step each, states shared by groups, a norm before the way out."""

    inner: int
    heads: int
    head_size: int
    groups: int
    state: int
    kernel: int
    chunk: int = 256
    bias: bool = False
    kernel_bias: bool = True
    word: str = "mamba"

    def part(self, style: BlockStyle, symbols: Symbols) -> Part:
        own = {
            "I": self.inner, "H": self.heads, "D": self.head_size, "G": self.groups, "N": self.state,
            "K": self.kernel, "Z": min(self.chunk, symbols["s"]),
        }  # fmt: skip
        counts, moved = ("0.5 b G", "0.5 b H", "2 b H"), ("6 s b I + 4 s b G N", "12 s b I + 8 s b G N")
        operators = (
            _into("2 I + 2 G N + H", style, self.bias),
            _convolution("I + 2 G N", self.kernel_bias),
            _scan("scan by chunks", "I", counts, moved, "3 H"),
            _gate(style, "I", "I"),
            _out_of("I"),
        )
        heads = (self.heads, *([self.groups] if self.groups > 1 else []))
        return _mixer(operators, heads, own, self.bias)


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net (Yang et al. 2024), as Qwen3-Next has it: heads of keys and of values."""

    key_heads: int
    key_size: int
    heads: int
    head_size: int
    kernel: int
    chunk: int = 64
    word: str = "linear"

    def part(self, style: BlockStyle, symbols: Symbols) -> Part:
        own = {
            "G": self.key_heads, "N": self.key_size, "H": self.heads, "D": self.head_size, "K": self.kernel,
            "Z": min(self.chunk, symbols["s"]),
        }  # fmt: skip
        moved = ("6 s b H D + 8 s b G N", "12 s b H D + 16 s b G N")
        operators = (
            _into("2 G N + 2 H D + 2 H", style, bias=False),
            _convolution("2 G N + H D", bias=False),
            _scan("delta rule by chunks", "H D", ("2 b H",) * 3, moved, "2 H"),
            _gate(style, "H D", "D", Split.WHOLE),
            _out_of("H D"),
        )
        return _mixer(operators, (self.heads, self.key_heads), own)


@dataclass(frozen=True)
class ShortConvolution:
    """A convolution between two gates (LFM2)."""

    width: int
    kernel: int
    bias: bool = False
    word: str = "convolution"

    def part(self, style: BlockStyle, symbols: Symbols) -> Part:  # noqa: ARG002
        own = {"I": self.width, "K": self.kernel}
        operators = (_into("3 I", style, self.bias), _convolution("I", self.bias), _out_of("I"))
        return _mixer(operators, (self.width,), own, self.bias)


def _mixer(
    operators: tuple[Operator, ...],
    heads: tuple[int, ...],
    symbols: Symbols,
    bias: bool = False,
    *exchanges: Exchange,
) -> Part:
    """A mixer from its operators. exchanges: those before the exchange of its result."""
    biases = "h" if bias else "0"
    return Part("mixer", operators, (*exchanges, all_reduce("mixer")), heads, symbols=symbols, biases=biases)


def _into(columns: str, style: BlockStyle, bias: bool) -> Operator:
    parameters = " + ".join(f"h {part}" for part in columns.split(" + ")) + (f" + {columns}" if bias else "")
    made = " + ".join(f"2 s b {part}" for part in columns.split(" + "))
    results = (KeptBytes(made, Split.TENSOR),)
    return linear("mixer in", columns, "h", "columns", parameters, kept_again=style.cheap(), results=results)


def _product(
    name: str, columns: str, depth: str, divided: Literal["columns", "depth"], parameters: str, kept: str, split: Split
) -> Operator:
    """A product that keeps its result."""
    made = (KeptBytes(kept, split),)
    return Operator(name, (Product("s b", columns, depth, divided=divided),), parameters=parameters, saved=made)


def _convolution(columns: str, bias: bool) -> Operator:
    summands = columns.split(" + ")
    numbers = " + ".join(f"s b {part}" for part in summands)
    parameters = " + ".join(f"K {part}" for part in summands) + (f" + {columns}" if bias else "")
    return pointwise("convolution of neighbours", numbers, (4, 8), 2, parameters=parameters)


def _scan(name: str, inner: str, counts: tuple[str, str, str], moved: tuple[str, str], parameters: str) -> Operator:
    """A scan chunk by chunk. counts: the numbers of products of tokens by tokens, of these with values, and of states
    with both.

    moved: bytes through the device's memory, forwards and backwards.
    """
    scores, values, states = counts
    return Operator(
        name,
        (
            Product("s", "Z", "N", scores, "count", scan=True),
            Product("s", "D", "Z", values, "count", scan=True),
            Product("s", "D", "N", states, "count", scan=True),
        ),
        *moved,
        backward_products=2.5,  # what is within a chunk is made again
        on_chip=True,
        parameters=parameters,
        saved=(KeptBytes(f"2 s b {inner}", Split.TENSOR),),
    )


def _gate(style: BlockStyle, inner: str, parameters: str, parameters_split: Split = Split.TENSOR) -> Operator:
    return pointwise(
        "norm and gate",
        f"s b {inner}",
        (6, 10),
        2,
        again=style.cheap(),
        parameters=parameters,
        parameters_split=parameters_split,
    )


def _out_of(depth: str) -> Operator:
    return linear("mixer out", "h", depth, "depth", f"h {depth}")
