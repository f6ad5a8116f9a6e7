"""Points of a sweep that are plans: what they ask, that each row is what ``plan`` answers, and their report."""

from __future__ import annotations

import csv
import gc
import io
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import piper_ray
from piper_ray import InputError, UsageError
from piper_ray.model.instance import Instance
from piper_ray.model.stop import Stop, StopSearch
from piper_ray.proposal.cells import Cells
from piper_ray.proposal.propose import FoundPlans
from piper_ray.report.plots.curves import plan_figures
from piper_ray.report.sweep_plans import plan_tables, plans_csv
from piper_ray.sweep import plan_findings, run
from piper_ray.sweep.answer import solve_points
from piper_ray.sweep.dataset import read_dataset
from piper_ray.sweep.demand import Demand
from piper_ray.sweep.findings import records_of
from piper_ray.sweep.plan_findings import PlanRecord, best_of_clusters, plan_records_of, ways_of
from piper_ray.sweep.plan_point import PlannedModel, PlanPoint, plan_row
from piper_ray.sweep.point import Progress, Sweep
from piper_ray.sweep.read import read_sweep
from piper_ray.sweep.run import run_sweep
from piper_ray.workloads.estimate.config import model_names, read_model, with_images
from piper_ray.workloads.estimate.hardware import load_hardware
from tests.sweep_support import PLANS, content, write_plans, write_small

ROOT = Path(__file__).resolve().parents[2]


def asked(folder: Path, text: str) -> Sweep:
    return read_sweep(write_plans(folder, text))


def faults(folder: Path, text: str) -> list[str]:
    with pytest.raises(InputError) as refused:
        asked(folder, text)
    return [str(fault) for fault in refused.value.faults]


@pytest.fixture(scope="module", autouse=True)
def here() -> Iterator[None]:
    """All is done in this process, as if it were quick. On Ray: test_sweep_ray.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_HERE_S", math.inf)
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Progress]:
    folder = tmp_path_factory.mktemp("plans")
    source = write_plans(folder)
    return source, folder / "dataset", run_sweep(source, folder / "dataset")


@pytest.fixture(scope="module")
def rows(done: tuple[Path, Path, Progress]) -> list[dict[str, Any]]:
    return content(done[1])


def test_a_cluster_of_kinds_is_a_point(tmp_path: Path) -> None:
    text = """
    [[plan]]
    models = ["bert-large"]
    kinds = { "NVIDIA A100-SXM4-80GB" = "1..2", H100-SXM = [2] }
    batches = [64]
    runtimes = ["torchtitan"]
    """
    sweep = asked(tmp_path, text)
    assert [(point.gpu, point.nodes, point.devices) for point in sweep.points if isinstance(point, PlanPoint)] == [
        ("A100-80:1 H100-SXM:2", 3, 24),
        ("A100-80:2 H100-SXM:2", 4, 32),
    ]
    point = sweep.points[0]
    assert isinstance(point, PlanPoint)
    assert point.kinds == {"A100-80": 1, "H100-SXM": 2}
    row = plan_row(point, PlannedModel(read_model("bert-large"), load_hardware()), Stop())
    assert row["status"] == "refused"
    assert "torchtitan runs no plan on devices of several kinds (A100-80, H100-SXM)" in str(row["note"])


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ('kinds = { A100-80 = 1, "A100 80" = 2 }', "plan[0]: A100-80, A100 80 are one GPU; expected several kinds"),
        ('kinds = { A100-80 = 1, H100-SXM = 2 }\ngpus = ["L4"]', "plan[0]: expected either gpus, with nodes, or kinds"),
        ("batches = [64]", "plan[0]: expected either gpus, with nodes, or kinds"),
    ],
)
def test_a_cluster_is_of_one_gpu_or_of_kinds(tmp_path: Path, given: str, fault: str) -> None:
    (found,) = faults(tmp_path, f'[[plan]]\nmodels = ["bert-large"]\n{given}\n')
    assert found.startswith(fault)


def test_every_combination_is_a_point_and_one_question_is_one(tmp_path: Path) -> None:
    text = """
    [models]
    ours = "ours.json"
    [[plan]]
    models = ["ours", "bert-large"]
    gpus = ["H100-SXM", "NVIDIA A100-SXM4-80GB"]
    nodes = "1..4*2"
    batches = [64, 128]
    precisions = ["bf16", "fp8"]
    runtimes = ["megatron", "torch"]
    schedules = ["1f1b", "gpipe"]
    [[plan]]
    models = "bert-large"
    gpus = ["h100", "H100 SXM"]
    batches = 64
    schedules = "1f1b"
    """
    sweep = asked(tmp_path, text)
    hashes = {str(sweep.identity(point)["input_hash"]) for point in sweep.points}
    assert len(sweep.points) == len(hashes) == 2 * 2 * 3 * 2 * 2 * 2 * 2
    points = [point for point in sweep.points if isinstance(point, PlanPoint)]
    assert {point.gpu for point in points} == {"H100-SXM", "A100-80"}
    assert {(point.nodes, point.devices) for point in points} == {(1, 8), (2, 16), (4, 32)}
    assert set(sweep.subjects) == {"ours", "bert-large"}


def test_what_is_not_said_is_the_models_own(tmp_path: Path) -> None:
    text = '[plan]\nmodels = "bert-large"\ngpus = "H100-SXM"\nnodes = [1, 3]\ngpus_per_node = 4\n'
    points = asked(tmp_path, text).points
    batch = read_model("bert-large").batch
    assert points[0] == PlanPoint("bert-large", "H100-SXM", 1, 4, batch, "bf16", "megatron")
    (said,) = asked(tmp_path, text.replace("[1, 3]", "1") + f"batches = {batch}\n").points
    assert said == points[0], "one question"
    assert isinstance(points[1], PlanPoint)
    assert points[1].batch % 3 == 0


def test_what_is_wrong_is_said_with_its_place(tmp_path: Path) -> None:
    head = '[plan]\nmodels = "bert-large"\ngpus = "H100-SXM"\n'
    assert ["no", "[[points]]", "or", "[[plan]]"][-1] in faults(tmp_path, 'name = "x"\n[models]\n')[-1]
    (unknown,) = faults(tmp_path, head.replace("bert-large", "bert-huge"))
    assert unknown.startswith('plan.models: unknown ("bert-huge"); expected a label of [models] or one of')
    (gpu,) = faults(tmp_path, head.replace("H100-SXM", "X100"))
    assert gpu.startswith("plan: --gpu X100: unknown")
    (runtime,) = faults(tmp_path, head + 'runtimes = ["megatron", "ours"]\n')
    assert runtime.startswith('plan.runtimes[1]: unknown ("ours"); expected one of megatron')
    (precision,) = faults(tmp_path, head + 'precisions = ["bf16", "int3"]\n')
    assert precision == 'plan.precisions[1]: unknown ("int3"); expected one of bf16, fp16, fp8, or a list of them'
    assert faults(tmp_path, "plan = []\n") == ["no points; expected [grid], [[points]] or [[plan]]"]
    (missing,) = faults(tmp_path, '[models]\na = "a.json"\n' + head.replace("bert-large", "a"))
    assert missing.startswith("models.a: ")
    (number,) = faults(tmp_path, "[models]\na = 3\n" + head.replace("bert-large", "a"))
    assert number.startswith("models.a: not a text (3); expected")
    (table,) = faults(tmp_path, 'hardware = "none.toml"\n' + head)
    assert table.startswith("hardware: ")
    (key,) = faults(tmp_path, head + "zero = 1\n")
    assert key.startswith("plan.zero: ")


def test_a_label_is_of_a_workload_or_of_a_model(tmp_path: Path) -> None:
    text = (
        '[workloads]\nchain = "chain.json"\n[models]\nchain = "bert-large"\n[grid]\nmemory = 40\nbandwidth = 4\n'
        '[plan]\nmodels = "chain"\ngpus = "H100-SXM"\n'
    )
    with pytest.raises(InputError, match=r'models.chain: "chain" is a label of \[workloads\] too'):
        read_sweep(write_small(tmp_path, text))


def test_each_row_is_what_plan_answers(done: tuple[Path, Path, Progress], rows: list[dict[str, Any]]) -> None:
    source, _, progress = done
    assert (progress.done, progress.failed, progress.refused, progress.infeasible) == (5, 0, 1, 1)
    planned = [row for row in rows if row["step_s"] is not None]
    assert len(planned) == 3
    for row in planned:
        same = piper_ray.plan(
            str(source.parent / "ours.json"),
            row["gpu"],
            nodes=row["nodes"],
            global_batch=row["batch"],
            precision=row["precision"],
            runtime=row["trained_by"],
        )
        assert row["step_s"] == pytest.approx(same.step_s, rel=1e-3)
        assert row["step_lower_bound_s"] <= same.step_s * (1.0 + 1e-9)
        assert row["gap"] == pytest.approx(1.0 - row["step_lower_bound_s"] / row["step_s"], abs=1e-12)
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * 512 / row["step_s"])
        assert row["tokens_per_s_per_device"] == row["tokens_per_s"] / row["devices"]
        assert row["microbatches"] * row["microbatch_samples"] == row["batch"]
        assert 0 < row["combinations_closed"] <= row["combinations"]
        assert row["layout"].startswith(f"mbs {row['microbatch_samples']}, TP ")
        assert len(json.loads(row["plan"])["stages"]) == row["stages"]
        assert row["planner"] == "plan"
        assert row["time_per_sample_s"] is row["tensor_parallelism"] is row["bandwidth_bytes_per_s"] is None


def test_what_cannot_be_is_a_row_with_its_reason(rows: list[dict[str, Any]]) -> None:
    (refused,) = [row for row in rows if row["status"] == "refused"]
    assert (refused["gpu"], refused["precision"]) == ("A100-80", "fp8")
    assert "no products of 8 bits" in refused["note"]
    (infeasible,) = [row for row in rows if row["status"] == "infeasible"]
    assert infeasible["workload"] == "llama3-405b"
    assert infeasible["step_s"] is infeasible["plan"] is infeasible["schedule"] is None
    assert "fits on 8 GPUs" in infeasible["note"]


@pytest.mark.parametrize(
    ("model", "runtime", "schedule", "reason"),
    [
        ("resnet50", "megatron", "1f1b", "equal blocks in a row"),
        ("bert-large", "deepspeed", "interleaved", "it has 1f1b"),
    ],
)
def test_what_a_runtime_cannot_train_is_refused(
    tmp_path: Path, model: str, runtime: str, schedule: str, reason: str
) -> None:
    text = f'[plan]\nmodels = "{model}"\ngpus = "H100-SXM"\nruntimes = "{runtime}"\nschedules = "{schedule}"\n'
    row = row_of(asked(tmp_path, text))
    assert row["status"] == "refused"
    assert reason in str(row["note"])


def row_of(sweep: Sweep, stop: Stop[Any] | None = None) -> dict[str, object]:
    """Of its first point."""
    point = sweep.points[0]
    subject = sweep.subjects[point.workload]
    assert isinstance(point, PlanPoint)
    assert isinstance(subject, PlannedModel)
    return plan_row(point, subject, stop or Stop())


@pytest.mark.long
def test_it_goes_on_where_it_was(done: tuple[Path, Path, Progress], rows: list[dict[str, Any]], tmp_path: Path) -> None:
    source, location, progress = done
    again = run_sweep(source, location, resume=True)
    assert (again.recorded, again.done) == (progress.points, 0)
    stop = Stop[Progress]()
    half = run_sweep(source, tmp_path / "half", stop=stop, listener=lambda one: stop.request() if one.done else None)
    assert 0 < half.done < half.points
    rest = run_sweep(source, tmp_path / "half", resume=True)
    assert (rest.recorded, rest.left) == (half.done, 0)
    assert content(tmp_path / "half") == rows


def test_a_stop_amid_a_plan_leaves_no_row(tmp_path: Path) -> None:
    """Its best plan so far is not the point's answer."""
    stop = Stop[Any]()
    stop.request()
    with pytest.raises(StopSearch):
        row_of(asked(tmp_path, PLANS), stop)


def test_in_other_processes_models_are_the_same() -> None:
    for name in model_names():
        model = read_model(name)
        assert pickle.loads(pickle.dumps(model)) == model
    pictured = with_images(read_model("Qwen2.5-VL-7B"), 3, None)
    assert pickle.loads(pickle.dumps(pictured)) == pictured


def test_a_worker_answers_as_the_driver_does(done: tuple[Path, Path, Progress], rows: list[dict[str, Any]]) -> None:
    sweep = read_sweep(done[0])
    points = tuple(point for point in sweep.points if point.workload == "ours")[:1]
    subject = pickle.loads(pickle.dumps(sweep.subjects["ours"]))
    report = solve_points(subject, points, sweep.options, None)
    (same,) = [row for row in rows if row["input_hash"] == sweep.identity(points[0])["input_hash"]]
    assert {name: report.rows[0][name] for name in ("step_s", "layout", "plan", "combinations")} == {
        name: same[name] for name in ("step_s", "layout", "plan", "combinations")
    }


def left_after_plans(folder: Path) -> list[int]:
    """Of one plan three times, how much of what plans are made of is alive after each."""
    sweep = asked(folder, PLANS)
    point = next(point for point in sweep.points if point.workload == "ours")
    subject = sweep.subjects["ours"]
    assert isinstance(subject, PlannedModel)
    assert isinstance(point, PlanPoint)
    alive = []
    for _ in range(3):
        assert plan_row(point, subject, Stop[Any]())["step_s"]
        alive.append(sum(isinstance(one, Instance | FoundPlans | Cells) for one in gc.get_objects()))
    return alive


@pytest.mark.long
def test_a_worker_keeps_nothing_of_its_plans(tmp_path: Path) -> None:
    """One that plans for hours would run out of memory: what a plan is made of refers to itself. In a process of its
    own, where no other test has left anything."""
    command = (
        "import pathlib, sys, tests.unit.test_sweep_plans as t; print(t.left_after_plans(pathlib.Path(sys.argv[1])))"
    )
    found = subprocess.run(
        [sys.executable, "-c", command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    first, second, third = json.loads(found.stdout.splitlines()[-1])
    assert first == second == third


def test_a_worker_answers_what_is_refused_too(tmp_path: Path) -> None:
    text = '[plan]\nmodels = "bert-large"\ngpus = "H100-SXM"\nruntimes = "deepspeed"\nschedules = "interleaved"\n'
    sweep = asked(tmp_path, text)
    (row,) = solve_points(sweep.subjects["bert-large"], sweep.points, sweep.options, None).rows
    assert (row["status"], row["note"]) == ("refused", "DeepSpeed has no schedule interleaved; it has 1f1b")


def test_what_plans_need_is_known_beforehand(tmp_path: Path) -> None:
    sweep = asked(tmp_path, PLANS)
    demand = Demand.of(sweep)
    assert [len(group) for _, group in demand.by_memory(sweep.points)] == [len(sweep.points)]
    assert not demand.long_points(sweep.points, 100)
    assert all(demand.seconds(point) > 0 for point in sweep.points)


def test_other_hardware_is_another_question(tmp_path: Path) -> None:
    head = '[plan]\nmodels = "bert-large"\ngpus = "mine"\n'
    (tmp_path / "mine.toml").write_text('[gpus.mine]\nbase = "H100-SXM"\nmemory = "40GB"\n')
    first = asked(tmp_path, 'hardware = "mine.toml"\n' + head)
    (tmp_path / "mine.toml").write_text('[gpus.mine]\nbase = "H100-SXM"\nmemory = "48GB"\n')
    second = asked(tmp_path, 'hardware = "mine.toml"\n' + head)
    assert first.points == second.points
    assert first.identity(first.points[0])["input_hash"] != second.identity(second.points[0])["input_hash"]


# Reports


def plan_record(gpu: str, nodes: int, step_s: float | None, way: str = "megatron", **others: Any) -> PlanRecord:
    """A batch of 64 samples of 512 tokens, on nodes of 8."""
    rate = None if step_s is None else 64 * 512 / step_s
    found: dict[str, Any] = dict.fromkeys(plan_findings.COLUMNS) | {
        "workload": "m", "batch": 64, "trained_by": way, "precision": "bf16", "gpu": gpu, "nodes": nodes,
        "devices": 8 * nodes, "status": "infeasible" if step_s is None else "optimal", "step_s": step_s, "seconds": 1.0,
        "cpu_s": 0.5, "tokens_per_s": rate, "tokens_per_s_per_device": None if rate is None else rate / (8 * nodes),
        "gap": None if step_s is None else 0.0, "note": "too large" if step_s is None else None,
    }  # fmt: skip
    names = [name for name in plan_findings.COLUMNS if name in PlanRecord.__dataclass_fields__]
    return PlanRecord(
        plan_findings.TrainedBatch("m", 64, None),
        plan_findings.TrainingWay(way, "bf16", None),
        **{name: (found | others)[name] for name in names},
    )


RECORDS = [
    plan_record("A", 1, None),
    plan_record("A", 1, 8.0, "torch"),
    plan_record("A", 2, 3.0),
    plan_record("A", 2, 6.0, "torch"),
    plan_record("B", 1, 2.0),
    plan_record("B", 1, 2.0, "torch"),
    plan_record("B", 2, 1.5),
    plan_record("B", 2, None, "torch"),
]


def test_the_best_of_each_cluster_and_which_way_wins() -> None:
    found = {(one.gpu, one.nodes): one.step_s for one in best_of_clusters(RECORDS)}
    assert found == {("A", 1): 8.0, ("A", 2): 3.0, ("B", 1): 2.0, ("B", 2): 1.5}
    megatron, torch = ways_of(RECORDS)
    assert (megatron.way.trained_by, megatron.plans, megatron.without, megatron.wins) == ("megatron", 3, 1, 3)
    assert (torch.plans, torch.without, torch.wins) == (3, 1, 2)
    assert torch.mean_slower == pytest.approx(2.0 ** (1 / 3))


def test_tables_of_plans_tell_the_fastest_and_the_cheapest() -> None:
    tables = {table.title: table for table in plan_tables(RECORDS, {})}
    shortest = tables["Shortest step of each GPU"].rows
    assert [(row[1], row[4], row[5]) for row in shortest] == [("A", "16", "3.00 s"), ("B", "16", "1.50 s")]
    hours = tables["Least GPU hours of 1e9 tokens, of each GPU"].rows
    assert [(row[1], row[4]) for row in hours] == [("A", "16"), ("B", "8")]
    assert float(hours[1][-1]) == pytest.approx(1e9 / (64 * 512 / 2.0 / 8) / 3600, rel=5e-3)
    priced = {table.title: table for table in plan_tables(RECORDS, {"A": 1.0, "B": 10.0})}
    costs = priced["Least cost of 1e9 tokens, of each GPU"].rows
    assert float(costs[1][-1].replace(",", "")) == pytest.approx(10 * float(hours[1][-1]), rel=1e-2)
    assert tables["Plans"].rows == (("m", "8", "6", "2", "0", "0", "0.000 %", "0.000 %", "500 ms"),)
    assert tables["Without a plan"].rows == (
        ("m", "A", "infeasible", "too large", "1"),
        ("m", "B", "infeasible", "too large", "1"),
    )


def test_figures_of_plans_hold_the_points() -> None:
    found = dict(plan_figures(RECORDS, {}))
    assert list(found) == ["step-m-b64", "cost-m-b64", "ways-m-b64"]
    (axes,) = found["step-m-b64"].axes
    curves = {line.get_label(): line for line in axes.get_lines()}
    assert list(np.asarray(curves["A"].get_xdata())) == [8, 16]
    assert list(np.asarray(curves["B"].get_ydata())) == [2.0, 1.5]
    by_gpu = {axes.get_title(): axes for axes in found["ways-m-b64"].axes}
    assert set(by_gpu) == {"A", "B"}
    markers = [line.get_marker() for line in by_gpu["A"].get_lines()]
    assert markers.count("x") == 1, "one way has no plan on one cluster"
    assert list(plan_figures(RECORDS[:2], {})) == [], "one cluster is no curve"


def test_clusters_of_several_kinds_are_curves_and_cost_by_kind() -> None:
    """16 or 24 GPUs of both kinds; of two clusters of 24 the faster one is shown."""
    records = [
        plan_record(f"A:{a} B:{b}", a + b, step_s, devices_of_kinds=f'{{"A": {8 * a}, "B": {8 * b}}}',
                    kinds_of_stages='["B", "A"]', layout="PP 2")
        for a, b, step_s in ((1, 1, 4.0), (1, 2, 2.0), (2, 1, 3.0))
    ]  # fmt: skip
    figures = dict(plan_figures(records, {"A": 1.0, "B": 10.0}))
    (axes,), (costs,) = figures["step-m-b64"].axes, figures["cost-m-b64"].axes
    curve = next(line for line in axes.get_lines() if line.get_label() == "A + B")
    assert (list(np.asarray(curve.get_xdata())), list(np.asarray(curve.get_ydata()))) == ([16, 24], [4.0, 2.0])
    (line,) = (line for line in costs.get_lines() if line.get_label() == "A + B")
    assert np.asarray(line.get_ydata())[0] == pytest.approx((8 * 1.0 + 8 * 10.0) * 1e9 * 4.0 / (64 * 512) / 3600)
    tables = {table.title: table for table in plan_tables(records, {})}
    (row,) = tables["Shortest step of each GPU"].rows
    assert row[1:5] == ("A:1 B:2", "megatron, bf16", "PP 2; stages on B, A", "24")
    first = next(csv.DictReader(io.StringIO(plans_csv(records))))
    hours = json.loads(first["gpu_hours_of_kinds"])
    assert sum(hours.values()) == pytest.approx(float(first["gpu_hours_per_billion_tokens"]))


def test_plans_as_csv_are_exact() -> None:
    rows = list(csv.DictReader(io.StringIO(plans_csv(RECORDS))))
    assert [row["step_s"] for row in rows[:3]] == ["", "8.0", "3.0"]
    assert rows[0]["reason"] == "too large"


@pytest.mark.long
def test_a_dataset_of_both_has_both_in_its_report(tmp_path: Path, done: tuple[Path, Path, Progress]) -> None:
    write_plans(tmp_path)
    source = write_small(tmp_path, PLANS + '[workloads]\nchain = "chain.json"\n[grid]\nmemory = 40\nbandwidth = 4\n')
    ours = tmp_path / "both"
    run_sweep(source, ours)
    table = read_dataset(ours)
    assert len(records_of(table)) == 1
    assert len(plan_records_of(table)) == len(plan_records_of(read_dataset(done[1]))) == 5


def test_prices_name_every_gpu() -> None:
    from piper_ray.cli.sweep import SweepReportOptions

    assert SweepReportOptions(storage="x", price_per_hour="H100-SXM=2.5,A100-80=1").prices == {
        "H100-SXM": 2.5,
        "A100-80": 1.0,
    }
    assert SweepReportOptions(storage="x").prices == {}
    for text in ("H100-SXM", "H100-SXM=cheap", "H100-SXM=-1"):
        with pytest.raises(UsageError, match="--price-per-hour"):
            assert SweepReportOptions(storage="x", price_per_hour=text).prices
