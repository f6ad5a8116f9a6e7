"""Small models and their plans, as the tests of exports use them, and the runtimes' own code as a process."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from piper_ray.model.instance import Instance
from piper_ray.model.mode import ALL_REPLICAS, Mode, Recomputation
from piper_ray.model.one_mode import tmpcs_under
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule, ScheduleName
from piper_ray.workloads.estimate.modes import Offer
from tests.estimate_support import estimated, model_of
from tests.runtime_code import ANSWERS

ROOT = Path(__file__).resolve().parents[1]
PLAIN = Mode()
TIMEOUT_S = 300.0
"""For the answers to the questions of a test."""


@cache
def llama(
    layers: int = 12,
    *,
    nodes: int = 2,
    batch: int = 32,
    zero_shards: int = 1,
    tied: bool = False,
    key_heads: int = 8,
    tokens: int = 1024,
    software: str = "megatron-core",
) -> Instance:
    """A small Llama on nodes of 8 GPUs, with the paths of its modules. tied: its head is its embedding's table."""
    model = model_of(
        "llama", tokens=tokens, hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=key_heads, intermediate_size=2816, vocab_size=32000, tie_word_embeddings=tied,
    )  # fmt: skip
    found = estimated(
        model, "H100-SXM", nodes=nodes, samples=1, batch=batch, zero_shards=zero_shards, software=software
    )
    return found.instance


@cache
def mixture(experts: int = 8) -> Instance:
    """A small Mixtral on 4 nodes of 8 GPUs, with context parallelism, experts over 8 ranks, and shared state."""
    model = model_of(
        "mixtral", tokens=1024, hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8,
        intermediate_size=2816, vocab_size=32000, num_local_experts=experts,
    )  # fmt: skip
    offer = Offer(zero=ALL_REPLICAS, contexts=(1, 2), experts=(8,))
    return estimated(model, "H100-SXM", nodes=4, samples=1, batch=32, offer=offer).instance


def plan_in(instance: Instance, setting: Mode, *, t: int, d: int) -> Plan:
    """Two stages of three layers each, of a model of four blocks."""
    rows = {layer.id: tmpcs_under(layer.tmpcs[t], setting)[0].id for layer in instance.layers}
    ids = list(rows)
    parts = (ids[:3], ids[3:])
    return Plan(tuple(Stage(tuple(x), d, t, {y: rows[y] for y in x}) for x in parts), keeps_order=True)


def plan_of(
    instance: Instance,
    counts: list[int],
    *,
    d: int = 1,
    t: int = 1,
    setting: Mode = PLAIN,
    first_k: int | None = None,
) -> Plan:
    """Stages with these numbers of layers; first_k: full recomputation of the first k blocks of each stage."""
    stages, at = [], 0
    for count in counts:
        chosen, blocks = {}, 0
        for layer in instance.layers[at : at + count]:
            block = layer.path.rpartition(".")[2].isdecimal()
            blocks += block
            kind = Recomputation.FULL if first_k is not None and block and blocks <= first_k else setting.recomputation
            of_layer = Mode(kind, setting.sequence_parallel, setting.optimizer_shards)
            chosen[layer.id] = tmpcs_under(layer.tmpcs[t], of_layer)[0].id
        stages.append(Stage(tuple(chosen), d, t, chosen))
        at += count
    assert at == len(instance.layers)
    return Plan(tuple(stages), keeps_order=True)


def random_counts(rng: Random, layers: int, stages: int) -> list[int]:
    """The number of layers of each stage; none has none."""
    cuts = sorted(rng.sample(range(1, layers), stages - 1))
    return [end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True)]


def random_case(
    rng: Random, *, chunks: bool = True, software: str = "megatron-core"
) -> tuple[Instance, Plan, Schedule]:
    """A plan that the software's runtime can run: Megatron, or torchtitan (fsdp) if one setting is all layers'."""
    instance = llama(nodes=4, zero_shards=rng.choice([1, 2]), software=software)
    t, d, p = rng.choice([1, 2, 4]), rng.choice([1, 2]), rng.choice([1, 2, 4])
    most = len(instance.layers) // p
    v = rng.choice([1, 2, 3]) if chunks and p > 1 and most >= 3 else 1
    shards = max(x.optimizer_shards for x in _settings(instance)) if d == 2 else 1
    known = sorted({x.recomputation for x in _settings(instance)}, key=lambda x: x.parts)
    setting = Mode(rng.choice(known), t > 1 and rng.random() < 0.5, rng.choice([1, shards]))
    first_k = None
    if setting.recomputation == Recomputation.NONE and rng.random() < 0.4:
        first_k = rng.randint(1, 3)
    plan = plan_of(
        instance, random_counts(rng, len(instance.layers), p * v), d=d, t=t, setting=setting, first_k=first_k
    )
    return instance, plan, Schedule(ScheduleName.INTERLEAVED if v > 1 else ScheduleName.ONE_F_ONE_B, v)


def _settings(instance: Instance) -> set[Mode]:
    return {x.mode for layer in instance.layers for row in layer.tmpcs.values() for x in row}


def runtime_says(package: str, *questions: tuple[str, Path, int]) -> list[Any]:
    """What ``tests.runtime_code`` says to each question, in one process for all. package: that questions take.

    Skips where the package has no wheels; fails in CI where it has.
    """
    if importlib.util.find_spec(package) is None:
        if os.environ.get("CI") and sys.platform == "linux" and sys.version_info >= (3, 11):
            pytest.fail(f"{package} is not installed; scripts/test installs it from requirements-runtimes.lock")
        pytest.skip(f"{package} is not installed")
    if not _RUNTIMES:
        _RUNTIMES.append(_Runtimes())
    try:
        return _RUNTIMES[0].answers([(name, str(folder), blocks) for name, folder, blocks in questions])
    except AssertionError:
        _RUNTIMES.clear()
        raise


class _Runtimes:
    """A process that has imported PyTorch and runtimes, which takes longer than most answers."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime_code"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        atexit.register(self._close)

    def answers(self, questions: list[tuple[str, str, int]]) -> list[Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(questions) + "\n")
        self._process.stdin.flush()
        hangs = threading.Timer(TIMEOUT_S, self._process.kill)
        hangs.start()
        try:
            for line in self._process.stdout:
                if line.startswith(ANSWERS):
                    answers: list[Any] = json.loads(line.removeprefix(ANSWERS))
                    return answers
        finally:
            hangs.cancel()
            hangs.join()
        self._errors.seek(0)
        raise AssertionError(self._errors.read()[-3000:])

    def _close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


_RUNTIMES: list[_Runtimes] = []
"""At most one."""
