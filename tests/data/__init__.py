"""Where restated figures and golden values lie, and how they are read; README.md says what they are and from where."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from piper_ray.workloads.estimate.config import known_models
from piper_ray.workloads.formats.documents import parse_toml

DATA = Path(__file__).resolve().parent
INPUTS = DATA.parents[1] / "inputs"

WORKLOADS = {
    "bert32a100": INPUTS / "bert32-a100.toml",
    "gnmt": DATA / "workloads" / "gnmt.toml",
    "resnet": DATA / "workloads" / "resnet.toml",
}
"""Those published with Piper, by the names of their files there."""
INCEPTION = DATA / "workloads" / "inception_v3.toml"
"""A profile of PipeDream's, as a workload."""
PROFILES = {path.stem: path for path in sorted((DATA / "profiles").glob("*.tsv"))}
"""Others, as tables: ``profile_text`` has them in PipeDream's form."""
KUBERAY_RAYJOB = DATA / "kuberay" / "rayjob-v1.json"

Record = dict[str, Any]


def goldens(name: str) -> list[Record]:
    """The records of ``goldens/NAME.jsonl``, or of ``NAME.jsonl.gz``."""
    path = DATA / "goldens" / f"{name}.jsonl"
    if path.is_file():
        text = path.read_text(encoding="utf-8")
    else:
        text = gzip.decompress(path.with_suffix(".jsonl.gz").read_bytes()).decode()
    return [json.loads(line) for line in text.splitlines()]


def runs(name: str) -> list[Record]:
    """The training runs of ``runs/NAME.json``, each with its model and with what all runs of its source share."""
    document = json.loads((DATA / "runs" / f"{name}.json").read_text(encoding="utf-8"))
    found = []
    for source in document["sources"]:
        origin = {key: source[key] for key in ("source", "citation", "verified")}
        for own in source["runs"]:
            run = {**origin, **source["of_all"], **own}
            found.append({**run, "model": {"name": run["model"], **document["models"][run["model"]]}})
    return found


def profile_text(name: str) -> str:
    """A table of ``PROFILES`` as PipeDream writes profiles: a line for each node, then one for each edge."""
    header, *rows = (line.split("\t") for line in PROFILES[name].read_text(encoding="utf-8").splitlines())
    nodes, edges = [], []
    for row in rows:
        cells = dict(zip(header, row, strict=True))
        node = cells["node"]
        outputs = [f"{float(size):.1f}" for size in cells["activation_bytes"].split(";")]
        activation = outputs[0] if len(outputs) == 1 else f"[{'; '.join(outputs)}]"
        nodes.append(
            f"node{node} -- {cells['operation']} -- forward_compute_time={float(cells['forward_ms']):.3f}, "
            f"backward_compute_time={float(cells['backward_ms']):.3f}, activation_size={activation}, "
            f"parameter_size={float(cells['parameter_bytes']):.3f}"
        )
        # Edges stand by the node that they leave (feeds) or by the one that they reach (after), as in the source.
        edges += [f"\tnode{node} -- node{other}" for other in cells.get("feeds", "-").split() if other != "-"]
        edges += [f"\tnode{other} -- node{node}" for other in cells.get("after", "-").split() if other != "-"]
    return "\n".join([*nodes, *edges]) + "\n"


def published_models() -> dict[str, Record]:
    """Configs and published numbers of parameters: those of ``model_parameters.toml``, and of models known by name."""
    text = (DATA / "model_parameters.toml").read_text(encoding="utf-8")
    known = {name: entry for name, entry in known_models().items() if "parameters" in entry}
    return {**parse_toml("model_parameters.toml", text), **known}  # type: ignore[dict-item]
