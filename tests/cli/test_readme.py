"""README is a page, and true; what its examples print is checked with those of the documentation (test_docs.py)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from piper_ray.cli.app import app
from scripts.benchmarks.kept import read_yardsticks
from scripts.benchmarks.table import ratio
from scripts.delivery.table import HEAD, MODELS, row
from scripts.validation.page import README_HEAD
from tests.data import goldens

ROOT = Path(__file__).resolve().parents[2]


def _readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_is_a_page() -> None:
    assert len(_readme().splitlines()) <= 120


def test_first_command_is_one_whose_output_the_documentation_shows() -> None:
    command = next(line for line in _readme().splitlines() if line.startswith("./scripts/piper-ray solve"))
    page = (ROOT / "docs" / "explanation" / "optimal.md").read_text(encoding="utf-8")
    assert f"$ {command.removeprefix('./scripts/')}\n" in page


def test_the_plan_that_readme_shows_is_the_one_of_its_page() -> None:
    """Which test_docs.py makes anew."""
    shown = _readme().split("```text\n", 1)[1].split("```", 1)[0].splitlines()
    page = (ROOT / "docs" / "how-to" / "plan.md").read_text(encoding="utf-8").splitlines()
    assert shown[0].startswith("$ piper-ray plan ")
    assert [line for line in shown if line != "..." and line not in page] == []


def test_errors_of_estimates_are_those_that_are_expected() -> None:
    """Which scripts/validate_estimates --update makes anew, both."""
    shown = _readme().split(README_HEAD, 1)[1].split("\n\n", 1)[0].splitlines()
    known = {(row["runs"], f"{row['worst_error']:+.1%}") for row in goldens("estimate_errors")}
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown[2:]]
    assert len(cells) == 5
    assert {(int(row[1]), row[3]) for row in cells} <= known


def test_links_of_readme_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", _readme())
    assert len(targets) > 15
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_command_of_readme_exists() -> None:
    named = set(re.findall(r"`([\w-]+)`", _readme().split("## Commands\n", 1)[1].split("\n## ", 1)[0]))
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    assert named == set(group.list_commands(typer.Context(group))) - {"help"}


@pytest.mark.long
def test_python_example_of_readme_runs() -> None:
    example = _readme().split("```python\n", 1)[1].split("```", 1)[0]
    finished = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "optimal" in finished.stdout.lower()


@pytest.mark.long
def test_a_row_of_the_table_of_what_plans_deliver() -> None:
    """One of the five, as scripts/delivered prints it."""
    block = _readme().split("<!-- delivered: checked by tests/cli/test_readme.py -->\n", 1)[1]
    shown = block.split("\n\n", 1)[0].splitlines()
    assert tuple(shown[:2]) == HEAD
    assert [line.split(",")[0] for line in shown[2:]] == [f"| {model}" for model in MODELS]
    assert row("t5-11b") in shown


def test_how_much_sooner_answers_come_is_what_was_measured_in_one_process() -> None:
    ratios = [ratio(twin.greedy.seconds, twin.ours.total_s) for twin in read_yardsticks().twins]
    least, most = (pick(ratios, key=lambda text: float(text.replace(",", ""))) for pick in (min, max))
    assert f"{least} to {most} times as fast as the paper's dynamic program," in _readme()
