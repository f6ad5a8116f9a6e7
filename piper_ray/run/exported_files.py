"""The plan in a folder that ``export --to torch`` wrote: its stages and its lists of passes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from piper_ray.model.errors import InputError
from piper_ray.model.figures import printable
from piper_ray.run.job import LayerJob, Pass, PipelinePlan, Replicas
from piper_ray.run.lists import torch_lists
from piper_ray.simulate.actions import ActionKind
from piper_ray.workloads.formats.documents import parse_json, read_text, refuse, repeated_keys
from piper_ray.workloads.formats.faults import Faults
from piper_ray.workloads.formats.fields import Count, Open

STAGES, LISTS = "stages.json", "schedule.csv"
"""Files of the folder."""

_PASS = re.compile(r"(\d+)([FBIW])(\d+)")
_WHOLE = ({ActionKind.F}, {ActionKind.B, ActionKind.I}, {ActionKind.B, ActionKind.W})
"""Kinds of passes; from each set a stage has one pass for each microbatch."""


class _ExportedStage(Open):
    pipeline_rank: int = Field(ge=0, description="a whole number from 0 on")
    modules: list[str] = Field(min_length=1, description="a list of module paths")
    calls: list[int] = Field(description="a list of whole numbers, one for each module")
    recomputed: list[bool] = Field(description="a list of true or false, one for each module")


class _ExportedDocument(Open):
    pipeline_ranks: Count
    data_parallel_degree: Count
    microbatches: Count
    weight_type: Literal["", "float32", "bfloat16", "float16"] = Field("", description="float32, bfloat16 or float16")
    stages: list[_ExportedStage] = Field(min_length=1, description="a list of stages")


def read_folder(folder: Path) -> PipelinePlan:
    """Reads the folder. Raises InputError for files that are missing or were changed."""
    source = str(folder / STAGES)
    document = parse_json(source, read_text(source))
    faults = Faults(repeated_keys(document))
    read = faults.model(_ExportedDocument, document, "")
    if read is None:
        raise InputError(source, faults.found)
    stages = []
    for number, stage in enumerate(read.stages):
        lengths = len(stage.modules), len(stage.calls), len(stage.recomputed)
        if len(set(lengths)) > 1:
            what = "{} modules, {} calls, {} recomputed; expected one of each for each layer".format(*lengths)
            faults.at(f"stages[{number}]", what)
        if stage.pipeline_rank >= read.pipeline_ranks:
            what = f"{stage.pipeline_rank}; expected less than the {read.pipeline_ranks} pipeline ranks"
            faults.at(f"stages[{number}].pipeline_rank", what)
        stages.append(tuple(map(LayerJob, stage.modules, stage.calls, stage.recomputed)))
    if faults:
        raise InputError(source, faults.found)
    held = [
        [number for number, stage in enumerate(read.stages) if stage.pipeline_rank == place]
        for place in range(read.pipeline_ranks)
    ]
    passes, texts = _passes(folder / LISTS, held, read.microbatches)
    return PipelinePlan(tuple(stages), passes, texts, read.data_parallel_degree, Replicas.DDP, read.weight_type)


def _passes(
    path: Path, held: Sequence[Sequence[int]], microbatches: int
) -> tuple[tuple[tuple[Pass, ...], ...], tuple[tuple[str, ...], ...]]:
    """The lists of all ranks, first without and then with the actions between passes. held: the stages of each rank.

    Raises InputError unless they contain each pass once, and between passes the actions that torch needs.
    """
    rows = read_text(str(path)).splitlines()
    if len(rows) != len(held):
        refuse(str(path), "", f"{len(rows)} lines; expected one for each of {len(held)} ranks of a pipeline")
    lists, texts = list[tuple[Pass, ...]](), [tuple(text.strip() for text in row.split(",")) for row in rows]
    for place, (row, stages) in enumerate(zip(texts, held, strict=True)):
        found = [_PASS.fullmatch(text) for text in row]
        passes = [(ActionKind[one[2]], int(one[1]), int(one[3])) for one in found if one is not None]
        expected = [(stage, k) for stage in stages for k in range(microbatches)]
        if any(sorted((stage, k) for kind, stage, k in passes if kind in kinds) != expected for kinds in _WHOLE):
            what = f"not each pass of stages {', '.join(map(str, stages))} for {microbatches} microbatches once"
            refuse(str(path), f"line {place + 1}", f"{what}; expected the list that was exported")
        lists.append(tuple(passes))
    for place, (row, own) in enumerate(zip(texts, torch_lists(lists), strict=True)):
        if sorted(row) != sorted(own):
            odd = printable(min(set(row) ^ set(own), default="an action twice"))
            what = f"{odd} is missing or too much; expected the list that was exported, with sends and receives"
            refuse(str(path), f"line {place + 1}", what)
    return tuple(lists), tuple(texts)
