"""Families of models, by the ``model_type`` of their Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping

from piper_ray.workloads.estimate.architectures import convolution, decoder, multimodal, seq2seq, vision
from piper_ray.workloads.estimate.architectures.decoder import USUAL as USUAL
from piper_ray.workloads.estimate.families import Family

FAMILIES: Mapping[str, Family] = {
    name: family
    for module in (
        decoder, multimodal, seq2seq, vision, convolution,
    )
    for name, family in module.FAMILIES.items()
}  # fmt: skip
