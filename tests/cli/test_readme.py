"""README's solve command gives README's output."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.delivery.table import HEAD, MODELS, row

ROOT = Path(__file__).resolve().parents[2]


def _readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def _without_times(line: str) -> str:
    """Elapsed seconds differ from run to run; all else must not."""
    return re.sub(r"\d+\.\d\d s\b", "_ s", line).rstrip()


def test_solve_command_prints_what_readme_shows() -> None:
    command = next(line for line in _readme().splitlines() if line.startswith("./scripts/piper-ray solve"))
    arguments = shlex.split(command)[1:]
    finished = subprocess.run(
        [sys.executable, "-m", "piper_ray", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=True,
        env=os.environ | {"COLUMNS": "120"},
    )
    printed = [_without_times(line) for line in finished.stdout.splitlines() if not line.startswith("compiling")]
    block = _readme().split("<!-- solve: checked by tests/cli/test_readme.py -->\n```\n", 1)[1].split("\n```", 1)[0]
    assert [_without_times(line) for line in block.splitlines()] == printed


def test_every_command_of_readme_exists() -> None:
    named = set(re.findall(r"`piper-ray ([\w-]+) ", _readme()))
    commands = "solve verify simulate report info convert estimate profile frontier sweep sweep-report".split()
    commands += ["export", "import-plan", "compare"]
    assert named == set(commands)
    for name in named:
        finished = subprocess.run([sys.executable, "-m", "piper_ray", name, "--help"], capture_output=True, check=False)
        assert finished.returncode == 0, name


def test_python_example_of_readme_runs() -> None:
    example = _readme().split("```python\n", 1)[1].split("```", 1)[0]
    finished = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "optimal" in finished.stdout.lower()


@pytest.mark.parametrize("name", ["llama3-70b", "t5-11b"])
def test_rows_of_the_table_of_what_plans_deliver(name: str) -> None:
    """Two of the five, as scripts/delivered prints them."""
    block = _readme().split("<!-- delivered: checked by tests/cli/test_readme.py -->\n", 1)[1]
    shown = block.split("\n\n", 1)[0].splitlines()
    assert tuple(shown[:2]) == HEAD
    assert [line.split(",")[0] for line in shown[2:]] == [f"| {model}" for model in MODELS]
    assert row(name) in shown
