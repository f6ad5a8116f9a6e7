"""Files of a checkpoint: evaluations as JSON, finished levels as NumPy's npz in zstd. All figures are exact."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from piper_ray.engine.checkpoint.identity import Facts
from piper_ray.engine.evaluation.outcome import EvaluationKey, Outcome, TracedStage
from piper_ray.engine.evaluation.state_tables import narrow, wide
from piper_ray.engine.kernels.types import LevelStates

Plain = Mapping[str, object]
"""A value that JSON can hold."""


def encode_results(identity: Facts, results: Mapping[str, Plain]) -> bytes:
    """Encodes the answers of a search by their keys, as JSON, with the identity that they belong to."""
    return json.dumps({"identity": identity, "results": dict(results)}).encode()


def decode_results(content: bytes) -> tuple[Facts, dict[str, Plain]]:
    """Decodes what ``encode_results`` wrote: the identity, which has the same place in every format, and the
    answers."""
    document = json.loads(content)
    return document["identity"], document.get("results", {})


def outcome_row(outcome: Outcome) -> Plain:
    """Encodes an evaluation's answer."""
    return {**asdict(outcome), "tested": outcome.tested.tolist()}


def outcome_of(row: Any) -> Outcome:
    """Decodes what ``outcome_row`` encoded."""
    stages = tuple(TracedStage(**stage) for stage in row["stages"])
    return Outcome(**{**row, "stages": stages, "tested": np.array(row["tested"], np.int64)})


def encode_levels(identity: Facts, key: EvaluationKey, states: LevelStates) -> bytes:
    """Encodes the finished levels of an evaluation, in the narrowest integers."""
    import pyarrow as pa

    arrays, sink = io.BytesIO(), pa.BufferOutputStream()
    np.savez(arrays, head=json.dumps([identity, key]), **narrow(states)._asdict())
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(arrays.getbuffer())
    content: bytes = sink.getvalue().to_pybytes()
    return content


def decode_levels(content: bytes) -> tuple[Facts, EvaluationKey, LevelStates]:
    """Decodes what ``encode_levels`` wrote."""
    import pyarrow as pa

    with pa.CompressedInputStream(pa.BufferReader(content), "zstd") as stream:
        arrays = io.BytesIO(stream.read())
    with np.load(arrays) as file:
        identity, key = json.loads(str(file["head"]))
        return identity, EvaluationKey(*key), wide(LevelStates(*(file[name] for name in LevelStates._fields)))
