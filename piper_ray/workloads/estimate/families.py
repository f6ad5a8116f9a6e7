"""What each family of models provides: a description that is read from a config, and the layers that it makes.

Most families are rows of a table (``families.toml``), which ``architectures.rows`` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from piper_ray.model.fields import on_demand
from piper_ray.workloads.estimate.operators import Architecture
from piper_ray.workloads.formats.documents import package_table
from piper_ray.workloads.formats.faults import Faults, Words, names_of
from piper_ray.workloads.formats.fields import WHOLE, Open

_MOST = 2**24
_MOST_LAYERS = 2000
Count = Annotated[int, Field(strict=True, ge=1, le=_MOST), WHOLE, Words(f"a whole number from 1 to {_MOST}")]
Number = Annotated[int, Field(strict=True, ge=0, le=_MOST), Words("a whole number >= 0")]
Layers = Annotated[int, Field(strict=True, ge=1, le=_MOST_LAYERS), WHOLE, Words(f"a whole number to {_MOST_LAYERS}")]
Window = Annotated[int, Field(strict=True, ge=1), Words("a whole number >= 1")]
Share = Annotated[float, Field(strict=True, ge=0.0, le=1.0), Words("a share from 0 to 1")]
Ratio = Annotated[float, Field(gt=0, le=64), Words("a number > 0")]
Flag = Annotated[bool, Field(strict=True), Words("true or false")]
Text = Annotated[str, Words("a text")]
Texts = Annotated[list[str], Words("a list of texts")]
Numbers = Annotated[list[Number], Words("a list of whole numbers >= 0")]


def _alike(value: object) -> object:
    return value[0] if isinstance(value, list) and len({*map(str, value)}) == 1 else value


KINDS: Mapping[str, Any] = {
    "count": Count,
    "number": Number,
    "each": Annotated[Number, BeforeValidator(_alike), Words("a whole number >= 0, or a list of one for all layers")],
    "integer": Annotated[int, Field(strict=True), Words("a whole number")],
    "layers": Layers,
    "window": Window,
    "share": Share,
    "ratio": Ratio,
    "flag": Flag,
    "text": Text,
    "texts": Texts,
    "numbers": Numbers,
    "auto": Annotated[int | str, Words('a whole number or "auto"')],
    "pattern": Annotated[str | int, Words("a text or a whole number")],
    "mixers": Annotated[str, Field(pattern=r"^[M*E-]+$"), Words("a text of M, *, E and -")],
    "reaches": Annotated[list[str], Words("a list of global and local")],
    "steps": Annotated[int | list[int], Words("a whole number or a list of 0 and 1")],
}
"""The words in rows for the types of keys' values."""

SIZES = frozenset({"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"})
"""Fields that the config of a whole model must have. Transformers has defaults for them in configs of parts."""


def key(*names: str, default: Any = ...) -> Any:
    """A field that a config may call by any of ``names``."""
    return Field(default, validation_alias=AliasChoices(*names))


class Config(Open):
    """A model's config as Hugging Face writes it. A null counts as missing if the key may not be null. given: the keys
    that the document had."""

    given: frozenset[str] = frozenset()

    defaults: ClassVar[Mapping[str, object]] = {}
    """The defaults of the class in transformers, by names that a document may have."""

    @classmethod
    def completed(cls, document: Mapping[str, object], *, part: bool = False) -> dict[str, object]:
        """The document with defaults for missing fields. Only configs of parts may leave out sizes."""
        whole = dict(document)
        for key, field in cls.model_fields.items():
            names = names_of(key, field)
            if (part or key not in SIZES) and not any(name in document for name in names):
                whole |= {name: cls.defaults[name] for name in names if name in cls.defaults}
        return whole

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

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of a sample; None if all samples have one length."""
        return None

    multiples: ClassVar[Sequence[tuple[str, str]]] = ()
    """Pairs of fields; the first must be a multiple of the second."""

    def check(self, faults: Faults, inside: str = "") -> None:
        """Notes faults that the ranges of fields do not catch. inside: the prefix of keys in faults."""
        for field, of in self.multiples:
            self.check_multiple(field, of, faults, inside)

    def check_multiple(self, field: str, of: str, faults: Faults, inside: str = "") -> None:
        """Notes a fault unless the one field is a multiple of the other."""
        value, divisor = getattr(self, field), getattr(self, of)
        if value % divisor:
            text = f"{value} is no multiple of {self.called(of)} = {divisor}; expected one"
            faults.at(f"{inside}{self.called(field)}", text)

    def called(self, field: str) -> str:
        """The document's name for a field."""
        names = names_of(field, type(self).model_fields[field])
        return next((name for name in names if name in self.given), names[0])


@dataclass(frozen=True)
class Microbatch:
    """The input of one pass: ``samples`` samples of ``tokens`` tokens each. Families with one fixed length take no
    tokens. fused: attention is one kernel that keeps no scores."""

    samples: int
    tokens: int | None = None
    fused: bool = True


@on_demand("config")
@dataclass(frozen=True)
class Family:
    """A family of models by its Hugging Face ``model_type``.

    build: makes the layers of a config for a microbatch, with the given name. tokens: tokens of a sample. samples:
    samples of a microbatch. batch: samples of a batch. These three count if neither user nor model gives a value; a
    sample never has more tokens than the model allows.
    """

    config: type[Config]
    build: Callable[[Any, Microbatch, str], Architecture]
    tokens: int = 8192
    samples: int = 1
    batch: int = 1024


def legend(kind: str) -> Mapping[str, str]:
    """The meaning of the formulas' symbols in models of this kind (``legend.toml``)."""
    table = package_table("piper_ray.workloads.estimate", "legend.toml")
    return {**table["all"], **table.get(kind, {})}
