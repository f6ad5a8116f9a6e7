"""Vision transformers, which read patches of an image as tokens, alone or as one of several towers.

Towers stand side by side and are joined by a contrastive loss: CLIP has two, ImageBind six.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from piper_ray.workloads.estimate.architectures.decoder import check_heads
from piper_ray.workloads.estimate.architectures.text import chain, dropout, embedding_kind, stack
from piper_ray.workloads.estimate.architectures.transformer import (
    BLOCK_LEGEND,
    HIDDEN,
    BlockStyle,
    block,
    norm,
    table,
    undivided,
)
from piper_ray.workloads.estimate.families import Count, Family, Flag, Layers, Microbatch, Share, no_length
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
from piper_ray.workloads.formats.fields import Open

VIT_LEGEND = {
    "s": "tokens of a sample: patches and the class token",
    **BLOCK_LEGEND,
    "p": "numbers of a patch",
    "c": "classes",
}


class Labelled(Open):
    """A classifier: of as many classes as the config labels, or of num_labels."""

    id2label: Annotated[Mapping[str, object], Field(description="an object with a label for each class")] | None = None
    num_labels: Count = 1000

    @property
    def classes(self) -> int:
        return len(self.id2label) if self.id2label else self.num_labels


class VitConfig(Labelled):
    """``vit``. Ours besides the Hugging Face keys: parallel_layers, for ViT-22B's (Dehghani et al. 2023): attention
    and feed-forward part side by side, norms of queries and keys.
    """

    hidden_size: Count
    num_hidden_layers: Layers
    num_attention_heads: Count
    intermediate_size: Count
    image_size: Count = 224
    patch_size: Count = 16
    num_channels: Count = 3
    qkv_bias: Flag = True
    hidden_dropout_prob: Share = 0.0
    parallel_layers: Flag = False


def tokens_of(image: int, patch: int) -> int:
    """Patches of a square image, and the class token."""
    return (image // patch) ** 2 + 1


def image_projection(bias: bool) -> Operator:
    """Patches of p numbers to tokens of width h, whole on every device."""
    return Operator(
        "patches to tokens",
        products=(Product("s b", "h", "p", divided="tokens"),),
        parameters="p h + h" if bias else "p h",
        parameters_split=Split.WHOLE,
        saved=(KeptBytes("2 s b p", Split.SEQUENCE),),
        backward_products=1.0,  # images need no gradient
    )


def patches_kind(
    symbols: Mapping[str, float], *, key: str, name: str, bias: bool, dropped: bool, extra: tuple[Operator, ...] = ()
) -> LayerKind:
    """Patches to tokens, whole on every device; ``extra`` operators follow."""
    operators = (
        image_projection(bias),
        table("position embedding and class token", "s h + h"),
        *extra,
        *([dropout()] if dropped else []),
    )
    return LayerKind(key, name, symbols, operators, HIDDEN)


def images_text(microbatch: Microbatch, size: int) -> str:
    """A microbatch in words."""
    return f"{microbatch.samples:,} image{'s' if microbatch.samples > 1 else ''} of {size} x {size}"


def build_vit(config: VitConfig, microbatch: Microbatch, name: str) -> Architecture:
    """Patches, layers, classifier."""
    symbols: dict[str, float] = {
        "s": tokens_of(config.image_size, config.patch_size), "b": microbatch.samples, "h": config.hidden_size,
        "a": config.num_attention_heads, "g": config.num_attention_heads,
        "d": config.hidden_size // config.num_attention_heads, "f": config.intermediate_size,
        "p": config.num_channels * config.patch_size**2, "c": config.classes,
    }  # fmt: skip
    style = BlockStyle(
        fused=microbatch.fused,
        causal=False,
        query_bias=config.qkv_bias,
        dropout=config.hidden_dropout_prob > 0,
        query_norm="4 d" if config.parallel_layers else "0",
    )
    layer = block("block", "encoder layer", symbols, style, config.num_attention_heads, parallel=config.parallel_layers)
    classifier = undivided(
        "classifier",
        products=(Product("b", "c", "h"),),
        parameters="h c + c",
        saved="2 b h + 4 b c",
    )
    head = LayerKind("head", "classifier", symbols, (norm(style, "last norm"), classifier), output="0")
    patches = patches_kind(symbols, key="patches", name="patch embedding", bias=True, dropped=style.dropout)
    nodes = chain(
        LayerNode(patches, path="vit.embeddings"),
        *stack([layer] * config.num_hidden_layers, "vit.encoder.layer"),
        LayerNode(head, path="classifier"),
    )
    return Architecture(name, nodes, images_text(microbatch, config.image_size), VIT_LEGEND)


def check_vit(config: VitConfig, faults: Faults) -> None:
    """Heads divide the width, and patches the image."""
    check_heads("hidden_size", config.hidden_size, "num_attention_heads", config.num_attention_heads, faults)
    if config.image_size % config.patch_size:
        faults.at("image_size", f"{config.image_size} is no multiple of patch_size = {config.patch_size}; expected one")


TOWERS_LEGEND = {
    "s": "tokens of a sample in the tower",
    **BLOCK_LEGEND,
    "V": "size of the vocabulary",
    "P": "learned positions",
    "p": "numbers of a patch",
    "j": "width of the joint space",
    "w": "towers",
}


_PART_WORDS = "an object of whole numbers >= 1"
_TOWERS_WORDS = "a list of 2 to 20 towers, each with a name, whole numbers >= 1, and vocab_size or patch_numbers"


@dataclass(frozen=True)
class Tower:
    """One tower. vocabulary: of a tower of text; otherwise 0, and a patch has so many numbers.

    module, projection: names of the modules; empty where there is none.
    """

    name: str
    layers: int
    width: int
    heads: int
    inner: int
    tokens: int
    vocabulary: int = 0
    patch: int = 0
    first_norm: bool = False
    module: str = ""
    projection: str = ""


def build_towers(towers: list[Tower], joint: int, microbatch: Microbatch, name: str, sample: str) -> Architecture:
    """The towers one after the other in the list of layers, side by side in the graph, and the loss that reads all."""
    nodes: list[LayerNode] = []
    ends: list[int] = []
    for tower in towers:
        embedding, layer, projection = _kinds(tower, joint, microbatch)
        nodes.append(LayerNode(embedding, path=f"{tower.module}.embeddings" if tower.module else ""))
        for index in range(tower.layers):
            path = f"{tower.module}.encoder.layers.{index}" if tower.module else ""
            nodes.append(LayerNode(layer, (len(nodes) - 1,), path))
        nodes.append(LayerNode(projection, (len(nodes) - 1,), tower.projection))
        ends.append(len(nodes) - 1)
    nodes.append(LayerNode(_loss(len(towers), joint, microbatch), tuple(ends)))
    return Architecture(name, tuple(nodes), sample, TOWERS_LEGEND)


def _kinds(tower: Tower, joint: int, microbatch: Microbatch) -> tuple[LayerKind, LayerKind, LayerKind]:
    symbols: dict[str, float] = {
        "s": tower.tokens, "b": microbatch.samples, "h": tower.width, "a": tower.heads, "g": tower.heads,
        "d": tower.width // tower.heads, "f": tower.inner, "V": tower.vocabulary, "P": tower.tokens,
        "p": tower.patch, "j": joint,
    }  # fmt: skip
    style = BlockStyle(fused=microbatch.fused, causal=bool(tower.vocabulary))
    if tower.vocabulary:
        embedding = embedding_kind(
            symbols,
            style,
            tables=[("position embedding", "P h")],
            key=f"{tower.name}-embedding",
            name=f"{tower.name} embedding",
        )
    else:
        embedding = patches_kind(
            symbols,
            key=f"{tower.name}-embedding",
            name=f"{tower.name} embedding",
            bias=False,
            dropped=False,
            extra=(norm(style, "norm after embedding"),) if tower.first_norm else (),
        )
    layer = block(f"{tower.name}-block", f"{tower.name} layer", symbols, style, tower.heads)
    projection = undivided(
        "projection",
        products=(Product("b", "j", "h"),),
        parameters="h j",
        saved="2 b h",
    )
    end = LayerKind(
        f"{tower.name}-projection",
        f"{tower.name} projection",
        symbols,
        (norm(style, "last norm"), projection),
        output="2 b j",
    )
    return embedding, layer, end


def _loss(towers: int, joint: int, microbatch: Microbatch) -> LayerKind:
    """Similarities within the microbatch. Training gathers those of the whole batch: a few bytes a sample."""
    similarities = undivided(
        "similarities and loss",
        products=(Product("b", "b", "j", "w"),),
        forward_bytes="8 b b w",
        backward_bytes="8 b b w",
        parameters="1",
        saved="2 b j w + 4 b b w",
    )
    symbols: dict[str, float] = {"b": microbatch.samples, "j": joint, "w": towers - 1}
    return LayerKind("loss", "contrastive loss", symbols, (similarities,), output="0")


class ClipText(Open):
    """``text_config`` of ``clip``, with its defaults."""

    hidden_size: Count = 512
    num_hidden_layers: Layers = 12
    num_attention_heads: Count = 8
    intermediate_size: Count = 2048
    vocab_size: Count = 49408
    max_position_embeddings: Count = 77


class ClipVision(Open):
    """``vision_config`` of ``clip``, with its defaults."""

    hidden_size: Count = 768
    num_hidden_layers: Layers = 12
    num_attention_heads: Count = 12
    intermediate_size: Count = 3072
    num_channels: Count = 3
    image_size: Count = 224
    patch_size: Count = 32


class ClipConfig(Open):
    """``clip``: an image and its caption."""

    text_config: Annotated[ClipText, Field(description=_PART_WORDS)] = ClipText()
    vision_config: Annotated[ClipVision, Field(description=_PART_WORDS)] = ClipVision()
    projection_dim: Count = 512


def build_clip(config: ClipConfig, microbatch: Microbatch, name: str) -> Architecture:
    """Two towers."""
    image, text = config.vision_config, config.text_config
    towers = [
        _clip_tower(
            "vision",
            image,
            tokens_of(image.image_size, image.patch_size),
            patch=image.num_channels * image.patch_size**2,
            first_norm=True,
            projection="visual_projection",
        ),
        _clip_tower(
            "text", text, text.max_position_embeddings, vocabulary=text.vocab_size, projection="text_projection"
        ),
    ]
    size = f"{image.image_size} x {image.image_size}"
    sample = f"{microbatch.samples:,} images of {size} with captions of {text.max_position_embeddings} tokens"
    return build_towers(towers, config.projection_dim, microbatch, name, sample)


def _clip_tower(name: str, part: ClipText | ClipVision, tokens: int, **others: Any) -> Tower:
    layers, width = part.num_hidden_layers, part.hidden_size
    heads, inner = part.num_attention_heads, part.intermediate_size
    return Tower(name, layers, width, heads, inner, tokens, module=f"{name}_model", **others)


def check_clip(config: ClipConfig, faults: Faults) -> None:
    """Each tower's heads divide its width, and patches the image."""
    for key, tower in (("text_config", config.text_config), ("vision_config", config.vision_config)):
        if tower.hidden_size % tower.num_attention_heads:
            faults.at(
                f"{key}.hidden_size",
                f"{tower.hidden_size} is no multiple of num_attention_heads = {tower.num_attention_heads}",
            )
    if config.vision_config.image_size % config.vision_config.patch_size:
        faults.at("vision_config.image_size", "no multiple of patch_size; expected one")


class TowerConfig(Open):
    """One tower of a model of many. vocab_size: of a tower of text; patch_numbers: of a patch of any other."""

    name: Annotated[str, Field(min_length=1, description="a text")]
    hidden_size: Count
    num_hidden_layers: Layers
    num_attention_heads: Count
    tokens: Count
    vocab_size: Count | None = None
    patch_numbers: Count | None = None


class TowersConfig(Open):
    """``towers``, a form of our own: any number of towers and the width of their joint space."""

    towers: Annotated[list[TowerConfig], Field(min_length=2, max_length=20, description=_TOWERS_WORDS)]
    projection_dim: Count


def build_many(config: TowersConfig, microbatch: Microbatch, name: str) -> Architecture:
    """As many towers as the config lists; feed-forward parts are four times as wide."""
    towers = [
        Tower(
            tower.name,
            tower.num_hidden_layers,
            tower.hidden_size,
            tower.num_attention_heads,
            4 * tower.hidden_size,
            tower.tokens,
            vocabulary=tower.vocab_size or 0,
            patch=tower.patch_numbers or 0,
        )
        for tower in config.towers
    ]
    names = ", ".join(tower.name for tower in towers)
    return build_towers(towers, config.projection_dim, microbatch, name, f"{microbatch.samples:,} samples of {names}")


def check_towers(config: TowersConfig, faults: Faults) -> None:
    """Names are unique, heads divide the width, and each tower is of text or of patches."""
    names = [tower.name for tower in config.towers]
    for index, tower in enumerate(config.towers):
        path = f"towers[{index}]"
        if names.index(tower.name) != index:
            faults.at(f"{path}.name", "a name that another tower has; expected one of its own")
        if tower.hidden_size % tower.num_attention_heads:
            faults.at(f"{path}.hidden_size", "no multiple of num_attention_heads; expected one")
        if (tower.vocab_size is None) == (tower.patch_numbers is None):
            faults.at(path, "expected either vocab_size or patch_numbers")


FAMILIES = {
    "vit": Family(VitConfig, build_vit, check_vit, no_length, samples=16, batch=16384),
    "clip": Family(ClipConfig, build_clip, check_clip, no_length, samples=32, batch=32768),
    "towers": Family(TowersConfig, build_many, check_towers, no_length, samples=8, batch=4096),
}
