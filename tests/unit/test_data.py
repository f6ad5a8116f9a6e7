"""tests/data: all of it has its source named, and reads as it says."""

from __future__ import annotations

import re
from fnmatch import fnmatch

import pytest

from piper_ray.workloads.formats.load import load
from tests.data import DATA, goldens, runs

FILES = [path for path in DATA.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}]


def test_every_file_has_its_source_and_licence_named() -> None:
    text = (DATA / "README.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    assert all(len(row) == 5 and all(cell.strip() for cell in row) for row in rows)
    patterns = [pattern for row in rows for pattern in re.findall(r"`([^`]+)`", row[0])]
    names = {str(path.relative_to(DATA)) for path in FILES} - {"README.md"}
    assert {name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)} == set()
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in names)] == []


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in FILES) < 4 * 10**6


@pytest.mark.parametrize(("name", "count"), [("published", 69), ("measured", 315)])
def test_runs_have_a_source_a_model_and_figures_that_agree(name: str, count: int) -> None:
    found = runs(name)
    assert len({run["id"] for run in found}) == count
    for run in found:
        assert all(run[key] for key in ("source", "citation", "gpu", "global_batch", "seq")), run
        assert run["verified"] in {"read", "secondary", "memory"}, run
        assert run["model"]["layers"] > 0, run
        if "gpus" in run and "tp" in run:
            assert run["tp"] * run["pp"] * run["dp"] * run["cp"] == run["gpus"], run
        if "tokens_per_s_per_gpu" in run and "step_s" in run:
            tokens = run["global_batch"] * run["seq"]
            assert tokens / run["step_s"] / run["gpus"] == pytest.approx(run["tokens_per_s_per_gpu"], rel=1e-3), run
    assert sum("step_s" in run for run in found) >= count - 1


def test_schedules_have_an_optimum_within_its_own_limits() -> None:
    records = goldens("schedules")
    assert len({record["seed"] for record in records}) == len(records) == 150
    feasible = 0
    for record in records:
        instance = load(record["instance"])
        for schedule, value_s in record["value_s"].items():
            degrees = record["d_t_p"][schedule]
            assert (value_s is None) == (degrees is None), (record["seed"], schedule)
            if degrees is not None:
                d, t, p = degrees
                feasible += 1
                assert p * d * t <= instance.devices, (record["seed"], schedule)
                assert instance.microbatches % d == 0, (record["seed"], schedule)
                assert t in instance.degrees, (record["seed"], schedule)
    assert feasible > 150
