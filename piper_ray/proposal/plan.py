"""``piper_ray.plan``: the command ``piper-ray plan`` as a function, up to the files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any

from piper_ray.calibrate.workload import (
    MODEL_WORDS,
    PARAMETERS,
    bytes_argument,
    recomputation_arguments,
    running_arguments,
    shared_replicas,
    text_argument,
)
from piper_ray.model import arguments
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import plural
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import ScheduleName, StepTerms
from piper_ray.model.solution import Solution
from piper_ray.model.stop import Stop
from piper_ray.model.units import parse_bytes_per_s
from piper_ray.proposal.demand import Figures, Proposed, figures_of
from piper_ray.proposal.offers import PlanQuestion, headroom_of
from piper_ray.proposal.propose import propose
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from piper_ray.simulate.result import Simulation
from piper_ray.workloads.estimate.build import EstimateRequest
from piper_ray.workloads.estimate.config import read_model, with_images
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.modes import Offer


@dataclass(frozen=True)
class Planned:
    """A plan for one microbatch size and schedule.

    microbatch: in samples. figures: speed, utilisation, days and cost. instance: the workload with that microbatch
    size. solution: the result of the solve, with its proof. runners_up: plans of other microbatch sizes, schedules and
    modes, the fastest first. by_precision: the best plan in each precision that the user asked for.

    >>> import piper_ray
    >>> planned = piper_ray.plan("bert-large", "A100-80", microbatch_size=8, schedule="1f1b", zero=1)  # doctest: +SKIP
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
        """The simulated seconds of a whole batch."""
        return self.simulation.step_s

    def __repr__(self) -> str:
        schedule = self.simulation.schedule
        ranks = f"; {plural(self.figures.devices, 'device')}" if schedule.v > 1 else ""  # whose stages share devices
        text = f"{schedule.text}: step {self.step_s:.6g} s, microbatches of {self.microbatch}"
        return f"Planned({text}{ranks}; {self.plan!r})"


@arguments.named_as_parameters(PARAMETERS)
def plan(
    model: str | os.PathLike[str],
    gpu: str | Mapping[str, int],
    *,
    nodes: int = 1,
    gpus_per_node: int | None = None,
    domain: int | None = None,
    uplink: str | float | None = None,
    site: Mapping[str, int] | None = None,
    between: str | float | None = None,
    runtime: str = "megatron",
    global_batch: int | None = None,
    microbatch_size: int | None = None,
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
    fsdp: int | str = 1,
    context_parallel: Iterable[int] | None = None,
    expert_parallel: Iterable[int] | None = None,
    tensor_parallel: Iterable[int] | None = None,
    stages: int | None = None,
    expert_tensor_parallel: int = 1,
    context_exchange: str | None = None,
    expert_imbalance: float | None = None,
    recompute: Iterable[str] = (),
    keep_gathered: bool = False,
    offload: bool = False,
    schemes: bool = False,
    optimizer_on_host: bool | None = None,
    lora: int | None = None,
    headroom: str | float | None = None,
    reserve_bytes: float | None = None,
    host_memory_bytes: float | None = None,
    step: StepTerms = StepTerms(),
    train_tokens: float | None = None,
    price_per_hour: float | None = None,
    hardware: str | os.PathLike[str] | None = None,
    calibrate: str | os.PathLike[str] | None = None,
    stop: Stop[Any] | None = None,
) -> Planned:
    """The best plan that a runtime can run, over all that ``plan`` chooses, from the name of a model.

    model, gpu, nodes, gpus_per_node, domain, uplink, tokens, images, hardware, calibrate: as of ``estimate``. gpu, for
    several kinds: the nodes of each, as {"A100-80": 32, "H100-SXM": 32}. site: the nodes at each of several sites.
    between: what a GPU sends and receives between kinds or sites, as "5GB/s"; None: as the slower network of the kinds.
    runtime: "megatron", "torchtitan", "torch", "deepspeed" or "flagscale". global_batch, microbatch_size: in samples;
    None: those that divide the batch are tried. schedule: no other one; None: 1f1b, and interleaved where
    the runtime has it. zero: replicas that may share the optimizer's state; "all": however many a stage has (under
    torch none do).
    context_parallel, expert_parallel: degrees that are offered; None: what is usual for long sequences, and for
    experts. tensor_parallel: the only degrees, without those of context parallelism. stages: the only number of
    pipeline ranks. context_exchange, software: None: the runtime's own. precision: as of ``estimate``; of several
    the fastest is planned, and ``by_precision`` has all. headroom: memory of each GPU that is left free, as a share
    or a size such as "4GiB"; None: what published peaks ask for, where a plan fits so. cuda_graphs: what of a layer
    is launched as one: "attn", "moe_router". optimizer_on_host: whether all plans have the optimizer's state in
    host memory, or none; None: where they are faster so. host_memory_bytes: what it may take of a node's own
    memory; None: all that such nodes usually have. schemes: whether ways to divide layers that are found from their
    operators are offered, too. All others: as of ``estimate``. train_tokens, price_per_hour: of the whole training
    and of one GPU, for days and cost.

    Raises UsageError for arguments that make no sense, InputError for a file that is not sound, and InfeasibleError
    where no plan fits.

    >>> import piper_ray
    >>> best = piper_ray.plan("bert-large", "A100-80", global_batch=64, microbatch_size=8, schedule="1f1b")
    >>> best.figures.devices
    8
    """
    arguments.of_kind("gpu", gpu, (str, Mapping), "the name of a GPU, such as 'H100-SXM', or the nodes of each")
    kinds = _kinds(gpu, nodes, site, between)
    arguments.of_kind("step", step, StepTerms, "StepTerms")
    arguments.of_kind("stop", stop, (Stop, NoneType), "a Stop")
    if train_tokens is not None:
        train_tokens = arguments.number_from("train_tokens", train_tokens, 1.0, "a number of at least 1")
    if price_per_hour is not None:
        price_per_hour = arguments.number_from("price_per_hour", price_per_hour, 0.0, "a number of at least 0")
    if price_per_hour is not None and train_tokens is None:
        raise UsageError("price_per_hour needs train_tokens, the length of the training whose cost is shown")
    read = read_model(arguments.location("model", model, MODEL_WORDS))
    if images is not None:
        read = with_images(read, arguments.positive("images", images), arguments.positive_or_none("tokens", tokens))
    table = load_hardware(None if hardware is None else arguments.location("hardware", hardware))
    named = RUNTIMES[arguments.choice("runtime", runtime, RuntimeName)]

    names = precision.split(",") if isinstance(precision, str) else list(precision)
    names = list(dict.fromkeys(running_arguments(name, (), None, None)["precision"] for name in names))
    if not names:
        raise UsageError("precision must name at least one, such as 'bf16'")
    if arguments.flag("schemes", schemes) and "fp8" in names:
        raise UsageError("schemes is for bf16 or fp16")
    asked = EstimateRequest(
        nodes=1,  # of each kind its own
        gpus_per_node=arguments.positive_or_none("gpus_per_node", gpus_per_node),
        domain=arguments.positive_or_none("domain", domain),
        uplink_bytes_per_s=None if uplink is None else parse_bytes_per_s(uplink),
        tokens=arguments.positive_or_none("tokens", tokens),
        samples=arguments.positive_or_none("microbatch_size", microbatch_size),
        batch=arguments.positive_or_none("global_batch", global_batch),
        fused=arguments.flag("fused_attention", fused_attention),
        graphs=tuple(text_argument("cuda_graphs", one, "attn") for one in cuda_graphs),
        offer=Offer(
            zero=shared_replicas(zero),
            zero2=arguments.positive("zero_2", zero_2),
            fsdp=shared_replicas(fsdp, "fsdp"),
            offload=arguments.flag("offload", offload),
            expert_tensor=arguments.positive("expert_tensor_parallel", expert_tensor_parallel),
            gathered=arguments.flag("keep_gathered", keep_gathered),
        ),
        recomputations=recomputation_arguments(recompute),
        **running_arguments(names[0], overlap, dispatcher, expert_imbalance),
        lora=arguments.positive_or_none("lora", lora) or 0,
        optimizer_on_host=None if optimizer_on_host is None else arguments.flag("optimizer_on_host", optimizer_on_host),
        reserve_bytes=bytes_argument("reserve_bytes", reserve_bytes),
        host_memory_bytes=bytes_argument("host_memory_bytes", host_memory_bytes),
    )
    if site is None:
        named.require_kinds([*kinds])
    given = {
        "context_parallel": context_parallel,
        "expert_parallel": expert_parallel,
        "tensor_parallel": tensor_parallel,
    }
    contexts, experts, degrees = (
        None if values is None else arguments.degrees(name, values) for name, values in given.items()
    )
    demand = PlanQuestion(
        read,
        table,
        named,
        asked,
        None if schedule is None else arguments.choice("schedule", schedule, ScheduleName),
        None if contexts is None else tuple(sorted({1, *contexts})),
        experts,
        None if software is None else text_argument("software", software, named.software),
        None if context_exchange is None else text_argument("context_exchange", context_exchange, "ring"),
        None if headroom is None else headroom_of(headroom),
        None if between is None else parse_bytes_per_s(between),
        step,
        schemes,
        degrees,
        None if stages is None else arguments.positive("stages", stages),
    ).demand(kinds)
    if calibrate is not None:
        if len({own for _, own, _ in demand.kinds}) > 1:
            raise UsageError("calibrate: measurements are of one GPU, and several are asked about")

        from piper_ray.calibrate.measurements import Estimated, calibrated

        estimated = Estimated(read, table, demand.gpu, demand.request)
        found = calibrated(arguments.location("calibrate", calibrate), estimated).calibration
        demand = demand.changed(lambda request: replace(request, calibration=found))
    demand.refuse_layouts()
    planned = {}
    for name in names:
        in_precision = replace(demand, request=replace(demand.request, precision=name))
        best, *others = (_planned(one, train_tokens, price_per_hour) for one in propose(in_precision, stop).found)
        planned[name] = replace(best, runners_up=tuple(others))
    fastest = min(planned.values(), key=lambda one: one.step_s)
    return replace(fastest, by_precision=planned)


def _kinds(
    gpu: str | Mapping[str, int], nodes: int, site: Mapping[str, int] | None, between: str | float | None
) -> dict[str, tuple[str, int]]:
    """The GPU and the nodes of each kind or site. Raises UsageError."""
    if isinstance(gpu, str):
        counts: Mapping[str, int] = {gpu: nodes} if site is None else site
        kinds = {name: (gpu, arguments.positive("nodes", count)) for name, count in counts.items()}
    else:
        kinds = {name: (name, arguments.positive("nodes", count)) for name, count in gpu.items()}
    if site is not None and (len(kinds) < 2 or not isinstance(gpu, str) or between is None):
        raise UsageError('site must be several sites of one GPU, as {"east": 64, "west": 64}, with the rate between')
    if not kinds or (between is not None and (len(kinds) < 2 or parse_bytes_per_s(between) <= 0.0)):
        raise UsageError('between must be a rate above 0 between several kinds, as {"A100-80": 32, "H100-SXM": 32}')
    return kinds


def _planned(one: Proposed, tokens: float | None, price_per_hour: float | None) -> Planned:
    figures = figures_of(one, tokens, price_per_hour)
    return Planned(one.samples, one.instance, one.plan, one.solution, one.simulation, figures)
