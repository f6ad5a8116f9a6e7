"""Schemes kept on disk, by what determines them: the graph, all its prices, and the version of this package.

An entry begins with a checksum of the rest. An entry is checked like any other scheme: it has to be valid by the rule
table (``check``), at today's prices. Other entries count as missing, and schemes that cannot be written are found
again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from piper_ray.model.errors import UsageError
from piper_ray.storage.files import write_atomically
from piper_ray.version import __version__
from piper_ray.workloads.schemes import check, program, rules
from piper_ray.workloads.schemes.document import in_full
from piper_ray.workloads.schemes.scheme import Move, PricedGraph, Scheme, SchemeFigures, StepScheme


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "piper_ray" / "schemes"


def key_of(of: PricedGraph, degree: int, in_flight: Sequence[float]) -> str:
    """The key of everything that schemes depend on. Other sources of the rules or of the program give another key,
    too."""
    sources = [Path(module.__file__ or "").read_text(encoding="utf-8") for module in (rules, program, check)]
    asked = repr((__version__, sources, degree, tuple(in_flight), of.graph, of.prices))
    return hashlib.sha256(asked.encode()).hexdigest()


def read_schemes(key: str, of: PricedGraph, degree: int) -> list[Scheme] | None:
    """The kept schemes; None if there are no valid ones."""
    try:
        checksum, _, text = (_folder() / key).read_text(encoding="utf-8").partition("\n")
        if checksum != hashlib.sha256(text.encode()).hexdigest():
            return None
        found = [scheme_of(document) for document in json.loads(text)]
        faulty = any(one.degree != degree or check.faults_of(in_full(one, of)) for one in found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return None if faulty else found


def keep_schemes(key: str, schemes: Sequence[Scheme], of: PricedGraph) -> None:
    """Writes an entry, either completely or not at all."""
    text = json.dumps([in_full(one, of) for one in schemes])
    with contextlib.suppress(OSError):
        _folder().mkdir(parents=True, exist_ok=True)
        write_atomically(_folder() / key, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


def scheme_of(document: Mapping[str, Any]) -> Scheme:
    """Makes a scheme from its document."""
    at = check.placement_of
    return Scheme(
        kind=document["layer"],
        degree=document["tensor_parallel_degree"],
        border=at(document["border"]),
        steps=tuple(
            StepScheme(name, how["forward"], how["backward"], how.get("again"))
            for name, how in document["steps"].items()
        ),
        weights={name: at(text) for name, text in document["weights"].items()},
        kept=tuple((one["value"], at(one["placement"])) for one in document["kept"]),
        moves=tuple(Move(one["when"], one["value"], at(one["from"]), at(one["to"])) for one in document["moves"]),
        figures=SchemeFigures(
            forward_s=document["forward_s"],
            backward_s=document["backward_s"],
            weight_s=document["weight_gradients_s"],
            once_s=document["once_a_batch_s"],
            activation_bytes=document["activation_bytes"],
            state_bytes=document["state_bytes"],
            weights_bytes=document["weights_bytes"],
            again_bytes=document["made_again_bytes"],
            copied=document["copied_parameters"],
        ),
    )


def planned_schemes(documents: Mapping[str, Mapping[str, Any]], of: PricedGraph, degree: int) -> tuple[Scheme, ...]:
    """The schemes of a plan for the same layer and degree. Raises UsageError for one that is not valid at today's
    prices."""
    found = []
    for word, document in documents.items():
        if (document.get("layer"), document.get("tensor_parallel_degree")) != (of.graph.name, degree):
            continue
        try:
            scheme = scheme_of(document)
            faults = check.faults_of({**document, **in_full(scheme, of)}, {"time_s": document["time_s"]})
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
            faults = [f"not a scheme as piper-ray schemes writes it ({type(error).__name__})"]
        if faults:
            text = f"{word} of the plan is not of this model, GPU and software as they are estimated now:"
            raise UsageError("\n  ".join([text, *faults]))
        found.append(scheme)
    return tuple(found)
