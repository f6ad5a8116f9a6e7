"""``piper_ray.estimate``, ``profile``, ``info`` and ``draw``: the commands as functions."""

from __future__ import annotations

import re
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
    assert one_node.devices == 8
    assert one_node.replace(devices=256) == piper_ray.estimate("vit-22b", "A100-80", nodes=32)
    passes = [
        [tmpc.time_per_sample_s for layer in instance.layers for row in layer.tmpcs.values() for tmpc in row]
        for instance in (one_node, made)
    ]
    assert all(one < many for one, many in zip(*passes, strict=True)), "of more than 256 GPUs all wait for the slowest"


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
        ({"global_batch": 3, "microbatch_size": 2}, "no multiple"),
        (
            {"model": {"model_type": "llama"}},
            "model must be the path of a config.json, an id of the hub, or the name of a known model",
        ),
        ({"zero": "some"}, "zero must be a whole number of at least 1, or 'all', not 'some'"),
    ],
)
def test_estimate_refuses_what_makes_no_sense(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(piper_ray.UsageError, match=words):
        piper_ray.estimate(**{"model": "llama3-70b", "gpu": "H100-SXM", **arguments})


def test_profile_measures_passes_and_names_modules() -> None:
    pytest.importorskip("torch")
    factory = f"{INPUTS / 'pytorch' / 'small_gpt.py'}:small_gpt"
    sizes = {"devices": 8, "microbatch_size": 1, "global_batch": 4}
    instance = piper_ray.profile(factory, repeats=2, warm_up=0, memory_bytes=1e9, **sizes)  # type: ignore[arg-type]
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
        ({"microbatch_size": 0}, "microbatch_size must be at least 1"),
        ({"warm_up": -1}, "warm_up at least 0"),
        ({"repeats": 1}, "repeats must be at least 2"),
        ({"devices": 0}, "devices 0 is out of range"),
        ({"global_batch": 3, "microbatch_size": 2}, "no multiple"),
        ({"tensor_parallel": [0]}, "tensor_parallel must be at least 1"),
    ],
)
def test_profile_refuses_what_makes_no_sense(arguments: dict[str, Any], words: str) -> None:
    pytest.importorskip("torch")
    factory = f"{INPUTS / 'pytorch' / 'small_gpt.py'}:small_gpt"
    with pytest.raises(piper_ray.UsageError, match=words):
        piper_ray.profile(factory, **{"microbatch_size": 1, **arguments})


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


def test_solve_takes_a_path_and_plain_keywords() -> None:
    path = INPUTS / "bert32-a100.toml"
    sizes: Any = {"memory_bytes": "8GiB", "bandwidth_bytes_per_s": "25GiB/s"}
    found = piper_ray.solve(path, devices=256, microbatches=512, **sizes, time_limit="10m", threads=1)
    sizes = {"memory_bytes": 8 * 2**30, "bandwidth_bytes_per_s": 25 * 2**30}
    instance = piper_ray.load(path, devices=256, microbatches=512, **sizes)
    options = piper_ray.SolveOptions(time_limit_s=600.0, threads=1)
    assert found.plan == piper_ray.solve(instance, options=options).plan
    on_other_devices = piper_ray.solve(instance, devices=128, threads=1).plan
    assert on_other_devices is not None
    assert on_other_devices.devices <= 128


def test_keywords_stand_in_place_of_the_options() -> None:
    options = piper_ray.SolveOptions(gap=0.5, threads=1)
    closed = piper_ray.solve(small_instance(), options=options, gap=0.0)
    assert closed.status is piper_ray.Status.OPTIMAL
    assert piper_ray.solve(small_instance(), options=options).time_per_sample_s >= closed.time_per_sample_s  # type: ignore[operator]


def test_a_checkpoint_is_kept_where_the_keyword_says(tmp_path: Path) -> None:
    first = piper_ray.solve(small_instance(), checkpoint=tmp_path / "kept")
    assert any((tmp_path / "kept").iterdir())
    assert piper_ray.solve(small_instance(), checkpoint=str(tmp_path / "kept")).plan == first.plan


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"devices": "many"}, "devices must be a whole number from 1 to 100000, not 'many'"),
        ({"memory_bytes": "8"}, "8 has no unit; did you mean 8GB"),
        ({"memory_bytes": "much"}, "'much' is not understood"),
        ({"bandwidth_bytes_per_s": -1}, "bandwidth_bytes_per_s -1 is out of range"),
        ({"time_limit": "soon"}, "'soon' is no length of time"),
        ({"time_limit": 0}, "time_limit must be a positive number of seconds, not 0"),
        ({"memory_limit": "16"}, "16 has no unit; did you mean 16GB"),
        ({"memory_limit": []}, "memory_limit must be a positive number of bytes"),
        ({"gap": "1%"}, "gap must be at least 0 and below 1"),
        ({"threads": 1.5}, "threads must be a whole number"),
        ({"contract": "all"}, "contract 'all' is unknown; expected one of safe, operators"),
        ({"options": {"gap": 0.1}}, "options must be SolveOptions, not {"),
        ({"checkpoint": 3}, "resume must be a path, not 3"),
        ({"schedule": "1f1"}, "did you mean 1f1b"),
    ],
)
def test_solve_says_what_to_pass_instead(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(piper_ray.UsageError, match=re.escape(words)):
        piper_ray.solve(small_instance(), **keywords)


def test_frontier_takes_the_keywords_of_solve() -> None:
    found = piper_ray.frontier(small_instance(), devices="1..4", memory_bytes="80GB", threads=1, time_limit="1h")
    assert sorted(found.by_devices()) == [1, 2, 3, 4]
    assert found.instance.memory_bytes == 80e9
    with pytest.raises(piper_ray.UsageError, match="no length of time"):
        piper_ray.frontier(small_instance(), time_limit="soon")


def test_sizes_are_texts_or_numbers_wherever_they_are_given() -> None:
    sizes: dict[str, Any] = {"weights_bytes": "1GiB", "fixed_bytes": "1MB"}
    layer = piper_ray.Layer(0, "a", {1: (piper_ray.Tmpc("x", 1.0, **sizes),)})
    made = piper_ray.Instance([layer], [], 1, 1, "80GB", "25GB/s")
    assert (made.memory_bytes, made.bandwidth_bytes_per_s) == (80e9, 25e9)
    assert made.layers[0].tmpcs[1][0].weights_bytes == 2.0**30
    assert made.replace(memory_bytes="8GiB").memory_bytes == 8 * 2.0**30
    sent: Any = "16MiB"
    assert piper_ray.Edge(0, 1, sent).communication_bytes == 2.0**24
    assert piper_ray.solve(made).plan is not None
    with pytest.raises(piper_ray.InputError, match="memory_bytes"):
        piper_ray.solve(piper_ray.Instance([layer], [], 1, 1, "plenty", "25GB/s"))
