"""Checks whether a certificate proves its bound: from the instance, without the solver's code.

Suppose a plan keeps within T: every stage takes less. Build it from the back. Its tails are sets of layers closed under
successors, each with the devices that its stages use and the sum of their d. By induction, each tail takes at least as
much, in both, as some listed state of its layers:

- the empty one takes (0, 0), which is listed;
- let a stage with degrees d and t come in front of a tail with layers J that a listed state (n, s) bounds. Its memory
  grows with the microbatches in flight, y = 1 + ceil(s / d), and these with s: so it also fits in front of the listed
  state. The check considers all stages that fit in front of (n, s), in time and memory by some choice of
  configurations, and verifies for each that (n + d t, s + d) is at least some listed state, or leaves too little for
  the layers in front, by the devices and replicas that their work alone needs. The latter is impossible in a plan.

So the whole takes at least a listed state of all layers. None is within K and min(N, K), so there is no such plan.

If groups of a cluster have links of their own, plans that fit in a group are priced by its link: each group size is
claimed and checked separately. The formulas are those of the paper's section 3, as in ``evaluate``.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from piper_ray.certificate.certificate import (
    Certificate,
    StageWay,
    Tails,
    charged,
    free_bytes,
    levels_of,
    on_kinds,
    read_after,
    require_certifiable,
    ways_of,
)
from piper_ray.certificate.flush_check import check_flush
from piper_ray.certificate.flush_kinds import PlacedWays
from piper_ray.certificate.joined import check_joined, memory_is_ample
from piper_ray.certificate.kernels.closure import first_gap
from piper_ray.certificate.kernels.types import TOO_HARD, UNFIT, Claim, ThreadScratch, make_scratch
from piper_ray.certificate.tables import Vertices, claim_of, count_downsets
from piper_ray.model import arguments
from piper_ray.model.constraints import Restrictions, SameDegreesByKind, Unplaced
from piper_ray.model.cores import usable_cores
from piper_ray.model.errors import CertificateRefused, ChoiceTooHard
from piper_ray.model.figures import PROOF_TOLERANCE, relative_gap
from piper_ray.model.instance import Instance
from piper_ray.model.plan import Plan
from piper_ray.model.plan_rules import with_fastest_borders
from piper_ray.model.schedule import FLUSHED, PAPERS_SCHEDULE, Schedule, StepTerms
from piper_ray.model.stop import Stop
from piper_ray.workloads.formats.load import Source, instance_of

_FEW_ROWS = 100_000
"""A certificate with up to this number of rows is read for any workload."""

_BYTES_OF_DOWNSET = 96
"""Further bytes of a downset for each mode of a stage."""

_AT_ONCE = 64
"""Number of tails in a call. Requests to stop are checked between two calls."""


@dataclass(frozen=True)
class CertifiedBound:
    """The result of a check: under ``restrictions`` no plan takes less than bound_s, seconds per sample; inf: there is
    none.

    downsets: the sets of layers considered as tails. tails: those that a plan within the bound might have; under a
    flush the number of their states. Under 2bw, stages: considered in front of these; choices: the number of these for
    which configurations had to be chosen. Under a flush, pairs: of d and t that a plan may have; by_prices: those
    settled without tails.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> certificate = piper_ray.certify(bert, piper_ray.solve(bert, threads=1, schedule="2bw"))
    >>> piper_ray.verify_certificate(bert, certificate).downsets > 0
    True
    """

    bound_s: float
    restrictions: Restrictions
    schedule: Schedule
    step: StepTerms
    downsets: int
    tails: int
    stages: int = 0
    choices: int = 0
    pairs: int = 0
    by_prices: int = 0

    def gap(self, time_s: float) -> float | None:
        """Returns the relative difference by which a plan could be faster than ``time_s``. None if the bound does not
        concern a plan of such a time: there is no plan, or none as fast."""
        if self.bound_s > time_s * (1.0 + PROOF_TOLERANCE):
            return None
        return relative_gap(time_s, self.bound_s)

    @property
    def is_unrestricted(self) -> bool:
        """Whether the bound holds for all plans under its schedule."""
        return self.restrictions == Restrictions()

    @property
    def restrictions_text(self) -> str:
        """The restrictions of the plans for which the bound holds."""
        return ", ".join(map(repr, self.restrictions.constraints)) or repr(self.restrictions)

    def silent_on(
        self,
        instance: Instance,
        plan: Plan,
        time_s: float,
        schedule: Schedule | None = None,
        step: StepTerms | None = None,
    ) -> tuple[str, ...]:
        """Returns the reasons why the bound says nothing about a plan of that time, a sentence each; none if it does.

        schedule, step: with which the plan is valued; None: those of the bound.
        """
        if plan.shares:
            return ("the plan has pipelines of one kind of devices each; it is of plans with one pipeline",)
        reasons = list(self.restrictions.violations(instance, plan))
        if schedule is not None and schedule.settled != self.schedule.settled:
            reasons.append(f"it is of plans under {self.schedule.text}, and the plan is valued under {schedule.text}")
        elif step is not None and not self.schedule.asynchronous and step != self.step:
            reasons.append("it is of steps with other terms: another all-reduce, overlap or optimizer")
        if plan.in_flight is not None:
            reasons.append("the plan says itself how many microbatches it keeps in flight; it is of plans that do not")
        if not self.schedule.asynchronous:
            reasons += SameDegreesByKind().violations(instance, plan)
        if not reasons and self.gap(time_s) is None:
            reasons.append("its memory is above the limit, by less than plans are granted")
        return tuple(reasons)


def verify_certificate(
    instance: Instance | Source,
    certificate: Certificate | str | os.PathLike[str],
    *,
    threads: int | None = None,
    stop: Stop[Any] | None = None,
) -> CertifiedBound:
    """Checks that a certificate, or one in a file, proves its bound for the instance.

    It takes about as long as the last evaluation of the solve. threads: None: one for each core.
    Raises CertificateRefused if the certificate is damaged, of another workload, or does not prove its bound;
    LimitError if the downsets do not fit in memory, or a choice of configurations is too hard to make.

    >>> import piper_ray
    >>> bert = piper_ray.estimate("bert-large", "A100-80")
    >>> solution = piper_ray.solve(bert, threads=1, schedule="2bw")
    >>> proved = piper_ray.verify_certificate(bert, piper_ray.certify(bert, solution))
    >>> proved.gap(solution.time_per_sample_s) < 1e-8
    True
    """
    instance = instance_of(instance)
    if threads is not None:
        arguments.positive("threads", threads)
    if not isinstance(certificate, Certificate):
        certificate = read_after(certificate, lambda head, rows: _refuse_too_many(instance, head, rows))
    on_levels = _levels_of(instance, certificate)
    if not certificate.schedule.asynchronous:
        counts = check_flush(instance, certificate, threads or usable_cores(), stop or Stop())
        return CertifiedBound(
            bound_s=certificate.bound_s,
            restrictions=certificate.restrictions,
            schedule=certificate.schedule,
            step=certificate.step,
            downsets=counts.downsets,
            tails=counts.tails,
            pairs=counts.pairs,
            by_prices=counts.by_prices,
        )
    found = [
        _check_level(level, tails, certificate, threads or usable_cores(), stop or Stop())
        for level, tails in zip(on_levels, certificate.tails, strict=True)
    ]
    downsets, live, stages, choices = (sum(counts) for counts in zip(*found, strict=True))
    return CertifiedBound(
        bound_s=certificate.bound_s,
        restrictions=certificate.restrictions,
        schedule=certificate.schedule,
        step=certificate.step,
        downsets=downsets,
        tails=live,
        stages=stages,
        choices=choices,
    )


def _levels_of(instance: Instance, certificate: Certificate) -> list[Instance]:
    """Returns the instances for which the certificate has tails. Raises CertificateRefused if it is not of this
    instance."""
    if certificate.digest != instance.digest:
        raise CertificateRefused(
            f'the certificate is for another workload or cluster ("{certificate.name}"): give the same input, and the '
            "same devices, microbatches, memory and bandwidth as to the solve"
        )
    require_certifiable(certificate.restrictions, certificate.schedule)
    if instance.cluster.kinds and certificate.schedule.name not in (*FLUSHED, PAPERS_SCHEDULE.name):
        raise CertificateRefused(
            f"bounds under {certificate.schedule.name.value} have no certificate on devices of several kinds"
        )
    on_levels = levels_of(charged(instance, certificate.restrictions))
    if not certificate.schedule.asynchronous:
        return on_levels
    if not instance.cluster.kinds and not certificate.restrictions.has(Unplaced):
        on_levels = [with_fastest_borders(level) for level in on_levels]
    if instance.cluster.kinds:
        _check_parts(on_levels[0], certificate)
        on_levels = [on_kinds(on_levels[0], tails.kinds) for tails in certificate.tails]
    if [tails.devices for tails in certificate.tails] != [level.devices for level in on_levels]:
        raise CertificateRefused(
            "the certificate leaves out some of the groups of devices that have links of their own"
        )
    return on_levels


def _check_parts(instance: Instance, certificate: Certificate) -> None:
    """Checks that every plan is in a part: some layer is on a given kind in all parts, on each kind in some, and so on
    within these."""
    ways, left = ways_of(instance, certificate.restrictions), [[dict(tails.kinds) for tails in certificate.tails]]
    while left:
        parts = left.pop()
        if {} in parts:
            continue
        shared = set.intersection(*(set(part) for part in parts)) if parts else set()
        if not shared & set(instance.layer_by_id):
            raise CertificateRefused("the certificate leaves out plans with some layers on other kinds of devices")
        layer = min(shared & set(instance.layer_by_id))
        for kind in {way.kind for way in ways if way.tmpcs[layer]}:
            within = [part for part in parts if part[layer] == kind]
            left.append([{v: x for v, x in part.items() if v != layer} for part in within])


def _refuse_too_many(instance: Instance, head: Certificate, rows: int) -> None:
    """Raises CertificateRefused if there are more states than possible, before they are read. head: the certificate
    without its states.

    For each number of devices a tail needs only the state of least sum of d. On one kind it needs for each sum only
    that of fewest devices.
    """
    if rows <= _FEW_ROWS:
        return
    if not head.schedule.asynchronous:
        raise CertificateRefused(f"the certificate has {rows:,} rows; under a flush it has none")
    most = 0
    for level, tails in zip(_levels_of(instance, head), head.tails, strict=True):
        downsets = count_downsets(level, tails, max(2, int(free_bytes() / _BYTES_OF_DOWNSET)))
        of_kinds = [1 + own.devices for own in level.cluster.alike]
        states = math.prod(of_kinds) if len(of_kinds) > 1 else 1 + min(level.devices, level.data_parallel_limit)
        most += downsets * len(of_kinds) ** 2 * states
    if rows > most:
        raise CertificateRefused(f"the certificate has {rows:,} rows; for this workload there are {most:,} at the most")


def _check_level(
    instance: Instance, tails: Tails, certificate: Certificate, threads: int, stop: Stop[Any]
) -> tuple[int, int, int, int]:
    """Returns the numbers of downsets, live tails, stages and choices considered. Raises CertificateRefused if a plan
    may be faster."""
    ways = ways_of(instance, certificate.restrictions)
    if certificate.bound_s == 0.0 or any(not any(way.tmpcs[layer.id] for way in ways) for layer in instance.layers):
        return 0, 0, 0, 0  # no plan takes less than no time, and none has a layer that cannot be run
    check_joined(instance, ways, tails.joined, ample_memory=memory_is_ample(instance))
    vertices, kinds = Vertices.of(instance, tails), range(len(instance.cluster.kind_names))
    placed = PlacedWays.of(instance, vertices, ways, [(kind, kind) for kind in kinds], None)
    ways = tuple(ways[w] for w in placed.way)
    most = max(2, int(free_bytes() / (_BYTES_OF_DOWNSET + 72 * len(ways))))
    claim = claim_of(instance, vertices, ways, placed, tails, certificate.bound_s, most)
    _check_ends(instance, claim)
    scratches = [make_scratch(claim) for _ in range(threads)]
    idle: SimpleQueue[ThreadScratch] = SimpleQueue()
    for scratch in scratches:
        idle.put(scratch)

    def look(first: int) -> None:
        scratch = idle.get()
        try:
            stop.check()
            _look(first, claim, scratch, ways, tails)
        finally:
            idle.put(scratch)

    live = int(claim.tails.live.size)
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(look, range(0, live, _AT_ONCE)):  # if one raises, the rest is left out
            pass
    stages, choices = (sum(int(scratch.tested[what]) for scratch in scratches) for what in (0, 1))
    return int(claim.tails.worth.size), live, stages, choices


def _check_ends(instance: Instance, claim: Claim) -> None:
    """Checks that the empty tail takes nothing, and that all layers together take more than there is."""
    tails, available = claim.tails, claim.cluster.devices
    kinds, size = available.size, tails.worth.size

    def states(front: int, downset: int) -> range:
        place = front * size + downset
        return range(tails.start[place], tails.start[place + 1])

    for kind in range(kinds):
        empty = states(kind * kinds + kind, 0)
        if not any(tails.data_parallel_sum[at] == 0 and not tails.devices[at].any() for at in empty):
            raise CertificateRefused("the certificate does not list the empty tail, which takes nothing")
    for at in (at for front in range(kinds**2) for at in states(front, size - 1)):
        if all(tails.devices[at] <= available) and tails.data_parallel_sum[at] <= instance.data_parallel_limit:
            raise CertificateRefused(
                f"the certificate itself leaves room for a plan within its bound, on {tails.devices[at].sum()} devices"
            )


def _look(first: int, claim: Claim, scratch: ThreadScratch, ways: tuple[StageWay, ...], tails: Tails) -> None:
    """Checks the stages in front of a few live tails, from ``first`` on. Raises CertificateRefused or ChoiceTooHard."""
    found = first_gap(first, min(first + _AT_ONCE, claim.tails.live.size), claim, scratch)
    if found == TOO_HARD:
        raise ChoiceTooHard
    if found != UNFIT:
        raise CertificateRefused(_gap_text(claim, scratch, ways, tails))


def _gap_text(claim: Claim, scratch: ThreadScratch, ways: tuple[StageWay, ...], tails: Tails) -> str:
    """Describes the stage that leads to a tail that is not listed."""
    j, i, r, k = (int(x) for x in scratch.gap)
    bits = [int(word) for word in claim.tails.bits[i] & ~claim.tails.bits[j]]
    layers = [layer for v, layer in enumerate(tails.layers) if bits[v >> 6] >> (v & 63) & 1]
    some = ", ".join(map(str, sorted(layers)[:8])) + (", ..." if len(layers) > 8 else "")
    return (
        f"the certificate does not prove its bound: a stage of layers {some} with d = {claim.cluster.degrees[k]} and "
        f"t = {ways[r].degree} is faster, and what it leads to is not ruled out"
    )
