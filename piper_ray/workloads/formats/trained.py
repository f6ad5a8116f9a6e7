"""The [model] table of workloads: which model is trained, and how (``model.instance``).

    [model]
    precision = "bf16"               # of matrix products: bf16, fp16 or fp8
    software = "megatron-core"       # the generation of training software that the times are of
    gpu = "H100-SXM"                 # the device that they are of
    lora_rank = 16                   # of adapters that are trained in the model's place; left out: the model itself
    fused_attention = true           # one kernel, as if left out
    context_exchange = "ring"        # of context parallelism
    weight_bytes = 2                 # kept for each parameter, with gradient_bytes and optimizer_bytes
    config = { model_type = "llama", hidden_size = 4096 }  # of Hugging Face, the keys that count here
    null = ["sliding_window"]        # keys of the config that are null

In JSON it is an object of the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import Field

from piper_ray.model.instance import TrainedModel
from piper_ray.workloads.formats.faults import Faults, path_of, shown
from piper_ray.workloads.formats.fields import Closed, Figure

_DEEPEST = 5
_MOST_KEYS = 500
_TEXT = "a text"
_BYTES = "bytes >= 0"


class TrainedModelTable(Closed):
    """The table as it stands; ``null`` lists keys of ``config``, as TOML has no null."""

    config: dict[str, Any] = Field(default={}, description="a table of plain values")
    null: list[str] = Field(default=[], description="a list of keys")
    precision: str = Field(default=TrainedModel.precision, description=_TEXT)
    software: str = Field(default=TrainedModel.software, description=_TEXT)
    gpu: str = Field(default=TrainedModel.gpu, description=_TEXT)
    lora_rank: int = Field(default=TrainedModel.lora_rank, ge=0, le=2**20, description="a whole number >= 0")
    fused_attention: bool = Field(default=TrainedModel.fused_attention, description="true or false")
    context_exchange: str = Field(default=TrainedModel.context_exchange, description=_TEXT)
    weight_bytes: Figure = Field(default=TrainedModel.weight_bytes, description=_BYTES)
    gradient_bytes: Figure = Field(default=TrainedModel.gradient_bytes, description=_BYTES)
    optimizer_bytes: Figure = Field(default=TrainedModel.optimizer_bytes, description=_BYTES)


def read_trained_model(value: object, path: str, faults: Faults) -> TrainedModel | None:
    """None where the file has no such table, or with the faults noted."""
    table = None if value is None else faults.model(TrainedModelTable, value, path)
    if table is None:
        return None
    where = path_of(path, "config")
    if len(table.config) + len(table.null) > _MOST_KEYS:
        faults.at(where, f"{len(table.config)} keys; expected at most {_MOST_KEYS}")
    for key, entry in table.config.items():
        if not _is_plain(entry, _DEEPEST):
            faults.at(path_of(where, key), f"{shown(entry)}; expected a number, a text, true, false, a list or a table")
    given = table.model_dump(exclude={"null", "config"})
    return TrainedModel(config={**table.config, **dict.fromkeys(table.null)}, **given)


def _is_plain(value: object, depth: int) -> bool:
    if isinstance(value, Mapping):
        return depth > 0 and all(isinstance(key, str) and _is_plain(x, depth - 1) for key, x in value.items())
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(x, depth - 1) for x in value)
    return value is None or isinstance(value, (bool, int, float, str))


def trained_model_table(model: TrainedModel) -> dict[str, object]:
    """What ``read_trained_model`` reads, without what is usual."""
    found: dict[str, object] = {
        field.name: getattr(model, field.name)
        for field in fields(model)
        if field.name != "config" and getattr(model, field.name) != field.default
    }
    found["config"] = {key: value for key, value in model.config.items() if value is not None}
    null = [key for key, value in model.config.items() if value is None]
    return found | ({"null": null} if null else {})
