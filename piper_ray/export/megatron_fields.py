"""Megatron's settings by other ways than flags: FlagScale's sections, and fields of a Megatron-Bridge config."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard

from piper_ray.export.megatron_arguments import read_values
from piper_ray.export.megatron_flags import READ_FLAGS, RENAMED_FIELDS
from piper_ray.export.megatron_layout import BLOCK, EMBEDDING, LOSS, MTP
from piper_ray.export.run_as import ReadLayout
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.recomputation import Recomputation
from piper_ray.runtimes.pieces import ModelPieces

_LETTERS = {"embedding": EMBEDDING, "decoder": BLOCK, "loss": LOSS, "mtp": MTP}
_SETTING = re.compile(r"^\s*cfg\.(?:\w+\.)*(?P<name>\w+) = (?P<value>.+)$", re.MULTILINE)
_CHANGED = re.compile(r"cfg\.[\w.]+ *[-+*/|%]+=.*")
_SECTIONS_DEEP = 4


def is_recipe(text: str) -> bool:
    """Whether it sets fields of a Megatron-Bridge config, in Python."""
    return _SETTING.search(text) is not None


def read_recipe(text: str, pieces: ModelPieces, instance: Instance) -> ReadLayout:
    """Of lines such as ``cfg.model.tensor_model_parallel_size = 2``; nothing is run. Raises UsageError."""
    values: dict[str, object] = {}
    if (changed := _CHANGED.search(text)) is not None:
        raise UsageError(f"{changed[0]}: expected a value that need not be worked out")
    for found in _SETTING.finditer(text):
        name, value = found["name"], found["value"].strip()
        values[name] = _literal(value)
        if values[name] is None and value != "None" and _argument(name) in READ_FLAGS:
            raise UsageError(f"cfg.{name} = {value}: expected a value that need not be worked out")
    return _of_fields(values, pieces, instance)


def _literal(text: str) -> object:
    """None for what has to be worked out."""
    try:
        return ast.literal_eval(text.partition("#")[0] if '"' not in text and "'" not in text else text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def read_sections(document: Mapping[str, object], pieces: ModelPieces, instance: Instance) -> ReadLayout | None:
    """Of a YAML whose sections have Megatron's names: FlagScale's, or a Megatron-Bridge config's. None for another."""
    values = _flat(document)
    if not values.keys() & {"tensor_model_parallel_size", "pipeline_model_parallel_size"}:
        return None
    meshes = values.get("hetero_process_meshes")
    if meshes is None:
        return _of_fields(values, pieces, instance)
    return _of_meshes(values, meshes, pieces, instance)


def _flat(document: Mapping[str, object], depth: int = _SECTIONS_DEEP) -> dict[str, object]:
    """What stands in all sections, by its own name."""
    found: dict[str, object] = {}
    for name, value in document.items():
        if not isinstance(value, Mapping):
            found[str(name)] = value
        elif depth > 1:
            found |= _flat(value, depth - 1)
    return found


def _of_fields(values: Mapping[str, object], pieces: ModelPieces, instance: Instance) -> ReadLayout:
    named = {_argument(name): value for name, value in values.items()}
    layout = named.get("pipeline_model_parallel_layout")
    if isinstance(layout, list):
        named["pipeline_model_parallel_layout"] = _layout_text(layout)
    if layout is not None:
        named.pop("num_virtual_stages_per_pipeline_rank", None)  # follows from the layout
    read = read_values(named, pieces, instance)
    return replace(read, names=frozenset(name for name in values if _argument(name) in READ_FLAGS))


def _argument(field: str) -> str:
    """Its name among Megatron-LM's arguments."""
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


def _of_meshes(values: Mapping[str, object], meshes: object, pieces: ModelPieces, instance: Instance) -> ReadLayout:
    """FlagScale: layers of each stage by count, recomputation by stage. Raises UsageError."""
    source = "FlagScale system"
    if not _are_counts(meshes) or len(meshes) != 5:
        raise UsageError(f"{source}: hetero_process_meshes: {meshes}; expected one mesh: [t, cp, ep, dp, pp]")
    t, context, experts, replicas, ranks = meshes
    for name, size in (
        ("tensor_model_parallel_size", t),
        ("context_parallel_size", context),
        ("pipeline_model_parallel_size", ranks),
    ):
        if values.get(name, size) != size:
            raise UsageError(f"{source}: {name}: {values[name]}, but hetero_process_meshes has {size}")
    split = values.get("hetero_pipeline_layer_split")
    if not _are_counts(split, least=0) or len(split) != ranks or sum(split) != pieces.blocks:
        raise UsageError(
            f"{source}: hetero_pipeline_layer_split: {split}; expected {ranks} numbers, {pieces.blocks} together"
        )
    letters = [BLOCK * count for count in split]
    letters[0] = EMBEDDING + letters[0]
    letters[-1] += MTP * pieces.predictors + LOSS
    counts = values.get("recompute_num_layers_per_stage_micro_batch")
    common = {name: value for name, value in values.items() if not name.startswith("recompute_")}
    read = read_values(common, pieces, instance, letters)
    run_as = replace(read.run_as, data_parallel=replicas, expert_parallel=experts)
    if counts is not None:
        if not isinstance(counts, list) or len(counts) != ranks or not all(_is_one_span(x) for x in counts):
            raise UsageError(
                f"{source}: recompute_num_layers_per_stage_micro_batch: {counts}; expected {ranks} lists such as "
                "[1, 16, 2]: the same for all microbatches"
            )
        run_as = replace(run_as, recomputation=Recomputation.FULL, recomputed_layers=tuple(x[2] for x in counts))
    return replace(read, run_as=run_as, names=frozenset(values.keys() & READ_FLAGS.keys()))


def _are_counts(value: object, least: int = 1) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int and one >= least for one in value)


def _is_one_span(value: object) -> TypeGuard[list[int]]:
    """One setting for all microbatches: ``[1, 16, 2]``."""
    return _are_counts(value, least=0) and len(value) == 3
