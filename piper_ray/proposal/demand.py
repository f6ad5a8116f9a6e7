"""What to train, on which cluster, with which runtime; and the estimates for each microbatch size; a plan
with its figures for people: speed, shares of the peak rate, days and cost."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType

from piper_ray.engine.subproblems import rank_of
from piper_ray.model.constraints import Restrictions, StageCount, choices_made, divisible_batch, odd_part
from piper_ray.model.errors import InfeasibleError, UsageError
from piper_ray.model.figures import plural, size_text
from piper_ray.model.headroom import NO_HEADROOM, Headroom
from piper_ray.model.instance import Instance, Layer, Tmpc, divisors, with_rows
from piper_ray.model.mode import ALL_REPLICAS, Recomputation
from piper_ray.model.one_mode import OneMode
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import CHUNKED, Schedule, ScheduleName, StepTerms
from piper_ray.model.solution import Solution
from piper_ray.runtimes.runtime import Runtime
from piper_ray.simulate.result import Simulation
from piper_ray.simulate.run import SimulationOptions, simulate
from piper_ray.workloads.estimate.build import HOST_BYTES, Estimate, EstimateRequest, estimate, estimate_on
from piper_ray.workloads.estimate.config import ModelConfig
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.hardware import Gpu, Hardware
from piper_ray.workloads.estimate.kinds import joined, with_sites
from piper_ray.workloads.estimate.modes import degrees_of
from piper_ray.workloads.estimate.refusals import host_excess, may_be_on_host
from piper_ray.workloads.estimate.roofline import hardware_flop
from piper_ray.workloads.estimate.software import Overlap, Stack
from piper_ray.workloads.formats.objects import check_instance
from piper_ray.workloads.schemes.tmpcs import SchemeOffer

_EVERY_SIZE_TO = 16
"""Above this size only powers of two are tried, since larger microbatches hardly speed up matrix products."""

Tell = Callable[[str], None]


@contextmanager
def uncollected() -> Iterator[None]:
    """Pauses the garbage collector, which would otherwise scan millions of small objects that all stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def usual_batch(model: ModelConfig, devices: int) -> int:
    """A batch in samples: the model's own if ``devices`` divide it well, else a size near it."""
    return model.batch if model.batch % odd_part(devices) == 0 else divisible_batch(model.batch, devices)


@dataclass(frozen=True)
class FurtherKinds:
    """Further kinds of GPUs, or further sites, of a cluster. apart: pipelines are at each of the sites; else they go
    through all.

    name: the name of the demand's own kind. others: the name, the GPU and the request of each further kind; none where
    all their nodes are lost. between_bytes_per_s: the rate between kinds; None: that of the slower network. at_sites:
    the schedules that are tried with pipelines at each of several sites, or on one kind; none: those of the demand.
    """

    name: str
    others: tuple[tuple[str, str, EstimateRequest], ...]
    between_bytes_per_s: float | None = None
    apart: bool = False
    at_sites: tuple[ScheduleName, ...] = ()


@dataclass(frozen=True)
class PlanDemand:
    """What to train, on which cluster, with which runtime.

    request: if it has a microbatch size, only that one is tried. schedules: the runtime's schedules that are tried.
    set_aside_bytes: memory of each GPU that all plans leave free for what the runtime holds beyond a plan's figures; if
    negative, memory that GPUs have beyond the estimate. headroom: further memory to leave free. stack: GPUs and
    software that are in no table; None: those of the request. further: other kinds of GPUs of the same cluster; batch,
    microbatches and precision are those of ``request``. schemes: adds TMPCs that are found from operators; None: there
    are none. tensor_parallel: the only tensor-parallel degrees, without those of context parallelism; None: all.
    stages: the only number of pipeline ranks; None: all.
    """

    model: ModelConfig
    hardware: Hardware
    gpu: str
    request: EstimateRequest
    runtime: Runtime
    schedules: tuple[ScheduleName, ...]
    step: StepTerms = StepTerms()
    set_aside_bytes: float = 0.0
    headroom: Headroom = NO_HEADROOM
    stack: Stack | None = None
    further: FurtherKinds | None = None
    schemes: SchemeOffer | None = None
    tensor_parallel: tuple[int, ...] | None = None
    stages: int | None = None

    @property
    def kinds(self) -> tuple[tuple[str, str, EstimateRequest], ...]:
        """The name, the GPU and the request of each kind."""
        own, further = self.request, self.further
        if further is None:
            return ((self.gpu, self.gpu, own),)
        alike = [
            (name, gpu, replace(one, samples=own.samples, batch=own.batch, precision=own.precision))
            for name, gpu, one in further.others
        ]
        return ((further.name, self.gpu, own), *alike)

    def changed(self, change: Callable[[EstimateRequest], EstimateRequest]) -> PlanDemand:
        """The demand with a change to the request of each kind."""
        if self.further is None:
            return replace(self, request=change(self.request))
        others = tuple((name, gpu, change(one)) for name, gpu, one in self.further.others)
        return replace(self, request=change(self.request), further=replace(self.further, others=others))

    @property
    def ways(self) -> tuple[PlanDemand, ...]:
        """Pipelines through all kinds or sites, if the runtime has such; and pipelines at each site, if their equal
        parts can share the batch. Sums of gradients in each pass are not priced between sites. Raises UsageError if
        there are none."""
        further, parts = self.further, self.parts
        if further is None or further.apart:
            return (self,)
        of_site = replace(self, schedules=further.at_sites or self.schedules)
        if not further.others:
            return (of_site,)
        batch = self.request.batch or self.model.batch
        if self.runtime.sums_each_pass or not parts or batch % len(parts):
            self.runtime.require_kinds([name for name, _, _ in self.kinds])
            return (self,)
        return (*[self] * self.runtime.kinds, replace(of_site, further=replace(further, apart=True)))

    @property
    def _part_nodes(self) -> int:
        """The nodes of the largest equal parts into which all kinds or sites can be divided."""
        return math.gcd(*(one.nodes for _, _, one in self.kinds))

    def _of_part(self, request: EstimateRequest) -> EstimateRequest:
        """The request for one of these parts, within which experts are spread."""
        part = replace(request, nodes=self._part_nodes)
        most = part.devices_of(self.hardware.gpu(self.gpu))
        spreads = tuple(pair for pair in part.offer.spreads if math.prod(pair) <= most)
        return replace(part, offer=replace(part.offer, spreads=spreads))

    @property
    def parts(self) -> tuple[str, ...]:
        """The site of each of these parts: ``("east", "east", "west")`` where east has twice the nodes; none where GPUs
        are of several kinds."""
        if any((gpu, self._of_part(one)) != (self.gpu, self._of_part(self.request)) for _, gpu, one in self.kinds):
            return ()
        return tuple(name for name, _, one in self.kinds for _ in range(one.nodes // self._part_nodes))

    @property
    def gpus_text(self) -> str:
        """``16 A100-80 and 16 H100-SXM``; with the names of sites."""
        return " and ".join(
            f"{one.devices_of(self.hardware.gpu(gpu)):,} {gpu}{'' if name == gpu else f' at {name}'}"
            for name, gpu, one in self.kinds
        )

    @property
    def domain(self) -> int:
        """The number of GPUs that share the fast link; the largest number if there are several kinds."""
        return max(one.domain_of(self.hardware.gpu(gpu)) for _, gpu, one in self.kinds)

    @property
    def devices(self) -> int:
        """The number of GPUs of the cluster."""
        return sum(one.devices_of(self.hardware.gpu(gpu)) for _, gpu, one in self.kinds)

    def scheduled(self, name: ScheduleName) -> Schedule:
        """The schedule as the runtime runs it. If experts' exchanges overlap with passes, Megatron's interleaved
        schedule begins with one more forward pass on each rank, so that exchanges of one microbatch run during passes
        of another."""
        return Schedule(name, ahead=int(self.overlaps_experts and name is ScheduleName.INTERLEAVED))

    @property
    def overlaps_experts(self) -> bool:
        """Whether Megatron runs experts' exchanges during passes of other microbatches."""
        return self.runtime.passes_ahead and Overlap.EXPERTS.value in self.request.overlaps

    def restrictions(self, instance: Instance, schedule: ScheduleName) -> Restrictions:
        """The restrictions of the runtime on an instance. Raises UsageError for a model that it does not know."""
        overlapped = self.overlaps_experts and any(layer.experts for layer in instance.layers)
        # Megatron refuses several pipeline ranks then.
        wanted = 1 if overlapped and schedule not in CHUNKED else self.stages
        asked = Restrictions(constraints=[] if wanted is None else [StageCount(wanted)])
        found = self.runtime.restricted(asked, instance, schedule, min(self.domain, instance.devices))
        if not overlapped:
            return found
        return Restrictions(constraints=[_overlapped(x) if isinstance(x, OneMode) else x for x in found.constraints])

    def refuse_layouts(self) -> None:
        """Raises UsageError if the model or the cluster cannot have these degrees."""
        architecture = self.model.architecture(Microbatch(1, self.request.tokens or self.model.tokens, fused=True))
        every, layers = degrees_of(architecture.kinds, self.domain).values(), len(architecture.nodes)
        able = sorted({t for degrees in every for t in degrees})
        wanted, stages = self.tensor_parallel or (1,), self.stages or 1
        if not set(wanted) <= set(able):
            given, may = (", ".join(map(str, of)) for of in (wanted, able))
            raise UsageError(f"--tensor-parallel {given}: {may} of these GPUs can share this model's layers")
        if wanted[0] * stages > self.devices or stages > layers:
            raise UsageError(
                f"--stages {stages}: with TP {wanted[0]} they take {wanted[0] * stages:,} GPUs and a layer each; there "
                f"are {self.devices:,} GPUs and {layers} layers"
            )
        if stages > 1 and self.overlaps_experts and ScheduleName.INTERLEAVED not in self.schedules:
            raise UsageError(f"--stages {stages}: with --overlap experts several ranks run only interleaved")

    @property
    def layouts_text(self) -> str:
        """The degrees that the user fixed: ``, with TP 2 or 4 and 8 pipeline ranks``; empty if none is fixed."""
        degrees = "" if self.tensor_parallel is None else f"TP {' or '.join(map(str, self.tensor_parallel))}"
        ranks = "" if self.stages is None else plural(self.stages, "pipeline rank")
        return f", with {' and '.join(filter(None, (degrees, ranks)))}" if degrees or ranks else ""

    def planned_bytes(self, memory_bytes: float) -> float:
        """The bytes of a GPU that plans may use. Raises UsageError if none are left."""
        found = memory_bytes * (1.0 - self.headroom.share) - self.headroom.size_bytes - self.set_aside_bytes
        if found <= 0.0:
            left = size_text(memory_bytes - found)
            raise UsageError(f"{left} are to be left free, and a GPU has no more than {size_text(memory_bytes)}")
        return found

    def whole_bytes(self, planned_bytes: float) -> float:
        """The memory of a GPU that leaves ``planned_bytes`` to plans."""
        return (planned_bytes + self.headroom.size_bytes + self.set_aside_bytes) / (1.0 - self.headroom.share)

    def with_batch(self, tell: Tell) -> PlanDemand:
        """The demand with a batch that the devices divide, if the user gave no batch."""
        usual, batch = self.model.batch, usual_batch(self.model, self.devices)
        if self.request.batch is not None or batch == usual:
            return self
        tell(
            f"a batch of {batch:,} samples: {odd_part(self.devices)} divides the {self.devices:,} GPUs, but not the "
            f"usual batch of {usual:,} (--global-batch sets another)"
        )
        return replace(self, request=replace(self.request, batch=batch))

    def estimated(self, samples: int, batch: int | None = None, check: Callable[[], None] = lambda: None) -> Estimate:
        """The estimate for microbatches of ``samples`` samples. check: may raise, to stop it. Raises UsageError."""

        def with_schemes(made: Estimate) -> Estimate:
            return made if self.schemes is None else replace(made, instance=self.schemes(made, check))

        def made_on(gpu: str, request: EstimateRequest) -> Estimate:
            return with_schemes(estimate(self.model, self.hardware, gpu, request))

        request = replace(self.request, samples=samples, batch=self.request.batch if batch is None else batch)
        if self.stack is None:
            kinds = replace(self, request=request).kinds
            between_bytes_per_s = None if self.further is None else self.further.between_bytes_per_s
            if self.further is not None and self.further.apart and between_bytes_per_s is not None:
                made = with_sites(made_on(self.gpu, self._of_part(request)), self.parts, between_bytes_per_s)
            else:
                made = joined({name: made_on(gpu, one) for name, gpu, one in kinds}, between_bytes_per_s)
        else:
            made = with_schemes(estimate_on(self.stack, self.model, self.hardware, request))
        instance = made.instance.replace(cluster=made.instance.cluster.with_memory(self.planned_bytes))
        if self.tensor_parallel is not None:
            instance = replace(instance, layers=with_rows(instance.layers, partial(_divided, self.tensor_parallel)))
        check_instance(instance)  # once, not with each plan that is simulated
        return replace(made, instance=instance)

    def prices_like(self, other: PlanDemand) -> bool:
        """Whether layers cost the same as for the other demand, from which this one may differ in its nodes."""

        def priced(one: PlanDemand) -> tuple[object, ...]:
            request = replace(one.request, nodes=1, batch=one.request.batch or one.model.batch)
            stack = one.request.stack(one._gpu) if one.stack is None else one.stack
            waits = stack.is_large, stack.efficiency
            return replace(one, request=request), waits, request.offer.on(one.devices), one.tries_host

        return self.further is None and other.further is None and priced(self) == priced(other)

    @uncollected()
    def estimates(
        self, check: Callable[[], None] = lambda: None, known: Mapping[int, Estimate] = MappingProxyType({})
    ) -> tuple[dict[int, Estimate], list[str]]:
        """The estimates by samples of a microbatch, and a text about sizes that are too large.

        check: may raise, to stop it. known: estimates on other numbers of devices, for a demand that ``prices_like``
        this one. Raises UsageError if no estimate can be made, and InfeasibleError if even the layers of the smallest
        microbatches need more memory than there is.
        """
        found: dict[int, Estimate] = {}
        for samples in self.microbatch_sizes():
            try:
                alike = known.get(samples)
                made = self.estimated(samples, check=check) if alike is None else alike.on_devices(self.devices)
            except UsageError as error:  # as for microbatches that are too large; the smallest one tells of all else
                if not found:
                    raise
                return found, [f"microbatches of {samples} or more: {error}"]
            least = made.on_host if self.tries_host and made.least_devices > made.devices else made
            if least.least_devices > made.devices:
                if not found:
                    raise InfeasibleError(f"{_too_large(least, samples)}\n{self.nothing_fits}")
                return found, [_too_large(least, samples)]
            found[samples] = made
        return found, []

    @cached_property
    def tries_host(self) -> bool:
        """Whether the search also tries plans that keep the optimizer's state in host memory."""
        if self.request.optimizer_on_host is not None:
            return False
        if not may_be_on_host(self.runtime, self.request, self.hardware.training):
            return False
        return self.further is not None or host_excess(self.model, self._gpu, self.request) is None

    @property
    def _gpu(self) -> Gpu:
        """The GPU of the first kind."""
        return self.hardware.gpu(self.gpu) if self.stack is None else self.stack.gpu

    @property
    def host_bytes(self) -> float:
        """The bytes of a node's own memory that the optimizer's state may take; of several kinds the least."""
        if self.stack is not None:
            return self.request.host_bytes_of(self._gpu)
        return min(one.host_bytes_of(self.hardware.gpu(gpu)) for _, gpu, one in self.kinds)

    def hosts_hold(self, one: Proposed) -> bool:
        """Whether the nodes' own memory suffices for the optimizer's state that a plan keeps there."""
        return one.host_bytes(self.request.node_of(self._gpu)) <= self.host_bytes

    @property
    def nothing_fits(self) -> str:
        """What could make a plan fit, if none does."""
        wanted = [] if self.headroom.is_usual or not self.headroom else ["a smaller --headroom"]
        wanted.append("more nodes")
        if self.runtime.shares_state and self.request.offer.zero != ALL_REPLICAS:
            wanted.append("optimizer state shared among all replicas (zero)")
        return f"no plan fits{self.layouts_text}: it takes {', '.join(wanted)} or GPUs with more memory"

    @property
    def smallest(self) -> int:
        """The size of the smallest microbatch that is tried, in samples."""
        return next(self.microbatch_sizes())

    def microbatch_sizes(self) -> Iterator[int]:
        """The sizes that divide the batch, the smallest first: all up to 16, then powers of two and the model's own."""
        if self.request.samples is not None:
            yield self.request.samples
            return
        for size in divisors(self.request.batch or self.model.batch):
            if size <= _EVERY_SIZE_TO or size & (size - 1) == 0 or size == self.model.samples:
                yield size


def _divided(degrees: tuple[int, ...], layer: Layer) -> dict[int, tuple[Tmpc, ...]]:
    """The layer's rows with only these tensor-parallel degrees."""
    rows = {t: tuple(x for x in row if t // x.mode.context in degrees) for t, row in layer.tmpcs.items()}
    return {t: row for t, row in rows.items() if row}


_NOT_OVERLAPPED = {*Recomputation.FULL.parts, "moe"}
"""Whether Megatron refuses to recompute this while experts' exchanges overlap with passes."""

OVERLAPPED = (
    "with experts' exchanges overlapped (--overlap experts) Megatron runs several pipeline ranks only interleaved, "
    "and recomputes neither whole layers nor moe: other plans are not tried"
)


def _overlapped(rule: OneMode) -> OneMode:
    return replace(rule, recomputed=tuple(part for part in rule.recomputed or () if part not in _NOT_OVERLAPPED))


def _too_large(made: Estimate, samples: int) -> str:
    return (
        f"with microbatches of {samples}, one of them in flight, the layers need at least "
        f"{size_text(made.least_memory_bytes)}, {made.least_devices:,} GPUs or more: they do not fit on "
        f"{made.devices:,}"
    )


@dataclass(frozen=True)
class Proposed:
    """A plan with its simulation.

    samples: samples of a microbatch. estimate: the estimate for all plans of that size.
    """

    samples: int
    estimate: Estimate
    solution: Solution
    plan: Plan
    simulation: Simulation

    @property
    def instance(self) -> Instance:
        return self.estimate.instance

    @property
    def batch(self) -> int:
        """The batch in samples."""
        return self.samples * self.instance.microbatches

    @property
    def step_s(self) -> float:
        """The simulated seconds of a whole batch."""
        return self.simulation.step_s

    @property
    def value_s(self) -> float:
        """The figure that a search minimises."""
        return self.step_s

    @property
    def devices(self) -> int:
        """The number of devices that the plan uses."""
        return self.simulation.devices

    @property
    def stages(self) -> int:
        return len(self.plan.stages)

    @property
    def rank(self) -> tuple[float, ...]:
        """The order among equally fast plans: the least is preferred."""
        return (*rank_of(self.solution), self.samples)

    @property
    def on_host(self) -> bool:
        """Whether the plan keeps the optimizer's state in host memory."""
        return self.instance.model is not None and self.instance.model.optimizer_on_host

    def host_bytes(self, gpus_per_node: int) -> float:
        """The bytes of the fullest node's own memory that the optimizer's state takes; 0 if it is on GPUs. Ranks fill
        the nodes one after the other."""
        if not self.on_host:
            return 0.0
        nodes, of_gpus = self.estimate.architecture.nodes, list[float]()
        for rank in self.simulation.ranks:
            stages = [self.plan.stages[place] for place in rank.stages]
            held = sum(nodes[layer].kind.parameters for stage in stages for layer in stage.layers)
            gpus = stages[0].data_parallel_degree * stages[0].tensor_parallel_degree
            of_gpus += [HOST_BYTES * held / gpus] * gpus
        return max(sum(of_gpus[first : first + gpus_per_node]) for first in range(0, len(of_gpus), gpus_per_node))

    @property
    def idle_devices(self) -> int:
        """The number of GPUs of the cluster that the plan leaves idle."""
        return self.instance.devices - self.simulation.devices

    @cached_property
    def _as_run(self) -> Plan:
        """The plan, in which a layer with one replica is not sharded."""
        found = list[Stage]()
        for stage in self.plan.stages:
            chosen = {layer: tmpc.mode for layer, _, tmpc in choices_made(self.instance, stage)}
            alone = [layer for layer, mode in chosen.items() if stage.data_parallel_degree * mode.context == 1]
            whole = {layer: replace(chosen[layer], optimizer_shards=1).id for layer in alone}
            found.append(replace(stage, tmpc_ids={**stage.tmpc_ids, **whole}))
        return replace(self.plan, stages=tuple(found))

    def as_run(self, step: StepTerms) -> Proposed:
        """The same with layers of one replica that are not sharded, as a launch has them, if nothing else changes."""
        plan, layers = self._as_run, self.instance.layers
        if plan == self.plan or not all(
            any(tmpc.id == chosen for tmpc in layers[layer].tmpcs[stage.tensor_parallel_degree])
            for stage in plan.stages
            for layer, chosen in stage.tmpc_ids.items()
        ):
            return self
        found = replace(self, plan=plan).on(self.instance, step)
        alike = found.step_s == self.step_s and found.simulation.peak_memory_bytes == self.simulation.peak_memory_bytes
        return found if alike else self

    def is_same(self, other: Proposed) -> bool:
        """Whether both plans run in the same way; on one rank with one chunk all schedules are the same."""
        alike = (self.samples, self.on_host, self._as_run) == (other.samples, other.on_host, other._as_run)
        return alike and (self.solution.schedule == other.solution.schedule or len(self.plan.stages) == 1)

    def on(self, instance: Instance, step: StepTerms) -> Proposed:
        """The same plan for another instance that has its TMPCs."""
        simulation = simulate(instance, self.plan, self.solution.schedule, options=SimulationOptions.of(step))
        return replace(self, estimate=replace(self.estimate, instance=instance), simulation=simulation)


_HOURS_PER_DAY, _S_PER_HOUR = 24.0, 3600.0


@dataclass(frozen=True)
class Figures:
    """A plan's figures for people.

    mfu, hfu: shares of the peak rate of all devices of the cluster, idle ones included, by the definitions of
    ``estimate.roofline``. devices: the number that the plan uses. tokens_per_s_per_device: for each device of the
    cluster. tokens_per_s: None if a sample has no tokens. days, cost: those of the training that the user asked about;
    None if none.

    >>> import piper_ray
    >>> planned = piper_ray.plan("bert-large", "A100-80", microbatch_size=8, schedule="1f1b", zero=1)  # doctest: +SKIP
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
    """The figures of a plan. tokens: those of the whole training. price_per_hour: the price of one GPU, in any
    currency."""
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
    """The hardware FLOP of a step, with the layers that this plan recomputes."""
    nodes, again = proposed.estimate.architecture.nodes, 0.0
    for stage in proposed.plan.stages:
        for layer, _, tmpc in choices_made(proposed.instance, stage):
            kind = nodes[layer].kind
            again += hardware_flop(kind, tmpc.mode.recomputation) - hardware_flop(kind, Recomputation.NONE)
    return proposed.estimate.model_flop + proposed.instance.microbatches * again
