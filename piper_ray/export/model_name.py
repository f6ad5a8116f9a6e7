"""Compares a launch that only names its model with the workload's model."""

from __future__ import annotations

import re
from collections.abc import Iterator

from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.workloads.estimate.config import model_of_config
from piper_ray.workloads.estimate.families import Microbatch

_BILLIONS = re.compile(r"(?<![\dx.a-z])(\d+(?:\.\d+)?)b(?![a-z])", re.IGNORECASE)
_NAMED_ALIKE = 1.5
"""Names round the number of parameters, and only some count the embedding."""


def notes_of_model(name: str, instance: Instance) -> Iterator[str]:
    """A sentence on the name. Raises UsageError if it states another size than that of the workload's model."""
    yield f"the launch names the model, {name}, and no sizes: they are not compared with the workload's"
    said = _BILLIONS.search(name)
    if said is None or instance.model is None or not instance.model.config:
        return
    model = model_of_config("model", instance.model.config)
    tokens = None if instance.batch.tokens_per_sample is None else 1
    billions = model.architecture(Microbatch(1, tokens, fused=True)).parameters / 1e9
    if not 1 / _NAMED_ALIKE <= billions / float(said[1]) <= _NAMED_ALIKE:
        raise UsageError(f"layout: the model is {name} by its name, and the workload's has {billions:.3g}B parameters")
