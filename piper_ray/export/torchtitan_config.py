"""torchtitan's configuration as somebody runs it: a list of modules for each part, or the fields around it."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from piper_ray.export.actions import ONE_STAGE, TORCH_NAMES
from piper_ray.export.run_as import ALL, ReadLayout, RunAs, check_batch
from piper_ray.export.torchtitan_model import model_fields, require_titan_model
from piper_ray.export.torchtitan_modules import own_division, read_modules
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import printable
from piper_ray.model.instance import Instance
from piper_ray.model.recomputation import EVERY_SECOND_PRODUCT, Recomputation
from piper_ray.model.schedule import ScheduleName
from piper_ray.runtimes.pieces import ModelPieces

_SOURCE = "torchtitan layout"
_ALL_THAT_ARE_LEFT = -1
_BUILDER = "builder"
"""Of a table of the model as we export it; torchtitan's own names a flavor."""

READ_FIELDS = frozenset({
    "pipeline_parallel_degree", "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv",
    "pipeline_parallel_microbatch_size", "num_pp_microbatches", "pipeline_parallel_layers_per_stage",
    "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers",
    "module_fqns_per_model_part", "data_parallel_replicate_degree", "data_parallel_shard_degree",
    "fsdp_reshard_after_forward", "tensor_parallel_degree", "enable_sequence_parallel", "context_parallel_degree",
    "expert_parallel_degree", "expert_tensor_parallel_degree",
})  # fmt: skip
"""Of the parallelism table of torchtitan 0.2, 0.3 and main."""

HARMLESS_FIELDS = frozenset({
    "context_parallel_load_balancer", "context_parallel_ptrr_mask_key", "context_parallel_rotate_method",
    "disable_loss_parallel", "enable_async_tensor_parallel", "enable_compiled_autograd", "enable_fsdp_symm_mem",
    "expert_parallel_comm_backend", "local_batch_size", "spmd_backend",
})  # fmt: skip
"""Further ones, which decide nothing of a plan."""


def read_parts(parts: object, pieces: ModelPieces) -> ReadLayout:
    """Of a list of lists of module names. Raises InputError."""
    return ReadLayout(read_modules(_SOURCE, parts, pieces), RunAs())


def read_config(document: Mapping[str, object], pieces: ModelPieces, instance: Instance) -> ReadLayout:
    """Of the JSON that we export, or torchtitan's TOML of before. Raises UsageError or InputError."""
    parallelism, training = document.get("parallelism"), document.get("training")
    if not isinstance(parallelism, Mapping):
        raise UsageError(f"{_SOURCE}: parallelism is missing; expected torchtitan's fields, or a list of lists")
    for name in parallelism.keys() - READ_FIELDS - HARMLESS_FIELDS:
        meant = get_close_matches(str(name), READ_FIELDS, 1)
        hint = f"; did you mean {meant[0]}?" if meant else ""
        raise UsageError(f"{_SOURCE}: parallelism.{printable(str(name))} is not understood{hint}")
    said = _run_as(parallelism, document)
    if isinstance(training, Mapping):
        piped = said.pipeline_ranks != 1
        microbatch = (
            parallelism.get("pipeline_parallel_microbatch_size", 1) if piped else training.get("local_batch_size")
        )
        check_batch(instance, _SOURCE, microbatch, training.get("global_batch_size"), training.get("seq_len"))
    names = frozenset(parallelism.keys() & READ_FIELDS)
    if isinstance(given := document.get("model"), Mapping) and _BUILDER in given:
        names |= _same_model(given, instance)
    parts = parallelism.get("module_fqns_per_model_part")
    if parts is None:
        stages = _own_division(parallelism, pieces, said)
    else:
        stages = read_modules(_SOURCE, parts, pieces, "parallelism.module_fqns_per_model_part")
    return ReadLayout(stages, said, _notes(parallelism, document), names)


def _same_model(given: Mapping[str, object], instance: Instance) -> frozenset[str]:
    """The names of its figures. Raises UsageError where the document, as we export it, is of another model than the
    workload, or of one trained otherwise."""
    model = instance.model
    if model is not None:
        own = model_fields(require_titan_model(model), model, instance.batch.tokens_per_sample)
        said, planned = _flat(given), _flat(own)
        for name in sorted(said.keys() | planned.keys()):
            if said.get(name) != planned.get(name):
                raise UsageError(
                    f"{_SOURCE}: model.{printable(name)}: {printable(str(said.get(name)))}; "
                    f"the workload's is {planned.get(name)}"
                )
    layers = given.get("layers")
    return frozenset(map(str, (*given, *(layers if isinstance(layers, Mapping) else ()))))


def _flat(table: Mapping[str, object], within: str = "") -> dict[str, object]:
    """By names such as ``layers.n_heads``."""
    found: dict[str, object] = {}
    for name, value in table.items():
        found |= _flat(value, f"{within}{name}.") if isinstance(value, Mapping) else {f"{within}{name}": value}
    return found


def _notes(parallelism: Mapping[str, object], document: Mapping[str, object]) -> tuple[str, ...]:
    is_ours = "layers" in document  # whose file has the order of the schedule that is named
    if not parallelism.get("pipeline_parallel_schedule_csv") or is_ours:
        return ()
    return ("pipeline_parallel_schedule_csv is left aside: the plan is judged in the order of a named schedule",)


def _own_division(parallelism: Mapping[str, object], pieces: ModelPieces, said: RunAs) -> tuple[tuple[int, ...], ...]:
    """Where no part names its modules."""
    if said.pipeline_ranks in (None, 1):
        return (tuple(range(pieces.head + 1)),)
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
    all_shard = parallelism.get("data_parallel_shard_degree", _ALL_THAT_ARE_LEFT) == _ALL_THAT_ARE_LEFT
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
        expert_tensor=t if experts == 1 else _number(parallelism, "expert_tensor_parallel_degree", 1),
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
    known = {
        "none": Recomputation.NONE,
        "selective": Recomputation.of_parts([EVERY_SECOND_PRODUCT]),
        "full": Recomputation.FULL,
    }
    if not isinstance(mode, str) or mode not in known:
        raise UsageError(f"{_SOURCE}: activation_checkpoint: {mode!r}; expected {', '.join(known)}")
    return known[mode]
