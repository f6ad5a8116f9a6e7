"""What a user asks of ``plan``; what is offered if options are left out, within a runtime's rules; and which options
are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from piper_ray.model.errors import UsageError
from piper_ray.model.headroom import Headroom
from piper_ray.model.instance import TrainedModel, divisors
from piper_ray.model.mode import ALL_REPLICAS, Sharding
from piper_ray.model.schedule import FLUSHED, ScheduleName, StepTerms
from piper_ray.model.units import parse_bytes
from piper_ray.proposal.demand import FurtherKinds, PlanDemand
from piper_ray.runtimes.runtime import Runtime
from piper_ray.workloads.estimate.build import EstimateRequest
from piper_ray.workloads.estimate.config import ModelConfig
from piper_ray.workloads.estimate.decoder_shape import decoder_shape
from piper_ray.workloads.estimate.doubt import memory_doubt
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.hardware import Hardware
from piper_ray.workloads.estimate.offered import attends
from piper_ray.workloads.estimate.operators import LayerKind
from piper_ray.workloads.estimate.refusals import why_not_on_host
from piper_ray.workloads.estimate.software import ContextExchange, context_exchange_named, software_named
from piper_ray.workloads.schemes.tmpcs import SchemeOffer

_LEAST_TOKENS = 2048
"""The fewest tokens of a group; fewer make products that are too small for a GPU."""

_MOST_GROUPS = 8


def _exchange(model: ModelConfig, runtime: Runtime, asked: str | None, contexts: tuple[int, ...] | None) -> str:
    """How groups share a sequence: as the user asked, else the runtime's usual way.

    contexts: the degrees that the user asked for. Raises UsageError if the runtime's launch files cannot express it for
    the model.
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
    """Why no attention kernel of TransformerEngine can exchange context in this way, with the option's name; None if
    one can, or if the runtime has other kernels."""
    shape = decoder_shape(TrainedModel(config=model.document))
    if shape is None or ContextExchange.RING.value not in runtime.context_exchanges:
        return None
    return shape.context_fault(exchange)


def usual_contexts(model: ModelConfig, tokens: int | None, runtime: Runtime, exchange: str) -> tuple[int, ...]:
    """The usual degrees: powers of two from 1 on; only 1 if the runtime's kernels cannot exchange context so."""
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


_MOST_EXPERT_NODES = 8


def usual_spreads(
    model: ModelConfig, tokens: int | None, runtime: Runtime, node: int, domain: int, devices: int
) -> tuple[tuple[int, int], ...]:
    """Pairs that are tried besides t: the ranks over which experts are spread, and the devices that share each expert.

    Their product is the number of GPUs of one, two, four or eight nodes; if the fast link joins several nodes (a domain
    of 72), all doublings of a node within the domain. More ranks leave more memory, and give each expert more tokens.
    There are as many ranks as divide the experts, since devices that share an expert gather its tokens. In one more
    pair the devices of a node share all experts, so that none is the busiest.
    """
    routed = [kind for kind in _kinds(model, tokens) if kind.experts]
    if not routed or node == 1 or not runtime.setting.experts:
        return ()
    most = domain if domain > node else node * _MOST_EXPERT_NODES
    shared = divisors(node) if runtime.setting.expert_tensor else [1]
    found, together = [], node
    while together <= min(most, devices):
        pairs = [(together // each, each) for each in shared]
        able = [pair for pair in pairs if all(kind.experts % pair[0] == 0 for kind in routed)]
        found += able[:1]
        together *= 2
    return (*found, *([(1, node)] if len(shared) > 1 else []))


def _kinds(model: ModelConfig, tokens: int | None) -> tuple[LayerKind, ...]:
    return model.architecture(Microbatch(1, tokens or model.tokens, fused=True)).kinds


def with_offers(
    request: EstimateRequest,
    model: ModelConfig,
    runtime: Runtime,
    domain: int,
    contexts: tuple[int, ...] | None,
    experts: tuple[int, ...] | None,
    software: str | None = None,
    exchange: str | None = None,
) -> EstimateRequest:
    """The request with context and expert parallelism, software, exchange of context, and what the runtime always does.

    contexts, experts: degrees; None: the usual ones. software, exchange: None: the runtime's own. domain: GPUs that
    share the fast link; the GPUs of a node, if the request does not give their number. Raises UsageError for an
    exchange that the runtime cannot do.
    """
    exchange = _exchange(model, runtime, exchange, contexts)
    node = request.gpus_per_node or domain
    devices = request.nodes * node
    spreads = usual_spreads(model, request.tokens, runtime, node, domain, devices) if experts is None else ()
    each_pass = runtime.sums_each_pass and request.offer.zero != 1
    most_ranks = max((ranks for ranks, _ in spreads), default=max(experts or (1,)))
    every = request.offer.fsdp == ALL_REPLICAS and each_pass  # which is offered there anyway
    offer = replace(
        request.offer,
        fsdp=1 if every else request.offer.fsdp,
        zero=request.offer.zero if runtime.shares_state else 1,
        sharded_over=_groups(devices, domain, most_ranks) if each_pass else (),
        summed_over=devices if runtime.sums_each_pass else 0,
        contexts=usual_contexts(model, request.tokens, runtime, exchange) if contexts is None else contexts,
        experts=() if experts is None else experts,
        spreads=spreads,
        gathered=runtime.setting.always_gathered,
        always_sequence=runtime.setting.experts_in_sequence and any(kind.experts for kind in _kinds(model, None)),
    )
    used = software or runtime.software
    return replace(request, offer=offer, software=used, context_exchange=exchange)


def _groups(devices: int, domain: int, expert_ranks: int) -> tuple[int, ...]:
    """The numbers of devices over which weights may be shared: all devices, or those of a domain, doubled repeatedly
    (HSDP), if such groups are equal and hold all experts."""
    found, size = [devices], domain
    while size < devices:
        if devices % size == 0 and size % expert_ranks == 0:
            found.append(size)
        size *= 2
    return tuple(found)


def schedules_of(runtime: Runtime, only: ScheduleName | None, *, kinds: bool = False) -> tuple[ScheduleName, ...]:
    """The schedules that are tried: ``only``, or those of 1f1b and interleaved that the runtime has. kinds: whether
    there are several kinds of GPUs.

    Raises UsageError for a schedule that the runtime does not have, or that is not planned there.
    """
    if only is not None:
        runtime.require_schedule(only)
        if kinds and only not in FLUSHED:
            raise UsageError(
                f"--schedule {only.value}: on GPUs of several kinds or at several sites plans are for 1f1b"
            )
        return (only,)
    usual = (ScheduleName.ONE_F_ONE_B,) if kinds else (ScheduleName.ONE_F_ONE_B, ScheduleName.INTERLEAVED)
    return tuple(name for name in usual if name in runtime.schedules)


def refuse_what_cannot_run(runtime: Runtime, request: EstimateRequest, hardware: Hardware) -> None:
    """Raises UsageError, with the option's name, for what the runtime's launch files cannot express."""
    setting, offer, title = runtime.setting, request.offer, runtime.title
    if offer.zero not in (1, ALL_REPLICAS) and runtime.shares_state and not runtime.sums_each_pass:
        raise UsageError(
            f"--zero {offer.zero}: {title} shares the optimizer's state among all replicas; expected all or 1"
        )
    if offer.zero2 > 1 and setting.most_sharding < Sharding.GRADIENTS:
        raise UsageError(f"--zero-2: {title} {runtime.no_more_sharing}")
    if offer.zero2 > 1 and runtime.sums_each_pass:
        raise UsageError(f"--zero-2: {title} shares weights and gradients (--fsdp), or the optimizer's state alone")
    if offer.fsdp != 1 and setting.most_sharding < Sharding.WEIGHTS:
        raise UsageError(f"--fsdp: {title} {runtime.no_more_sharing}; --runtime torchtitan shares weights")
    if offer.offload and not setting.offload:
        raise UsageError(f"--offload: {title}'s launch files have no activations in host memory")
    if request.optimizer_on_host and (reason := why_not_on_host(runtime, request, hardware.training)) is not None:
        raise UsageError(f"--optimizer-on-host: {reason}")
    if offer.gathered and not setting.gathered:
        raise UsageError(f"--keep-gathered: {title} gathers again what sequence parallelism divides")
    for recomputation in request.recomputations:
        if not setting.may_recompute(recomputation):
            raise UsageError(f"--recompute: {title} has no {recomputation.text}")
    if offer.expert_tensor > 1 and not setting.expert_tensor:
        raise UsageError(f"--expert-tensor-parallel: {title} divides no experts among GPUs")


def usual_headroom(request: EstimateRequest) -> Headroom:
    """The headroom with which 9 in 10 published peaks of such software stay within a GPU's memory."""
    return Headroom(share=memory_doubt(software_named(request.software)).headroom, is_usual=True)


def headroom_of(given: str | float) -> Headroom:
    """Reads a share such as 0.08, or a text such as "8%" or "4GiB". Raises UsageError."""
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


@dataclass(frozen=True)
class PlanQuestion:
    """What a user asks of ``plan``, before the runtime offers what it has. None: the runtime's own, or what is usual.

    asked: the request, on any number of nodes. schedule: no other one. contexts, experts: the degrees of context and
    expert parallelism. software, context_exchange, headroom, between_bytes_per_s, step, tensor_parallel, stages: as of
    ``PlanDemand`` and its parts. schemes: whether TMPCs that are found from operators are offered, too.
    """

    model: ModelConfig
    hardware: Hardware
    runtime: Runtime
    asked: EstimateRequest
    schedule: ScheduleName | None = None
    contexts: tuple[int, ...] | None = None
    experts: tuple[int, ...] | None = None
    software: str | None = None
    context_exchange: str | None = None
    headroom: Headroom | None = None
    between_bytes_per_s: float | None = None
    step: StepTerms = StepTerms()
    schemes: bool = False
    tensor_parallel: tuple[int, ...] | None = None
    stages: int | None = None

    def request(self, gpu: str, nodes: int) -> EstimateRequest:
        """What is asked for on so many nodes with a GPU, with what the runtime can be offered there. Raises
        UsageError."""
        refuse_what_cannot_run(self.runtime, self.asked, self.hardware)
        there = replace(self.asked, nodes=nodes).on(self.hardware.gpu(gpu))
        domain, degrees = there.domain_of(self.hardware.gpu(gpu)), (self.contexts, self.experts)
        return with_offers(there, self.model, self.runtime, domain, *degrees, self.software, self.context_exchange)

    def demand(self, kinds: Mapping[str, tuple[str, int]]) -> PlanDemand:
        """The demand on a cluster. kinds: the GPU and the nodes of each kind or site. Raises UsageError."""
        schedules = schedules_of(self.runtime, self.schedule, kinds=len(kinds) > 1)
        (name, gpu, request), *others = ((name, gpu, self.request(gpu, nodes)) for name, (gpu, nodes) in kinds.items())
        at_sites = schedules_of(self.runtime, self.schedule)
        return PlanDemand(
            self.model,
            self.hardware,
            gpu,
            request,
            self.runtime,
            schedules,
            self.step,
            headroom=usual_headroom(request) if self.headroom is None else self.headroom,
            further=FurtherKinds(name, tuple(others), self.between_bytes_per_s, at_sites=at_sites) if others else None,
            schemes=SchemeOffer(request.offer.zero == ALL_REPLICAS) if self.schemes else None,
            tensor_parallel=self.tensor_parallel,
            stages=self.stages,
        )
