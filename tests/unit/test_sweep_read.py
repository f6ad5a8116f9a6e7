"""SWEEP.toml: which points it holds, in which order, and every fault of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from piper_ray import InputError, Restrictions
from piper_ray.model.constraints import Recompute
from piper_ray.sweep.point import Point, Sweep
from piper_ray.sweep.read import counts, read_sweep
from tests.sweep_support import SMALL_POINTS, write_small

ROOT = Path(__file__).resolve().parents[2]


def points(folder: Path, text: str) -> tuple[Point, ...]:
    return solves(read_sweep(write_small(folder, text)))


def solves(sweep: Sweep) -> tuple[Point, ...]:
    return tuple(point for point in sweep.points if isinstance(point, Point))


def faults(folder: Path, text: str) -> list[str]:
    with pytest.raises(InputError) as refused:
        read_sweep(write_small(folder, text))
    return [str(fault) for fault in refused.value.faults]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3..5", (3, 4, 5)),
        (" 8 .. 30 : 8 ", (8, 16, 24)),
        ("8..64*2", (8, 16, 32, 64)),
        ("3..80*5", (3, 15, 75)),
        ("7..7", (7,)),
    ],
)
def test_ranges(text: str, expected: tuple[int, ...]) -> None:
    assert counts(text) == expected


@pytest.mark.parametrize("text", ["8", "8..", "0..4", "8..4", "1..4:0", "1..4*1", "1..4+1", "1..9999999"])
def test_no_ranges(text: str) -> None:
    with pytest.raises(ValueError, match="range"):
        counts(text)


def test_a_grid_is_every_combination(tmp_path: Path) -> None:
    sweep = read_sweep(write_small(tmp_path))
    assert len(sweep.points) == SMALL_POINTS
    assert (
        len(set(sweep.points)) == len({sweep.identity(point)["input_hash"] for point in sweep.points}) == SMALL_POINTS
    )
    assert sweep.points[0] == Point("chain", "piper", 1, 4, 20.0, 4.0, Restrictions())
    assert sum(point.restrictions.recompute is Recompute.NEVER for point in solves(sweep)) == 64
    assert {point.memory_bytes for point in solves(sweep)[:-1]} == {20.0, 40.0}


def test_a_text_without_a_unit_is_refused_and_a_small_number_noted(tmp_path: Path) -> None:
    head = '[workloads]\nchain = "chain.json"\n'
    assert faults(tmp_path, head + '[grid]\nmemory = ["16GB", "8"]\nbandwidth = "25"\n') == [
        (
            "grid.memory[1]: 8 has no unit (did you mean 8GB?); expected a size > 0 such as 8GiB or 80GB, "
            "or a list of them"
        ),
        "grid.bandwidth: 25 has no unit (did you mean 25GB/s?); expected a rate > 0 such as 25GB/s, or a list of them",
    ]
    point = '[[points]]\nworkload = "chain"\nmemory = "8e10"\n'
    assert faults(tmp_path, head + point) == [
        "points[0].memory: 8e10 has no unit (did you mean 80GB?); expected a size > 0 such as 8GiB or 80GB"
    ]
    heard: list[str] = []
    grid = '[grid]\nmemory = [8, 9, "16GB"]\ndevices = 2\n[[points]]\nworkload = "chain"\nbandwidth = 25\n'
    source = write_small(tmp_path, head + grid)
    read_sweep(source, heard.append)
    assert heard == [
        f"{tmp_path / 'chain.json'}: bandwidth: 4 bytes per second, less than 1 MB/s; was 4000000000, 4GB/s, meant?",
        f"{source}: grid.memory: 8 bytes, less than 1 MB; was 8GB meant?",
        f"{source}: points[0].bandwidth: 25 bytes per second, less than 1 MB/s; was 25GB/s meant?",
    ]


def test_what_is_left_out_is_the_workloads_own(tmp_path: Path) -> None:
    text = '[workloads]\nchain = "chain.json"\n[grid]\n[[points]]\nworkload = "chain"\nmemory = "1KiB"\n'
    own, other = points(tmp_path, text)
    assert (own.devices, own.microbatches, own.memory_bytes, own.bandwidth_bytes_per_s) == (4, 4, 1e6, 4.0)
    assert (other.devices, other.memory_bytes) == (4, 1024.0)


def test_points_given_twice_count_once(tmp_path: Path) -> None:
    text = '[workloads]\nchain = "chain.json"\n[[grid]]\ndevices = [2, "1..3"]\n[[grid]]\ndevices = 3\n'
    assert [point.devices for point in points(tmp_path, text)] == [2, 1, 3]


def test_every_fault_is_named_with_its_place(tmp_path: Path) -> None:
    text = """
        nmae = 1
        [workloads]
        chain = "chain.json"
        "a/b" = 3
        [options]
        gap = 2
        [grid]
        workloads = ["chain", "chian"]
        devices = ["8..2:1", 0, 16]
        memory = "8Gx"
        planners = ["piper", "gpip"]
        tensor_parallelism = 1
        [[points]]
        workload = "towers"
        device = 8
    """
    found = faults(tmp_path, text)
    for start in (
        "nmae: unknown key",
        'workloads["a/b"]: cannot name a folder',
        'workloads["a/b"]: not an object (3)',
        "options.gap: too large (2)",
        'grid.devices[0]: an empty or endless range ("8..2:1")',
        "grid.devices[1]: out of range (0)",
        "grid.memory: '8Gx' has an unknown unit",
        'grid.planners[1]: unknown ("gpip"); expected one of piper, ',
        "grid.tensor_parallelism: neither true nor false (1)",
        "points[0].device: unknown key",
    ):
        assert sum(fault.startswith(start) for fault in found) == 1, (start, found)
    assert len(found) == 10


def test_unknown_workloads(tmp_path: Path) -> None:
    text = '[workloads]\nchain = "chain.json"\n[grid]\nworkloads = "chian"\n[[points]]\nworkload = "chin"\n'
    assert faults(tmp_path, text) == [
        'grid.workloads: unknown ("chian"); expected one of chain',
        'points[0].workload: unknown ("chin"); expected one of chain',
    ]


def test_faults_of_the_workloads_are_the_sweeps(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"nodes": [], "edges": 3, "maxDevices": 4}')
    text = '[workloads]\nbad = "bad.json"\ngone = "gone.json"\n[grid]\ndevices = 4\n'
    found = faults(tmp_path, text)
    assert any(fault.startswith("workloads.bad: ") and "edges" in fault for fault in found)
    assert any(fault.startswith("workloads.bad: ") and "--microbatches" in fault for fault in found)
    assert sum(fault.startswith("workloads.gone: ") for fault in found) == 1


def test_too_many_points_are_refused_before_they_are_made(tmp_path: Path) -> None:
    text = '[workloads]\nchain = "chain.json"\n[grid]\ndevices = "1..100000"\nmicrobatches = "1..1000"\n'
    assert faults(tmp_path, text) == ["grid: 100,000,000 points; expected at most 1,000,000"]


@pytest.mark.parametrize("text", ["", "x = ", '[workloads]\nchain = "chain.json"\n'])
def test_no_sweep_at_all(tmp_path: Path, text: str) -> None:
    assert faults(tmp_path, text)


def test_the_example_is_sound() -> None:
    sweep = read_sweep(ROOT / "inputs" / "sweeps" / "bert.toml")
    assert len(sweep.points) == 109
    assert sweep.name == "BERT on A100"


def test_every_figure_counts_in_the_hash(tmp_path: Path) -> None:
    base = '[workloads]\nchain = "chain.json"\n[grid]\nmemory = 20\n'
    others = [
        base + "devices = 3\n",
        base + "microbatches = 3\n",
        base + "bandwidth = 3\n",
        base + 'recompute = "never"\n',
        base + "tensor_parallelism = false\n",
        base + "data_parallelism = false\n",
        base + 'planners = "gpipe"\n',
        base + "[options]\ngap = 0.1\n",
        base + "[options]\ntime_limit_s = 1\n",
        base.replace("chain.json", "towers.json"),
        base.replace("chain =", "other ="),
        base.replace("20", "21"),
    ]
    hashes = set()
    for text in [base, *others]:
        sweep = read_sweep(write_small(tmp_path, text))
        hashes.add(sweep.identity(sweep.points[0])["input_hash"])
    assert len(hashes) == 1 + len(others)


def test_the_study_asks_for_a_thousand_plans_and_more() -> None:
    sweep = read_sweep(ROOT / "inputs" / "sweeps" / "study.toml")
    assert len({str(sweep.identity(point)["input_hash"]) for point in sweep.points}) == 1116
