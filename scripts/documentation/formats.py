"""The reference of file formats and tables, from the models that read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from inspect import cleandoc
from typing import Any

from piper_ray.sweep import columns, read
from piper_ray.workloads.estimate.config import model_names
from piper_ray.workloads.estimate.hardware import Gpu, load_hardware
from piper_ray.workloads.formats import workload_schema
from scripts.documentation import schemas


def json_schemas() -> str:
    """Markdown: for each document a table of its fields, and of those of its parts."""
    return "\n".join(
        line for name, model in schemas.SCHEMAS.items() for line in _schema_lines(name, schemas.schema_of(model))
    )


def workload_form() -> str:
    """Markdown: the compact workload, as its reader describes it."""
    return _described(workload_schema.__doc__, "toml")


def sweep_form() -> str:
    """Markdown: the file of a sweep, as its reader describes it."""
    return _described(read.__doc__, "toml")


def dataset_columns() -> str:
    """Markdown: the columns of a sweep's dataset: those of all rows, and those of plans alone."""
    lines = [_described(columns.__doc__, "text")]
    for of, head in ((None, "column"), ("plans", "column of plans")):
        lines += [f"\n| {head} | type | meaning |", "|---|---|---|"]
        lines += [
            f"| `{name}` | {said['type']}{'' if 'always' in said else ', may be null'} | {said['meaning']} |"
            for name, said in columns.COLUMNS.items()
            if said.get("of") == of
        ]
    return "\n".join(lines)


def models() -> str:
    """Markdown: models known by name."""
    return ", ".join(f"`{name}`" for name in model_names()) + "."


def _of_node(gpu: Gpu) -> str:
    domain = gpu.domain_of(None)
    return f"{gpu.gpus_per_node}, {domain} in a domain" if domain > gpu.gpus_per_node else str(gpu.gpus_per_node)


def gpus() -> str:
    """Markdown: GPUs of the table of hardware."""
    lines = ["| name | GPU | memory | of a node |", "|---|---|---:|---:|"]
    for key, gpu in load_hardware().gpus.items():
        lines.append(f"| `{key}` | {gpu.name} | {gpu.memory_bytes / 1e9:g} GB | {_of_node(gpu)} |")
    return "\n".join(lines)


def _described(docstring: str | None, language: str) -> str:
    """A module's docstring: its first line is about the module, indented blocks are in ``language``."""
    paragraphs = cleandoc(docstring or "").split("\n\n")[1:]
    found: list[str] = []
    for paragraph in paragraphs:
        indented = paragraph.startswith("    ")
        if indented and found and found[-1].endswith("\n```"):  # the same block, beyond an empty line
            found[-1] = f"{found[-1][: -len('```')]}\n{cleandoc(paragraph).replace('``', '')}\n```"
        elif indented:
            found.append(f"```{language}\n{cleandoc(paragraph).replace('``', '')}\n```")
        else:
            found.append(paragraph.replace("*", "\\*").replace("<", "\\<"))
    return "\n\n".join(found)


def _schema_lines(name: str, document: Mapping[str, Any]) -> list[str]:
    lines = [f"\n## {name}\n"]
    named = document.get("$defs", {})
    parts = {document.get("title", name): document, **named}
    for title, part in parts.items():
        if "properties" not in part:
            continue
        required = set(part.get("required", ()))
        lines += [f"\n**{title}**\n", "| field | type | meaning |", "|---|---|---|"]
        for field, about in part["properties"].items():
            shown = f"`{field}`" if field in required else f"`{field}` (may be left out)"
            meaning = str(about.get("description", "")).replace("|", "\\|").replace("<", "\\<").replace("``", "`")
            lines.append(f"| {shown} | {_type(about, named)} | {meaning} |")
    return lines


def _type(about: Mapping[str, Any], named: Mapping[str, Any]) -> str:
    """named: parts of the document, by their titles."""
    if "$ref" in about:
        title = str(about["$ref"]).rpartition("/")[2]
        return _type(named[title], named) if "enum" in named[title] else title
    if "anyOf" in about:
        return " or ".join(_type(one, named) for one in about["anyOf"])
    if "const" in about:
        return f"`{json.dumps(about['const'])}`"
    if "enum" in about:
        return ", ".join(f"`{json.dumps(value)}`" for value in about["enum"])
    if about.get("type") == "array" and "items" in about:
        return f"list of {_type(about['items'], named)}"
    if about.get("type") == "object" and isinstance(about.get("additionalProperties"), dict):
        return f"map to {_type(about['additionalProperties'], named)}"
    return str(about.get("type", "any"))
