"""``piper_ray.estimate``, ``profile``, ``info`` and ``draw``: the commands as functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import piper_ray
from tests.report_cases import small_instance

INPUTS = Path(__file__).resolve().parents[2] / "inputs"


def test_estimate_gives_what_the_command_wrote() -> None:
    made = piper_ray.estimate("vit-22b", "A100-80", nodes=64)
    assert made == piper_ray.load(INPUTS / "vit-22b.toml")
    assert made.batch == piper_ray.Batch(16384, 4, None)
    assert [link.devices for link in made.cluster.links] == [8, None]
    assert [made.layers[i].path for i in (0, 1, -1)] == ["vit.embeddings", "vit.encoder.layer.0", "classifier"]
    one_node = piper_ray.estimate("vit-22b", "A100-80")
    assert (one_node.devices, len(one_node.cluster.links)) == (8, 1)


@pytest.mark.parametrize("name", ["llama3-70b", "gpt3-175b", "mixtral-8x22b", "t5-11b", "clip-vit-l-14", "resnet50"])
def test_estimates_part_times_and_name_modules(name: str) -> None:
    instance = piper_ray.load(INPUTS / f"{name}.toml")
    paths = [layer.path for layer in instance.layers if layer.path]
    assert len(set(paths)) == len(paths) >= len(instance.layers) - 1  # a loss is no module
    for layer in instance.layers:
        for tmpc in (tmpc for row in layer.tmpcs.values() for tmpc in row):
            assert tmpc.forward_s is not None
            assert tmpc.backward_s is not None
            assert tmpc.weight_s is not None
            assert 0.0 <= tmpc.forward_s <= tmpc.time_per_sample_s
            assert 0.0 <= tmpc.weight_s <= tmpc.backward_s


def test_what_recomputes_spends_more_on_its_backward_pass() -> None:
    layer = piper_ray.load(INPUTS / "llama3-70b.toml").layers[1]
    of = {tmpc.id: tmpc for tmpc in layer.tmpcs[1]}
    assert of["plain"].forward_s == of["full"].forward_s
    assert of["full"].backward_s == pytest.approx(of["plain"].backward_s + of["plain"].forward_s, rel=1e-5)  # type: ignore[operator]
    assert 0.2 < of["full"].forward_s / of["full"].time_per_sample_s < 0.3  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"nodes": 0}, "nodes must be at least 1"),
        ({"tokens": 1.5}, "tokens must be a whole number"),
        ({"gpu": 3}, "gpu must be the name of a GPU"),
        ({"gpu": "abacus"}, "unknown; expected one of"),
        ({"model": "no such model"}, "no model of that name"),
        ({"batch": 3, "microbatch": 2}, "no multiple"),
    ],
)
def test_estimate_refuses_what_makes_no_sense(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(piper_ray.UsageError, match=words):
        piper_ray.estimate(**{"model": "llama3-70b", "gpu": "H100-SXM", **arguments})


def test_profile_measures_passes_and_names_modules() -> None:
    pytest.importorskip("torch")
    factory = f"{INPUTS / 'pytorch' / 'small_gpt.py'}:small_gpt"
    instance = piper_ray.profile(factory, microbatch=1, repeats=2, warm_up=0, devices=8, batch=4, memory_bytes=1e9)
    assert (instance.devices, instance.batch) == (8, piper_ray.Batch(4, 1))
    assert "blocks.0" in [layer.path for layer in instance.layers]
    for layer in instance.layers:
        for tmpc in layer.tmpcs[1]:
            assert tmpc.forward_s is not None
            assert 0.0 < tmpc.forward_s <= tmpc.time_per_sample_s


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "tpu"}, "device must be 'cpu' or 'cuda'"),
        ({"microbatch": 0}, "microbatch must be at least 1"),
        ({"warm_up": -1}, "warm_up at least 0"),
        ({"repeats": 1}, "repeats must be at least 2"),
        ({"devices": 0}, "devices 0 is out of range"),
        ({"batch": 3, "microbatch": 2}, "no multiple"),
        ({"tensor_parallel": [0]}, "tensor_parallel must be at least 1"),
    ],
)
def test_profile_refuses_what_makes_no_sense(arguments: dict[str, Any], words: str) -> None:
    pytest.importorskip("torch")
    factory = f"{INPUTS / 'pytorch' / 'small_gpt.py'}:small_gpt"
    with pytest.raises(piper_ray.UsageError, match=words):
        piper_ray.profile(factory, **{"microbatch": 1, **arguments})


def test_info_has_the_figures_of_the_command() -> None:
    found: Any = piper_ray.info(small_instance())
    assert found["schema"] == "piper-ray/info"
    assert found["instance"]["layers"] == 6
    assert found["tensor_parallel_degrees"] == [1]
    with pytest.raises(piper_ray.UsageError, match="contract 'all' is unknown"):
        piper_ray.info(small_instance(), contract="all")  # type: ignore[arg-type]


def test_draw_writes_a_picture(tmp_path: Path) -> None:
    piper_ray.draw(small_instance(), tmp_path / "graph.dot")
    assert "digraph" in (tmp_path / "graph.dot").read_text("utf-8")
    with pytest.raises(piper_ray.UsageError, match="unknown kind of picture"):
        piper_ray.draw(small_instance(), tmp_path / "graph.gif")
