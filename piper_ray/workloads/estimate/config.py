"""Which model: a Hugging Face config.json or the name of a model that we know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from piper_ray.model.errors import Fault, InputError, UsageError
from piper_ray.workloads.estimate.architectures import FAMILIES, USUAL
from piper_ray.workloads.estimate.defaults import completed
from piper_ray.workloads.estimate.families import Family, Microbatch
from piper_ray.workloads.estimate.operators import Architecture
from piper_ray.workloads.formats.documents import parse_json, parse_toml, read_text, repeated_keys
from piper_ray.workloads.formats.faults import Faults, names_of, shown
from piper_ray.workloads.formats.fields import Open


@dataclass(frozen=True)
class ModelConfig:
    """A model and how it is trained if nothing else is said. tokens: None where the length is no choice.

    notes: what was assumed of it.
    """

    name: str
    family: Family
    config: Open
    tokens: int | None
    samples: int
    batch: int
    notes: tuple[str, ...] = ()

    def architecture(self, microbatch: Microbatch) -> Architecture:
        """Its layers for that microbatch. Raises UsageError for a length that the model does not have."""
        most = self.family.most_tokens(self.config)
        if most is None and microbatch.tokens is not None:
            raise UsageError(f"--tokens {microbatch.tokens}: {self.name} has samples of one length; expected none")
        if most is not None and microbatch.tokens is not None and microbatch.tokens > most:
            raise UsageError(f"--tokens {microbatch.tokens}: {self.name} has positions for {most}; expected at most so")
        return self.family.build(self.config, microbatch, self.name)


def read_model(model: str) -> ModelConfig:
    """The model of a config.json's path or of a known name. Raises UsageError or InputError."""
    path = Path(model)
    if path.suffix == ".json" or (path.exists() and not path.is_dir()):
        document = parse_json(model, read_text(model))
        faults = Faults(repeated_keys(document))
        name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
        return _model(model, name, document, {}, faults)
    known = _known()
    entry = known.get(model.lower())
    if entry is None:
        raise UsageError(
            f"{model}: no such file, and no model of that name; expected a Hugging Face config.json or one of "
            f"{', '.join(known)}"
        )
    return _model(model, model.lower(), entry["config"], entry, Faults())


def model_of_config(name: str, config: Mapping[str, object]) -> ModelConfig:
    """The model of a Hugging Face config that is at hand. Raises InputError."""
    return _model(name, name, config, {}, Faults())


def model_names() -> list[str]:
    """The names that ``read_model`` knows."""
    return list(_known())


@cache
def _known() -> Mapping[str, Mapping[str, Any]]:
    text = files(__package__).joinpath("models.toml").read_text(encoding="utf-8")
    return parse_toml("models.toml", text)  # type: ignore[return-value]


def _model(
    source: str, name: str, document: Mapping[str, object], training: Mapping[str, Any], faults: Faults
) -> ModelConfig:
    notes: list[str] = []
    model_type = document.get("model_type", document.get("_class_name"))
    known = isinstance(model_type, str) and model_type in FAMILIES
    if not known and isinstance(document.get("text_config"), Mapping):
        inner = _nested(document)
        notes.append(f"{source}: a model of several parts; only its text_config is estimated")
        document, model_type = inner, inner.get("model_type")
        known = isinstance(model_type, str) and model_type in FAMILIES
    family = FAMILIES[str(model_type)] if known else USUAL
    config = faults.model(family.config, completed(family.config, str(model_type), document), "")
    if config is not None:
        family.check(config, faults)
        notes += [f"{source}: {text}" for text in _vocabulary_note(family, document, config)]
    if not known:
        what = "missing" if model_type is None else f"unknown ({shown(model_type)})"
        if config is None or faults:
            text = f"{what}; expected one of {', '.join(FAMILIES)}, or the usual keys of a decoder"
            raise InputError(source, [Fault("model_type", text), *faults.found])
        notes.insert(0, f"{source}: model_type {what}; taken as a decoder by its keys, with Llama's layers otherwise")
    if config is None or faults:
        raise InputError(source, faults.found)
    most = family.most_tokens(config)
    return ModelConfig(
        name=name,
        family=family,
        config=config,
        tokens=training.get("tokens", None if most is None else min(most, family.tokens)),
        samples=training.get("samples", family.samples),
        batch=training.get("batch", family.batch),
        notes=tuple(notes),
    )


def _nested(document: Mapping[str, object]) -> Mapping[str, object]:
    """The part of a model that writes text, under the keys around it."""
    text = document["text_config"]
    return {**document, "model_type": None, **text} if isinstance(text, Mapping) else document


def _vocabulary_note(family: Family, document: Mapping[str, object], config: Open) -> Iterator[str]:
    """A missing vocabulary is worth a note: the family's may not be this model's."""
    field = family.config.model_fields.get("vocab_size")
    if field is not None and all(document.get(name) is None for name in names_of("vocab_size", field)):
        yield f"vocab_size is missing; {getattr(config, 'vocab_size', 0):,} taken, as the family has it"
