"""Families of models, by the ``model_type`` of their Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping

from piper_ray.estimate.architectures import decoder
from piper_ray.estimate.families import Family

FAMILIES: Mapping[str, Family] = {**decoder.FAMILIES}
