"""Found schemes of traced layers, trained by ranks over gloo as one process trains."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from piper_ray.model.errors import UsageError
from piper_ray.model.stop import Stop
from piper_ray.run.launch import launch
from piper_ray.run.scheme_ranks import follow
from piper_ray.run.schemes import SchemeJob, SchemeOutcome, scheme_jobs
from piper_ray.workloads.measure.factory import TrainableModel
from piper_ray.workloads.measure.operators import traced_program
from piper_ray.workloads.schemes.graph import OperatorFamily, OperatorGraph
from tests.lengths import asked_for, long_after
from tests.run_support import results_of_ranks
from tests.scheme_runs import job_of, schemes_in_full

_FAMILIES = ["cross", "grouped", "llama", "mamba", "experts", "state_space", "vit"]
_EXACT = 1e-12


def outcomes(folder: Path, jobs: Sequence[SchemeJob]) -> list[list[SchemeOutcome]]:
    """Of each job, all by the same ranks, as processes take longer to start than a job."""
    (folder / "jobs.pickle").write_bytes(pickle.dumps(jobs))
    first, *_ = results_of_ranks(
        "scheme_runs", folder, jobs[0].degree, {"jobs": str(folder / "jobs.pickle")}, strict=False
    )
    return [[SchemeOutcome(**one) for one in found] for found in first]


@pytest.fixture(scope="module")
def by_family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[SchemeOutcome]]:
    """Of schemes of two ranks: those of runtimes, tokens in shards among them, and one that has no name."""
    families = asked_for(request.config, 1, _FAMILIES)
    jobs = [job_of(family, 2, schemes_in_full(family, 2, range(0 if family == "vit" else 1))) for family in families]
    found = dict(zip(families, outcomes(tmp_path_factory.mktemp("schemes"), jobs), strict=True))
    assert [len(one) for one in found.values()] == [len(job.schemes) for job in jobs]
    return found


@pytest.mark.parametrize("family", long_after(1, _FAMILIES))
def test_schemes_train_as_one_process_does(by_family: dict[str, list[SchemeOutcome]], family: str) -> None:
    """Each begins with the same weights."""
    found = by_family[family]
    losses = {one.layer: one.losses for one in found}
    assert losses
    for one in found:
        assert len(set(one.losses)) == 3
        assert one.losses == pytest.approx(losses[one.layer], rel=1e-9)
        assert max(one.loss_difference, one.gradient_difference) < _EXACT, one


@pytest.mark.long
def test_schemes_of_four_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    (found,) = outcomes(tmp_path, [job_of("mixture", 4, schemes_in_full("mixture", 4, range(1)))])
    assert found
    for one in found:
        assert max(one.loss_difference, one.gradient_difference) < _EXACT, one


@pytest.mark.long
def test_a_wrong_scheme_trains_otherwise() -> None:
    """A sum of ranks that is left out: of a partial sum each rank has its own addend."""
    document = next(one for one in schemes_in_full("gpt", 2, range(0)) if one["name"] == "tensor parallelism")
    moves = [one for one in document["moves"] if (one["when"], one["from"]) == ("gradient", "partial sum")]
    assert moves
    wrong = {**document, "moves": [{**one, "from": "replicated"} if one in moves else one for one in document["moves"]]}
    with pytest.raises(Exception, match="rank 0"):
        launch(job_of("gpt", 2, [wrong]), lambda _done, _all: None, Stop())


def test_what_is_not_the_traced_code_is_refused_in_words(tmp_path: Path) -> None:
    (document, *_) = schemes_in_full("cross", 2, range(0))
    job = replace(job_of("cross", 2, [{**document, "operators": document["operators"][:-1]}]), degree=1)
    dist.init_process_group("gloo", init_method=(tmp_path / "meeting").as_uri(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="has other operators than the scheme"):
            follow(job, lambda _: None)
    finally:
        dist.destroy_process_group()


def test_files_and_ids_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "schemes.json"

    def jobs(text: str, chosen: str = "all") -> None:
        path.write_text(text)
        list(scheme_jobs(path, chosen, "m.py:f", {}, (), 1, 1))

    for text in ("{", "[]", '{"format": "piper-ray/plan"}'):
        with pytest.raises(UsageError, match="not schemes as piper-ray schemes MODEL -o"):
            jobs(text)
    with pytest.raises(UsageError, match="has no such scheme"):
        jobs(json.dumps({"format": "piper-ray/schemes", "layers": []}))
    with pytest.raises(UsageError, match="does not hold by the rule table"):
        jobs(
            json.dumps(
                {"format": "piper-ray/schemes", "layers": [{"schemes": [{"id": "a", "tensor_parallel_degree": 2}]}]}
            )
        )


class _Packed(nn.Module):
    """Cut in two parts, and viewed as heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x)
        first, second = inner.chunk(2, -1)
        turned = torch.cat([first + 1.0, second * second], -1)
        found: torch.Tensor = self.down(turned.view(2, 4, self.heads, -1).softmax(-1).flatten(-2))
        return found


def _packed(heads: int) -> OperatorGraph:
    model = TrainableModel(_Packed(heads), ((torch.randn(2, 4, 8),), {}))
    return traced_program("m.py:f", "packed", model).traced.graph


def test_shards_of_heads_are_shards_of_both_parts() -> None:
    """Of four heads two are in each part; of two heads each is a part, and no shard has a share of both."""
    assert _packed(4).sizes["up"] == 2
    assert "up" not in _packed(2).sizes


def test_an_added_constant_is_no_partial_sum() -> None:
    assert next(one for one in _packed(4).steps if one.name == "add").family is OperatorFamily.POINTWISE
