"""ResNet: bottlenecks or pairs of convolutions beside a shortcut (He et al. 2016)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from piper_ray.workloads.estimate.architectures.convolution import LEGEND, Network
from piper_ray.workloads.estimate.architectures.vision import Labelled, images_text
from piper_ray.workloads.estimate.families import Count, Family, Flag, Layers, Microbatch, no_length
from piper_ray.workloads.estimate.operators import Architecture
from piper_ray.workloads.formats.faults import Faults

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


def build(config: ResnetConfig, microbatch: Microbatch, name: str) -> Architecture:
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
    return Architecture(name, tuple(network.nodes), images_text(microbatch, config.image_size), LEGEND)


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


def check(config: ResnetConfig, faults: Faults) -> None:
    """Each depth has its width."""
    if len(config.hidden_sizes) != len(config.depths):
        faults.at("depths", f"{len(config.depths)} of them, but {len(config.hidden_sizes)} hidden_sizes; expected as "
                            "many")  # fmt: skip


FAMILIES = {"resnet": Family(ResnetConfig, build, check, no_length, samples=32, batch=8192)}
