"""How sure the step of a workload is that ``estimate`` wrote: as sure as the estimate was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance, TrainedModel
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.report.simulated import summary_lines
from piper_ray.simulate.run import simulate
from piper_ray.workloads.estimate.build import EstimateRequest, estimate
from piper_ray.workloads.estimate.config import ModelConfig
from piper_ray.workloads.estimate.doubt import step_text, workload_doubt
from piper_ray.workloads.estimate.kinds import joined
from piper_ray.workloads.estimate.software import Calibration, Spread, dispatcher_named
from piper_ray.workloads.formats.load import load, to_toml
from tests.estimate_support import built_in_hardware, model_of
from tests.simulate_support import chain, cut

ONE = Schedule(ScheduleName.ONE_F_ONE_B)
DENSE = model_of(
    "llama",
    tokens=512,
    hidden_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    intermediate_size=1024,
    vocab_size=1000,
)
EXPERTS = model_of(
    "mixtral", tokens=512, hidden_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
    intermediate_size=1024, vocab_size=1000, num_local_experts=8,
)  # fmt: skip
OWN = Spread(0.97, 1.02, 5)


@pytest.mark.parametrize(
    ("model", "changed"),
    [
        (DENSE, {}),
        (DENSE, {"precision": "fp8"}),
        (DENSE, {"software": "fsdp"}),
        (EXPERTS, {}),
        (DENSE, {"calibration": Calibration(spread=OWN)}),
        (DENSE, {"calibration": Calibration(spread=Spread(0.1, 10.0, 5))}),
    ],
)
def test_what_is_read_is_as_sure_as_its_estimate(model: ModelConfig, changed: dict[str, Any], tmp_path: Path) -> None:
    found = estimate(model, built_in_hardware(), "H100-SXM", EstimateRequest(nodes=1, samples=1, batch=8, **changed))
    read = _read_again(found.instance, tmp_path)
    doubt = workload_doubt(read, ONE)
    assert doubt is not None
    assert (doubt.range_s(1.0), doubt.words) == (found.doubt.range_s(1.0), found.doubt.words)


def test_so_is_one_for_several_kinds_of_gpu(tmp_path: Path) -> None:
    request = EstimateRequest(nodes=1, samples=1, batch=8)
    both = joined({gpu: estimate(DENSE, built_in_hardware(), gpu, request) for gpu in ("A100-80", "H100-SXM")})
    doubt = workload_doubt(_read_again(both.instance, tmp_path), ONE)
    assert doubt is not None
    assert doubt.range_s(1.0) == both.doubt.range_s(1.0)


def test_times_that_are_no_estimates_have_no_range() -> None:
    measured = replace(chain([1.0, 1.0], microbatches=4), model=None)
    estimated = replace(measured, model=TrainedModel(gpu="H100-SXM"))
    plan = cut([1, 1])
    (_, of_measured, *_), (_, of_estimated, *_) = (
        summary_lines(one, simulate(one, plan, "1f1b")) for one in (measured, estimated)
    )
    assert of_measured.startswith("step 5.00 s: 1.25 s/microbatch")
    assert of_estimated.startswith("step 5.00 s (4.")
    for other in (TrainedModel(), TrainedModel(gpu="H100-SXM", software="own"), TrainedModel(gpu="x", precision="fp4")):
        assert workload_doubt(replace(measured, model=other), ONE) is None
    assert workload_doubt(estimated, Schedule(ScheduleName.TWO_BW)) is None
    assert step_text(1.0, None) == "1.00 s"


def test_a_library_of_kernels_is_told_by_its_way() -> None:
    with pytest.raises(UsageError, match="DeepEP is once-per-node here"):
        dispatcher_named("DeepEP")


def _read_again(instance: Instance, folder: Path) -> Instance:
    path = folder / "workload.toml"
    path.write_text(to_toml(instance))
    return load(path)
