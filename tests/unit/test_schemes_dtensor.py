"""The rule table against DTensor's: what torch computes of shards without a word between ranks, and where it lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

from piper_ray.workloads.schemes.graph import OperatorFamily, OperatorGraph, Step, TensorPlacement, Value
from piper_ray.workloads.schemes.rules import SUMS, strategies

_SENT: Any = CommDebugMode
_SIZES = {"s": 4, "h": 6, "f": 8, "b": 2, "a": 4, "V": 10}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks of which one is here: nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


_F = OperatorFamily
_CASES: list[tuple[OperatorFamily, Mapping[str, str], str, Callable[..., Tensor], str]] = [
    (_F.CONTRACTION, {"x": "sh", "w": "hf"}, "sf", torch.mm, ""),
    (_F.CONTRACTION, {"x": "bsh", "w": "bhf"}, "bsf", torch.bmm, ""),
    (_F.CONTRACTION, {"x": "sh"}, "s", lambda x: x.sum(1), ""),
    (_F.CONTRACTION, {"x": "bsh", "w": "hf"}, "bsf", torch.matmul, ""),
    (_F.SUM, {"x": "sh", "z": "sh"}, "sh", torch.add, ""),
    (_F.POINTWISE, {"x": "sh"}, "sh", functional.gelu, ""),
    (_F.POINTWISE, {"x": "sh", "z": "h"}, "sh", torch.mul, ""),
    (_F.ROWS, {"x": "sh"}, "sh", lambda x: x.softmax(1), "h"),
    (_F.ROWS, {"x": "sh", "g": "h"}, "sh", lambda x, g: functional.layer_norm(x, (6,), g), "h"),
    (_F.ROWS, {"x": "sh"}, "sh", lambda x: x.cumsum(0), "s"),
    (_F.LOOKUP, {"n": "s", "t": "Vh"}, "sh", functional.embedding, ""),
    (_F.LOSS, {"x": "sV", "n": "s"}, "s", lambda x, n: functional.cross_entropy(x, n, reduction="none"), ""),
]


def _placement(place: TensorPlacement, axes: str) -> Placement:
    if not place.axis:
        return Partial() if place.partial else Replicate()
    return Shard(axes.index(place.axis))


@pytest.mark.parametrize(("family", "inputs", "output", "operator", "along"), _CASES)
def test_dtensor_places_what_is_made_as_the_rule_table_does(
    mesh: DeviceMesh,
    family: OperatorFamily,
    inputs: Mapping[str, str],
    output: str,
    operator: Callable[..., Any],
    along: str,
) -> None:
    sides = {**inputs, "y": output}
    values = {name: Value(name, tuple(axes), 1.0) for name, axes in sides.items()}
    step = Step("step", family, tuple(inputs), ("y",), tuple(along))
    graph = OperatorGraph("small", values, (step,), (), (), _SIZES)
    found = [one for one in strategies(step, graph, 2) if one.exchange != SUMS]
    assert len(found) > 1
    for strategy in found:
        given = []
        for name, axes in inputs.items():
            whole = torch.zeros([_SIZES[axis] for axis in axes], dtype=torch.int64 if name == "n" else None)
            placement = _placement(strategy.placements[name], axes)
            local = whole.chunk(2, placement.dim)[0] if isinstance(placement, Shard) else whole
            given.append(DTensor.from_local(local, mesh, [placement], run_check=False))
        with _SENT() as sent:
            made = operator(*given)
        assert sent.get_total_counts() == 0, strategy
        expected = _placement(strategy.placements["y"], output)
        (place,) = made.placements
        assert place.is_partial() if expected.is_partial() else place == expected, (strategy, place)


@pytest.mark.parametrize("operator", [lambda x: x.softmax(1), lambda x: functional.layer_norm(x, (6,))])
def test_dtensor_sends_where_the_rule_table_has_no_strategy(mesh: DeviceMesh, operator: Callable[..., Any]) -> None:
    with _SENT() as sent:
        operator(DTensor.from_local(torch.zeros(4, 3), mesh, [Shard(1)], run_check=False))
    assert sent.get_total_counts() > 0
