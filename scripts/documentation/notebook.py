"""docs/plan-and-compare.ipynb: its cells run in this process, and what their last expressions show."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from typing import Any

from scripts.documentation.build import ROOT

NOTEBOOK = ROOT / "docs" / "plan-and-compare.ipynb"


def differences() -> Iterator[str]:
    """Runs all cells. Yields a text for each cell whose output differs from the stored one."""
    for cell, shown in _run(json.loads(NOTEBOOK.read_text("utf-8"))):
        stored = [output["data"]["text/plain"] for output in cell["outputs"]]
        found = [] if shown is None else [_lines(repr(shown))]
        if stored != found:
            yield f"{''.join(cell['source'])}\nstored: {stored}\nshown: {found}"


def update() -> None:
    """Runs all cells and stores their output."""
    document = json.loads(NOTEBOOK.read_text("utf-8"))
    for number, (cell, shown) in enumerate(_run(document), start=1):
        cell["execution_count"] = number
        cell["outputs"] = [] if shown is None else [_output(shown, number)]
    NOTEBOOK.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _run(document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], object]]:
    """Each cell of code with the value of its last expression, as a notebook shows it; figures are not drawn."""
    import matplotlib as mpl

    with mpl.rc_context({"backend": "agg"}):
        names: dict[str, Any] = {}
        for cell in document["cells"]:
            if cell["cell_type"] == "code":
                yield cell, _value("".join(cell["source"]), names)


def _value(source: str, names: dict[str, Any]) -> object:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, NOTEBOOK.name, "exec"), names)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)


def _output(shown: Any, number: int) -> dict[str, object]:
    data: dict[str, object] = {"text/plain": _lines(repr(shown))}
    if hasattr(shown, "_repr_html_"):
        data["text/html"] = _lines(shown._repr_html_())
    return {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)
