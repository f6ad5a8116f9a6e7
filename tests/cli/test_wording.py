"""Help, names of before, what was probably meant, and which command takes the file that another was given."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import piper_ray
from piper_ray.cli.app import app
from piper_ray.cli.help import COMMON
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import bytes_text, memory_text, size_above, size_option
from piper_ray.model.instance import Edge, Instance, Layer, Tmpc
from piper_ray.model.units import parse_bytes, parse_count, parse_seconds, parse_tokens
from tests.cli_cases import ROOT, write_small
from tests.report_cases import small_instance, small_plan

INPUTS = ROOT / "inputs"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small(tmp_path)


def run(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="piper-ray", input=stdin)


def said(result: Result) -> str:
    """All of it in one line."""
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("slove", "x"), "No such command 'slove'. Did you mean 'solve'?"),
        (("solve", "x", "--device", "3"), "No such option: --device; did you mean --devices?"),
        (("solve", "x", "--schedule", "1f1"), "; did you mean 1f1b?"),
        (("solve", "x", "--recompute", "al"), "; did you mean always or all-or-none?"),
        (("solve", "x", "--planner", "megatorn"), "; did you mean megatron?"),
        (("estimate", "llama3-7b", "--gpu", "H100-SXM", "--nodes", "1"), "; did you mean llama3-70b?"),
        (("estimate", "llama3-70b", "--gpu", "H100-SMX", "--nodes", "1"), "; did you mean H100-SXM or H200-SXM?"),
        (("estimate", "meta-llama/Llama-3-70", "--gpu", "h100", "--nodes", "1"), "; did you mean llama3-70b?"),
        (("estimate", "t5-11b", "--gpu", "h100", "--nodes", "1", "--software", "nmo"), "; did you mean nemo?"),
        (
            ("estimate", "t5-11b", "--gpu", "h100", "--nodes", "1", "--software", "megatron"),
            "megatron-2022 or megatron-core?",
        ),
        (("estimate", "t5-11b", "--gpu", "h100", "--nodes", "1", "--precision", "bf17"), "; did you mean bf16?"),
        (("solve", "x", "--planner", "zzz"), "expected one of pipedream-2bw"),
        (("help", "slove"), "Did you mean 'solve'?"),
        (("solve", "x", "--devices", "1.5"), "'1.5' is no whole number; expected one such as 512, 1k (1,000)"),
        (("solve", "x", "--time-limit", "soon"), "'soon' is no length of time; expected one such as 90, 90s, 10m"),
    ],
)
def test_what_was_probably_meant_is_said(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in said(result)


@pytest.mark.parametrize("command", ["solve", "plan", "estimate", "import-plan", "profile", "sweep"])
def test_no_word_of_a_help_is_cut_off_on_a_narrow_terminal(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run(command, "--help-all" if command in COMMON else "--help")
    assert result.exit_code == 0
    assert "…" not in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_a_tmpc_that_is_not_there_is_compared_with_those_that_are() -> None:
    plan = small_plan()
    stages = [piper_ray.Stage(stage.layers, 1, 1, dict.fromkeys(stage.layers, "vanila")) for stage in plan.stages]
    with pytest.raises(piper_ray.InvalidPlan, match="did you mean vanilla"):
        piper_ray.evaluate(small_instance(), piper_ray.Plan(tuple(stages)))


CONFIG = json.dumps({"model_type": "llama", "hidden_size": 64})
PLAN = json.dumps(
    {"stages": [{"nodes": [0], "dataParallelDegree": 1, "tensorParallelDegree": 1, "TMPCids": {"0": "x"}}]}
)
SWEEP = '[workloads]\na = "a.toml"\n[grid]\ndevices = 8\n'
WORKLOAD = "[types.a]\ntmpcs = [{ t = 1, id = 'x', time_s = 1 }]\n[layers]\na = { type = 'a' }\n"


@pytest.mark.parametrize(
    ("command", "name", "text", "words"),
    [
        ("solve {file}", "config.json", CONFIG, "not a workload but a Hugging Face config: `piper-ray estimate"),
        ("info {file}", "plan.json", PLAN, "not a workload but a plan: `piper-ray verify INPUT PLAN`"),
        ("frontier {file}", "sweep.toml", SWEEP, "not a workload but a sweep: `piper-ray sweep FILE --storage DIR`"),
        ("sweep {file} --storage {folder}/s", "w.toml", WORKLOAD, "not a sweep but a workload: `piper-ray solve FILE`"),
        (
            "sweep {file} --storage {folder}/s",
            "c.toml",
            "model_type = 'llama'",
            "not a sweep but a Hugging Face config",
        ),
        ("sweep {file} --storage {folder}", "config.json", CONFIG, "not a sweep but a Hugging Face config"),
        ("sweep {file} --storage {folder}", "p.json", PLAN, "not a sweep but a plan"),
        ("estimate {file} --gpu L40S --nodes 1", "w.toml", WORKLOAD, "not a model's config but a workload"),
        ("estimate {file} --gpu L40S --nodes 1", "p.json", PLAN, "not a model's config but a plan"),
        ("verify {small} {file}", "config.json", CONFIG, "not a plan but a Hugging Face config"),
        ("verify {small} {small}", "unused", "", "not a plan but a workload"),
    ],
)
def test_a_wrong_file_gets_the_command_that_takes_it(
    tmp_path: Path, small: Path, command: str, name: str, text: str, words: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    result = run(*command.format(file=file, small=small, folder=tmp_path).split())
    assert result.exit_code == 3
    assert words in said(result)
    assert len(result.output.splitlines()) == 2


def test_a_plan_of_another_workload_is_one_fault(small: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert run("solve", INPUTS / "bert32-a100.toml", "-o", plan).exit_code == 0
    result = run("verify", small, plan)
    assert result.exit_code == 3
    assert len(result.output.splitlines()) == 2
    assert 'a plan of another workload: of "bert32-a100", 37 layers, digest ' in result.output
    assert f'; this is "small", 6 layers, digest {small_instance().digest[:12]}...' in result.output


@pytest.mark.parametrize(
    "command", ["verify {small} {plan}", "simulate {small} {plan}", "report {small} {plan} -o {page}"]
)
def test_every_command_tells_a_plan_of_another_workload(small: Path, tmp_path: Path, command: str) -> None:
    other, plan = tmp_path / "other.json", tmp_path / "plan.json"
    layers = [Layer(number, "block", {1: (Tmpc("vanilla", 0.01),)}) for number in range(5)]
    edges = [Edge(number, number + 1, 1e6) for number in range(4)]
    piper_ray.dump(Instance(layers, edges, 4, 8, "8GiB", "25GB/s", "other"), other)
    assert run("solve", other, "-o", plan).exit_code == 0
    result = run(*command.format(small=small, plan=plan, page=tmp_path / "page.html").split())
    assert result.exit_code == 6
    assert len(result.output.splitlines()) == 2
    assert (
        f'a plan of another workload: of "other", 5 layers, digest {piper_ray.load(other).digest[:12]}' in result.output
    )


def test_a_plan_for_another_cluster_that_breaks_a_rule_says_what_it_was_made_for(small: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert run("solve", small, "--devices", 8, "-o", plan).exit_code == 0
    result = run("verify", small, plan, "--devices", 1)
    assert result.exit_code == 6
    assert said(result).endswith("the plan was made for another cluster or batch: --devices 8")
    given = said(result).split("batch: ")[1].split()
    assert run("verify", small, plan, *given).exit_code == 0


def test_former_names_of_options_are_understood_and_not_shown(small: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    assert run("solve", small, "--resume", kept).exit_code == 0
    assert any(kept.iterdir())
    again = run("solve", small, "--checkpoint", kept)
    assert (again.exit_code, "optimal" in again.output) == (0, True)
    made = run("estimate", "bert-large", "--gpu", "L40S", "--nodes", 1, "--batch", 64, "--microbatch", 2)
    assert "--microbatch-size 2" in made.output.splitlines()[1]
    assert "--global-batch 64" in made.output.splitlines()[1]
    assert "--resume" not in run("solve", "--help-all").output
    assert "--batch" not in run("estimate", "--help-all").output


def test_flags_have_no_type_in_help() -> None:
    for command in ("solve", "sweep", "estimate", "profile", "simulate"):
        assert "<bool>" not in run(command, "--help-all" if command in COMMON else "--help").output
    assert "<bool>" not in run("--help").output


def test_lengths_of_sequences_are_told_in_1024_tokens() -> None:
    assert [parse_tokens(text) for text in ("8192", "8k", "8K", "128Ki")] == [8192, 8192, 8192, 131072]
    for text in ("0", "1.5k", "-8", "8M", ""):
        with pytest.raises(UsageError, match=r"expected one such as 8192 or 128k"):
            parse_tokens(text)


@pytest.mark.parametrize("command", COMMON)
def test_help_has_the_usual_options_on_a_screen_and_names_the_way_to_all(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    usual, whole = (run(command, option) for option in ("--help", "--help-all"))
    assert (usual.exit_code, whole.exit_code) == (0, 0)
    assert len(usual.output.splitlines()) <= 40
    assert "--help-all" in usual.output
    shown = set(re.findall(r"(?<=--)[\w-]+(?= )", usual.output))
    assert COMMON[command] <= shown
    assert len(re.findall(r"\n  (?:-\w, )?--", whole.output)) > len(re.findall(r"\n  (?:-\w, )?--", usual.output))


def test_help_is_a_command_too() -> None:
    assert run("help").output.split() == run("--help").output.split()
    assert run("help", "frontier").output == run("frontier", "--help").output
    assert run("help", "help").exit_code == 0


def test_version_has_a_short_name() -> None:
    assert run("-V").output == run("--version").output == f"piper-ray {piper_ray.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell: str) -> None:
    asked = {"COMP_WORDS": "piper-ray so", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "piper-ray so"}
    asked["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    finished = subprocess.run(
        [sys.executable, "-m", "piper_ray"],
        env={**os.environ, **asked, "_PIPER_RAY_COMPLETE": f"complete_{shell}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "solve" in finished.stdout
    assert "sweep" not in finished.stdout


def test_an_input_is_read_from_stdin(small: Path) -> None:
    result = run("solve", "-", "--json", stdin=small.read_text())
    assert result.exit_code == 0
    assert json.loads(result.stdout)["instance"]["digest"] == small_instance().digest
    base = run("info", "-", stdin='base = "nowhere/small.toml"')
    assert f"base: {Path.cwd() / 'nowhere' / 'small.toml'}: cannot be read" in said(base)
    toml = run("info", "-", stdin=(INPUTS / "bert32-a100.toml").read_text("utf-8"))
    assert "37 layers" in toml.output
    wrong = run("solve", "-", stdin="{}")
    assert (wrong.exit_code, wrong.output.splitlines()[0]) == (3, "piper-ray: stdin: 1 fault found")


def test_counts_and_times_have_units(small: Path) -> None:
    assert "K = 1,000 devices" in run("info", small, "--devices", "1k").output
    assert "N = 2,048 microbatches" in run("info", small, "--microbatches", "2Ki").output
    assert run("solve", small, "--time-limit", "10m").exit_code == 0
    assert "2,000 devices" in run("frontier", small, "--devices", "1k..2k:500").output


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("512", 512),
        ("1k", 1000),
        ("1K", 1000),
        ("1Ki", 1024),
        ("1.5k", 1500),
        ("2M", 2 * 10**6),
        ("0.3B", 3 * 10**8),
        ("15T", 15 * 10**12),
        ("15e12", 15 * 10**12),
        ("1e3", 1000),
    ],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "1.5", "1e-3", "1e999", "1kk", "1,000", "0x10", "inf"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(piper_ray.UsageError, match="is no whole number"):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0), ("1d", 86400.0), ("5ms", 0.005)],
)
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("size", [1.0, 999.0, 2.0**20 + 1, 160667746232.5, 79.25e9, 8 * 2.0**30, 1e15])
def test_a_size_above_is_of_few_digits_and_no_smaller(size: float) -> None:
    text = size_above(size)
    assert size <= parse_bytes(text) <= max(size * 1.001, size + 1)
    assert len(text) <= 10


@pytest.mark.parametrize("size", [80e9, 8 * 2.0**30, 79248957440.0, 1e9, 25 * 2.0**30])
def test_a_size_as_an_option_is_exact(size: float) -> None:
    assert parse_bytes(size_option(size)) == size


def test_sizes_are_in_powers_of_1024_and_say_what_was_given() -> None:
    assert memory_text(8 * 2.0**30) == "8 GiB"
    assert memory_text(80e9) == "74.51 GiB (80 GB)"
    assert memory_text(79248957440.0) == "73.81 GiB"
    assert memory_text(79196266430.0) == "73.76 GiB"  # 79.2 GB by accident
    assert bytes_text(13.0) == "13 bytes"
    assert bytes_text(79248957440.0) == "73.81 GiB"


@pytest.mark.parametrize(
    ("command", "usage"), [("plan", "MODEL"), ("compare", "INPUT PLAN..."), ("import-plan", "INPUT LAYOUT")]
)
def test_help_has_plain_arguments_and_lines_that_end_with_the_terminal(command: str, usage: str) -> None:
    shown = run(command, "--help").output
    (line,) = [line for line in shown.splitlines() if "Usage:" in line]
    assert line.strip() == f"Usage: piper-ray {command} [OPTIONS] {usage}"
    above = [line.strip() for line in shown.split("Arguments:")[0].splitlines()]
    ragged = [line for line, after in pairwise(above) if after and line and len(f"{line} {after.split()[0]}") <= 70]
    assert ragged == []


def test_complaints_name_options_and_say_bounds_in_words(small: Path) -> None:
    for arguments, words in (
        (("solve", small, "--devices", "0"), "piper-ray: --devices 0 is out of range"),
        (("solve", small, "--memory", "0GiB"), "piper-ray: --memory 0.0 is out of range"),
        (("solve", small, "--stages", "0"), "piper-ray: --stages must be at least 1, not 0"),
        (("estimate", "t5-11b", "--gpu", "h100", "--nodes", "0"), "'--nodes': must be at least 1"),
        (("solve", small, "--tensor-parallel", "x"), "--tensor-parallel: 'x' are not degrees"),
        (("solve", small, "--tolerance", "9"), "'--tolerance': must be at most 1"),
    ):
        found = run(*arguments)
        assert found.exit_code == 2
        assert words in said(found)


def test_options_by_the_names_of_runtimes_are_pointed_to_ours() -> None:
    for option, words in (
        ("--seq-length", "did you mean --tokens?"),
        ("--seq_len=4096", "did you mean --tokens?"),
        ("--micro-batch-size", "did you mean --microbatch-size?"),
        ("--tp", "did you mean --tensor-parallel?"),
        ("--pp", "did you mean --stages?"),
        ("--glbal-batch", "did you mean --global-batch?"),
    ):
        found = run("plan", "llama3-8b", "--gpu", "h100", "--nodes", "1", option)
        assert (found.exit_code, words in said(found)) == (2, True), said(found)
    words = "`piper-ray solve WORKLOAD --tensor-parallel ...` restricts the tensor-parallel degrees"
    assert words in said(run("estimate", "llama3-8b", "--gpu", "h100", "--nodes", "1", "--tp", "8"))


def test_what_is_no_plan_and_what_is_empty_is_told(small: Path, tmp_path: Path) -> None:
    workload = tmp_path / "workload.toml"
    piper_ray.dump(piper_ray.load(small), workload)
    assert "not a plan but a workload: `piper-ray solve FILE`" in said(run("verify", small, workload))
    assert "stdin: 1 fault found empty; expected a workload" in said(run("solve", "-", stdin=" \n"))
    nothing = run("estimate", "-", "--gpu", "h100", "--nodes", "1", stdin="")
    assert "stdin: 1 fault found empty; expected a Hugging Face config" in said(nothing)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}))
    found = said(run("estimate", config, "--gpu", "h100", "--nodes", "1"))
    assert "intermediate_size: missing" in found
    assert "expected an object" not in found


def test_profile_begins_no_work_where_no_file_can_be(tmp_path: Path) -> None:
    found = run("profile", "model.py:build", "--microbatch-size", "1", "-o", tmp_path / "none" / "x.toml")
    assert found.exit_code == 2
    assert "there is no folder" in said(found)


def test_plan_begins_no_work_where_no_folder_can_be(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("")
    found = run("plan", "llama3-70b", "--gpu", "H100-SXM", "--nodes", "8", "-o", out)
    assert found.exit_code == 2
    assert "is a file; expected a folder" in said(found)
