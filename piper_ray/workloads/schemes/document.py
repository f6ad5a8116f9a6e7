"""Schemes as documents: every placement by the name of its tensor."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from piper_ray.model.fields import plain_fields
from piper_ray.workloads.schemes import rules
from piper_ray.workloads.schemes.graph import Step, TensorPlacement, Value
from piper_ray.workloads.schemes.layers import BORDERS
from piper_ray.workloads.schemes.prices import PassPhase
from piper_ray.workloads.schemes.rules import strategies
from piper_ray.workloads.schemes.scheme import PricedGraph, Scheme

if TYPE_CHECKING:
    from piper_ray.workloads.schemes.frontier import KindSchemes

Document = dict[str, object]

_PHASES = {
    "forward": PassPhase.FORWARD,
    "again": PassPhase.FORWARD,
    "kept": PassPhase.KEPT,
    **dict.fromkeys(("gradient", "part", "weight"), PassPhase.GRADIENT),
}

EXACTNESS = (
    "Whatever memory costs, no scheme of the rule table, with moves of one hop and this border, beats all of these by "
    "more than 0.1 % of the time. Not modelled: kernels that fuse or overlap beyond what the estimate says, and peaks "
    "within a pass."
)


def claim_document(borders: Iterable[TensorPlacement] = BORDERS) -> Document:
    """Describes the schemes that a proof covers: the rule table, by eight letters that distinguish it from others, and
    borders: the placements of values between layers."""
    table = hashlib.sha256(Path(rules.__file__ or "").read_bytes()).hexdigest()[:8]
    return {"rule_table": table, "between_layers": [border.text for border in borders]}


def table_text(borders: Iterable[TensorPlacement] = BORDERS) -> str:
    """Describes in words the schemes that a proof covers. borders: the placements of values between layers."""
    between = " or ".join("in shards of tokens" if border.axis else "replicated" for border in borders)
    return (
        f"schemes of the rule table {claim_document()['rule_table']}, with moves of one hop, and between layers values "
        f"{between}"
    )


def saved_text(save: float) -> str:
    """What is proved about the schemes of a plan's layers. save: the share of its slowest stage's time."""
    less = "even 0.1 %" if save < 1e-3 else f"as much as {math.ceil(1000.0 * save) / 10.0} %"
    return f"no {table_text()}, make the slowest stage of this plan {less} faster within the memory"


def scheme_document(scheme: Scheme) -> Document:
    """The scheme: the placement of each value, what is kept and what is recomputed. Times in s, sizes in bytes."""
    figures = scheme.figures
    return {
        "layer": scheme.kind,
        "tensor_parallel_degree": scheme.degree,
        "border": scheme.border.text,
        "steps": {
            step.name: {"forward": step.forward, "backward": step.backward}
            | ({} if step.again is None else {"again": step.again})
            for step in scheme.steps
        },
        "weights": {name: place.text for name, place in sorted(scheme.weights.items())},
        "kept": [{"value": name, "placement": place.text} for name, place in scheme.kept],
        "moves": _moves(scheme),
        **plain_fields(figures, ("time_s", "forward_s", "backward_s")),
        "once_a_batch_s": figures.once_s,
        "weight_gradients_s": figures.weight_s,
        **plain_fields(figures, ("activation_bytes", "state_bytes", "weights_bytes")),
        "made_again_bytes": figures.again_bytes,
        "copied_parameters": figures.copied,
    }


def in_full(scheme: Scheme, of: PricedGraph) -> Document:
    """The scheme with the layer's operators and their costs, so that ``check`` needs nothing else."""
    graph, prices = of.graph, of.prices
    document = scheme_document(scheme)
    moves = [
        {**said, "seconds": prices.move_s(graph.values[one.value], one.source, one.target, _PHASES[one.when])}
        for said, one in zip(_moves(scheme), scheme.moves, strict=True)
    ]
    steps = {}
    for step, how in zip(graph.steps, scheme.steps, strict=True):
        used = {how.forward, how.backward, how.again}
        texts = {one.text: prices.step(step, one) for one in strategies(step, graph, scheme.degree) if one.text in used}
        forward, backward = texts[how.forward], texts[how.backward]
        again = None if how.again is None else texts[how.again]
        assert forward is not None
        assert backward is not None
        steps[step.name] = {
            "forward": [forward.forward_s, forward.forward_host_s],
            "backward": [backward.backward_s, backward.backward_host_s],
            "weight_gradients": backward.weight_s,
            **({} if again is None else {"again": [again.forward_s, again.again_host_s]}),
        }
    return {
        **document,
        "moves": moves,
        "arriving": list(graph.arriving),
        "leaving": list(graph.leaving),
        "sizes": dict(graph.sizes),
        "values": {name: _value(value) for name, value in graph.values.items()},
        "operators": [_operator(step) for step in graph.steps],
        "prices": {
            "state_bytes": prices.weight.state,
            "synchronised_bytes": prices.weight.synchronised,
            "steps": steps,
            "once_s": {weight.name: prices.once_s(weight) for weight in graph.weights},
        },
    }


def _value(value: Value) -> Document:
    return {
        "axes": list(value.axes),
        "bytes": value.bytes,
        **({"parameters": value.parameters} if value.parameters else {}),
        **({} if value.has_gradient else {"gradient": False}),
    }


def _operator(step: Step) -> Document:
    lists = {name: list(getattr(step, name)) for name in ("inputs", "outputs", "along", "backward_reads")}
    said = {name: names for name, names in lists.items() if names or name in ("inputs", "outputs")}
    return {"name": step.name, "family": step.family.value, **said, **({"ring": True} if step.on_ring else {})}


def _moves(scheme: Scheme) -> list[Document]:
    return [
        {"when": one.when, "value": one.value, "from": one.source.text, "to": one.target.text} for one in scheme.moves
    ]


def digest_of(scheme: Scheme) -> str:
    """Eight letters that distinguish the scheme from others, for any figures."""
    said = {
        key: value
        for key, value in scheme_document(scheme).items()
        if not key.endswith(("_s", "_bytes", "_parameters"))
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class SchemesSubject:
    """The model, a microbatch in words, and the GPU."""

    model: str
    sample: str
    gpu: str


def schemes_document(
    of: SchemesSubject, kinds: Sequence[KindSchemes], version: str, complete: bool, save: float | None = None
) -> Document:
    """All schemes that were found. complete: False where an interrupt left some out. save: as in ``saved_text``."""
    return {
        "format": "piper-ray/schemes",
        "version": 1,
        "piper_ray": version,
        "model": of.model,
        "gpu": of.gpu,
        "sample": of.sample,
        "complete": complete,
        "exactness": EXACTNESS,
        **claim_document(),
        **({} if save is None else {"save_at_most": save}),
        "layers": [
            {
                "layer": one.name,
                "tensor_parallel_degree": one.degree,
                "refused": one.refused or None,
                "schemes": [
                    {"name": found.name, "id": digest_of(found.scheme), **in_full(found.scheme, one.priced)}
                    for found in one.found
                    if one.priced is not None
                ],
            }
            for one in kinds
        ],
    }
