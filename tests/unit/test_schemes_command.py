"""``piper-ray schemes``: the table, the documents, the workload, and what is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import piper_ray
from piper_ray import Instance
from piper_ray.cli.certificates import certified_schemes
from piper_ray.export.job import make_job
from piper_ray.model.errors import UnsupportedPlan, UsageError
from piper_ray.model.mode import FOUND, OF_RUNTIMES, Mode, found_schemes
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import TRAINED_TODAY
from piper_ray.report.schemes import print_scheme
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from piper_ray.workloads.formats.plans import plan_document
from piper_ray.workloads.schemes.check import checked_schemes
from piper_ray.workloads.schemes.document import claim_document
from piper_ray.workloads.schemes.frontier import FoundScheme
from piper_ray.workloads.schemes.graph import REPLICATED
from piper_ray.workloads.schemes.program import SchemeProgram
from tests.cli_cases import run
from tests.scheme_support import RandomPrices, chain_layer

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


def _plan(instance: Instance) -> Plan:
    """Of one stage, each layer by its scheme of the most moves."""

    def moves(tmpc_id: str) -> int:
        moved: Any = [instance.schemes[word]["moves"] for word in found_schemes([tmpc_id])]
        return sum(map(len, moved))

    chosen = {layer.id: max((x.id for x in layer.tmpcs[2]), key=moves) for layer in instance.layers}
    return Plan((Stage(tuple(chosen), 4, 2, chosen),))


def test_the_workload_has_each_scheme_in_full_and_its_plans_are_refused_by_name(written: Path) -> None:
    instance = piper_ray.load(written)
    ids = [tmpc.id for tmpc in instance.layers[1].tmpcs[2] if "scheme-" in tmpc.id]
    named = {word for one in ids for word in one.split("+") if word.startswith("scheme-")}
    assert named <= instance.schemes.keys()
    assert len(ids) == 2 * len(named), "with and without a shared optimizer"
    first: Any = instance.schemes[next(iter(named))]
    assert set(first["weights"].values()) <= {"replicated", "heads", "f"}
    assert first["time_s"] == pytest.approx(first["forward_s"] + first["backward_s"] + first["once_a_batch_s"])
    plan = _plan(instance)
    assert piper_ray.evaluate(instance, plan).time_per_sample_s > 0.0
    with pytest.raises(UnsupportedPlan, match="found from layers' operators"):
        make_job(instance, plan, TRAINED_TODAY, RUNTIMES[RuntimeName.MEGATRON], 8)


@pytest.mark.long
def test_a_plan_asks_for_schemes_until_no_others_save_anything(config: Path, written: Path, tmp_path: Path) -> None:
    asked = ["--gpu", "A100-80", "--nodes", "1", "-t", "2", "--global-batch", "8", "--zero", "all"]
    workload, plan, share = written, tmp_path / "plan.json", 1.0
    for _ in range(4):
        only = ["--schedule", "1f1b", "--runtime", "megatron", "--tensor-parallel", "2", "--memory", "1GiB"]
        solved = run("solve", workload, *only, "-o", plan)
        assert solved.returncode == 0, solved.stderr
        workload = tmp_path / "more.toml"
        found = run("schemes", config, *asked, "--plan", plan, "--json", "-o", workload)
        assert found.returncode == 0, found.stderr
        document = json.loads(found.stdout)
        assert document["between_layers"] == ["s", "replicated"]
        share = document["save_at_most"]
        if share < 1e-3:
            break
    assert 0.0 <= share < 1e-3
    assert run("verify", workload, plan).returncode == 0


@pytest.mark.parametrize(
    ("schedule", "error"), [("2bw", "expected a plan that solve wrote under --schedule"), ("1f1b", "has no TMPC")]
)
def test_plans_that_ask_for_nothing_are_refused(
    config: Path, written: Path, tmp_path: Path, schedule: str, error: str
) -> None:
    plan, asked = tmp_path / "plan.json", ["--gpu", "A100-80", "--nodes", "1", "-t", "2", "--global-batch", "8"]
    assert run("solve", written, "--schedule", schedule, "--tensor-parallel", "2", "-o", plan).returncode == 0
    found = run("schemes", config, *asked, "--plan", plan)
    assert found.returncode != 0
    assert error in found.stderr


def test_a_scheme_that_is_megatrons_own_is_exported_as_its_mode(written: Path) -> None:
    instance = piper_ray.load(written)
    plain = {word: x for word, x in instance.schemes.items() if x["border"] == "replicated"}
    rows = [[x.id for x in layer.tmpcs[2] if x.id in plain and not x.recompute] for layer in instance.layers]
    plan = Plan((Stage(tuple(range(len(rows))), 4, 2, {i: row[0] for i, row in enumerate(rows)}),))
    named = {word: {**x, "name": OF_RUNTIMES[0]} for word, x in instance.schemes.items()}
    instance = replace(instance, schemes=named).checked_as(instance)
    job = make_job(instance, plan, TRAINED_TODAY, RUNTIMES[RuntimeName.MEGATRON], 8)
    assert {tmpc.mode for tmpc in job.tmpcs.values()} == {Mode()}


def test_all_schemes_of_a_workload_hold_by_the_rule_table(written: Path) -> None:
    instance = piper_ray.load(written)
    words = {word for layer in instance.layers for tmpc in layer.tmpcs[2] for word in found_schemes([tmpc.id])}
    assert checked_schemes(instance, None, instance.schemes) == (sorted(words), [])
    told, (line,) = certified_schemes(written, instance)
    assert told == {**claim_document(), "offered": sorted(words)}
    assert f"the workload's own TMPCs, of which {len(words)} are schemes of the rule table" in line
    others = replace(instance, schemes=dict(sorted(instance.schemes.items())[1:])).checked_as(instance)
    with pytest.raises(UsageError, match=f"{min(words)}: it is not there in full"):
        certified_schemes(written, others)
    assert certified_schemes(written, piper_ray.estimate("bert-large", "A100-80")) == (None, [])


def test_a_scheme_is_shown_with_its_times_memory_and_weights() -> None:
    scheme = SchemeProgram(chain_layer(), 2, RandomPrices(1), REPLICATED).fastest(2.0)
    assert scheme is not None
    screen = Console(file=io.StringIO(), width=120, record=True)
    print_scheme(screen, FoundScheme("new", scheme))
    lines = screen.export_text().splitlines()
    assert lines[2].split() == ["product", "f", "f"]
    assert "time      1.469 s forward, 1.875 s backward, 0 s for sums once a batch" in lines
    assert "memory    30 B for each microbatch in flight, 648 B of state; replicas sum 144 B" in lines
    assert "weights   W (f), V (replicated)" in lines


def _without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda scheme: scheme.update({key: []})


def _elsewhere(scheme: dict[str, Any]) -> None:
    scheme["weights"] = {name: {"replicated": "f"}.get(at, "replicated") for name, at in scheme["weights"].items()}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (None, "hold by the rule table"),
        (_without("moves"), "it is not there so"),
        (_without("kept"), "it is not there so"),
        (_elsewhere, "divides it not evenly"),
        (lambda scheme: scheme.update(time_s=2.0 * scheme["time_s"]), "time_s is"),
        (lambda scheme: scheme["steps"]["feed-forward in"].update(forward="h"), "no rule divides feed-forward in by h"),
        (lambda scheme: scheme["prices"].pop("steps"), "not a scheme as piper-ray schemes"),
    ],
    ids=["sound", "a move", "what is kept", "weights", "a time", "a strategy", "prices"],
)
def test_verify_checks_the_schemes_that_a_plan_has(
    written: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None] | None, told: str
) -> None:
    instance = piper_ray.load(written)
    document: Any = plan_document(instance, _plan(instance), None)
    schemes = document["stages"][0]["schemes"]
    if change is not None:
        change(schemes[found_schemes([document["stages"][0]["TMPCids"]["1"]])[0]])
    (tmp_path / "plan.json").write_text(json.dumps(document))
    found = run("verify", written, tmp_path / "plan.json")
    assert told in " ".join((found.stdout if change is None else found.stderr).split())
    assert found.returncode == (0 if change is None else 2)


@pytest.mark.long
def test_plan_offers_schemes(config: Path, tmp_path: Path) -> None:
    asked = ["--gpu", "A100-80", "--nodes", "1", "--gpus-per-node", "2", "--microbatch-size", "1", "--schemes"]
    found = run("plan", config, *asked, "--global-batch", "8", "--headroom", "0", "-o", tmp_path)
    assert found.returncode == 0, found.stderr
    schemes = {word for word in (tmp_path / "workload.toml").read_text().split() if word.startswith(FOUND)}
    assert schemes
    instance = piper_ray.load(tmp_path / "workload.toml")
    plan = piper_ray.load_plan(tmp_path / "plan.json", instance)
    assert checked_schemes(instance, plan, instance.schemes)[1] == []


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["-t", "3"], "-t 3: does not divide the 8 GPUs that share a link"),
        (["--precision", "fp8"], "--precision fp8: schemes have no rules for 8-bit tensors yet"),
        (["-o", "x.csv"], "unknown kind of file; expected a path that ends in .json, .toml or .py"),
        (["-o", "x.toml"], "a workload is for a cluster; expected --nodes COUNT, too"),
        (["-t", "2", "--lora", "8"], "no rule says how norm before attention may be divided"),
    ],
)
def test_what_cannot_be_is_refused_in_words(config: Path, asked: list[str], told: str) -> None:
    found = run("schemes", config, "--gpu", "H100-SXM", *asked)
    assert found.returncode == 2, found.stdout
    assert told in found.stderr
    assert "Traceback" not in found.stderr
