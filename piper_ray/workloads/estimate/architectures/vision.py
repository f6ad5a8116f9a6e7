"""Vision transformers, which read patches of an image as tokens, alone or as one of several towers, and diffusion
transformers, which read patches of a latent picture.

Towers stand side by side and are joined by a contrastive loss: CLIP has two, ImageBind six.

DiT (Peebles and Xie 2023), whose layers the time step and the class modulate: as in its own code under the model_type
``dit``, and as diffusers' DiTTransformer2DModel has it, where each layer embeds time step and class by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import Field

from piper_ray.model.mode import CHEAP
from piper_ray.workloads.estimate import families
from piper_ray.workloads.estimate.architectures import layers
from piper_ray.workloads.estimate.operators import (
    Architecture,
    KeptBytes,
    LayerKind,
    LayerNode,
    Operator,
    Product,
    Split,
    chain,
    linear,
    stack,
)
from piper_ray.workloads.formats.faults import Faults


class Labelled(families.Config):
    """A classifier with as many classes as the config labels, or with num_labels."""

    id2label: Annotated[Mapping[str, object], Field(description="an object with a label for each class")] | None = None
    num_labels: families.Count = 1000

    @property
    def classes(self) -> int:
        return len(self.id2label) if self.id2label else self.num_labels


class PatchesConfig(families.Config):
    """What reads square images by patches. The sizes are CLIP's."""

    hidden_size: families.Count = 768
    num_hidden_layers: families.Layers = 12
    num_attention_heads: families.Count = 12
    intermediate_size: families.Count = 3072
    num_channels: families.Count = 3
    image_size: families.Count = 224
    patch_size: families.Count = 32

    multiples = (("hidden_size", "num_attention_heads"), ("image_size", "patch_size"))

    @property
    def tokens(self) -> int:
        """Patches, and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1

    @property
    def patch_numbers(self) -> int:
        return self.num_channels * self.patch_size**2


class VitConfig(PatchesConfig, Labelled):
    """``vit``. Ours besides the Hugging Face keys: parallel_layers, for ViT-22B's (Dehghani et al. 2023): attention
    and feed-forward part side by side, norms of queries and keys.
    """

    hidden_size: families.Count
    num_hidden_layers: families.Layers
    num_attention_heads: families.Count
    intermediate_size: families.Count
    patch_size: families.Count = 16
    qkv_bias: families.Flag = True
    hidden_dropout_prob: families.Share = 0.0
    parallel_layers: families.Flag = False


def image_projection(bias: bool) -> Operator:
    """Patches of p numbers to tokens of width h, whole on every device."""
    parameters = "p h + h" if bias else "p h"
    return linear("patches to tokens", "h", "p", "tokens", parameters, backward_products=1.0)  # images need no gradient


def patches_kind(
    symbols: layers.Symbols, *further: Operator, key: str, name: str, bias: bool, table_parameters: str = "s h + h"
) -> LayerKind:
    """Patches to tokens, whole on every device, with positions and a class token; ``further`` operators follow."""
    operators = (image_projection(bias), layers.table("position embedding and class token", table_parameters), *further)
    return LayerKind(key, name, symbols, operators, layers.HIDDEN)


def images_text(microbatch: families.Microbatch, size: int) -> str:
    """A microbatch in words."""
    return f"{microbatch.samples:,} image{'s' if microbatch.samples > 1 else ''} of {size} x {size}"


def build_vit(config: VitConfig, microbatch: families.Microbatch, name: str) -> Architecture:
    """The patches, the layers and the classifier."""
    width, heads, inner = config.hidden_size, config.num_attention_heads, config.intermediate_size
    symbols = layers.block_symbols(microbatch.samples, config.tokens, width, heads, inner)
    symbols |= {"p": config.patch_numbers, "c": config.classes}
    style = layers.BlockStyle(
        fused=microbatch.fused,
        causal=False,
        query_bias=config.qkv_bias,
        dropout=config.hidden_dropout_prob > 0,
        query_norm="4 d" if config.parallel_layers else "0",
    )
    layer = layers.block("block", "encoder layer", symbols, style, parallel=config.parallel_layers)
    products = (Product("b", "c", "h"),)
    classifier = layers.undivided("classifier", products, parameters="h c + c", saved="2 b h + 4 b c")
    head = LayerKind("head", "classifier", symbols, (layers.norm(style, "last norm"), classifier), output="0")
    patches = patches_kind(
        symbols, *([layers.dropout()] if style.dropout else []), key="patches", name="patch embedding", bias=True
    )
    nodes = chain(
        LayerNode(patches, path="vit.embeddings"),
        *stack([layer] * config.num_hidden_layers, "vit.encoder.layer"),
        LayerNode(head, path="classifier"),
    )
    return Architecture(name, nodes, images_text(microbatch, config.image_size), families.legend("vit"))


_PART_WORDS = "an object of whole numbers >= 1"
_TOWERS_WORDS = "a list of 2 to 20 towers, each with a name, whole numbers >= 1, and vocab_size or patch_numbers"


@dataclass(frozen=True)
class Tower:
    """One tower. vocabulary: the size of a tower of text's. patch: the numbers of a patch of any other tower. One of
    them is 0.

    module, projection: names of the modules; empty where there is none.
    """

    name: str
    sizes: ClipText | PatchesConfig | TowerConfig
    inner: int
    tokens: int
    vocabulary: int = 0
    patch: int = 0
    first_norm: bool = False
    module: str = ""
    projection: str = ""


def build_towers(
    towers: list[Tower], joint: int, microbatch: families.Microbatch, name: str, sample: str
) -> Architecture:
    """The towers one after the other in the list of layers, side by side in the graph, and the loss that reads all."""
    nodes: list[LayerNode] = []
    ends: list[int] = []
    for tower in towers:
        embedding, layer, projection = _kinds(tower, joint, microbatch)
        nodes.append(LayerNode(embedding, path=f"{tower.module}.embeddings" if tower.module else ""))
        for index in range(tower.sizes.num_hidden_layers):
            path = f"{tower.module}.encoder.layers.{index}" if tower.module else ""
            nodes.append(LayerNode(layer, (len(nodes) - 1,), path))
        nodes.append(LayerNode(projection, (len(nodes) - 1,), tower.projection))
        ends.append(len(nodes) - 1)
    nodes.append(LayerNode(_loss(len(towers), joint, microbatch), tuple(ends)))
    return Architecture(name, tuple(nodes), sample, families.legend("towers"))


def _kinds(tower: Tower, joint: int, microbatch: families.Microbatch) -> tuple[LayerKind, LayerKind, LayerKind]:
    width, heads = tower.sizes.hidden_size, tower.sizes.num_attention_heads
    symbols = layers.block_symbols(microbatch.samples, tower.tokens, width, heads, tower.inner)
    symbols |= {"V": tower.vocabulary, "P": tower.tokens, "p": tower.patch, "j": joint}
    style = layers.BlockStyle(fused=microbatch.fused, causal=bool(tower.vocabulary))
    if tower.vocabulary:
        embedding = layers.embedding_kind(symbols, style, tables=[layers.POSITIONS], half=tower.name)
    else:
        normed = [layers.norm(style, "norm after embedding")] if tower.first_norm else []
        embedding = patches_kind(
            symbols, *normed, key=f"{tower.name}-embedding", name=f"{tower.name} embedding", bias=False
        )
    layer = layers.block(f"{tower.name}-block", f"{tower.name} layer", symbols, style)
    projection = layers.undivided("projection", (Product("b", "j", "h"),), parameters="h j", saved="2 b h")
    operators = (layers.norm(style, "last norm"), projection)
    end = LayerKind(f"{tower.name}-projection", f"{tower.name} projection", symbols, operators, output="2 b j")
    return embedding, layer, end


def _loss(towers: int, joint: int, microbatch: families.Microbatch) -> LayerKind:
    """Similarities within the microbatch. Training gathers those of the whole batch: a few bytes a sample."""
    similarities = layers.undivided(
        "similarities and loss",
        (Product("b", "b", "j", "w"),),
        forward_bytes="8 b b w",
        backward_bytes="8 b b w",
        parameters="1",
        saved="2 b j w + 4 b b w",
    )
    symbols: dict[str, float] = {"b": microbatch.samples, "j": joint, "w": towers - 1}
    return LayerKind("loss", "contrastive loss", symbols, (similarities,), output="0")


class ClipText(families.Config):
    """``text_config`` of ``clip``, with its defaults."""

    hidden_size: families.Count = 512
    num_hidden_layers: families.Layers = 12
    num_attention_heads: families.Count = 8
    intermediate_size: families.Count = 2048
    vocab_size: families.Count = 49408
    max_position_embeddings: families.Count = 77

    multiples = (("hidden_size", "num_attention_heads"),)


class ClipConfig(families.Config):
    """``clip``: an image and its caption."""

    text_config: Annotated[ClipText, Field(description=_PART_WORDS)] = ClipText()
    vision_config: Annotated[PatchesConfig, Field(description=_PART_WORDS)] = PatchesConfig()
    projection_dim: families.Count = 512

    def check(self, faults: Faults, inside: str = "") -> None:
        """Both towers are sound."""
        self.text_config.check(faults, f"{inside}text_config.")
        self.vision_config.check(faults, f"{inside}vision_config.")


def build_clip(config: ClipConfig, microbatch: families.Microbatch, name: str) -> Architecture:
    """The towers of image and text."""
    image, text = config.vision_config, config.text_config
    positions = text.max_position_embeddings
    towers = [
        Tower(
            "vision", image, image.intermediate_size, image.tokens, patch=image.patch_numbers, first_norm=True,
            module="vision_model", projection="visual_projection",
        ),
        Tower(
            "text", text, text.intermediate_size, positions, vocabulary=text.vocab_size,
            module="text_model", projection="text_projection",
        ),
    ]  # fmt: skip
    size = f"{image.image_size} x {image.image_size}"
    sample = f"{microbatch.samples:,} images of {size} with captions of {positions} tokens"
    return build_towers(towers, config.projection_dim, microbatch, name, sample)


class TowerConfig(families.Config):
    """One tower of a model of many. vocab_size: the vocabulary of a tower of text. patch_numbers: the numbers of a
    patch of any other tower."""

    name: Annotated[str, Field(min_length=1, description="a text")]
    hidden_size: families.Count
    num_hidden_layers: families.Layers
    num_attention_heads: families.Count
    tokens: families.Count
    vocab_size: families.Count | None = None
    patch_numbers: families.Count | None = None

    multiples = (("hidden_size", "num_attention_heads"),)


class TowersConfig(families.Config):
    """``towers``, a form of our own: any number of towers and the width of their joint space."""

    towers: Annotated[list[TowerConfig], Field(min_length=2, max_length=20, description=_TOWERS_WORDS)]
    projection_dim: families.Count

    def check(self, faults: Faults, inside: str = "") -> None:
        """Names are unique, and each tower is sound, and of text or of patches."""
        names = [tower.name for tower in self.towers]
        for index, tower in enumerate(self.towers):
            path = f"{inside}towers[{index}]"
            if names.index(tower.name) != index:
                faults.at(f"{path}.name", "a name that another tower has; expected one of its own")
            tower.check(faults, f"{path}.")
            if (tower.vocab_size is None) == (tower.patch_numbers is None):
                faults.at(path, "expected either vocab_size or patch_numbers")


def build_many(config: TowersConfig, microbatch: families.Microbatch, name: str) -> Architecture:
    """The model has as many towers as the config lists. Feed-forward parts are four times as wide."""
    towers = [
        Tower(
            tower.name, tower, 4 * tower.hidden_size, tower.tokens, tower.vocab_size or 0, tower.patch_numbers or 0
        )
        for tower in config.towers
    ]  # fmt: skip
    names = ", ".join(tower.name for tower in towers)
    return build_towers(towers, config.projection_dim, microbatch, name, f"{microbatch.samples:,} samples of {names}")


_FREQUENCIES = 256


class DitConfig(families.Config):
    """``dit``: the keys of DiT's own code."""

    hidden_size: families.Count
    num_hidden_layers: families.Layers = families.key("num_hidden_layers", "depth", "num_layers")
    num_attention_heads: families.Count = families.key("num_attention_heads", "num_heads")
    input_size: families.Count = families.key("input_size", "sample_size", default=32)
    patch_size: families.Count = 2
    in_channels: families.Count = 4
    num_classes: families.Count = 1000
    mlp_ratio: families.Ratio = 4.0
    learn_sigma: families.Flag = True

    multiples = (("hidden_size", "num_attention_heads"), ("input_size", "patch_size"))
    layers_embed: ClassVar[bool] = False
    """Whether each layer embeds time step and class, and not the first one for all; positions, which are sines in both
    cases, are then no parameters."""

    @property
    def width(self) -> int:
        return self.hidden_size

    @property
    def inner(self) -> int:
        return int(self.mlp_ratio * self.hidden_size)

    @property
    def channels_out(self) -> int:
        return self.in_channels * (2 if self.learn_sigma else 1)


class DiffusersDitConfig(families.Config):
    """Diffusers' ``DiTTransformer2DModel``, and ``Transformer2DModel`` with norms of the kind ``ada_norm_zero``."""

    num_attention_heads: families.Count = 16
    attention_head_dim: families.Count = 72
    num_hidden_layers: families.Layers = families.key("num_layers", default=28)
    input_size: families.Count = families.key("sample_size", default=32)
    patch_size: families.Count = 2
    in_channels: families.Count = 4
    out_channels: families.Count | None = None
    num_classes: families.Count = families.key("num_embeds_ada_norm", default=1000)
    norm_type: families.Text = "ada_norm_zero"

    multiples = (("input_size", "patch_size"),)
    layers_embed: ClassVar[bool] = True

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def inner(self) -> int:
        return 4 * self.width

    @property
    def channels_out(self) -> int:
        return self.out_channels or self.in_channels

    def check(self, faults: Faults, inside: str = "") -> None:
        """Checks that the norms are DiT's and that patches divide the picture."""
        if self.norm_type != "ada_norm_zero":
            text = "expected ada_norm_zero, as DiT has it; other transformers of diffusers are not known"
            faults.at(f"{inside}norm_type", text)
        super().check(faults, inside)


def build_dit(config: DitConfig | DiffusersDitConfig, microbatch: families.Microbatch, name: str) -> Architecture:
    """Patches and what modulates, layers, patches of noise and its variance."""
    heads, width = config.num_attention_heads, config.width
    tokens = (config.input_size // config.patch_size) ** 2
    symbols: dict[str, float] = {
        "s": tokens, "b": microbatch.samples, "h": width, "c": config.num_classes + 1, "e": _FREQUENCIES,
        "p": config.in_channels * config.patch_size**2, "o": config.channels_out * config.patch_size**2,
    }  # fmt: skip
    style = layers.BlockStyle(fused=microbatch.fused, causal=False, norm="0")
    conditions = (_conditions(),)
    positions = layers.table("position embedding", "0" if config.layers_embed else "s h")
    first = (image_projection(bias=True), positions, *(() if config.layers_embed else conditions))
    embedding = LayerKind("embedding", "embedding", symbols, first, layers.HIDDEN)
    parts = [
        layers.Attention(heads, heads, width // heads).part(style, symbols),
        layers.Dense(config.inner).part(style, symbols),
    ]
    layer = layers.layer_kind("block", "diffusion layer", symbols, style, parts)
    before = (*(conditions if config.layers_embed else ()), _modulation("6"))
    layer = replace(layer, operators=(*before, *layer.operators))
    noise = Operator(
        "patches of noise",
        (Product("s b", "o", "h", divided="tokens"),),
        "8 s b o",
        "8 s b o",
        Split.SEQUENCE,
        "h o + o",
        Split.WHOLE,
        (KeptBytes("2 s b h + 4 s b o", Split.SEQUENCE),),
    )
    head = LayerKind("head", "patches of noise", symbols, (_modulation("2"), layers.norm(style), noise), output="0")
    nodes = chain(
        LayerNode(embedding, path="x_embedder"),
        *stack([layer] * config.num_hidden_layers, "blocks"),
        LayerNode(head, path="final_layer"),
    )
    return Architecture(name, nodes, images_text(microbatch, config.input_size), families.legend("dit"))


def _conditions() -> Operator:
    """Embeddings of the time step and of the class."""
    products = (Product("b", "h", "e"), Product("b", "h", "h"))
    return layers.undivided(
        "time step and class", products, parameters="e h + h + h h + h + c h", saved="2 b e + 6 b h"
    )


def _modulation(parts: str) -> Operator:
    """Scales, shifts and gates by the conditions, and what they take to apply."""
    return Operator(
        "modulation by time step and class",
        (Product("b", f"{parts} h", "h"),),
        f"{parts} s b h",
        f"2 {parts} s b h",
        Split.SEQUENCE,
        f"{parts} h h + {parts} h",
        Split.WHOLE,
        (KeptBytes(f"2 b h + 2 {parts} b h", Split.WHOLE), KeptBytes(layers.HIDDEN, Split.SEQUENCE, again=(CHEAP,))),
    )


_DIFFUSERS = families.Family(DiffusersDitConfig, build_dit, samples=16, batch=256)

FAMILIES = {
    "vit": families.Family(VitConfig, build_vit, samples=16, batch=16384),
    "clip": families.Family(ClipConfig, build_clip, samples=32, batch=32768),
    "towers": families.Family(TowersConfig, build_many, samples=8, batch=4096),
    "dit": families.Family(DitConfig, build_dit, samples=16, batch=256),
    "DiTTransformer2DModel": _DIFFUSERS,
    "Transformer2DModel": _DIFFUSERS,
}
"""The families by ``model_type`` or, for configs of diffusers, by ``_class_name``."""
