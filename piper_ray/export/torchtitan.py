"""torchtitan: reads and writes the part of its configuration that a plan determines, and lists of module names for each
part. In the exported launch, ``torchtitan.json`` holds plan and model, and ``piper_plan.py`` makes a config of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import accumulate, pairwise
from typing import Any

from piper_ray.export.files import Export, json_text, noted, rendered
from piper_ray.export.flags import READ_FIELDS, TITAN, TORCH_NAMES
from piper_ray.export.job import ExportJob
from piper_ray.export.left_aside import notes_of_model
from piper_ray.export.run_as import ReadLayout, RunAs
from piper_ray.export.stage_documents import ONE_STAGE, actions_csv
from piper_ray.export.torchtitan_model import BACKEND, model_fields, require_titan_model
from piper_ray.launches.launch import Launch, causes
from piper_ray.model.errors import Fault, InputError, UsageError
from piper_ray.model.figures import printable
from piper_ray.model.instance import Instance, TrainedModel, divisors
from piper_ray.model.mode import ALL_REPLICAS, EVERY_SECOND_PRODUCT, Recomputation
from piper_ray.model.schedule import CHUNKED, ScheduleName
from piper_ray.runtimes.pieces import ModelPieces
from piper_ray.simulate.run import Transfers
from piper_ray.workloads.estimate.software import TokenDispatcher

_EMBEDDING = "tok_embeddings"
_NORM = "norm"
_HEAD = "lm_head"
_HEADS = (_HEAD, "output")
"""torchtitan's name today, and its name until 0.2."""


def module_names(pieces: ModelPieces, stage: Sequence[int]) -> list[str]:
    """``["tok_embeddings", "layers.0"]`` or ``["norm", "lm_head"]``, from the pieces of a stage."""
    names = {0: [_EMBEDDING], pieces.head: [_NORM, _HEAD]}
    return [name for piece in stage for name in names.get(piece, [f"layers.{piece - 1}"])]


def own_division(
    blocks: int, ranks: int, *, chunked: bool, per_stage: int | None, first_less: int, last_less: int
) -> tuple[tuple[int, ...], ...]:
    """The pieces of each stage when torchtitan 0.3 divides a model itself: equally many layers in each, where the ends
    count as ``first_less`` and ``last_less`` layers, and one more in the first stages.

    chunked: whether the schedule has several stages on a rank. per_stage: layers of a stage; None: one stage, or two,
    on each rank. Raises UsageError for divisions that torchtitan refuses.
    """
    counted = blocks + first_less + last_less
    stages = ranks * (2 if chunked else 1) if per_stage is None else -(-counted // per_stage)
    layers = f"{blocks} layers and {first_less} and {last_less} for the ends"
    if stages % ranks:
        raise UsageError(f"torchtitan divides {layers} into {stages} stages, no multiple of {ranks} pipeline ranks")
    if (stages > ranks) != chunked:
        what = "several stages" if chunked else "one stage"
        raise UsageError(f"torchtitan divides {layers} into {stages} stages, and the schedule has {what} on each rank")
    least, more = divmod(counted, stages)
    if max(first_less, last_less, 1) > least:
        raise UsageError(f"{layers} leave too little for {stages} stages, which torchtitan refuses")
    counts = [least + (stage < more) for stage in range(stages)]
    counts[0] -= first_less
    counts[-1] -= last_less
    ends = [0, *accumulate(counts[:-1]), blocks]
    found = [list(range(begin + 1, end + 1)) for begin, end in pairwise(ends)]
    found[0].insert(0, 0)
    found[-1].append(blocks + 1)
    return tuple(map(tuple, found))


def read_modules(source: str, parts: object, pieces: ModelPieces, path: str = "") -> tuple[tuple[int, ...], ...]:
    """The pieces of each stage. Raises InputError with every unknown name, or with the first name that is out of
    order."""
    if not isinstance(parts, list) or not parts or not all(isinstance(part, list) and part for part in parts):
        raise InputError(source, [Fault(path, "is no list of lists of module names, none of them empty")])
    piece_of = {name: piece for piece in range(pieces.head + 1) for name in module_names(pieces, [piece])}
    expected = list(piece_of)
    named = [[_HEAD if name in _HEADS else name for name in part] for part in parts]
    found = [(f"{path}[{i}][{j}]", name) for i, part in enumerate(named) for j, name in enumerate(part)]
    faults = [
        Fault(
            where, f"{name!r} is no module here; expected {_EMBEDDING}, layers.0 to {expected[-3]}, {_NORM} or {_HEAD}"
        )
        for where, name in found
        if not isinstance(name, str) or name not in piece_of
    ]
    if faults:
        raise InputError(source, faults)
    for (where, name), wanted in zip(found, expected, strict=False):
        if name != wanted:
            raise InputError(source, [Fault(where, f"{name} stands where {wanted} is due")])
    if len(found) < len(expected):
        raise InputError(source, [Fault(path, f"ends where {expected[len(found)]} is due")])
    if len(found) > len(expected):
        where, name = found[len(expected)]
        raise InputError(source, [Fault(where, f"{name} comes after the last module")])
    if len(named[-1]) == 1:
        raise InputError(
            source, [Fault(found[-1][0], f"{_HEAD} is in another part than {_NORM}; plans keep them whole")]
        )
    return tuple(tuple(dict.fromkeys(piece_of[name] for name in part)) for part in named)


_SOURCE = "torchtitan layout"
_ALL_THAT_ARE_LEFT = -1
_ALL_TO_ALL = "standard"
_BUILDER = "builder"
"""The key that marks a model's table as exported by us; torchtitan's own table names a flavor."""

_FIGURES = {flag.name: flag.says for flag in TITAN.written if flag.says}
_BATCH = {flag.name: flag.says for flag in TITAN.training}

_CHECKPOINTS = {
    "none": Recomputation.NONE,
    "selective": Recomputation.of_parts([EVERY_SECOND_PRODUCT]),
    "full": Recomputation.FULL,
}


def titan_document(job: ExportJob) -> dict[str, object]:
    """The fields of torchtitan 0.3's config that the plan determines, and its model if the workload states it.

    Raises UsageError for settings that torchtitan has no field for, and for models that it cannot build.
    """
    if job.recomputation is None:
        raise UsageError("torchtitan has one activation-checkpoint setting for all layers; in this plan they differ")
    if job.expert_tensor > 1:
        raise UsageError("torchtitan has no tensor parallelism of experts apart from the others'; this plan has it")
    training: dict[str, object] = {
        "local_batch_size": job.microbatch_samples * (job.microbatches if job.pipeline_ranks > 1 else 1)
    }
    training |= {name: value for name, says in _BATCH.items() if (value := getattr(job, says)) is not None}
    further: dict[str, object] = {}
    if job.pipeline_ranks > 1 or (job.expert_parallel or 1) > 1:
        training["disable_cuda_graphs"] = True  # they are on by default, and refused in combination with these
    if (model := job.instance.model) is not None:
        further["compile"] = _compile(job, model)
        fields = model_fields(require_titan_model(model), model, job.tokens_per_sample)
        layers = fields["layers"]
        if isinstance(layers, Mapping) and BACKEND in layers:
            fields = {**fields, "layers": {**layers, BACKEND: _backend(job)}}
        further["model"] = fields
        training |= {
            "disable_cuda_graphs": True,  # the plan does not count their memory
            "dtype": "float32",
            "mixed_precision_param": "bfloat16",
            "mixed_precision_reduce": "float32",
        }
    if job.schedule.group is not None:
        further["group"] = job.schedule.group
    return {
        "layers": job.blocks,
        "parallelism": _parallelism(job),
        "training": training,
        "activation_checkpoint": next(name for name, kind in _CHECKPOINTS.items() if kind == job.recomputation),
        **further,
    }


def _backend(job: ExportJob) -> str:
    """torchtitan's name of the way that tokens reach experts: DeepEP within nodes, HybridEP if links join several
    nodes."""
    if job.dispatcher is not TokenDispatcher.ONCE_PER_NODE:
        return _ALL_TO_ALL
    return "hybridep" if job.links_join_nodes else "deepep"


def dispatcher_of_config(document: Mapping[str, object]) -> TokenDispatcher | None:
    """How tokens reach experts in a configuration: by all-to-all unless it names another way; None for an unknown
    way."""
    parallelism, spec, model = (document.get(name) for name in ("parallelism", "model_spec", "model"))
    layers = model.get("layers") if isinstance(model, Mapping) else None
    named = [
        table[name]
        for table, name in ((parallelism, "expert_parallel_comm_backend"), (spec, BACKEND), (layers, BACKEND))
        if isinstance(table, Mapping) and name in table
    ]
    known = {_ALL_TO_ALL: TokenDispatcher.ALL_TO_ALL} | dict.fromkeys(
        ("deepep", "hybridep"), TokenDispatcher.ONCE_PER_NODE
    )
    return known.get(str(named[0])) if named else TokenDispatcher.ALL_TO_ALL


def _parallelism(job: ExportJob) -> dict[str, object]:
    shards = shard_degree(job)
    found: dict[str, object] = {
        name: value for name, says in _FIGURES.items() if (value := getattr(job, says)) is not None
    }
    found |= {
        "data_parallel_replicate_degree": job.data_parallel // shards,
        "data_parallel_shard_degree": shards,
        "enable_sequence_parallel": job.sequence_parallel,
    }
    if shards * job.context_parallel > 1:
        found["fsdp_reshard_after_forward"] = "always" if job.shards_in_groups else "never"
    if job.pipeline_ranks > 1:
        found |= {
            "pipeline_parallel_schedule": TORCH_NAMES[job.schedule.name],
            "pipeline_parallel_microbatch_size": job.microbatch_samples,
            "module_fqns_per_model_part": [module_names(job.pieces, stage) for stage in job.pieces_of_stages],
        }
        if job.schedule.name not in ONE_STAGE:
            found["pipeline_parallel_schedule_csv"] = "schedule.csv"
    return {name: found[name] for name in (flag.name for flag in TITAN.written) if name in found}


def shard_degree(job: ExportJob) -> int:
    """data_parallel_shard_degree: the smallest divisor of d with at least as many shards as the plan and as many ranks
    as its experts need, since torchtitan spreads experts over these replicas, cp and t."""
    d, context = job.data_parallel, job.context_parallel
    wanted = 1 if job.optimizer_shards == 1 else -(-job.optimizer_shards // context)
    ranks = job.expert_parallel or 1
    within = context * job.tensor_parallel
    return next((n for n in divisors(d) if n >= wanted and n * within % ranks == 0), d)


def _compile(job: ExportJob, model: TrainedModel) -> dict[str, object]:
    """torch.compile as torchtitan's own configs use it: for blocks and loss, but for experts in bf16 only for the loss.

    Exchanges of tensor parallelism overlap with products if the plan assumes it; this needs compiled blocks.
    """
    blocks = compiles_blocks(job, model)
    return {
        "enable": True,
        "components": ["model", "loss"] if blocks else ["loss"],
        "enable_async_tensor_parallel": blocks and job.hides_tensor_exchanges and job.sequence_parallel,
    }


def compiles_blocks(job: ExportJob, model: TrainedModel) -> bool:
    """Whether blocks are compiled, or only the loss."""
    return not job.experts or model.precision == "fp8"


def read_parts(parts: object, pieces: ModelPieces) -> ReadLayout:
    """The layout of a list of lists of module names. Raises InputError."""
    return ReadLayout(read_modules(_SOURCE, parts, pieces), RunAs())


def read_config(launch: Launch, pieces: ModelPieces, instance: Instance) -> ReadLayout:
    """The layout of a configuration of any generation, or of the JSON that we export. Raises UsageError or
    InputError."""
    document = launch.settings
    parallelism = document.get("parallelism")
    if not isinstance(parallelism, Mapping):
        raise UsageError(f"{_SOURCE}: parallelism is missing; expected torchtitan's fields, or a list of lists")
    for name in parallelism.keys() - READ_FIELDS.union(TITAN.harmless):
        meant = get_close_matches(str(name), READ_FIELDS, 1)
        hint = f"; did you mean {meant[0]}?" if meant else ""
        raise UsageError(f"{_SOURCE}: parallelism.{printable(str(name))} is not understood{hint}")
    _require_elsewhere(document)
    said = _run_as(parallelism, document)
    notes = [*launch.notes, *_left_aside(parallelism, document, chunked=said.schedule in CHUNKED)]
    if isinstance(given := document.get("model"), Mapping) and _BUILDER in given:
        _require_same_model(given, instance)
    elif launch.model is not None:
        notes += notes_of_model(launch.model, instance)
    parts = parallelism.get("module_fqns_per_model_part")
    if parts is None:
        stages = _own_division(parallelism, pieces, said)
    else:
        stages = read_modules(_SOURCE, parts, pieces, "parallelism.module_fqns_per_model_part")
    # The lists of configurations other than ours follow torch's own order of receives.
    transfers = Transfers.IN_PASSES if _is_ours(document) else Transfers.ONE_STREAM
    return ReadLayout(stages, replace(said, world=launch.ranks), tuple(notes), _SOURCE, batch_of(document), transfers)


def batch_of(document: Mapping[str, object]) -> dict[str, object]:
    """The figures of a batch in a configuration, by their names in ``check_batch``."""
    parallelism, training = (document.get(name) for name in ("parallelism", "training"))
    if not isinstance(training, Mapping) or not isinstance(parallelism, Mapping):
        return {}
    found = {says: training.get(name) for name, says in _BATCH.items()}
    if isinstance(whole := found.get("global_batch_samples"), int) and whole <= 0:
        del found["global_batch_samples"]  # it then follows from the replicas
    local = training.get("local_batch_size")
    pipelined = parallelism.get("pipeline_parallel_degree", 1) != 1
    if pipelined and "microbatch_samples" not in training:
        found["local_samples"] = local
    if "microbatch_samples" in training:
        local = training["microbatch_samples"]
    elif pipelined:
        local = parallelism.get("pipeline_parallel_microbatch_size", 1)
    return found | {"microbatch_samples": local}


def _require_elsewhere(document: Mapping[str, object]) -> None:
    """Raises UsageError for a field of table ``parallelism`` in another table."""
    for table, values in document.items():
        for name in values if isinstance(values, Mapping) and table not in ("parallelism", "model") else ():
            if str(name) in READ_FIELDS:
                raise UsageError(f"{_SOURCE}: {table}.{name} stands in a place where it is not read")


def _require_same_model(given: Mapping[str, object], instance: Instance) -> None:
    """Raises UsageError if an exported document belongs to another model than the workload's, or to one trained in
    another way."""
    model = instance.model
    if model is None:
        return
    own = model_fields(require_titan_model(model), model, instance.batch.tokens_per_sample)
    said, planned = _flat(given), _flat(own)
    for name in sorted((said.keys() | planned.keys()) - {f"layers.{BACKEND}"}):
        if said.get(name) != planned.get(name):
            raise UsageError(
                f"{_SOURCE}: model.{printable(name)}: {printable(str(said.get(name)))}; "
                f"the workload's is {planned.get(name)}"
            )


def _flat(table: Mapping[str, object], within: str = "") -> dict[str, object]:
    """The table's values by names such as ``layers.n_heads``."""
    found: dict[str, object] = {}
    for name, value in table.items():
        found |= _flat(value, f"{within}{name}.") if isinstance(value, Mapping) else {f"{within}{name}": value}
    return found


def _is_ours(document: Mapping[str, object]) -> bool:
    """Whether we exported it. Then its file has the order of the named schedule, and receives just in time."""
    return "layers" in document


_UNSAID: tuple[object, ...] = (None, False, "", 0, [])
"""Values that ask for nothing."""


def _left_aside(parallelism: Mapping[str, object], document: Mapping[str, object], *, chunked: bool) -> Iterator[str]:
    if _is_ours(document):
        return
    if chunked:
        yield "torch posts receives early, where they hold up others on NCCL's one stream: the time counts that"
    if parallelism.get("pipeline_parallel_schedule_csv"):
        yield "pipeline_parallel_schedule_csv is ignored: the plan is judged in the order of a named schedule"
    found = [
        f"{table}.{name}"
        for table, values in document.items()
        if isinstance(values, Mapping) and table not in TITAN.harmless_tables
        for name, value in values.items()
        if f"{table}.{name}" in TITAN.costly or (table in TITAN.costly and name not in ("made_by", "arguments"))
        if value not in _UNSAID
    ]
    if found:
        yield f"not counted in times and memory, as plans have no such setting: {', '.join(found)}"
    known = {*TITAN.tables, *TITAN.harmless_tables, *(name.partition(".")[0] for name in TITAN.costly)}
    unknown = [name for name, value in document.items() if isinstance(value, Mapping) and name not in known]
    training = document.get("training")
    for name, value in training.items() if isinstance(training, Mapping) else ():
        if name not in TITAN.training_fields and f"training.{name}" not in TITAN.costly and value not in _UNSAID:
            unknown.append(f"training.{name}")
    if unknown:
        yield f"unknown, and ignored: {', '.join(map(printable, unknown))}"
    if isinstance(loss := document.get("loss"), Mapping) and "chunk" in str(loss.get("made_by")).lower():
        yield "torchtitan computes the loss in chunks of a sequence, which takes less memory than the plan counts on"
    optimizer = document.get("optimizer")
    named = str(optimizer.get("name", "adam")) if isinstance(optimizer, Mapping) else "adam"
    if "muon" in str(optimizer).lower() or "adam" not in named.lower():
        yield "the optimizer is another one than Adam, which times and memory are of"
    checkpoint = document.get("activation_checkpoint")
    option = checkpoint.get("selective_ac_option") if isinstance(checkpoint, Mapping) else None
    if isinstance(checkpoint, Mapping) and checkpoint.get("mode") == "selective" and option not in (None, "op"):
        yield (
            f"activation_checkpoint.selective_ac_option {option} recomputes one whole block of every few; the plan "
            "recomputes every second product of each"
        )


def _own_division(parallelism: Mapping[str, object], pieces: ModelPieces, said: RunAs) -> tuple[tuple[int, ...], ...]:
    """The division that torchtitan makes itself if no part names its modules."""
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
    if causes(value):
        raise UsageError(f"{_SOURCE}: parallelism.{name}: {causes(value)[0]} is not known here")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{_SOURCE}: parallelism.{name}: {value!r} is no whole number of at least {least}")
    return value


def _run_as(parallelism: Mapping[str, object], document: Mapping[str, object]) -> RunAs:
    named = parallelism.get("pipeline_parallel_schedule")
    if parallelism.get("pipeline_parallel_degree", 1) == 1:
        named = None  # it has no effect then
    schedules = {name: schedule for schedule, name in TORCH_NAMES.items()}
    if named is not None and named not in schedules:
        raise UsageError(f"{_SOURCE}: pipeline_parallel_schedule: {named!r}; expected one of {', '.join(schedules)}")
    figures: dict[str, Any] = {says: _number(parallelism, name, 1) for name, says in _FIGURES.items()}
    replicas = _number(parallelism, "data_parallel_replicate_degree", 1)
    all_shard = parallelism.get("data_parallel_shard_degree", _ALL_THAT_ARE_LEFT) == _ALL_THAT_ARE_LEFT
    if all_shard and replicas > 1:
        raise UsageError(
            f"{_SOURCE}: parallelism.data_parallel_shard_degree: {_ALL_THAT_ARE_LEFT} with {replicas} replicas; "
            "expected the number"
        )
    shards = 1 if all_shard else _number(parallelism, "data_parallel_shard_degree", 1)
    t = figures["tensor_parallel"]
    sequence = t > 1 and bool(parallelism.get("enable_sequence_parallel", True))
    gathered = parallelism.get("fsdp_reshard_after_forward", "default")
    return RunAs(
        **figures,
        expert_tensor=(
            t if figures["expert_parallel"] == 1 else _number(parallelism, "expert_tensor_parallel_degree", 1)
        ),
        data_parallel=None if all_shard else replicas * shards,
        schedule=None if named is None else schedules[str(named)],
        recomputation=recomputation_of_config(document),
        sequence_parallel=sequence,
        optimizer_on_host=False,
        dispatcher=dispatcher_of_config(document),
        overlaps_experts=None,
        gathered=sequence,  # autograd keeps it
        # Groups that share a sequence also divide weights.
        optimizer_shards=ALL_REPLICAS if all_shard else shards * figures["context_parallel"],
        weights_sharded=gathered == "always" or (gathered == "default" and figures["pipeline_ranks"] == 1),
        group=_group(document.get("group")),
    )


def _group(given: object) -> int | None:
    """Microbatches that pass through a chunk before the next; we export it in addition to torchtitan's own fields."""
    if given is None or (type(given) is int and given > 0):
        return given
    raise UsageError(f"{_SOURCE}: group: {given!r} is no positive number")


def recomputation_of_config(document: Mapping[str, object]) -> Recomputation:
    """The recomputation in a configuration. Raises UsageError."""
    given = document.get("activation_checkpoint", "none")
    mode = given.get("mode", "none") if isinstance(given, Mapping) else given
    if not isinstance(mode, str) or mode not in _CHECKPOINTS:
        raise UsageError(f"{_SOURCE}: activation_checkpoint: {mode!r}; expected {', '.join(_CHECKPOINTS)}")
    return _CHECKPOINTS[mode]


def export_torchtitan(job: ExportJob) -> Export:
    """The files and their usage."""
    document = titan_document(job)
    model = job.instance.model
    files = {
        "torchtitan.json": json_text(document),
        "piper_plan.py": rendered("torchtitan_plan.py.jinja", knows_model=model is not None),
    }
    if job.pipeline_ranks > 1 and job.schedule.name not in ONE_STAGE:
        files["schedule.csv"] = actions_csv(job)
    base, data = "PIPER_BASE=torchtitan.models.MODEL.config_registry:CONFIG ", ""
    usage = ""
    if model is not None:
        base, data, usage = "", ' --hf_assets_path "${TOKENIZER:?a folder with the tokenizer}"', _USAGE
    notes = noted(
        "torchtitan_notes.jinja",
        job=job,
        model=model,
        sharded=shard_degree(job) * job.context_parallel,
        compiled=model is not None and compiles_blocks(job, model),
        keeps_all=job.recomputation == Recomputation.NONE,
    )
    command = f"PYTHONPATH=. {base}{job.torchrun} -m torchtitan.train --module piper_plan --config planned{data}"
    return Export(files, command, notes, usage=usage)


_USAGE = """torchtitan's own config of such a model says the data set (c4), the optimizer's figures and the number of
steps: further arguments change them, such as `--training.steps 1000` or, for 0.3, `--dataloader.dataset_path PATH`.
"""
