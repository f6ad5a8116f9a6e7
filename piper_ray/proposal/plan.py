"""``piper_ray.plan``: the command ``piper-ray plan`` as a function, up to the files; what it offers if nobody says; and
what people ask of a plan.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any

from piper_ray.calibrate.workload import (
    MODEL_WORDS,
    PARAMETERS,
    recomputation_arguments,
    reserve_argument,
    running_arguments,
    shared_replicas,
    text_argument,
)
from piper_ray.model import arguments
from piper_ray.model.constraints import choices_made
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import plural
from piper_ray.model.headroom import Headroom
from piper_ray.model.instance import Instance, TrainedModel, divisors
from piper_ray.model.mode import Recomputation, Sharding
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import ScheduleName, StepTerms
from piper_ray.model.solution import Solution
from piper_ray.model.stop import Stop
from piper_ray.model.units import parse_bytes
from piper_ray.proposal.demand import PlanDemand, Proposed
from piper_ray.proposal.propose import propose
from piper_ray.runtimes.runtime import RUNTIMES, Runtime, RuntimeName
from piper_ray.simulate.result import Simulation
from piper_ray.workloads.estimate.build import EstimateRequest
from piper_ray.workloads.estimate.config import ModelConfig, read_model, with_images
from piper_ray.workloads.estimate.decoder_shape import decoder_shape
from piper_ray.workloads.estimate.doubt import memory_doubt
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.modes import Offer
from piper_ray.workloads.estimate.offered import attends
from piper_ray.workloads.estimate.operators import LayerKind
from piper_ray.workloads.estimate.roofline import hardware_flop
from piper_ray.workloads.estimate.software import ContextExchange, context_exchange_named, software_named

_LEAST_TOKENS = 2048
"""Of a group: with fewer its products are too small for a GPU."""

_MOST_GROUPS = 8


def _exchange(model: ModelConfig, runtime: Runtime, asked: str | None, contexts: tuple[int, ...] | None) -> str:
    """How groups share a sequence: as asked, or as the runtime usually does.

    contexts: degrees that are asked for. Raises UsageError for what the runtime's launch files cannot say of the model.
    """
    able, title = runtime.context_exchanges, runtime.title
    found = context_exchange_named(able[0] if asked is None else asked)
    if not runtime.setting.context and (asked is not None or max(contexts or (1,)) > 1):
        option = "--context-parallel" if asked is None else "--context-exchange"
        raise UsageError(f"{option}: {title}'s launch files share no sequence among GPUs")
    if found.value not in able:
        raise UsageError(f"--context-exchange: {title}'s is {' or '.join(able)}, not {found.value}")
    fault = _context_fault(model, runtime, found)
    if fault is not None and (asked is not None or max(contexts or (1,)) > 1):
        raise UsageError(fault)
    return found.value


def _context_fault(model: ModelConfig, runtime: Runtime, exchange: ContextExchange) -> str | None:
    """Why no kernel of a runtime whose attention is TransformerEngine's does so, by the option."""
    shape = decoder_shape(TrainedModel(config=model.document))
    if shape is None or ContextExchange.RING.value not in runtime.context_exchanges:
        return None
    return shape.context_fault(exchange)


def usual_contexts(model: ModelConfig, tokens: int | None, runtime: Runtime, exchange: str) -> tuple[int, ...]:
    """Powers of two, 1 among them; 1 alone where a runtime's kernels take no such exchange."""
    length = tokens or model.tokens
    if length is None or not runtime.setting.context:
        return (1,)
    if _context_fault(model, runtime, ContextExchange(exchange)) is not None:
        return (1,)
    kinds = _kinds(model, tokens)
    if not all(attends(kind) and kind.value("s") == length for kind in kinds if kind.recomputable):
        return (1,)
    found = [1]
    while found[-1] < _MOST_GROUPS and length >= 2 * found[-1] * _LEAST_TOKENS and length % (4 * found[-1]) == 0:
        found.append(2 * found[-1])
    return tuple(found)


_MOST_EXPERT_NODES = 4


def usual_spreads(
    model: ModelConfig, tokens: int | None, runtime: Runtime, gpus_per_node: int, devices: int
) -> tuple[tuple[int, int], ...]:
    """Pairs that are tried besides t: ranks that experts are spread over, and devices that share each expert.

    Together as many as one, two and four nodes have GPUs: more leave more memory, and each of them more tokens for an
    expert. Ranks are as many as divide the experts, as devices that share one gather its tokens; or a node's devices
    share all, so that none of them is the busiest.
    """
    routed = [kind for kind in _kinds(model, tokens) if kind.experts]
    if not routed or gpus_per_node == 1 or not runtime.setting.experts:
        return ()
    most = max(gpus_per_node, min(devices // 2, gpus_per_node * _MOST_EXPERT_NODES))
    shared = divisors(gpus_per_node) if runtime.setting.expert_tensor else [1]
    found = []
    for doublings in range(_MOST_EXPERT_NODES.bit_length()):
        together = gpus_per_node * 2**doublings
        pairs = [(together // each, each) for each in shared]
        able = [pair for pair in pairs if all(kind.experts % pair[0] == 0 for kind in routed)]
        found += able[:1] if together <= most else []
    return (*found, *([(1, gpus_per_node)] if len(shared) > 1 else []))


def _kinds(model: ModelConfig, tokens: int | None) -> tuple[LayerKind, ...]:
    return model.architecture(Microbatch(1, tokens or model.tokens, fused=True)).kinds


_HOURS_PER_DAY, _S_PER_HOUR = 24.0, 3600.0


@dataclass(frozen=True)
class Figures:
    """What people ask of a plan.

    mfu, hfu: shares of the peak rate of all devices of the cluster, idle ones too, by the definitions of
    ``estimate.work``. devices: those that the plan uses. tokens_per_s_per_device: of each device of the cluster.

    tokens_per_s: None where a sample has no tokens. days, cost: of the training asked about, None where nothing was.

    >>> import piper_ray
    >>> planned = piper_ray.plan("bert-large", "A100-80", microbatch=8, schedule="1f1b", zero=1)  # doctest: +SKIP
    >>> planned.figures.tokens_per_s  # doctest: +SKIP
    """

    step_s: float
    samples_per_s: float | None
    tokens_per_s: float | None
    devices: int
    mfu: float
    hfu: float
    days: float | None
    cost: float | None
    tokens_per_s_per_device: float | None


def figures_of(proposed: Proposed, tokens: float | None = None, price_per_hour: float | None = None) -> Figures:
    """tokens: of the whole training; price_per_hour: of one GPU, in any currency."""
    simulation, estimate = proposed.simulation, proposed.estimate
    peak_flop = estimate.peak_flop_per_s * simulation.step_s
    tokens_per_s = simulation.tokens_per_s
    days = cost = None
    if tokens is not None and tokens_per_s is not None:
        days = tokens / tokens_per_s / _S_PER_HOUR / _HOURS_PER_DAY
        if price_per_hour is not None:
            cost = days * _HOURS_PER_DAY * estimate.devices * price_per_hour
    return Figures(
        step_s=simulation.step_s,
        samples_per_s=simulation.samples_per_s,
        tokens_per_s=tokens_per_s,
        devices=simulation.devices,
        mfu=estimate.model_flop / peak_flop,
        hfu=_hardware_flop(proposed) / peak_flop,
        days=days,
        cost=cost,
        tokens_per_s_per_device=None if tokens_per_s is None else tokens_per_s / estimate.devices,
    )


def _hardware_flop(proposed: Proposed) -> float:
    """Of a step, with what this plan's layers recompute."""
    nodes, again = proposed.estimate.architecture.nodes, 0.0
    for stage in proposed.plan.stages:
        for layer, _, tmpc in choices_made(proposed.instance, stage):
            kind = nodes[layer].kind
            again += hardware_flop(kind, tmpc.mode.recomputation) - hardware_flop(kind, Recomputation.NONE)
    return proposed.estimate.model_flop + proposed.instance.microbatches * again


@dataclass(frozen=True)
class Planned:
    """A plan for one microbatch size and schedule. microbatch: in samples. figures: what people ask of it.

    instance: the workload of that microbatch size. solution: of its solve, with what is proved. runners_up: of other
    microbatch sizes, schedules and modes, the fastest first. by_precision: the best in each precision that was asked.

    >>> import piper_ray
    >>> planned = piper_ray.plan("bert-large", "A100-80", microbatch=8, schedule="1f1b", zero=1)  # doctest: +SKIP
    >>> planned.plan, planned.figures.mfu  # doctest: +SKIP
    """

    microbatch: int
    instance: Instance
    plan: Plan
    solution: Solution
    simulation: Simulation
    figures: Figures
    runners_up: tuple[Planned, ...] = ()
    by_precision: Mapping[str, Planned] = field(default_factory=dict, repr=False, compare=False)

    @property
    def step_s(self) -> float:
        """Of the whole batch, simulated."""
        return self.simulation.step_s

    def __repr__(self) -> str:
        schedule = self.simulation.schedule
        ranks = f"; {plural(self.figures.devices, 'device')}" if schedule.v > 1 else ""  # whose stages share devices
        text = f"{schedule.text}: step {self.step_s:.6g} s, microbatches of {self.microbatch}"
        return f"Planned({text}{ranks}; {self.plan!r})"


@arguments.named_as_parameters(PARAMETERS)
def plan(
    model: str | os.PathLike[str],
    gpu: str,
    *,
    nodes: int = 1,
    gpus_per_node: int | None = None,
    runtime: str = "megatron",
    batch: int | None = None,
    microbatch: int | None = None,
    tokens: int | None = None,
    images: int | None = None,
    schedule: str | None = None,
    precision: str | Iterable[str] = "bf16",
    fused_attention: bool = True,
    software: str | None = None,
    overlap: Iterable[str] = (),
    cuda_graphs: Iterable[str] = (),
    dispatcher: str | None = None,
    zero: int | str = "all",
    zero_2: int = 1,
    fsdp: int = 1,
    context_parallel: Iterable[int] | None = None,
    expert_parallel: Iterable[int] | None = None,
    expert_tensor_parallel: int = 1,
    context_exchange: str | None = None,
    expert_imbalance: float | None = None,
    recompute: Iterable[str] = (),
    keep_gathered: bool = False,
    offload: bool = False,
    lora: int | None = None,
    headroom: str | float | None = None,
    reserve_bytes: float | None = None,
    step: StepTerms = StepTerms(),
    train_tokens: float | None = None,
    price_per_hour: float | None = None,
    hardware: str | os.PathLike[str] | None = None,
    calibrate: str | os.PathLike[str] | None = None,
    stop: Stop[Any] | None = None,
) -> Planned:
    """The best plan that a runtime can run, over all that ``plan`` chooses, from the name of a model.

    model, gpu, nodes, gpus_per_node, tokens, images, hardware, calibrate: as of ``estimate``. runtime: "megatron",
    "torchtitan", "torch", "deepspeed" or "flagscale". batch, microbatch: in samples; no microbatch: those that divide
    the batch are tried. schedule: no other one; None: 1f1b, and interleaved where the runtime has it. zero: replicas
    that may share the optimizer's state; "all": however many a stage has (under torch none do). context_parallel,
    expert_parallel: degrees that are offered; None: what is usual for long sequences, and for experts.
    context_exchange, software: None: the runtime's own. precision: as of ``estimate``; of several the fastest is
    planned, and ``by_precision`` has all. headroom: memory of each GPU that is left free, as a share or a size such as
    "4GiB"; None: what published peaks ask for, where a plan fits so.
    cuda_graphs: what of a layer is launched as one: "attn", "moe_router". All others: as of ``estimate``.
    train_tokens, price_per_hour: of the whole training and of one GPU, for days and cost.

    Raises UsageError for arguments that make no sense, InputError for a file that is not sound, and InfeasibleError
    where no plan fits.

    >>> import piper_ray
    >>> best = piper_ray.plan("bert-large", "A100-80", batch=64, microbatch=8, schedule="1f1b")
    >>> best.figures.devices
    8
    """
    arguments.of_kind("gpu", gpu, str, "the name of a GPU, such as 'H100-SXM'")
    arguments.of_kind("step", step, StepTerms, "StepTerms")
    arguments.of_kind("stop", stop, (Stop, NoneType), "a Stop")
    if train_tokens is not None:
        train_tokens = arguments.number_from("train_tokens", train_tokens, 1.0, "a number of at least 1")
    if price_per_hour is not None:
        price_per_hour = arguments.number_from("price_per_hour", price_per_hour, 0.0, "a number of at least 0")
    if price_per_hour is not None and train_tokens is None:
        raise UsageError("price_per_hour needs train_tokens: of how long a training is the cost asked")
    read = read_model(arguments.location("model", model, MODEL_WORDS))
    if images is not None:
        read = with_images(read, arguments.positive("images", images), arguments.positive_or_none("tokens", tokens))
    table = load_hardware(None if hardware is None else arguments.location("hardware", hardware))
    named = RUNTIMES[arguments.choice("runtime", runtime, RuntimeName)]

    names = precision.split(",") if isinstance(precision, str) else list(precision)
    names = list(dict.fromkeys(running_arguments(name, (), None, None)["precision"] for name in names))
    if not names:
        raise UsageError("precision must name one at least, such as 'bf16'")
    request = EstimateRequest(
        nodes=arguments.positive("nodes", nodes),
        gpus_per_node=arguments.positive_or_none("gpus_per_node", gpus_per_node),
        tokens=arguments.positive_or_none("tokens", tokens),
        samples=arguments.positive_or_none("microbatch", microbatch),
        batch=arguments.positive_or_none("batch", batch),
        fused=arguments.flag("fused_attention", fused_attention),
        graphs=tuple(text_argument("cuda_graphs", one, "attn") for one in cuda_graphs),
        offer=Offer(
            zero=shared_replicas(zero),
            zero2=arguments.positive("zero_2", zero_2),
            fsdp=arguments.positive("fsdp", fsdp),
            offload=arguments.flag("offload", offload),
            expert_tensor=arguments.positive("expert_tensor_parallel", expert_tensor_parallel),
            gathered=arguments.flag("keep_gathered", keep_gathered),
        ),
        recomputations=recomputation_arguments(recompute),
        **running_arguments(names[0], overlap, dispatcher, expert_imbalance),
        lora=arguments.positive_or_none("lora", lora) or 0,
        reserve_bytes=reserve_argument(reserve_bytes),
    )
    refuse_what_cannot_run(named, request)
    node = request.gpus_per_node or table.gpu(gpu).gpus_per_node
    contexts, experts = (
        None if values is None else arguments.degrees(name, values)
        for name, values in (("context_parallel", context_parallel), ("expert_parallel", expert_parallel))
    )
    contexts = None if contexts is None else tuple(sorted({1, *contexts}))
    used = None if software is None else text_argument("software", software, named.software)
    exchange = None if context_exchange is None else text_argument("context_exchange", context_exchange, "ring")
    request = with_offers(request, read, named, node, contexts, experts, used, exchange)
    if calibrate is not None:
        from piper_ray.calibrate.measurements import Estimated, calibrated

        request = calibrated(arguments.location("calibrate", calibrate), Estimated(read, table, gpu, request))
    only = None if schedule is None else arguments.choice("schedule", schedule, ScheduleName)
    kept = usual_headroom(request) if headroom is None else headroom_of(headroom)
    planned = {}
    for name in names:
        asked = replace(request, precision=name)
        schedules = schedules_of(named, only)
        found = propose(PlanDemand(read, table, gpu, asked, named, schedules, step, headroom=kept), stop)
        best, *others = (_planned(one, train_tokens, price_per_hour) for one in found.found)
        planned[name] = replace(best, runners_up=tuple(others))
    fastest = min(planned.values(), key=lambda one: one.step_s)
    return replace(fastest, by_precision=planned)


def usual_headroom(request: EstimateRequest) -> Headroom:
    """With which 9 in 10 published peaks of software like it keep within a GPU's memory."""
    return Headroom(share=memory_doubt(software_named(request.software)).headroom, is_usual=True)


def refuse_what_cannot_run(runtime: Runtime, request: EstimateRequest) -> None:
    """Raises UsageError for what the runtime's launch files cannot say, by the name of its option."""
    setting, offer, title = runtime.setting, request.offer, runtime.title
    if offer.zero2 > 1 and setting.most_sharding < Sharding.GRADIENTS:
        raise UsageError(f"--zero-2: {title} {runtime.no_more_sharing}")
    if offer.zero2 > 1 and runtime.sums_each_pass:
        raise UsageError(f"--zero-2: {title} shares weights and gradients (--fsdp), or the optimizer's state alone")
    if offer.fsdp > 1 and setting.most_sharding < Sharding.WEIGHTS:
        raise UsageError(f"--fsdp: {title} {runtime.no_more_sharing}; --runtime torchtitan shares weights")
    if offer.offload and not setting.offload:
        raise UsageError(f"--offload: {title}'s launch files have no activations in host memory")
    if offer.gathered and not setting.gathered:
        raise UsageError(f"--keep-gathered: {title} gathers again what sequence parallelism divides")
    for recomputation in request.recomputations:
        if not setting.may_recompute(recomputation):
            raise UsageError(f"--recompute: {title} has no {recomputation.text}")
    if offer.expert_tensor > 1 and not setting.expert_tensor:
        raise UsageError(f"--expert-tensor-parallel: {title} divides no experts among GPUs")


def headroom_of(given: str | float) -> Headroom:
    """Of a share such as 0.08, or a text such as "8%" or "4GiB". Raises UsageError."""
    text = given.strip() if isinstance(given, str) else given
    try:
        share = float(text[:-1]) / 100.0 if isinstance(text, str) and text.endswith("%") else float(text)
    except ValueError:
        return Headroom(size_bytes=parse_bytes(str(text), unit_required=True))
    except TypeError:
        raise UsageError(f"headroom must be a share, or a size such as '4GiB', not {given!r}") from None
    if not 0.0 <= share < 1.0:
        raise UsageError(f"{given!r}: expected a size, such as 4GiB, or a share below 1, such as 8% or 0.08")
    return Headroom(share=share)


def schedules_of(runtime: Runtime, only: ScheduleName | None) -> tuple[ScheduleName, ...]:
    """Those tried: that one alone, or those that the runtime has of 1f1b and interleaved.

    Raises UsageError for one that it does not have.
    """
    if only is not None:
        runtime.require_schedule(only)
        return (only,)
    return tuple(x for x in (ScheduleName.ONE_F_ONE_B, ScheduleName.INTERLEAVED) if x in runtime.schedules)


def with_offers(
    request: EstimateRequest,
    model: ModelConfig,
    runtime: Runtime,
    gpus_per_node: int,
    contexts: tuple[int, ...] | None,
    experts: tuple[int, ...] | None,
    software: str | None = None,
    exchange: str | None = None,
) -> EstimateRequest:
    """With context and expert parallelism of these degrees (None: what is usual), software and exchange of context
    (None: the runtime's own), and what the runtime always does. Raises UsageError for an exchange it cannot do."""
    exchange = _exchange(model, runtime, exchange, contexts)
    devices = request.nodes * gpus_per_node
    spreads = usual_spreads(model, request.tokens, runtime, gpus_per_node, devices) if experts is None else ()
    each_pass = runtime.sums_each_pass and request.offer.zero != 1
    most_ranks = max((ranks for ranks, _ in spreads), default=max(experts or (1,)))
    offer = replace(
        request.offer,
        zero=request.offer.zero if runtime.shares_state else 1,
        sharded_over=_groups(devices, gpus_per_node, most_ranks) if each_pass else (),
        summed_over=devices if runtime.sums_each_pass else 0,
        contexts=usual_contexts(model, request.tokens, runtime, exchange) if contexts is None else contexts,
        experts=() if experts is None else experts,
        spreads=spreads,
        gathered=runtime.setting.always_gathered,
        always_sequence=runtime.setting.experts_in_sequence and any(kind.experts for kind in _kinds(model, None)),
    )
    used = software or runtime.software
    return replace(request, offer=offer, software=used, context_exchange=exchange)


def _groups(devices: int, gpus_per_node: int, expert_ranks: int) -> tuple[int, ...]:
    """Devices over which weights may be shared: all, or those of a node or of twice as many each time (HSDP), where
    they are all groups alike and hold all experts."""
    found, size = [devices], gpus_per_node
    while size < devices:
        if devices % size == 0 and size % expert_ranks == 0:
            found.append(size)
        size *= 2
    return tuple(found)


def _planned(one: Proposed, tokens: float | None, price_per_hour: float | None) -> Planned:
    figures = figures_of(one, tokens, price_per_hour)
    return Planned(one.samples, one.instance, one.plan, one.solution, one.simulation, figures)
