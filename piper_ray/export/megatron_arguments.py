"""Megatron's launch arguments as somebody runs them: the stages, by a layout or by older flags, and all degrees.

The same is read as fields of a Megatron-Bridge recipe or config, and as FlagScale's meshes.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NoReturn, TypeGuard

from piper_ray.export.flags import MEGATRON, READ_FLAGS, RENAMED_FIELDS, PlanFlag, flag_of
from piper_ray.export.megatron_layout import BLOCK, EMBEDDING, LOSS, MTP, pieces_of_letters, read_string, with_ends
from piper_ray.export.megatron_model import model_settings, require_megatron_model
from piper_ray.export.run_as import ReadLayout, RunAs, command_words, positive, ranks_started
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.mode import ALL_REPLICAS, Recomputation
from piper_ray.runtimes.pieces import ModelPieces

_SOURCE = "Megatron arguments"

_COSTLY = tuple(map(flag_of, MEGATRON.costly))
_OF_THE_MODEL = (*MEGATRON.model, "fp8_format")
_DEFAULT_MODULE = "core_attn"
"""What Megatron computes again where selective recomputation names no modules."""

_SWITCHES = frozenset(flag_of(flag.name) for flag in READ_FLAGS.values() if flag.kind == "switch")
_IN_A_COMMAND = re.compile(r"(^|[\s'\"=(])--[\w.-]*(parallel|pipeline)")


def are_arguments(text: str) -> bool:
    """Whether it is Megatron's arguments, or a command or script with them."""
    return text.startswith("--") or _IN_A_COMMAND.search(text) is not None


_FOLLOWED: dict[str, dict[str, Any]] = {
    "number": {"type": int},
    "text": {},
    "switch": {"action": "store_true"},
    "words": {"nargs": "*"},
}
"""How argparse reads what follows a flag."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{_SOURCE}: {message}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="", add_help=False, allow_abbrev=False)
    of_the_model = dict.fromkeys(MEGATRON.model, "number") | {"fp8_format": "text"}
    for name, kind in ({flag.name: flag.kind for flag in READ_FLAGS.values()} | of_the_model).items():
        parser.add_argument(flag_of(name), **_FOLLOWED[kind])
    return parser


def read_arguments(text: str, pieces: ModelPieces, instance: Instance) -> ReadLayout:
    """The layout of a command's text. Flags that say nothing of the plan are left aside. Raises UsageError."""
    read = _read(command_words(text, _SOURCE, _SWITCHES), pieces, instance)
    started, said = ranks_started(text), read.run_as
    each = (said.pipeline_ranks or 1) * (said.tensor_parallel or 1) * (said.context_parallel or 1)
    if started is not None and started % each:
        raise UsageError(f"{_SOURCE}: {started} ranks are started, of which a replica takes {each}")
    return read if started is None else replace(read, run_as=replace(said, world=started))


def read_values(
    values: Mapping[str, object], pieces: ModelPieces, instance: Instance, letters: Sequence[str] | None = None
) -> ReadLayout:
    """The layout of flags by their names in Python, as configurations have them: ``tensor_model_parallel_size``.

    letters: the letters of each stage, such as ``Ett``, where no flag says which layers it has.
    """
    known = {name: value for name, value in values.items() if name in READ_FLAGS}
    words = [_words(READ_FLAGS[name], value) for name, value in known.items() if value is not None]
    for name, value in values.items():
        if name in _OF_THE_MODEL and isinstance(value, (int, str)) and not isinstance(value, bool):
            words.append([f"{flag_of(name)}={value}"])
        elif name not in known and name not in _OF_THE_MODEL and value:
            words.append([flag_of(name)])
    read = _read([*chain.from_iterable(words)], pieces, instance, letters)
    return replace(read, names=frozenset(known))


def _words(flag: PlanFlag, value: object) -> list[str]:
    if flag.kind == "switch":
        if not isinstance(value, bool):
            raise UsageError(f"{flag.name}: {value!r}; expected true or false")
        return [flag_of(flag.name)] if value else []
    if isinstance(value, list):
        return [flag_of(flag.name), *map(str, value)]
    return [f"{flag_of(flag.name)}={value}"]


def _read(
    words: Sequence[str], pieces: ModelPieces, instance: Instance, letters: Sequence[str] | None = None
) -> ReadLayout:
    given, others = _parser().parse_known_args(words)
    said = {flag.says: getattr(given, flag.name) for flag in READ_FLAGS.values() if flag.says}
    for name in ("num_layers", "mtp_num_layers"):
        asked, own = getattr(given, name), getattr(pieces, READ_FLAGS[name].says)
        if asked not in (None, own):
            raise UsageError(f"{_SOURCE}: {flag_of(name)} {asked}, but the model has {own}")
    _require_model(given, instance)
    notes: list[str] = []
    run_as = _run_as(given, said, instance, notes)
    ranks = run_as.pipeline_ranks or 1
    if ranks > instance.devices:
        raise UsageError(f"{_SOURCE}: {ranks} pipeline ranks, but the workload has {instance.devices} devices")
    if letters is not None:
        stages = pieces_of_letters(letters, pieces)
    elif given.pipeline_model_parallel_layout is not None:
        stages = read_string(given.pipeline_model_parallel_layout, pieces, ranks)
    else:
        stages = pieces_of_letters(_older_flags(given, pieces, ranks), pieces)
    notes += [*_precision(given, instance), *_costly(others)]
    names = frozenset(name for name, value in vars(given).items() if value is not None and value is not False)
    return ReadLayout(stages, run_as, tuple(notes), names, _SOURCE, said)


def _require_model(given: argparse.Namespace, instance: Instance) -> None:
    """Raises UsageError where the arguments are of another model than the workload."""
    if instance.model is None or not instance.model.config:
        return
    try:
        model = model_settings(require_megatron_model(instance.model))
    except UsageError:
        return  # Megatron has no such model; the arguments may be of one like it
    for name in MEGATRON.model:
        said, known = getattr(given, name), model.get(name)
        if said is not None and known is not None and said != known:
            raise UsageError(f"{_SOURCE}: {flag_of(name)} {said}, but the workload's model has {known}")


def _precision(given: argparse.Namespace, instance: Instance) -> Iterator[str]:
    if given.fp8_format is not None and instance.model is not None and instance.model.precision != "fp8":
        yield f"--fp8-format {given.fp8_format} is left aside: the workload's times are of {instance.model.precision}"


def _costly(words: Sequence[str]) -> Iterator[str]:
    for word in dict.fromkeys(word.partition("=")[0] for word in words):
        if word.startswith(_COSTLY):
            yield f"{word} is left aside: plans do not hold it, and what it changes is not in their times and memory"


def _run_as(given: argparse.Namespace, said: dict[str, Any], instance: Instance, notes: list[str]) -> RunAs:
    """Figures by Megatron's defaults: one rank has all experts, divided as other layers are."""
    found = RunAs.of(said)
    for flag in READ_FLAGS.values():
        if flag.kind == "number" and (value := getattr(found, flag.says, None)) is not None:
            positive(flag_of(flag.name), value)
    t = found.tensor_parallel or 1
    if any(layer.experts for layer in instance.layers):
        found = replace(found, expert_parallel=found.expert_parallel or 1, expert_tensor=found.expert_tensor or t)
    recomputation, layers = _recomputation(given, notes)
    return replace(
        found,
        pipeline_ranks=found.pipeline_ranks or 1,
        tensor_parallel=t,
        recomputation=recomputation,
        recomputed_layers=layers,
        optimizer_shards=ALL_REPLICAS if given.use_distributed_optimizer else 1,
    )


def _recomputation(given: argparse.Namespace, notes: list[str]) -> tuple[Recomputation, int | None]:
    """The kind, and of how many first layers of each stage; None: all. Raises UsageError for what Megatron refuses."""
    granularity = "selective" if given.recompute_activations else given.recompute_granularity
    method, layers = given.recompute_method, given.recompute_num_layers
    if layers is not None:
        positive("--recompute-num-layers", layers)
    if granularity not in (None, "full", "selective"):
        raise UsageError(f"--recompute-granularity {granularity}: expected full or selective")
    if method not in (None, "uniform", "block"):
        raise UsageError(f"--recompute-method {method}: expected uniform or block")
    if granularity is None:
        modules = None if given.recompute_modules is None else " ".join(given.recompute_modules)
        for flag, value in (("method", method), ("num-layers", layers), ("modules", modules)):
            if value is not None:
                notes.append(
                    f"--recompute-{flag} {value} does nothing in Megatron without --recompute-granularity: nothing is "
                    "recomputed"
                )
        return Recomputation.NONE, None
    if granularity == "selective":
        if layers is not None:
            raise UsageError("--recompute-num-layers stands beside selective recomputation, which Megatron refuses")
        return Recomputation.of_parts(given.recompute_modules or [_DEFAULT_MODULE]), None
    if method is None or layers is None:
        missing = "--recompute-method uniform or block" if method is None else "--recompute-num-layers"
        raise UsageError(f"--recompute-granularity full without {missing}, which Megatron refuses")
    if method == "uniform" and layers > 1:
        notes.append(
            f"--recompute-method uniform over groups of {layers} layers keeps the input of each group; the plan keeps "
            "that of each layer, and takes more memory"
        )
    return Recomputation.FULL, layers if method == "block" else None


def _older_flags(given: argparse.Namespace, pieces: ModelPieces, ranks: int) -> list[str]:
    """Megatron's even split, but for what first and last ranks are told to hold; chunks of a rank are alike."""
    blocks = pieces.blocks
    first, last = given.decoder_first_pipeline_num_layers, given.decoder_last_pipeline_num_layers
    embedding, loss = given.account_for_embedding_in_pipeline_split, given.account_for_loss_in_pipeline_split
    if (first, last) != (None, None) and (embedding or loss):
        raise UsageError("first or last pipeline layers cannot be given beside --account-for-... flags, says Megatron")
    chunks = given.num_virtual_stages_per_pipeline_rank
    per_chunk = given.num_layers_per_virtual_pipeline_stage
    if chunks is not None and per_chunk is not None:
        raise UsageError("layers per virtual stage and virtual stages per rank are given both; Megatron takes one")
    middle = ranks - (first is not None) - (last is not None)
    left = blocks + bool(embedding) + bool(loss) - (first or 0) - (last or 0)
    if middle < 0 or left < 0 or (middle == 0 and left):
        raise UsageError(f"{blocks} layers do not fall on {ranks} pipeline ranks as these flags have it")
    if middle and left % middle:
        raise UsageError(f"{left} layers do not divide evenly over {middle} pipeline ranks, which Megatron asks for")
    even = left // middle if middle else 0
    of_rank = [even] * ranks
    of_rank[0] = even if first is None else first
    of_rank[-1] = even if last is None else last
    if per_chunk is not None:
        if first is not None or last is not None:
            raise UsageError("with first or last pipeline layers Megatron takes --num-virtual-stages-per-pipeline-rank")
        if even % positive("--num-layers-per-virtual-pipeline-stage", per_chunk):
            raise UsageError(f"{even} layers of a rank are no multiple of {per_chunk} layers per virtual stage")
        chunks = even // per_chunk
    chunks = positive("--num-virtual-stages-per-pipeline-rank", 1 if chunks is None else chunks)
    if any(count % chunks for count in of_rank):
        raise UsageError(
            f"{' or '.join(map(str, sorted(set(of_rank))))} layers of a rank are not {chunks} equal chunks"
        )
    counts = [count // chunks for _ in range(chunks) for count in of_rank]
    return with_ends(counts, pieces.predictors, embedding=bool(embedding), loss=bool(loss))


_LETTERS = {"embedding": EMBEDDING, "decoder": BLOCK, "loss": LOSS, "mtp": MTP}
"""The letters of a layout string, by a Bridge layout's words."""

_SETTING = re.compile(r"^\s*cfg\.(?:\w+\.)*(?P<name>\w+) = (?P<value>.+)$", re.MULTILINE)
_CHANGED = re.compile(r"cfg\.[\w.]+ *[-+*/|%]+=.*")


def is_recipe(text: str) -> bool:
    """Whether it sets fields of a Megatron-Bridge config, in Python."""
    return _SETTING.search(text) is not None


def read_recipe(text: str, pieces: ModelPieces, instance: Instance) -> ReadLayout:
    """The layout of lines such as ``cfg.model.tensor_model_parallel_size = 2``; nothing is run. Raises UsageError."""
    values: dict[str, object] = {}
    if (changed := _CHANGED.search(text)) is not None:
        raise UsageError(f"{changed[0]}: expected a value that need not be worked out")
    for found in _SETTING.finditer(text):
        name, value = found["name"], found["value"].strip()
        values[name] = _value(value)
        if values[name] is None and value != "None" and _argument(name) in READ_FLAGS:
            raise UsageError(f"cfg.{name} = {value}: expected a value that need not be worked out")
    return read_fields(values, pieces, instance)


def _value(text: str) -> object:
    """The value of a literal; None for what has to be worked out."""
    try:
        return ast.literal_eval(text.partition("#")[0] if '"' not in text and "'" not in text else text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def read_fields(values: Mapping[str, object], pieces: ModelPieces, instance: Instance) -> ReadLayout:
    """The layout of a config's fields by their own names, without those of its sections. Raises UsageError."""
    named = {_argument(name): value for name, value in values.items()}
    layout = named.get("pipeline_model_parallel_layout")
    if isinstance(layout, list):
        named["pipeline_model_parallel_layout"] = _layout_text(layout)
    if layout is not None:
        named.pop("num_virtual_stages_per_pipeline_rank", None)  # follows from the layout
    read = read_values(named, pieces, instance)
    return replace(read, names=frozenset(name for name in values if _argument(name) in READ_FLAGS))


def _argument(field: str) -> str:
    """A field's name among Megatron-LM's arguments."""
    return RENAMED_FIELDS.get(field, field)


def _layout_text(layout: Sequence[object]) -> str:
    stages = []
    for number, stage in enumerate(layout):
        names = stage if isinstance(stage, list) else [stage]
        unknown = [name for name in names if not isinstance(name, str) or name not in _LETTERS]
        if unknown:
            known = ", ".join(_LETTERS)
            raise UsageError(f"pipeline_model_parallel_layout[{number}]: {unknown[0]!r}; expected one of {known}")
        stages.append("".join(_LETTERS[str(name)] for name in names))
    return "|".join(stages)


_FLAGSCALE = "FlagScale system"
_MESHES, _SPLIT = "hetero_process_meshes", "hetero_pipeline_layer_split"
_RECOMPUTED = "recompute_num_layers_per_stage_micro_batch"
_SECTIONS_DEEP = 4


def read_sections(document: Mapping[str, object], pieces: ModelPieces, instance: Instance) -> ReadLayout | None:
    """The layout of a YAML whose sections have Megatron's names: FlagScale's, or a Megatron-Bridge config's. None for
    another."""
    values = _flat(document)
    if not values.keys() & {"tensor_model_parallel_size", "pipeline_model_parallel_size"}:
        return None
    if values.get(_MESHES) is None:
        return read_fields(values, pieces, instance)
    return _of_meshes(values, pieces, instance)


def _flat(document: Mapping[str, object], depth: int = _SECTIONS_DEEP) -> dict[str, object]:
    """What stands in all sections, by its own name."""
    found: dict[str, object] = {}
    for name, value in document.items():
        if not isinstance(value, Mapping):
            found[str(name)] = value
        elif depth > 1:
            found |= _flat(value, depth - 1)
    return found


def _of_meshes(values: Mapping[str, object], pieces: ModelPieces, instance: Instance) -> ReadLayout:
    """Layers of each stage by count, recomputation by stage. Raises UsageError."""
    mesh = values[_MESHES]
    if not _are_counts(mesh) or len(mesh) != len(MEGATRON.mesh):
        raise UsageError(f"{_FLAGSCALE}: {_MESHES}: {mesh}; expected one mesh: [t, cp, ep, dp, pp]")
    said = dict(zip(MEGATRON.mesh, mesh, strict=True))
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        if values.get(name, size := said[READ_FLAGS[name].says]) != size:
            raise UsageError(f"{_FLAGSCALE}: {name}: {values[name]}, but {_MESHES} has {size}")
    ranks, split = said["pipeline_ranks"], values.get(_SPLIT)
    if not _are_counts(split, least=0) or len(split) != ranks or sum(split) != pieces.blocks:
        raise UsageError(f"{_FLAGSCALE}: {_SPLIT}: {split}; expected {ranks} numbers, {pieces.blocks} together")
    common = {name: value for name, value in values.items() if not name.startswith("recompute_")}
    read = read_values(common, pieces, instance, with_ends(split, pieces.predictors))
    run_as = replace(read.run_as, data_parallel=said["data_parallel"], expert_parallel=said["expert_parallel"])
    if (counts := values.get(_RECOMPUTED)) is not None:
        if not isinstance(counts, list) or len(counts) != ranks or not all(_is_one_span(x) for x in counts):
            raise UsageError(
                f"{_FLAGSCALE}: {_RECOMPUTED}: {counts}; expected {ranks} lists such as [1, 16, 2]: the same for all "
                "microbatches"
            )
        run_as = replace(run_as, recomputation=Recomputation.FULL, recomputed_layers=tuple(x[2] for x in counts))
    return replace(read, run_as=run_as, names=frozenset(values.keys() & READ_FLAGS.keys()))


def _are_counts(value: object, least: int = 1) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int and one >= least for one in value)


def _is_one_span(value: object) -> TypeGuard[list[int]]:
    """One setting for all microbatches: ``[1, 16, 2]``."""
    return _are_counts(value, least=0) and len(value) == 3
