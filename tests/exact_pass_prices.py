"""The slow twin of a certificate's price sums: pass by pass, in exact rationals, straight from the lists of passes."""

from __future__ import annotations

from fractions import Fraction

from piper_ray.certificate.certificate import PassPrices
from piper_ray.certificate.passes import PathSteps
from piper_ray.model.instance import Instance, Tmpc
from piper_ray.model.schedule import Schedule
from piper_ray.simulate.actions import ActionKind, flush_lists, stage_of_chunk
from piper_ray.simulate.stages import pass_times

Pass = tuple[int, int]
"""A rank, and a place in its list."""

_NEEDS_NO_MORE = (ActionKind.B, ActionKind.W)
"""After these a microbatch's activations are gone."""


class ExactPrices:
    """Of one d and t. All layers have choices."""

    def __init__(self, instance: Instance, schedule: Schedule, prices: PassPrices) -> None:
        self._instance, self._schedule, self._prices = instance, schedule, prices
        self._microbatches = instance.microbatches // prices.data_parallel_degree
        self._lists = [
            [(ActionKind(kind), chunk, microbatch) for kind, chunk, microbatch in one.tolist()]
            for one in flush_lists(schedule, prices.ranks, self._microbatches)
        ]

    def _stage(self, at: Pass) -> int:
        rank, place = at
        return stage_of_chunk(self._schedule, self._prices.ranks, rank, self._lists[rank][place][1])

    def _passes_of(self, walk: PathSteps) -> list[Pass]:
        found = [(walk.rank, walk.place)]
        for turn, steps in enumerate(walk.steps):
            for _ in range(steps):
                rank, place = found[-1]
                found.append((rank, place + 1) if turn % 2 == 0 else self._onward(found[-1]))
        return found

    def _onward(self, at: Pass) -> Pass:
        """The same microbatch's next pass: the next stage's forward pass, or the stage's in front, backward."""
        kind, _, microbatch = self._lists[at[0]][at[1]]
        stage, last = self._stage(at), self._prices.ranks * self._schedule.v - 1
        is_forward = kind is ActionKind.F and stage < last
        following = stage + 1 if is_forward else stage if kind is ActionKind.F else stage - 1
        kinds = (ActionKind.F,) if is_forward else (ActionKind.B, ActionKind.I)
        (found,) = (
            (rank, place)
            for rank, one in enumerate(self._lists)
            for place, (other, _, number) in enumerate(one)
            if other in kinds and number == microbatch and self._stage((rank, place)) == following
        )
        return found

    def _seconds(self, walk: PathSteps, stage: int, tmpc: Tmpc, sync_s_per_byte: float) -> Fraction:
        """What a layer adds to the path that is in the stage with this choice."""
        times, passes = pass_times(tmpc), self._passes_of(walk)
        forward_s, input_s, weight_s = map(Fraction, (times.forward_s, times.input_s, times.weight_s))
        of_kind = {
            ActionKind.F: forward_s,
            ActionKind.I: input_s,
            ActionKind.W: weight_s,
            ActionKind.B: input_s + weight_s,
        }
        total = sum((of_kind[self._lists[at[0]][at[1]][0]] for at in passes if self._stage(at) == stage), Fraction(0))
        rank, place = passes[-1]
        is_of_rank = stage in self._schedule.stages_of_rank(rank, self._prices.ranks)
        if place == len(self._lists[rank]) - 1 and is_of_rank:
            total += Fraction(tmpc.weights_bytes) * Fraction(sync_s_per_byte)
        return total

    def _held_s(self, stage: int, tmpc: Tmpc) -> Fraction:
        """The price of the bytes of a layer that is in the stage with this choice."""
        total = Fraction(0)
        for rank, place, price in self._prices.memory:
            if stage not in self._schedule.stages_of_rank(rank, self._prices.ranks):
                continue
            upto = [
                (n, kind)
                for n, (kind, _, _) in enumerate(self._lists[rank][: place + 1])
                if self._stage((rank, n)) == stage
            ]
            begun = sum(kind is ActionKind.F for _, kind in upto)
            ended = sum(kind in _NEEDS_NO_MORE for n, kind in upto if n < place)  # it is held until a pass ends
            fixed = Fraction(tmpc.fixed_bytes) + Fraction(tmpc.shared_bytes) / self._prices.data_parallel_degree
            total += Fraction(price) * (Fraction(tmpc.activation_bytes) * (begun - ended) + fixed)
        return total

    def least_s(self, sync_s_per_byte: float) -> tuple[Fraction, Fraction]:
        """Of a batch: what all layers cost at least, and what is paid with all memory."""
        weights = [Fraction(weight) for weight, _ in self._prices.paths]
        d, t = self._prices.data_parallel_degree, self._prices.degree
        of_layers = Fraction(0)
        for layer in self._instance.layers:
            usable = [tmpc for tmpc in layer.tmpcs.get(t, ()) if tmpc.least_data_parallel_degree <= d]
            of_layers += min(
                sum(
                    (
                        weight * self._seconds(walk, stage, tmpc, sync_s_per_byte)
                        for weight, (_, walk) in zip(weights, self._prices.paths, strict=True)
                    ),
                    Fraction(0),
                )
                / sum(weights, Fraction(0))
                + self._held_s(stage, tmpc)
                for tmpc in usable
                for stage in range(self._prices.ranks * self._schedule.v)
            )
        room_s = sum((Fraction(price) for _, _, price in self._prices.memory), Fraction(0))
        return of_layers, room_s * Fraction(self._instance.memory_bytes)
