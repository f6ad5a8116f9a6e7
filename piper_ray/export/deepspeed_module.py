"""The module that ``export --to deepspeed`` writes, with the plan as constants; and read back: nothing of it is run."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from itertools import pairwise

from piper_ray.export.files import rendered
from piper_ray.export.job import Job
from piper_ray.export.stage_documents import in_document, read_stage_document
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.mode import Recomputation
from piper_ray.model.plan import Plan
from piper_ray.model.plan_rules import layers_in_order
from piper_ray.model.schedule import Schedule, ScheduleName

MODULE = "planned_module.py"
_SOURCE = "DeepSpeed module"
_DEGREES = {"num_pp": "pipeline_ranks", "num_mp": "tensor_parallel", "num_dp": "data_parallel"}
"""Of DeepSpeed's topology, by the names of a plan's figures."""

_CLASS = "class PlannedPipelineModule("
_CONSTANTS = ("PARTS", "DEGREES", "RECOMPUTED", "STATE_SHARDS")


def planned_module(job: Job, order: Sequence[int], parts: Sequence[int], parameters: Sequence[int] | None) -> str:
    """The text. order: layer ids; parts: where each stage begins there, and the end; parameters: of each layer that a
    rank trains, None where nobody knows."""
    recomputed = {layer: kind for stage in job.recomputed_layers for layer, kind in stage.items()}
    place = {layer: index for index, layer in enumerate(order)}
    constants = (
        ("PARTS", list(parts), f"Of the {len(order)} layers where each stage begins, and the end."),
        ("LAYERS", [job.named(layer) for layer in order], "What the list holds, for people."),
        (
            "DEGREES",
            {name: getattr(job, says) for name, says in _DEGREES.items()},
            "Of pipeline, tensor and data parallelism.",
        ),
        (
            "RECOMPUTED",
            [recomputed[layer] == Recomputation.FULL for layer in order],
            "Which layers recompute in their backward pass; the others keep all.",
        ),
        (
            "TIED",
            [[place[layer] for layer in job.in_order(tied)] for tied in job.tied_over_ranks],
            "Numbers of layers with a weight in common, on different pipeline ranks.",
        ),
        (
            "PARAMETERS",
            None if parameters is None else list(parameters),
            "That a rank trains, of each layer; None: the workload does not say.",
        ),
        (
            "STATE_SHARDS",
            job.optimizer_shards,
            "Replicas that share the optimizer's state in the plan; README.md says what DeepSpeed does.",
        ),
    )
    shown = [(name, _shown(value), text) for name, value, text in constants]
    return rendered("deepspeed_module.py.jinja", constants=shown)


def _shown(value: object) -> str:
    """Lists of texts a line each."""
    if isinstance(value, list) and value and isinstance(value[0], str):
        return "[\n" + "".join(f"    {text!r},\n" for text in value) + "]"
    return repr(value)


def is_planned_module(text: str) -> bool:
    """Whether it is such a module."""
    return _CLASS in text


def read_planned_module(text: str, instance: Instance) -> tuple[Plan, Schedule]:
    """The plan and its schedule. Raises UsageError or InputError that says what is wrong."""
    found = _constants(text)
    parts, degrees = found["PARTS"], found["DEGREES"]
    order = layers_in_order(instance)
    if not isinstance(parts, list) or not all(type(part) is int for part in parts) or parts[:1] != [0]:
        raise UsageError(f"{_SOURCE}: PARTS: {parts}; expected where each stage begins, from 0, and the end")
    if parts[-1] != len(order) or any(begin >= end for begin, end in pairwise(parts)):
        raise UsageError(f"{_SOURCE}: PARTS: {parts}; expected rising numbers up to the workload's {len(order)} layers")
    if not isinstance(degrees, Mapping) or degrees.keys() != _DEGREES.keys():
        raise UsageError(f"{_SOURCE}: DEGREES: {degrees}; expected num_pp, num_mp and num_dp")
    if degrees["num_pp"] != len(parts) - 1:
        raise UsageError(
            f"{_SOURCE}: {degrees['num_pp']} pipeline ranks and {len(parts) - 1} stages; expected one each"
        )
    recomputed = found["RECOMPUTED"]
    if not isinstance(recomputed, list) or [*map(type, recomputed)] != [bool] * len(order):
        raise UsageError(f"{_SOURCE}: RECOMPUTED: {recomputed}; expected True or False for each of {len(order)} layers")
    paths = [instance.layer_by_id[layer].path or f"layer {layer}" for layer in order]
    stages = [{"modules": paths[begin:end], "recomputed": recomputed[begin:end]} for begin, end in pairwise(parts)]
    document = {
        **in_document({says: degrees[name] for name, says in _DEGREES.items()}),
        "optimizer_shards": found["STATE_SHARDS"],
        "schedule": ScheduleName.ONE_F_ONE_B.value,
        "stages": stages,
    }
    return read_stage_document(_SOURCE, document, instance)


def _constants(text: str) -> dict[str, object]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{_SOURCE}: not Python: {error}") from None
    found: dict[str, object] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name in _CONSTANTS:
                found[name] = _literal(name, statement.value)
    missing = [name for name in _CONSTANTS if name not in found]
    if missing:
        raise UsageError(f"{_SOURCE}: {missing[0]} is missing; expected the module as it was exported")
    return found


def _literal(name: str, value: ast.expr) -> object:
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise UsageError(f"{_SOURCE}: {name}: expected a value that need not be worked out") from None
