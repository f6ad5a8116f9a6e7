"""What is certified of solutions, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

import piper_ray
from piper_ray.certificate.check import verify_certificate
from piper_ray.engine.certify import certify
from piper_ray.engine.solve import solve
from piper_ray.model.constraints import KeepOrder, Restrictions, SameDegrees
from piper_ray.model.errors import LimitError, UsageError
from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from piper_ray.model.schedule import Schedule
from piper_ray.model.stop import Stop, StopSearch
from tests.instances import equal_chain, two_towers
from tests.solver_support import ONE_THREAD

TOWERS = two_towers(3, devices=5, memory_bytes=40.0)


def test_solutions_of_other_instances_are_refused() -> None:
    solution = solve(TOWERS.replace(devices=3), options=ONE_THREAD)
    with pytest.raises(UsageError, match="does not hold for this instance under these restrictions"):
        certify(TOWERS, solution, threads=1)
    slower = solve(TOWERS, restrictions=Restrictions(recompute="always"), options=ONE_THREAD)
    with pytest.raises(UsageError, match="does not hold"):
        certify(TOWERS, slower, threads=1)


def test_what_has_no_certificate() -> None:
    pipedream = replace(solve(TOWERS, options=ONE_THREAD), schedule=Schedule.of("pipedream"))
    with pytest.raises(UsageError, match="bounds under pipedream have no certificate"):
        certify(TOWERS, pipedream, threads=1)
    blocks = solve(TOWERS, threads=1, contract="operators", schedule="2bw")
    if blocks.blocks is not None:
        with pytest.raises(UsageError, match="operators' blocks"):
            certify(TOWERS, blocks, threads=1)
    rules = Restrictions(constraints=[SameDegrees()])
    with pytest.raises(UsageError, match="SameDegrees"):
        certify(TOWERS, solve(TOWERS, options=ONE_THREAD), restrictions=rules, threads=1)
    with pytest.raises(UsageError, match="a Solution"):
        certify(TOWERS, None)  # type: ignore[arg-type]


def test_a_wish_to_end() -> None:
    solution = solve(TOWERS, options=ONE_THREAD)
    certificate = certify(TOWERS, solution, threads=1)
    stop: Stop[object] = Stop()
    stop.request()
    with pytest.raises(StopSearch):
        certify(TOWERS, solution, threads=1, stop=stop)
    with pytest.raises(StopSearch):
        verify_certificate(TOWERS, certificate, threads=1, stop=stop)


def test_threads_change_nothing() -> None:
    instance = equal_chain(12, devices=8, memory_bytes=30.0)
    certificate = certify(instance, solve(instance, options=ONE_THREAD), threads=2)
    found = {verify_certificate(instance, certificate, threads=threads) for threads in (1, 2, 5)}
    assert len({(x.tails, x.stages, x.bound_s) for x in found}) == 1
    with pytest.raises(UsageError, match="threads"):
        verify_certificate(instance, certificate, threads=0)


def test_more_downsets_than_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = certify(TOWERS, solve(TOWERS, options=ONE_THREAD), threads=1)
    monkeypatch.setattr("piper_ray.certificate.check.free_bytes", lambda: 1500.0)
    with pytest.raises(LimitError, match=r"more than \d+ downsets, .* on a machine that has it"):
        verify_certificate(TOWERS, certificate, threads=1)


def test_certified_within_a_memory_limit() -> None:
    solution = solve(TOWERS, options=ONE_THREAD)
    certificate = certify(TOWERS, solution, threads=1, memory_limit="1GB")
    assert verify_certificate(TOWERS, certificate, threads=1).bound_s == certificate.bound_s
    with pytest.raises(LimitError, match="18 downsets"):
        certify(TOWERS, solution, threads=1, memory_limit="170MB")


def test_layers_that_hold_nothing_and_join_where_memory_is_ample() -> None:
    """Wide enough for it: 17 free layers that take memory, side by side, have 131,072 downsets by themselves."""
    heavy = {1: (Tmpc("plain", 2.0, 1.0, 1.0, 1.0),)}
    idle = {1: (Tmpc("idle", 0.0, 0.0, 1.0, 1.0),)}
    layers = [Layer(0, "first", heavy), *(Layer(n, "side", idle) for n in range(1, 18)), Layer(18, "last", heavy)]
    edges = [edge for n in range(1, 18) for edge in (Edge(0, n, 0.0), Edge(n, 18, 0.0))]
    instance = Instance(layers, edges, devices=2, microbatches=2, memory_bytes=1e6, bandwidth_bytes_per_s=1.0)
    certificate = certify(instance, solve(instance, options=ONE_THREAD), threads=1)
    assert len(certificate.tails[0].joined) == 17
    assert piper_ray.verify_certificate(instance, certificate).downsets == 3


def test_the_order_is_part_of_what_is_charged() -> None:
    rules = Restrictions(constraints=[KeepOrder()])
    solution = solve(TOWERS, restrictions=rules, options=ONE_THREAD)
    certificate = certify(TOWERS, solution, restrictions=rules, threads=1)
    gap = verify_certificate(TOWERS, certificate).gap(solution.time_per_sample_s or 0.0)
    assert gap is not None
    assert gap <= 2e-9
