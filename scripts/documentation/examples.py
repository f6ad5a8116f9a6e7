"""Examples of README and docs/: commands and Python that pages show, run in this process, with what they print.

A ``console`` block has commands behind ``$ ``, each with its output; ``...`` alone on a line stands for any lines. A
comment ``# exit code 4`` behind a command says how it ends, if not with 0. A ``pycon`` block is a doctest. A block
behind a line ``<!-- file: NAME -->`` is a file. What stands on one page is run in the page's order in one folder, with
inputs/ in it.
Elapsed times, which have two decimals, are not compared.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from scripts.documentation.build import ROOT

WIDTH = 120
"""Columns of the printed lines."""

_BLOCK = re.compile(
    r"^(?:<!-- file: (?P<file>[\w./-]+) -->\n)?(?P<fence>```+)(?P<language>[\w-]*)\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
_ELLIPSIS = "..."
_EXIT_CODE = re.compile(r"\s+# exit code (?P<code>\d+)$")
_IN_PASSING = re.compile(  # on the first run alone, or where the machine is slow
    r"(piper-ray: note: )?compiling |[\d,]+ of [\d,]+ points, [\d,]+ failed, [\d,]+ left, "
)
_ELAPSED = re.compile(r"\b\d+\.\d\d s\b")
_DOCTEST_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Command:
    """One command of a console block, as it is written, and what it prints."""

    text: str
    shown: tuple[str, ...]

    @property
    def arguments(self) -> list[str]:
        """The command's arguments without the program's name. Raises ValueError for another program."""
        program, *arguments = shlex.split(_EXIT_CODE.sub("", self.text).replace("\\\n", " "))
        if program not in ("piper-ray", "./scripts/piper-ray"):
            raise ValueError(f"only piper-ray is run: {self.text}")
        return arguments

    @property
    def exit_code(self) -> int:
        match = _EXIT_CODE.search(self.text)
        return int(match["code"]) if match else 0


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``start`` and ``end`` of its text within the page's."""

    language: str
    text: str
    start: int
    end: int
    file: str | None

    @property
    def commands(self) -> list[Command]:
        """The commands of a console block."""
        found: list[Command] = []
        lines = iter(self.text.splitlines())
        for line in lines:
            if not line.startswith("$ "):
                if not found:
                    raise ValueError(f"output without a command: {line}")
                found[-1] = Command(found[-1].text, (*found[-1].shown, line))
                continue
            words = [line[2:]]
            while words[-1].endswith("\\"):
                words.append(next(lines))
            found.append(Command("\n".join(words), ()))
        return found


def pages() -> list[Path]:
    """README and all pages of docs/ that have something to run."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if any(_runs(block) for block in blocks(page.read_text("utf-8")))]


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a page."""
    return [
        Block(match["language"], match["text"], match.start("text"), match.end("text"), match["file"])
        for match in _BLOCK.finditer(text)
    ]


def differences(page: Path) -> Iterator[str]:
    """Runs a page. Yields a text for each example whose output differs from the page."""
    text = page.read_text("utf-8")
    with _workplace():
        names: dict[str, Any] = {}
        for block in blocks(text):
            if block.file is not None:
                Path(block.file).write_text(block.text, encoding="utf-8")
            elif block.language == "console":
                for command in block.commands:
                    code, printed = run(command.arguments)
                    if code != command.exit_code:
                        yield f"{command.text}: exit code {code}\n" + "\n".join(printed)
                    elif not agree(command.shown, printed):
                        yield "\n".join([command.text, "shown:", *command.shown, "printed:", *printed])
            elif block.language == "pycon":
                yield from _doctest(block.text, page.name, names)


def update() -> None:
    """Replaces the shown output of commands by what they print, if it differs."""
    for page in pages():
        text = page.read_text("utf-8")
        changed = text
        names: dict[str, Any] = {}
        with _workplace():
            for block in blocks(text):
                if block.file is not None:
                    Path(block.file).write_text(block.text, encoding="utf-8")
                elif block.language == "console":
                    changed = changed.replace(block.text, "".join(map(_anew, block.commands)))
                elif block.language == "pycon":
                    changed = changed.replace(block.text, _doctest_anew(block.text, page.name, names))
        if changed != text:
            page.write_text(changed, encoding="utf-8")


def run(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """``piper-ray ARGUMENTS`` in this process: its exit code, and the lines of stdout and stderr as they come."""
    from typer.testing import CliRunner

    from piper_ray.cli.app import app

    with patch.dict(os.environ, {"COLUMNS": str(WIDTH)}):
        finished = CliRunner().invoke(app, list(arguments), prog_name="piper-ray")
    if finished.exception is not None and not isinstance(finished.exception, SystemExit):
        raise finished.exception
    lines = [line.rstrip() for line in finished.output.splitlines()]
    return finished.exit_code, [line for line in lines if not _IN_PASSING.match(line)]


def agree(shown: Sequence[str], printed: Sequence[str]) -> bool:
    """Whether the printed lines match the shown ones, with any lines in place of an ellipsis."""
    pattern = "".join(
        r"(?:.*\n)*?" if line == _ELLIPSIS else re.escape(_comparable(line)) + r"\n" for line in _without_ends(shown)
    )
    return re.fullmatch(pattern, "".join(f"{_comparable(line)}\n" for line in _without_ends(printed))) is not None


def _anew(command: Command) -> str:
    code, printed = run(command.arguments)
    if code != command.exit_code:
        raise RuntimeError(f"{command.text}: exit code {code}\n" + "\n".join(printed))
    lines: list[str] = list(command.shown)
    if not agree(command.shown, printed):
        lines = [*_shortened(command.shown, printed), *command.shown[len([*_without_ends(command.shown)]) :]]
    return "".join(f"{line}\n" for line in [f"$ {command.text}", *lines])


def _shortened(shown: Sequence[str], printed: Sequence[str]) -> list[str]:
    """The printed lines, shortened like the shown ones: as many lines at the beginning and at the end. Lines between
    two ellipses are found by the first word of their first line."""
    shown, printed = _without_ends(shown), _without_ends(printed)
    places = [number for number, line in enumerate(shown) if line == _ELLIPSIS]
    if not places:
        return list(printed)
    found = list(printed[: places[0]])
    for place, following in zip(places, [*places[1:], len(shown)], strict=True):
        count = following - place - 1
        first = len(printed) - count
        if following < len(shown):
            word = shown[place + 1].split()[0]
            first = next((number for number, line in enumerate(printed) if line.split()[:1] == [word]), first)
        found += [_ELLIPSIS, *printed[first : first + count]]
    return found


class _Runner(doctest.DocTestRunner):
    """Collects the outputs that differ from what is shown."""

    def __init__(self) -> None:
        super().__init__(optionflags=_DOCTEST_FLAGS, verbose=False)
        self.unlike: list[tuple[doctest.Example, str]] = []

    def report_failure(self, out: object, test: doctest.DocTest, example: doctest.Example, got: str) -> None:  # noqa: ARG002
        self.unlike.append((example, got))

    def report_unexpected_exception(self, out: object, test: object, example: doctest.Example, error: Any) -> None:  # noqa: ARG002
        raise RuntimeError(f"an example fails: {example.source}") from error[1]


def _run_doctest(text: str, name: str, names: dict[str, Any]) -> list[tuple[doctest.Example, str]]:
    test = doctest.DocTestParser().get_doctest(text, names, name, name, 0)
    runner = _Runner()
    runner.run(test, clear_globs=False)
    names.update(test.globs)
    return runner.unlike


def _doctest(text: str, name: str, names: dict[str, Any]) -> Iterator[str]:
    for example, got in _run_doctest(text, name, names):
        yield f"{example.source}shown:\n{example.want}printed:\n{got}"


def _doctest_anew(text: str, name: str, names: dict[str, Any]) -> str:
    lines = text.splitlines(keepends=True)
    for example, got in reversed(_run_doctest(text, name, names)):
        first = example.lineno + len(example.source.splitlines())
        lines[first : first + len(example.want.splitlines())] = [got]
    return "".join(lines)


def _runs(block: Block) -> bool:
    return block.language in ("console", "pycon")


def _comparable(line: str) -> str:
    return re.sub(r"\s+", " ", _ELAPSED.sub("_ s", line)).strip()


def _without_ends(lines: Sequence[str]) -> Sequence[str]:
    """The lines without empty ones at the beginning and the end."""
    full = [number for number, line in enumerate(lines) if line.strip()]
    return lines[full[0] : full[-1] + 1] if full else []


@contextmanager
def _workplace() -> Iterator[None]:
    """A temporary folder with inputs/ in it as the working directory."""
    before = Path.cwd()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path("inputs").symlink_to(ROOT / "inputs")
            yield
        finally:
            os.chdir(before)
