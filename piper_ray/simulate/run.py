"""``simulate``: runs a plan under a schedule, from the action lists to the figures of each rank. Also its assumptions
about transfers, all-reduces and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from piper_ray.model import arguments
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import AllReduce, Schedule, ScheduleName, StepTerms, seconds, share

if TYPE_CHECKING:
    from piper_ray.simulate.result import Simulation
    from piper_ray.workloads.formats.load import Source


class InFlightRule(str, Enum):
    """How many microbatches a replica of a 1F1B schedule keeps in flight.

    RULE: as the plan states, else y = ceil(s / d), as plans count memory.
    SUSTAINING: the least numbers that let an asynchronous schedule run at the rate of its slowest stage.

    >>> SimulationOptions(in_flight="sustaining").in_flight
    <InFlightRule.SUSTAINING: 'sustaining'>
    """

    RULE = "rule"
    SUSTAINING = "sustaining"


class Transfers(str, Enum):
    """How stages pass on tensors.

    IN_PASSES: both stages wait during a transfer, as in Piper's model. OVERLAPPED: stages compute during transfers; a
    rank sends one tensor at a time, and only a stage that needs the data waits. Under interleaved this is Megatron's
    ``--overlap-p2p-communication-warmup-flush``. OVERLAPPED_STEADY: Megatron's default under interleaved: as
    OVERLAPPED, but in the warm-up and the flush a pass waits until the preceding send has finished. ONE_STREAM: as
    IN_PASSES, but all sends and receives of a rank share one stream, as in torch.distributed.pipelining on NCCL. A
    receive that is posted early then delays all later transfers. Exports to torch and torchtitan post each receive when
    its data are produced, which delays nothing and takes as long as IN_PASSES.

    >>> SimulationOptions(transfers="one-stream").transfers
    <Transfers.ONE_STREAM: 'one-stream'>
    """

    IN_PASSES = "in-passes"
    OVERLAPPED = "overlapped"
    OVERLAPPED_STEADY = "overlapped-steady"
    ONE_STREAM = "one-stream"

    @property
    def overlaps(self) -> bool:
        """Whether a rank's passes continue while it sends."""
        return self in (Transfers.OVERLAPPED, Transfers.OVERLAPPED_STEADY)


@dataclass(frozen=True)
class SimulationOptions:
    """The assumptions of a simulation about a cluster and a batch. Raises UsageError for figures that make no sense.

    latency_s: added to each transfer between the end of a pass and the arrival, whatever its size. transfers: how
    stages pass on tensors; one-stream only under schedules that flush. pass_overlap: for two passes that dualpipe-v
    runs as one, the share of the shorter one's work that overlaps with the other. all_reduce, all_reduce_overlap,
    optimizer_s: as in ``StepTerms``; the overlap only counts under schedules that flush. in_flight: an
    ``InFlightRule``, or for each stage the microbatches that a replica keeps in flight. vertical_sync: under pipedream,
    peaks of memory contain the versions of the weights that vertical sync keeps, instead of those that stashing keeps.
    samples_per_microbatch, tokens_per_sample: numbers of the batch, in place of the instance's.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1)
    >>> piper_ray.simulate(bert, solution.plan, options=piper_ray.SimulationOptions(latency_s=5e-6)).schedule.text
    '1f1b'
    """

    latency_s: float = 0.0
    transfers: Transfers = Transfers.IN_PASSES
    pass_overlap: float = 0.0
    all_reduce: AllReduce = AllReduce.PARAMETER_SERVER
    all_reduce_overlap: float = 0.0
    optimizer_s: float = 0.0
    in_flight: InFlightRule | tuple[int, ...] = InFlightRule.RULE
    vertical_sync: bool = False
    samples_per_microbatch: int | None = None
    tokens_per_sample: int | None = None

    @classmethod
    def of(cls, terms: StepTerms) -> SimulationOptions:
        """Options with the terms of a step, and defaults for all else."""
        return cls(
            all_reduce=terms.all_reduce,
            all_reduce_overlap=terms.all_reduce_overlap,
            optimizer_s=terms.optimizer_s,
        )

    def __post_init__(self) -> None:
        found: dict[str, object] = {
            "latency_s": seconds("latency_s", self.latency_s),
            "optimizer_s": seconds("optimizer_s", self.optimizer_s),
            "all_reduce_overlap": share("all_reduce_overlap", self.all_reduce_overlap),
            "pass_overlap": share("pass_overlap", self.pass_overlap),
            "transfers": arguments.choice("transfers", self.transfers, Transfers),
            "all_reduce": arguments.choice("all_reduce", self.all_reduce, AllReduce),
            "vertical_sync": arguments.flag("vertical_sync", self.vertical_sync),
        }
        for name in ("samples_per_microbatch", "tokens_per_sample"):
            if getattr(self, name) is not None:
                found[name] = arguments.positive(name, getattr(self, name))
        if isinstance(self.in_flight, str):
            found["in_flight"] = arguments.choice("in_flight", self.in_flight, InFlightRule)
        else:
            kept = arguments.whole_numbers("in_flight", self.in_flight)
            if any(y < 1 for y in kept):
                raise UsageError(f"in_flight must be at least 1 for each stage, not {arguments.shown(self.in_flight)}")
            found["in_flight"] = kept
        for name, value in found.items():
            object.__setattr__(self, name, value)


_DEFAULTS = SimulationOptions()


def simulate(
    instance: Instance | Source,
    plan: Plan,
    schedule: Schedule | ScheduleName | str | None = None,
    *,
    options: SimulationOptions = _DEFAULTS,
) -> Simulation:
    """Runs ``plan`` event by event under ``schedule``: a ``Schedule``, or the name of one with its usual chunks; None:
    the instance's own, else Piper's, "2bw".

    instance: an Instance, or what ``load`` accepts, such as a path. The schedule spreads the plan's stages over the
    ranks: one on each, or chunk by chunk (stage j on rank j mod p; in a V, forth and back). They may need more memory
    than there is; the simulation reports how much.

    Raises InvalidPlan with every other rule that the plan breaks, InputError for an invalid instance or plan,
    UsageError for a schedule that cannot run the batch, and LimitError for too many microbatches.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> plan = piper_ray.solve(bert, threads=1).plan
    >>> piper_ray.simulate(bert, plan, "gpipe").schedule.name
    <ScheduleName.GPIPE: 'gpipe'>
    """
    from piper_ray.simulate.assemble import simulated
    from piper_ray.workloads.formats.load import instance_of
    from piper_ray.workloads.formats.objects import check_plan

    arguments.of_kind("plan", plan, Plan, "a Plan (load_plan reads one)")
    check_plan(plan)
    arguments.of_kind("options", options, SimulationOptions, "a SimulationOptions")
    instance = instance_of(instance)
    under = Schedule.first_of(schedule, instance.schedule)
    plan.require_one_pipeline("a simulation")
    if under.asynchronous:
        instance.require_one_site(f"schedule {under.name.value}")
    return simulated(instance, plan, under, options)
