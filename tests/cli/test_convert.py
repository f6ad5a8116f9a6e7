"""``piper-ray convert``: forms by name and by ending, refusals that name the loss. And planning in blocks."""

from __future__ import annotations

import json
from pathlib import Path

from piper_ray import load
from tests.cli_cases import ROOT, run
from tests.data import profile_text

CLUSTER = ("--devices", 4, "--microbatches", 8, "--memory", "16GB", "--bandwidth", "10GB/s")


def test_a_profile_to_piper_s_json_and_back(tmp_path: Path) -> None:
    source, piper, back = (tmp_path / name for name in ("vgg16.graph.txt", "vgg.json", "vgg.txt"))
    source.write_text(profile_text("vgg16"), encoding="utf-8")
    assert run("convert", source, piper, *CLUSTER).returncode == 0
    assert run("convert", piper, back).returncode == 0
    again = load(back, devices=4, microbatches=8, memory_bytes=16e9, bandwidth_bytes_per_s=10e9)
    assert again.layers == load(piper).layers
    assert again.edges == load(piper).edges


def test_a_refusal_names_each_loss_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "bert.json"
    result = run("convert", ROOT / "inputs" / "bert32-a100.toml", out, "--to", "dnn-partitioning")
    assert result.returncode == 2
    assert "an input of dnn-partitioning would lose\n" in result.stderr
    assert "  tensor parallelism (degrees above 1)\n" in result.stderr
    assert "  weights to synchronise (parameterSize)\n" in result.stderr
    assert "Traceback" not in result.stderr
    assert not out.exists()


def test_dnn_partitioning_is_read_planned_and_written_again(tmp_path: Path) -> None:
    nodes = [
        {"id": v, "supportedOnFpga": 1, "cpuLatency": 9.0, "fpgaLatency": 1.0, "isBackwardNode": 0, "size": 5.0}
        for v in range(4)
    ]
    edges = [{"sourceId": v, "destId": v + 1, "cost": 0.5} for v in range(3)]
    source = tmp_path / "chain.json"
    source.write_text(
        json.dumps({"maxSizePerFPGA": 10.0, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges}), "utf-8"
    )
    solved = run("solve", source, "--no-data-parallel", "--json")
    assert solved.returncode == 0, solved.stderr
    assert json.loads(solved.stdout)["time_per_sample_s"] == 0.0025
    toml, back = tmp_path / "chain.toml", tmp_path / "back.json"
    assert run("convert", source, toml).returncode == 0
    assert run("convert", toml, back, "--to", "dnn-partitioning").returncode == 0
    assert load(back) == load(source, bandwidth_bytes_per_s=1e9)


def test_six_towers_are_planned_and_so_are_their_blocks(tmp_path: Path) -> None:
    towers, plan = ROOT / "inputs" / "imagebind-huge.toml", tmp_path / "plan.json"
    proved = run("solve", towers, "--memory-limit", "4GB")
    assert proved.returncode == 0, proved.stderr
    assert "28,704,376 downsets: only those that a best plan can use are listed" in proved.stdout
    assert "optimal: 1.35 ms/microbatch" in proved.stdout
    solved = run("solve", towers, "--contract", "operators", "--out", plan)
    assert solved.returncode == 0, solved.stderr
    assert "feasible (blocks of operators): " in solved.stdout
    assert "111 layers in 32 blocks: 13,441 downsets instead of 28,704,376" in solved.stdout
    assert run("verify", towers, plan).returncode == 0
