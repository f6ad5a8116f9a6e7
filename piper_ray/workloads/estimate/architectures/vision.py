"""Vision transformers: patches of an image as tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from piper_ray.workloads.estimate.architectures.decoder import check_heads
from piper_ray.workloads.estimate.architectures.text import chain, dropout, stack
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

LEGEND = {
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


def build(config: VitConfig, microbatch: Microbatch, name: str) -> Architecture:
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
    return Architecture(name, nodes, images_text(microbatch, config.image_size), LEGEND)


def check(config: VitConfig, faults: Faults) -> None:
    """Heads divide the width, and patches the image."""
    check_heads("hidden_size", config.hidden_size, "num_attention_heads", config.num_attention_heads, faults)
    if config.image_size % config.patch_size:
        faults.at("image_size", f"{config.image_size} is no multiple of patch_size = {config.patch_size}; expected one")


FAMILIES = {"vit": Family(VitConfig, build, check, no_length, samples=16, batch=16384)}
