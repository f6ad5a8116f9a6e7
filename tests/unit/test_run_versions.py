"""Asynchronous pipelines over gloo: each pass uses the version of the weights that the papers say, and losses and
weights are those of one process that replays these versions."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from piper_ray.model.errors import UsageError
from piper_ray.model.schedule import ScheduleName
from piper_ray.run.job import pass_stream
from piper_ray.simulate.steady import rule_in_flight
from tests.lengths import asked_for, long_after
from tests.run_models import AWKWARD_PATHS, SKIPPING_PATHS
from tests.run_support import job, results_of_ranks
from tests.stream_twin import replayed, version_of

_2BW, _PIPEDREAM = ScheduleName.TWO_BW, ScheduleName.PIPEDREAM
JOBS = {
    "2bw": job(_2BW, (3,), recompute=(2, 4)),
    "pipedream": job(_PIPEDREAM, (3,), recompute=(2, 4)),
    "vertical sync": job(_PIPEDREAM, (3,), vertical_sync=True),
    "replicas in turn": job(_PIPEDREAM, (3,), replicas=(2, 1)),
    "2bw, replicas in turn": job(_2BW, (3,), replicas=(1, 2)),
    "2bw, awkward": job(_2BW, (4,), model="awkward", paths=AWKWARD_PATHS),
    "pipedream, skips": job(_PIPEDREAM, (1, 2, 4), model="skipping", paths=SKIPPING_PATHS),
    "pipedream, turns, vertical sync": job(_PIPEDREAM, (2, 5), replicas=(1, 2, 1), vertical_sync=True),
}
QUICK = ("2bw", "pipedream", "vertical sync")
"""Of two ranks, as a process takes longer to start than a job."""
NAMES = sorted(JOBS, key=lambda name: name not in QUICK)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank, by job."""
    folder = tmp_path_factory.mktemp("stream")
    jobs = {name: JOBS[name] for name in asked_for(request.config, len(QUICK), NAMES)}
    (folder / "jobs.pickle").write_bytes(pickle.dumps(jobs))
    ranks = max(one.ranks for one in jobs.values())
    return results_of_ranks("stream_ranks", folder, ranks, {"jobs": str(folder / "jobs.pickle")})


@pytest.mark.parametrize("name", long_after(len(QUICK), NAMES))
def test_each_pass_uses_the_version_that_the_paper_says(found: list[dict[str, Any]], name: str) -> None:
    wanted = JOBS[name]
    for rank in range(wanted.ranks):
        stage, replica = wanted.seat(rank)
        versions = found[rank][name]["versions"]
        own = range(replica, pass_stream(wanted).end, wanted.degrees[stage])
        assert {(kind, k): version for kind, k, version in versions} == {
            (kind, k): version_of(wanted, stage, k) for kind, k in product("FB", own)
        }
        assert len(versions) == 2 * len(own)


@pytest.mark.parametrize("name", long_after(len(QUICK), NAMES))
def test_losses_and_weights_are_those_of_one_process(found: list[dict[str, Any]], name: str) -> None:
    wanted = JOBS[name]
    losses, weights = replayed(wanted)
    measured = dict(pair for results in found[: wanted.ranks] for pair in results[name]["losses"])
    assert [measured[k] for k in range(pass_stream(wanted).end)] == pytest.approx(losses, rel=1e-5)
    compared = set()
    for results in found[: wanted.ranks]:
        for of, numbers in results[name]["weights"].items():
            torch.testing.assert_close(torch.tensor(numbers), weights[of], rtol=1e-5, atol=1e-5)
            compared.add(of)
    assert compared == set(weights)


@pytest.mark.parametrize("name", long_after(len(QUICK), NAMES))
def test_no_more_versions_are_kept_than_passes_need(found: list[dict[str, Any]], name: str) -> None:
    wanted = JOBS[name]
    for rank in range(wanted.ranks):
        stage, _ = wanted.seat(rank)
        if wanted.schedule.name is _2BW:
            assert found[rank][name]["most"] == 2
        elif not wanted.vertical_sync:
            assert found[rank][name]["most"] == wanted.in_flight[stage]


@pytest.mark.parametrize(
    "degrees", long_after(3, map(list, [*product((1, 2, 3), repeat=2), *product((1, 4), repeat=3)]))
)
def test_ranks_never_wait_for_each_other_under_the_rule(degrees: list[int]) -> None:
    borders = tuple(range(1, len(degrees)))
    for name, synced in ((_2BW, False), (_PIPEDREAM, False), (_PIPEDREAM, True)):
        stream = pass_stream(job(name, borders, replicas=tuple(degrees), microbatches=24, vertical_sync=synced))
        order = stream.order()
        assert len(order) == 2 * stream.end * len(degrees)
        at = {(stage, *one): number for number, (stage, _, one) in enumerate(order)}
        assert len(at) == len(order)
        for (stage, kind, k), number in at.items():
            used = stream.version(stage, k)
            # The update that made the version came before the pass.
            for seen in range(max(0, used * stream.period(stage) - degrees[stage]), used * stream.period(stage)):
                assert at[stage, stream.passes(stage, 0)[-1][0], seen] < number, (stage, kind, k)


def test_with_too_few_in_flight_ranks_wait_for_each_other() -> None:
    wanted = job(_PIPEDREAM, (3,), replicas=(1, 4), microbatches=8)
    assert wanted.in_flight == rule_in_flight((1, 4)) == (5, 1)
    with pytest.raises(UsageError, match="with 1, 2 microbatches in flight stages of data-parallel degrees 1, 4 wait"):
        pass_stream(replace(wanted, in_flight=(1, 2))).order()


def test_vertical_sync_gives_all_stages_the_same_microbatches() -> None:
    for degrees in product((1, 2, 3), repeat=3):
        stream = pass_stream(job(_PIPEDREAM, (1, 2), replicas=degrees, microbatches=6, vertical_sync=True))
        for k in range(stream.end):
            seen = [stream.version(stage, k) * d for stage, d in enumerate(degrees)]
            assert all(seen[0] - d < one <= seen[0] for one, d in zip(seen, degrees, strict=True))
