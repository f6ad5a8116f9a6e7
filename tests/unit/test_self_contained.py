"""Nothing here reads a file outside the repository: a clone alone is enough.

``.ci/run`` shows it too, by running all tests in a copy that lies alone; this says where the fault is.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sorted(path for folder in ("piper_ray", "scripts", "tests") for path in ROOT.glob(f"{folder}/**/*.py"))
EXAMPLE = ROOT / "tests" / "unit" / "example.py"
SYSTEM = frozenset({"bin", "dev", "etc", "lib", "proc", "run", "sbin", "sys", "tmp", "usr", "var"})
"""Folders of every Linux; what a test reads there is no data of ours."""

_UP = re.compile(r"(^|/)\.\.(/|$)")
_MAY_LEAVE = re.compile(r"""\.parent|(?<!\.)\.\.[/"'{]|["']/""")
"""In the text of each file that names such a place."""


@pytest.mark.long
def test_python_stays_inside() -> None:
    assert len(PYTHON) > 300
    for path in PYTHON:
        if _MAY_LEAVE.search(text := path.read_text("utf-8")):
            assert list(ways_out(path, text)) == [], path


def test_shell_goes_up_to_the_root_and_no_further() -> None:
    files = [path for path in (*ROOT.glob("scripts/*"), ROOT / ".ci" / "run") if path.is_file() and not path.suffix]
    assert {path.name for path in files} >= {"run", "test", "bench", "bench_ray", "reproduce", "piper-ray", "_venv"}
    for path in files:
        ups = re.findall(r'([^\s"]*)\.\.(?=[/"\s])', path.read_text("utf-8"))
        assert ups in ([], [")/"]), path  # from the folder that the script lies in, once


@pytest.mark.parametrize(
    "source",
    [
        'Path(__file__).resolve().parents[3] / "data"',
        "Path(__file__).parent.parent.parent.parent",
        'Path(__file__).resolve().parents[2] / "inputs" / ".." / ".." / "data"',
        'HERE = Path(__file__).parents[2]\nload(HERE.parent / "data")',
        'HERE: Path = Path(__file__).parents[1]\ndef test(): load(HERE.parents[1].joinpath("data"))',
        "from tests.cli_cases import ROOT\nload(ROOT.parents[0])",
        "from tests.cli_cases import ROOT as HERE\nload(HERE.parent)",
        "from tests import data\nload(data.INPUTS.parents[1])",
        "import tests.data\nload(tests.data.DATA.parents[2])",
        "import tests.data as figures\nload(figures.DATA.parents[2])",
        'load("../data/x.json")',
        'run("bench", f"{folder}/../data")',
    ],
)
def test_a_way_out_is_seen(source: str) -> None:
    assert _MAY_LEAVE.search(source)
    assert list(ways_out(EXAMPLE, source)) != []


def test_a_folder_of_this_machine_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = f'load("{tmp_path}")\nload("{tmp_path}/missing")\nload("/home/")'
    assert list(ways_out(EXAMPLE, source)) == []  # in a folder of the system
    monkeypatch.setattr(f"{__name__}.SYSTEM", frozenset())
    assert list(ways_out(EXAMPLE, source)) == [f"1: {tmp_path} is of this machine"]


@pytest.mark.parametrize(
    "source",
    [
        '"""See ../data."""',
        'load(Path(__file__).resolve().parents[2] / "inputs")',
        'from tests.cli_cases import ROOT\nINPUT = ROOT / "inputs" / name\nload(INPUT.parent.parent / "x.toml")',
        "def test(tmp_path):\n    load(tmp_path.parent.parent.parent.parent)",
        "text = 'base = \"../small.toml\"'",
        'ranges = "8 .. 30"',
        'load("/proc/self/stat")',
    ],
)
def test_what_stays_inside_is_let_be(source: str) -> None:
    assert list(ways_out(EXAMPLE, source)) == []


def ways_out(path: Path, source: str) -> Iterator[str]:
    """Line and reason of each expression in a file of this repository that names a place outside of it."""
    tree = ast.parse(source)
    names, sentences = _Names(path, tree), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            sentences.add(id(node.value))  # a docstring
        if not isinstance(node, ast.expr):
            continue
        place = names.place(node) if _may_lead_out(node) else None
        if place is not None and not place.is_relative_to(ROOT):
            yield f"{node.lineno}: {ast.unparse(node)} is {place}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in sentences:
            text = node.value
            if _UP.search(text) and not re.search(r"\s", text):
                yield f"{node.lineno}: {text} goes up"
            if len(parts := Path(text).parts) > 2 and parts[0] == "/" and parts[1] not in SYSTEM and _exists(text):
                yield f"{node.lineno}: {text} is of this machine"


def _may_lead_out(node: ast.expr) -> bool:
    """A step from a place to another. What is only a name was looked at where it is made."""
    return isinstance(node, (ast.BinOp, ast.Subscript)) or (isinstance(node, ast.Attribute) and node.attr == "parent")


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # too long, or with a zero byte: no path
        return False


class _Names:
    """What a module's names stand for, as far as that follows from where its file lies."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self._path = path
        self._imported: dict[str, tuple[str, str]] = {}
        self._places: dict[str, Path] = {}
        for node in tree.body:
            match node:
                case ast.ImportFrom(module=str(module), names=aliases):
                    self._imported |= {alias.asname or alias.name: (module, alias.name) for alias in aliases}
                case ast.Import(names=aliases):
                    parts = {alias.asname or alias.name: alias.name.rpartition(".") for alias in aliases}
                    self._imported |= {name: (package, module) for name, (package, _, module) in parts.items()}
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ) if (place := self.place(value)) is not None:
                    self._places[name] = place

    def place(self, node: ast.expr) -> Path | None:
        """Of an expression that begins at ``__file__``; None for others. An unknown step leads downwards."""
        match node:
            case ast.Call(func=ast.Name(id="Path"), args=[ast.Name(id="__file__")]):
                return self._path
            case ast.Name(id=name):
                return self._named(name)
            case ast.Call(func=ast.Attribute(value=base, attr="resolve" | "absolute")):
                return self.place(base)
            case ast.BinOp(left=base, op=ast.Div(), right=step):
                place = self.place(base)
                name = step.value if isinstance(step, ast.Constant) and isinstance(step.value, str) else "unknown"
                return None if place is None else Path(os.path.normpath(place / name))
            case ast.Attribute(value=base, attr="parent"):
                place = self.place(base)
                return None if place is None else place.parent
            case ast.Subscript(value=ast.Attribute(value=base, attr="parents"), slice=ast.Constant(value=int(number))):
                place = self.place(base)
                return None if place is None else place.parents[number]
            case ast.Attribute(value=ast.Name() | ast.Attribute() as base, attr=name):
                imported = self._imported.get(_dotted(base))
                return None if imported is None else _of_module(".".join(filter(None, imported)))._named(name)
        return None

    def _named(self, name: str) -> Path | None:
        if name in self._imported:
            package, original = self._imported[name]
            module = _of_module(package)
            return None if module._path == self._path else module._named(original)  # a package's own submodule
        return self._places.get(name)


def _dotted(node: ast.expr) -> str:
    """A name with attributes; others are no modules."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


@cache
def _of_module(name: str) -> _Names:
    """Of a module of this repository; of others, none."""
    base = ROOT.joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return _Names(path, ast.parse(path.read_text("utf-8")))
    return _Names(ROOT, ast.Module([], []))
