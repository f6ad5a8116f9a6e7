"""Launches in YAML, JSON or TOML: of Megatron-LM, Primus, FlagScale, Megatron-Bridge, torchtitan and DeepSpeed.

Also torchtitan's configuration, of all its generations, in the tables of today.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from piper_ray.launches.deepspeed import with_deepspeed_config
from piper_ray.launches.launch import Asked, Dialect, Launch, Source, causes, readable, text_beside, unseen
from piper_ray.launches.python_config import read_python
from piper_ray.model.errors import InputError, UsageError
from piper_ray.workloads.formats.documents import merged, parse_toml

Tables = dict[str, dict[str, object]]

_MOVED = {
    "tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree", "data_parallel_shard_degree",
    "data_parallel_replicate_degree", "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size",
    "pipeline_parallel_split_points", "enable_async_tensor_parallel", "pipeline_parallel_microbatches",
}  # fmt: skip
"""Fields that were in other tables before."""

_RENAMED = {("training", "batch_size"): "local_batch_size", ("training", "max_context_length"): "seq_len"}
_POLICIES = {"FullAC": "full", "SelectiveAC": "selective"}


def is_titan(document: object) -> bool:
    """Whether a document is a configuration of torchtitan."""
    if not isinstance(document, Mapping):
        return False
    training, parallelism = document.get("training"), document.get("parallelism")
    is_its = isinstance(training, Mapping) and bool(
        training.keys() & {"seq_len", "local_batch_size", "batch_size", "num_tokens_per_microbatch_per_dp_rank"}
    )
    return isinstance(parallelism, Mapping) or (is_its and "model" in document) or (is_its and "model_spec" in document)


def titan_launch(document: Mapping[str, object], ranks: int | None, notes: tuple[str, ...] = ()) -> Launch:
    """The launch of a whole configuration."""
    tables: Tables = {
        str(name): {str(key): value for key, value in table.items()}
        for name, table in document.items()
        if isinstance(table, Mapping)
    }
    further = {name: value for name, value in document.items() if not isinstance(value, Mapping)}
    told = list(notes)
    model = _model(tables)
    _modernise(tables, told)
    settings: dict[str, object] = {**further, **tables}
    checkpoint = document.get("activation_checkpoint")
    if isinstance(checkpoint, Mapping) and "made_by" in checkpoint:
        policy = str(checkpoint["made_by"]).split(".")[0]
        settings["activation_checkpoint"] = _POLICIES.get(policy, policy)
    elif checkpoint is None:
        settings.pop("activation_checkpoint", None)
    return Launch(Dialect.TORCHTITAN, settings, ranks, model, tuple(told))


def _model(tables: Mapping[str, Mapping[str, object]]) -> str | None:
    spec, model = tables.get("model_spec", {}), tables.get("model", {})
    arguments = spec.get("arguments")
    if isinstance(arguments, list) and arguments and isinstance(arguments[0], str):
        return arguments[0]
    said = [str(model[name]) for name in ("name", "flavor") if isinstance(model.get(name), str)]
    return " ".join(said) or None


def _modernise(tables: Tables, notes: list[str]) -> None:
    """Moves fields to the tables of today."""
    for name in ("training", "experimental", "checkpoint"):
        for key in _MOVED & tables.get(name, {}).keys():
            tables.setdefault("parallelism", {}).setdefault(key, tables[name].pop(key))
    for (name, key), now in _RENAMED.items():
        if key in tables.get(name, {}):
            tables[name].setdefault(now, tables[name].pop(key))
    training = tables.get("training", {})
    tokens, length = training.pop("num_tokens_per_microbatch_per_dp_rank", None), training.get("seq_len")
    if isinstance(tokens, int) and isinstance(length, int):
        if tokens % length:
            notes.append(f"{tokens} tokens of a microbatch are no whole samples of {length}")
        else:
            training["microbatch_samples"] = tokens // length
    step = training.pop("num_tokens_per_train_step", -1)
    if isinstance(step, int) and step > 0 and isinstance(length, int):
        training["global_batch_size"] = step // length
    parallelism = tables.setdefault("parallelism", {})
    for name in ("made_by", "arguments"):
        parallelism.pop(name, None)
    for name in ("pipeline_parallel_schedule_csv", "pipeline_parallel_layers_per_stage", "module_fqns_per_model_part"):
        if not parallelism.get(name, True):
            parallelism.pop(name)


def with_titan_base(tables: Tables, options: Mapping[str, object], source: Source, ranks: int | None) -> Launch:
    """The launch of a command that overrides a configuration, which it names by a file or by a function of a
    registry."""
    base, notes, name = _base(tables, options, source)
    for table, values in tables.items():
        own = base.setdefault(table, {})
        if isinstance(own, dict):
            own |= values
    if name is not None and notes and not tables.get("parallelism"):
        raise UsageError(f"{name} is not there, and the command itself does not say how the model is divided")
    return titan_launch(base, ranks, notes)


def _base(
    tables: Tables, options: Mapping[str, object], source: Source
) -> tuple[dict[str, object], tuple[str, ...], str | None]:
    """The document of the configuration that a launch is based on, notes, and its name if it is missing or a file."""
    file = (
        options.get("job.config_file") or options.get("config_file") or tables.get("job", {}).pop("config_file", None)
    )
    if isinstance(file, str):
        _, text = text_beside(file, source.path)
        if text is None:
            return {}, (f"{readable(file)} is not there: what it sets is not known",), file
        return _toml(file, text), (), file
    module, config = options.get("module"), options.get("config")
    if not isinstance(config, str) or causes(config):
        return {}, (), None
    named = str(module or "").replace(".", "/")
    for place in (f"torchtitan/models/{named}/config_registry.py", f"{named}/config_registry.py", f"{named}.py"):
        path, text = text_beside(place, source.path)
        if text is not None:
            read = read_python(text, path, config, is_titan)
            return dict(read.document), read.notes, None
    return {}, (f"{config} of {named or 'its module'} is not there: what it sets is not known",), config


def _toml(name: str, text: str) -> dict[str, object]:
    try:
        return dict(parse_toml(name, text))
    except InputError as error:
        raise UsageError(f"{name}: {error}") from None


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
