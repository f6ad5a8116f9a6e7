"""All layers of a traced model, each kind measured once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from piper_ray.model.errors import Fault, InputError
from piper_ray.workloads.measure.factory import place_of, words_of
from piper_ray.workloads.measure.graph import TracedLayer, signature_of
from piper_ray.workloads.measure.passes import Clock, Repeats, kept_of, leaves_of, parameters_of, passes_of
from piper_ray.workloads.measure.store import LayerFigures, Store
from piper_ray.workloads.measure.tracer import out_of_memory


@dataclass(frozen=True)
class Measured:
    """A layer of the graph with its figures; layers of one signature share them."""

    layer: TracedLayer
    signature: str
    figures: LayerFigures


def measured_layers(
    spec: str,
    layers: Sequence[TracedLayer],
    repeats: Repeats,
    clock: Clock,
    store: Store,
    advance: Callable[[TracedLayer], None],
) -> list[Measured]:
    """Figures of every layer, in order. ``advance`` is called before each. Raises InputError and LimitError."""
    found: list[Measured] = []
    for layer in layers:
        advance(layer)
        gradients = [
            tensor.is_floating_point()
            and source.layer is not None
            and found[source.layer].figures.output_gradients[source.output]
            for source, tensor in zip(layer.sources, layer.inputs, strict=True)
        ]
        signature = signature_of(layer, gradients)
        figures = store.get(signature)
        if figures is None:
            figures = _figures_of(spec, layer, gradients, repeats, clock)
            store.add(signature, figures)
        found.append(Measured(layer, signature, figures))
    return found


def _figures_of(
    spec: str, layer: TracedLayer, gradients: Sequence[bool], repeats: Repeats, clock: Clock
) -> LayerFigures:
    try:
        leaves, given = leaves_of(layer.inputs, gradients)
        versions = [tensor._version for tensor in given]
        kept, output_gradients = kept_of(layer, given)
        # What a layer has written into cannot be its checkpoint.
        intact = versions == [tensor._version for tensor in given]
        with torch.no_grad():
            output_bytes = tuple(output.numel() * output.element_size() for output in layer.module(*leaves))
        del leaves, given
        plain, recomputed = passes_of(layer, gradients, repeats, clock, recompute=intact and kept.inputs < kept.saved)
        return LayerFigures(
            plain=plain,
            recomputed=recomputed,
            kept=kept,
            parameters=tuple(parameters_of(layer.module)),
            output_gradients=tuple(output_gradients),
            output_bytes=output_bytes,
            input_gradient_bytes=sum(
                tensor.numel() * tensor.element_size()
                for tensor, wanted in zip(layer.inputs, gradients, strict=True)
                if wanted
            ),
        )
    except torch.OutOfMemoryError as error:
        raise out_of_memory(spec, f"layer {layer.path}") from error
    except Exception as error:
        where = place_of(error)
        raise InputError(spec, [Fault(layer.path, words_of(error) + (f" ({where})" if where else ""))]) from error
