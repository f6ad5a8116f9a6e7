"""torchtitan's configuration as somebody runs it: a list of modules for each part, or the fields around it."""

from __future__ import annotations

from collections.abc import Mapping

from piper_ray.export.actions import ONE_STAGE, TORCH_NAMES
from piper_ray.export.run_as import ALL, ReadLayout, RunAs, check_batch
from piper_ray.export.torchtitan_modules import own_division, read_modules
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import ScheduleName
from piper_ray.model.settings import Recomputation
from piper_ray.runtimes.pieces import ModelPieces

_SOURCE = "torchtitan layout"
_ALL_THAT_ARE_LEFT = -1


def read_parts(parts: object, pieces: ModelPieces) -> ReadLayout:
    """Of a list of lists of module names. Raises InputError."""
    return ReadLayout(read_modules(_SOURCE, parts, pieces), RunAs())


def read_config(document: Mapping[str, object], pieces: ModelPieces, instance: Instance) -> ReadLayout:
    """Of the JSON that we export, or torchtitan's TOML of before. Raises UsageError or InputError."""
    parallelism, training = document.get("parallelism"), document.get("training")
    if not isinstance(parallelism, Mapping):
        raise UsageError(f"{_SOURCE}: parallelism is missing; expected torchtitan's fields, or a list of lists")
    said = _run_as(parallelism, document)
    if isinstance(training, Mapping):
        piped = said.pipeline_ranks != 1
        microbatch = (
            parallelism.get("pipeline_parallel_microbatch_size", 1) if piped else training.get("local_batch_size")
        )
        check_batch(instance, _SOURCE, microbatch, training.get("global_batch_size"), training.get("seq_len"))
    parts = parallelism.get("module_fqns_per_model_part")
    if parts is None:
        return ReadLayout(_own_division(parallelism, pieces, said), said)
    return ReadLayout(read_modules(_SOURCE, parts, pieces, "parallelism.module_fqns_per_model_part"), said)


def _own_division(parallelism: Mapping[str, object], pieces: ModelPieces, said: RunAs) -> tuple[tuple[int, ...], ...]:
    """Where no part names its modules."""
    if said.pipeline_ranks in (None, 1):
        return (tuple(range(pieces.blocks + 2)),)
    given = parallelism.get("pipeline_parallel_layers_per_stage")
    per_stage = None if given is None else _number(parallelism, "pipeline_parallel_layers_per_stage", 1)
    first, last = (
        _number(parallelism, f"pipeline_parallel_{end}_stage_less_layers", 1, least=0) for end in ("first", "last")
    )
    chunked = (said.schedule or ScheduleName.ONE_F_ONE_B) not in ONE_STAGE
    return own_division(
        pieces.blocks,
        said.pipeline_ranks,
        chunked=chunked,
        per_stage=per_stage,
        first_less=first,
        last_less=last,
    )


def _number(parallelism: Mapping[str, object], name: str, usual: int, least: int = 1) -> int:
    value = parallelism.get(name, usual)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{_SOURCE}: parallelism.{name}: {value!r} is no whole number of at least {least}")
    return value


def _run_as(parallelism: Mapping[str, object], document: Mapping[str, object]) -> RunAs:
    named = parallelism.get("pipeline_parallel_schedule")
    schedules = {name: schedule for schedule, name in TORCH_NAMES.items()}
    if named is not None and named not in schedules:
        raise UsageError(f"{_SOURCE}: pipeline_parallel_schedule: {named!r}; expected one of {', '.join(schedules)}")
    ranks = _number(parallelism, "pipeline_parallel_degree", 1)
    replicas = _number(parallelism, "data_parallel_replicate_degree", 1)
    all_shard = parallelism.get("data_parallel_shard_degree") == _ALL_THAT_ARE_LEFT
    if all_shard and replicas > 1:
        raise UsageError(
            f"{_SOURCE}: parallelism.data_parallel_shard_degree: {_ALL_THAT_ARE_LEFT} beside {replicas} replicas; "
            "expected the number"
        )
    shards = 1 if all_shard else _number(parallelism, "data_parallel_shard_degree", 1)
    context = _number(parallelism, "context_parallel_degree", 1)
    t = _number(parallelism, "tensor_parallel_degree", 1)
    experts = _number(parallelism, "expert_parallel_degree", 1)
    sequence = t > 1 and bool(parallelism.get("enable_sequence_parallel", True))
    gathered = parallelism.get("fsdp_reshard_after_forward", "default")
    return RunAs(
        pipeline_ranks=ranks,
        tensor_parallel=t,
        context_parallel=context,
        expert_parallel=experts,
        expert_tensor=t if experts == 1 else 1,
        data_parallel=None if all_shard else replicas * shards,
        schedule=None if named is None else schedules[str(named)],
        recomputation=_recomputation(document.get("activation_checkpoint", "none")),
        sequence_parallel=sequence,
        gathered=sequence,  # which autograd keeps
        optimizer_shards=ALL if all_shard else shards * context,  # groups that share a sequence share weights, too
        weights_sharded=gathered == "always" or (gathered == "default" and ranks == 1),
        group=_group(document.get("group")),
    )


def _group(given: object) -> int | None:
    """Microbatches that pass through a chunk before the next, as we export it beside torchtitan's own fields."""
    if given is None or (type(given) is int and given > 0):
        return given
    raise UsageError(f"{_SOURCE}: group: {given!r} is no positive number")


def _recomputation(given: object) -> Recomputation:
    mode = given.get("mode", "none") if isinstance(given, Mapping) else given
    if mode not in {kind.value for kind in Recomputation}:
        raise UsageError(f"{_SOURCE}: activation_checkpoint: {mode!r}; expected none, selective or full")
    return Recomputation(str(mode))
