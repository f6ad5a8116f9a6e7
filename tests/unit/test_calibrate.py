"""Constants that measurements correct: found again where they are known, left where nothing tells of them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import piper_ray
from piper_ray.calibrate.layouts import laid_out
from piper_ray.calibrate.measurements import (
    _HOLD,
    Estimated,
    Measurement,
    _left_out_error,
    fit,
    measurements_in,
    simulated,
)
from piper_ray.calibrate.runs import PublishedRun
from piper_ray.model.errors import InputError, UsageError
from piper_ray.workloads.estimate.build import EstimateRequest
from piper_ray.workloads.estimate.config import read_model
from piper_ray.workloads.estimate.doubt import doubt_of
from piper_ray.workloads.estimate.hardware import load_hardware
from piper_ray.workloads.estimate.layout import priced
from piper_ray.workloads.estimate.software import (
    UNCALIBRATED,
    Calibration,
    Constant,
    Precision,
    software_named,
    stack_of,
)
from tests.cli_cases import run as run_cli
from tests.lengths import long_after

HARDWARE = load_hardware()
MODEL = "llama3-8b"
LAYOUTS: list[dict[str, object]] = [
    {"tp": 8, "pp": 1, "dp": 2, "microbatch": 1, "sequence_parallel": True},
    {"tp": 1, "pp": 2, "dp": 8, "microbatch": 1, "global_batch": 16, "overlapped": False},
    {"tp": 2, "pp": 1, "dp": 8, "microbatch": 2, "sequence_parallel": True},
    {"tp": 4, "pp": 4, "dp": 1, "microbatch": 4},
    {"tp": 8, "pp": 2, "dp": 1, "microbatch": 2, "sequence_parallel": True},
    {
        "tp": 1, "pp": 1, "dp": 16, "microbatch": 1, "global_batch": 16, "overlapped": False,
        "optimizer_sharding": "zero1",
    },
]  # fmt: skip


def run_of(layout: Mapping[str, object], factors: Mapping[Constant, float]) -> dict[str, object]:
    """A run as it would be measured on a machine whose rates differ by these factors."""
    said = {"id": json.dumps(layout), "gpus": 16, "global_batch": 64, "seq": 4096, "gpu": "H100-SXM", **layout}
    said["model"] = {"config": MODEL}
    laid = laid_out(PublishedRun.model_validate(said), HARDWARE)
    stack = Calibration(factors).applied(laid.stack)
    plan = priced(laid.model, stack, HARDWARE.training, laid.layout)
    return {**said, "step_s": simulated(plan).step_s}


def estimated(**request: object) -> Estimated:
    asked = replace(EstimateRequest(nodes=2), **request)  # type: ignore[arg-type]
    return Estimated(read_model(MODEL), HARDWARE, "H100-SXM", asked)


def written(path: Path, document: object) -> str:
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


def fitted(tmp_path: Path, factors: Mapping[Constant, float], layouts: list[dict[str, object]]) -> Calibration:
    runs = [run_of(layout, factors) for layout in layouts]
    return fit(measurements_in(written(tmp_path / "run.json", runs), estimated())).calibration


@pytest.mark.parametrize(
    "factors",
    long_after(
        1,
        [
            {Constant.WORK: 0.8},
            {Constant.WORK: 1.2, Constant.NETWORK: 0.5},
            {Constant.LINKS: 0.6},
        ],
    ),
)
def test_what_a_machine_differs_by_is_found(factors: dict[Constant, float], tmp_path: Path) -> None:
    found = fitted(tmp_path, factors, LAYOUTS)
    for constant in Constant:
        assert found.factor(constant) == pytest.approx(factors.get(constant, 1.0), rel=0.08), constant


@pytest.mark.long
def test_one_run_tells_of_one_constant_and_none_of_a_machine_as_the_tables_have_it(tmp_path: Path) -> None:
    one = fitted(tmp_path, {Constant.WORK: 0.7, Constant.NETWORK: 0.5}, LAYOUTS[:1])
    assert list(one.factors) == [Constant.WORK]
    assert one.factors[Constant.WORK] < 0.75
    assert fitted(tmp_path, {}, LAYOUTS).factors == {}


@pytest.mark.long
def test_an_outlier_among_three_runs_changes_nothing(tmp_path: Path) -> None:
    """It would change the links in the first case, and work in the second. In the third all are off by what layouts of
    one machine may be."""
    for off in ({0: 0.75, 1: 0.92, 2: 0.95}, {0: 0.8, 1: 0.92, 2: 0.92}, {0: 0.86, 1: 0.86, 2: 0.86}):
        runs = [run_of(layout, {Constant.WORK: off.get(place, 1.0)}) for place, layout in enumerate(LAYOUTS[:3])]
        found = fit(measurements_in(written(tmp_path / "run.json", runs), estimated())).calibration
        assert found.factors == {}
    assert list(fitted(tmp_path, {Constant.WORK: 0.7}, LAYOUTS[:3]).factors) == [Constant.WORK]


def test_leaving_each_out_in_turn_is_what_the_formula_says() -> None:
    draw = np.random.default_rng(3)
    slopes, residuals = draw.normal(size=(7, 3)), draw.normal(size=7)
    total = 0.0
    for left in range(7):
        others = [place for place in range(7) if place != left]
        a, b = slopes[others], residuals[others]
        step = np.linalg.solve(a.T @ a + _HOLD * np.eye(3), a.T @ b)
        total += abs(residuals[left] - slopes[left] @ step)
    assert _left_out_error(slopes, residuals) == pytest.approx(total)


@pytest.mark.long
def test_runs_of_the_machine_itself_make_the_interval_narrower(tmp_path: Path) -> None:
    """The more runs, the narrower; a single one, and runs that nothing explains, leave it as it is of all machines."""
    stack = stack_of(HARDWARE.gpu("H100-SXM"), software_named("megatron-core"), Precision.BF16, 8)
    wide = doubt_of(stack, False, ())
    widths = [wide.alike.most / wide.alike.least]
    for count in (4, 6):
        spread = fitted(tmp_path, {Constant.WORK: 0.8}, LAYOUTS[:count]).spread
        assert spread is not None
        assert spread.runs == count
        own = doubt_of(stack, False, (), spread)
        least_s, most_s = own.range_s(1.0)
        assert least_s < 1.0 < most_s
        assert f"as {count} runs on this machine" in own.words
        widths.append(most_s / least_s)
    assert widths == sorted(widths, reverse=True)
    assert fitted(tmp_path, {Constant.WORK: 0.8}, LAYOUTS[:1]).spread is None
    unlike = [
        {**run_of(layout, {}), "step_s": step_s} for layout, step_s in zip(LAYOUTS, (1.0, 3.0, 9.0), strict=False)
    ]
    found = fit(measurements_in(written(tmp_path / "run.json", unlike), estimated())).calibration.spread
    assert doubt_of(stack, False, (), found).calibrated is None


def test_factors_are_rates_and_shares_of_data_sheets_stay_shares() -> None:
    stack = EstimateRequest(nodes=1).stack(HARDWARE.gpu("H100-SXM"))
    assert UNCALIBRATED.applied(stack) is stack
    changed = Calibration({Constant.HOST: 0.5, Constant.WORK: 0.9, Constant.LINKS: 2.0}).applied(stack)
    assert changed.software.host_s == 2 * stack.software.host_s
    assert changed.software.message_s == 2 * stack.software.message_s
    assert changed.software.efficiency == 0.9 * stack.software.efficiency
    assert changed.gpu.link_fraction == 1.0
    assert changed.gpu.memory_fraction == stack.gpu.memory_fraction


def test_measured_layers_of_a_profile(tmp_path: Path) -> None:
    """Layers that all take a quarter longer than is estimated."""
    whole = piper_ray.estimate(MODEL, "H100-SXM", nodes=2)
    layers = [
        replace(
            layer,
            path=f"wrapped.{layer.path}",
            tmpcs={
                1: tuple(
                    replace(x, time_per_sample_s=None, forward_s=1.25 * x.forward_s, backward_s=1.25 * x.backward_s)  # type: ignore[arg-type,operator]
                    for x in layer.tmpcs[1]
                )
            },
        )
        for layer in whole.layers
    ]
    layers = [replace(layer, tmpcs={1: tuple(replace(x, weight_s=None) for x in layer.tmpcs[1])}) for layer in layers]
    profile = piper_ray.Instance(layers, whole.edges, cluster=whole.cluster, batch=whole.batch)
    piper_ray.dump(profile, tmp_path / "profile.toml")
    measurements = measurements_in(str(tmp_path / "profile.toml"), estimated())
    assert sum(one.weight for one in measurements) == pytest.approx(1.0)
    assert {one.label for one in measurements} >= {"decoder layer, forward pass", "decoder layer, backward pass"}
    found = fit(measurements).calibration
    assert found.factors == {Constant.WORK: pytest.approx(0.8, rel=0.02)}


def test_the_command_says_what_it_changed_and_writes_it_down(tmp_path: Path) -> None:
    path = written(tmp_path / "run.json", run_of(LAYOUTS[1], {Constant.WORK: 0.8}))
    out = tmp_path / "workload.toml"
    estimate = ["estimate", MODEL, "--gpu", "H100-SXM", "--nodes", "2"]
    plain = piper_ray.estimate(MODEL, "H100-SXM", nodes=2)
    result = run_cli(*estimate, "--calibrate", path, "-o", out)
    assert result.returncode == 0, result.stderr
    told = re.search(r"calibrated with 1 measurement of .*run.json: work on the GPU x (0\.\d+)", result.stderr)
    assert told is not None
    assert float(told.group(1)) == pytest.approx(0.8, rel=0.03)
    assert "unchanged, because" in result.stderr
    assert f"# {told.group(0)}" in out.read_text(encoding="utf-8")
    found, by_function = piper_ray.load(out), piper_ray.estimate(MODEL, "H100-SXM", nodes=2, calibrate=path)
    assert found == by_function
    assert any(note.startswith("calibrated with 1 measurement") for note in by_function.notes)
    ratio = found.layers[1].tmpcs[1][0].time_per_sample_s / plain.layers[1].tmpcs[1][0].time_per_sample_s
    assert ratio == pytest.approx(1 / 0.8, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"gpu": "A100-80"}, InputError, "was measured on NVIDIA A100 SXM4 80 GB, the estimate is for NVIDIA H100"),
        ({"software": "nemo"}, InputError, "add --software nemo"),
        ({"precision": "fp8"}, InputError, "is in fp8, the estimate in bf16; add --precision fp8"),
        ({"tp": 1, "dp": 16, "microbatch": 4}, InputError, "expected a layout that can have run"),
        ({"step_s": None}, InputError, "missing; expected the measured seconds of a step"),
        ({"step_s": -1}, InputError, "step_s"),
        ({"tp": 3}, InputError, "not 16 gpus"),
        ({"step_s": 100.0}, UsageError, "expected the same model, GPU and layout"),
        ({"step_s": 0.1}, InputError, "whose peak is 989; expected the seconds of a whole batch"),
    ],
)
def test_what_is_no_measurement_is_told(
    changes: dict[str, object], error: type[Exception], words: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "run.json", {**run_of(LAYOUTS[0], {}), **changes})
    with pytest.raises(error, match=re.escape(words)):
        fit(measurements_in(path, estimated()))


def test_all_runs_that_cannot_be_used_are_told_at_once(tmp_path: Path) -> None:
    run = run_of(LAYOUTS[0], {})
    wrong: list[dict[str, object]] = [
        {"gpus": 17, "loss": "gone"},
        {"precision": "fp8", "software": "nemo"},
        {"stages": [3, 4]},
        {},
    ]
    path = written(tmp_path / "runs.json", [{**run, "id": str(place), **one} for place, one in enumerate(wrong)])
    with pytest.raises(InputError) as caught:
        measurements_in(path, estimated())
    told = {fault.path: fault.message for fault in caught.value.faults}
    assert list(told) == ["0", "1", "2"]
    assert "not 17 gpus" in told["0"]
    assert "loss 'gone' is unknown" in told["0"]
    assert "add --precision fp8" in told["1"]
    assert "add --software nemo" in told["1"]


def test_a_file_of_something_else_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to calibrate with"):
        fit(measurements_in(written(tmp_path / "none.json", []), estimated()))
    other = piper_ray.estimate("vit-22b", "A100-80")
    piper_ray.dump(other, tmp_path / "other.toml")
    with pytest.raises(UsageError, match=r"no layer of llama3-8b .* such as model\.layers\.0"):
        measurements_in(str(tmp_path / "other.toml"), estimated())
    missing = run_cli("estimate", MODEL, "--gpu", "h100", "--nodes", 1, "--calibrate", tmp_path / "missing.json")
    assert (missing.returncode, missing.stdout) == (3, "")
    assert "missing.json" in missing.stderr


def test_a_run_need_not_say_what_the_estimate_says(tmp_path: Path) -> None:
    said = run_of(LAYOUTS[0], {})
    short = {key: value for key, value in said.items() if key not in ("model", "gpu")}
    (one,) = measurements_in(written(tmp_path / "run.json", short), estimated())
    assert math.isclose(one.predicted_s(UNCALIBRATED), one.measured_s)
    assert isinstance(one, Measurement)
