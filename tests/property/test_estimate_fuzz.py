"""Whatever stands in a config or a hardware file: an estimate or an error in words, never anything else."""

from __future__ import annotations

import contextlib
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from piper_ray.model.errors import PiperRayError
from piper_ray.workloads.estimate.build import EstimateRequest, estimate
from piper_ray.workloads.estimate.config import known_models, read_model
from piper_ray.workloads.estimate.hardware import load_hardware
from tests.data import published_models
from tests.estimate_support import built_in_hardware
from tests.formats_support import NASTY, TOKENS
from tests.lengths import long_after

MODELS = Path(__file__).resolve().parents[2] / "piper_ray" / "workloads" / "estimate" / "models.toml"
HARDWARE = MODELS.with_name("hardware.toml")


@cache
def configs() -> list[dict[str, Any]]:
    return [entry["config"] for entry in {**known_models(), **published_models()}.values()]


@pytest.mark.parametrize("seed", long_after(1, range(3)))
def test_mutated_configs(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    refused = 0
    for number in range(60):
        document = json.loads(json.dumps(rng.choice(configs())))
        for _ in range(rng.randint(1, 2)):
            inner = [value for value in document.values() if isinstance(value, dict) and value]
            container = rng.choice([document, *inner])
            key = rng.choice(list(container) or ["model_type"])
            if rng.random() < 0.2:
                container.pop(key, None)
            else:
                container[key] = rng.choice(NASTY)
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        try:
            result = estimate(read_model(str(path)), built_in_hardware(), "H100-SXM", EstimateRequest(nodes=2))
        except PiperRayError:
            refused += 1
        else:
            assert result.instance.layers
    assert refused > 30


@pytest.mark.parametrize("seed", long_after(1, range(2)))
def test_mutated_hardware(seed: int, tmp_path: Path, few: bool) -> None:
    rng = random.Random(seed)
    whole = HARDWARE.read_text(encoding="utf-8")
    for number in range(15 if few else 40):
        at = rng.randrange(len(whole))
        path = tmp_path / f"{number}.toml"
        path.write_text(whole[:at] + rng.choice(TOKENS) + whole[at + rng.choice([0, 1, 5]) :], encoding="utf-8")
        with contextlib.suppress(PiperRayError):
            load_hardware(path)
