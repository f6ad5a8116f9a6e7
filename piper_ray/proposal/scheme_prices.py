"""Schemes that are cheaper at a plan's own price of memory. They are offered to the search until there are none.

Layers share a memory (column generation). For the known schemes, the price of a byte is sought at which the layers'
least time, with the memory paid for, is the largest: no choice of known schemes takes less. At that price each kind of
layer is searched for a cheaper scheme. If there is none, no choice of any schemes takes less.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from piper_ray.cost.schedules import sync_s_per_byte
from piper_ray.cost.stage import held_bytes
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Tmpc
from piper_ray.model.mode import ALL_REPLICAS, Mode, Sharding
from piper_ray.model.plan import Plan
from piper_ray.model.schedule import FLUSHED, StepTerms
from piper_ray.simulate.result import RankSimulation, Simulation
from piper_ray.simulate.run import SimulationOptions, simulate
from piper_ray.workloads.estimate.build import Estimate
from piper_ray.workloads.formats.load import load_plan, plan_claims
from piper_ray.workloads.schemes.frontier import FoundScheme, KindSchemes
from piper_ray.workloads.schemes.graph import TensorPlacement
from piper_ray.workloads.schemes.kept import planned_schemes
from piper_ray.workloads.schemes.layers import BORDERS
from piper_ray.workloads.schemes.names import name_of
from piper_ray.workloads.schemes.program import PROGRAM_GAP, SchemeProgram
from piper_ray.workloads.schemes.scheme import Scheme
from piper_ray.workloads.schemes.tmpcs import SchemeOffer, room_again_bytes, tmpc_of_scheme, with_more, with_schemes


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan for an estimated workload with schemes. step: the terms for which it was found."""

    estimate: Estimate
    plan: Plan
    simulation: Simulation
    step: StepTerms

    def estimate_of(self, kind: str) -> Estimate:
        """What the costs on a kind of devices are made from."""
        return self.estimate.kinds[self.estimate.instance.cluster.kind_names.index(kind)] if kind else self.estimate


def asked_at_prices(
    best: SimulatedPlan, offer: SchemeOffer, check: Callable[[], None]
) -> tuple[SchemeOffer, float | None]:
    """The offer with the schemes that cost less than the known ones at the memory prices of the plan's ranks, or the
    same offer; and a share of the slowest stage's time. Other schemes of the rule table, whole or in part and within
    the memory, could save at most this share of the time of the stage that is then the slowest.

    The share is None if the plan has stages of one device, where nothing is divided, or several stages on a rank, or
    the optimizer's state in host memory. check: called from time to time; an exception from it ends the search.
    """
    ranks = {rank.stages: rank for rank in best.simulation.ranks}
    whole = any(stage.tensor_parallel_degree == 1 for stage in best.plan.stages)
    model = best.estimate.instance.model
    on_host = model is not None and model.optimizer_on_host
    if on_host or whole or any(len(stages) > 1 for stages in ranks):
        return offer, None
    kinds = {
        (device, of.kind.key, t): of
        for device, t in {(stage.kind, stage.tensor_parallel_degree) for stage in best.plan.stages}
        for of in offer.kinds(best.estimate_of(device), t, check)
        if of.kind is not None and of.priced is not None
    }
    more = defaultdict[str, list[Scheme]](list, {key: [*found] for key, found in offer.more.items()})
    slowest_s, then_s = 0.0, 0.0
    for rank in ranks.values():
        layers = _RankLayers.of(best, rank, offer.zero)
        least_s = layers.time_s
        for border in BORDERS:
            asked = _AskedSchemes(layers, border, kinds, check)
            found = asked.least_time()
            least_s = min(least_s, found.bound_s)
            if found.bound_s < layers.time_s * (1.0 - PROGRAM_GAP):
                for number, scheme in found.columns:
                    of_graph = more[asked.digest(number)]
                    of_graph += [scheme] if scheme not in of_graph else []
        slowest_s, then_s = max(slowest_s, layers.time_s), max(then_s, least_s)
    grown = {key: tuple(found) for key, found in more.items()}
    return (offer if grown == dict(offer.more) else replace(offer, more=grown)), 1.0 - then_s / slowest_s


def asked_by_plan(
    path: Path,
    estimate: Estimate,
    kinds: list[KindSchemes],
    zero: bool,
    check: Callable[[], None],
    tell: Callable[[str], None],
) -> tuple[list[KindSchemes], float]:
    """The kinds of layers with the schemes of a plan that ``solve`` wrote and with those that are cheaper at its memory
    prices; and the largest share of the slowest stage's time that other schemes could save.

    check: as in ``asked_at_prices``. tell: receives a note. Raises UsageError, InputError and InvalidPlan.
    """
    claims = plan_claims(path)
    if claims.schedule is None or claims.schedule.name not in FLUSHED:
        raise UsageError(f"--plan {path}: expected a plan that solve wrote under --schedule 1f1b or gpipe")
    own = {one.digest: planned_schemes(claims.schemes, one.priced, one.degree) for one in kinds if one.priced}
    known = [with_more(one, own[one.digest]) if one.priced else one for one in kinds]
    instance = with_schemes(estimate, known, zero)
    plan = load_plan(path, instance)
    options = SimulationOptions.of(claims.step)
    simulation = simulate(instance, plan, claims.schedule, options=options)
    rows = [
        (instance.layer_by_id[x].tmpcs[y.tensor_parallel_degree], z) for y in plan.stages for x, z in y.tmpc_ids.items()
    ]
    modes = [next(one.mode for one in row if one.id == tmpc_id) for row, tmpc_id in rows]
    if len({mode.sequence_parallel or mode.context > 1 for mode in modes}) > 1:
        tell(
            f"{path}: values between layers lie in shards of tokens here and replicated there; what it takes to bring "
            "them from one to the other is not counted: solve --runtime megatron finds plans of one of both"
        )
    best = SimulatedPlan(replace(estimate, instance=instance), plan, simulation, claims.step)
    offer, save = asked_at_prices(best, SchemeOffer(zero, own), check)
    if save is None:
        raise UsageError(
            f"--plan {path}: a stage has t = 1, several stages are on a rank, or the optimizer's state is on the host: "
            "no scheme is asked for there"
        )
    return [with_more(one, offer.more.get(one.digest, ())) if one.priced else one for one in known], save


@dataclass(frozen=True)
class _RankLayers:
    """The layers of a rank, on one of its replicas.

    estimate, device: of the rank's devices, and their kind. rows: for each kind of layer, by its key, the TMPCs that
    are offered at the rank's degree. sync_s: seconds for each byte of weights and microbatch. time_s: seconds a
    microbatch of the TMPCs that the plan chose. most_bytes: memory for them.
    """

    estimate: Estimate
    device: str
    degree: int
    replicas: int
    in_flight: int
    sync_s: float
    zero: bool
    counts: Counter[str]
    rows: dict[str, tuple[Tmpc, ...]]
    time_s: float
    most_bytes: float

    @classmethod
    def of(cls, best: SimulatedPlan, rank: RankSimulation, zero: bool) -> _RankLayers:
        stage, instance = best.plan.stages[rank.stages[0]], best.estimate.instance
        nodes = best.estimate.architecture.nodes
        d, t = stage.data_parallel_degree, stage.tensor_parallel_degree
        keys = [nodes[layer].kind.key for layer in stage.layers]
        rows = {
            key: tuple(x for x in instance.layer_by_id[layer].tmpcs[t] if x.kind == stage.kind)
            for key, layer in zip(keys, stage.layers, strict=True)
        }
        chosen = [
            next(one for one in rows[key] if one.id == stage.tmpc_ids[layer])
            for key, layer in zip(keys, stage.layers, strict=True)
        ]
        sync_s = sync_s_per_byte(best.step, instance.cluster.of_kind(stage.kind), d, t) * d / instance.microbatches
        of_device = best.estimate_of(stage.kind), stage.kind
        found = cls(*of_device, t, d, rank.in_flight[0], sync_s, zero, Counter(keys), rows, 0.0, 0.0)
        taken = [found.taken(one) for one in chosen]
        free_bytes = rank.memory_limit_bytes - rank.peak_memory_bytes
        return replace(found, time_s=sum(one[0] for one in taken), most_bytes=free_bytes + sum(one[1] for one in taken))

    def taken(self, tmpc: Tmpc) -> Taken:
        """Seconds a microbatch, and bytes held."""
        held = held_bytes(tmpc.activation_bytes, tmpc.fixed_bytes, tmpc.shared_bytes, self.in_flight, self.replicas)
        return tmpc.time_per_sample_s + self.sync_s * tmpc.weights_bytes, float(held)

    def rows_at(self, key: str, border: TensorPlacement) -> list[Taken]:
        """The TMPCs that a kind may have with this distribution of the values between layers."""
        of_kind = self.rows[key]
        shares = Mode(sharding=Sharding.OPTIMIZER, optimizer_shards=ALL_REPLICAS if self.zero else 1).shares
        alike = [
            one
            for one in of_kind
            if (one.mode.context, one.mode.experts, one.mode.shares) == (1, None, shares)
            and one.mode.sequence_parallel == bool(border.axis)
        ]
        return [self.taken(one) for one in alike or of_kind]


class _AskedSchemes:
    """For each kind of the rank's layers, the program with one distribution at its borders."""

    def __init__(
        self,
        layers: _RankLayers,
        border: TensorPlacement,
        kinds: dict[tuple[str, str, int], KindSchemes],
        check: Callable[[], None],
    ) -> None:
        self._layers, self._border, self._check = layers, border, check
        self._of = [kinds.get((layers.device, key, layers.degree)) for key in layers.counts]
        self._programs = [
            SchemeProgram(of.priced.graph, of.degree, of.priced.prices, border) if of and of.priced else None
            for of in self._of
        ]
        self._known = [layers.rows_at(key, border) for key in layers.counts]

    def digest(self, number: int) -> str:
        """The key that tells for what a kind's schemes were found."""
        of = self._of[number]
        assert of is not None
        return of.digest

    def least_time(self) -> LeastTime:
        """The least time of the rank's layers within its memory."""
        layers = self._layers
        return least_time([*layers.counts.values()], self._known, layers.most_bytes, self._cheapest, layers.time_s)

    def _cheapest(self, number: int, price_s: float) -> Cheapest:
        self._check()
        of, program, layers = self._of[number], self._programs[number], self._layers
        if of is None or program is None or of.kind is None or of.priced is None:  # it has only modes
            taken = min(self._known[number], key=lambda one: one[0] + price_s * one[1])
            return Cheapest(taken, taken[0] + price_s * taken[1], None)
        training, weight = layers.estimate.setting.training, of.priced.prices.weight
        state, synchronised = weight.state, weight.synchronised
        if layers.zero:  # of the optimizer's state t times d devices hold equal parts, wherever weights lie
            state, synchronised = state - training.optimizer_bytes, (synchronised + training.weight_bytes) / 2.0
        each_s = (price_s * state + layers.sync_s * synchronised) / weight.state
        estimate, kind = layers.estimate, of.kind.on(of.degree)
        room_bytes = room_again_bytes(kind, of.degree, self._border, estimate)
        if not kind.recomputable:  # bytes that its passes need in any case
            room_bytes = max(0.0, room_bytes)
        scheme = program.at_price(price_s * layers.in_flight, each_s, price_s, room_bytes)
        found = FoundScheme(name_of(scheme, of.priced.graph), scheme)
        seconds, held = taken = layers.taken(tmpc_of_scheme(found, kind, estimate, layers.zero))
        return Cheapest(taken, (seconds + price_s * held) * (1.0 - PROGRAM_GAP), scheme)


Taken = tuple[float, float]
"""A time in seconds and a size in bytes."""

_MOST_ROUNDS = 20
_NEAR = 1e-4
"""Relative to the cost: a scheme that is cheaper by less than this is not worth another round."""


class Cheapest(NamedTuple):
    """The cheapest scheme for a kind of layer at a price of memory. taken: its seconds and bytes. bottom_s: no scheme
    costs less. scheme: the scheme; None: a known one is the cheapest."""

    taken: Taken
    bottom_s: float
    scheme: Scheme | None


class LeastTime(NamedTuple):
    """bound_s: no choices take less. columns: the schemes that were cheaper than the known ones, each with the number
    of its kind."""

    bound_s: float
    columns: list[tuple[int, Scheme]]


def least_time(
    counts: Sequence[int],
    known: Sequence[Sequence[Taken]],
    most_bytes: float,
    cheapest: Callable[[int, float], Cheapest],
    enough_s: float,
) -> LeastTime:
    """The least time for a number of layers of each kind, within the memory. known: the choices for a layer of each
    kind. cheapest: finds the cheapest scheme of a kind, given by its number, at a price of a byte in s. The search ends
    where the bound reaches ``enough_s``."""
    rows, columns, bound_s = [[*one] for one in known], list[tuple[int, Scheme]](), 0.0
    for _ in range(_MOST_ROUNDS):
        price_s, before = price_of_memory(counts, rows, most_bytes), len(columns)
        round_s = -price_s * most_bytes
        for kind, count in enumerate(counts):
            found, cost_s = cheapest(kind, price_s), _cost_s(rows[kind], price_s)[0]
            if found.scheme is not None and found.taken[0] + price_s * found.taken[1] < cost_s * (1.0 - _NEAR):
                rows[kind].append(found.taken)
                columns.append((kind, found.scheme))
            round_s += count * min(cost_s, found.bottom_s)
        bound_s = max(bound_s, round_s)
        if len(columns) == before or bound_s >= enough_s:
            break
    return LeastTime(bound_s, columns)


def price_of_memory(counts: Sequence[int], known: Sequence[Sequence[Taken]], most_bytes: float) -> float:
    """The price of a byte, in s. At a higher price the cheapest choices hold less than the memory; at a lower price,
    more."""

    def is_low(price_s: float) -> bool:
        return sum(n * _cost_s(rows, price_s)[1] for n, rows in zip(counts, known, strict=True)) > most_bytes

    if not is_low(0.0):
        return 0.0
    low_s = 0.0
    high_s = sum(n * max(seconds for seconds, _ in rows) for n, rows in zip(counts, known, strict=True)) / 1024.0**2
    for _ in range(60):
        price_s = (low_s + high_s) / 2.0
        low_s, high_s = (price_s, high_s) if is_low(price_s) else (low_s, price_s)
    return high_s


def _cost_s(rows: Sequence[Taken], price_s: float) -> Taken:
    """The least cost of a layer, and the bytes of the choice with this cost."""
    return min((seconds + price_s * held_bytes, held_bytes) for seconds, held_bytes in rows)
