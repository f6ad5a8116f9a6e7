"""What configs leave out: the defaults of their classes in transformers (``defaults.toml``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from pydantic import BaseModel

from piper_ray.workloads.formats.documents import parse_toml
from piper_ray.workloads.formats.faults import names_of

SIZES = frozenset({"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"})
"""Fields without which a config of a whole model is no config; in parts of one transformers leaves defaults out."""


def completed(
    config: type[BaseModel], model_type: str, document: Mapping[str, object], *, part: bool = False
) -> dict[str, object]:
    """The document with its class's defaults for the fields that it leaves out; sizes are only left out of parts."""
    defaults = _table().get(model_type, {})
    whole = dict(document)
    for key, field in config.model_fields.items():
        names = names_of(key, field)
        if (part or key not in SIZES) and not any(name in document for name in names):
            whole |= {name: defaults[name] for name in names if name in defaults}
    return whole


@cache
def _table() -> Mapping[str, Mapping[str, object]]:
    text = files(__package__).joinpath("defaults.toml").read_text(encoding="utf-8")
    return parse_toml("defaults.toml", text)  # type: ignore[return-value]
