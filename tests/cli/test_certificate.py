"""--certificate of solve and verify: what is written, checked and said."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import piper_ray
from piper_ray.cli.certificates import certified_text
from tests.cli_cases import ROOT, run, without_notes, write_small
from tests.interrupt_support import HANG_S
from tests.report_cases import small_instance


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small(tmp_path)


def solved(small: Path, *options: object) -> tuple[Path, Path]:
    """Its plan and its certificate."""
    plan, certificate = small.with_name("plan.json"), small.with_name("certificate")
    result = run("solve", small, "-o", plan, "--certificate", certificate, *options)
    assert result.returncode == 0, result.stderr
    return plan, certificate


def test_written_and_checked(small: Path) -> None:
    plan, certificate = small.with_name("plan.json"), small.with_name("certificate")
    result = run("solve", small, "-o", plan, "--certificate", certificate)
    assert result.returncode == 0
    assert without_notes(result.stderr) == ""
    size = certificate.stat().st_size
    assert f"certificate: {size:,} bytes in {certificate}, " in result.stdout
    found = piper_ray.verify_certificate(small_instance(), certificate)
    result = run("verify", small, plan, "--certificate", certificate)
    assert result.returncode == 0, result.stderr
    assert "certified: no plan takes less than " in result.stdout
    assert "/microbatch; gap 0 %" in result.stdout
    assert f"in front of {found.tails} tail" in result.stdout


def test_it_is_not_written_into_a_pipe(small: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = run("solve", small, "--certificate", tmp_path / "pipe", timeout_s=HANG_S)
    assert result.returncode == 2
    assert "pipe: is a named pipe (FIFO): writing it could wait for ever; expected the path of a file" in result.stderr


def test_as_json(small: Path) -> None:
    plan, certificate = solved(small)
    result = run("verify", small, plan, "--certificate", certificate, "--json")
    document = json.loads(result.stdout)
    assert document["certificate"]["gap"] <= 2e-9
    assert document["certificate"]["bound_s"] == pytest.approx(document["time_per_sample_s"], rel=2e-9)
    assert "certificate" not in json.loads(run("verify", small, plan, "--json").stdout)


def test_solve_as_json_prints_one_document(small: Path) -> None:
    result = run("solve", small, "--certificate", small.with_name("file"), "--json")
    assert json.loads(result.stdout)["status"] == "optimal"
    assert "certificate: " in result.stderr


def test_the_same_bytes(small: Path) -> None:
    first = solved(small)[1].read_bytes()
    assert solved(small, "--threads", 1)[1].read_bytes() == first
    for _ in range(2):  # from the start, and from a checkpoint
        assert solved(small, "--resume", small.with_name("state"))[1].read_bytes() == first


def test_plans_of_others_are_told_how_far_off_they_are(small: Path) -> None:
    _, certificate = solved(small)
    other = small.with_name("other.json")
    assert run("solve", small, "--planner", "data-parallel", "-o", other).returncode == 0
    result = run("verify", small, other, "--certificate", certificate, "--schedule", "2bw")
    assert result.returncode == 0, result.stderr
    assert "; gap 0 %" not in result.stdout
    assert " %" in next(line for line in result.stdout.splitlines() if line.startswith("certified: "))


def test_restrictions_are_told(small: Path) -> None:
    plan, certificate = solved(small, "--no-data-parallel")
    result = run("verify", small, plan, "--certificate", certificate)
    assert result.returncode == 0
    assert "certified: no plan that keeps NoDataParallelism() takes less than " in result.stdout


@pytest.mark.parametrize("schedule", ["2bw", "1f1b"])
def test_the_whole_claim_may_be_demanded(small: Path, schedule: str) -> None:
    plan, certificate = solved(small, "--schedule", schedule)
    result = run("verify", small, plan, "--certificate", certificate, "--unrestricted", "--json")
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)["certificate"]
    assert said["unrestricted"] is True
    assert said["gap"] <= 2e-9
    plan, certificate = solved(small, "--schedule", schedule, "--no-data-parallel")
    result = run("verify", small, plan, "--certificate", certificate, "--json")
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)["certificate"]
    assert said["unrestricted"] is False
    assert said["gap"] <= 2e-9
    result = run("verify", small, plan, "--certificate", certificate, "--unrestricted")
    assert result.returncode == 8
    assert "holds only for plans under restrictions: NoDataParallelism()" in result.stderr
    result = run("verify", small, plan, "--unrestricted")
    assert result.returncode == 2
    assert "--unrestricted is for --certificate" in result.stderr


def test_a_certificate_that_says_nothing_of_a_plan(tmp_path: Path) -> None:
    """Of one faster than its bound, of a slower one, and where it proves that there is none of its kind."""
    bert, plan, slow = ROOT / "inputs" / "bert32-a100.toml", tmp_path / "plan.json", tmp_path / "slow.json"
    assert run("solve", bert, "-o", plan).returncode == 0
    assert run("solve", bert, "--planner", "data-parallel", "-o", slow).returncode == 0
    of_eight, of_none = tmp_path / "of-eight", tmp_path / "of-none"
    assert run("solve", bert, "--tensor-parallel", 8, "--certificate", of_eight).returncode == 0
    assert run("solve", bert, "--tensor-parallel", 7, "--certificate", of_none).returncode == 4
    for other, file in ((plan, of_eight), (slow, of_eight), (plan, of_none)):
        result = run("verify", bert, other, "--certificate", file, "--schedule", "2bw")
        assert result.returncode == 8
        assert f"{file}: says nothing of {other}:\n  stage 1: tensor-parallel degree " in result.stderr
        line = next(line for line in result.stdout.splitlines() if line.startswith("certified: "))
        assert line.endswith("; of PLAN that says nothing")
        assert "gap" not in line
    result = run("verify", bert, plan, "--certificate", of_none, "--json")
    assert result.returncode == 8
    said = json.loads(result.stdout)["certificate"]
    assert (said["bound_s"], said["gap"]) == (None, None)
    assert said["violations"][0].startswith("stage 1: tensor-parallel degree ")


def test_refused_by_name(small: Path) -> None:
    plan, certificate = solved(small)
    content = certificate.read_bytes()
    certificate.write_bytes(content[: len(content) // 2])
    result = run("verify", small, plan, "--certificate", certificate)
    assert result.returncode == 8
    assert "is no certificate, or is cut off or damaged" in result.stderr
    certificate.write_bytes(content)
    result = run("verify", small, plan, "--certificate", certificate, "--memory", "100GiB")
    assert result.returncode == 8
    assert "the certificate is for another workload or cluster" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--stages", "2"], "bounds under StageCount(stages=2) have no certificate"),
        (["--use-all-devices"], "AllDevices()"),
        (["--same-degrees"], "SameDegrees()"),
        (["--sustained"], "SustainedRate()"),
        (["--recompute", "first-k"], "recomputation first-k"),
        (["--recompute", "one-for-all"], "recomputation one-for-all"),
        (["--contract", "operators"], "operators' blocks has no certificate"),
        (["--planner", "megatron"], "--certificate is for the exact planner"),
        (["--memory-limit", "170MB"], "a certificate needs all downsets: the graph has"),
    ],
)
def test_what_has_no_certificate_is_told_before_the_work(small: Path, options: list[str], said: str) -> None:
    certificate = small.with_name("file")
    result = run("solve", small, "--certificate", certificate, *options)
    assert result.returncode == 2
    assert said in result.stderr
    assert result.stdout == ""
    assert not certificate.exists()


def test_places_that_cannot_be_written(small: Path) -> None:
    result = run("solve", small, "--certificate", small.with_name("no") / "folder")
    assert result.returncode == 2
    assert "--certificate" in result.stderr
    assert "there is no folder" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "there is no plan that keeps the memory to the byte"),
        (["--schedule", "1f1b"], "there is no plan under 1f1b that keeps the memory to the byte"),
        (["--no-data-parallel"], "there is no plan that keeps NoDataParallelism() and the memory to the byte"),
    ],
)
def test_no_plan_at_all(small: Path, options: list[str], said: str) -> None:
    certificate = small.with_name("file")
    result = run("solve", small, "--certificate", certificate, "--memory", "1KiB", *options)
    assert result.returncode == 4
    assert "certificate: " in result.stdout
    found = piper_ray.verify_certificate(small_instance().replace(memory_bytes="1KiB"), certificate)
    assert found.bound_s == float("inf")
    assert certified_text(found, (), 1.0)[0] == f"certified: {said}; of PLAN that says nothing"
