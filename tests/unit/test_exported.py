"""What an exported folder says where its files, the model, the ranks or a batch do not fit the plan."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from piper_ray.model.errors import InputError, PiperRayError, UsageError
from piper_ray.run.data import divided, in_order_of
from piper_ray.run.exported import build, make_mesh
from piper_ray.run.exported_files import read_folder
from piper_ray.run.job import PipelinePlan
from piper_ray.workloads.measure.factory import Inputs

STAGES: dict[str, Any] = {
    "pipeline_ranks": 2,
    "data_parallel_degree": 1,
    "microbatches": 2,
    "stages": [
        {"pipeline_rank": 0, "modules": ["0"], "calls": [0], "recomputed": [False]},
        {"pipeline_rank": 1, "modules": ["2", "4"], "calls": [0, 0], "recomputed": [False, True]},
    ],
}
LISTS = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
    "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1I1,1SEND_B1,1W1,1REDUCE_GRAD,1RESHARD\n"
)
MESH: Any = SimpleNamespace(mesh_dim_names=("pp", "dp"), shape=(2, 1), get_local_rank=lambda _: 0)
"""Of ranks that need not be there: what is refused is refused before they talk."""


def written(folder: Path, stages: object = STAGES, lists: str | None = LISTS) -> Path:
    (folder / "stages.json").write_text(stages if isinstance(stages, str) else json.dumps(stages))
    if lists is not None:
        (folder / "schedule.csv").write_text(lists)
    return folder


@pytest.fixture
def plan(tmp_path: Path) -> PipelinePlan:
    return read_folder(written(tmp_path))


def test_a_folder_is_read_as_a_plan(plan: PipelinePlan) -> None:
    assert (plan.places, plan.replicas, plan.ranks, plan.microbatches, plan.splits) == (2, 1, 2, 2, True)
    assert [[layer.path for layer in stage] for stage in plan.stages] == [["0"], ["2", "4"]]
    assert [layer.recompute for layer in plan.stages[1]] == [False, True]
    assert [plan.stages_of(place) for place in range(2)] == [[0], [1]]


def changed(**changes: object) -> dict[str, Any]:
    return STAGES | changes


def of_stage(**changes: object) -> dict[str, Any]:
    return changed(stages=[STAGES["stages"][0] | changes, STAGES["stages"][1]])


@pytest.mark.parametrize(
    ("stages", "lists", "words"),
    [
        ("", LISTS, "stages.json: 1 fault found\n  empty; expected"),
        ("{", LISTS, "not JSON"),
        ({}, LISTS, "pipeline_ranks: missing; expected a whole number from 1"),
        (changed(microbatches=0), LISTS, "microbatches: zero (0); expected a whole number from 1"),
        (changed(stages=[]), LISTS, "stages: empty; expected a list of stages"),
        (of_stage(modules=[]), LISTS, "stages[0].modules: empty"),
        (
            of_stage(calls=[0, 0]),
            LISTS,
            "stages[0]: 1 modules, 2 calls, 1 recomputed; expected one of each for each layer",
        ),
        (of_stage(pipeline_rank=2), LISTS, "stages[0].pipeline_rank: 2; expected less than the 2 pipeline ranks"),
        (changed(weight_type="int8"), LISTS, "weight_type: "),
        (STAGES, None, "schedule.csv: 1 fault found\n  cannot be read: No such file or directory"),
        (STAGES, "0F0,0F1,0B0,0B1\n", "1 lines; expected one for each of 2 ranks of a pipeline"),
        (
            STAGES,
            LISTS.replace("1RECV_F0", "1X1"),
            "line 2: 1RECV_F0 is missing or too much; expected",
        ),
        (STAGES, LISTS.replace("1RECV_F0", "1RECV_F1"), "line 2: 1RECV_F0 is missing or too much"),
        (STAGES, LISTS.replace("0F1,", ""), "line 1: not each pass of stages 0 for 2 microbatches once"),
        (STAGES, LISTS.replace("1W1", "1B1"), "line 2: not each pass of stages 1 for 2 microbatches once"),
        (STAGES, LISTS.replace(",1F1", ",0F1"), "line 2: not each pass of stages 1 for 2 microbatches once"),
    ],
)
def test_files_that_were_changed_are_told(tmp_path: Path, stages: object, lists: str | None, words: str) -> None:
    with pytest.raises(InputError) as told:
        read_folder(written(tmp_path, stages, lists))
    assert words in str(told.value)


def test_a_folder_without_files_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"stages.json: 1 fault found\n  cannot be read: No such file"):
        read_folder(tmp_path)


def test_ranks_that_were_not_started_or_are_too_many_are_told(
    plan: PipelinePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UsageError, match="this process is no rank; expected torchrun to start it as one of 2: 2 of"):
        make_mesh(plan, "cpu")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UsageError, match="3 ranks were started; expected 2: 2 of a pipeline, each with 1 replica"):
        make_mesh(plan, "cpu")


def chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) if number % 2 == 0 else nn.ReLU() for number in range(6)))


class Branching(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self[0](x)
        if x.sum() > 0:
            x = -x
        result: torch.Tensor = self[4](self[2](x))
        return result


def tied() -> nn.Sequential:
    model = chain()
    model[4].weight = model[0].weight
    return model


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


X = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("model", "loss", "inputs", "target", "words"),
    [
        (chain, mse, X, X, "build: the model is a function; expected a torch.nn.Module"),
        (chain().to("meta"), mse, X, X, "build: 0.weight is on the device meta; expected the whole model on the CPU"),
        (chain(), "mse", X, X, "build: the loss is a str; expected a function of output and target"),
        (
            chain()[:3],
            mse,
            X,
            X,
            "Sequential: 1 fault found\n  4: is in the plan, and Sequential has no such module; expected the model",
        ),
        (
            chain(),
            lambda output, target: (output - target).mean(),
            X,
            torch.zeros(2, 5),
            "the loss: RuntimeError: The size of tensor",
        ),
        (chain(), mse, X, None, "the loss: AttributeError: 'NoneType' object has no"),
        (
            chain(),
            lambda output, _: output,
            X,
            X,
            "its loss is a tensor of shape (2, 4); expected a tensor of one number",
        ),
        (chain(), mse, torch.zeros(2, 5), X, "Sequential.forward cannot be followed here: RuntimeError: mat1 and mat2"),
        (chain(), mse, (X, X), X, "Sequential.forward cannot be followed here: TypeError: "),
        (chain(), mse, {"y": X}, X, "Sequential.forward cannot be followed here: TypeError: "),
        (chain(), mse, None, X, "build: the inputs have no tensor; expected those of one microbatch"),
        (Branching(*chain()), mse, X, X, "test_exported.py:"),
        (
            tied(),
            mse,
            X,
            X,
            "4.weight: belongs to stage 2, and as 0.weight to stage 1; expected a plan that keeps it in one stage",
        ),
    ],
)
def test_what_does_not_fit_the_plan_is_told(
    plan: PipelinePlan, model: Any, loss: Any, inputs: object, target: object, words: str
) -> None:
    with pytest.raises(PiperRayError) as told:
        build(plan, model, "cpu", MESH, loss, inputs, target)
    assert words in str(told.value)


def test_weights_of_another_type_than_planned_are_told(tmp_path: Path) -> None:
    plan = read_folder(written(tmp_path, changed(weight_type="bfloat16")))
    with pytest.raises(
        UsageError, match=r"0.weight is of type float32, and the plan counts on weights in bfloat16: mo"
    ):
        build(plan, chain(), "cpu", MESH, mse, X, X)
    with pytest.raises(PiperRayError, match="the loss: "):  # which comes later
        build(plan, chain().to(torch.bfloat16), "cpu", MESH, mse, X.to(torch.bfloat16), None)


def test_a_mesh_of_another_shape_is_told(plan: PipelinePlan) -> None:
    for names, shape, words in (
        (("pp", "dp"), (1, 2), "a mesh of pp 1, dp 2; expected pp 2 and dp 1, as mesh"),
        (None, (2, 1), "a mesh of no names; expected pp 2 and dp 1"),
    ):
        mesh: Any = SimpleNamespace(mesh_dim_names=names, shape=shape)
        with pytest.raises(UsageError, match=words):
            build(plan, chain(), "cpu", mesh, mse, X, X)


WORDS = torch.arange(12).view(6, 2)


def test_a_batch_is_divided_as_the_example_is_made() -> None:
    example = {"words": torch.zeros(2, 2, dtype=torch.int64), "mask": torch.ones(3, 3), "causal": True}
    rows = divided("inputs", example, {"words": WORDS, "mask": torch.eye(3), "causal": True}, 3)
    assert [row["words"].tolist() for row in rows] == WORDS.view(3, 2, 2).tolist()
    assert all(torch.equal(row["mask"], torch.eye(3)) and row["causal"] is True for row in rows)
    assert divided("target", None, None, 3) == [None] * 3
    (alone,) = divided("target", X, X, 1)
    assert alone is X


@pytest.mark.parametrize(
    ("example", "given", "words"),
    [
        (
            X,
            torch.zeros(5, 4),
            "has the shape (5, 4) where build was given (2, 4); expected (6, 4) for",
        ),
        (X, torch.zeros(6, 5), "has the shape (6, 5) where build was given (2, 4)"),
        (torch.zeros(()), torch.zeros(3), "has the shape (3,) where build was given (); expected it"),
        (X, X, "step was given the target of one microbatch; expected those of 3"),
        (X, WORDS.view(6, 2), "step was given the target int64 (6, 2); expected float32 (2, 4) for each microbatch"),
        (X, None, "step was given the target without tensors; expected float32 (2, 4) for each microbatch"),
        ((X, X), X, "step was given the target float32 (2, 4); expected float32 (2, 4), float32 (2, 4) for each"),
        (None, X, "step was given the target float32 (2, 4); expected no tensors"),
    ],
)
def test_a_batch_that_does_not_fit_is_told(example: object, given: object, words: str) -> None:
    with pytest.raises(UsageError) as told:
        divided("target", example, given, 3)
    assert words in str(told.value)


def test_inputs_are_told_by_their_names() -> None:
    example: Inputs = (X,), {"mask": X, "causal": True}
    assert in_order_of(example, ((X,), {"causal": True, "mask": X}))[1].keys() == example[1].keys()
    cases: list[tuple[Any, str]] = [
        (((X, X), {"mask": X, "causal": True}), "the inputs 2 by position, mask, causal; expected the inputs 1 by"),
        (((X,), {"mask": X}), "the inputs 1 by position, mask; expected the inputs 1 by position, mask, causal"),
        (((), {}), "step was given no inputs; expected"),
        (((X,), {"mask": X, "causal": False}), "False where the model was traced with True; expected the same"),
    ]
    for given, words in cases:
        with pytest.raises(UsageError, match=words):
            in_order_of(example, given)
