"""Families of models, by the ``model_type`` of their Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping

from piper_ray.workloads.estimate.architectures import decoder, encoder, experts, inception, resnet, t5, towers, vision
from piper_ray.workloads.estimate.families import Family

FAMILIES: Mapping[str, Family] = {
    name: family
    for module in (decoder, experts, encoder, t5, vision, towers, resnet, inception)
    for name, family in module.FAMILIES.items()
}
