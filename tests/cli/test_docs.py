"""What README and docs/ show is what the program prints, and the site builds without a warning."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.core import TyperCommand, TyperGroup

from piper_ray.cli.app import app
from scripts.documentation import notebook
from scripts.documentation.build import ROOT
from scripts.documentation.examples import Command, agree, blocks, differences, pages
from scripts.documentation.generated import outdated

NEEDS_TORCH = {"pytorch-model.md"}


LONG = {
    "llama3-70b.md",
    "certificate.md",
    "compare.md",
    "frontier.md",
    "infeasible.md",
    "mixed-cluster.md",
    "nvl72.md",
    "plan.md",
    "pytorch-model.md",
    "runtime.md",
    "sweep.md",
    "too-wide.md",
    "two-sites.md",
}
"""Pages whose examples take seconds."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.long) if page.name in LONG else page for page in pages()],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_examples_print_what_is_shown(page: Path) -> None:
    """To write what they print to the page: scripts/docs --update."""
    if page.name in NEEDS_TORCH:
        pytest.importorskip("torch")
    assert list(differences(page)) == []


def test_the_notebook_shows_what_it_stores() -> None:
    assert list(notebook.differences()) == []


def test_pages_have_examples() -> None:
    found = {page.relative_to(ROOT).as_posix() for page in pages()}
    assert {"docs/tutorial/llama3-70b.md", "docs/how-to/infeasible.md"} <= found


SHELL = [
    (page.relative_to(ROOT).as_posix(), line)
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for block in blocks(page.read_text("utf-8"))
    if block.language == "sh"
    for line in block.text.replace("\\\n", " ").splitlines()
    if line.startswith(("piper-ray", "./scripts/piper-ray"))
]
"""Commands that cannot be run here: they need a cluster, or take long."""


@pytest.mark.parametrize(("page", "line"), SHELL)
def test_commands_that_are_not_run_have_options_that_there_are(page: str, line: str) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    _, name, *arguments = shlex.split(line)
    with typer.Context(group, info_name="piper-ray") as above:
        command = group.get_command(above, name)
        assert isinstance(command, TyperCommand), page
        command.make_context(name, arguments, parent=above)  # or a usage error


@pytest.mark.long
@pytest.mark.skipif(sys.version_info < (3, 11), reason="the site's tools need Python 3.11")
def test_site_builds_without_warnings_and_needs_no_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.documentation", "--out", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text("utf-8")
        assert re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//', text) == [], page
    listed = (tmp_path / "site" / "reference" / "command-line.html").read_text("utf-8")
    assert all(name in listed for name in ("--microbatches", "sweep-report", "--per-stage-recompute"))
    functions = (tmp_path / "site" / "reference" / "python.html").read_text("utf-8")
    assert "~piper_ray" not in functions  # as signatures have it that could not be read


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        (["a", "...", "z"], ["a", "z"], True),
        (["a", "...", "z"], ["a", "b", "c", "z"], True),
        (["a", "...", "z"], ["a", "b", "y"], False),
        (["...", "9 s"], ["9 s"], True),
        (["done in 1.23 s", ""], ["done in 31.07 s"], True),
        (["step 1.2345 s"], ["step 1.2346 s"], False),
        (["a  b"], ["a b"], True),
        (["a.c"], ["abc"], False),
        ([], ["something"], False),
    ],
)
def test_what_agrees(shown: list[str], printed: list[str], same: bool) -> None:
    assert agree(shown, printed) is same


def test_a_block_is_commands_with_their_output() -> None:
    text = "words\n\n```console\n$ piper-ray a \\\n    -b  # exit code 4\nx\n\ny\n$ piper-ray c\n```\n"
    (block,) = blocks(text)
    assert block.commands == [
        Command("piper-ray a \\\n    -b  # exit code 4", ("x", "", "y")),
        Command("piper-ray c", ()),
    ]
    assert block.commands[0].arguments == ["a", "-b"]
    assert [command.exit_code for command in block.commands] == [4, 0]
    with pytest.raises(ValueError, match="only piper-ray is run"):
        _ = Command("rm x", ()).arguments


def test_the_reference_says_what_the_program_does() -> None:
    """Its pages can be read as files; ``scripts/docs --update`` writes them."""
    assert [str(page) for page, _ in outdated()] == []
    empty = [page for page in (ROOT / "docs" / "reference").glob("*.md") if len(page.read_text("utf-8")) < 500]
    assert empty == []
