"""Each rule, and schemes that the program finds under random prices, against one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from piper_ray.workloads.schemes.graph import PARTIAL, REPLICATED, OperatorGraph, Step, TensorPlacement
from piper_ray.workloads.schemes.names import known_divisions
from piper_ray.workloads.schemes.program import SchemeProgram
from piper_ray.workloads.schemes.rules import RING, Strategy, strategies
from piper_ray.workloads.schemes.scheme import Scheme
from tests.lengths import long_after
from tests.scheme_ranks import Array, Numbers, OneProcess, SimulatedRanks, joined, placed, shape_of
from tests.scheme_support import LENGTHS, RandomPrices, attention_layer, crossing_layer, feeding_layer, words_layer

LAYERS: dict[str, Callable[[], OperatorGraph]] = {
    "attention": attention_layer,
    "feeding": feeding_layer,
    "experts": lambda: feeding_layer(experts=True),
    "words": words_layer,
    "crossing": crossing_layer,
}


def _one_process(graph: OperatorGraph, random: np.random.Generator) -> OneProcess:
    given = [*graph.arriving, *(weight.name for weight in graph.weights)]
    values = {name: random.normal(size=shape_of(graph, name, LENGTHS)) for name in given}
    values |= {
        name: random.integers(LENGTHS["V"], size=shape_of(graph, name, LENGTHS)).astype(float) for name in graph.given
    }
    one = OneProcess(graph, values, LENGTHS)
    one.run()
    return one


def _assert_rule(graph: OperatorGraph, step: Step, strategy: Strategy, one: OneProcess) -> None:
    """Shards of the inputs give shards of the outputs, and of the gradients those that the adjoint says."""
    random, ranks, numbers = np.random.default_rng(1), 2, Numbers(graph, LENGTHS)

    def on_ranks(name: str, full: Array, placement: TensorPlacement) -> list[Array]:
        return placed(full, graph.values[name].axes, placement, ranks, random)

    inputs = {name: on_ranks(name, one.values[name], strategy.placements[name]) for name in step.inputs}
    for name in step.inputs[1:] if strategy.exchange == RING else ():
        inputs[name] = [one.values[name]] * ranks
    (made,) = step.outputs
    each = [{name: inputs[name][rank] for name in step.inputs} for rank in range(ranks)]
    results = [of_rank[made] for of_rank in numbers.forward_on(step, each, strategy)]
    found = joined(results, graph.values[made].axes, strategy.placements[made])
    np.testing.assert_allclose(found, one.values[made], rtol=0, atol=1e-12)
    gradient: Array = np.asarray(np.random.default_rng(2).normal(size=one.values[made].shape))
    (expected,) = numbers.backward_on(step, [{name: one.values[name] for name in step.inputs}], [gradient])
    gradients = on_ranks(made, gradient, strategy.adjoint(made))
    back = numbers.backward_on(step, each, gradients, strategy)
    for name in expected:
        around = strategy.exchange == RING and name != step.inputs[0]
        placement = PARTIAL if around else strategy.adjoint(name)
        found = joined([of_rank[name] for of_rank in back], graph.values[name].axes, placement)
        np.testing.assert_allclose(found, expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("layer", LAYERS)
def test_each_strategy_of_a_step_gives_what_its_rule_says(layer: str) -> None:
    graph = LAYERS[layer]()
    one = _one_process(graph, np.random.default_rng(0))
    seen = 0
    for step in graph.steps:
        for strategy in strategies(step, graph, 2):
            if PARTIAL in strategy.placements.values() and not strategy.axis:
                continue  # a linear step: of partial sums, below
            _assert_rule(graph, step, strategy, one)
            seen += 1
    assert seen > 2 * len(graph.steps)


def test_a_sum_of_partial_sums_is_the_partial_sum() -> None:
    graph = feeding_layer()
    one = _one_process(graph, np.random.default_rng(0))
    step = graph.steps[-1]
    (strategy,) = (one for one in strategies(step, graph, 2) if one.text == "partial sums")
    _assert_rule(graph, step, strategy, one)


def _wrong(strategy: Strategy, step: Step, graph: OperatorGraph) -> Iterator[Strategy]:
    """With another placement of an output, or of an input that is no partial sum. Keys and values of a ring come to all
    devices wherever they lie."""
    for name in (*step.inputs[: 1 if strategy.exchange == RING else None], *step.outputs):
        for place in (*graph.placements(name, 2), PARTIAL):
            known = strategy.placements[name] == place or (place.partial and name in step.inputs)
            if not known:
                yield replace(strategy, placements={**strategy.placements, name: place})


def test_what_divides_no_product_is_not_called_tensor_parallelism() -> None:
    layer = feeding_layer()
    assert {"tensor parallelism", "context parallelism, all-gather"} <= known_divisions(layer, 2).keys()
    alone = known_divisions(replace(layer, sizes={"s": 4}), 2)
    assert alone
    assert all(name.startswith("context parallelism") for name in alone)


@pytest.mark.parametrize("layer", LAYERS)
def test_each_wrong_rule_is_caught(layer: str) -> None:
    """Each placement of each rule changed for each other one in turn."""
    graph = LAYERS[layer]()
    one = _one_process(graph, np.random.default_rng(0))
    families = set()
    for step in graph.steps:
        right = strategies(step, graph, 2)
        for wrong in (other for strategy in right for other in _wrong(strategy, step, graph)):
            if wrong.placements in [strategy.placements for strategy in right]:
                continue
            with pytest.raises((AssertionError, ValueError)):
                _assert_rule(graph, step, wrong, one)
            families.add(step.family)
    assert families == {step.family for step in graph.steps}


def _assert_runs(graph: OperatorGraph, scheme: Scheme, one: OneProcess) -> None:
    ranks = SimulatedRanks(graph, scheme, LENGTHS, np.random.default_rng(3))
    ranks.run(one.values, one.gradients)

    def assert_alike(name: str, place: TensorPlacement, parts: list[Array], full: Array) -> None:
        found = joined(parts, graph.values[name].axes, place)
        np.testing.assert_allclose(found, full, rtol=0, atol=1e-12 * max(1.0, float(np.abs(full).max())))

    for found, full, names in (
        (ranks.there, one.values, graph.leaving),
        (ranks.gradients, one.gradients, graph.arriving),
    ):
        for name in names:
            border = graph.at_border(name, scheme.border)
            assert_alike(name, border, found[name, border], full[name])
    for weight in graph.weights:
        (place, parts), *_ = ((p, parts) for (name, p), parts in ranks.gradients.items() if name == weight.name)
        assert_alike(weight.name, place, parts, one.gradients[weight.name])
        laid = scheme.weights[weight.name]
        assert place in (laid, REPLICATED, PARTIAL), "it goes to where the weight lies, by a sum or a slice"


@pytest.mark.parametrize("seed", long_after(1, range(4)))
@pytest.mark.parametrize("layer", LAYERS)
def test_found_schemes_train_as_one_process_does(layer: str, seed: int) -> None:
    graph = LAYERS[layer]()
    one = _one_process(graph, np.random.default_rng(seed))
    program = SchemeProgram(graph, 2, RandomPrices(seed), [REPLICATED, TensorPlacement("s")][seed % 2])
    least, free = program.least_held_bytes(4), program.fastest(4)
    assert free is not None
    most = least + [1.0, 0.3, 0.01][seed % 3] * (free.figures.held_bytes(4) - least)
    scheme = program.fastest(4, most)
    assert scheme is not None
    assert scheme.figures.held_bytes(4) <= most * (1.0 + 1e-9)
    _assert_runs(graph, scheme, one)
