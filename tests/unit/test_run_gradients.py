"""Losses and gradients of pipelines over gloo, in processes of their own, are those of the unpiped model."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from piper_ray.model.schedule import ScheduleName
from piper_ray.run.job import Replicas
from tests.lengths import asked_for, long_after
from tests.run_models import AWKWARD_PATHS, SKIPPING_PATHS
from tests.run_support import job, results_of_ranks

ROUNDING = 2e-6
"""Relative: microbatches are summed in another order, and divided by their number at another time."""


SHARDED = Replicas.FULLY_SHARD
JOBS = {
    "1f1b": job(ScheduleName.ONE_F_ONE_B, (3,)),
    "fewer microbatches than stages": job(ScheduleName.ONE_F_ONE_B, (2, 4, 6), microbatches=2),
    "gpipe, four stages": job(ScheduleName.GPIPE, (1, 3, 6)),
    "recomputed": job(ScheduleName.ONE_F_ONE_B, (3,), recompute=(2, 3, 5)),
    "interleaved": job(ScheduleName.INTERLEAVED, (2, 4, 6)),
    "interleaved, three chunks, recomputed": job(
        ScheduleName.INTERLEAVED, (1, 2, 3, 5, 6), chunks=3, recompute=(2, 4), microbatches=6
    ),
    "looped": job(ScheduleName.LOOPED_BFS, (2, 4, 6)),
    "zero bubble": job(ScheduleName.ZB_H1, (3,), recompute=(3, 4)),
    "zero bubble in a V": job(ScheduleName.ZB_V, (2, 4, 6)),
    "dualpipe": job(ScheduleName.DUALPIPE_V, (2, 4, 6), recompute=(4,)),
    "replicas": job(ScheduleName.ONE_F_ONE_B, (3,), replicas=2, microbatches=8, recompute=(3,)),
    "replicas alone": job(ScheduleName.GPIPE, (), replicas=2, microbatches=4),
    "replicas, interleaved": job(ScheduleName.INTERLEAVED, (2, 4, 6), replicas=2, microbatches=8),
    "replicas, zero bubble": job(ScheduleName.ZB_H1, (3,), replicas=2, microbatches=8),
    "shards alone": job(ScheduleName.GPIPE, (), replicas=2, microbatches=4, sharing=SHARDED),
    "sharded": job(ScheduleName.ONE_F_ONE_B, (3,), replicas=2, microbatches=8, recompute=(3,), sharing=SHARDED),
    "sharded, zero bubble": job(ScheduleName.ZB_H1, (3,), replicas=2, microbatches=8, sharing=SHARDED),
    "skips": job(ScheduleName.ONE_F_ONE_B, (1, 2, 4), model="skipping", paths=SKIPPING_PATHS),
    "skips, zero bubble": job(ScheduleName.ZB_H1, (1, 2, 4), model="skipping", paths=SKIPPING_PATHS),
    "skips in a V": job(ScheduleName.ZB_V, (1, 2, 4), model="skipping", paths=SKIPPING_PATHS),
    "awkward": job(ScheduleName.ONE_F_ONE_B, (1, 3, 4), model="awkward", paths=AWKWARD_PATHS),
    "awkward, zero bubble": job(ScheduleName.ZB_H1, (3, 4, 5), model="awkward", paths=AWKWARD_PATHS),
    "awkward, replicas": job(
        ScheduleName.ONE_F_ONE_B, (4,), model="awkward", paths=AWKWARD_PATHS, replicas=2, microbatches=4
    ),
    "awkward, sharded": job(
        ScheduleName.GPIPE, (4,), model="awkward", paths=AWKWARD_PATHS, replicas=2, microbatches=4, sharing=SHARDED
    ),
}


QUICK = ("1f1b", "interleaved", "zero bubble in a V", "replicas alone", "shards alone", "skips in a V")
"""Of two ranks, as a process takes longer to start than a job."""
NAMES = sorted(JOBS, key=lambda name: name not in QUICK)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank, by job."""
    folder = tmp_path_factory.mktemp("run")
    jobs = {name: JOBS[name] for name in asked_for(request.config, len(QUICK), NAMES)}
    (folder / "jobs.pickle").write_bytes(pickle.dumps(jobs))
    return results_of_ranks(
        "run_ranks", folder, max(one.ranks for one in jobs.values()), {"jobs": str(folder / "jobs.pickle")}
    )


@pytest.mark.parametrize("name", long_after(len(QUICK), NAMES))
def test_gradients_are_those_of_the_unpiped_model(found: list[dict[str, Any]], name: str) -> None:
    wanted = JOBS[name]
    of_ranks = [results[name] for results in found[: wanted.ranks]]
    assert all(one["parameters"] > 0 for one in of_ranks)
    assert max(one["difference"] for one in of_ranks) <= ROUNDING
    assert {one["expected"] for one in of_ranks} == {of_ranks[0]["expected"]}
    losses = [one["loss"] for one in of_ranks if one["loss"] is not None]
    assert len(losses) == wanted.replicas
    assert sum(losses) / len(losses) == pytest.approx(of_ranks[0]["expected"], rel=1e-6)


@pytest.mark.parametrize("name", long_after(len(QUICK), NAMES))
def test_every_kind_of_pass_is_timed(found: list[dict[str, Any]], name: str) -> None:
    split = JOBS[name].schedule.name in (ScheduleName.ZB_H1, ScheduleName.ZB_V, ScheduleName.DUALPIPE_V)
    for results in found[: JOBS[name].ranks]:
        kinds = set(results[name]["kinds"])
        assert "F" in kinds
        assert {"I", "W"} <= kinds if split else "B" in kinds
