"""What a file is that is not what it was taken for, and which command takes it."""

from __future__ import annotations

from collections.abc import Mapping

HUGGING_FACE = "a Hugging Face config: `piper-ray estimate FILE --gpu NAME --nodes COUNT` makes a workload of it"

_SWEEP = frozenset({"workloads", "grid", "points"})
_WORKLOAD = frozenset({"types", "layers", "nodes", "edges"})
_CONFIG = frozenset({"model_type", "architectures", "num_hidden_layers", "transformers_version"})


def advice(document: Mapping[str, object]) -> str | None:
    """Such as "a plan: `piper-ray verify INPUT PLAN` checks it"; None for what nobody here knows."""
    if _CONFIG & document.keys():
        return HUGGING_FACE
    if "stages" in document or document.get("schema") == "piper-ray/solution":
        return "a plan: `piper-ray verify INPUT PLAN` checks one, `simulate` and `report` show what it does"
    if _SWEEP & document.keys():
        return "a sweep: `piper-ray sweep FILE --storage DIR` solves its points"
    if _WORKLOAD & document.keys():
        return "a workload: `piper-ray solve FILE` plans it"
    schema = document.get("schema")
    if isinstance(schema, str) and schema.startswith("piper-ray/"):
        return f"what piper-ray {schema.removeprefix('piper-ray/')} wrote"
    return None
