"""Turns layouts of other tools into plans: layout strings, whole launches, torchtitan's lists, and our own exports."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby

import yaml

from piper_ray.export import megatron_arguments
from piper_ray.export.megatron_layout import read_string
from piper_ray.export.run_as import AS_IT_SAYS, ReadLayout, RunAs, RunMesh, check_batch
from piper_ray.export.stage_documents import is_stage_document, read_stage_document
from piper_ray.export.torchtitan import read_config, read_parts
from piper_ray.launches.launch import THE_ONE, Asked, Dialect, Source
from piper_ray.launches.read import document_of, read_launch
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import plural, printable
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.mode import ALL_REPLICAS, Mode, Recomputation, Sharding
from piper_ray.model.one_mode import missing_of, tmpcs_under
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.runtimes.pieces import ModelPieces, pieces_of
from piper_ray.simulate.actions import group_size
from piper_ray.simulate.run import Transfers
from piper_ray.workloads.estimate.exchanges import dispatcher_of
from piper_ray.workloads.formats.documents import advice

FORMS = (
    "a Megatron layout string, Megatron's launch arguments, a launch script, torchtitan's list of lists of module "
    "names or its configuration, one of FlagScale, Primus or Megatron-Bridge, or a file of an exported folder"
)
"""The readable forms, in words for messages."""


@dataclass(frozen=True)
class Imported:
    """A plan with its schedule. notes: a sentence for each part of the layout that a plan does not hold.
    transfers: how its stages pass on tensors. flushes: per batch, if its pipelines run empty several times."""

    plan: Plan
    schedule: Schedule
    notes: tuple[str, ...] = ()
    transfers: Transfers = Transfers.IN_PASSES
    flushes: int = 1


def import_plan(
    instance: Instance, layout: str | Source, run_as: RunAs = AS_IT_SAYS, asked: Asked = THE_ONE
) -> Imported:
    """The plan of a layout. layout: a text in one of the ``FORMS``, possibly with its file. asked: which of the file's
    launches to read.

    Raises UsageError or InputError that states where the layout is wrong, or what is missing.
    """
    source = layout if isinstance(layout, Source) else Source(layout)
    text = source.text.strip()
    document = document_of(text)
    if isinstance(document, Mapping) and is_stage_document(document):
        if (given := replace(run_as, world=None)) != RunAs():
            names = ", ".join(name for name, value in vars(given).items() if value is not None)
            raise UsageError(f"a plan with the TMPC of each module says itself how it is run; leave out {names}")
        return Imported(*read_stage_document("layout", document, instance))
    pieces = pieces_of(instance)
    read = _read(source, document, pieces, instance, run_as, asked)
    check_batch(instance, read.source, read.batch)
    if read.run_as.meshes:
        for name in ("pipeline_ranks", "tensor_parallel"):
            if getattr(run_as, name) is not None:
                raise UsageError(
                    f"{read.source}: each mesh has its own {name.replace('_', ' ')}: leave that option out"
                )
    return _plan(instance, pieces, read, run_as.over(read.run_as))


def read_layout(instance: Instance, source: Source, asked: Asked = THE_ONE) -> ReadLayout:
    """The content of a layout of a model, independent of the instance's devices and batch. Raises UsageError or
    InputError."""
    document = document_of(source.text.strip())
    if isinstance(document, Mapping) and is_stage_document(document):
        raise UsageError("a plan with the TMPC of each module holds for its own workload: simulate shows its memory")
    return _read(source, document, pieces_of(instance), instance, RunAs(), asked)


def _read(
    source: Source, document: object, pieces: ModelPieces, instance: Instance, run_as: RunAs, asked: Asked
) -> ReadLayout:
    text = source.text.strip()
    if isinstance(document, list):
        return read_parts(document, pieces)
    if not isinstance(document, Mapping) and "\n" not in text and _LETTERS.fullmatch(text):
        return ReadLayout(read_string(text, pieces, run_as.pipeline_ranks), RunAs())
    if (launch := read_launch(source, asked)) is not None:
        if launch.dialect is Dialect.TORCHTITAN:
            return read_config(launch, pieces, instance)
        return megatron_arguments.read_settings(launch, pieces, instance)
    raise UsageError(f"layout: {_no_layout(text, document)}; expected {FORMS}")


_LETTERS = re.compile(r"[^\s=\[{-]*|[EtLm\d|*(), ]*")
"""Texts that may be layout strings, valid or not."""


def _no_layout(text: str, document: object) -> str:
    """What kind of text it is, for a text that is not a layout."""
    if isinstance(document, Mapping):
        kind = advice(document)
        return "parallelism is missing" if kind is None else f"not a layout but {kind}"
    if text.startswith(("[", "{")):
        return "not JSON"
    if "\n" in text and ":" in text:
        with suppress(ValueError, RecursionError):
            try:
                yaml.safe_load(text)
            except yaml.YAMLError as error:
                mark = getattr(error, "problem_mark", None)
                return f"{'' if mark is None else f'line {mark.line + 1}: '}not YAML"
        return "not YAML"
    return "several lines that are no layout" if "\n" in text else "no layout"


def _plan(instance: Instance, pieces: ModelPieces, read: ReadLayout, run_as: RunAs) -> Imported:
    stages = read.stages
    for number, stage in enumerate(stages, start=1):
        if not any(pieces.members[piece] for piece in stage):
            raise UsageError(f"stage {number} holds nothing; plans have no empty stages")
    ranks = run_as.pipeline_ranks or len(stages)
    if len(stages) % ranks:
        raise UsageError(f"{len(stages)} stages are no multiple of {ranks} pipeline ranks")
    counts = _recomputed_blocks(pieces, stages, run_as)
    context = run_as.context_parallel or 1
    known = {tmpc.mode for layer in instance.layers for row in layer.tmpcs.values() for tmpc in row}
    meshes = run_as.meshes_of(ranks)
    for mesh in meshes:
        _require_degree(instance, known, context, mesh.tensor_parallel)
    d = _replicas(instance, run_as, context, meshes)
    notes = [*read.notes, *read.of_times, *_place_of_state(instance, run_as), *_way_to_experts(instance, run_as)]
    if instance.cluster.kinds and not run_as.meshes:
        meshes = _on_kinds(instance, run_as.kinds, meshes[0], d * context * meshes[0].tensor_parallel, notes)
    if run_as.sequence_parallel and all(mesh.tensor_parallel == 1 for mesh in meshes):
        notes.append("sequence parallelism has no effect at tensor-parallel degree 1")
    schedule = _schedule(run_as, len(stages) // ranks, ranks, instance.microbatches // d)
    of_ranks = [
        (mesh, _setting(instance, known, run_as, mesh, d, notes)) for mesh in meshes for _ in range(mesh.pipeline_ranks)
    ]
    found, chosen = [], []
    for number, (stage, count) in enumerate(zip(stages, counts, strict=True)):
        mesh, setting = of_ranks[number % ranks]
        t = mesh.tensor_parallel * context  # a plan's t counts the devices of all groups
        plain = replace(setting, recomputation=Recomputation.NONE)
        keeping = [piece for piece in stage if pieces.is_block(piece)][count:]
        tmpcs = {}
        for piece in stage:
            wanted = plain if piece in keeping else setting
            for layer in pieces.members[piece]:
                tmpcs[layer] = _tmpc(instance, layer, mesh.kind, t, d, wanted)
                chosen.append((tmpcs[layer], wanted))
        layers = tuple(layer.id for layer in instance.layers if layer.id in tmpcs)
        found.append(Stage(layers, d, t, {layer: tmpcs[layer].id for layer in layers}, mesh.kind))
    notes += (f"read without {text}: layers have no such configuration at these degrees" for text in missing_of(chosen))
    if (left := instance.devices - sum(stage.devices for stage in found[:ranks])) > 0:
        notes.append(f"it leaves {left:,} of the {instance.devices:,} devices idle")
    flushes = _flushes(instance, read, d)
    if flushes > 1:
        notes.append(f"gradients of {flushes} local batches are summed: pipelines run empty {flushes} times a batch")
    return Imported(
        Plan(tuple(found), keeps_order=True), schedule, tuple(dict.fromkeys(notes)), read.transfers, flushes
    )


def _flushes(instance: Instance, read: ReadLayout, d: int) -> int:
    """How often a pipeline runs empty in a batch. A layout may process a batch in several parts."""
    local = read.batch.get("local_samples")
    samples = instance.microbatches * (instance.batch.samples_per_microbatch or 1) // d
    return samples // local if isinstance(local, int) and local > 0 and samples % local == 0 else 1


def _place_of_state(instance: Instance, run_as: RunAs) -> Iterator[str]:
    """A sentence if the optimizer's state is elsewhere than in the workload."""
    on_host = instance.model is not None and instance.model.optimizer_on_host
    if run_as.optimizer_on_host is not None and run_as.optimizer_on_host != on_host:
        places = ("on GPUs", "in host memory")
        yield (
            f"the optimizer's state is {places[not on_host]}: the workload has it {places[on_host]}, and times and "
            f"memory are of that (estimate --zero all {'--no' if on_host else '-'}-optimizer-on-host)"
        )


def _way_to_experts(instance: Instance, run_as: RunAs) -> Iterator[str]:
    """A sentence if tokens reach experts in another way than in the workload's times, or in an unknown way."""
    ranks = (run_as.expert_parallel or 1) * (run_as.expert_tensor or 1)
    if ranks == 1 or instance.model is None or not any(layer.experts for layer in instance.layers):
        return
    own = dispatcher_of(instance.model, ranks)
    if run_as.overlaps_experts and not instance.model.expert_overlap:
        yield (
            "experts' exchanges overlap with passes, which the workload's times leave out (estimate --overlap experts)"
        )
    if run_as.dispatcher is None:
        yield f"it does not say how tokens reach experts: times are of {own.value} (--dispatcher)"
    elif run_as.dispatcher is not own:
        yield (
            f"tokens reach experts by {run_as.dispatcher.value}, and the workload's times are of {own.value} "
            f"(estimate --dispatcher {run_as.dispatcher.value})"
        )


def _recomputed_blocks(pieces: ModelPieces, stages: Sequence[Sequence[int]], run_as: RunAs) -> Sequence[int]:
    """The number of first blocks that recompute in each stage, if any do. Raises UsageError if it exceeds every
    stage."""
    given = run_as.recomputed_layers
    blocks = [sum(map(pieces.is_block, stage)) for stage in stages]
    if given is None:
        return blocks
    if run_as.recomputation != Recomputation.FULL:
        raise UsageError(
            f"{given} recomputed layers of each stage are for full recomputation alone; expected full recomputation too"
        )
    counts = [given] * len(stages) if isinstance(given, int) else given
    if len(counts) != len(stages):
        raise UsageError(f"recomputed layers of {len(counts)} stages, where there are {len(stages)}")
    if max(counts) > max(blocks):
        raise UsageError(
            f"{max(counts)} layers of a stage are recomputed; no stage has more than {plural(max(blocks), 'layer')}"
        )
    return counts


def _advice(instance: Instance, option: str) -> str:
    """The option of ``estimate`` that adds the missing TMPCs to a workload; empty for a measured workload."""
    return "" if instance.model is None else f" (estimate {option})"


def _require_degree(instance: Instance, known: Collection[Mode], context: int, t: int) -> None:
    """Raises UsageError if the workload does not have this context parallelism, or this degree in each of its groups.
    known: the modes of its TMPCs."""
    if all(mode.context != context for mode in known):
        raise UsageError(
            f"context parallelism {context}: the workload has no such TMPCs"
            f"{_advice(instance, f'--context-parallel {context}')}"
        )
    if t * context not in instance.degrees:
        groups = f" in each of {context} groups" if context > 1 else ""
        raise UsageError(
            f"tensor parallelism {t}{groups}: the layers have no configuration at "
            f"tensor-parallel degree {t * context}; expected one of {', '.join(map(str, instance.degrees))}"
        )


def _on_kinds(
    instance: Instance, kinds: Sequence[str] | None, mesh: RunMesh, devices: int, notes: list[str]
) -> tuple[RunMesh, ...]:
    """A mesh for each run of pipeline ranks on one kind. kinds: of the ranks, if they are known; else ranks fill the
    kinds in the order of the workload. devices: of a pipeline rank. Raises UsageError for a rank on devices of two
    kinds."""
    if kinds is None:
        order = [(kind.name, kind.cluster.devices) for kind in instance.cluster.kinds]
        kinds = [name for name, of_kind in order for _ in range(of_kind // devices)][: mesh.pipeline_ranks]
        for name, of_kind in order if kinds else ():
            if of_kind % devices and (len(kinds) < mesh.pipeline_ranks or name != kinds[-1]):
                raise UsageError(
                    f"pipeline ranks of {plural(devices, 'device')}, which do not divide the {of_kind:,} of {name}: "
                    "one would be on devices of two kinds. A configuration of FlagScale says the kind of each "
                    "(hetero_device_types)"
                )
            if name == kinds[-1]:
                break
        notes.append(
            f"it does not say the kind of each stage: its ranks fill the devices in the order of the workload "
            f"({', '.join(name for name, _ in order)})"
        )
    if len(kinds) != mesh.pipeline_ranks or not {*kinds} <= {*instance.cluster.kind_names}:
        raise UsageError(
            f"{plural(mesh.pipeline_ranks, 'pipeline rank')} of {plural(devices, 'device')} each, where there is room "
            f"for {len(kinds)} on {', '.join(instance.cluster.kind_names)}"
        )
    return tuple(replace(mesh, kind=kind, pipeline_ranks=len([*alike])) for kind, alike in groupby(kinds))


def _replicas(instance: Instance, run_as: RunAs, context: int, meshes: Sequence[RunMesh]) -> int:
    """d, as given or as the devices allow. Raises UsageError if it does not fit the cluster or the batch."""
    devices = run_as.world or instance.devices
    ranks = sum(mesh.pipeline_ranks * mesh.tensor_parallel for mesh in meshes) * context
    d = run_as.data_parallel or devices // ranks
    if d < 1 or d * ranks > instance.devices:
        each = " and ".join(
            f"{plural(one.pipeline_ranks, 'pipeline rank')} with {plural(one.tensor_parallel * context, 'device')} each"
            for one in meshes
        )
        raise UsageError(
            f"{plural(max(d, 1), 'replica')} of {each} are {max(d, 1) * ranks}; "
            f"the workload has {instance.devices} devices (--devices)"
        )
    if instance.microbatches % d:
        why = "" if run_as.data_parallel else f" (of {devices:,} devices, {ranks} in each)"
        raise UsageError(
            f"{plural(d, 'replica')} do not divide the {instance.microbatches} microbatches of a batch{why}; expected "
            "a data-parallel degree that does, or other devices"
        )
    return d


def _setting(
    instance: Instance, known: Collection[Mode], run_as: RunAs, mesh: RunMesh, d: int, notes: list[str]
) -> Mode:
    """The mode that layers of a mesh should run in. known: the modes of the workload's TMPCs. notes: extended by
    sentences on differences. Raises UsageError for expert parallelism that the workload does not have."""
    context = run_as.context_parallel or 1
    sequence = bool(run_as.sequence_parallel) and mesh.tensor_parallel > 1
    sharding, shards = _shards(instance, known, run_as, d * context, notes)
    experts, each = _spread(instance, known, mesh, run_as.expert_tensor or 1, notes)
    if experts is not None and (ranks := d * context * mesh.tensor_parallel) % (experts * each):
        raise UsageError(
            f"expert parallelism {experts} with {plural(each, 'device')} for each expert needs {experts * each} devices"
            f" of a stage, or a multiple of that; each stage has {ranks}. Set expert_tensor_parallel_size, such as 1: "
            "if it is left out, Megatron takes the tensor-parallel degree"
        )
    recomputation = run_as.recomputation or Recomputation.NONE
    return Mode(
        recomputation,
        sequence,
        shards,
        context=context,
        experts=experts,
        expert_tensor=each,
        sharding=sharding,
        gathered=sequence and bool(run_as.gathered) and recomputation == Recomputation.NONE,
    )


def _spread(
    instance: Instance, known: Collection[Mode], mesh: RunMesh, each: int, notes: list[str]
) -> tuple[int | None, int]:
    """The spread of experts; None: over the t devices, which is the default of workloads. each: devices for each
    expert."""
    experts, t = mesh.expert_parallel, mesh.tensor_parallel
    if experts is None or not any(layer.experts for layer in instance.layers):
        if experts in (None, 1):
            return None, 1
    elif (experts, each) == (t, 1):
        return None, 1
    if any(one.spread == (experts, each) for one in known):
        return experts, each
    if experts == 1:
        notes.append(
            f"expert parallelism 1, each expert on {plural(each, 'device')}: the workload has no such TMPCs; the plan "
            f"spreads experts over its {plural(t, 'device')}"
        )
        return None, 1
    divided = f" --expert-tensor-parallel {each}" if each > 1 else ""
    advice = _advice(instance, f"--expert-parallel {experts}{divided}")
    raise UsageError(f"expert parallelism {experts}: the workload has no such TMPCs{advice}")


_SHARED = {Sharding.OPTIMIZER: "the optimizer's state", Sharding.WEIGHTS: "weights, gradients and optimizer state"}
_OFFERS = {Sharding.OPTIMIZER: "--zero all", Sharding.WEIGHTS: "--fsdp SHARDS"}


def _shards(
    instance: Instance, known: Collection[Mode], run_as: RunAs, replicas: int, notes: list[str]
) -> tuple[Sharding, int]:
    """What replicas divide and how many do: as in the layout if the workload has it, else the nearest that needs more
    memory.

    replicas: the number of replicas of a weight.
    """
    asked = replicas if run_as.optimizer_shards == ALL_REPLICAS else run_as.optimizer_shards or 1
    what = Sharding.WEIGHTS if run_as.weights_sharded else Sharding.OPTIMIZER
    if asked > replicas:
        raise UsageError(f"{asked} shards of {_SHARED[what]}, but {plural(replicas, 'replica')}; expected no more")
    if asked == 1:
        return Sharding.OPTIMIZER, 1
    for kind in dict.fromkeys((what, Sharding.OPTIMIZER)):
        counts = {one.optimizer_shards for one in known if one.sharding is kind}
        if asked in counts:
            found = asked
        elif ALL_REPLICAS in counts and asked == replicas:
            found = ALL_REPLICAS
        else:
            found = max((count for count in counts if 1 < count <= asked), default=1)
        if found == 1:
            continue
        if kind is not what:
            notes.append(f"{_SHARED[what]} in {asked} shards: the workload has {_SHARED[kind]} shared alone")
        if found not in (asked, ALL_REPLICAS):
            notes.append(
                f"{_SHARED[kind]} in {asked} shards: the workload has {found} at most, which takes more memory"
                f"{_advice(instance, _OFFERS[kind])}"
            )
        return kind, found
    notes.append(
        f"{_SHARED[what]} in {asked} shards: the workload has no such TMPCs, and each replica of the plan holds all of "
        f"it{_advice(instance, _OFFERS[what])}"
    )
    return Sharding.OPTIMIZER, 1


def _schedule(run_as: RunAs, chunks: int, ranks: int, microbatches: int) -> Schedule:
    """The schedule of the layout. microbatches: of a replica."""
    usual = ScheduleName.INTERLEAVED if chunks > 1 else ScheduleName.ONE_F_ONE_B
    name, group = run_as.schedule or usual, run_as.group
    if name is not ScheduleName.INTERLEAVED or group == group_size(ranks, microbatches, None):
        group = None  # None means the usual one
    return Schedule(name, chunks, group)


def _tmpc(instance: Instance, layer: int, kind: str, t: int, d: int, setting: Mode) -> Tmpc:
    found = instance.layer_by_id[layer]
    named = f'layer {layer} ("{printable(found.name)}")'
    row = tuple(x for x in found.tmpcs.get(t, ()) if x.kind == kind and x.least_data_parallel_degree <= d)
    if not row:
        able = ", ".join(map(str, sorted(found.tmpcs)))
        for_replicas = f"at tensor-parallel degree {t} for {plural(d, 'replica')}"
        raise UsageError(f"{named} has no configuration {for_replicas}; it has some at {able}")
    left = tmpcs_under(row, setting)
    if not left:
        raise UsageError(
            f"{named} has no configuration with context parallelism {setting.context} on {plural(t, 'device')}"
        )
    return left[0]
