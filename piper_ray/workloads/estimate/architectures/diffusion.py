"""Diffusion transformers: patches of a latent picture, layers that the time step and the class modulate.

DiT (Peebles and Xie 2023): as in its own code under the model_type ``dit``, and as diffusers' DiTTransformer2DModel has
it, where each layer embeds time step and class by itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from piper_ray.model.mode import CHEAP
from piper_ray.workloads.estimate.architectures.decoder import key
from piper_ray.workloads.estimate.architectures.layers import Attention, Dense, layer_kind
from piper_ray.workloads.estimate.architectures.text import chain, stack
from piper_ray.workloads.estimate.architectures.transformer import (
    BLOCK_LEGEND,
    HIDDEN,
    BlockStyle,
    norm,
    table,
    undivided,
)
from piper_ray.workloads.estimate.architectures.vision import image_projection, images_text
from piper_ray.workloads.estimate.families import Config, Count, Family, Flag, Layers, Microbatch, no_length
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

LEGEND = {
    "s": "tokens of a sample: patches of the latent picture",
    **BLOCK_LEGEND,
    "p": "numbers of a patch",
    "o": "numbers of a patch that comes out",
    "c": "classes, with the one for none",
    "e": "frequencies that tell the time step",
}

_FREQUENCIES = 256
_Ratio = Annotated[float, Field(gt=0, le=64, description="a number > 0")]


class DitConfig(Config):
    """``dit``: the keys of DiT's own code."""

    hidden_size: Count
    num_hidden_layers: Layers = key("num_hidden_layers", "depth", "num_layers")
    num_attention_heads: Count = key("num_attention_heads", "num_heads")
    input_size: Count = key("input_size", "sample_size", default=32)
    patch_size: Count = 2
    in_channels: Count = 4
    num_classes: Count = 1000
    mlp_ratio: _Ratio = 4.0
    learn_sigma: Flag = True

    @property
    def width(self) -> int:
        return self.hidden_size

    @property
    def classes(self) -> int:
        return self.num_classes

    @property
    def channels_out(self) -> int:
        return self.in_channels * (2 if self.learn_sigma else 1)

    @property
    def learned_positions(self) -> bool:
        """Whether they are among its parameters; they are sines in both cases."""
        return True

    @property
    def layers_embed(self) -> bool:
        """Whether each layer embeds time step and class, and not the first one for all."""
        return False


class DiffusersDitConfig(Config):
    """Diffusers' ``DiTTransformer2DModel``, and ``Transformer2DModel`` with norms of the kind ``ada_norm_zero``."""

    num_attention_heads: Count = 16
    attention_head_dim: Count = 72
    num_layers: Layers = 28
    sample_size: Count = 32
    patch_size: Count = 2
    in_channels: Count = 4
    out_channels: Count | None = None
    num_embeds_ada_norm: Count = 1000
    norm_type: Annotated[str, Field(description="a text")] = "ada_norm_zero"

    def dit(self) -> _DiffusersDit:
        return _DiffusersDit(
            hidden_size=self.num_attention_heads * self.attention_head_dim,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_attention_heads,
            input_size=self.sample_size,
            patch_size=self.patch_size,
            in_channels=self.in_channels,
            num_classes=self.num_embeds_ada_norm,
            out_channels=self.out_channels or self.in_channels,
        )


class _DiffusersDit(DitConfig):
    out_channels: Count

    @property
    def channels_out(self) -> int:
        return self.out_channels

    @property
    def learned_positions(self) -> bool:
        return False

    @property
    def layers_embed(self) -> bool:
        return True


def build(config: DitConfig, microbatch: Microbatch, name: str) -> Architecture:
    """Patches and what modulates, layers, patches of noise and its variance."""
    heads, width = config.num_attention_heads, config.width
    tokens = (config.input_size // config.patch_size) ** 2
    symbols: dict[str, float] = {
        "s": tokens, "b": microbatch.samples, "h": width, "c": config.classes + 1, "e": _FREQUENCIES,
        "p": config.in_channels * config.patch_size**2, "o": config.channels_out * config.patch_size**2,
    }  # fmt: skip
    style = BlockStyle(fused=microbatch.fused, causal=False, norm_parameters="0")
    positions = table("position embedding", "s h" if config.learned_positions else "0")
    embedding = LayerKind(
        "embedding",
        "embedding",
        symbols,
        (image_projection(bias=True), positions, *(() if config.layers_embed else (_conditions(),))),
        HIDDEN,
    )
    attending = Attention(heads, heads, width // heads).part(style, symbols)
    feeding = Dense(int(config.mlp_ratio * width)).part(style, symbols)
    layer = layer_kind("block", "diffusion layer", symbols, style, [attending, feeding])
    conditions = (_conditions(),) if config.layers_embed else ()
    layer = replace(layer, operators=(*conditions, _modulation("6"), *layer.operators))
    noise = Operator(
        "patches of noise",
        products=(Product("s b", "o", "h", divided="tokens"),),
        split=Split.SEQUENCE,
        forward_bytes="8 s b o",
        backward_bytes="8 s b o",
        parameters="h o + o",
        parameters_split=Split.WHOLE,
        saved=(KeptBytes("2 s b h + 4 s b o", Split.SEQUENCE),),
    )
    head = LayerKind("head", "patches of noise", symbols, (_modulation("2"), norm(style), noise), output="0")
    nodes = chain(
        LayerNode(embedding, path="x_embedder"),
        *stack([layer] * config.num_hidden_layers, "blocks"),
        LayerNode(head, path="final_layer"),
    )
    return Architecture(name, nodes, images_text(microbatch, config.input_size), LEGEND)


def _conditions() -> Operator:
    """Embeddings of the time step and of the class."""
    return undivided(
        "time step and class",
        products=(Product("b", "h", "e"), Product("b", "h", "h")),
        parameters="e h + h + h h + h + c h",
        saved="2 b e + 6 b h",
    )


def _modulation(parts: str) -> Operator:
    """Scales, shifts and gates by the conditions, and what they take to apply."""
    return Operator(
        "modulation by time step and class",
        products=(Product("b", f"{parts} h", "h"),),
        split=Split.SEQUENCE,
        forward_bytes=f"{parts} s b h",
        backward_bytes=f"2 {parts} s b h",
        parameters=f"{parts} h h + {parts} h",
        parameters_split=Split.WHOLE,
        saved=(KeptBytes(f"2 b h + 2 {parts} b h", Split.WHOLE), KeptBytes(HIDDEN, Split.SEQUENCE, again=(CHEAP,))),
    )


def check(config: DitConfig, faults: Faults) -> None:
    """Heads divide the width, and patches the picture."""
    if config.width % config.num_attention_heads:
        faults.at("hidden_size", f"{config.width} is no multiple of {config.num_attention_heads} heads; expected one")
    if config.input_size % config.patch_size:
        faults.at(
            config.called("input_size"), f"{config.input_size} is no multiple of patch_size = {config.patch_size}"
        )


def _check_diffusers(config: DiffusersDitConfig, faults: Faults) -> None:
    if config.norm_type != "ada_norm_zero":
        faults.at("norm_type", "expected ada_norm_zero, as DiT has it; other transformers of diffusers are not known")
    if config.sample_size % config.patch_size:
        faults.at("sample_size", f"{config.sample_size} is no multiple of patch_size = {config.patch_size}")


def _build_diffusers(config: DiffusersDitConfig, microbatch: Microbatch, name: str) -> Architecture:
    return build(config.dit(), microbatch, name)


_DIFFUSERS = Family(DiffusersDitConfig, _build_diffusers, _check_diffusers, no_length, samples=16, batch=256)

FAMILIES = {
    "dit": Family(DitConfig, build, check, no_length, samples=16, batch=256),
    "DiTTransformer2DModel": _DIFFUSERS,
    "Transformer2DModel": _DIFFUSERS,
}
"""By ``model_type`` or, of diffusers, ``_class_name``."""
