"""The rate of an asynchronous pipeline: analysed, simulated, and the least microbatches in flight that sustain it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest

from piper_ray.model.errors import UsageError
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.simulate.actions import one_f_one_b
from piper_ray.simulate.run import InFlightRule, SimulationOptions, simulate
from piper_ray.simulate.stages import Hop
from piper_ray.simulate.steady import SteadyState, Stream, least_in_flight, rule_in_flight, steady_state, sustained_s
from piper_ray.simulate.timeline import Timeline
from tests.simulate_support import chain, cut, placed, run


def _stream(times_s: Sequence[float], degrees: Sequence[int], forward: float = 1 / 3) -> Stream:
    """Stages with these times for each microbatch, on these numbers of replicas."""
    pairs = [(time_s * d * forward, time_s * d * (1 - forward)) for time_s, d in zip(times_s, degrees, strict=True)]
    hops = tuple(Hop(j, j + 1, 0.0, 0.0) for j in range(len(degrees) - 1))
    return Stream(tuple(f for f, _ in pairs), tuple(b for _, b in pairs), tuple(degrees), hops)


def _random_stream(rng: random.Random, most_stages: int = 4) -> Stream:
    degrees = [rng.choice([1, 2, 3, 4]) for _ in range(rng.randint(1, most_stages))]
    stream = _stream([rng.choice([1.0, 1.0, 0.5 + rng.random() / 2]) for _ in degrees], degrees, rng.uniform(0.2, 0.5))
    delays = tuple(Hop(h.source, h.target, rng.choice([0.0, 0.2]), rng.choice([0.0, 0.1])) for h in stream.hops)
    return Stream(stream.forward_s, stream.backward_s, stream.replicas, delays)


def _steady(stream: Stream, in_flight: Sequence[int]) -> SteadyState:
    """Hops as way out: a replica's sends follow each other, so only short ones are like pure delays."""
    where = placed(Schedule(ScheduleName.TWO_BW), [d * 1 for d in stream.replicas])
    lanes = where.lanes
    seconds = np.array([[f, b, 0.0, 0.0] for f, b in zip(stream.forward_s, stream.backward_s, strict=True)])
    hops = [Hop(h.source, h.target, h.forward_s, h.backward_s) for h in stream.hops]

    def simulated(microbatches: int) -> Timeline:
        lists = []
        for rank in where.ranks:
            (stage,) = rank.stages
            own = len(range(rank.replica, microbatches, where.replicas[stage]))
            lists.append(one_f_one_b(own, in_flight[stage]))
        return run(where, lists, microbatches, seconds, hops)

    found = steady_state(simulated, where, in_flight)
    return SteadyState(found.timeline, found.microbatch_s / lanes, found.window_s, found.periodic)


def _simulated_s(stream: Stream, in_flight: Sequence[int]) -> float:
    try:
        found = _steady(stream, in_flight)
    except UsageError:  # ranks wait for each other
        return inf
    assert found.periodic
    return found.microbatch_s


def test_the_rule_is_too_little_for_one_two_one() -> None:
    """d = 1, 2, 1 with equal times per sample and a third forward: the first stage needs 5, the rule gives 4."""
    stream = _stream([1.0, 1.0, 1.0], [1, 2, 1])
    assert rule_in_flight(stream.replicas) == (4, 2, 1)
    assert stream.promised_s == pytest.approx(1.0)
    assert _simulated_s(stream, (4, 2, 1)) == pytest.approx(1.5)
    assert least_in_flight(stream) == (5, 2, 1)
    assert _simulated_s(stream, (5, 2, 1)) == pytest.approx(1.0)


def test_the_rule_is_enough_for_equal_degrees() -> None:
    for d in (1, 2, 3):
        stream = _stream([1.0] * 5, [d] * 5)
        assert least_in_flight(stream) == rule_in_flight(stream.replicas) == (5, 4, 3, 2, 1)
        assert _simulated_s(stream, rule_in_flight(stream.replicas)) == pytest.approx(1.0)


def test_the_rule() -> None:
    assert rule_in_flight([1, 2, 1]) == (4, 2, 1)
    assert rule_in_flight([3, 2, 4]) == (3, 3, 1)


def test_the_analysis_is_the_simulation() -> None:
    rng = random.Random("sustained")
    slower = stopped = 0
    for _ in range(60):
        stream = _random_stream(rng)
        in_flight = [max(1, y + rng.randint(-2, 2)) for y in rule_in_flight(stream.replicas)]
        analysed = sustained_s(stream, in_flight)
        simulated = _simulated_s(stream, in_flight)
        assert simulated == pytest.approx(analysed, rel=1e-7), (stream, in_flight)
        stopped += analysed == inf
        slower += stream.promised_s * 1.001 < analysed < inf
    assert slower > 10
    assert stopped > 3


def _smaller(sum_below: int, stages: int) -> Iterator[tuple[int, ...]]:
    return (y for y in product(range(1, sum_below), repeat=stages) if sum(y) < sum_below)


def test_no_smaller_sum_sustains_the_rate() -> None:
    """By simulating every one of them."""
    rng = random.Random("least")
    beyond_rule = 0
    for _ in range(12):
        stream = _random_stream(rng, 3)
        least = least_in_flight(stream)
        assert least is not None
        assert _simulated_s(stream, least) == pytest.approx(stream.promised_s, rel=1e-7)
        beyond_rule += sum(least) > sum(rule_in_flight(stream.replicas))
        for in_flight in _smaller(sum(least), len(stream.replicas)):
            assert _simulated_s(stream, in_flight) > stream.promised_s * (1 + 1e-7), (stream, in_flight)
    assert beyond_rule >= 3


def test_many_uneven_stages() -> None:
    stream = _stream([1.0] * 12, list(range(1, 13)))
    least = least_in_flight(stream)
    assert least is not None
    assert sustained_s(stream, rule_in_flight(stream.replicas)) > 1.4
    assert sustained_s(stream, least) == pytest.approx(1.0)
    assert _simulated_s(stream, least) == pytest.approx(1.0)


def test_passes_of_no_time_at_all() -> None:
    stream = _stream([0.0, 0.0], [1, 1])
    assert least_in_flight(stream) == (1, 1)
    assert sustained_s(stream, (1, 1)) == 0.0


def test_transfers_that_no_number_in_flight_can_hide() -> None:
    for times_s in ([0.0, 0.0], [1e-6, 1e-6]):
        stream = replace(_stream(times_s, [1, 1]), hops=(Hop(0, 1, 0.1, 0.1),))
        assert least_in_flight(stream) is None
    instance = chain([0.0, 0.0])
    assert not simulate(instance, cut([1, 1]), options=SimulationOptions(latency_s=0.1)).keeps_promise
    with pytest.raises(UsageError, match="no number keeps the slowest stage busy"):
        simulate(
            instance,
            cut([1, 1]),
            options=SimulationOptions(latency_s=0.1, in_flight=InFlightRule.SUSTAINING),
        )
