"""What is quicker here than by typer's own means is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from piper_ray.cli import wording
from piper_ray.cli.common import parse_number
from piper_ray.cli.wording import Command
from tests.cli_cases import ROOT

COLUMNS = {"COLUMNS": "100"}


class Rule(str, Enum):
    SAFE = "safe"
    BOLD = "bold"


def _command(
    files: Annotated[list[Path], typer.Argument()],
    devices: Annotated[int | None, typer.Option("--devices", parser=parse_number)] = None,
    stages: Annotated[int, typer.Option("--stages", min=1, max=9)] = 3,
    share: Annotated[float, typer.Option("--share", min=0.0, max=1.0)] = 0.5,
    whole: Annotated[float, typer.Option("--whole")] = 1,
    rule: Annotated[Rule, typer.Option("--rule")] = Rule.SAFE,
    name: Annotated[str, typer.Option("--name")] = "a",
    out: Annotated[Path | None, typer.Option("--out")] = None,
    folder: Annotated[Path, typer.Option("--folder", file_okay=False)] = Path(),
    flag: Annotated[bool, typer.Option("--flag")] = False,
    degrees: Annotated[list[int] | None, typer.Option("--degree")] = None,
    pair: Annotated[tuple[int, str], typer.Option("--pair")] = (1, "b"),
) -> None:
    print([(type(value), value) for value in locals().values()])  # noqa: T201


def _said(*arguments: str) -> tuple[int, str]:
    app = typer.Typer(add_completion=False)
    app.command(cls=Command)(_command)
    result = CliRunner().invoke(app, list(arguments), env=COLUMNS)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    "arguments",
    [
        "x",
        "",
        "x y/../z --devices 2k --stages 9 --share 1 --whole 2 --rule bold --name é --out . --folder . --flag",
        "x --devices 1.5",
        "x --devices none",
        "x --stages 0",
        "x --stages 10",
        "x --stages 9.0",
        "x --stages ٣",
        "x --stages  7",
        "x --stages 1_0",
        "x --stages 99999999999999999999",
        "x --share 1.01",
        "x --share nan",
        "x --share x",
        "x --rule bald",
        "x --out ./a//b/",
        "x --out /nowhere/at/all",
        "x --folder pyproject.toml",
        "x --degree 1 --degree 2",
        "x --degree y",
        "x --pair 2 c",
        "x --flag --no-flag",
        "x --unknown",
    ],
)
def test_values_and_complaints_are_typers_own(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = _said(*arguments.split(" "))
    monkeypatch.setattr(wording, "take_plain_values", lambda _: None)
    assert ours == _said(*arguments.split(" "))


def test_text_that_is_no_text_is_refused_as_typer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    unreadable = os.fsdecode(b"\xff")
    ours = _said("x", "--name", unreadable)
    monkeypatch.setattr(wording, "take_plain_values", lambda _: None)
    assert ours == _said("x", "--name", unreadable)


def _in_its_own_process(code: str) -> str:
    environment = os.environ | COLUMNS | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["solve", "--help"], ["plan", "--help"], ["help", "sweep"]])
def test_help_is_the_same_with_all_of_rich(arguments: list[str]) -> None:
    run = f"import sys\nfrom piper_ray.cli import main\nsys.argv = {['piper-ray', *arguments]}\nmain()"
    assert _in_its_own_process(run) == _in_its_own_process(f"import typer.rich_utils\n{run}") != ""


@pytest.mark.parametrize(
    "use",
    [
        "from rich.markdown import Markdown\nassert rich_utils.Markdown('a').markup == 'a'",
        "from rich.markdown import Markdown\nassert isinstance(Markdown('a'), rich_utils.Markdown)",
        "assert not isinstance('a', rich_utils.Markdown)",
        "assert rich_utils.Traceback.from_exception(ValueError, ValueError('a'), None).trace.stacks",
        "from rich.markdown import Heading, Markdown\nassert Markdown is not rich_utils.Markdown",
    ],
)
def test_what_typer_may_use_of_rich_after_all_is_there(use: str) -> None:
    _in_its_own_process(f"from piper_ray.cli.typers_rich import rich_utils\nrich_utils = rich_utils()\n{use}")
