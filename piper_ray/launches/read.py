"""Reads any launch that users have: a script, options, or a configuration in Python, YAML, TOML or JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress

import yaml

from piper_ray.launches.commands import read_script, read_words
from piper_ray.launches.documents import flat, read_document
from piper_ray.launches.launch import THE_ONE, Asked, Dialect, Launch, Source
from piper_ray.launches.python_config import is_python, read_python
from piper_ray.launches.titan_config import is_titan, titan_launch
from piper_ray.model.errors import InputError, UsageError
from piper_ray.workloads.formats.documents import parse_toml

_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".sub")
_DOCUMENTS = (".yaml", ".yml", ".toml", ".json")
_IN_A_COMMAND = re.compile(r"(^|[\s'\"=(])--[\w.-]*(parallel|pipeline|layers|batch|zero|config)")
_STARTS_A_SCRIPT = re.compile(r"(\w+=\S*\s+)*(bash|sh|source)\s+\S+[^\n]*\Z")
"""Matches a command such as ``TP=4 bash run.sh 8B``."""
_DECISIVE = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "num_gpus"}


def read_launch(source: Source, asked: Asked = THE_ONE) -> Launch | None:
    """The launch of a text; None if the text is not a launch, such as a layout string. Raises UsageError."""
    text = source.text.strip()
    suffix = source.path.suffix.lower() if source.path is not None else ""
    if suffix not in (*_SCRIPTS, *_DOCUMENTS) and is_python(text):
        return _of_python(source, asked)
    if suffix == ".py":
        raise UsageError(
            f"{source.path}: no configuration is found in it; expected functions that return one (recipes), or "
            "assignments such as cfg.model.tensor_model_parallel_size = 4"
        )
    if _STARTS_A_SCRIPT.match(text):
        return read_script(source, asked)
    if text.startswith("--") and suffix not in _DOCUMENTS:
        return read_words(text, source)
    if suffix not in _DOCUMENTS and (suffix in _SCRIPTS or text.startswith("#!") or _IN_A_COMMAND.search(text)):
        document = document_of(text) if suffix not in _SCRIPTS and not text.startswith("#!") else None
        if not isinstance(document, Mapping):
            return read_script(source, asked)
    document = document_of(text)
    return read_document(document, source, asked) if isinstance(document, Mapping) else None


def document_of(text: str) -> object:
    """The content of a JSON, TOML or YAML text; None for other texts."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    with suppress(InputError):
        tables = parse_toml("layout", text)
        if any(isinstance(value, Mapping) for value in tables.values()):
            return tables
    if ":" not in text:
        return None
    with suppress(yaml.YAMLError, ValueError, RecursionError):
        return yaml.safe_load(text)
    return None


def _of_python(source: Source, asked: Asked) -> Launch:
    read = read_python(source.text, source.path, asked.recipe, _is_launch)
    if is_titan(read.document):
        return titan_launch(read.document, None, read.notes)
    settings = {name: value for name, value in flat(read.document).items() if not name.startswith("_")}  # not private
    model = read.document.get("model")
    arguments = model.get("arguments") if isinstance(model, Mapping) else None
    name = arguments[0] if isinstance(arguments, list) and arguments and isinstance(arguments[0], str) else None
    ranks = settings.pop("num_gpus", None)
    return Launch(Dialect.BRIDGE, settings, ranks if isinstance(ranks, int) else None, name or asked.recipe, read.notes)


def _is_launch(document: object) -> bool:
    return isinstance(document, Mapping) and (is_titan(document) or bool(_DECISIVE & flat(document).keys()))
