"""The layout of a published run, and the assumptions where the run does not state it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

from pydantic import BaseModel

from piper_ray.calibrate.runs import WORDS, PublishedRun, overlaps_of
from piper_ray.model.arguments import choice
from piper_ray.model.errors import InputError, UsageError
from piper_ray.model.mode import CHEAP, EVERY_SECOND_PRODUCT, Recomputation, Sharding, parse_recomputation
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.workloads.estimate.config import ModelConfig, model_of_config, read_model
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.hardware import Hardware
from piper_ray.workloads.estimate.layout import Layout
from piper_ray.workloads.estimate.operators import LayerKind
from piper_ray.workloads.estimate.software import (
    BALANCED,
    DEFAULT_SOFTWARE,
    Precision,
    Software,
    Stack,
    context_exchange_named,
    dispatcher_named,
    graphs_named,
    precision_named,
    software_named,
    stack_of,
)

NO_RECOMPUTATION = "no recomputation"
"""The assumption if a run does not mention recomputation."""

_T = TypeVar("_T")
_Table = TypeVar("_Table", bound=BaseModel)


class NotExpressible(Exception):
    """Why a run cannot be priced."""


@dataclass(frozen=True)
class Untold:
    """Values for runs that do not state them. None: the usual value, or a reason not to price the run."""

    model: ModelConfig | None = None
    gpu: str | None = None
    gpus_per_node: int | None = None
    software: str | None = None
    precision: Precision | None = None
    imbalance: float | None = None


@dataclass(frozen=True)
class Laid:
    """A run in the estimator's terms. software: the key of its generation. assumed: what the run does not state."""

    model: ModelConfig
    software: str
    stack: Stack
    layout: Layout
    assumed: tuple[str, ...]

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The model's kinds of layers."""
        return self.model.architecture(Microbatch(1, self.layout.tokens)).kinds

    @property
    def has_experts(self) -> bool:
        """Whether the model has routed experts."""
        return any(kind.experts for kind in self.kinds)


def laid_out(run: PublishedRun, hardware: Hardware, untold: Untold = Untold()) -> Laid:
    """Converts a run. Raises NotExpressible with all reasons if that is not possible."""
    assumed: list[str] = []
    reasons: dict[str, None] = {}

    def tried(make: Callable[[], _T]) -> _T | None:
        try:
            return make()
        except (UsageError, InputError, NotExpressible) as error:
            reasons[" ".join(str(error).split())] = None
        return None

    for name, meaning in WORDS.items():
        if word := getattr(run, name):
            tried(partial(meaning, word))
    model = tried(lambda: _model(run, untold))
    software = tried(lambda: _generation(run, untold, assumed)) or DEFAULT_SOFTWARE
    stack = tried(lambda: _stack(run, software, hardware, untold, assumed))
    degrees = tried(lambda: _degrees(run, assumed))
    if model is not None and stack is not None and degrees is not None:
        layout = tried(lambda: _layout(run, model, stack.software, degrees, assumed))
        if layout is not None and not reasons:
            return Laid(model, software, replace(stack, devices=layout.devices), layout, tuple(assumed))
    raise NotExpressible("; ".join(reasons))


def _model(run: PublishedRun, untold: Untold) -> ModelConfig:
    described = run.model
    if untold.model is not None and not described.config:
        return untold.model
    if isinstance(described.config, str):
        return read_model(described.config)
    if not described.config:
        raise NotExpressible("model: no config; expected a Hugging Face config, or the name of a known model")
    config = dict(described.config)
    for key in ("max_position_embeddings", "n_positions"):
        known = config.get(key)
        if isinstance(known, int) and run.seq is not None:
            config[key] = max(known, run.seq)  # a run may have longer sequences than its config's own training
    return model_of_config(described.name or run.id, config)


SHARDINGS = {
    "": Sharding.NONE,
    "none": Sharding.NONE,
    "zero1": Sharding.OPTIMIZER,
    "zero2": Sharding.GRADIENTS,
    "fsdp": Sharding.WEIGHTS,
    "distributed optimizer": Sharding.OPTIMIZER,
    "zero3": Sharding.WEIGHTS,
    "fsdp (optimizer and gradients)": Sharding.GRADIENTS,
}
"""Shardings by the names that runs use."""


def _sharding(run: PublishedRun) -> Sharding:
    if run.optimizer_sharding not in SHARDINGS:
        raise NotExpressible(
            f"optimizer_sharding: {run.optimizer_sharding}; expected one of {', '.join(filter(None, SHARDINGS))}"
        )
    return SHARDINGS[run.optimizer_sharding]


def _generation(run: PublishedRun, untold: Untold, assumed: list[str]) -> str:
    if run.software:
        return run.software
    if _sharding(run) is Sharding.WEIGHTS:
        return "fsdp"
    key = untold.software or ("megatron-2021" if run.fused_attention is False else DEFAULT_SOFTWARE)
    assumed.append(f"software {key}")
    return key


def _stack(run: PublishedRun, generation: str, hardware: Hardware, untold: Untold, assumed: list[str]) -> Stack:
    name = run.gpu or untold.gpu
    if name is None:
        raise NotExpressible("gpu: not said")
    gpu = hardware.gpu(name)
    network = None if run.node_gbit_per_s is None else run.node_gbit_per_s * 1e9 / 8.0 / gpu.gpus_per_node
    gpu = _changed(
        gpu,
        matrix_flop_per_s=run.matrix_flop_per_s,
        memory_bytes_per_s=run.memory_bytes_per_s,
        memory_bytes=None if run.memory_gb is None else run.memory_gb * 1e9,
        network_bytes_per_s=network,
    )
    if run.precision:
        precision = precision_named(run.precision)
    else:
        precision = untold.precision or Precision.BF16
        assumed.append(f"precision {precision.value}")
    software = _changed(
        software_named(generation).overlapping(overlaps_of(run.overlaps or ())),
        context=context_exchange_named(run.context_exchange) if run.context_exchange else None,
        dispatcher=dispatcher_named(run.dispatcher) if run.dispatcher else None,
        graphs=graphs_named(run.graphs) if run.graphs else None,
        forward_overlap=run.tensor_overlap,
        backward_overlap=run.tensor_overlap,
        expert_overlap=run.expert_overlap,
    )
    stack = stack_of(gpu, software, precision, gpu.domain_of(run.gpus_per_node or untold.gpus_per_node))
    balanced = BALANCED if run.figure == "benchmark" else None
    imbalance = run.expert_imbalance or balanced or untold.imbalance
    return stack if imbalance is None else replace(stack, imbalance=imbalance)


def _changed(table: _Table, **figures: object) -> _Table:
    """The table with new figures; None keeps the old one."""
    return table.model_copy(update={name: value for name, value in figures.items() if value is not None})


_Degrees = tuple[int, int, int, int, int, int]


def _degrees(run: PublishedRun, assumed: list[str]) -> _Degrees:
    """Tensor, pipeline, context and data parallelism, and the samples of a microbatch and of a batch."""
    missing = [name for name in ("microbatch", "global_batch") if getattr(run, name) is None]
    if run.tp is None and run.pp is None and run.dp is None:
        missing.insert(0, "layout")
    if missing:
        raise NotExpressible(f"{', '.join(missing)}: not said")
    assert run.microbatch is not None
    assert run.global_batch is not None
    tp, pp, cp = run.tp or 1, run.pp or 1, run.cp or 1
    assumed += [f"{name} 1" for name in ("tp", "pp") if getattr(run, name) is None]
    dp = run.dp or (run.gpus // (tp * pp * cp) if run.gpus else None)
    if not dp:
        raise NotExpressible("neither gpus nor dp is said" if run.gpus is None else "fewer gpus than tp pp cp")
    if run.gpus is not None and tp * pp * cp * dp != run.gpus:
        raise NotExpressible(f"tp {tp} x pp {pp} x cp {cp} x dp {dp} is {tp * pp * cp * dp}, not {run.gpus} gpus")
    if run.global_batch % (run.microbatch * dp):
        raise NotExpressible(f"{dp} replicas of microbatches of {run.microbatch} do not divide {run.global_batch}")
    return tp, pp, cp, dp, run.microbatch, run.global_batch


def _layout(run: PublishedRun, model: ModelConfig, software: Software, degrees: _Degrees, assumed: list[str]) -> Layout:
    tp, pp, cp, dp, samples, batch = degrees
    if run.seq is None and model.tokens is not None:
        raise NotExpressible("seq: not said")
    expert = run.ep if run.ep and run.ep > 1 else None
    layout = Layout(
        tensor=tp,
        pipeline=pp,
        data=dp,
        context=cp,
        expert=expert,
        expert_tensor=run.etp or 1,
        samples=samples,
        batch=batch,
        tokens=run.seq if model.tokens is not None else None,
        schedule=_schedule(run, pp),
        sequence_parallel=bool(run.sequence_parallel),
        recomputation=_recomputation(run, software, assumed),
        fused=run.fused_attention is not False,
        stages=None if run.stages is None else tuple(run.stages),
        sharding=_sharding(run),
        optimizer_on_host=bool(run.optimizer_on_host),
        overlapped=run.overlapped,
    )
    _require_spread(layout, model)
    return layout


def _require_spread(layout: Layout, model: ModelConfig) -> None:
    """Raises NotExpressible for experts that cannot be spread in this way."""
    architecture = model.architecture(Microbatch(1, layout.tokens))
    ep, each, ranks = layout.expert or 1, layout.expert_tensor, layout.tensor * layout.context * layout.data
    for experts in {kind.experts for kind in architecture.kinds if kind.experts}:
        if experts % ep:
            raise NotExpressible(f"ep={ep} does not divide the model's {experts} experts; expected one that does")
    if layout.expert is not None and ranks % (ep * each):
        what = f"ep={ep}" + (f" x etp={each}" if each > 1 else "")
        raise NotExpressible(
            f"{what} takes whole groups of {ep * each} GPUs, and a stage has {ranks} (tp={layout.tensor} x "
            f"cp={layout.context} x dp={layout.data})"
        )


def _schedule(run: PublishedRun, pp: int) -> Schedule:
    v = run.vpp or 1
    if pp > 1 and run.schedule:
        name = choice("schedule", run.schedule, ScheduleName)
        return Schedule(name, v if v > 1 else None, run.group)
    if pp > 1 and v > 1:
        return Schedule(ScheduleName.INTERLEAVED, v, run.group)
    return Schedule(ScheduleName.ONE_F_ONE_B)


def _recomputation(run: PublishedRun, software: Software, assumed: list[str]) -> Recomputation:
    """Selective recomputation means the software's default, such as Megatron's core of attention."""
    if not run.recompute:
        assumed.append(NO_RECOMPUTATION)
        return Recomputation.NONE
    if run.recompute in ("selective", "partial"):
        usual = next((part for part in (EVERY_SECOND_PRODUCT, CHEAP) if part in software.selective), "core_attn")
        return Recomputation.of_parts([usual])
    return parse_recomputation(run.recompute)
