"""Schemes as documents: every placement by the name of its tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from piper_ray.workloads.estimate.build import Estimate
from piper_ray.workloads.schemes.frontier import FoundScheme, KindSchemes
from piper_ray.workloads.schemes.scheme import Scheme

Document = dict[str, object]

EXACTNESS = (
    "Each scheme is within 0.01 % of the fastest of the rule table, with moves of one hop and this border, that holds "
    "as little. Not modelled: kernels that fuse or overlap beyond what the estimate says, and peaks within a pass."
)


def scheme_document(scheme: Scheme) -> Document:
    """Where each value lies, what is kept and what is done again. Times in s, sizes in bytes."""
    figures = scheme.figures
    return {
        "layer": scheme.kind,
        "tensor_parallel_degree": scheme.degree,
        "border": scheme.border.text,
        "steps": {
            step.name: {"forward": step.forward, "backward": step.backward, "again": step.again}
            for step in scheme.steps
        },
        "weights": {name: place.text for name, place in sorted(scheme.weights.items())},
        "kept": [{"value": name, "placement": place.text} for name, place in scheme.kept],
        "moves": [
            {"when": one.when, "value": one.value, "from": one.source.text, "to": one.target.text}
            for one in scheme.moves
        ],
        "time_s": figures.time_s,
        "forward_s": figures.forward_s,
        "backward_s": figures.backward_s,
        "once_a_batch_s": figures.once_s,
        "activation_bytes": figures.activation_bytes,
        "state_bytes": figures.state_bytes,
        "weights_bytes": figures.weights_bytes,
        "made_again_bytes": figures.again_bytes,
    }


def digest_of(scheme: Scheme) -> str:
    """Eight letters that tell one scheme from others, whatever their figures."""
    said = {key: value for key, value in scheme_document(scheme).items() if not key.endswith(("_s", "_bytes"))}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:8]


def found_document(one: FoundScheme) -> Document:
    """With its name, and the word that its TMPC's id has."""
    return {"name": one.name, "id": digest_of(one.scheme), **scheme_document(one.scheme)}


def schemes_document(estimate: Estimate, kinds: Sequence[KindSchemes], version: str, complete: bool) -> Document:
    """All that was found. complete: False where an interrupt left some out."""
    return {
        "format": "piper-ray/schemes",
        "version": 1,
        "piper_ray": version,
        "model": estimate.architecture.name,
        "gpu": estimate.setting.gpu.name,
        "sample": estimate.architecture.sample,
        "complete": complete,
        "exactness": EXACTNESS,
        "layers": [
            {
                "layer": one.kind.name,
                "tensor_parallel_degree": one.degree,
                "refused": one.refused or None,
                "schemes": [found_document(found) for found in one.found],
            }
            for one in kinds
        ],
    }
