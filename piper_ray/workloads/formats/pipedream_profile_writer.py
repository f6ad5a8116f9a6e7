"""Writing PipeDream's profiles (``graph.txt``; see ``profile``)."""

from __future__ import annotations

import math

from piper_ray.model.instance import Instance, Tmpc
from piper_ray.workloads.formats.inflight import InFlight
from piper_ray.workloads.formats.pipedream_profile import TMPC_ID

_NEIGHBOURS = 2
"""Of a product by 1000, on either side: what divided by 1000 gives the factor again is among them."""


def losses(instance: Instance) -> list[str]:
    """What of ``instance`` a profile cannot hold, in words. K, N, M and B are never in one."""
    tmpcs = [(t, tmpc) for layer in instance.layers for t, listed in layer.tmpcs.items() for tmpc in listed]
    found = []
    if any(t > 1 for t, _ in tmpcs):
        found.append("tensor parallelism (degrees above 1)")
    if any(len(listed) > 1 for layer in instance.layers for listed in layer.tmpcs.values()):
        found.append("the choice between several TMPCs of a layer")
    if any(tmpc.id != TMPC_ID or tmpc.recompute for _, tmpc in tmpcs):
        found.append(f'the ids of TMPCs (all are "{TMPC_ID}")')
    if any(any([*x.forward_sync_bytes.values(), *x.backward_sync_bytes.values()]) for _, x in tmpcs):
        found.append("what crossing an edge costs on top (syncTimeFw, syncTimeBw)")
    if not _keeps_times(instance):
        found.append("how the time of some layers parts into a forward and a backward pass")
    found += [] if all(tmpc.weight_s is None for _, tmpc in tmpcs) else ["weight gradients' share of backward passes"]
    found += unwritten(instance)
    rule = in_flight_rule(instance)
    if rule is None:
        found.append("memory that is neither an activation and two versions of the weights nor one of each in flight")
    else:
        activation = {layer.id: _activation_bytes(x, rule) for layer in instance.layers for x in layer.tmpcs.get(1, ())}
        if any(edge.communication_bytes != activation.get(edge.source) for edge in instance.edges):
            found.append("tensors that are not of the size of their layer's activation")
    if instance.tensors:
        found.append("tensors that each stage sends or receives once")
    if any(x.shared_bytes or x.least_data_parallel_degree > 1 for _, x in tmpcs):
        found.append("memory that replicas share out, and least data-parallel degrees")
    sources = {layer.id for layer in instance.layers} - {edge.target for edge in instance.edges}
    sinks = {layer.id for layer in instance.layers} - {edge.source for edge in instance.edges}
    dropped = [
        layer.name
        for layer in instance.layers
        if (layer.id in sources and layer.name.startswith("Input"))
        or (layer.id in sinks and layer.name.startswith("__getitem__"))
    ]
    if dropped:
        found.append(f'layers that PipeDream drops by their name ("{dropped[0]}")')
    if any("\n" in layer.name or not layer.name.strip() or " -- " in layer.name for layer in instance.layers):
        found.append('names of layers that are empty or hold " -- " or a line break')
    if any(not 0 <= layer.id < 10**15 for layer in instance.layers):
        found.append("ids of layers that are negative or have more than 15 digits")
    return found


def unwritten(instance: Instance) -> list[str]:
    """What only forms of ours hold, in words."""
    found = []
    if any(layer.path for layer in instance.layers):
        found.append("the paths of layers in the user's model")
    if any(layer.tied for layer in instance.layers):
        found.append("which layers have weights in common")
    if any(layer.experts for layer in instance.layers):
        found.append("the experts of layers")
    if any(layer.key_heads for layer in instance.layers):
        found.append("the heads of keys and values")
    if any(layer.predictor for layer in instance.layers):
        found.append("which layers predict further tokens")
    if instance.model is not None:
        found.append("which model is trained, and how")
    if instance.batch.samples_per_microbatch is not None or instance.batch.tokens_per_sample is not None:
        found.append("samples of a microbatch and tokens of a sample")
    if instance.measured_threads is not None:
        found.append("the threads that times were measured with")
    if len(instance.cluster.links) > 1:
        found.append("links of smaller groups of devices")
    return found


def _keeps_times(instance: Instance) -> bool:
    """Whether p alone is known of all layers, or both passes of all, and some layer has a backward one."""
    tmpcs = [tmpc for layer in instance.layers for listed in layer.tmpcs.values() for tmpc in listed]
    parted = [tmpc for tmpc in tmpcs if tmpc.forward_s is not None]
    if not parted:
        return True
    return (
        len(parted) == len(tmpcs)
        and any(tmpc.backward_s for tmpc in parted)
        and all(_passes_ms(tmpc) is not None for tmpc in parted)
    )


def in_flight_rule(instance: Instance) -> InFlight | None:
    """With which ``--in-flight`` a profile gives this instance's memory; None if with neither."""
    tmpcs = [tmpc for layer in instance.layers for listed in layer.tmpcs.values() for tmpc in listed]
    if all(tmpc.fixed_bytes == 2.0 * tmpc.weights_bytes for tmpc in tmpcs):
        return InFlight.TWO_VERSIONS
    if all(tmpc.fixed_bytes == 0.0 and tmpc.activation_bytes >= tmpc.weights_bytes for tmpc in tmpcs):
        return InFlight.STASHING
    return None


def to_profile(instance: Instance) -> str:
    """An instance without ``losses`` as a profile; loading it with the same K, N, M, B and ``in_flight_rule`` gives it
    again. Where only p is known it is all written as forward time, and no node has any backward time."""
    rule = in_flight_rule(instance)
    assert rule is not None
    lines = []
    for layer in instance.layers:
        ((tmpc,),) = layer.tmpcs.values()
        passes_ms = _passes_ms(tmpc)
        assert passes_ms is not None
        forward_ms, backward_ms = passes_ms
        lines.append(
            f"node{layer.id} -- {layer.name} -- forward_compute_time={forward_ms!r}, "
            f"backward_compute_time={backward_ms!r}, activation_size={_activation_bytes(tmpc, rule)!r}, "
            f"parameter_size={tmpc.weights_bytes!r}"
        )
    lines += [f"\tnode{edge.source} -- node{edge.target}" for edge in instance.edges]
    return "\n".join(lines) + "\n"


def _activation_bytes(tmpc: Tmpc, rule: InFlight) -> float:
    return tmpc.activation_bytes - (tmpc.weights_bytes if rule is InFlight.STASHING else 0.0)


def _passes_ms(tmpc: Tmpc) -> tuple[float, float] | None:
    """The figures that read back as the passes, or, where only p is known, as p and nothing; None if there are none."""
    if tmpc.forward_s is None or tmpc.backward_s is None:
        return _milliseconds(tmpc.time_per_sample_s)[0], 0.0
    for forward_ms in _milliseconds(tmpc.forward_s):
        for backward_ms in _milliseconds(tmpc.backward_s):
            read = (forward_ms / 1000.0, backward_ms / 1000.0, (forward_ms + backward_ms) / 1000.0)
            if read == (tmpc.forward_s, tmpc.backward_s, tmpc.time_per_sample_s):
                return forward_ms, backward_ms
    return None


def _milliseconds(seconds: float) -> list[float]:
    """Figures that read back as ``seconds``, or as near as there are some, the nearest first."""
    candidates = [seconds * 1000.0]
    for towards in (0.0, math.inf):
        near = candidates[0]
        for _ in range(_NEIGHBOURS):
            near = math.nextafter(near, towards)
            candidates.append(near)
    return sorted(candidates, key=lambda ms: abs(ms / 1000.0 - seconds))
