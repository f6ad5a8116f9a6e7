"""What a checkpoint keeps, as files: evaluations as JSON, finished levels as Arrow (IPC, zstd). All figures exact."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from piper_ray.engine.checkpoint.identity import Facts
from piper_ray.engine.evaluation.outcome import EvaluationKey, Outcome, TracedStage
from piper_ray.engine.kernels.types import IndexArray, LevelStates

if TYPE_CHECKING:
    import pyarrow as pa

_IDENTITY, _KEY = b"identity", b"key"


Plain = Mapping[str, object]
"""What JSON holds."""


def encode_outcomes(
    identity: Facts, outcomes: Mapping[EvaluationKey, Outcome], results: Mapping[str, Plain] = MappingProxyType({})
) -> bytes:
    """The answers of a search, as JSON, under the identity that they belong to. results: of tasks, by their keys."""
    rows = [{"key": list(key), **_outcome_row(outcome)} for key, outcome in outcomes.items()]
    others = {"results": dict(results)} if results else {}
    return json.dumps({"identity": identity, "outcomes": rows, **others}).encode()


def identity_of_outcomes(content: bytes) -> Facts:
    """Of which input and options; in the same place in every format."""
    facts: Facts = json.loads(content)["identity"]
    return facts


def decode_outcomes(content: bytes) -> dict[EvaluationKey, Outcome]:
    """The answers in what ``encode_outcomes`` wrote, whatever their identity."""
    return {EvaluationKey(*row["key"]): _outcome(row) for row in json.loads(content)["outcomes"]}


def decode_results(content: bytes) -> dict[str, Plain]:
    """The results of tasks in what ``encode_outcomes`` wrote."""
    results: dict[str, Plain] = json.loads(content).get("results", {})
    return results


def _outcome_row(outcome: Outcome) -> dict[str, object]:
    return {
        "feasible": bool(outcome.feasible),
        "devices": int(outcome.devices),
        "stages": [_stage_row(stage) for stage in outcome.stages],
        "reach": outcome.reach,
        "live_downsets": int(outcome.live_downsets),
        "cells": int(outcome.cells),
        "tested": outcome.tested.tolist(),
    }


def _outcome(row: dict[str, object]) -> Outcome:
    figures = dict(row)
    del figures["key"]
    stages, tested = figures.pop("stages"), figures.pop("tested")
    assert isinstance(stages, list)
    return Outcome(
        **figures,  # type: ignore[arg-type]
        stages=tuple(_stage(*stage) for stage in stages),
        tested=np.array(tested, np.int64),
    )


def _stage_row(stage: TracedStage) -> list[int | str]:
    *numbers, budget_s = astuple(stage)
    return [*map(int, numbers), float(budget_s).hex()]


def _stage(outer: int, inner: int, variant: int, data_parallel_degree: int, later_sum: int, budget: str) -> TracedStage:
    return TracedStage(outer, inner, variant, data_parallel_degree, later_sum, float.fromhex(budget))


def encode_levels(identity: Facts, key: EvaluationKey, states: LevelStates) -> bytes:
    """One row with a list for each array, in the narrowest integers."""
    import pyarrow as pa

    row = pa.record_batch({name: _one_list(values) for name, values in states._asdict().items()})
    row = row.replace_schema_metadata({_IDENTITY: json.dumps(identity), _KEY: json.dumps(key)})
    sink = pa.BufferOutputStream()
    # In this thread alone, as in reading: one of Arrow's that outlived it could take the interpreter down at its exit.
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    with pa.ipc.new_file(sink, row.schema, options=options) as writer:
        writer.write_batch(row)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def identity_of_levels(content: bytes) -> Facts:
    """As ``identity_of_outcomes``."""
    facts: Facts = json.loads(_reader(content).schema.metadata[_IDENTITY])
    return facts


def decode_levels(content: bytes) -> tuple[EvaluationKey, LevelStates]:
    """The evaluation in what ``encode_levels`` wrote, and the states of its finished levels."""
    reader = _reader(content)
    row = reader.get_batch(0)
    arrays = [row.column(name).values.to_numpy().astype(np.int64) for name in LevelStates._fields]
    return EvaluationKey(*json.loads(reader.schema.metadata[_KEY])), LevelStates(*arrays)


def _reader(content: bytes) -> pa.ipc.RecordBatchFileReader:
    import pyarrow as pa

    return pa.ipc.open_file(content, options=pa.ipc.IpcReadOptions(use_threads=False))


def _one_list(values: IndexArray) -> pa.LargeListArray:
    """A column of one row. values: none is negative."""
    import pyarrow as pa

    narrow = values.astype(np.min_scalar_type(int(values.max(initial=0))))
    return pa.LargeListArray.from_arrays(pa.array([0, values.size], pa.int64()), pa.array(narrow))
