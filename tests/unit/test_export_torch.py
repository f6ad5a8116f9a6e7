"""What is exported for torch trains the model that was planned: real processes run exported folders over gloo, and each
step's losses and gradients are those of the model in one piece."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

import piper_ray
from piper_ray.export.files import Target
from piper_ray.export.import_plan import import_plan
from piper_ray.export.run_as import RunAs
from piper_ray.export.targets import export_plan
from piper_ray.model.constraints import Restrictions
from piper_ray.model.errors import InputError, UsageError
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.runtimes.runtime import RUNTIMES, RuntimeName
from piper_ray.version import __version__
from tests.export_models import HERE
from tests.export_support import llama
from tests.lengths import asked_for, long_after
from tests.run_support import results_of_ranks

ROUNDING = 2e-6
"""Relative: microbatches are summed in another order, and divided by their number at another time."""

ONE_STAGE = (ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B, ScheduleName.ZB_H1)
TWO_STAGES = (ScheduleName.INTERLEAVED, ScheduleName.LOOPED_BFS, ScheduleName.ZB_V, ScheduleName.DUALPIPE_V)
"""By how many stages each rank has."""


@dataclass(frozen=True)
class Case:
    """borders: numbers of the layers that stages begin with, the first apart. recompute: of layers that do."""

    model: str
    schedule: ScheduleName
    borders: tuple[int, ...]
    replicas: int
    recompute: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return (len(self.borders) + 1) // Schedule(self.schedule).v * self.replicas

    @property
    def microbatches(self) -> int:
        return 4 * self.replicas


CASES = {
    f"relus, {name.value}, d={replicas}": Case(
        "relus", name, (3,) if name in ONE_STAGE else (1, 3, 4), replicas, recompute=(1,)
    )
    for name, replicas in product((*ONE_STAGE, *TWO_STAGES), (1, 2))
} | {
    "relus, four ranks": Case("relus", ScheduleName.ZB_H1, (1, 2, 4), 1),
    "relus, replicas alone": Case("relus", ScheduleName.GPIPE, (), 4),
    "residuals": Case("residuals", ScheduleName.ONE_F_ONE_B, (2, 3, 5), 1, recompute=(1, 3)),
    "residuals, replicas": Case("residuals", ScheduleName.GPIPE, (3,), 2, recompute=(2,)),
    "residuals in a V": Case("residuals", ScheduleName.ZB_V, (2, 3, 5), 2, recompute=(1, 3)),
    "tied": Case("tied", ScheduleName.ONE_F_ONE_B, (1,), 2),
    "tied, zero bubble": Case("tied", ScheduleName.ZB_H1, (1,), 2),
    "tied, interleaved": Case("tied", ScheduleName.INTERLEAVED, (1, 3, 5), 2),
    "mixtures": Case("mixtures", ScheduleName.ONE_F_ONE_B, (2,), 2),
    "mixtures, zero bubble": Case("mixtures", ScheduleName.ZB_H1, (2,), 2, recompute=(1,)),
    "rotary": Case("rotary", ScheduleName.ONE_F_ONE_B, (3,), 2, recompute=(2, 3, 4)),
    "rotary, interleaved": Case("rotary", ScheduleName.INTERLEAVED, (2, 4, 5), 2),
    "rotary, zero bubble": Case("rotary", ScheduleName.ZB_H1, (4,), 2, recompute=(5,)),
    "rotary, dualpipe": Case("rotary", ScheduleName.DUALPIPE_V, (1, 3, 5), 2, recompute=(3, 4)),
}


@cache
def profiled(model: str) -> piper_ray.Instance:
    return piper_ray.profile(
        f"{HERE}:{model}", microbatch_size=2, global_batch=8, devices=4, memory_bytes="1GB", repeats=2, warm_up=0
    )


def plan_of(instance: piper_ray.Instance, case: Case) -> piper_ray.Plan:
    ends = pairwise((0, *case.borders, len(instance.layers)))
    ways = [
        next(x.id for x in layer.tmpcs[1] if x.recompute == (layer.id in case.recompute)) for layer in instance.layers
    ]
    stages = [
        piper_ray.Stage(layers, case.replicas, 1, {layer: ways[layer] for layer in layers})
        for layers in (tuple(range(first, end)) for first, end in ends)
    ]
    return piper_ray.Plan(tuple(stages), keeps_order=True)


def exported(folder: Path, case: Case) -> None:
    instance = profiled(case.model).replace(microbatches=case.microbatches)
    export_plan(instance, plan_of(instance, case), Schedule(case.schedule), Target.TORCH, 8).write(folder)


QUICK = ("relus, 1f1b, d=1", "relus, interleaved, d=1", "relus, zb-v, d=1")
"""Of two ranks, as a process takes longer to start than a case."""
NAMES = sorted(CASES, key=lambda name: name not in QUICK)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank, by case."""
    root = tmp_path_factory.mktemp("exported")
    documents = {}
    names = asked_for(request.config, len(QUICK), NAMES)
    for number, name in enumerate(names):
        case = CASES[name]
        folder = root / f"folder-{number}"
        exported(folder, case)
        documents[name] = {
            "folder": str(folder),
            "model": case.model,
            "ranks": case.ranks,
            "microbatches": case.microbatches,
            "replicas": case.replicas,
        }
    return results_of_ranks("exported_ranks", root, max(CASES[name].ranks for name in names), {"cases": documents})


@pytest.mark.parametrize("name", long_after(len(QUICK), NAMES))
def test_what_is_exported_trains_the_model_that_was_planned(found: list[dict[str, Any]], name: str) -> None:
    case = CASES[name]
    of_ranks = [results[name] for results in found[: case.ranks]]
    assert all(one["parameters"] > 0 for one in of_ranks)
    assert max(one["difference"] for one in of_ranks) <= ROUNDING
    losses = [one["losses"] for one in of_ranks if one["losses"][0] is not None]
    assert len(losses) == case.replicas
    for step, expected in enumerate(of_ranks[0]["expected"]):
        assert sum(of_rank[step] for of_rank in losses) / case.replicas == pytest.approx(expected, rel=1e-5)


def test_weights_that_stages_share_are_refused_and_planned_for_one() -> None:
    instance = profiled("tied")
    apart = Case("tied", ScheduleName.ONE_F_ONE_B, (2,), 1)
    with pytest.raises(UsageError, match="one and other have weights in common, and are in stages 1 and 2: torch"):
        export_plan(instance, plan_of(instance, apart), Schedule(apart.schedule), Target.TORCH, 8)
    on_one_rank = Case("tied", ScheduleName.ZB_V, (1, 2, 4), 1)
    with pytest.raises(UsageError, match=r"in stages 2 and 3: .*; expected a plan with them in one stage"):
        export_plan(instance, plan_of(instance, on_one_rank), Schedule(on_one_rank.schedule), Target.TORCH, 8)
    torch = RUNTIMES[RuntimeName.TORCH]
    ends = llama(tied=True)
    assert torch.restricted(Restrictions(), ends, ScheduleName.ONE_F_ONE_B, 8).stage_count == 1
    assert torch.on_one_rank(ends) == (
        "torch.distributed.pipelining runs no model over several pipeline ranks whose first and last layers have a "
        "weight in common"
    )
    assert torch.on_one_rank(instance) is None


def test_layers_of_one_module_come_back_as_its_calls() -> None:
    instance = profiled("tied")
    case = Case("tied", ScheduleName.ONE_F_ONE_B, (3,), 1, recompute=(3,))
    assert [layer.path for layer in instance.layers] == ["first", "one", "other", "again", "again", "last"]
    plan = plan_of(instance, case)
    for target, name in ((Target.TORCH, "stages.json"), (Target.YAML, "plan.yaml")):
        text = export_plan(instance, plan, Schedule(case.schedule), target, 8).files[name]
        assert import_plan(instance, text, RunAs()).plan == plan
    document = json.loads(export_plan(instance, plan, Schedule(case.schedule), Target.TORCH, 8).files["stages.json"])
    document["stages"][1]["calls"][1] = 7
    with pytest.raises(InputError, match="'again' is no layer here 2 times; expected the path of a layer"):
        import_plan(instance, json.dumps(document), RunAs())


def test_the_folder_says_how_it_is_used(tmp_path: Path) -> None:
    case = CASES["rotary"]
    exported(tmp_path, case)
    readme = (tmp_path / "README.md").read_text()
    assert "schedule, parts = pipeline.build(model, device, mesh, loss, inputs, target)" in readme
    assert "the `inputs` of one microbatch (2 samples)" in readme
    assert "the batch of this replica: 4 microbatches of 2 samples, one after the other" in readme
    assert "pip install 'piper-ray[torch]'" in readme


def test_without_piper_ray_the_script_says_what_it_needs(tmp_path: Path) -> None:
    exported(tmp_path, CASES["rotary"])
    finished = subprocess.run(
        [sys.executable, "-I", "-S", str(tmp_path / "pipeline.py")], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 1
    assert finished.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: No module named 'piper_ray'; pipeline.py needs piper-ray {__version__} or later with "
        "torch: pip install 'piper-ray[torch]'"
    )
