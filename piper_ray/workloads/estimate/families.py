"""What every family of models offers: a description that is read from a config, and the layers that it makes.

What a config leaves out is completed by the defaults of its class in transformers (``defaults.toml``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, get_args

from pydantic import BaseModel, Field, model_validator

from piper_ray.workloads.estimate.operators import Architecture
from piper_ray.workloads.formats.documents import parse_toml
from piper_ray.workloads.formats.faults import Faults, names_of
from piper_ray.workloads.formats.fields import WHOLE, Open

_MOST = 2**24
_MOST_LAYERS = 2000
Count = Annotated[int, Field(strict=True, ge=1, le=_MOST, description=f"a whole number from 1 to {_MOST}"), WHOLE]
Layers = Annotated[
    int, Field(strict=True, ge=1, le=_MOST_LAYERS, description=f"a whole number to {_MOST_LAYERS}"), WHOLE
]
Share = Annotated[float, Field(strict=True, ge=0.0, le=1.0, description="a share from 0 to 1")]
Flag = Annotated[bool, Field(strict=True, description="true or false")]


class Config(Open):
    """A model's config as Hugging Face writes it: a key that may not be null and is counts as missing.

    given: the keys that the document had.
    """

    given: frozenset[str] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, document: object) -> object:
        if not isinstance(document, Mapping):
            return document
        optional = {
            name
            for key, field in cls.model_fields.items()
            if type(None) in get_args(field.annotation)
            for name in names_of(key, field)
        }
        kept = {key: value for key, value in document.items() if value is not None or key in optional}
        return {**kept, "given": frozenset(key for key in document if isinstance(key, str))}

    def called(self, field: str) -> str:
        """What the document calls a field."""
        names = names_of(field, type(self).model_fields[field])
        return next((name for name in names if name in self.given), names[0])


@dataclass(frozen=True)
class Microbatch:
    """What one pass works on: ``samples`` of ``tokens`` each. Families without a choice of length take no tokens.

    fused: attention as one kernel that keeps no scores.
    """

    samples: int
    tokens: int | None = None
    fused: bool = True


@dataclass(frozen=True)
class Family:
    """A family of models by its Hugging Face ``model_type``.

    check: notes what is wrong with a config beyond its fields' ranges. most_tokens: of a sample; None where the
    length is no choice. build: the layers of a config for a microbatch, named as given. tokens, samples, batch: of a
    sample, a microbatch and a batch where neither user nor model says; tokens at most what the model has.
    """

    config: type[Open]
    build: Callable[[Any, Microbatch, str], Architecture]
    check: Callable[[Any, Faults], None]
    most_tokens: Callable[[Any], int | None]
    tokens: int = 8192
    samples: int = 1
    batch: int = 1024


def no_length(_config: object) -> None:
    """For families whose samples have one length."""


def no_check(_config: object, _faults: Faults) -> None:
    """For families whose fields say it all."""


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
