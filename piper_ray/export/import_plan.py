"""Layouts that people run today, as plans: Megatron's strings and older flags, torchtitan's lists of modules."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from piper_ray.export.megatron_layout import BLOCK, EMBEDDING, LOSS, check_layout, parse_layout
from piper_ray.export.torchtitan_modules import read_modules
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.model.settings import ALL_REPLICAS, Recomputation, Setting, Sharding, setting_of, tmpcs_under
from piper_ray.runtimes.pieces import ModelPieces, pieces_of


@dataclass(frozen=True)
class RunAs:
    """How a layout is run. None: as the layout says, or else 1, or what ranks are left for the data-parallel degree.

    recomputed_layers: with full recomputation, of each stage so many first blocks; None: all.
    """

    pipeline_ranks: int | None = None
    tensor_parallel: int | None = None
    context_parallel: int | None = None
    expert_parallel: int | None = None
    expert_tensor: int | None = None
    data_parallel: int | None = None
    schedule: ScheduleName | None = None
    recomputation: Recomputation | None = None
    recomputed_layers: int | None = None
    sequence_parallel: bool | None = None
    optimizer_shards: int | None = None
    weights_sharded: bool | None = None
    group: int | None = None

    def over(self, other: RunAs) -> RunAs:
        """These, and the other's where nothing is said here."""
        own = {name: value for name, value in vars(self).items() if value is not None}
        return replace(other, **own)


@dataclass(frozen=True)
class Imported:
    """A plan with the schedule that it runs under."""

    plan: Plan
    schedule: Schedule


def import_plan(instance: Instance, layout: str, run_as: RunAs) -> Imported:
    """layout: a Megatron layout string, Megatron's launch arguments, torchtitan's list of lists of module names, or the
    JSON object that ``export --to torchtitan`` writes.

    Raises UsageError or InputError that says where the layout is wrong, or what is missing.
    """
    pieces = pieces_of(instance)
    text = layout.strip()
    if text.startswith("--"):
        stages, said = _of_arguments(text, pieces, instance)
    elif text.startswith(("[", "{")):
        stages, said = _of_modules(text, pieces, instance)
    else:
        stages, said = None, RunAs()
    run_as = run_as.over(said)
    if stages is None:
        stages = _of_string(text, pieces, run_as.pipeline_ranks)
    return _plan(instance, pieces, stages, run_as)


def _of_string(text: str, pieces: ModelPieces, ranks: int | None) -> tuple[tuple[int, ...], ...]:
    parsed = parse_layout(text)
    check_layout(parsed, text, pieces.blocks, ranks or len(parsed))
    return _pieces_of_letters(parsed, pieces)


def _pieces_of_letters(letters: Sequence[str], pieces: ModelPieces) -> tuple[tuple[int, ...], ...]:
    block, stages = 0, []
    for stage in letters:
        found = []
        for letter in stage:
            block += letter == BLOCK
            found.append({EMBEDDING: 0, LOSS: pieces.blocks + 1}.get(letter, block))
        stages.append(tuple(found))
    return tuple(stages)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"Megatron arguments: {message}")


def _megatron_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="", add_help=False, allow_abbrev=False)
    for name in (
        "num-layers", "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
        "expert-model-parallel-size", "expert-tensor-parallel-size",
        "data-parallel-size", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
        "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank", "recompute-num-layers",
        "micro-batch-size", "global-batch-size", "microbatch-group-size-per-virtual-pipeline-stage",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int)
    for name in ("pipeline-model-parallel-layout", "recompute-granularity", "recompute-method"):
        parser.add_argument(f"--{name}")
    for name in (
        "sequence-parallel", "use-distributed-optimizer", "account-for-embedding-in-pipeline-split",
        "account-for-loss-in-pipeline-split", "recompute-activations",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true")
    return parser


def _of_arguments(text: str, pieces: ModelPieces, instance: Instance) -> tuple[tuple[tuple[int, ...], ...], RunAs]:
    """Flags that say nothing of the plan are left aside."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise UsageError(f"Megatron arguments: {error}") from None
    given, _ = _megatron_parser().parse_known_args(words)
    if given.num_layers not in (None, pieces.blocks):
        raise UsageError(f"Megatron arguments: --num-layers {given.num_layers}, but the model has {pieces.blocks}")
    _check_batch(instance, "Megatron arguments", given.micro_batch_size, given.global_batch_size)
    ranks = _positive("pipeline-model-parallel-size", given.pipeline_model_parallel_size or 1)
    said = RunAs(
        pipeline_ranks=ranks,
        tensor_parallel=given.tensor_model_parallel_size or 1,
        context_parallel=_given("context-parallel-size", given.context_parallel_size),
        expert_parallel=_given("expert-model-parallel-size", given.expert_model_parallel_size),
        expert_tensor=_given("expert-tensor-parallel-size", given.expert_tensor_parallel_size),
        data_parallel=given.data_parallel_size,
        recomputation=_megatron_recomputation(given),
        recomputed_layers=given.recompute_num_layers if given.recompute_method == "block" else None,
        sequence_parallel=given.sequence_parallel,
        optimizer_shards=0 if given.use_distributed_optimizer else 1,
        group=given.microbatch_group_size_per_virtual_pipeline_stage,
    )
    if given.pipeline_model_parallel_layout is not None:
        return _of_string(given.pipeline_model_parallel_layout, pieces, ranks), said
    return _pieces_of_letters(_older_flags(given, pieces.blocks, ranks), pieces), said


def _given(name: str, value: int | None) -> int | None:
    return None if value is None else _positive(name, value)


def _megatron_recomputation(given: argparse.Namespace) -> Recomputation:
    granularity = "selective" if given.recompute_activations else given.recompute_granularity
    try:
        return Recomputation(granularity or "none")
    except ValueError:
        raise UsageError(f"--recompute-granularity {granularity}: expected full or selective") from None


def _older_flags(given: argparse.Namespace, blocks: int, ranks: int) -> list[str]:
    """Megatron's even split, but for what first and last ranks are told to hold; chunks of a rank are alike."""
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
        if even % _positive("num-layers-per-virtual-pipeline-stage", per_chunk):
            raise UsageError(f"{even} layers of a rank are no multiple of {per_chunk} layers per virtual stage")
        chunks = even // per_chunk
    chunks = _positive("num-virtual-stages-per-pipeline-rank", 1 if chunks is None else chunks)
    if any(count % chunks for count in of_rank):
        raise UsageError(
            f"{' or '.join(map(str, sorted(set(of_rank))))} layers of a rank are not {chunks} equal chunks"
        )
    counts = [count // chunks for _ in range(chunks) for count in of_rank]
    return _with_ends(counts, embedding=bool(embedding), loss=bool(loss))


def _with_ends(counts: list[int], *, embedding: bool, loss: bool) -> list[str]:
    """Letters of each stage. embedding, loss: counted as a layer where they are."""
    counts[0] -= embedding
    counts[-1] -= loss
    if min(counts) < 0:
        raise UsageError("a stage has no room for the embedding or the loss layer that are to count as layers")
    letters = [BLOCK * count for count in counts]
    letters[0] = EMBEDDING + letters[0]
    letters[-1] += LOSS
    return letters


def _check_batch(instance: Instance, source: str, microbatch: object, batch: object) -> None:
    """Raises UsageError where the samples that the layout is run with are not the workload's."""
    samples = instance.batch.samples_per_microbatch
    if isinstance(microbatch, int) and samples is not None and microbatch != samples:
        raise UsageError(
            f"{source}: microbatches of {microbatch} samples; the workload's have {samples}, and its times are of these"
        )
    of_each = microbatch if isinstance(microbatch, int) else samples
    if isinstance(batch, int) and of_each and batch != instance.microbatches * of_each:
        raise UsageError(
            f"{source}: a batch of {batch} samples; the workload's has {instance.microbatches * of_each} "
            f"(--microbatches {batch // of_each})"
        )


def _positive(flag: str, value: int) -> int:
    if value < 1:
        raise UsageError(f"--{flag} {value}: expected a positive number")
    return value


def _of_modules(text: str, pieces: ModelPieces, instance: Instance) -> tuple[tuple[tuple[int, ...], ...], RunAs]:
    source = "torchtitan layout"
    try:
        document = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{source}: not JSON: {error}") from None
    if not isinstance(document, Mapping):
        return read_modules(source, document, pieces), RunAs()
    parallelism, training = document.get("parallelism"), document.get("training")
    if not isinstance(parallelism, Mapping):
        raise UsageError(f"{source}: parallelism is missing; expected torchtitan's fields, or a list of lists")
    said = _titan_run(source, parallelism, document)
    batch = training.get("global_batch_size") if isinstance(training, Mapping) else None
    _check_batch(instance, source, parallelism.get("pipeline_parallel_microbatch_size"), batch)
    parts = parallelism.get("module_fqns_per_model_part")
    if parts is None:
        if said.pipeline_ranks not in (None, 1):
            raise UsageError(f"{source}: parallelism.module_fqns_per_model_part is missing")
        return (tuple(range(pieces.blocks + 2)),), said
    return read_modules(source, parts, pieces, "parallelism.module_fqns_per_model_part"), said


def _titan_run(source: str, parallelism: Mapping[str, object], document: Mapping[str, object]) -> RunAs:
    from piper_ray.export.actions import TORCH_NAMES

    def number(name: str, usual: int) -> int:
        value = parallelism.get(name, usual)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{source}: parallelism.{name}: {value!r} is no positive number")
        return value

    named = parallelism.get("pipeline_parallel_schedule")
    schedules = {name: schedule for schedule, name in TORCH_NAMES.items()}
    if named is not None and named not in schedules:
        raise UsageError(f"{source}: pipeline_parallel_schedule: {named!r}; expected one of {', '.join(schedules)}")
    shards = number("data_parallel_shard_degree", 1)
    recomputation = document.get("activation_checkpoint", "none")
    if recomputation not in {kind.value for kind in Recomputation}:
        raise UsageError(f"{source}: activation_checkpoint: {recomputation!r}; expected none, selective or full")
    return RunAs(
        pipeline_ranks=number("pipeline_parallel_degree", 1),
        tensor_parallel=number("tensor_parallel_degree", 1),
        context_parallel=number("context_parallel_degree", 1),
        expert_parallel=number("expert_parallel_degree", 1),
        data_parallel=number("data_parallel_replicate_degree", 1) * shards,
        schedule=None if named is None else schedules[str(named)],
        recomputation=Recomputation(str(recomputation)),
        sequence_parallel=bool(parallelism.get("enable_sequence_parallel", True)),
        optimizer_shards=shards,
        weights_sharded=parallelism.get("fsdp_reshard_after_forward") == "always",
    )


def _plan(instance: Instance, pieces: ModelPieces, stages: Sequence[Sequence[int]], run_as: RunAs) -> Imported:
    for number, stage in enumerate(stages, start=1):
        if not any(pieces.members[piece] for piece in stage):
            raise UsageError(f"stage {number} holds nothing; plans have no empty stages")
    ranks = run_as.pipeline_ranks or len(stages)
    if len(stages) % ranks:
        raise UsageError(f"{len(stages)} stages are no multiple of {ranks} pipeline ranks")
    context = run_as.context_parallel or 1
    t = (run_as.tensor_parallel or 1) * context  # a plan's counts the devices of all groups
    d = run_as.data_parallel or max(1, instance.devices // (t * ranks))
    if d * t * ranks > instance.devices:
        raise UsageError(
            f"{d} replicas of {ranks} pipeline ranks with {t} devices each are {d * t * ranks}; "
            f"the workload has {instance.devices} devices (--devices)"
        )
    if instance.microbatches % d:
        raise UsageError(f"{d} replicas do not divide the {instance.microbatches} microbatches of a batch")
    schedule = _schedule(run_as, len(stages) // ranks)
    sharding = Sharding.WEIGHTS if run_as.weights_sharded else Sharding.OPTIMIZER
    shards = 1 if run_as.optimizer_shards is None else run_as.optimizer_shards
    if sharding is Sharding.WEIGHTS:
        shards *= context  # torchtitan's groups that share a sequence share weights, too
    experts = None if run_as.expert_parallel in (None, 1) else run_as.expert_parallel
    setting = Setting(
        run_as.recomputation or Recomputation.NONE,
        bool(run_as.sequence_parallel) and t > context,
        _shards(instance, d * context) if shards == 0 else shards,
        context=context,
        experts=experts,
        expert_tensor=1 if experts is None else run_as.expert_tensor or 1,
        sharding=sharding,
    )
    _check_known(instance, setting)
    plain = replace(setting, recomputation=Recomputation.NONE)
    found = []
    for stage in stages:
        blocks, tmpc_ids = 0, {}
        for piece in stage:
            is_block, first = pieces.is_block(piece), run_as.recomputed_layers
            recomputes = not is_block or first is None or blocks < first
            blocks += is_block
            for layer in pieces.members[piece]:
                tmpc_ids[layer] = _tmpc(instance, layer, t, d, setting if recomputes else plain).id
        layers = tuple(layer.id for layer in instance.layers if layer.id in tmpc_ids)
        found.append(Stage(layers, d, t, {layer: tmpc_ids[layer] for layer in layers}))
    return Imported(Plan(tuple(found), keeps_order=True), schedule)


def _shards(instance: Instance, d: int) -> int:
    """Megatron shares the state among all replicas; the workload knows it shared among all, or so many at most."""
    known = {one.optimizer_shards for one in _settings(instance) if one.shares[0] <= Sharding.OPTIMIZER}
    if ALL_REPLICAS in known:
        return ALL_REPLICAS
    return max((count for count in known if count <= d), default=1)


def _settings(instance: Instance) -> set[Setting]:
    return {setting_of(x) for layer in instance.layers for row in layer.tmpcs.values() for x in row}


def _check_known(instance: Instance, setting: Setting) -> None:
    """Raises UsageError for context or expert parallelism that the workload has no times of."""
    known = _settings(instance)
    if all(one.context != setting.context for one in known):
        raise UsageError(
            f"context parallelism {setting.context}: the workload has no such TMPCs "
            f"(estimate --context-parallel {setting.context})"
        )
    if all(one.spread != setting.spread for one in known):
        each = f" --expert-tensor-parallel {setting.expert_tensor}" if setting.expert_tensor > 1 else ""
        raise UsageError(
            f"expert parallelism {setting.experts}: the workload has no such TMPCs "
            f"(estimate --expert-parallel {setting.experts}{each})"
        )


def _schedule(run_as: RunAs, chunks: int) -> Schedule:
    usual = ScheduleName.INTERLEAVED if chunks > 1 else ScheduleName.ONE_F_ONE_B
    name = run_as.schedule or usual
    return Schedule(name, chunks, run_as.group if name is ScheduleName.INTERLEAVED else None)


def _tmpc(instance: Instance, layer: int, t: int, d: int, setting: Setting) -> Tmpc:
    found = instance.layer_by_id[layer]
    row = tuple(x for x in found.tmpcs.get(t, ()) if x.least_data_parallel_degree <= d)
    if not row:
        able = ", ".join(map(str, sorted(found.tmpcs)))
        raise UsageError(
            f'layer {layer} ("{found.name}") has no configuration at tensor-parallel degree {t} for {d} replicas; '
            f"it has some at {able}"
        )
    left = tmpcs_under(row, setting)
    if not left:
        raise UsageError(
            f'layer {layer} ("{found.name}") has no configuration with context parallelism {setting.context} '
            f"on {t} devices"
        )
    return left[0]
