"""Families of models, by the ``model_type`` of their Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping

from piper_ray.workloads.estimate.architectures import (
    convolution,
    gpt,
    hybrids,
    llama,
    mixtures,
    multimodal,
    seq2seq,
    vision,
)
from piper_ray.workloads.estimate.architectures.usual import USUAL as USUAL
from piper_ray.workloads.estimate.families import Family

FAMILIES: Mapping[str, Family] = {
    name: family
    for module in (
        gpt, llama, mixtures, hybrids, multimodal, seq2seq, vision, convolution,
    )
    for name, family in module.FAMILIES.items()
}  # fmt: skip
