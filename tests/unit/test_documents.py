"""What is written for those who change the program: short, and true of the files that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 12 * 1024
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DEVELOPMENT = sorted((ROOT / "docs" / "development").glob("*.md"))
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))

_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_PATH = re.compile(r"(?:[\w.-]+/)*(?:[\w-]+\.(?:py|md|toml|in|lock)|[\w.-]+/)|(?:\.?[\w-]+/)+[\w-]+")
_LINK = re.compile(r"\[[^\]]+\]\(([^)#:]+)(?:#[^)]*)?\)")
_ENGINE = "Within `engine/`"


def paths_in(text: str) -> Iterator[str]:
    """What stands between backquotes and has the form of a path, and the first column of the tables of rooms."""
    for span in _SPAN.findall(text):
        yield from (word for word in span.split() if _PATH.fullmatch(word))
    within = ""
    for line in text.splitlines():
        within = "engine/" if line.startswith(_ENGINE) else "" if line.startswith("#") else within
        if line.startswith("    ") and _PATH.fullmatch(line.split()[0]):
            names = re.split(r"\s{2,}", line.strip())[0]
            yield from (f"{within}{name}" for name in names.split())


def exists(path: str) -> bool:
    """As files and folders are named there: from the root, or from the package."""
    path = path.removeprefix("./")
    return any((folder / path).exists() for folder in (ROOT, ROOT / "piper_ray"))


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CHANGELOG.md"])
def test_is_read_in_twenty_minutes(name: str) -> None:
    assert (ROOT / name).stat().st_size <= MOST_BYTES


@pytest.mark.parametrize("page", [ARCHITECTURE, CONTRIBUTING, *DEVELOPMENT], ids=lambda page: page.name)
def test_every_path_that_is_named_exists(page: Path) -> None:
    named = list(paths_in(page.read_text("utf-8")))
    assert [path for path in named if not exists(path)] == []


def test_paths_are_recognised() -> None:
    text = (
        "`engine/ledger.py`, `engine/` and `scripts/answers --against X`, `solve --runtime x`, `1f1b`, `README.md`\n\n"
        "    cli/   what\n\nWithin `engine/`:\n\n    layers.py flush/    two\n    time(S) = sum p / d\n"
    )
    found = ["engine/ledger.py", "engine/", "scripts/answers", "README.md", "engine/"]
    assert list(paths_in(text)) == [*found, "cli/", "engine/layers.py", "engine/flush/"]
    assert exists("engine/ledger.py")
    assert not exists("engine/ledgers.py")


def test_rooms_are_those_of_the_package() -> None:
    head = ARCHITECTURE.read_text("utf-8").split("## Rooms", 1)[1].split(_ENGINE, 1)[0]
    listed = [line.split()[0].rstrip("/") for line in head.splitlines() if line.startswith("    ")]
    package = ROOT / "piper_ray"
    rooms = {path.name for path in package.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert set(listed) == rooms | {"evaluate.py"}


def test_links_lead_somewhere() -> None:
    for page in (ARCHITECTURE, CONTRIBUTING, *DEVELOPMENT, *DECISIONS):
        targets = _LINK.findall(page.read_text("utf-8"))
        assert [target for target in targets if not (page.parent / target).exists()] == [], page


def test_decisions_are_numbered_dated_and_listed() -> None:
    listed = (ROOT / "docs" / "decisions" / "README.md").read_text("utf-8")
    for number, note in enumerate(DECISIONS, 1):
        lines = note.read_text("utf-8").splitlines()
        assert note.name.startswith(f"{number:04d}-")
        assert lines[0].startswith(f"# {number:04d} ")
        assert re.match(r"\d{4}-\d\d-\d\d", lines[2]), note
        assert f"[{number:04d}]({note.name}) {lines[0].split(maxsplit=2)[2]}" in listed


def test_the_changelog_has_the_usual_headings() -> None:
    """Those of Keep a Changelog, one line for each change."""
    lines = (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines()
    headings = [line for line in lines if line.startswith("## ")]
    assert headings[0] == "## [Unreleased]"
    assert all(re.fullmatch(r"## \[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", line) for line in headings[1:])
    assert {line for line in lines if line.startswith("### ")} <= {
        f"### {kind}" for kind in ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
    }
    body = lines[lines.index(headings[0]) :]
    assert all(not line or line.startswith(("## ", "### ", "- ")) for line in body)
