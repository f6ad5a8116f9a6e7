"""scripts/bench --families and --against: turns, versions, what counts as at odds, tables, picture and pages."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from matplotlib.colors import same_color
from typer.testing import CliRunner

import scripts.benchmarks.__main__ as command_line
from piper_ray.model.errors import UsageError
from scripts.benchmarks import kept, paired, trees
from scripts.benchmarks.cases import ROOT
from scripts.benchmarks.compared_plot import time_against_downsets
from scripts.benchmarks.compared_table import (
    compared_tables,
    goals_table,
    is_met,
    measured_table,
    render_compared,
    versions_table,
)
from scripts.benchmarks.kept import (
    filled,
    keep_compared,
    keep_yardsticks,
    parts_of_pages,
    read_compared,
    read_yardsticks,
)
from scripts.benchmarks.measure import MeasurementError
from scripts.benchmarks.paired import Answer, Compared, Comparison, Run, compare, proof_text
from scripts.benchmarks.results import Results
from scripts.benchmarks.subjects import FAMILIES, Subject
from scripts.benchmarks.trees import Tree, this_tree, tree_at
from tests.instances import two_towers

HERE, BEFORE = Tree("this", ROOT, "abc+"), Tree("v1", ROOT, "def")
OPTIMAL = Answer("optimal", 2.0, 2.0)
RUN = Run(
    wall_s=8.0, cpu_s=4.0, peak_bytes=300 * 2**20, rounds=3, processes=3, answers=(OPTIMAL,), listed=10203, live=5000
)
SLOW = dataclasses.replace(RUN, cpu_s=40.0, answers=(Answer("feasible", 2.0, 1.5),), commit="def")
REFUSED = Run(refused="too many downsets", peak_bytes=200 * 2**20)
TOWERS = "towers-2x100"


def row(
    this: Run = RUN, before: Run | None = None, subject: str = TOWERS, forecast_s: float | None = 6.0
) -> Comparison:
    return Comparison(subject, this, before, 10203, forecast_s)


# Answers


@pytest.mark.parametrize(
    ("one", "other", "agree"),
    [
        (OPTIMAL, OPTIMAL, True),
        (OPTIMAL, Answer("optimal", 2.0 + 1e-12, 2.0 + 1e-12), True),
        (OPTIMAL, Answer("optimal", 2.1, 2.1), False),
        (OPTIMAL, Answer("feasible", 2.5, 1.5), True),
        (OPTIMAL, Answer("feasible", 2.5, 2.1), False),
        (OPTIMAL, Answer("feasible", 1.9, 1.5), False),
        (OPTIMAL, Answer("unknown", None, 1.9), True),
        (OPTIMAL, Answer("unknown", None, 2.1), False),
        (OPTIMAL, Answer("unknown", None, None), True),
        (OPTIMAL, Answer("infeasible", None, None), False),
        (Answer("feasible", 2.5, 1.0), Answer("infeasible", None, None), False),
        (Answer("unknown", None, 3.0), Answer("infeasible", None, None), True),
        (Answer("infeasible", None, None), Answer("infeasible", None, None), True),
    ],
)
def test_what_can_be_true_together(one: Answer, other: Answer, agree: bool) -> None:
    assert one.agrees(other) is agree
    assert other.agrees(one) is agree


def test_another_optimum_is_a_fault_and_a_refusal_none() -> None:
    other = dataclasses.replace(RUN, answers=(Answer("optimal", 2.1, 2.1),))
    (fault,) = row(before=other).faults
    assert fault.startswith("towers-2x100: Answer(status='optimal', time_per_sample_s=2.0")
    assert [*row(before=REFUSED).faults, *row(before=RUN).faults, *row().faults] == []


def test_points_of_a_frontier_are_compared_one_by_one() -> None:
    two = dataclasses.replace(RUN, answers=(OPTIMAL, Answer("optimal", 1.0, 1.0)))
    wrong = dataclasses.replace(RUN, answers=(OPTIMAL, Answer("feasible", 1.0, 1.1)))
    assert len(list(row(this=two, before=wrong).faults)) == 1


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ((OPTIMAL,), "optimal"),
        ((Answer("feasible", 2.0, 1.5),), "gap 25.0000 %"),
        ((Answer("infeasible", None, None),), "no plan"),
        ((Answer("unknown", None, 1.0),), "no plan found"),
        ((OPTIMAL, Answer("feasible", 2.0, 1.5)), "1 of 2 points"),
    ],
)
def test_what_is_proved_in_words(answers: tuple[Answer, ...], words: str) -> None:
    assert proof_text(dataclasses.replace(RUN, answers=answers)) == words
    assert proof_text(REFUSED) == "refused"


# Processes and turns


def subject(name: str = "small", **changes: Any) -> Subject:
    return Subject(name, "towers", "2 towers", lambda: two_towers(4, devices=4, memory_bytes=60.0), **changes)


@pytest.mark.long
def test_a_process_solves_forecasts_and_makes_frontiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "SHORT_RUNS", 1)
    found = Compared({})
    compare([subject(), subject("frontier", devices=(1, 3))], [this_tree()], found, list[str]().append)
    solved, curve = found.rows
    assert [answer.status for answer in solved.this.answers] == ["optimal"]
    assert (solved.this.listed, solved.downsets, solved.this.processes) == (27, 27, 1)
    assert solved.this.rounds > 1
    assert solved.this.evaluations > 0
    assert 0 < (solved.this.live or 0) <= 27
    assert solved.forecast_s is not None
    assert 30e6 < solved.this.peak_bytes < 2e9
    assert [answer.proved for answer in curve.this.answers] == [True] * 3
    assert curve.forecast_s is None


@pytest.mark.long
def test_a_process_that_fails_is_reported(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match=r"this: a process left with 1:\n[\s\S]*missing"):
        paired._worker(this_tree(), {"warm_up": "missing.json", "threads": 1})
    elsewhere = tmp_path / "tree"
    elsewhere.mkdir()  # without a package: that of the environment runs
    (elsewhere / "piper_ray").symlink_to(ROOT / "piper_ray")
    order = {"warm_up": str(ROOT / "inputs" / "bert32-a100.toml"), "file": str(ROOT / "inputs" / "bert32-a100.toml")}
    with pytest.raises(MeasurementError, match="ran, not that of"):
        paired._worker(Tree("other", elsewhere, ""), {**order, "threads": 1, "forecast": True, "devices": None})


class Workers:
    """Stands in for processes: each takes the wall time of its version and answers its value."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, walls_s: Mapping[str, float], *, compiling: int = 0) -> None:
        self.log: list[str] = []
        self.walls_s = walls_s
        self.compiling = compiling
        self.values_s = {"this": 2.0, "v1": 2.0}
        monkeypatch.setattr(paired, "_worker", self.work)
        monkeypatch.setattr(Tree, "compiled", lambda _tree: self.compiled())

    def work(self, tree: Tree, order: Mapping[str, Any]) -> dict[str, Any]:
        self.log.append(f"{tree.name} {'forecast' if order['forecast'] else format(order['limit_s'], 'g')}")
        if order["forecast"]:
            return {"package": "", "downsets": 27, "seconds": 0.5}
        value_s = self.values_s[tree.name]
        answer = {"status": "optimal", "time_per_sample_s": value_s, "lower_bound_s": value_s}
        wall_s = self.walls_s[tree.name] + len(self.log)
        return {"package": "", "wall_s": wall_s, "cpu_s": 1.0, "rounds": 2, "answers": [answer], "peak_bytes": 7}

    def compiled(self) -> frozenset[Path]:
        """One more after each of the first ``compiling`` processes."""
        return frozenset({Path(str(min(len(self.log), self.compiling)))})


def test_short_ones_are_measured_in_turns_and_long_ones_once(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(monkeypatch, {"this": -10.0, "v1": -20.0})
    found = Compared({})
    compare([subject(limit_s=240.0)], [HERE, BEFORE], found, list[str]().append)
    assert workers.log == [*["this 240", "v1 100"] * 3, "this forecast"]
    (one,) = found.rows
    assert one.before is not None
    assert (one.this.wall_s, one.before.wall_s) == (-7.0, -16.0)  # medians
    assert (one.this.rounds, one.this.processes, one.this.commit, one.before.commit) == (6, 3, "abc+", "def")
    assert (one.downsets, one.forecast_s) == (27, 0.5)

    workers = Workers(monkeypatch, {"this": -10.0, "v1": 20.0})
    compare([subject()], [HERE, BEFORE], Compared({}), list[str]().append)
    assert workers.log == ["this 100", "v1 100", "this forecast"]


@pytest.mark.long
def test_what_compiles_on_the_way_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(monkeypatch, {"this": 20.0}, compiling=1)
    compare([subject()], [HERE], Compared({}), list[str]().append)
    assert workers.log == ["this 100"] * 2 + ["this forecast"]


# Versions


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits of a file."""
    root = tmp_path / "repository"
    (root / "piper_ray").mkdir(parents=True)
    monkeypatch.setattr(trees, "ROOT", root)

    def git(*arguments: str) -> None:
        who = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
        subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)

    git("init", "--initial-branch=main")
    for number in (1, 2):
        (root / "piper_ray" / "file").write_text(f"version {number}")
        git("add", ".")
        git("commit", "--message", f"version {number}")
    git("tag", "two")
    return root


def test_a_revision_is_checked_out_beside_and_gone_afterwards(repository: Path) -> None:
    (repository / "piper_ray" / "file").write_text("changed")
    with tree_at("two~1") as tree:
        assert (tree.root / "piper_ray" / "file").read_text() == "version 1"
        assert tree.environment["PYTHONPATH"] == str(tree.root)
        assert tree.compiled() == frozenset()
        (tree.root / "piper_ray" / "kernel.nbc").touch()
        assert {path.name for path in tree.compiled()} == {"kernel.nbc"}
        assert not this_tree().commit.startswith(tree.commit)
    assert not tree.root.exists()
    listed = subprocess.run(["git", "worktree", "list"], cwd=repository, check=True, capture_output=True, text=True)
    assert len(listed.stdout.splitlines()) == 1


def test_this_tree_says_that_files_are_changed(repository: Path) -> None:
    assert not this_tree().commit.endswith("+")
    (repository / "piper_ray" / "file").write_text("changed")
    assert this_tree().commit.endswith("+")


@pytest.mark.usefixtures("repository")
def test_no_such_revision() -> None:
    with pytest.raises(UsageError, match="--against: there is no revision three"), tree_at("three"):
        pass


def test_a_tree_without_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "ROOT", tmp_path)
    assert this_tree().commit == "-"
    with pytest.raises(UsageError, match="there is no revision HEAD"), tree_at("HEAD"):
        pass


# Tables and picture


def test_what_was_measured_stands_in_its_table() -> None:
    (line,) = measured_table([row()]).rows
    assert line == (
        "2 towers of 100 K=64 N=64 M=4GiB",
        *("10,203", "10,203", "5,000", "0", "4.00 s", "8.00 s", "300 MiB", "optimal", "6.00 s", "1.5"),
    )
    (refused,) = measured_table([row(REFUSED)]).rows
    assert refused[5:] == ("-", "-", "200 MiB", "refused", "6.00 s", "-")
    (stopped,) = measured_table([row(SLOW)]).rows
    assert stopped[-3:] == ("gap 25.0000 %", "6.00 s", "-")


def test_goals_are_of_cpu_on_one_thread_and_of_wall_on_all() -> None:
    (line,) = goals_table([row(), row(subject="towers-2x25")]).rows
    assert line == ("2 towers of 100 K=64 N=64 M=4GiB", "5.00 s", "CPU", "83.0 s", "4.00 s", "optimal", "met")
    (line,) = goals_table([row(subject="inception-48x256")]).rows
    assert line[1:] == ("60.0 s", "wall", "-", "8.00 s", "optimal", "met")
    assert not is_met(row(dataclasses.replace(SLOW, cpu_s=4.0)))
    assert not is_met(row(dataclasses.replace(RUN, cpu_s=5.1)))
    assert not is_met(row(REFUSED))


@pytest.mark.parametrize(
    ("before", "this", "ratio"),
    [(dataclasses.replace(RUN, cpu_s=8.0), RUN, "2.0"), (SLOW, RUN, "> 10"), (RUN, SLOW, "< 0.10"), (SLOW, SLOW, "-")],
)
def test_ratios_of_versions(before: Run, this: Run, ratio: str) -> None:
    (line,) = versions_table([row(this, before), row()]).rows
    assert line[3] == ratio


def test_tables_have_all_columns_and_only_what_was_measured() -> None:
    found = Compared({"cores": "2"}, [row(before=SLOW), row(before=REFUSED), row(REFUSED, RUN)])
    for table in compared_tables(found.rows):
        assert {len(line) for line in table.rows} == {len(table.header)}
    text = render_compared(found, markdown=True)
    assert "cores 2" in text
    assert "### Against the version before" in text
    assert [table.title for table in compared_tables([row(subject="towers-2x25")])] == ["Solves"]
    assert list(compared_tables([])) == []


def test_the_picture_has_a_point_for_each_solve() -> None:
    rows = [row(before=SLOW), row(subject="chain-250"), row(SLOW, subject="cells-2x5"), row(REFUSED)]
    rows.append(row(subject="inception-frontier"))
    (axes,) = time_against_downsets(rows).axes
    drawn = [(line, np.asarray(line.get_xydata()).tolist()) for line in axes.lines]
    points = [line for line, places in drawn if len(places) == 1]
    assert [place for _, places in drawn if len(places) == 1 for place in places] == [
        *([10203, 40.0], [10203, 4.0], [10203, 4.0], [10203, 40.0])
    ]
    hollow = [same_color(line.get_markerfacecolor(), "white") for line in points]
    assert hollow == [True, False, False, True]
    labels = [line.get_label() for line, places in drawn if not places]
    assert labels == ["towers", "chains", "NAS cells", "stopped, with a gap", "the version before"]


# What is kept, and the pages made of it


def test_what_is_kept_comes_back_and_newer_figures_take_their_place(tmp_path: Path) -> None:
    keep_compared(Compared({"cores": "1"}, [row(subject="chain-250"), row(before=SLOW)]), tmp_path)
    keep_compared(Compared({"cores": "2"}, [row(SLOW)]), tmp_path)
    assert read_compared(tmp_path) == Compared({"cores": "2"}, [row(SLOW), row(subject="chain-250")])
    assert read_compared(tmp_path / "empty").rows == []


def test_yardsticks_come_back(tmp_path: Path) -> None:
    known = read_yardsticks()
    keep_yardsticks(known, tmp_path)
    assert read_yardsticks(tmp_path) == known
    first = dataclasses.replace(known, compilation=None, rows=known.rows[:1], twins=[])
    keep_yardsticks(first, tmp_path)
    assert read_yardsticks(tmp_path) == known
    assert read_yardsticks(tmp_path / "empty") == Results({})


def test_parts_take_the_place_of_what_stood_there() -> None:
    page = "A\n<!-- measured: one -->\n| old |\n| older |\n\nB\n<!-- measured: two-more -->\n\nC\n"
    parts = {"one": "| new |", "two-more": "words"}
    expected = "A\n<!-- measured: one -->\n| new |\n\nB\n<!-- measured: two-more -->\nwords\n\nC\n"
    assert filled(page, parts) == expected
    assert filled(expected, parts) == expected
    assert filled(page, {"two-more": "words"}) == page.replace("two-more -->\n", "two-more -->\nwords\n")


def test_pages_say_what_is_kept() -> None:
    parts = parts_of_pages(read_yardsticks(), read_compared())
    marks: list[str] = []
    for page in kept.PAGES:
        text = page.read_text(encoding="utf-8")
        assert filled(text, parts) == text, "run ./scripts/bench --pages"
        marks += re.findall(r"<!-- measured: (.*) -->", text)
    assert set(parts) <= set(marks)
    assert len(marks) == len(set(marks))
    assert not any("\n\n" in part for part in parts.values())
    assert kept.PICTURE.read_bytes().startswith(b"<?xml")
    assert {subject.id for subject in FAMILIES if subject.quick} <= {one.subject for one in read_compared().rows}
    assert list(read_compared().faults()) == []


# The command line


def bench(*arguments: str) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command()(command_line.main)
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Workers:
    @contextmanager
    def at(revision: str) -> Iterator[Tree]:
        assert revision == "v1"
        yield BEFORE

    monkeypatch.setattr(command_line, "tree_at", at)
    monkeypatch.setattr(command_line, "this_tree", lambda: HERE)
    return Workers(monkeypatch, {"this": 20.0, "v1": 20.0})


@pytest.mark.usefixtures("versions")
def test_families_against_another_version(tmp_path: Path) -> None:
    code, out, _ = bench("--families", "--rows", "chain-250", "--against", "v1", "--json", str(tmp_path / "out.json"))
    assert code == 0
    assert "chain of 250" in out
    assert "Against the version before" in out
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["rows"][0]["before"]["commit"] == "def"


def test_another_answer_fails(versions: Workers) -> None:
    versions.values_s["v1"] = 1.9
    code, out, err = bench("--rows", "bert32-n512", "--against", "v1")
    assert code == 1
    assert "BERT-32 K=2048 N=512 M=8GiB" in out
    assert "bert32-n512: Answer(status='optimal', time_per_sample_s=2.0" in err


def test_what_is_measured_is_kept_and_pages_are_made(
    versions: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[str] = []
    monkeypatch.setattr(command_line, "keep_compared", lambda found: keep_compared(found, tmp_path))
    monkeypatch.setattr(command_line, "write_pages", lambda: written.append("pages"))
    assert bench("--families", "--rows", "chain-250", "--keep")[0] == 0
    assert [comparison.subject for comparison in read_compared(tmp_path).rows] == ["chain-250"]
    assert bench("--pages")[0] == 0
    assert written == ["pages"] * 2
    assert versions.log == ["this 100", "this forecast"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--families", "--rows", "bert32"), "there is no bert32 in --families"),
        (("--rows", "chain-250", "--against", "v1"), "there is no chain-250"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(versions: Workers, arguments: Sequence[str], words: str) -> None:
    code, out, err = bench(*arguments)
    assert (code, out, versions.log) == (2, "", [])
    assert words in err
