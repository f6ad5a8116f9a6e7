"""An estimate in words: the header of the file it is written to, the lines on the screen, and each figure of a layer
with its formula and its numbers.
"""

from __future__ import annotations

from piper_ray.model.cluster import Link
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import given_size_text, range_text
from piper_ray.model.mode import ALL_REPLICAS, Recomputation, Sharding
from piper_ray.report.document import workload_text
from piper_ray.report.templates import template
from piper_ray.workloads.estimate import costs, exchanges, memory, roofline
from piper_ray.workloads.estimate.build import Estimate
from piper_ray.workloads.estimate.hardware import Training
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.offered import attends
from piper_ray.workloads.estimate.operators import LayerKind, Split, number_text, substituted
from piper_ray.workloads.formats.workload_writer import type_keys


def file_text(result: Estimate, command: str) -> str:
    """The workload as TOML under a header that says how to make it again and how to read it."""
    modes = [mode for of_kind in result.modes.values() for mode in of_kind]
    header = template(__package__, "estimate_header.txt.jinja").render(
        result=result,
        command=command,
        parameters=_parameters_text(result),
        adapted=_adapted(result),
        shards=max(mode.optimizer_shards for mode in modes),
        offload=any(mode.offload for mode in modes),
        links=_links(result),
    )
    return workload_text(result.instance, header.splitlines())


def summary_lines(result: Estimate) -> list[str]:
    """What was estimated, and whether memory can be enough."""
    samples, tokens = result.instance.batch.samples, result.instance.batch.tokens_per_sample
    text = template(__package__, "estimate_summary.txt.jinja").render(
        result=result,
        parameters=_parameters_text(result),
        tmpcs=sum(len(row) for layer in result.instance.layers for row in layer.tmpcs.values()),
        links=_links(result),
        work_units=[(samples, "sample"), (samples and tokens and samples * tokens, "token")],
    )
    return text.splitlines()


def _parameters_text(result: Estimate) -> str:
    further = result.architecture.predictor_parameters
    text = f"{result.architecture.parameters:,} parameters"
    text += f" and {further:,} that only training has" if further else ""
    trained = result.architecture.trained_parameters
    return f"{text}, {trained:,} of them trained" if _adapted(result) else text


def _adapted(result: Estimate) -> bool:
    """Whether adapters are trained and not the model itself."""
    architecture = result.architecture
    return architecture.trained_parameters < architecture.parameters


def _links(result: Estimate) -> list[tuple[Link, str]]:
    """Each link of the cluster, innermost first: with what it is and its rate in one direction; its own counts what
    comes in and what goes out."""
    found = []
    for link in result.instance.cluster.links:
        rate = f"{given_size_text(link.bandwidth_bytes_per_s / 2.0)}/s"
        within = f"{result.setting.gpu.link} within {link.devices}, {rate}"
        found.append((link, within if link.devices is not None else f"network between nodes, {rate} a GPU"))
    return found


def explanation_lines(result: Estimate, layer: str) -> list[str]:
    """All about one kind of layer; ``layer`` is its key, its name, its type in the file or the number of a layer.

    Raises UsageError.
    """
    kind = _find(result, layer)
    numbers = [index for index, node in enumerate(result.architecture.nodes) if node.kind.key == kind.key]
    divisions: dict[LayerMode, list[LayerMode]] = {}
    for mode in result.modes[kind.key]:
        divisions.setdefault(_divided(mode), []).append(mode)
    text = template(__package__, "estimate_layer.txt.jinja").render(
        result=result,
        kind=kind,
        layers=range_text(numbers),
        symbols=_used_symbols(kind),
        divisions=divisions.items(),
        kept_terms=_kept_terms,
        numbers_held=_numbers_held,
        state_parts=_states_alone(result.setting.training),
        times=_times_s,
        attends=attends,
        exchanges=exchanges,
        memory=memory,
        pricing=costs,
        roofline=roofline,
        number_text=number_text,
        substituted=substituted,
        full=Recomputation.FULL,
        sharding=Sharding,
        all_replicas=ALL_REPLICAS,
        whole_sequence=Split.SEQUENCE,
    )
    return text.splitlines()


def _divided(mode: LayerMode) -> LayerMode:
    """How passes are divided over devices, without what is kept and shared between them."""
    return LayerMode(
        degree=mode.degree,
        sequence_parallel=mode.sequence_parallel,
        context=mode.context,
        experts=mode.experts,
        expert_tensor=mode.expert_tensor,
        gathered=mode.gathered,
    )


def _find(result: Estimate, layer: str) -> LayerKind:
    kinds = result.architecture.kinds
    nodes = result.architecture.nodes
    if layer.isdecimal() and int(layer) < len(nodes):
        return nodes[int(layer)].kind
    for kind in kinds:
        if layer in (kind.key, kind.name):
            return kind
    for number, key in type_keys(result.instance).items():
        if key == layer:
            return nodes[number].kind
    raise UsageError(
        f"--explain {layer}: no such layer; expected a number from 0 to {len(nodes) - 1} or one of "
        f"{', '.join(kind.key for kind in kinds)}"
    )


def _used_symbols(kind: LayerKind) -> dict[str, float]:
    """With their values: those that stand in a formula of the kind."""
    used = {
        word
        for operator in kind.operators
        for formula in (
            operator.parameters,
            operator.forward_bytes,
            *(saved.bytes for saved in operator.saved),
            *(side for p in operator.products for side in (p.rows, p.columns, p.depth, p.count)),
        )
        for word in formula.split()
    }
    return {symbol: value for symbol, value in kind.symbols.items() if symbol in used}


def _numbers_held(kind: LayerKind, mode: LayerMode) -> list[tuple[memory.Numbers, str]]:
    """Dense parameters on a device, and experts' apart where they are shared out otherwise; with whose they are."""
    dense, routed = memory.numbers_on_device(kind, mode)
    if mode.state_parts(routed=True) == mode.state_parts(routed=False) or not routed.held:
        return [(memory.Numbers(False, dense.held + routed.held, dense.trained + routed.trained), "")]
    return [(dense, ""), (routed, " of experts")]


def _states_alone(training: Training) -> dict[str, Training]:
    """Each with one of the states alone."""
    nothing = Training(weight_bytes=0.0, gradient_bytes=0.0, optimizer_bytes=0.0)
    return {
        "weights": nothing.model_copy(update={"weight_bytes": training.weight_bytes}),
        "gradients": nothing.model_copy(update={"gradient_bytes": training.gradient_bytes}),
        "optimizer state": nothing.model_copy(update={"optimizer_bytes": training.optimizer_bytes}),
    }


def _kept_terms(kind: LayerKind, mode: LayerMode) -> list[tuple[float, int]]:
    """Bytes that a microbatch keeps, and by how many devices each is divided."""
    if mode.recomputation == Recomputation.FULL:
        return [(kind.value(kind.checkpoint), mode.parts(Split.SEQUENCE))]
    saved = [(operator, item) for operator in kind.operators for item in operator.saved if not mode.does_again(item)]
    return [(kind.value(item.bytes), memory.kept_parts(operator, item, mode)) for operator, item in saved]


def _times_s(found: costs.LayerCosts) -> list[tuple[str, float]]:
    """What a layer's time is made of, as far as there is such."""
    terms = [
        ("forward", found.forward_s),
        ("backward", found.backward_s),
        ("again", found.recompute_s),
        ("exchanges", found.exchange_forward_s + found.exchange_backward_s + found.exchange_recompute_s),
        ("offload", found.offload_s),
        ("waiting for the host", found.idle_forward_s + found.idle_backward_s),
        ("gathering sharded weights", found.gather_forward_s + found.gather_backward_s),
    ]
    return [(name, seconds) for name, seconds in terms if seconds or name == "forward"]
