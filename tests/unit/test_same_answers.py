"""``scripts/answers``: what it solves, and that it sees the last bit of an answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import piper_ray
from piper_ray.workloads.formats.load import dump
from scripts.benchmarks.trees import this_tree
from scripts.same_answers import __main__ as compared
from scripts.same_answers.cases import cases
from tests.instances import equal_chain


def test_every_kind_of_graph_and_schedule_is_among_the_cases() -> None:
    quick, all_of_them = list(cases(quick=True)), list(cases(quick=False))
    ids = [case.id for case in all_of_them]
    assert len(set(ids)) == len(ids) > 400
    assert {case.id for case in quick} < set(ids)
    assert {schedule for case in quick for schedule in case.schedules} == {
        "2bw", "1f1b", "gpipe", "interleaved", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v",
    }  # fmt: skip


def answers(folder: Path, schedules: tuple[str, ...]) -> list[dict[str, Any]]:
    dump(equal_chain(4, devices=3, microbatches=4), folder / "chain.json")
    case = {"id": "chain", "file": str(folder / "chain.json"), "schedules": schedules, "devices": (1, 3)}
    run = subprocess.run(
        [sys.executable, str(compared.WORKER), json.dumps({"cases": [case], "threads": [1, 2]})],
        env=dict(this_tree().environment), check=True, capture_output=True, text=True,
    )  # fmt: skip
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.long
def test_answers_are_bits_and_refusals_are_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, flushed, _, refused, _ = answers(tmp_path, ("2bw", "1f1b", "no-such"))
    solution = piper_ray.solve(tmp_path / "chain.json", schedule="2bw")
    assert solution.plan is not None
    assert solution.time_per_sample_s is not None
    assert one["value"] == solution.time_per_sample_s.hex()
    assert one["plan"] == json.loads(json.dumps(solution.plan.to_dict()))
    assert one["thresholds"]
    assert one.keys() - two.keys() == {"frontier"}
    assert len(one["frontier"]) == len(flushed["frontier"]) == 3
    assert refused["refused"].startswith("UsageError")
    compared._tell(one, {**one, "bound": "0x0p+0"})
    assert capsys.readouterr().out == f"chain, 2bw, threads 1: bound is {one['bound']} here, 0x0p+0 before\n"
