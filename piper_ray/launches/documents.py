"""Launches in YAML, JSON or TOML: of Megatron-LM, Primus, FlagScale, Megatron-Bridge, torchtitan and DeepSpeed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from piper_ray.launches.deepspeed import with_deepspeed_config
from piper_ray.launches.files import text_beside
from piper_ray.launches.launch import Asked, Dialect, Launch, Source
from piper_ray.launches.titan_config import is_titan, titan_launch
from piper_ray.launches.unseen import unseen
from piper_ray.model.errors import UsageError
from piper_ray.workloads.formats.documents import merged

_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?P<sign>:-?)?(?P<usual>[^}]*)\}|\$(?P<plain>[A-Z_]\w*)")
_ANOTHER = re.compile(r"\$\{(?P<path>[a-z_]\w*(?:\.\w+)+)\}")
_DEEP = 6
_DEEPSPEED = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "pipe_parallel_size"}
_NO_SETTINGS = frozenset({"made_by", "arguments", "env_vars", "ENV_VARS", "envs"})
"""Keys of sections without settings of a training."""

_EITHER = frozenset({"use_distributed_optimizer", "overlap_param_gather"})
"""Switches that Megatron-Bridge turns on in each section where one section has them on."""

_OF_A_BATCH = frozenset({"micro_batch_size", "global_batch_size"})
_SINGLES = {"tensor_model_parallel_size", "pipeline_model_parallel_size"}


def read_document(document: Mapping[str, object], source: Source, asked: Asked) -> Launch | None:
    """The launch of a parsed document; None if the document is not a launch. Raises UsageError."""
    taken: dict[str, str] = {}
    whole = _filled(document, asked, taken, document)
    assert isinstance(whole, Mapping)
    read = _of_kind(whole, source, asked, taken)
    if read is None or not taken:
        return read
    shown = ", ".join(f"{name} (as {value})" for name, value in taken.items())
    note = f"environment variables, read as unset: {shown}; --set NAME=VALUE sets one"
    return replace(read, notes=(*read.notes, note))


def _of_kind(document: Mapping[str, object], source: Source, asked: Asked, taken: dict[str, str]) -> Launch | None:
    if isinstance(modules := document.get("modules"), Mapping):
        return _primus(modules, source, asked, taken)
    if isinstance(arguments := document.get("MODEL_ARGS"), Mapping):
        return Launch(Dialect.MEGATRON, _dashed(arguments))
    if any(str(name).startswith("--") for name in document):
        return Launch(Dialect.MEGATRON, _dashed(document))
    if isinstance(defaults := document.get("defaults"), list) and (train := _hydra(defaults, source)) is not None:
        filled = _filled({**train, **document}, asked, taken, {**train, **document})
        assert isinstance(filled, Mapping)
        return _flat_launch(filled)
    if is_titan(document):
        return titan_launch(document, None)
    options = {str(name).replace("-", "_"): value for name, value in document.items()}
    if _DEEPSPEED & options.keys():
        return with_deepspeed_config({"deepspeed_config": "it"}, {"it": json.dumps(options, default=str)}, source, None)
    return _flat_launch(document)


def _flat_launch(document: Mapping[str, object]) -> Launch | None:
    """The launch of sections whose fields have Megatron's names: FlagScale's, or a Megatron-Bridge config's."""
    settings = flat(document)
    if not settings.keys() & _SINGLES:
        return None
    system, model = document.get("system"), document.get("model")
    optimizer = model.get("optim") if isinstance(model, Mapping) else None
    if isinstance(optimizer, Mapping) and optimizer.get("name") == "distributed_fused_adam":  # NeMo
        settings.setdefault("use_distributed_optimizer", True)
    return Launch(Dialect.FLAGSCALE if isinstance(system, Mapping) else Dialect.BRIDGE, settings, _started(document))


def _started(document: Mapping[str, object]) -> int | None:
    """The processes that FlagScale starts: on one node where no file lists nodes, and else on as many as it says."""
    experiment = document.get("experiment")
    runner = experiment.get("runner") if isinstance(experiment, Mapping) else None
    if not isinstance(runner, Mapping):
        return None
    nodes, each = runner.get("nnodes", None if runner.get("hostfile") else 1), runner.get("nproc_per_node")
    return nodes * each if type(nodes) is int and type(each) is int else None


def flat(document: Mapping[str, object], depth: int = _DEEP) -> dict[str, object]:
    """The entries of all sections by their own names."""
    found: dict[str, object] = {}
    for name, value in document.items():
        if name in _NO_SETTINGS:
            continue
        if isinstance(value, Mapping) and value and value.keys() <= {"made_by", "arguments"}:
            found[str(name)] = unseen(f"{value.get('made_by')}()")
        elif not isinstance(value, Mapping):
            found[str(name)] = value
        elif depth > 1:
            for inner, said in flat(value, depth - 1).items():
                before = found.get(inner)
                decides = "parallel" in inner or inner in _OF_A_BATCH
                if decides and before is not None and said is not None and before != said:
                    raise UsageError(f"layout: {inner} is said as {before} and as {said}; expected one")
                if (said is not None or inner not in found) and not (inner in _EITHER and before is True):
                    found[inner] = said
    return found


def _dashed(arguments: Mapping[str, object]) -> dict[str, object]:
    """Options written with dashes, by their names in Python. A text such as ``[1, 2]`` becomes a list of words; options
    with value false are left out."""
    found: dict[str, object] = {}
    for name, value in arguments.items():
        said = str(name).lstrip("-").replace("-", "_")
        if isinstance(value, str) and value.startswith("[") and value.endswith("]") and said != "moe_layer_freq":
            value = [one.strip() for one in value[1:-1].split(",")]
        elif isinstance(value, str) and " " in value.strip() and not value.startswith("("):
            value = value.split()
        if value is not False and value != "false":
            found[said] = True if value in ("true", "") else value
    return found


def _filled(value: object, asked: Asked, taken: dict[str, str], root: Mapping[str, object]) -> object:
    """The document with references to environment variables and to other entries replaced by their values."""
    if isinstance(value, Mapping):
        return {name: _filled(one, asked, taken, root) for name, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, asked, taken, root) for one in value]
    if not isinstance(value, str) or "$" not in value:
        return value
    whole = _ANOTHER.fullmatch(value)
    if whole is not None:
        found: object = root
        for part in whole["path"].split("."):
            found = found.get(part, unseen(value)) if isinstance(found, Mapping) else unseen(value)
        return found if not isinstance(found, str) or "$" not in found else unseen(value)

    def said(match: re.Match[str]) -> str:
        name = match["name"] or match["plain"]
        if name in asked.variables:
            return asked.variables[name]
        if match["sign"] is None:
            return unseen(f"${name}")
        taken[name] = match["usual"]
        return match["usual"]

    text = _VARIABLE.sub(said, value)
    if _VARIABLE.fullmatch(value) is None:
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _hydra(defaults: list[object], source: Source) -> Mapping[str, object] | None:
    """The training part that FlagScale's file names."""
    for one in defaults:
        if isinstance(one, Mapping) and isinstance(name := one.get("train"), str):
            _, text = text_beside(f"train/{name}.yaml", source.path)
            if text is None:
                raise UsageError(f"train/{name}.yaml, which the file takes its layout from, is not next to it")
            return _yaml(f"train/{name}.yaml", text)
    return None


def _yaml(name: str, text: str) -> dict[str, object]:
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UsageError(f"{name}: not YAML") from None
    return {str(key): value for key, value in found.items()} if isinstance(found, Mapping) else {}


def _primus(modules: Mapping[str, object], source: Source, asked: Asked, taken: dict[str, str]) -> Launch | None:
    """The launch of the module that trains: the framework's defaults, the model's file, and the settings that override
    them."""
    trainers = [one for name, one in modules.items() if isinstance(one, Mapping) and "trainer" in str(name)]
    trainer = next((one for one in trainers if "framework" in one), None)
    if trainer is None:
        return None
    framework, notes = str(trainer["framework"]), list[str]()
    usual = _part(f"primus/configs/modules/{framework}/{trainer.get('config')}", source.path, notes)
    model = _part(f"primus/configs/models/{framework}/{trainer.get('model')}", source.path, notes)
    overrides = trainer.get("overrides")
    whole = merged(merged(usual, model), overrides if isinstance(overrides, Mapping) else {})
    filled = _filled(whole, asked, taken, whole)
    assert isinstance(filled, dict)
    name = str(trainer.get("model", "")).removesuffix(".yaml").removesuffix(".yml")
    if framework == "torchtitan":
        read = titan_launch(filled, None, tuple(notes))
        return Launch(read.dialect, read.settings, None, read.model or name, read.notes)
    if framework not in ("megatron", "megatron_bridge"):
        raise UsageError(f"framework {framework}: expected megatron, torchtitan or megatron_bridge")
    if framework == "megatron_bridge":
        notes.append(
            f"what the recipe {filled.get('flavor', name)} sets otherwise is in another file, which is not read"
        )
    settings, before = flat(filled), flat(usual)
    kept = frozenset(one for one, value in settings.items() if one in before and before[one] == value)
    return Launch(Dialect.PRIMUS, settings, None, name, tuple(notes), kept)


def _part(name: str, beside: Path | None, notes: list[str], depth: int = 0) -> dict[str, object]:
    """The figures of a file merged over those of the files that it extends."""
    path, text = text_beside(name, beside)
    if text is None:
        notes.append(f"{name} is not there: what it sets is not known")
        return {}
    document = _yaml(name, text)
    found: dict[str, object] = {}
    for above in _names(document.pop("extends", None)) if depth < _DEEP else ():
        found = merged(found, _part(above, path, notes, depth + 1))
    for above in _names(document.pop("bases", None)) if depth < _DEEP else ():
        found = merged(found, _part(above, path, notes, depth + 1))
    return merged(found, document)


def _names(value: object) -> Iterator[str]:
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, str):
            yield one
