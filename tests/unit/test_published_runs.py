"""Published runs are read whatever they leave unsaid, and what is no run is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piper_ray.calibrate.runs import PublishedRun, read_runs
from piper_ray.model.errors import InputError
from tests.data import DATA, runs

MODEL = {"name": "GPT", "config": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}}


def read(tmp_path: Path, document: object) -> list[PublishedRun]:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return read_runs(path)


@pytest.mark.parametrize(
    ("name", "count"), [("published", 69), ("measured", 315), ("moe", 64), ("further", 156), ("kept", 388)]
)
def test_the_restated_runs_are_all_read_and_each_has_a_measured_step_or_says_no_layout(name: str, count: int) -> None:
    found = read_runs(DATA / "runs" / f"{name}.json")
    assert [run.id for run in found] == [run["id"] for run in runs(name)]
    assert len(found) == count
    for run, restated in zip(found, runs(name), strict=True):
        assert (run.measured_step_s is not None) == ("step_s" in restated)
        assert run.model.name == restated["model"]["name"]


def test_a_run_may_leave_everything_unsaid_but_its_model(tmp_path: Path) -> None:
    (run,) = read(tmp_path, {"runs": [{"model": {}}]})
    assert (run.id, run.tp, run.notes, run.measured_step_s) == ("runs[0]", None, "", None)


def test_nulls_and_unknown_fields_are_passed_over(tmp_path: Path) -> None:
    entry = {"id": "a", "model": MODEL, "tp": None, "notes": None, "precision": None, "gpus": 8.0, "colour": "blue"}
    (run,) = read(tmp_path, [entry])
    assert (run.tp, run.notes, run.gpus) == (None, "", 8)


def test_a_step_follows_from_tokens_a_second(tmp_path: Path) -> None:
    entry = {"id": "a", "model": MODEL, "gpus": 8, "global_batch": 16, "seq": 1000, "tokens_per_s_per_gpu": 500}
    (run,) = read(tmp_path, [entry])
    assert run.measured_step_s == 16 * 1000 / (500 * 8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp": 0}, "runs[1].tp: "),
        ({"tp": "eight"}, "runs[1].tp: not a whole number"),
        ({"step_s": -1}, "runs[1].step_s: "),
        ({"model": None}, "runs[1].model: not an object"),
        ({"stages": [1, "2"]}, "runs[1].stages[1]: "),
        ({"sequence_parallel": "yes"}, "runs[1].sequence_parallel: neither true nor false"),
        ({"id": "first"}, "stands for an earlier run"),
        ({"recompte": "full"}, "runs[1].recompte: unknown key; did you mean recompute?"),
    ],
)
def test_an_entry_that_is_no_run_is_named(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as error:
        read(tmp_path, [{"id": "first", "model": MODEL}, {"id": "odd", "model": MODEL, **changes}])
    assert words in str(error.value)


def test_entries_that_are_no_objects_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        read(tmp_path, [None, 3, []])
    assert all(f"runs[{number}]" in str(error.value) for number in range(3))


def test_faults_of_all_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        read(tmp_path, {"models": {}, "sources": [1, {"runs": 7}, {"runs": [{"tp": "x"}]}]})
    assert [fault.path for fault in error.value.faults] == ["sources[0]", "sources[1]", "sources[2].runs[0].tp"]


@pytest.mark.parametrize("document", [{}, {"runs": 3}, {"sources": 1}, {"models": {}, "sources": [1]}, {"runs": None}])
def test_a_file_without_runs_is_a_fault(tmp_path: Path, document: object) -> None:
    with pytest.raises(InputError, match="expected"):
        read(tmp_path, document)


def test_faults_of_types_words_and_keys_are_named_together(tmp_path: Path) -> None:
    text = """[{"id": "a", "tp": "x", "precision": "fp9", "dispatcher": "deepep", "overlaps": ["a"], "graphs": "x"},
              {"id": "b", "tp": 1, "tp": 2, "software": "nemi", "loss": 3}]"""
    (tmp_path / "runs.json").write_text(text)
    with pytest.raises(InputError) as error:
        read_runs(tmp_path / "runs.json")
    first, second = [f"runs[0].{name}" for name in ("tp", "graphs")], ["runs[1].loss"]
    words = [*(f"runs[0].{name}" for name in ("precision", "overlaps", "dispatcher")), "runs[1].software"]
    assert [fault.path for fault in error.value.faults] == ["runs[1].tp", *first, *second, *words]
