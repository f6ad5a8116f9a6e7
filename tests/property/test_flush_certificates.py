"""What a certificate proves under a flush is true, and what it does not prove is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from math import inf
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from piper_ray.certificate.certificate import Certificate, PassPrices, read_certificate, write_certificate
from piper_ray.certificate.check import verify_certificate
from piper_ray.certificate.flush_check import FlushProblem, shapes_of
from piper_ray.certificate.flush_tables import StagePrices, least_priced_s
from piper_ray.certificate.kernels.flush_states import FOUND, PROVED
from piper_ray.certificate.passes import KINDS, PassGraph, PathSteps
from piper_ray.engine.certified_prices import find_prices
from piper_ray.engine.certify import certify
from piper_ray.engine.solve import solve
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import CertificateRefused, UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.schedule import AllReduce, Schedule, ScheduleName, StepTerms
from piper_ray.model.solution import Solution
from piper_ray.model.stop import Stop, StopSearch
from piper_ray.simulate.actions import ActionKind
from tests.chunks_brute_force import least_step_s
from tests.exact_pass_prices import ExactPrices
from tests.flush_brute_force import brute_force, simulated_batch_s
from tests.flush_instances import uneven_layers
from tests.instances import random_instance, two_towers
from tests.lengths import long_after
from tests.solver_support import ONE_THREAD

FLUSHED = ["1f1b", "gpipe"]
CHUNKED = ["interleaved", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v"]
TOWERS = two_towers(3, devices=5, memory_bytes=40.0)


@cache
def solved(schedule: str) -> Solution:
    return solve(TOWERS, options=ONE_THREAD, schedule=schedule)


@cache
def certified(schedule: str) -> Certificate:
    return certify(TOWERS, solved(schedule), threads=1)


def is_accepted(certificate: Certificate, instance: Instance = TOWERS) -> bool:
    try:
        verify_certificate(instance, certificate, threads=1)
    except CertificateRefused:
        return False
    return True


@pytest.mark.parametrize("schedule", FLUSHED)
@pytest.mark.parametrize("seed", long_after(4, range(15)))
def test_no_more_than_every_plan_takes_and_all_of_it(seed: int, schedule: str) -> None:
    instance = uneven_layers(seed)
    best = brute_force(instance, schedule)
    certificate = certify(instance, solve(instance, options=ONE_THREAD, schedule=schedule), threads=1)
    found = verify_certificate(instance, certificate, threads=1)
    if best is None:
        assert found.bound_s == inf
        return
    time_s = best.batch_s / instance.microbatches
    gap = found.gap(time_s)
    assert gap is not None
    assert gap <= 2e-9
    assert not is_accepted(replace(certificate, bound_s=time_s * (1.0 + 1e-9)), instance)


@pytest.mark.parametrize("schedule", FLUSHED)
@pytest.mark.parametrize("seed", long_after(12, range(300, 315)))
def test_tails_and_plans_alone(seed: int, schedule: str) -> None:
    """Without any prices: nothing is below the optimum, something is above it."""
    instance = uneven_layers(seed)
    best = brute_force(instance, schedule)
    problem = FlushProblem(instance, Restrictions(), Schedule.of(schedule), StepTerms())

    def outcomes(limit_s: float) -> list[int]:
        pairs = (pair for pair in problem.pairs() if pair.least_s < limit_s)
        return [problem.look(pair, None, limit_s, np.zeros(1))[0] for pair in pairs]

    if best is None:
        assert set(outcomes(1e30)) <= {PROVED}
        return
    assert set(outcomes(best.batch_s * (1.0 - 1e-9))) <= {PROVED}
    assert FOUND in outcomes(best.batch_s * (1.0 + 1e-9))


@pytest.mark.parametrize("schedule", FLUSHED)
@pytest.mark.parametrize("seed", range(15))
def test_any_path_is_no_longer_than_a_batch_and_one_is_as_long(seed: int, schedule: str) -> None:
    rng = random.Random(seed)
    p, m = rng.randint(1, 6), rng.randint(1, 9)
    graph = PassGraph(Schedule.of(schedule), p, m)
    empty = rng.randint(0, p - 1)
    stages = [(0.0, 0.0, 0.0)] * empty + [
        (rng.uniform(0, 5), rng.uniform(0, 5), rng.choice([0.0, rng.uniform(0, 30)])) for _ in range(p - empty)
    ]
    seconds = np.zeros((p, KINDS))
    seconds[:, ActionKind.F], seconds[:, ActionKind.B] = np.array(stages)[:, :2].T
    sync_s = np.array(stages)[:, 2].copy()
    batch_s = simulated_batch_s(schedule, stages[empty:], m)  # stages in front that are empty delay nothing

    def length_s(walk: PathSteps) -> float:
        counts = graph.walked(walk)
        return float((counts.passes * seconds).sum() + counts.sync @ sync_s)

    lengths = graph.longest(seconds, sync_s, p)
    assert lengths[0][0] == pytest.approx(batch_s)
    assert [length for length, _ in lengths] == pytest.approx([length_s(walk) for _, walk in lengths])
    walked = 0
    for _ in range(200):
        walk = PathSteps(
            rng.randrange(p), rng.randrange(2 * m), tuple(rng.randint(0, m) for _ in range(rng.randint(0, 6)))
        )
        try:
            assert length_s(walk) <= batch_s * (1.0 + 1e-12)
        except CertificateRefused:
            continue
        walked += 1
    assert walked > 0


@pytest.mark.parametrize("schedule", CHUNKED)
@pytest.mark.parametrize("seed", long_after(2, range(5)))
def test_chunks_are_never_promised_too_much(seed: int, schedule: str) -> None:
    instance = random_instance(seed, most_layers=4 + seed % 2, most_tmpcs=2, most_devices=4)
    asked = Schedule(ScheduleName(schedule), None if schedule == "zb-h1" else 2)
    best_s = least_step_s(instance, asked)
    certificate = certify(instance, solve(instance, options=ONE_THREAD, schedule=asked), threads=1)
    assert verify_certificate(instance, certificate, threads=1).bound_s == certificate.bound_s
    if best_s is None or best_s == 0.0:
        assert best_s is None or certificate.bound_s == 0.0
        return
    assert 0.0 < certificate.bound_s * instance.microbatches <= best_s
    above_s = best_s / instance.microbatches * (1.0 + 1e-9)
    assert not is_accepted(replace(certificate, bound_s=above_s), instance)


def _changed_first(certificate: Certificate, change: Callable[[PassPrices], PassPrices]) -> Certificate:
    return replace(certificate, prices=(change(certificate.prices[0]), *certificate.prices[1:]))


@pytest.mark.parametrize("schedule", [*long_after(1, FLUSHED), *long_after(1, CHUNKED)])
def test_forged_prices_prove_no_more(schedule: str, few: bool) -> None:
    """Whatever the prices say, the bound on the best plan known is not exceeded; and what is no path is refused."""
    certificate, best_s = certified(schedule), solved(schedule).time_per_sample_s
    assert best_s is not None
    rng = random.Random(schedule)
    problem = FlushProblem(TOWERS, Restrictions(), certificate.schedule, certificate.step)
    assert is_accepted(certificate)
    assert not is_accepted(replace(certificate, bound_s=best_s * (1.0 + 1e-8)))
    for _ in range(20 if few else 60):
        forged = replace(
            certificate, bound_s=best_s * (1.0 + 1e-8), prices=tuple(map(_forger(rng), certificate.prices))
        )
        assert not is_accepted(forged)
    if not certificate.prices:
        return
    for wrong in (
        lambda x: replace(x, paths=()),
        lambda x: replace(x, paths=((-1.0, x.paths[0][1]), (2.0, x.paths[0][1]))),
        lambda x: replace(x, paths=((float("nan"), x.paths[0][1]),)),
        lambda x: replace(x, paths=((1.0, PathSteps(0, 10**6, ())),)),
        lambda x: replace(x, paths=((1.0, PathSteps(-1, 0, ())),)),
        lambda x: replace(x, paths=((1.0, PathSteps(0, 0, (10**6,))),)),
        lambda x: replace(x, paths=((1.0, PathSteps(0, 0, (0, 10**6))),)),
        lambda x: replace(x, paths=((1.0, PathSteps(0, 0, (-1,))),)),
        lambda x: replace(x, memory=((0, 0, -1.0),)),
        lambda x: replace(x, memory=((10**6, 0, 1.0),)),
        lambda x: replace(x, memory=((0, 0, float("inf")),)),
    ):
        changed = _changed_first(certificate, wrong).prices[0]
        pair = next(
            pair for pair in problem.pairs()
            if (pair.instance.devices, pair.data_parallel_degree, *pair.degrees)
            == (changed.devices, changed.data_parallel_degree, changed.degree)
        )  # fmt: skip
        with pytest.raises(CertificateRefused):
            StagePrices.of(pair, changed)


def _forger(rng: random.Random) -> Callable[[PassPrices], PassPrices]:
    """Changes a price, a weight, a step, or what they are of."""

    def forged(prices: PassPrices) -> PassPrices:
        kind = rng.randrange(5)
        if kind == 0:
            return replace(
                prices,
                memory=tuple((r, place, price * rng.choice([0.0, 0.5, 2.0, 1e9])) for r, place, price in prices.memory),
            )
        if kind == 1:
            return replace(prices, paths=tuple((weight * rng.uniform(0, 9), walk) for weight, walk in prices.paths))
        if kind == 2:
            weight, walk = prices.paths[0]
            steps = tuple(max(0, step + rng.randint(-1, 1)) for step in walk.steps)
            return replace(prices, paths=((weight, replace(walk, steps=steps)), *prices.paths[1:]))
        if kind == 3:
            return replace(prices, ranks=max(1, prices.ranks + rng.choice([-1, 1])))
        return replace(prices, data_parallel_degree=rng.randint(1, 4), degree=rng.randint(1, 2))

    return forged


def test_other_plans_than_it_is_of() -> None:
    certificate = certified("1f1b")
    assert not is_accepted(certificate, TOWERS.replace(devices=4))
    assert not is_accepted(
        replace(certificate, schedule=Schedule.of("gpipe"), bound_s=certified("gpipe").bound_s * 1.01)
    )
    found = verify_certificate(TOWERS, certificate, threads=1)
    plan = solved("1f1b").plan
    assert plan is not None
    time_s = solved("1f1b").time_per_sample_s
    assert time_s is not None
    assert found.silent_on(TOWERS, plan, time_s, Schedule.of("1f1b"), StepTerms()) == ()
    (reason,) = found.silent_on(TOWERS, plan, time_s, Schedule.of("gpipe"), StepTerms())
    assert "under 1f1b" in reason
    (reason,) = found.silent_on(TOWERS, plan, time_s, Schedule.of("1f1b"), StepTerms(optimizer_s=1.0))
    assert "other terms" in reason
    with pytest.raises(UsageError, match="does not hold"):
        certify(TOWERS, solve(TOWERS.replace(devices=3), options=ONE_THREAD, schedule="1f1b"), threads=1)


@pytest.mark.parametrize(
    "step", [StepTerms(all_reduce=AllReduce.RING, optimizer_s=0.25), StepTerms(all_reduce_overlap=0.5)]
)
def test_terms_of_a_step_are_part_of_the_claim(step: StepTerms) -> None:
    solution = solve(TOWERS, options=ONE_THREAD, schedule="1f1b", step=step)
    certificate = certify(TOWERS, solution, threads=1)
    found = verify_certificate(TOWERS, certificate, threads=1)
    assert solution.time_per_sample_s is not None
    gap = found.gap(solution.time_per_sample_s)
    assert gap is not None
    assert gap <= 2e-9
    assert not is_accepted(replace(certificate, step=StepTerms(all_reduce_overlap=1.0)))


@pytest.mark.parametrize("schedule", [*FLUSHED, "interleaved"])
def test_there_and_back(schedule: str, tmp_path: Path) -> None:
    write_certificate(certified(schedule), tmp_path / "file")
    found = read_certificate(tmp_path / "file")
    for name in ("digest", "restrictions", "bound_s", "schedule", "step", "prices"):
        assert getattr(found, name) == getattr(certified(schedule), name)
    content = (tmp_path / "file").read_bytes()
    for length in range(0, len(content) - 1, max(1, len(content) // 40)):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(CertificateRefused):
            verify_certificate(TOWERS, tmp_path / "cut")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("paths", [["much", 0, 0, [1]]], "not in the form"),
        ("paths", [[1.0, 0, 0, [0.5]]], "not in the form"),
        ("paths", [[1.0, 0, 0]], "not in the form"),
        ("paths", [[1.0, 0, 0, [2**80]]], "not in the form"),
        ("memory", [[0, 0]], "not in the form"),
        ("memory", [[0, True, 1.0]], "not in the form"),
        ("ranks", 2.0, "not in the form"),
        ("d", None, "not in the form"),
        ("memory", [[0, 0, 1e-30]], "changed after it was written"),
        ("chunks", 2, "changed after it was written"),
    ],
)
def test_prices_in_a_forged_file(name: str, value: object, said: str, tmp_path: Path) -> None:
    write_certificate(certified("1f1b"), tmp_path / "file")
    table = pq.read_table(tmp_path / "file")
    header = json.loads(table.schema.metadata[b"piper_ray"])
    header["prices"][0][name] = value
    pq.write_table(table.replace_schema_metadata({b"piper_ray": json.dumps(header)}), tmp_path / "file")
    with pytest.raises(CertificateRefused, match=said):
        verify_certificate(TOWERS, tmp_path / "file", threads=1)


def test_rows_under_a_flush_are_not_read(tmp_path: Path) -> None:
    """Also with a checksum that is right a file with rows of tails proves nothing by them."""
    listed = certify(TOWERS, solve(TOWERS, options=ONE_THREAD, schedule="2bw"), threads=1)
    bound_s = certified("1f1b").bound_s
    forged = replace(listed, schedule=Schedule.of("1f1b"), bound_s=bound_s * 1.01)
    write_certificate(forged, tmp_path / "file")
    with pytest.raises(CertificateRefused):
        verify_certificate(TOWERS, tmp_path / "file", threads=1)


def test_a_wish_to_end() -> None:
    stop: Stop[object] = Stop()
    stop.request()
    with pytest.raises(StopSearch):
        certify(TOWERS, solved("1f1b"), threads=1, stop=stop)
    with pytest.raises(StopSearch):
        verify_certificate(TOWERS, certified("1f1b"), threads=1, stop=stop)


def test_where_not_all_can_be_looked_through_less_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """More downsets than fit: prices alone still prove something."""
    instance = next(x for x in map(uneven_layers, range(100)) if _by_tails(x))
    monkeypatch.setattr("piper_ray.certificate.flush_check.free_bytes", lambda: 1.0)
    solution = solve(instance, options=ONE_THREAD, schedule="1f1b")
    certificate = certify(instance, solution, threads=1)
    assert 0.0 < certificate.bound_s < solution.lower_bound_s * (1.0 - 1e-8)
    assert verify_certificate(instance, certificate, threads=1).bound_s == certificate.bound_s


def _by_tails(instance: Instance) -> bool:
    solution = solve(instance, options=ONE_THREAD, schedule="1f1b")
    if solution.time_per_sample_s is None:
        return False
    return verify_certificate(instance, certify(instance, solution, threads=1), threads=1).tails > 0


@pytest.mark.parametrize("schedule", long_after(2, [*FLUSHED, *CHUNKED]))
@pytest.mark.parametrize("seed", long_after(1, range(3)))
def test_price_sums_are_those_of_exact_rationals(seed: int, schedule: str) -> None:
    """Of prices as they are found, and of these with other weights and much dearer memory."""
    instance, rng = uneven_layers(seed), random.Random(seed)
    asked = Schedule(ScheduleName(schedule), None if schedule in (*FLUSHED, "zb-h1") else 2)
    pairs = FlushProblem(instance, Restrictions(), asked, StepTerms(all_reduce=AllReduce.RING)).pairs()
    compared = 0
    for pair in pairs:
        prices = [find_prices(pair, ranks, inf, lambda: None) for ranks in shapes_of(pair)[-1:]]
        for found in filter(None, prices):
            last = found.ranks - 1
            altered = replace(
                found,
                paths=tuple((weight * rng.uniform(0.5, 2.0), walk) for weight, walk in found.paths),
                memory=(*found.memory, (last, rng.randrange(2), 0.01 * pair.work_s / pair.memory_bytes)),
            )
            for used in (found, altered):
                of_layers, room_s = ExactPrices(instance, asked, used).least_s(pair.sync_s_per_byte[""])
                least_s = least_priced_s(pair, StagePrices.of(pair, used))
                assert least_s <= of_layers - room_s
                assert least_s >= of_layers - room_s - Fraction(1e-9) * (of_layers + room_s)
                compared += 1
    assert compared > 0


@pytest.mark.parametrize("schedule", long_after(1, FLUSHED))
def test_prices_are_a_bound_by_themselves(schedule: str) -> None:
    for seed in range(10):
        instance = uneven_layers(seed)
        best = brute_force(instance, schedule)
        if best is None:
            continue
        certificate = certify(instance, solve(instance, options=ONE_THREAD, schedule=schedule), threads=1)
        problem = FlushProblem(instance, Restrictions(), certificate.schedule, certificate.step)
        degrees = best.data_parallel_degree, best.tensor_parallel_degree
        for prices in certificate.prices:
            if (prices.data_parallel_degree, prices.degree) == degrees:
                pair = next(x for x in problem.pairs() if (x.data_parallel_degree, *x.degrees) == degrees)
                assert least_priced_s(pair, StagePrices.of(pair, prices)) <= best.batch_s * (1.0 + 1e-12)
