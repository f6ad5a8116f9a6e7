"""Products of arrays whose sums do not depend on the number of cores."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

import numpy as np
import pytest

from piper_ray.cost.products import dot
from tests.cli_cases import ROOT

_BYTES_OF_LARGE_SUMS = """
import hashlib
import numpy as np
from piper_ray.cost.products import dot

draw = np.random.default_rng(7)
rows, columns, wide = draw.random((90, 30_000)), draw.random((30_000, 40)), draw.random(90)
found = dot(wide, rows), dot(rows, columns[:, 0]), dot(rows, columns), dot(columns[:, 0], columns[:, 1])
print(hashlib.sha256(b"".join(one.tobytes() for one in found)).hexdigest())
"""


def _slow(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The same by loops."""
    rows, columns = np.atleast_2d(one), other.reshape(other.shape[0], -1)
    found = np.zeros((rows.shape[0], columns.shape[1]))
    for i, row in enumerate(rows):
        for k, column in enumerate(columns.T):
            found[i, k] = sum(float(x) * float(y) for x, y in zip(row, column, strict=True))
    return found.reshape(one.shape[:-1] + other.shape[1:])


@pytest.mark.parametrize("shapes", [((5,), (5,)), ((5,), (5, 3)), ((4, 5), (5,)), ((4, 5), (5, 3)), ((0, 5), (5, 3))])
@pytest.mark.parametrize("types", [(np.float64, np.float64), (np.int64, np.float64), (np.bool_, np.float64)])
def test_dot_is_the_product(shapes: Sequence[tuple[int, ...]], types: Sequence[type]) -> None:
    draw = np.random.default_rng(3)
    one, other = (draw.integers(-3, 4, shape).astype(kind) / 1 for shape, kind in zip(shapes, types, strict=True))
    one = one.astype(types[0])
    found = dot(one, other)
    assert found.shape == one.shape[:-1] + other.shape[1:]
    assert (found == _slow(one, other)).all()


def test_more_dimensions_on_one_side() -> None:
    draw = np.random.default_rng(4)
    weight, rows = draw.random(5), draw.random((2, 3, 5))
    assert np.allclose(dot(rows, weight), (rows * weight).sum(axis=2), rtol=1e-14)
    assert np.allclose(dot(weight, rows.swapaxes(1, 2)), (rows * weight).sum(axis=2), rtol=1e-14)


def test_any_number_of_threads_gives_the_same_bytes() -> None:
    def found(threads: int) -> str:
        environment = os.environ | {"OPENBLAS_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", _BYTES_OF_LARGE_SUMS]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert found(1) == found(2) == found(4)


@pytest.mark.parametrize("package", ["engine", "cost"])
def test_searches_leave_no_sum_to_a_library(package: str) -> None:
    """Matrix products of numpy may be divided among threads."""
    paths = sorted((Path(ROOT) / "piper_ray" / package).rglob("*.py"))
    nodes = ((path, node) for path in paths for node in ast.walk(ast.parse(path.read_text())))
    assert [f"{path}:{node.lineno}" for path, node in nodes if _is_product(node)] == []
    assert _is_product(ast.parse("one @ other", mode="eval").body)
    assert _is_product(ast.parse("np.dot", mode="eval").body)


def _is_product(node: ast.AST) -> TypeGuard[ast.expr]:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "np":
        return node.attr in {"dot", "inner", "matmul", "tensordot", "vdot"}
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
