"""verify, info and convert; and that every command and option says what it is for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer
from typer.core import TyperCommand, TyperGroup
from typer.testing import CliRunner

import piper_ray
from piper_ray.cli.app import app
from piper_ray.model.errors import LimitError
from piper_ray.report.document import to_text
from tests.cli_cases import run, write_small
from tests.report_cases import small_instance, small_plan

RUNNER = CliRunner()
COMMANDS = (
    "plan",
    "solve",
    "frontier",
    "verify",
    "simulate",
    "compare",
    "report",
    "info",
    "export",
    "import-plan",
    "run",
    "convert",
    "estimate",
    "schemes",
    "memory",
    "profile",
    "sweep",
    "sweep-report",
    "warm",
    "help",
)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small(tmp_path)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(small_plan().to_dict()))
    return path


def test_too_little_memory_is_no_fault_of_ours(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 3.00 TiB")

    monkeypatch.setattr("piper_ray.cli.shared.WorkloadOptions.load", fails)
    result = RUNNER.invoke(app, ["info", str(small)])
    assert result.exit_code == LimitError.exit_code
    assert result.stderr == "piper-ray: there is not enough memory: Unable to allocate 3.00 TiB\n"


def _commands() -> dict[str, TyperCommand]:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    above = typer.Context(group)
    found = {
        name: command.make_context(name, [], above, resilient_parsing=True).command
        for name, command in group.commands.items()
    }
    return {name: command for name, command in found.items() if isinstance(command, TyperCommand)}


SIZED = {"--memory": "8", "--bandwidth": "25", "--memory-limit": "16"}
MEANT = {"--memory": "8GB", "--bandwidth": "25GB/s", "--memory-limit": "16GB"}


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (command, option)
        for command in _commands().values()
        for option in SIZED
        if any(option in parameter.opts for parameter in command.params)
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_size_without_its_unit_is_refused_with_the_one_that_was_meant(
    command: typer.core.TyperCommand, option: str
) -> None:
    given = [f"{name}=1" for name in ("in.toml", "out.json") for parameter in command.params if parameter.name == name]
    result = RUNNER.invoke(app, [str(command.name), *given, option, SIZED[option]])
    assert result.exit_code == 2
    words = " ".join(result.stderr.split())
    assert f"'{option}'" in words
    assert f"{SIZED[option]} has no unit; did you mean {MEANT[option]}?" in words


def test_a_size_in_a_file_that_most_likely_lacks_its_unit_is_noted(tmp_path: Path, plan: Path) -> None:
    path = tmp_path / "bytes.toml"
    piper_ray.dump(small_instance().replace(memory_bytes=8.0, bandwidth_bytes_per_s=25.0), path)
    notes = [
        f"piper-ray: note: {path}: cluster.memory: 8 bytes, less than 1 MB; was 8GB meant?",
        f"piper-ray: note: {path}: cluster.bandwidth: 25 bytes per second, less than 1 MB/s; was 25GB/s meant?",
    ]
    for command, code in [
        (["info", path, "--json"], 0),
        (["solve", path, "--json"], 4),
        (["frontier", path, "--json"], 4),
        (["verify", path, plan, "--json"], 6),
        (["convert", path, tmp_path / "out.json"], 0),
        (["solve", path, "--planner", "gpipe", "--json"], 4),
    ]:  # each of them reads the file in the same way
        result = run(*command)
        assert result.returncode == code, result.stderr
        assert result.stderr.splitlines()[:2] == notes
        assert "less than 1 MB" not in result.stdout
    given = run("info", path, "--memory", "8GB", "--bandwidth", "25GB/s")
    assert (given.returncode, given.stderr) == (0, "")
    assert "M = 7.451 GiB (8 GB), B = 25 GB/s" in given.stdout


@pytest.mark.parametrize("command", ["solve", "frontier", "info", "convert", "verify", "estimate", "sweep"])
def test_a_named_pipe_is_refused_by_every_command(tmp_path: Path, command: str) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    further: dict[str, list[object]] = {
        "convert": [tmp_path / "out.json"],
        "verify": [pipe],
        "estimate": ["--gpu", "H100-SXM", "--nodes", 1],
        "sweep": ["--storage", tmp_path / "there"],
    }
    result = run(command, pipe, *further.get(command, []), timeout_s=60)
    assert result.returncode == 3
    assert result.stderr == (
        f"piper-ray: {pipe}: 1 fault found\n  is a named pipe (FIFO): reading it could wait for ever; expected a file\n"
    )


def test_a_valid_plan(small: Path, plan: Path) -> None:
    result = run("verify", small, plan)
    assert (result.returncode, result.stderr) == (0, "")
    speed = "speed: 99.6 microbatches/s, 80.3 ms/step"
    assert result.stdout.endswith(f"valid: 10.0 ms/microbatch, 3 of 4 devices\n{speed}\n")
    assert "Workload  small: 6 layers" in result.stdout


def test_a_valid_plan_as_a_document(small: Path, plan: Path) -> None:
    document = json.loads(run("verify", small, plan, "--json").stdout)
    assert (document["schema"], document["valid"], document["violations"]) == ("piper-ray/verification", True, [])
    assert document["time_per_sample_s"] == 0.01004


def test_what_solve_writes_is_verified(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    solved = run("solve", small, "--json", "--out", out)
    document = tmp_path / "document.json"
    document.write_text(solved.stdout)
    for path in (out, document):
        verified = run("verify", small, path, "--json")
        assert verified.returncode == 0, verified.stderr
        assert json.loads(verified.stdout)["time_per_sample_s"] == json.loads(solved.stdout)["time_per_sample_s"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, None),
        ({"time_per_sample_s": 0.5}, "time_per_sample_s is 0.5 s, where the plan takes"),
        ({"lower_bound_s": 1e6}, "lower_bound_s is 1e+06 s, where the plan takes"),
        ({"ranks": [7, 9]}, "stages[0].ranks is [7, 9], where the order of the stages gives [0, "),
        ({"lower_bound_s": 0.001}, 'status is "optimal", where lower_bound_s is only 0.001 s'),
    ],
)
def test_what_a_plan_file_says_of_itself_and_cannot_be_is_noted(
    small: Path, tmp_path: Path, changed: dict[str, object], told: str | None
) -> None:
    run("solve", small, "--out", tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    if "ranks" in changed:
        document["stages"][0]["ranks"], changed = changed["ranks"], {}
    (tmp_path / "plan.json").write_text(json.dumps(document | changed))
    result = run("verify", small, tmp_path / "plan.json")
    assert result.returncode == 0
    assert "valid: " in result.stdout
    assert result.stderr == "" if told is None else f"plan.json: {told}" in result.stderr
    elsewhere = run("verify", small, tmp_path / "plan.json", "--memory", "100GiB")
    assert elsewhere.returncode == 0
    assert "plan.json: " not in elsewhere.stderr


def test_an_invalid_plan_names_each_violation(small: Path, plan: Path) -> None:
    result = run("verify", small, plan, "--devices", 2, "--memory", "6GiB", "--json")
    assert result.returncode == 6
    assert "the plan uses 3 devices, 2 are there" in result.stderr
    assert "stage 1: needs" in result.stderr
    document = json.loads(result.stdout)
    assert document["valid"] is False
    assert len(document["violations"]) >= 2
    assert document["time_per_sample_s"] is None


def test_a_broken_plan_file_is_bad_input(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"stages": [{"nodes": [99]}]}')
    result = run("verify", small, path)
    assert result.returncode == 3
    assert "stages[0]" in result.stderr


def test_info_for_a_person(small: Path) -> None:
    result = run("info", small)
    assert (result.returncode, result.stderr) == (0, "")
    assert "Workload  small: 6 layers, 5 edges" in result.stdout
    assert "1       6     12  vanilla x6, activation recomp (recomputes) x6" in result.stdout
    assert "downsets" in result.stdout
    assert "Forecast  about " in result.stdout


def test_info_as_a_document(small: Path) -> None:
    document = json.loads(run("info", small, "--json", "--devices", 9).stdout)
    assert document["instance"]["devices"] == 9
    assert document["tensor_parallel_degrees"] == [1]
    assert document["tmpcs"] == [{"tensor_parallel_degree": 1, "layers": 6, "tmpcs": 12, "recompute": 6}]
    assert document["forecast"]["downsets"] == 7
    assert document["forecast"]["memory_bytes"] > 0


def test_convert_there_and_back(small: Path, tmp_path: Path) -> None:
    workload, again = tmp_path / "small.toml", tmp_path / "again.json"
    assert run("convert", small, workload, "--devices", 12).returncode == 0
    assert run("convert", workload, again).returncode == 0
    expected = small_instance().replace(devices=12)
    assert piper_ray.load(workload).digest == piper_ray.load(again).digest == expected.digest


def test_convert_to_what_it_does_not_know(small: Path, tmp_path: Path) -> None:
    result = run("convert", small, tmp_path / "small.xml")
    assert result.returncode == 2
    assert ".json, .toml, .txt, or a form" in result.stderr


def test_the_commands_are_those_documented() -> None:
    assert list(_commands()) == [*COMMANDS]


def test_commands_are_listed_by_the_first_line_of_what_they_say() -> None:
    shown = " ".join(RUNNER.invoke(app, ["--help"]).output.split())
    for name, command in _commands().items():
        assert f"{name} {str(command.help).partition(chr(10))[0]}" in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_has_help(name: str) -> None:
    command = _commands()[name]
    assert command.help
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{name} {parameter.name}"


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["solve", "--help"], ["verify", "-h"]])
def test_help_is_shown(arguments: list[str]) -> None:
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_version_and_exit_codes_are_shown() -> None:
    assert RUNNER.invoke(app, ["--version"]).output == f"piper-ray {piper_ray.__version__}\n"
    assert "6 a plan that is not valid" in " ".join(RUNNER.invoke(app, ["--help"]).output.split())


def test_no_command_is_a_question_for_help() -> None:
    result = run()
    assert result.returncode == 2
    assert "Usage" in result.stdout + result.stderr


def test_documents_are_strict_json() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_text({"value": float("inf")})
