"""What ``plan`` offers if nobody says: context parallelism of long sequences, experts on all GPUs of a node."""

from __future__ import annotations

from piper_ray.model.instance import TrainedModel
from piper_ray.runtimes.runtime import Runtime
from piper_ray.workloads.estimate.config import ModelConfig
from piper_ray.workloads.estimate.decoder_shape import decoder_shape
from piper_ray.workloads.estimate.families import Microbatch
from piper_ray.workloads.estimate.offered import attends
from piper_ray.workloads.estimate.operators import LayerKind
from piper_ray.workloads.estimate.software import ContextExchange

_LEAST_TOKENS = 8192
"""Of a group: with fewer there is little left to share that tensor parallelism does not share as well."""

_MOST_GROUPS = 8


def usual_contexts(model: ModelConfig, tokens: int | None, runtime: Runtime) -> tuple[int, ...]:
    """Powers of two, 1 among them; 1 alone where a runtime's kernels take no windows in a ring."""
    length = tokens or model.tokens
    if length is None or not runtime.setting.context:
        return (1,)
    shape = decoder_shape(TrainedModel(config=model.document))
    mixing = () if shape is None else shape.mixing
    if runtime.context_exchange == ContextExchange.RING.value and any(getattr(part, "window", None) for part in mixing):
        return (1,)
    kinds = _kinds(model, tokens)
    if not all(attends(kind) and kind.value("s") == length for kind in kinds if kind.recomputable):
        return (1,)
    found = [1]
    while found[-1] < _MOST_GROUPS and length >= 2 * found[-1] * _LEAST_TOKENS and length % (4 * found[-1]) == 0:
        found.append(2 * found[-1])
    return tuple(found)


def usual_experts(model: ModelConfig, tokens: int | None, runtime: Runtime, gpus_per_node: int) -> tuple[int, ...]:
    """As many ranks as a node has GPUs, beside those of tensor parallelism, where experts divide so."""
    routed = [kind for kind in _kinds(model, tokens) if kind.experts]
    even = routed and all(kind.experts % gpus_per_node == 0 for kind in routed)
    return (gpus_per_node,) if even and gpus_per_node > 1 and runtime.setting.experts else ()


def _kinds(model: ModelConfig, tokens: int | None) -> tuple[LayerKind, ...]:
    return model.architecture(Microbatch(1, tokens or model.tokens, fused=True)).kinds
