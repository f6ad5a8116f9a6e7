"""What is proposed for clusters of published runs is no slower than the layout that ran there, and the page says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from piper_ray.calibrate.runs import PublishedRun, read_runs
from piper_ray.model.options import SolveOptions
from piper_ray.simulate.run import SimulationOptions, simulate
from piper_ray.workloads.estimate.hardware import load_hardware
from scripts.validation.proposals import Proposal, one_of_each_cluster, proposal_dict, proposal_for, proposal_lines
from tests.data import DATA
from tests.lengths import long_after

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "proposals.md"

QUICK = [
    "bloom-182b-gbs1024",
    "falcon-180b",
    "korthikanti-1T-full",
    "mtnlg-2240",
    "narayanan-1.7B",
    "narayanan-18.4B",
    "nemo2502-b200-llama8b",
]
"""Under 1F1B, which is planned exactly."""


@pytest.fixture(scope="module")
def runs() -> dict[str, PublishedRun]:
    return {run.id: run for run in read_runs(DATA / "runs" / "published.json")}


def proposed(run: PublishedRun) -> Proposal:
    found = proposal_for(run, load_hardware(), SolveOptions(threads=1))
    assert isinstance(found, Proposal), found
    return found


@pytest.mark.parametrize("name", long_after(2, QUICK))
def test_no_published_layout_is_faster(name: str, runs: dict[str, PublishedRun]) -> None:
    found = proposed(runs[name])
    assert found.gain >= -1e-9
    assert not found.proposed.simulation.memory_violations
    assert found.proposed.plan.by_rank(found.proposed.simulation.schedule).devices <= found.instance.devices
    assert found.instance.devices == runs[name].gpus
    rules = found.published.simulation.options
    assert rules == found.proposed.simulation.options
    assert rules == SimulationOptions.of(found.solution.step)
    again = simulate(found.instance, found.published.plan, found.published.simulation.schedule, options=rules)
    assert again.step_s == found.published.step_s
    told = proposal_dict(name, found)
    assert json.loads(json.dumps(told)) == told
    if found.gain > 0.01:
        assert told["because"]
    assert proposal_lines([(name, found)])[2].startswith(f"| {name} | ")


def test_docs_have_a_row_for_each_and_none_is_slower() -> None:
    text = DOCS.read_text()
    table, told, *_ = text[text.index("| run | its layout |") :].split("\n\n")
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()[2:]]
    assert {row[1] for row in rows} >= set(QUICK)
    gains = [float(row[8].removesuffix("%")) for row in rows]
    assert min(gains) >= 0.0
    assert f"{len(rows)} clusters: faster in {sum(gain > 0.0 for gain in gains)}, " in told


def test_what_cannot_be_compared_has_a_reason(runs: dict[str, PublishedRun]) -> None:
    found = proposal_for(runs["llama2-70b"], load_hardware(), SolveOptions(threads=1))
    assert found == "layout, microbatch: not said"
    assert proposal_lines([("a run", "no layout")])[-1] == "- a run: no layout"
    assert proposal_dict("a run", "no layout") == {"id": "a run", "reason": "no layout"}


def test_a_cluster_stands_for_its_fastest_run(runs: dict[str, PublishedRun]) -> None:
    bloom = [run for name, run in runs.items() if name.startswith("bloom-182b")]
    assert [run.id for run in one_of_each_cluster(bloom)] == ["bloom-182b-gbs1024", "bloom-182b-gbs2048"], (
        "another batch is another cluster"
    )
    slower = runs["falcon-180b"].model_copy(update={"id": "slower", "step_s": 1e6})
    untimed = slower.model_copy(update={"id": "untimed", "step_s": None, "tokens_per_s_per_gpu": None})
    assert one_of_each_cluster([slower, runs["falcon-180b"], untimed]) == [runs["falcon-180b"]]


@pytest.mark.long
def test_the_script_prints_a_table_for_people_and_a_list_for_programs(
    runs: dict[str, PublishedRun], tmp_path: Path
) -> None:
    path = tmp_path / "runs.json"
    of_each = [json.loads(runs[name].model_dump_json()) for name in ("nemo2502-b200-llama8b", "llama2-70b")]
    path.write_text(json.dumps(of_each))

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "scripts.validation", "--proposals", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    listed = json.loads(run("--runs", path, "--json").stdout)
    assert [one["id"] for one in listed] == ["nemo2502-b200-llama8b", "llama2-70b"]
    assert listed[0]["gain"] == pytest.approx(0.0, abs=1e-9)
    assert listed[0]["proposed"]["step_s"] >= listed[0]["lower_bound_step_s"] * (1.0 - 1e-9)
    assert listed[1]["reason"] == "layout, microbatch: not said"
    printed = run("--runs", path, "--time-limit", 5).stdout
    assert "1 cluster: faster in 0, equal in 1, slower in 0." in printed
    assert "\n- llama2-70b: " in printed
