"""Finds the model: a Hugging Face config.json, an id of the hub, or a known name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from piper_ray.model.arguments import did_you_mean
from piper_ray.model.errors import Fault, InputError, UsageError
from piper_ray.workloads.estimate.architectures import FAMILIES, USUAL
from piper_ray.workloads.estimate.architectures.multimodal import images_of
from piper_ray.workloads.estimate.architectures.rows import table
from piper_ray.workloads.estimate.families import Config, Family, Microbatch
from piper_ray.workloads.estimate.operators import Architecture
from piper_ray.workloads.formats import documents
from piper_ray.workloads.formats.faults import Faults, names_of, shown


@dataclass(frozen=True)
class ModelConfig:
    """A model, and how it is trained by default.

    tokens: None if the length is no choice. document: the keys of its config that matter here or for launch files.
    notes: what was assumed about it. made_from: the source, name, document and training from which it was read.
    """

    name: str
    family: Family
    config: Config
    document: Mapping[str, object]
    tokens: int | None
    samples: int
    batch: int
    notes: tuple[str, ...] = ()
    made_from: tuple[str, str, Mapping[str, object], Mapping[str, Any]] = field(
        default=("", "", {}, {}), repr=False, compare=False
    )

    def __reduce__(self) -> tuple[object, ...]:
        """Another process reads the config again: each process makes the classes of families' configs itself."""
        return _made_again, (self.made_from, self.tokens, self.samples, self.batch)

    def architecture(self, microbatch: Microbatch) -> Architecture:
        """The model's layers for this microbatch. Raises UsageError if the model cannot have this length."""
        most = self.config.most_tokens
        tokens = microbatch.tokens
        if most is None and tokens is not None:
            raise UsageError(f"--tokens {tokens}: {self.name} has samples of one length; expected none")
        if most is not None and tokens is not None and tokens > most:
            raise UsageError(f"--tokens {tokens}: {self.name} has positions for {most}; expected at most that many")
        return self.family.build(self.config, microbatch, self.name)


def with_images(model: ModelConfig, count: int, tokens: int | None) -> ModelConfig:
    """The config with ``count`` images a sample. tokens: tokens of a sample; None: the usual number. Raises UsageError
    if the model has no vision tower or a sample cannot hold so many images."""
    images, _, each = images_of(model.config)
    if not images:
        raise UsageError(f"--images {count}: {model.name} has no vision tower in front of a decoder; expected none")
    if (most := (tokens or model.tokens or 0) // each) < count:
        text = f"each is {each:,} tokens, and a sample has {tokens or model.tokens:,}"
        raise UsageError(f"--images {count}: {text}; expected at most {most}, or more --tokens")
    source, name, document, training = model.made_from
    made_from = source, name, {**document, "images_per_sample": count}, training
    return _made_again(made_from, model.tokens, model.samples, model.batch)


def read_model(model: str) -> ModelConfig:
    """The model of a config.json's path, of a known name or of an id of the Hugging Face hub. Raises UsageError or
    InputError."""
    path = Path(model)
    if path.suffix == ".json" or (path.exists() and not path.is_dir()):
        if path.suffix in (".py", ".sh", ".args"):
            raise UsageError(f"{model}: expected a model's name or config.json; --against takes a launch file")
        text = documents.read_text(model)
        toml = path.suffix.lower() == ".toml"
        document = documents.parse_toml(model, text) if toml else documents.parse_json(model, text)
        name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
        return _model(model, name, document, {}, Faults(documents.repeated_keys(document)))
    known = known_models()
    found = _named(model)
    if found is not None:
        entry = known[found]
        return _model(model, found, entry["config"], entry, Faults())
    if _HUB_ID.fullmatch(model):
        return _read_cached(model)
    if _FACTORY.fullmatch(model):
        raise UsageError(
            f"{model}: a PyTorch model is measured first: piper-ray profile {model} --microbatch-size N "
            "-o workload.toml; then piper-ray solve workload.toml plans it"
        )
    raise UsageError(
        f"{model}: no such file, and no model of that name; expected a Hugging Face config.json or one of "
        f"{', '.join(known)}{did_you_mean(model.rpartition('/')[2], known)}"
    )


def _named(model: str) -> str | None:
    """The known model that matches a name or an id of the hub, with or without its owner. A beginning up to the size,
    such as ``qwen3-vl-235b``, matches if only one model begins so."""
    names = {
        spelt: key
        for key, entry in known_models().items()
        for name in (key, *entry.get("ids", ()))
        for spelt in (name.lower(), name.rpartition("/")[2].lower())
    }
    exact = {_squeezed(name): key for name, key in reversed(names.items())}
    begun = {key for name, key in names.items() if name.startswith(f"{model.lower()}-") and _SIZE.search(model)}
    return exact.get(_squeezed(model)) or (begun.pop() if len(begun) == 1 else None)


_SIZE = re.compile(r"\d[bm]$", re.IGNORECASE)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""``Qwen/Qwen3-235B-A22B``"""


_FACTORY = re.compile(r"[\w./-]+:[A-Za-z_]\w*")
"""``models.py:small_gpt``"""


def _read_cached(name: str) -> ModelConfig:
    """The model of this id, from the cache of Hugging Face's own tools on this machine. Raises UsageError."""
    home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
    kept = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")) / f"models--{name.replace('/', '--')}"
    revision = kept / "refs" / "main"
    path = kept / "snapshots" / (revision.read_text("utf-8").strip() if revision.is_file() else "") / "config.json"
    if not path.is_file():
        raise UsageError(
            f"{name}: no known model, and its config is not in {kept.parent}; `hf download {name} config.json` brings "
            f"it there{did_you_mean(name.rpartition('/')[2], known_models())}"
        )
    document = documents.parse_json(str(path), documents.read_text(str(path)))
    return _model(str(path), Path(name).name, document, {}, Faults(documents.repeated_keys(document)))


def read_config(text: str, source: str) -> ModelConfig:
    """The model of a config.json's text. Raises InputError.

    source: names the file in errors. The model is called "model" if the text has no name.
    """
    if not text.strip():
        documents.refuse(source, "", "empty; expected a Hugging Face config")
    document = documents.parse_json(source, text)
    name = document.get("_name_or_path")
    stem = Path(name).name if isinstance(name, str) else ""
    return _model(source, stem or "model", document, {}, Faults(documents.repeated_keys(document)))


def model_of_config(name: str, config: Mapping[str, object]) -> ModelConfig:
    """The model of a Hugging Face config. Raises InputError."""
    return _model(name, name, config, {}, Faults())


def _made_again(
    made_from: tuple[str, str, Mapping[str, object], Mapping[str, Any]], tokens: int | None, samples: int, batch: int
) -> ModelConfig:
    """The same model, made again from its parts, and how it is trained."""
    return replace(_model(*made_from, Faults()), tokens=tokens, samples=samples, batch=batch)


def model_names() -> list[str]:
    """The names that ``read_model`` knows."""
    return list(known_models())


def known_models() -> Mapping[str, Mapping[str, Any]]:
    """The models that are known by name (``models.toml``)."""
    return documents.package_table("piper_ray.workloads.estimate", "models.toml")


def _model(
    source: str, name: str, document: Mapping[str, object], training: Mapping[str, Any], faults: Faults
) -> ModelConfig:
    notes: list[str] = []
    made_from = source, name, document, training
    model_type = _family_of(document)
    part = next((key for key in _TEXT_PARTS if isinstance(document.get(key), Mapping)), None)
    if part is not None and isinstance(document.get("vision_config"), Mapping):
        if model_type is None:
            notes.append(
                f"model_type {_unknown(document)}; taken as a ViT by its vision_config, two matrices, and its {part}"
            )
            _require_usual(source, document, part)
            model_type = "vision_language"
        document = {**document, "text_config": document.get("text_config", document[part])}
    elif model_type is None and part is not None:
        notes.append(f"a model of several parts; only its {part} is estimated")
        document = _inner(document, part)
        model_type = _family_of(document)
    kind = documents.advice(document)
    if model_type is None and kind is not None and kind is not documents.HUGGING_FACE:
        raise InputError(source, [Fault("", f"not a model's config but {kind}")])
    family = USUAL if model_type is None else FAMILIES[model_type]
    document = document if model_type is None else {**document, "model_type": model_type}
    config = faults.model(family.config, family.config.completed(document), "")
    if config is not None:
        config.check(faults)
        notes += _assumptions(family, document, config)
    if model_type is None:
        what = _unknown(document)
        if config is None or faults or not _has_words(document):
            text = f"{what}; expected one of {', '.join(FAMILIES)}, or the usual keys of a decoder"
            raise InputError(source, [Fault("model_type", text), *faults.found])
        if others := sorted(_of_other_layers(family, document)):
            raise InputError(source, [Fault(key, _not_llamas(what)) for key in others])
        notes.insert(0, f"model_type {what}; taken as a decoder by its keys, with Llama's layers otherwise")
    if config is None or faults:
        raise InputError(source, faults.found)
    most = config.most_tokens
    return ModelConfig(
        name=name,
        family=family,
        config=config,
        document={key: value for key, value in document.items() if key in _counted(family)},
        tokens=training.get("tokens", None if most is None else min(most, family.tokens)),
        samples=training.get("samples", family.samples),
        batch=training.get("batch", family.batch),
        notes=tuple(f"{source}: {text}" for text in notes),
        made_from=made_from,
    )


def _unknown(document: Mapping[str, object]) -> str:
    """A note about a model_type that no family has."""
    given = document.get("model_type", document.get("_class_name"))
    return "missing" if given is None else f"unknown ({shown(given)})"


def _not_llamas(what: str) -> str:
    return f"describes layers that are not Llama's, and model_type is {what}; without this key they count as Llama's"


def _require_usual(source: str, document: Mapping[str, object], part: str) -> None:
    """Raises InputError if a decoder of an unknown family, within a model of several parts, has layers of its own."""
    inner = document[part]
    if not isinstance(inner, Mapping) or _family_of({**inner, "model_type": _text_type(inner)}) is not None:
        return
    if others := sorted(_of_other_layers(USUAL, inner)):
        raise InputError(source, [Fault(f"{part}.{key}", _not_llamas(_unknown(inner))) for key in others])


def _text_type(inner: Mapping[str, object]) -> object:
    """The row of the table for a decoder within a model of several parts."""
    given = inner.get("model_type")
    return table()["text_types"].get(given, given) if isinstance(given, str) else given


_OTHER_WORK = re.compile(
    r"mamba|ssm|rwkv|conv(?!ert)|recurren|lru_|hyena|retention|delta|kda_|lightning|hybrid|state_(size|dim)|time_step"
    r"|linear_(attn|attention|num|head|key|value)|index_(topk|n_heads|head_dim)|indexer|compress|attn_(type|layer)"
    r"|cross_(attention|attn)|encoder|layer_types|per_layer|layer_group|layers_block_type|block_types|hc_mult|altup"
    r"|laurel|_cycles|num_hash|inner_group|n_heads_per|num_dense_layers|_sparse_step|_only_layers"
    r"|embd_layer|vision_lora|speech_lora|mm_vision|mm_hidden|audio_(config|processor)"
)
"""Words in a key's name that show that layers mix tokens without attention, that layers differ, or that towers stand in
front of them."""

_ATTENTION = frozenset({"attention", "full_attention", "sliding_attention", "chunked_attention"})


def _of_other_layers(family: Family, document: Mapping[str, object]) -> Iterator[str]:
    """The keys of the document that describe what usual decoder layers do not have, and that are not read."""
    for name, value in document.items():
        if value in (None, False, 0, 1, "", [], {}):
            continue
        if name == "layer_types" and isinstance(value, list):
            if not _ATTENTION.issuperset(map(str, value)):
                yield name
        elif name not in _counted(family) and _OTHER_WORK.search(name):
            yield name


_TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")
"""The keys under which models of several parts store the part that writes text."""


@cache
def _counted(family: Family) -> frozenset[str]:
    """The keys that a family reads, with all their other names, and the keys that launch files use."""
    fields = family.config.model_fields.items()
    return frozenset(table()["launched"]["keys"]).union(name for key, field in fields for name in names_of(key, field))


def _family_of(document: Mapping[str, object]) -> str | None:
    """The document's key in ``FAMILIES``, by ``model_type`` in any spelling, or else by the class that
    ``architectures`` names."""
    spelt = {_squeezed(name): name for name in reversed(list(FAMILIES))}
    named = [document.get("model_type"), document.get("_class_name")]
    listed = document.get("architectures")
    if named == [None, None] and isinstance(listed, list) and listed and isinstance(listed[0], str):
        named.append(re.sub(r"(For[A-Z]|LMHead|Model).*", "", listed[0]))
    found = (spelt.get(_squeezed(name)) for name in named if isinstance(name, str))
    return next((name for name in found if name is not None), None)


def _squeezed(name: str) -> str:
    return re.sub(r"[-_. ]", "", name.lower())


def _inner(document: Mapping[str, object], part: str) -> Mapping[str, object]:
    """The part of a model that writes text, under the keys around it."""
    inner = document[part]
    return {**document, "model_type": None, "architectures": None, **(inner if isinstance(inner, Mapping) else {})}


def _has_words(document: Mapping[str, object]) -> bool:
    """Whether the model has a vocabulary. A model that looks at patches and has none is no decoder of text."""
    words = names_of("vocab_size", USUAL.config.model_fields["vocab_size"])
    return "patch_size" not in document or any(document.get(name) is not None for name in words)


def _assumptions(family: Family, document: Mapping[str, object], config: Config) -> Iterator[str]:
    """Notes on the defaults that replace missing keys. A family's own default may not be this model's."""
    fields = family.config.model_fields

    def missing(field: str) -> bool:
        return field in fields and all(document.get(name) is None for name in names_of(field, fields[field]))

    if missing("vocab_size"):
        yield f"vocab_size is missing; {getattr(config, 'vocab_size', 0):,} taken, as the family has it"
    if family is USUAL and missing("intermediate_size"):
        yield f"intermediate_size is missing; {getattr(config, 'inner', 0):,} taken, four times the width"
