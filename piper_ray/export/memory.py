"""``piper_ray.memory``: the memory of each rank of a layout, in any of the forms that users have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from piper_ray.calibrate.layouts import NO_RECOMPUTATION, NotExpressible, Untold, laid_out
from piper_ray.calibrate.memory import (
    LayoutMemory,
    are_words,
    layout_document,
    memory_of_ranks,
    run_of_words,
    traits_of,
)
from piper_ray.calibrate.runs import PublishedRun
from piper_ray.export.import_plan import read_layout
from piper_ray.export.run_as import ReadLayout
from piper_ray.launches.launch import THE_ONE, Asked, Source
from piper_ray.model import arguments
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.mode import ALL_REPLICAS, Recomputation
from piper_ray.runtimes.pieces import pieces_of
from piper_ray.workloads.estimate.build import EstimateRequest
from piper_ray.workloads.estimate.config import ModelConfig, read_model
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.hardware import Hardware, load_hardware
from piper_ray.workloads.estimate.layout import priced
from piper_ray.workloads.estimate.refusals import plain_instance
from piper_ray.workloads.estimate.software import DEFAULT_SOFTWARE, SoftwareFamily, load_software

_ANY_GPU = "H100-SXM"
"""The GPU if none is named; the memory of ranks does not depend on it."""

_FILLED = 4
"""Microbatches of a replica for each pipeline rank, if no batch is given; no more than these are in flight."""

_SAID = {"tokens": "seq", "microbatch_size": "microbatch"}
"""The names of parameters in runs, where they differ."""


@arguments.named_as_parameters({})
def memory(
    model: str | os.PathLike[str],
    layout: str,
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    tokens: int | None = None,
    microbatch_size: int | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    software: str | None = None,
    hardware: str | os.PathLike[str] | None = None,
) -> LayoutMemory:
    """The memory of each rank when a model is trained in this layout: by term, at its peak.

    model: a known name, an id of the hub, or the path of a config.json. layout: words such as "tp=4,pp=8,dp=2", or the
    text of Megatron's launch arguments, or of a configuration of torchtitan, FlagScale or Megatron-Bridge. gpu: the
    table's name of the GPU that it should fit on. gpus: the number of all GPUs, if the layout does not state the
    replicas.
    tokens: of a sample; microbatch_size, global_batch: in samples. precision, software: as in ``estimate``. Anything
    not stated is assumed, and listed in ``assumed`` of the result.

    Raises UsageError for arguments that make no sense, InputError for an invalid file or layout.

    >>> import piper_ray
    >>> found = piper_ray.memory("llama3-70b", "tp=4,pp=8,dp=2,mbs=1,gbs=128")
    >>> f"{found.needed_bytes / 2**30:.1f} GiB of each GPU"
    '74.0 GiB of each GPU'
    """
    arguments.of_kind("layout", layout, str, "a text, such as 'tp=4,pp=8,dp=2'")
    counts = {"gpus": gpus, "tokens": tokens, "microbatch_size": microbatch_size, "global_batch": global_batch}
    given: dict[str, object] = {name: arguments.positive_or_none(name, value) for name, value in counts.items()}
    given |= {"precision": precision, "software": software}
    table = load_hardware(None if hardware is None else os.fspath(hardware))
    return memory_of_layout(read_model(os.fspath(model)), Source(layout), table, gpu, given)


def memory_of_layout(
    config: ModelConfig,
    layout: Source,
    table: Hardware,
    gpu: str | None,
    given: Mapping[str, object],
    asked: Asked = THE_ONE,
) -> LayoutMemory:
    """The same for a model that is already read. given: further arguments, by ``memory``'s names; they may not
    contradict the layout. asked: which of the file's launches to read."""
    notes: list[str] = list(config.notes)
    recomputed: tuple[int, ...] | None = None
    shards: int | None = None
    if are_words(layout.text):
        run = run_of_words(layout.text)
    else:
        instance = plain_instance(
            config, table, EstimateRequest(nodes=1, precision=str(given.get("precision") or "bf16"))
        )
        read = read_layout(instance, layout, asked)
        run, notes = _run_of(read, instance), [*notes, *read.notes]
        recomputed, shards = _recomputed(read), _shards(read)
    run = _with(run, given)
    assumed: list[str] = []
    run = _completed(run, config, assumed)
    try:
        laid = laid_out(run, table, Untold(model=config, gpu=gpu or _ANY_GPU))
    except NotExpressible as error:
        raise UsageError(f"layout: {error}") from error
    laid = replace(laid, layout=replace(laid.layout, shards=shards))
    architecture = laid.model.architecture(Microbatch(1, laid.layout.tokens))
    plan = priced(laid.model, laid.stack, table.training, laid.layout)
    return LayoutMemory(
        model=config.name,
        parameters=architecture.parameters,
        layout=layout_document(laid.layout),
        software=laid.software,
        precision=laid.stack.precision.value,
        ranks=tuple(memory_of_ranks(plan, laid.layout, laid.layout.sharding, traits_of(run, laid), recomputed)),
        gpu=None if gpu is None else laid.stack.gpu.name,
        device_bytes=None if gpu is None else laid.stack.gpu.device_bytes,
        assumed=(*laid.assumed, *assumed),
        notes=tuple(notes),
    )


def _run_of(read: ReadLayout, instance: Instance) -> PublishedRun:
    """A runtime's layout as a run."""
    said, pieces = read.run_as, pieces_of(instance)
    ranks = said.pipeline_ranks or len(read.stages)
    sizes = [sum(map(pieces.is_block, stage)) for stage in read.stages]
    sizes[-1] += pieces.predictors
    is_titan = read.source.startswith("torchtitan")
    sharded = "fsdp" if said.weights_sharded else "none" if said.optimizer_shards in (None, 1) else "zero1"
    run = PublishedRun(
        tp=said.tensor_parallel or 1,
        pp=ranks,
        vpp=max(1, len(read.stages) // ranks),
        dp=said.data_parallel,
        cp=said.context_parallel or 1,
        ep=said.expert_parallel,
        etp=said.expert_tensor,
        gpus=said.world,
        group=said.group,
        microbatch=_count(read.batch, "microbatch_samples"),
        global_batch=_count(read.batch, "global_batch_samples"),
        seq=_count(read.batch, "tokens_per_sample"),
        sequence_parallel=bool(said.sequence_parallel),
        recompute=",".join((said.recomputation or Recomputation.NONE).parts) or "none",
        optimizer_sharding=sharded,
        optimizer_on_host=said.optimizer_on_host,
        schedule="" if said.schedule is None else said.schedule.value,
        software="torchtitan" if is_titan else "",
    )
    return run.model_copy(update={"stages": sizes})


def _count(said: Mapping[str, object], name: str) -> int | None:
    value = said.get(name)
    return value if isinstance(value, int) else None


def _recomputed(read: ReadLayout) -> tuple[int, ...] | None:
    """The number of first blocks of each stage that recompute; None: all, if any do."""
    given = read.run_as.recomputed_layers
    return (given,) * len(read.stages) if isinstance(given, int) else given


def _shards(read: ReadLayout) -> int | None:
    shards = read.run_as.optimizer_shards
    return None if shards in (None, 1, ALL_REPLICAS) else shards


def _with(run: PublishedRun, given: Mapping[str, object]) -> PublishedRun:
    """The run with additional arguments. Raises UsageError if the run states another value itself."""
    own = {_SAID.get(name, name): value for name, value in given.items() if value is not None}
    for name, value in own.items():
        known = getattr(run, name)
        if known not in (None, "", value):
            raise UsageError(f"layout: it says {name}={known}, and {name}={value} is given as well; leave one out")
    return run.model_copy(update=own)


def _completed(run: PublishedRun, config: ModelConfig, assumed: list[str]) -> PublishedRun:
    """The run with assumptions for what is not stated. Raises UsageError for what cannot be assumed."""
    t, p, c = run.tp or 1, run.pp or 1, run.cp or 1
    if run.dp is None and run.gpus is None:
        raise UsageError("layout: the number of replicas or of GPUs is missing; expected dp=8 or gpus=64, for example")
    replicas = run.dp or (run.gpus or 0) // (t * p * c)
    found: dict[str, Any] = {}
    if run.dp is None and replicas:
        found["dp"] = replicas
    if run.microbatch is None:
        found["microbatch"] = 1
        assumed.append("microbatches of 1 sample (mbs=)")
    samples = run.microbatch or 1
    if run.global_batch is None and replicas:
        found["global_batch"] = samples * replicas * _FILLED * p
        assumed.append("batches that fill the pipeline (gbs=)")
    if run.seq is None and config.tokens is not None:
        found["seq"] = config.tokens
        assumed.append(f"samples of {config.tokens:,} tokens (seq=)")
    if run.sequence_parallel is None and t > 1:
        found["sequence_parallel"] = True
        assumed.append("sequence parallelism (sp=false: none)")
    if not run.optimizer_sharding:
        known = load_software().get(run.software or DEFAULT_SOFTWARE)  # of another name laid_out tells
        shared = known is not None and known.family is SoftwareFamily.SHARDED
        found["optimizer_sharding"] = "fsdp" if shared else "zero1"
        assumed.append(f"{'weights' if shared else 'the optimizer state'} shared by all replicas (zero=0: not)")
    if not run.recompute:
        found["recompute"] = "none"
        assumed.append(f"{NO_RECOMPUTATION} (recompute=)")
    return run.model_copy(update=found)
