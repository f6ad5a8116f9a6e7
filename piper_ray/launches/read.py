"""Reads any launch that users have: a script, options, or a configuration in Python, YAML, TOML or JSON.

Also finds the launch among a script's commands, with its dialect and its options.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import yaml

from piper_ray.launches.deepspeed import with_deepspeed_config, with_older_names
from piper_ray.launches.documents import flat, is_titan, read_document, titan_launch, with_titan_base
from piper_ray.launches.launch import (
    THE_ONE,
    Asked,
    Dialect,
    Launch,
    Source,
    causes,
    is_wholly_unseen,
    readable,
    text_beside,
)
from piper_ray.launches.python_config import is_python, read_python
from piper_ray.launches.shell import ShellCommand, follow
from piper_ray.launches.shell_words import Outside
from piper_ray.model.errors import InputError, UsageError
from piper_ray.workloads.formats.documents import parse_toml

_TELLING = frozenset({
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "pipeline_model_parallel_layout",
    "expert_model_parallel_size", "context_parallel_size", "sequence_parallel", "num_layers", "micro_batch_size",
    "global_batch_size", "use_distributed_optimizer", "model_parallel_size", "zero_stage", "recompute_granularity",
    "deepspeed_config",
})  # fmt: skip
"""A launch of Megatron has at least one of these options."""

_DIVIDING = {name for name in _TELLING if "parallel" in name}

_OVERRIDE = re.compile(
    r"\+{0,2}(?:model|train|ddp|optimizer|system|dataset|scheduler|mixed_precision)(?:\.\w+)*\.(?P<name>\w+)=(?P<value>.*)"
)
"""Options of Megatron-Bridge's and FlagScale's commands that override a configuration: ``model.num_layers=2``."""

_FILES = ("config", "config_file", "exp")
"""Options that name a configuration."""

_OTHER_FILES = {"yaml_cfg", "use_mp_args_from_checkpoint_args"}
"""Options that refer to further options elsewhere."""

_TITAN_TABLES = ("parallelism", "training", "activation_checkpoint", "experimental", "model", "job", "compile")
_STARTERS = ("nproc_per_node", "nnodes", "num_gpus", "num_nodes")
_SBATCH = re.compile(
    r"^#SBATCH\s+(?:--(?P<name>nodes|ntasks-per-node|gpus-per-node|ntasks|gres=gpu)|-(?P<short>[Nn]))"
    r"[=:\s]+(?:[a-z]\w*:)?(?P<count>\d+)",
    re.MULTILINE,
)
_ON_A_NODE = ("ntasks-per-node", "gpus-per-node", "gres=gpu")
_SHORT = {"N": "nodes", "n": "ntasks"}
_OPTION = re.compile(r"--?[A-Za-z\ue000]")
_OF_OPTIONS = re.compile(r"ARG|OPT|FLAG|PARAM|CONF|EXTRA|OVERRIDE|OPTS", re.IGNORECASE)
_OF_PLACES = re.compile(
    r"data|path|save|load|dir|file|tokenizer|vocab|merge|blend|cache|prefix|project|name|sglang|vllm"
)

_SWIFT = {
    "use_distributed_optimizer": True, "recompute_granularity": "selective", "moe_token_dispatcher_type": "alltoall",
    "micro_batch_size": "1", "global_batch_size": "16",
}  # fmt: skip
"""What ms-swift's command ``megatron`` takes where nothing is said, and Megatron-LM does not."""


def read_script(source: Source, asked: Asked) -> Launch:
    """The launch of a script. Raises UsageError if there is none or several, and for words that cannot be resolved."""
    outside = Outside(asked.variables, source.path)
    followed = follow(source.text, outside)
    found = {
        (command.line, command.words): read
        for command in followed.commands
        if (read := _launch(command.words, followed.files, source)) is not None
    }
    distinct = _distinct(found)
    if not distinct:
        others = f" (it runs {', '.join(outside.not_found)}, which is not in its folder)" if outside.not_found else ""
        if outside.uses_yq:
            others += (
                "; yq takes its options out of a YAML file: give that file, with --set NAME=VALUE for each variable; "
                "what the script adds to it is then not known"
            )
        known = "Megatron, Megatron-Bridge, torchtitan or DeepSpeed, such as --tensor-model-parallel-size"
        where = f"{source.path}: " if source.path else ""
        raise UsageError(f"{where}no command of the script has options of {known}{others}; give the script that has")
    if asked.number is not None and not 1 <= asked.number <= len(distinct):
        raise UsageError(f"launch {asked.number}: the script has {len(distinct)}")
    if len(distinct) > 1 and asked.number is None:
        lines = ", ".join(f"{number} (line {line})" for number, (line, _) in enumerate(distinct, start=1))
        raise UsageError(f"the script comes to {len(distinct)} launches; say which with --launch: {lines}")
    read = distinct[(asked.number or 1) - 1][1]
    started = read.ranks if read.ranks is not None else _of_slurm(source.text, followed.commands)
    return replace(read, ranks=started, notes=(*read.notes, *_notes(outside)))


def read_words(text: str, source: Source) -> Launch:
    """The launch of a text that only consists of options. Raises UsageError."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise UsageError(f"launch options: {error}") from None
    hidden = next((word for word in words if "$" in word or "`" in word), None)
    if hidden is not None:
        raise UsageError(
            f"launch options: the value of {hidden} is not known here; expected the options themselves, or the "
            "script that sets it"
        )
    read = _launch(("pretrain.py", *words), {}, source)
    return Launch(Dialect.MEGATRON, dict(_options(words))) if read is None else read


def _launch(words: Sequence[str], files: Mapping[str, str], source: Source) -> Launch | None:
    """The launch of a command; None if the command is not a launch."""
    overrides = {found["name"]: _plain(found["value"]) for word in words if (found := _OVERRIDE.fullmatch(word))}
    words = [word for word in words if not _OVERRIDE.fullmatch(word)]
    script = next((at for at, word in enumerate(words) if word.endswith(".py") or word == "-m"), None)
    options = dict(_options(words if script is None else words[script + 1 :]))
    before = options if script is None else dict(_options(words[:script]))
    if str(options.get("deepspeed")).endswith(".json"):  # as Hugging Face's trainer takes its name
        options["deepspeed_config"] = options.pop("deepspeed")
    starts = {name: before.pop(name) for name in _STARTERS if name in before}
    ranks = _ranks(starts)
    dotted = [name for name in options if name.partition(".")[0] in _TITAN_TABLES and "." in name]
    module = next((words[at + 1] for at, word in enumerate(words[:-1]) if word == "-m"), "")
    is_titan = "torchtitan" in module or bool(dotted) or ("torchtitan" in " ".join(words) and "config" in options)
    if is_titan:
        _require_seen(words, options)
        return with_titan_base(_tables(options, dotted), options, source, ranks)
    document, notes = _document(options, source)
    if document is None and not _TELLING & (options.keys() | overrides.keys()):
        return None
    _require_seen(words, options)
    if document is not None:
        return replace(document, settings={**document.settings, **with_older_names(options), **overrides}, ranks=ranks)
    if overrides:
        return _over_a_recipe(overrides, options, ranks, notes)
    is_deepspeed = "deepspeed" in options or "zero_stage" in options or "deepspeed_config" in options
    if is_deepspeed:
        return with_deepspeed_config(options, files, source, ranks)
    model = None
    if words[0] == "megatron":
        options = _SWIFT | {name: None if value == "none" else value for name, value in options.items()}
        model = options.pop("model", None)
    return Launch(Dialect.MEGATRON, with_older_names(options), ranks, None if model is None else str(model), notes)


def _over_a_recipe(
    overrides: Mapping[str, object], options: Mapping[str, object], ranks: int | None, notes: tuple[str, ...]
) -> Launch:
    """The launch of a command that overrides a recipe, a function elsewhere. Raises UsageError if only the recipe
    states how the model is divided."""
    recipe = _first(options["recipe"]) if "recipe" in options else None
    named = readable(str(recipe)) if recipe is not None else "the recipe"
    if not _DIVIDING & overrides.keys():
        raise UsageError(
            f"{named} is not there, and the command itself does not say how the model is divided; expected the "
            "recipe's file with --recipe NAME"
        )
    told = (*notes, f"what {named} sets is in another file, which is not read")
    return Launch(Dialect.BRIDGE, overrides, ranks, None if recipe is None else named, told)


def _first(value: object) -> object:
    """The first of the words after an option, or the only one."""
    return value[0] if isinstance(value, list) else value


def _document(options: Mapping[str, object], source: Source) -> tuple[Launch | None, tuple[str, ...]]:
    """The launch of the YAML configuration that a command names, if it is one; or a sentence if the file is missing."""
    said = {name: _first(value) for name, value in options.items()}
    name = next((value for key in _FILES if isinstance(value := said.get(key), str)), None)
    if isinstance(inner := said.get("config_name"), str):
        name = f"{said.get('config_path', '.')}/{inner.removesuffix('.yaml')}.yaml"
    if name is None or not name.endswith((".yaml", ".yml")):
        return None, ()
    path, text = text_beside(name, source.path)
    if text is None:
        return None, (f"{readable(name)} is not there: what it sets is not known",)
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: not YAML: {error}") from None
    return read_document(document, Source(text, path), THE_ONE) if isinstance(document, Mapping) else None, ()


def _options(words: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Options by name in Python, with the words that follow: True, a text, or a list."""
    name, values = None, list[str]()
    for word in (*words, "--"):
        if not _OPTION.match(word) and word != "--":
            values.append(word)
            continue
        if name is not None:
            yield name, True if not values else values[0] if len(values) == 1 else list(values)
        dashes = word.lstrip("-")
        said, sign, value = dashes.partition("=")
        name = said.replace("-", "_") if said and (word.startswith("--") or len(said) > 1) else None
        values = [value] if sign else []


def _require_seen(words: Sequence[str], options: Mapping[str, object]) -> None:
    """Raises UsageError for unresolved words that may be options."""
    for name in _OTHER_FILES & options.keys():
        raise UsageError(f"launch script: the value of --{name.replace('_', '-')} is not known here")
    last, follows = "", 0
    script = next((at for at, word in enumerate(words) if word.endswith(".py") or word == "-m"), 0)
    for word in words[script:]:
        if word.startswith("--") and causes(word.partition("=")[0]):
            raise _hidden(word)
        if word.startswith("-"):
            last, follows = word, 0
            continue
        if is_wholly_unseen(word) and word is not words[script]:
            (cause, *_) = causes(word)
            belongs = last.startswith("--") and (not follows or _OF_PLACES.search(last))
            if not belongs or _OF_OPTIONS.search(cause):
                raise _hidden(word)
        follows += 1


def _hidden(word: str) -> UsageError:
    cause = causes(word)[0]
    name = cause.lstrip("$").strip("{}")
    hint = f"; say it with --set {name}=VALUE" if name.isidentifier() else ""
    if cause.startswith("$(cat "):
        hint = "; expected a text file of options in the script's folder"
    return UsageError(f"launch script: the value of {readable(word)} is not known here{hint}")


def _distinct(found: Mapping[tuple[int, tuple[str, ...]], Launch]) -> list[tuple[int, Launch]]:
    distinct: list[tuple[int, Launch]] = []
    for (line, _), launch in found.items():
        if all(launch != other for _, other in distinct):
            distinct.append((line, launch))
    return distinct


def _ranks(starts: Mapping[str, object]) -> int | None:
    """The number of ranks that torchrun or deepspeed starts; None if it is not given as numbers."""
    counts = {name: int(str(value)) for name, value in starts.items() if str(value).isdigit()}
    if "nproc_per_node" in counts and ("nnodes" in counts or "nnodes" not in starts):
        return counts["nproc_per_node"] * counts.get("nnodes", 1)
    if "num_gpus" in counts and ("num_nodes" in counts or "num_nodes" not in starts):
        return counts["num_gpus"] * counts.get("num_nodes", 1)
    return None


def _of_slurm(text: str, commands: Sequence[ShellCommand]) -> int | None:
    """The number of ranks by Slurm's own lines in the script, and by what a launcher starts on each node."""
    said: dict[str, int] = {}
    for match in _SBATCH.finditer(text):
        said[match["name"] or _SHORT[match["short"]]] = int(match["count"])
    starts = [dict(_options(command.words)).get("nproc_per_node") for command in commands]
    of_launcher = {int(str(one)) for one in starts if str(one).isdigit()}
    if not of_launcher and "ntasks" in said:
        return said["ntasks"]
    each = max(of_launcher, default=max((said.get(name, 0) for name in _ON_A_NODE), default=0))
    return said["nodes"] * each if "nodes" in said and each and len(of_launcher) <= 1 else None


def _notes(outside: Outside) -> Iterator[str]:
    taken = [f"{name} (as {value})" if value else name for name, value in outside.taken_as_unset.items()]
    if taken:
        shown = ", ".join(taken[:12]) + (f" and {len(taken) - 12} more" if len(taken) > 12 else "")
        yield f"environment variables, read as unset: {shown}; --set NAME=VALUE sets one"
    if outside.gets_arguments:
        yield "the script is read as if started without arguments"
    for name in dict.fromkeys(outside.not_found):
        yield f"the script reads {name}, which is not there: what it sets is not known"


def _tables(options: Mapping[str, object], dotted: Sequence[str]) -> dict[str, dict[str, object]]:
    """torchtitan's tables of options with a dot in their names."""
    tables: dict[str, dict[str, object]] = {}
    for name in dotted:
        table, _, key = name.partition(".")
        value = options[name]
        if key.startswith("no_") and value is True:
            key, value = key.removeprefix("no_"), False
        tables.setdefault(table, {})[key] = _plain(value)
    return tables


def _plain(value: object) -> object:
    """A word as YAML reads it: a number, true, a list."""
    if not isinstance(value, str) or causes(value):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


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
