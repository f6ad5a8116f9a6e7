"""Which model: a Hugging Face config.json or the name of a model that we know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from piper_ray.model.errors import InputError, UsageError
from piper_ray.workloads.estimate.architectures import FAMILIES
from piper_ray.workloads.estimate.families import Family, Microbatch
from piper_ray.workloads.estimate.operators import Architecture
from piper_ray.workloads.formats.documents import parse_json, parse_toml, read_text, refuse, repeated_keys
from piper_ray.workloads.formats.faults import Faults, shown
from piper_ray.workloads.formats.fields import Open


@dataclass(frozen=True)
class ModelConfig:
    """A model and how it is trained if nothing else is said. tokens: None where the length is no choice."""

    name: str
    family: Family
    config: Open
    tokens: int | None
    samples: int
    batch: int

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
    model_type = document.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        what = "missing" if model_type is None else f"unknown ({shown(model_type)})"
        refuse(source, "model_type", f"{what}; expected one of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    config = faults.model(family.config, document, "")
    if config is not None:
        family.check(config, faults)
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
    )
