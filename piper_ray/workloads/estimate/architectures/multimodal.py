"""Decoders with vision: a vision tower, a projector, and a decoder that reads their tokens among those of the text.

The layers are a chain: the embedding takes the projector's tokens and puts them in their places. By default a sample
has one image (``images_per_sample``), of the config's size. Each rule is that of the tower's or the projector's class
in Hugging Face's transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated

from pydantic import ConfigDict, Field

from piper_ray.workloads.estimate import families
from piper_ray.workloads.estimate.architectures.decoder import FAMILIES as DECODERS
from piper_ray.workloads.estimate.architectures.decoder import USUAL, DecoderConfig, DecoderPaths, decoder_of
from piper_ray.workloads.estimate.architectures.layers import (
    HIDDEN,
    Attention,
    BlockStyle,
    Dense,
    layer_kind,
    norm,
    sequences_text,
    undivided,
)
from piper_ray.workloads.estimate.architectures.rows import RowConfig, config_of, config_when_asked, table
from piper_ray.workloads.estimate.architectures.vision import patches_kind
from piper_ray.workloads.estimate.operators import Architecture, LayerKind, LayerNode, Operator, Product, chain, stack
from piper_ray.workloads.formats.faults import Faults

_Side = Annotated[int | list[int], Field(description="a whole number or a list of them")]
_Part = dict[str, object]


@dataclass(frozen=True)
class TowerRules(BlockStyle):
    """What all layers of a tower share, and what is around them.

    positions: learned for each token. class_token: one more token. patch_bias: whether the layer that turns patches
    into tokens has a bias. first_norm, last_norm: whether there are norms around the layers. scales: parameters of a
    layer outside its parts. pooling: a last layer of attention that makes one token of all (SigLIP).
    """

    causal: bool = False
    positions: int = 0
    class_token: bool = False
    patch_bias: bool = False
    first_norm: bool = False
    last_norm: bool = True
    scales: str = "0"
    pooling: bool = False


def _both(side: int | list[int]) -> tuple[int, int]:
    """Height and width; a single number stands for both."""
    sides = [side] if isinstance(side, int) else side
    return sides[0], sides[-1]


class VisionConfig(RowConfig):
    """``vision_config`` as the row of its tower describes it."""

    hidden_size: families.Count = families.key("hidden_size", "width", default=768)
    num_hidden_layers: families.Layers = families.key("num_hidden_layers", "depth", "layers", default=12)
    num_attention_heads: families.Count = families.key("num_attention_heads", "num_heads", "heads", default=12)
    intermediate_size: families.Count | None = None
    image_size: _Side = 448
    patch_size: _Side = 14
    temporal_patch_size: families.Count = 1
    num_channels: families.Count = families.key("num_channels", "in_channels", "in_chans", default=3)

    @property
    def width(self) -> int:
        return int(self.named("width"))

    @property
    def inner(self) -> int:
        return int(self.named("inner"))

    @property
    def patches(self) -> int:
        """The number of patches of an image."""
        image, patch = _both(self.image_size), _both(self.patch_size)
        return max(1, (image[0] // patch[0]) * (image[1] // patch[1]))

    @property
    def patch_numbers(self) -> int:
        height, width = _both(self.patch_size)
        return self.num_channels * height * width * self.temporal_patch_size

    def rules(self) -> TowerRules:
        """The rules of all its layers."""
        return self.rules_of(TowerRules)

    def check(self, faults: Faults, inside: str = "") -> None:
        """Heads divide the width."""
        for side in ("image_size", "patch_size"):
            value = getattr(self, side)
            sides = [value] if isinstance(value, int) else value
            if not 1 <= len(sides) <= 2 or min(sides) < 1:
                faults.at(f"{inside}{side}", "expected a whole number >= 1 or two of them")
        self.check_multiple(self.row["width"], "num_attention_heads", faults, inside)


@cache
def _tower(*names: object) -> type[VisionConfig]:
    """The config of the first of the towers that the table has; the usual one if it has none of them."""
    known = next((str(name) for name in names if name in table()["towers"]), None)
    return config_of(VisionConfig, *(("bases", "tower") if known is None else ("towers", known)))


@dataclass(frozen=True)
class Projector:
    """The projector from the tower's tokens to the decoder's.

    merged: how many tokens become one. tokens: tokens of an image, if the number is fixed, else 0. norm: parameters
    before the layers. layers: (rows, columns, bias) of its matrices. others: further numbers. between: q. copies:
    further projectors, each with a wider norm, for tower layers that the decoder reads besides the last.
    """

    layers: tuple[tuple[str, str, bool], ...]
    merged: int
    tokens: int
    norm: str
    others: str
    between: int
    copies: int


class VlmConfig(RowConfig):
    """A decoder with vision: the keys around ``text_config`` and ``vision_config``, as its row takes them."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")  # Qwen2-VL's may hold the decoder's keys itself

    model_type: str = ""
    text_config: _Part = Field(default={}, description="an object")
    vision_config: _Part = Field(default={}, description="an object")
    hidden_size: families.Count | None = None
    projection_dim: families.Count | None = None
    mm_tokens_per_image: families.Count = 256
    multimodal_projector_bias: families.Flag | None = None
    spatial_merge_size: families.Count = 2
    downsample_ratio: Annotated[float, Field(gt=0.01, le=1, description="a share")] = 0.5
    scale_factor: families.Count = 2
    tie_word_embeddings: families.Flag | None = None
    images_per_sample: families.Count = 1

    @property
    def most_tokens(self) -> int:
        return 2**20

    def projector(self, vision: VisionConfig) -> Projector:
        """The projector as the row describes it; the tower's row gives norm and width if this row does not."""
        matrices = [matrix.split() for matrix in self.named("projector").split(", ")]
        return Projector(
            tuple((rows, columns, bool(marks) and self.named("biased")) for rows, columns, *marks in matrices),
            self.named("merged"),
            self.named("image_tokens"),
            self.named("norm") or vision.named("norm_before_merging"),
            self.named("others"),
            self.named("between") or vision.named("projector_output_dim"),
            self.named("copies"),
        )

    def check(self, faults: Faults, inside: str = "") -> None:  # noqa: ARG002
        """Checks both parts."""
        _parts(self, faults)


TOWER_PATH = "model.visual."
"""The prefix of the paths of all modules of tower and projector."""


def sees(config: families.Config) -> bool:
    """Whether the config is that of a decoder with a vision tower."""
    return isinstance(config, VlmConfig)


def images_of(config: families.Config) -> tuple[int, tuple[int, int], int]:
    """The images of a sample: their number, the height and width of each, and the tokens of each; 0 images for other
    models."""
    if not isinstance(config, VlmConfig) or (parts := _parts(config, Faults())) is None:
        return 0, (0, 0), 0
    vision = parts[1]
    return config.images_per_sample, _both(vision.image_size), _image_tokens(config.projector(vision), vision)


def _parts(config: VlmConfig, faults: Faults) -> tuple[DecoderConfig, VisionConfig] | None:
    """The configs of decoder and tower; None with their faults noted."""
    text = config.text_config or {**(config.model_extra or {}), "hidden_size": config.hidden_size, "model_type": None}
    text_type = str(text.get("model_type") or config.named("decoder"))
    text_type = table()["text_types"].get(text_type, text_type)
    tied = {} if config.tie_word_embeddings is None else {"tie_word_embeddings": config.tie_word_embeddings}
    text_config = DECODERS.get(text_type, USUAL).config
    decoder = faults.model(text_config, text_config.completed({**tied, **text}, part=True), "text_config")
    tower_config = _tower(str(config.vision_config.get("model_type")), config.named("tower"))
    tower = faults.model(tower_config, tower_config.completed(config.vision_config, part=True), "vision_config")
    if not isinstance(decoder, DecoderConfig) or tower is None:
        return None
    decoder.check(faults, "text_config.")
    tower.check(faults, "vision_config.")
    return decoder, tower


def build(config: VlmConfig, microbatch: families.Microbatch, name: str) -> Architecture:
    """The layers of tower, projector and decoder."""
    parts = _parts(config, Faults())
    assert parts is not None
    text, vision = parts
    decoder = decoder_of(text, microbatch)
    projector = config.projector(vision)
    each, images = _image_tokens(projector, vision), config.images_per_sample
    seen = replace(microbatch, samples=microbatch.samples * images)
    nodes = [
        *_tower_nodes(vision, seen),
        LayerNode(_projector_kind(projector, vision, text, seen), path=f"{TOWER_PATH}projector"),
    ]
    prefix = "model.language_model"
    nodes.append(LayerNode(decoder.embedding, path=f"{prefix}.embed_tokens"))
    nodes += decoder.after_embedding(DecoderPaths(layers=f"{prefix}.layers"))
    of_images = "an image" if images == 1 else f"{images:,} images"
    sample = f"{sequences_text(microbatch)}, {each * images:,} of each from {of_images}"
    return Architecture(name, chain(*nodes), sample, families.legend("multimodal"))


def _image_tokens(projector: Projector, vision: VisionConfig) -> int:
    return projector.tokens or max(1, vision.patches // projector.merged)


def _tower_nodes(config: VisionConfig, microbatch: families.Microbatch) -> list[LayerNode]:
    rules = config.rules()
    style = replace(rules, fused=microbatch.fused)
    heads = config.num_attention_heads
    symbols: dict[str, float] = {
        "s": config.patches + rules.class_token, "b": microbatch.samples, "h": config.width,
        "p": config.patch_numbers, "P": rules.positions,
    }  # fmt: skip
    patches = patches_kind(
        symbols,
        *([norm(style, "norm after embedding")] if rules.first_norm else []),
        key="vision-embedding",
        name="vision embedding",
        bias=rules.patch_bias,
        table_parameters="P h + h" if rules.class_token else "P h",
    )
    attending = Attention(heads, heads, config.width // heads).part(style, symbols)
    feeding = Dense(config.inner).part(style, symbols)
    if rules.scales != "0":
        feeding = replace(feeding, biases=f"{feeding.biases} + {rules.scales}")
    layer = layer_kind("vision-block", "vision layer", symbols, style, [attending, feeding])
    nodes = [LayerNode(patches, path=f"{TOWER_PATH}embeddings")]
    nodes += stack([layer] * config.num_hidden_layers, f"{TOWER_PATH}encoder.layers")
    closing = _closing(rules, style)
    if closing:
        last = LayerKind("vision-norm", "vision norm", layer.symbols, closing, HIDDEN, checkpoint=HIDDEN)
        nodes.append(LayerNode(last, path=f"{TOWER_PATH}norm"))
    return nodes


def _closing(rules: TowerRules, style: BlockStyle) -> tuple[Operator, ...]:
    pooling = undivided(
        "attention to one token, and a feed-forward part",
        (Product("s b", "2 h", "h"), Product("b", "2 h + 2 f", "h")),
        parameters="h + 4 h h + 4 h + 2 h + 2 h f + f + h",
        saved="4 s b h",
    )
    normed = [norm(style, "last norm")] if rules.last_norm else []
    return (*normed, *([pooling] if rules.pooling else []))


def _projector_kind(
    projector: Projector, vision: VisionConfig, text: DecoderConfig, microbatch: families.Microbatch
) -> LayerKind:
    symbols: dict[str, float] = {
        "z": _image_tokens(projector, vision), "b": microbatch.samples, "h": text.hidden_size,
        "w": vision.width, "j": vision.width * projector.merged, "q": projector.between, "X": 1 + projector.copies,
    }  # fmt: skip
    operators = [
        undivided(
            "norm and merging",
            forward_bytes="4 z b j",
            backward_bytes="6 z b j",
            parameters=" + ".join([projector.norm, projector.others, *["2 j"] * projector.copies]),
        )
    ]
    operators += [
        undivided(
            f"projection {index + 1}",
            (Product("z b", columns, rows, "X"),),
            forward_bytes=f"4 z b {columns}",
            backward_bytes=f"6 z b {columns}",
            parameters=f"X {rows} {columns}" + (f" + X {columns}" if bias else ""),
            saved=f"2 X z b {rows}",
        )
        for index, (rows, columns, bias) in enumerate(projector.layers)
    ]
    return LayerKind("projector", "projector", symbols, tuple(operators), output="2 z b h")


FAMILIES = {
    name: families.Family(config_when_asked(VlmConfig, "wrappers", name), build) for name in table()["wrappers"]
}
