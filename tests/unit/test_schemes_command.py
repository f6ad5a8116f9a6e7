"""``piper-ray schemes``: the table, the documents, the workload, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import piper_ray
from piper_ray.export.job import make_job
from piper_ray.model.errors import UnsupportedPlan
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import TRAINED_TODAY
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from tests.cli_cases import run

_CONFIG = {
    "model_type": "gpt2", "vocab_size": 1024, "n_positions": 512, "n_embd": 512, "n_layer": 2, "n_head": 8
}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("schemes") / "config.json"
    path.write_text(json.dumps(_CONFIG))
    return path


@pytest.fixture(scope="module")
def written(config: Path) -> Path:
    path = config.parent / "workload.toml"
    asked = ["--gpu", "A100-80", "--nodes", "1", "-t", "2", "--global-batch", "8", "--zero", "all", "-o", path]
    found = run("schemes", config, *asked)
    assert found.returncode == 0, found.stderr
    assert "decoder layer, t = 2" in found.stdout
    return path


def test_the_document_has_schemes_in_full(written: Path) -> None:
    document = json.loads(written.with_suffix(".schemes.json").read_text())
    (layer,) = document["layers"]
    assert document["complete"]
    assert layer["tensor_parallel_degree"] == 2
    first = layer["schemes"][0]
    assert first["steps"]["attention core, fused"].keys() == {"forward", "backward", "again"}
    assert set(first["weights"].values()) <= {"replicated", "heads", "f"}
    assert first["time_s"] == pytest.approx(first["forward_s"] + first["backward_s"] + first["once_a_batch_s"])
    times = [one["time_s"] for one in layer["schemes"]]
    assert times == sorted(times)


def test_the_workload_has_a_tmpc_for_each_scheme_and_its_plans_are_refused_by_name(written: Path) -> None:
    document = json.loads(written.with_suffix(".schemes.json").read_text())
    instance = piper_ray.load(written)
    ids = [tmpc.id for tmpc in instance.layers[1].tmpcs[2] if "scheme-" in tmpc.id]
    named = {one["id"] for one in document["layers"][0]["schemes"]}
    assert {word for one in ids for word in one.split("+") if word.startswith("scheme-")} == {
        f"scheme-{x}" for x in named
    }
    assert len(ids) == 2 * len(named), "with and without a shared optimizer"
    chosen = {
        layer.id: (ids[0] if "block" in layer.path or layer.id in (1, 2) else "plain") for layer in instance.layers
    }
    plan = Plan((Stage(tuple(chosen), 4, 2, chosen),))
    assert piper_ray.evaluate(instance, plan).time_per_sample_s > 0.0
    with pytest.raises(UnsupportedPlan, match="found from layers' operators"):
        make_job(instance, plan, TRAINED_TODAY, RUNTIMES[RuntimeName.MEGATRON], 8)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["-t", "3"], "-t 3: no part of the 8 GPUs that share a link"),
        (["--precision", "fp8"], "--precision fp8: what is kept in 8 bits has no rules yet"),
        (["-o", "x.csv"], "unknown kind of file; expected a path that ends in .json or .toml"),
        (["-o", "x.toml"], "a workload is for a cluster; expected --nodes COUNT, too"),
        (["-t", "2", "--lora", "8"], "no rule says how norm before attention may be divided"),
        (["-t", "2", "--unfused-attention"], "no rule says how scores may be divided"),
    ],
)
def test_what_cannot_be_is_refused_in_words(config: Path, asked: list[str], told: str) -> None:
    found = run("schemes", config, "--gpu", "H100-SXM", *asked)
    assert found.returncode == 2, found.stdout
    assert told in found.stderr
    assert "Traceback" not in found.stderr
