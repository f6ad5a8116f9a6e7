"""torchtitan's configuration, of all its generations, in the tables of today."""

from __future__ import annotations

from collections.abc import Mapping

from piper_ray.launches.files import text_beside
from piper_ray.launches.launch import Dialect, Launch, Source
from piper_ray.launches.python_config import read_python
from piper_ray.launches.unseen import causes, readable
from piper_ray.model.errors import InputError, UsageError
from piper_ray.workloads.formats.documents import parse_toml

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
        raise UsageError(f"{name} is not there, and the command itself says nothing of how the model is divided")
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
            return {}, (f"{readable(file)} is not there: what it sets is not seen",), file
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
    return {}, (f"{config} of {named or 'its module'} is not there: what it sets is not seen",), config


def _toml(name: str, text: str) -> dict[str, object]:
    try:
        return dict(parse_toml(name, text))
    except InputError as error:
        raise UsageError(f"{name}: {error}") from None
