"""What a checkpoint keeps, as files: evaluations as JSON, finished levels as Arrow (IPC, zstd). All figures exact."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from piper_ray.engine.checkpoint.identity import Facts
from piper_ray.engine.evaluation.outcome import EvaluationKey, Outcome, TracedStage
from piper_ray.engine.kernels.types import IndexArray, LevelStates

if TYPE_CHECKING:
    import pyarrow as pa

_IDENTITY, _KEY = b"identity", b"key"


Plain = Mapping[str, object]
"""What JSON holds."""


def encode_results(identity: Facts, results: Mapping[str, Plain]) -> bytes:
    """The answers of a search by their keys, as JSON, under the identity that they belong to."""
    return json.dumps({"identity": identity, "results": dict(results)}).encode()


def decode_results(content: bytes) -> tuple[Facts, dict[str, Plain]]:
    """What ``encode_results`` wrote: of which input and options, in the same place in every format, and the answers."""
    document = json.loads(content)
    return document["identity"], document.get("results", {})


def outcome_row(outcome: Outcome) -> Plain:
    """An evaluation's answer."""
    return {**asdict(outcome), "tested": outcome.tested.tolist()}


def outcome_of(row: Any) -> Outcome:
    """The answer in what ``outcome_row`` made."""
    stages = tuple(TracedStage(**stage) for stage in row["stages"])
    return Outcome(**{**row, "stages": stages, "tested": np.array(row["tested"], np.int64)})


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
    """Of which input and options; in the same place in every format."""
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
