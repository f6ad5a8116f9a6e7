"""Convolutional networks, made of units of convolution, batch norm and ReLU, pools, sums and concatenations.

They run at t = 1, since Megatron's tensor parallelism has no convolutions. Symbols: b images of a microbatch; y x x the
output picture, o its channels, i the input's channels; k x l the kernel. A unit keeps its output, which the next one
reads, and the input of its norm; recomputation keeps only the former and convolves again.

ResNet has bottlenecks or pairs of convolutions with a shortcut (He et al. 2016). Inception-v3 (Szegedy et al. 2016),
here without the auxiliary classifier, has modules of concatenated branches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from piper_ray.workloads.estimate.architectures.vision import Labelled, images_text
from piper_ray.workloads.estimate.families import Count, Family, Flag, Layers, Microbatch, legend
from piper_ray.workloads.estimate.operators import (
    Architecture,
    KeptBytes,
    LayerKind,
    LayerNode,
    Operator,
    Product,
    Split,
)
from piper_ray.workloads.formats.faults import Faults

PICTURE = "2 b y x o"
"""Bytes of the output picture."""

_KEPT = (KeptBytes(PICTURE, Split.WHOLE),)
_NONE: Mapping[str, int] = {}
_Shape = tuple[int, int, int]
"""The height, the width and the channels."""


class Network:
    """The layers so far. Each method adds a layer, the module at ``path``, and returns its number.

    ``shape`` of a number: (height, width, channels).
    """

    def __init__(self, images: int) -> None:
        self.images = images
        self.nodes: list[LayerNode] = []
        self.shape: list[tuple[int, int, int]] = []

    def unit(
        self,
        source: int | None,
        channels: int,
        kernel: tuple[int, int],
        *,
        stride: int = 1,
        same: bool = True,
        relu: bool = True,
        image: tuple[int, int, int] = (0, 0, 0),
        path: str = "",
    ) -> int:
        """Convolution without bias, batch norm, ReLU. same: padded so that only the stride shrinks the picture.

        source None: reads ``image``.
        """
        height, width, into = image if source is None else self.shape[source]
        shape = (_after(height, kernel[0], stride, same), _after(width, kernel[1], stride, same), channels)
        size = f"{kernel[0]}x{kernel[1]}"
        convolution = Operator(
            "convolution",
            products=(Product("b y x", "o", "i k l"),),
            parameters="i k l o",
            saved=_KEPT,
            backward_products=1.0 if source is None else 2.0,
        )
        norm = _pass("batch norm and ReLU" if relu else "batch norm", "6 b y x o", "10 b y x o", "2 o")
        symbols = {"i": into, "k": kernel[0], "l": kernel[1]}
        kind = self._kind(f"conv{size}-{into}", f"conv {size} to", shape, (convolution, norm), symbols)
        ending = ("", "") if relu else ("-linear", ", linear")
        kind = replace(kind, key=kind.key + ending[0], name=kind.name + ending[1], recomputable=True)
        return self._add(kind, shape, () if source is None else (source,), path)

    def pool(self, source: int, window: int, *, stride: int = 1, same: bool = True, path: str = "") -> int:
        """A maximum or mean over windows."""
        height, width, channels = self.shape[source]
        shape = (_after(height, window, stride, same), _after(width, window, stride, same), channels)
        operator = _pass("pool", "2 b y x o + 2 b y x o i i", "4 b y x o + 2 b y x o i i")
        words = f"pool {window}x{window} to"
        kind = self._kind(f"pool{window}-{stride}", words, shape, (operator,), {"k": window, "i": stride})
        return self._add(kind, shape, (source,), path)

    def add(self, first: int, second: int, path: str = "") -> int:
        """The sum of two pictures, and ReLU."""
        shape = self.shape[first]
        kind = self._kind("add", "add", shape, (_pass("sum and ReLU", "6 b y x o", "6 b y x o"),))
        return self._add(kind, shape, (first, second), path)

    def concatenate(self, sources: Sequence[int]) -> int:
        """Channels of several pictures of one size side by side."""
        height, width, _ = self.shape[sources[0]]
        shape = (height, width, sum(self.shape[source][2] for source in sources))
        operator = _pass("concatenation", "4 b y x o", "4 b y x o")
        kind = self._kind(f"concat{len(sources)}", "concatenate", shape, (operator,))
        return self._add(kind, shape, tuple(sources))

    def classifier(self, source: int, classes: int, path: str = "") -> int:
        """The mean over the picture, and a linear layer with bias."""
        shape = self.shape[source]
        operators = (
            Operator("mean", (), PICTURE, PICTURE, saved=(KeptBytes("2 b o", Split.WHOLE),)),
            Operator(
                "classifier", (Product("b", "c", "o"),), parameters="o c + c", saved=(KeptBytes("4 b c", Split.WHOLE),)
            ),
        )
        kind = self._kind("classifier", "classifier", shape, operators, {"c": classes})
        kind = replace(kind, key="classifier", name="classifier", output="0")
        return self._add(kind, (1, 1, classes), (source,), path)

    def _kind(
        self, key: str, name: str, shape: _Shape, operators: tuple[Operator, ...], symbols: Mapping[str, int] = _NONE
    ) -> LayerKind:
        """A kind of layer whose output is a picture of this shape; key and name include the shape."""
        height, width, channels = shape
        return LayerKind(
            f"{key}-{channels}-{height}x{width}",
            f"{name} {channels} x {height} x {width}",
            {"b": self.images, "y": height, "x": width, "o": channels, **symbols},
            operators,
            PICTURE,
            checkpoint=PICTURE,
            tensor_parallel=False,
        )

    def _add(self, kind: LayerKind, shape: _Shape, inputs: tuple[int, ...], path: str = "") -> int:
        self.nodes.append(LayerNode(kind, inputs, path))
        self.shape.append(shape)
        return len(self.nodes) - 1


def _pass(name: str, forward_bytes: str, backward_bytes: str, parameters: str = "0") -> Operator:
    """An operator that works on pictures number by number."""
    return Operator(name, (), forward_bytes, backward_bytes, parameters=parameters, saved=_KEPT)


def _after(size: int, window: int, stride: int, same: bool) -> int:
    return -(-size // stride) if same else (size - window) // stride + 1


_Counts = Annotated[list[Count], Field(min_length=1, max_length=20)]
_Depths = Annotated[list[Layers], Field(min_length=1, max_length=20)]
_COUNTS_WORDS = "a list of whole numbers >= 1"


class ResnetConfig(Labelled):
    """``resnet``, strides in the 3 x 3 convolutions. Ours besides the Hugging Face keys: image_size."""

    num_channels: Count = 3
    embedding_size: Count = 64
    hidden_sizes: _Counts = Field(default=[256, 512, 1024, 2048], description=_COUNTS_WORDS)
    depths: _Depths = Field(default=[3, 4, 6, 3], description=_COUNTS_WORDS)
    layer_type: Annotated[Literal["bottleneck", "basic"], Field(description='"bottleneck" or "basic"')] = "bottleneck"
    downsample_in_first_stage: Flag = False
    image_size: Count = 224

    def check(self, faults: Faults, inside: str = "") -> None:
        """Each depth has its width."""
        depths, widths = len(self.depths), len(self.hidden_sizes)
        if depths != widths:
            faults.at(f"{inside}depths", f"{depths} of them, but {widths} hidden_sizes; expected as many")


def build_resnet(config: ResnetConfig, microbatch: Microbatch, name: str) -> Architecture:
    """Stem, stages of blocks, classifier."""
    network = Network(microbatch.samples)
    image = (config.image_size, config.image_size, config.num_channels)
    embedder = "resnet.embedder"
    last = network.unit(None, config.embedding_size, (7, 7), stride=2, image=image, path=f"{embedder}.embedder")
    last = network.pool(last, 3, stride=2, path=f"{embedder}.pooler")
    for stage, (width, depth) in enumerate(zip(config.hidden_sizes, config.depths, strict=True)):
        for block in range(depth):
            shrinks = block == 0 and (stage > 0 or config.downsample_in_first_stage)
            path = f"resnet.encoder.stages.{stage}.layers.{block}"
            last = _block(network, last, width, 2 if shrinks else 1, config.layer_type == "bottleneck", path)
    network.classifier(last, config.classes, "classifier")
    return Architecture(name, tuple(network.nodes), images_text(microbatch, config.image_size), legend("convolution"))


def _block(network: Network, source: int, width: int, stride: int, bottleneck: bool, path: str) -> int:
    own = [f"{path}.layer.{index}" for index in range(3)]
    if bottleneck:
        inner = network.unit(source, width // 4, (1, 1), path=own[0])
        inner = network.unit(inner, width // 4, (3, 3), stride=stride, path=own[1])
        inner = network.unit(inner, width, (1, 1), relu=False, path=own[2])
    else:
        inner = network.unit(source, width, (3, 3), stride=stride, path=own[0])
        inner = network.unit(inner, width, (3, 3), relu=False, path=own[1])
    shortcut = source
    if stride > 1 or network.shape[source][2] != width:
        shortcut = network.unit(source, width, (1, 1), stride=stride, relu=False, path=f"{path}.shortcut")
    return network.add(inner, shortcut, f"{path}.activation")


class InceptionConfig(Labelled):
    """``inception_v3``, a form of our own: there is none of Hugging Face."""

    image_size: Count = 299
    num_channels: Count = 3


# Steps one after another: channels and kernel of a unit, or a pool; "valid": not padded, "/2": a stride of 2.
_STEM = "32 3x3 valid, 64 3x3, pool 3x3 valid /2, 80 1x1, 192 3x3 valid, pool 3x3 valid /2"
_SQUARE = ("64 1x1", "48 1x1, 64 5x5", "64 1x1, 96 3x3, 96 3x3")
_MEAN = "pool 3x3, 192 1x1"


def build_inception(config: InceptionConfig, microbatch: Microbatch, name: str) -> Architecture:
    """Stem, eleven modules, classifier."""
    network = Network(microbatch.samples)
    image = (config.image_size, config.image_size, config.num_channels)
    last = network.unit(None, 32, (3, 3), stride=2, same=False, image=image)
    last = _steps(network, last, _STEM)
    for pooled in (32, 64, 64):
        last = _module(network, last, (), [(0, steps) for steps in (*_SQUARE, f"pool 3x3, {pooled} 1x1")])
    double = "64 1x1, 96 3x3"
    branches = [(0, "384 3x3 valid /2"), (1, "96 3x3 valid /2"), (0, "pool 3x3 valid /2")]
    last = _module(network, last, (double,), branches)
    for inner in (128, 160, 160, 192):
        wide = f"{inner} 1x1, {inner} 1x7, 192 7x1"
        high = f"{inner} 1x1, {inner} 7x1, {inner} 1x7, {inner} 7x1, 192 1x7"
        last = _module(network, last, (), [(0, steps) for steps in ("192 1x1", wide, high, _MEAN)])
    factored = "192 1x1, 192 1x7, 192 7x1"
    branches = [(1, "320 3x3 valid /2"), (2, "192 3x3 valid /2"), (0, "pool 3x3 valid /2")]
    last = _module(network, last, ("192 1x1", factored), branches)
    spread = [(0, "320 1x1"), (1, "384 1x3"), (1, "384 3x1"), (2, "384 1x3"), (2, "384 3x1"), (0, _MEAN)]
    for _ in range(2):
        last = _module(network, last, ("384 1x1", "448 1x1, 384 3x3"), spread)
    network.classifier(last, config.classes)
    return Architecture(name, tuple(network.nodes), images_text(microbatch, config.image_size), legend("convolution"))


def _module(network: Network, source: int, stems: Sequence[str], branches: Sequence[tuple[int, str]]) -> int:
    """Branches side by side, each from the module's source (0) or from one of its stems (1 and on)."""
    sources = [source, *(_steps(network, source, stem) for stem in stems)]
    return network.concatenate([_steps(network, sources[number], steps) for number, steps in branches])


def _steps(network: Network, source: int, steps: str) -> int:
    for step in steps.split(", "):
        channels, window, *others = step.split()
        height, width = map(int, window.split("x"))
        stride, same = (2 if "/2" in others else 1), "valid" not in others
        if channels == "pool":
            source = network.pool(source, height, stride=stride, same=same)
        else:
            source = network.unit(source, int(channels), (height, width), stride=stride, same=same)
    return source


FAMILIES = {
    "resnet": Family(ResnetConfig, build_resnet, samples=32, batch=8192),
    "inception_v3": Family(InceptionConfig, build_inception, samples=32, batch=8192),
}
