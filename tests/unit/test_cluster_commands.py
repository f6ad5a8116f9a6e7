"""Every command that the cluster files give to a shell is one that its program takes."""

from __future__ import annotations

import pytest
import typer
from ray.scripts.scripts import cli as ray_cli
from typer.core import TyperGroup

from piper_ray.cli.app import app
from tests.cluster_support import CLUSTER, RAY_UP, RAYJOB, RAYJOB_SWEEP, ROOT, SBATCH, commands

OURS = commands("piper-ray")
RAYS = commands("ray")


def test_commands_are_found_where_they_must_be() -> None:
    solving = [name for name, words in OURS if words[0] == "solve"]
    assert solving == [RAYJOB.name, SBATCH.name, "Dockerfile", "README.md"]
    sweeping = [name for name, words in OURS if words[0] == "sweep"]
    assert sweeping == [RAYJOB_SWEEP.name, SBATCH.name, "README.md"]
    starting = [name for name, words in RAYS if words[0] == "start"]
    assert starting == [path.name for path in RAY_UP for _ in ("head", "worker")]
    assert [name for name, words in RAYS if words[0] == "symmetric-run"] == [SBATCH.name]


@pytest.mark.parametrize("words", [pytest.param(words, id=f"{name} {words[0]}") for name, words in OURS])
def test_piper_ray_takes_what_it_is_given(words: list[str]) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    if words == ["--version"]:
        assert any("--version" in parameter.opts for parameter in group.params)
    else:
        name, *arguments = words
        command = group.get_command(typer.Context(group), name)
        assert command is not None
        command.make_context(name, list(arguments))  # raises what a user would see


def test_every_solve_on_a_cluster_can_be_taken_up_again() -> None:
    for name, words in OURS:
        if words[0] == "solve" and name != "Dockerfile":
            assert {"--address", "--workers", "--cpus-per-worker", "--checkpoint", "--supervise", "--out"} <= set(words)
            assert words[words.index("--without-workers") + 1] in ("continue", "wait")


def test_every_sweep_on_a_cluster_goes_on_where_it_was() -> None:
    for _, words in OURS:
        if words[0] == "sweep":
            assert {"--address", "--storage", "--resume"} <= set(words)


@pytest.mark.parametrize("words", [pytest.param(words, id=f"{name} {words[0]}") for name, words in RAYS])
def test_ray_takes_what_it_is_given(words: list[str]) -> None:
    name, *arguments = words
    if name == "symmetric-run":
        arguments = arguments[: arguments.index("--")]
        own = ray_cli.commands[name].make_context(name, list(arguments))
        assert own.params["address"]
        assert own.params["min_nodes"]
        name, arguments = "start", ["--head", *own.params["ray_args_and_entrypoint"]]
    ray_cli.commands[name].make_context(name, list(arguments))


def test_readme_names_files_that_are_there() -> None:
    named = {word for _, words in RAYS + OURS for word in words if word.startswith(("cluster/", "inputs/"))}
    assert "cluster/ray-up/aws.yaml" in named
    readme = (CLUSTER / "README.md").read_text(encoding="utf-8")
    named |= {word.strip("`") for word in readme.split() if word.strip("`").startswith("cluster/")}
    for path in named:
        assert (ROOT / path).is_file(), path
