"""The ledger of published runs: each row is checked from its files, and is what the estimator makes of the run."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import piper_ray
from piper_ray.calibrate.layouts import NotExpressible
from piper_ray.calibrate.runs import PublishedRun
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.formats.load import plan_claims
from scripts.ledger_of_runs import rows as module
from scripts.ledger_of_runs.page import page
from scripts.ledger_of_runs.question import granted, plan_of
from scripts.ledger_of_runs.rows import (
    DOCS,
    SURPRISING,
    TABLE,
    Row,
    asked,
    certificate_file,
    plan_file,
    read_rows,
    row_of,
    runs_with_pipelines,
    workload_file,
    workload_of_row,
    write_rows,
)
from tests.cli_cases import run
from tests.lengths import long_after

HARDWARE = load_hardware()
ROWS = {row.run: row for row in read_rows(TABLE)}
OF_EACH = long_after(4, ROWS)
"""Names of rows; of a few in a quick run."""
OF_SOME = long_after(1, [*ROWS][::16])


@cache
def published() -> dict[str, PublishedRun]:
    return {one.id: one for one in runs_with_pipelines()}


def test_each_published_run_with_a_pipeline_has_a_row() -> None:
    assert ROWS.keys() == published().keys()
    assert len(ROWS) >= 60
    models = [row.model.lower() for row in ROWS.values()]
    assert models == sorted(models)


@pytest.mark.parametrize("name", OF_EACH)
def test_verify_finds_plan_and_bound_from_the_files_alone(name: str) -> None:
    row, certificate = ROWS[name], certificate_file(name)
    proof = ["--certificate", certificate] if row.certified_step_s is not None else []
    assert certificate.exists() == bool(proof)
    answer = run("verify", workload_file(name), plan_file(name), *proof, "--json")
    assert answer.returncode == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout)
    microbatches = found["instance"]["microbatches"]
    assert found["valid"]
    assert found["time_per_sample_s"] * microbatches == pytest.approx(row.best_step_s, rel=1e-12)
    if row.certified_step_s is not None:
        assert found["certificate"]["bound_s"] * microbatches == pytest.approx(row.certified_step_s, rel=1e-12)
        assert row.certified_step_s <= row.best_step_s * (1.0 + 1e-9)
        assert not found["certificate"]["violations"]


@pytest.mark.parametrize("name", OF_SOME)
def test_a_row_is_what_the_estimator_makes_of_its_run(name: str) -> None:
    row = ROWS[name]
    workload = workload_of_row(row, published()[name], HARDWARE)
    assert workload.digest == piper_ray.load(workload_file(name)).digest
    question = granted(asked(published()[name], HARDWARE), row.excess_bytes)
    assert question.step_s == pytest.approx(row.predicted_step_s, rel=1e-12)
    assert question.run.measured_step_s == row.published_step_s
    assert not question.violations
    rules = question.demand.restrictions(workload, question.schedule.name)
    best = piper_ray.load_plan(plan_file(name), workload)
    schedule = plan_claims(plan_file(name)).schedule
    assert schedule is not None
    assert not list(rules.violations(workload, best, schedule))


def test_no_layout_is_faster_than_the_best_plan_and_no_plan_than_its_bound() -> None:
    for row in ROWS.values():
        assert row.behind >= -1e-9, row.run
        assert -1e-9 <= row.gap < 0.2, row.run
        tried = (row.same_recomputation_step_s, row.same_microbatch_step_s, row.same_degrees_step_s)
        assert any(tried) == (row.behind > SURPRISING), row.run
        assert all(step_s >= row.bound_step_s * (1.0 - 1e-9) for step_s in tried if step_s is not None), row.run
        assert bool(row.change) == (abs(row.error) > SURPRISING), row.run


def test_the_page_is_made_of_the_rows() -> None:
    assert (DOCS / "ledger.md").read_text(encoding="utf-8") == page(list(ROWS.values()))


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger.csv"
    assert read_rows(path) == []
    write_rows(reversed(ROWS.values()), path)
    assert path.read_bytes() == TABLE.read_bytes()
    assert read_rows(path) == list(ROWS.values())


@pytest.mark.long
def test_a_row_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the version that it was made by."""
    name = "bridge2511-h100-oss"
    kept = [path(name).read_bytes() for path in (workload_file, plan_file, certificate_file)]
    monkeypatch.setattr("piper_ray.workloads.formats.plans.__version__", json.loads(kept[1])["tool_version"])
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    made = row_of(published()[name], HARDWARE)
    assert made == ROWS[name]
    assert [path(name).read_bytes() for path in (workload_file, plan_file, certificate_file)] == kept


def test_a_layout_that_the_workload_has_no_configurations_for_is_refused() -> None:
    question = asked(published()["bloom-182b-gbs2048"], HARDWARE)
    bare = question.instance.layers[1]
    layers = [replace(layer, tmpcs={}) if layer is bare else layer for layer in question.instance.layers]
    with pytest.raises(NotExpressible, match=f"{bare.name} runs as full recomputation"):
        plan_of(replace(question.instance, layers=tuple(layers)), question.layout)


def row_with(**changes: object) -> Row:
    return replace(next(iter(ROWS.values())), **changes)  # type: ignore[arg-type]


def test_what_surprises_is_told() -> None:
    slow = row_with(
        run="slow", predicted_step_s=12.0, best_step_s=10.0, best_layout_step_s=None, same_recomputation_step_s=11.0,
        same_microbatch_step_s=12.0, same_degrees_step_s=None, usual_room_step_s=None, because="less work",
    )  # fmt: skip
    text = page([slow, row_with(run="wrong", change="products in bf16", changed_step_s=1e9)])
    row = "| `slow` | 20.0 % | - | 9.1 % | 0.0 % | - | no plan | microbatches; the best plan has less work |"
    assert row in text
    assert "no single change explains it" in text
    assert "no certificate: too many" in page([row_with(certified_step_s=None, certificate="too many")])
