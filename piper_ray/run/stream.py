"""Asynchronous 1F1B as lists that do not end with a batch: which replica runs which microbatch, in which order, and
which version of its weights each pass uses."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ray.model.errors import UsageError
from piper_ray.model.schedule import ScheduleName
from piper_ray.simulate.actions import ActionKind, one_f_one_b

StreamPass = tuple[ActionKind, int]
"""A pass of one stage: its kind, and its microbatch among all of the run."""


@dataclass(frozen=True)
class PassStream:
    """An asynchronous pipeline from its first batch to its last.

    Replica k mod d of each stage runs microbatch k of the run. A version is named by the number of its stage's updates
    that went into it; training begins with 0.

    name: 2bw or pipedream. degrees: d of each stage; in_flight: for each, the microbatches that a replica keeps in
    flight.
    microbatches: N, of a batch; batches: of the run.
    """

    name: ScheduleName
    degrees: tuple[int, ...]
    in_flight: tuple[int, ...]
    microbatches: int
    batches: int
    vertical_sync: bool

    @property
    def end(self) -> int:
        """The number of microbatches of the run."""
        return self.batches * self.microbatches

    def passes(self, stage: int, replica: int) -> list[StreamPass]:
        """A replica's passes, in order."""
        d = self.degrees[stage]
        own = one_f_one_b(self.end // d, self.in_flight[stage])
        return [(ActionKind(kind), replica + k * d) for kind, _, k in own.tolist()]

    def period(self, stage: int) -> int:
        """Microbatches from one update of the stage's weights to the next, over all its replicas: a batch under 2BW;
        under PipeDream one for each replica."""
        return self.microbatches if self.name is ScheduleName.TWO_BW else self.degrees[stage]

    def version(self, stage: int, k: int) -> int:
        """The version that both passes of microbatch k use.

        2BW (ICML 2021, section 3.1): the one before the newest possible, the same in all stages. PipeDream (SOSP 2019,
        section 3.3): the stage's newest at the forward pass; with vertical sync, the one that includes exactly the
        microbatches that the input stage's newest version included when k entered.
        """
        if self.name is ScheduleName.TWO_BW:
            return max(0, k // self.microbatches - 1)
        newest = self._newest(stage, k)
        if not self.vertical_sync:
            return newest
        return min(newest, self._newest(0, k) * self.degrees[0] // self.degrees[stage])

    def _newest(self, stage: int, k: int) -> int:
        """Rounds of its replicas that a stage has finished before the forward pass of k."""
        return max(0, k // self.degrees[stage] - self.in_flight[stage] + 1)

    def order(self) -> list[tuple[int, int, StreamPass]]:
        """All passes as (stage, replica, pass), each after those that it waits for: its neighbour's, those before it in
        its list, and the update that all replicas of its stage make together.

        Raises UsageError if ranks wait for each other.
        """
        lists = {(stage, i): self.passes(stage, i) for stage, d in enumerate(self.degrees) for i in range(d)}
        next_of, through = dict.fromkeys(lists, 0), dict.fromkeys(lists, 0)
        done: set[tuple[int, ActionKind, int]] = set()
        found: list[tuple[int, int, StreamPass]] = []

        def can_go_on(stage: int, replica: int) -> bool:
            """Whether a replica's next pass can run. through: the microbatches that a replica has finished; an update
            takes equally many of each."""
            kind, k = lists[stage, replica][next_of[stage, replica]]
            source = (stage - 1 if kind is ActionKind.F else stage + 1, kind, k)
            each = self.period(stage) // self.degrees[stage]
            updated = through[stage, replica] // each * each
            others = min(through[stage, i] for i in range(self.degrees[stage]))
            return (source in done or source[0] in (-1, len(self.degrees))) and others >= updated

        went_on = True
        while went_on:
            went_on = False
            for (stage, replica), passes in lists.items():
                while next_of[stage, replica] < len(passes) and can_go_on(stage, replica):
                    kind, k = passes[next_of[stage, replica]]
                    found.append((stage, replica, (kind, k)))
                    done.add((stage, kind, k))
                    next_of[stage, replica] += 1
                    through[stage, replica] += kind is ActionKind.B
                    went_on = True
        if len(found) < 2 * self.end * len(self.degrees):
            raise UsageError(
                f"with {', '.join(map(str, self.in_flight))} microbatches in flight stages of data-parallel degrees "
                f"{', '.join(map(str, self.degrees))} wait for each other; expected a plan that keeps more in flight"
            )
        return found
