"""An estimate in words: the header of the file it is written to, the lines on the screen, and each figure of a layer
with its formula and its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from piper_ray.model.cluster import Link
from piper_ray.model.errors import UsageError
from piper_ray.model.figures import flop_text, given_size_text, memory_text, plural, range_text, size_text, time_text
from piper_ray.model.instance import Instance
from piper_ray.model.mode import ALL_REPLICAS, Recomputation, Sharding
from piper_ray.report.document import workload_text
from piper_ray.report.templates import template
from piper_ray.workloads.estimate import exchanges, memory, roofline
from piper_ray.workloads.estimate.build import Estimate
from piper_ray.workloads.estimate.costs import LayerCosts, edge_bytes, sync_bytes
from piper_ray.workloads.estimate.hardware import Training
from piper_ray.workloads.estimate.modes import LayerMode
from piper_ray.workloads.estimate.offered import attends
from piper_ray.workloads.estimate.operators import LayerKind, Operator, Split, number_text, substituted
from piper_ray.workloads.estimate.software import ContextExchange, Stack, TokenDispatcher
from piper_ray.workloads.formats.workload_writer import type_keys


def file_text(instance: Instance, results: Sequence[Estimate], command: str) -> str:
    """The workload as TOML under headers that say how to make it again and how to read it. results: what it was made
    from, one for each kind of GPU."""
    headers = [_header(result, command).splitlines() for result in results]
    return workload_text(instance, [line for header in headers for line in ("", *header)][1:])


def _header(result: Estimate, command: str) -> str:
    modes = [mode for of_kind in result.modes.values() for mode in of_kind]
    return template(__package__, "estimate_header.txt.jinja").render(
        result=result,
        command=command,
        parameters=_parameters_text(result),
        adapted=_adapted(result),
        shards=max(mode.optimizer_shards for mode in modes),
        offload=any(mode.offload for mode in modes),
        links=list(zip(result.instance.cluster.links, _link_texts(result), strict=True)),
    )


def summary_lines(result: Estimate) -> list[str]:
    """What was estimated, and whether memory can be enough."""
    instance, architecture, gpu = result.instance, result.architecture, result.setting.gpu
    tmpcs = sum(len(of_degree) for layer in instance.layers for of_degree in layer.tmpcs.values())
    kinds = f"{len(instance.layers)} layers of {len(architecture.kinds)} kinds, {tmpcs:,} TMPCs"
    found = memory_text(gpu.device_bytes)
    return [
        f"Model     {architecture.name}: {_parameters_text(result)}, {kinds}",
        f"Sample    {architecture.sample}; {instance.microbatches:,} microbatches in a batch",
        f"Cluster   {result.devices:,} x {gpu.name}, {found} found",
        f"Links     {_links_line(result)}",
        _work_line(result),
        *(f"Doubt     {line}" for line in result.doubt.lines),
        memory_line(result),
    ]


def _work_line(result: Estimate) -> str:
    """FLOP of a step by the usual definitions, and the steps that would be 100 % MFU and HFU."""
    step, again = result.model_flop, result.hardware_flop
    batch = result.instance.batch
    units = [(batch.samples, "sample")]
    if batch.samples is not None and batch.tokens_per_sample is not None:
        units.append((batch.samples * batch.tokens_per_sample, "token"))
    each = "".join(f", {flop_text(step / count)} a {unit}" for count, unit in units if count)
    peak = result.peak_flop_per_s
    return (
        f"Work      {flop_text(step)} a step{each}; MFU = {time_text(step / peak, 4)} / step "
        f"(HFU, all recomputed: {time_text(again / peak, 4)})"
    )


def memory_line(result: Estimate) -> str:
    """The least that the layers need on all GPUs together, and the GPUs for that."""
    least = result.least_devices
    text = (
        f"Memory    at least {size_text(result.least_memory_bytes)} with one microbatch in flight: "
        f"{plural(least, 'GPU')} or more"
    )
    text += f"; the model does not fit on {result.devices:,}" if least > result.devices else ""
    held = result.doubt.memory
    return f"{text}; of {held.peaks} published peaks 9 in 10 were x{held.least:.2f} to x{held.most:.2f} of the estimate"


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


def _links_line(result: Estimate) -> str:
    """Each link's rate, and what the planner has for it: B counts what comes in and what goes out."""
    links = list(zip(result.instance.cluster.links, _link_texts(result), strict=True))
    *inner, (outermost, network) = links
    words = [f"{network} each way, so B = {_both_ways(outermost)}"]
    words += [f"{text}, so {_both_ways(link)}{_uplink_text(link)}" for link, text in reversed(inner)]
    return "; ".join(words)


def _link_texts(result: Estimate) -> list[str]:
    """For each link of the cluster, innermost first, what it is and its rate in one direction."""
    gpu = result.setting.gpu
    return [
        f"network between nodes, {_one_way(link)} a GPU"
        if link.devices is None
        else f"{gpu.link} within {link.devices}, {_one_way(link)}"
        for link in result.instance.cluster.links
    ]


def _uplink_text(link: Link) -> str:
    uplink = link.uplink_bytes_per_s
    return "" if uplink is None else f", and {given_size_text(uplink)}/s out of them together"


def _one_way(link: Link) -> str:
    return f"{given_size_text(link.bandwidth_bytes_per_s / 2.0)}/s"


def _both_ways(link: Link) -> str:
    return f"{given_size_text(link.bandwidth_bytes_per_s)}/s"


def explanation_lines(result: Estimate, layer: str) -> Iterator[str]:
    """All about one kind of layer; ``layer`` is its key, its name, its type in the file or the number of a layer.

    Raises UsageError.
    """
    kind = _find(result, layer)
    numbers = [index for index, node in enumerate(result.architecture.nodes) if node.kind.key == kind.key]
    yield from (
        template(__package__, "estimate_layer.txt.jinja")
        .render(
            result=result,
            kind=kind,
            layers=range_text(numbers),
            symbols=_used_symbols(kind),
            flop=flop_text(roofline.model_flop(kind)),
            recomputed_flop=flop_text(roofline.hardware_flop(kind, Recomputation.FULL)),
            whole_sequence=Split.SEQUENCE,
            number_text=number_text,
            substituted=substituted,
        )
        .splitlines()
    )
    for divided in dict.fromkeys(map(_divided, result.modes[kind.key])):
        yield ""
        yield from _passes(result, kind.on(divided.degree), divided)
        for mode in result.modes[kind.key]:
            if _divided(mode) == divided:
                yield from _figures(result, kind.on(mode.degree), mode)


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


def _division_text(mode: LayerMode) -> str:
    """``t = 4, cp = 2, sp``."""
    parts = [f"t = {mode.degree}"]
    parts += [f"cp = {mode.context}"] if mode.context > 1 else []
    parts += ["sp"] if mode.sequence_parallel else []
    parts += ["kept gathered"] if mode.gathered else []
    if mode.experts is not None:
        parts.append(f"experts over {mode.experts} ranks")
        parts += [f"{mode.expert_tensor} devices each"] if mode.expert_tensor > 1 else []
    return ", ".join(parts)


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
    """The symbols that stand in a formula of the kind, with their values."""
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


def _term(name: str, formula: str, kind: LayerKind) -> str:
    return f"{name}: {formula} = {substituted(formula, kind.symbols)} = {kind.value(formula):,.0f}"


def _passes(result: Estimate, kind: LayerKind, mode: LayerMode) -> Iterator[str]:
    stack = result.setting.stack
    yield f"{_division_text(mode)}: forward and backward pass of each operator"
    for operator in kind.operators:
        there = roofline.forward_s(operator, kind, mode, stack)
        back = roofline.backward_s(operator, kind, mode, stack)
        yield f"  {operator.name}: {time_text(there, 4)} + {time_text(back, 4)}"
        yield from (f"    {line}" for line in _work(result, kind, operator, mode))
    if mode.context > 1 and attends(kind):
        yield (
            f"  {_CONTEXT[stack.software.context]} over {mode.context} groups: "
            f"{time_text(exchanges.context_s(kind, mode, stack), 4)} a forward pass"
        )
    for exchange in kind.exchanges if mode.degree > 1 or mode.experts is not None else ():
        once = time_text(exchanges.exchange_s(exchange, kind, mode, stack), 4)
        formula, how = exchange.bytes, "all-reduce"
        if mode.sequence_parallel:
            how = "reduce-scatter and all-gather"
        if exchanges.is_all_to_all(exchange, mode):
            formula, how = exchange.expert_bytes, _dispatch_text(mode, stack)
        again = ""
        if exchanges.regathers(exchange, mode):
            again = f"; gathered again backward: {time_text(exchanges.regather_s(exchange, kind, mode, stack), 4)}"
        yield (
            f"  {how}, {_term(exchange.name, formula, kind)} bytes: {once}, {exchange.forward:g} forward and "
            f"{exchange.backward:g} backward{again}"
        )


def _dispatch_text(mode: LayerMode, stack: Stack) -> str:
    """How tokens reach experts, what hides of it, and how unevenly they go."""
    how = exchanges.dispatcher_for(mode.expert_ranks, stack)
    words = [f"{how.value} over {plural(mode.expert_ranks, 'rank')}, tokens x {stack.imbalance:g} on the busiest"]
    if how is TokenDispatcher.ALL_TO_ALL:
        words.append(f"{time_text(stack.gpu.sorting_s, 2)} to sort each copy of a token")
    words.append(f"{stack.software.expert_overlap:.0%} of the way hidden")
    return ", ".join(words)


_CONTEXT = {
    ContextExchange.RING: "keys and values around a ring, during attention,",
    ContextExchange.ALL_GATHER: "all-gather of keys and values",
    ContextExchange.ALL_TO_ALL: "all-to-all of heads, there and back,",
}


def _work(result: Estimate, kind: LayerKind, operator: Operator, mode: LayerMode) -> Iterator[str]:
    gpu, degree, stack = result.setting.gpu, mode.degree, result.setting.stack
    gain = roofline.gain_of(operator, stack)
    for product in operator.products:
        shape = roofline.shape_on(product, kind, mode)
        sides = " x ".join(number_text(side) for side in (shape.rows, shape.depth, shape.columns))
        times = f"{number_text(shape.count)} x " if shape.count != 1 else ""
        share = gain * roofline.achieved_fraction(shape, gpu, operator.on_chip, gain)
        yield (
            f"{times}({product.rows}) x ({product.depth}) x ({product.columns})"
            f"{f', {product.divided} / t' if product.divided and degree > 1 else ''} = {times}{sides}: "
            f"{shape.flop:.4g} FLOP at {share:.3f} of the peak{'' if gain == 1.0 else ' in bf16'}"
            f"{'' if operator.on_chip else f', {shape.operand_bytes:.4g} bytes'}: "
            f"{time_text(roofline.product_s(shape, gpu, operator.on_chip, gain), 4)}"
        )
    factor = roofline.moved_times(operator, kind, mode, stack) / mode.parts(operator.split)
    for word, formula in (("forward", operator.forward_bytes), ("backward", operator.backward_bytes)):
        if kind.value(formula):
            size = kind.value(formula) * factor
            shown = formula if factor == 1.0 else f"({formula}) x {factor:g}"
            yield f"{word} {shown} = {size:,.0f} bytes: {time_text(roofline.traffic_s(size, gpu), 4)}"


def _figures(result: Estimate, kind: LayerKind, mode: LayerMode) -> Iterator[str]:
    costs = result.costs(kind, mode)
    yield f"  TMPC {mode.id} at t = {mode.degree}"
    yield f"    p = {_time_terms(costs)} = {time_text(costs.time_s, 6)}"
    if mode.offload:
        yield f"        offload: {_offload_text(result, kind, mode, costs)}"
    yield f"    a = {_kept_text(result, kind, mode)}"
    yield (
        f"    b = {_state_text(kind, result.setting.training, mode)}{_excess_text(result, costs)} = "
        f"{costs.fixed_bytes:,.0f} bytes"
    )
    yield from (f"        {line}" for line in _memory_lines(result, kind, mode))
    yield f"    w = {_synchronised_text(result, mode, costs)} = {costs.synchronised_bytes:,.0f} bytes"
    if costs.shared_bytes:
        yield f"    shared = {costs.shared_bytes:,.0f} bytes of optimizer state, a d-th on each of d replicas"
    if costs.shared_bytes and result.instance.model is not None and result.instance.model.optimizer_on_host:
        rate = f"{result.setting.gpu.host_updates_per_s:.3g} parameters/s"
        yield f"    on the host: shared is there, and p also has its update, at {rate} for each of N microbatches"
    if mode.least_data_parallel_degree > 1:
        yield f"    only in stages of {mode.least_data_parallel_degree} replicas or more"
    if costs.unsaid_s:
        sign, why = ("+", "among c groups") if costs.unsaid_s > 0.0 else ("-", "of replicas without these weights")
        yield f"    in p: {sign}{time_text(abs(costs.unsaid_s), 4)} of w's synchronisation, {why}, for each microbatch"
    if kind.value(kind.output):
        yield f"    {_edge_text(result, kind, mode)}"


def _state_text(kind: LayerKind, training: Training, mode: LayerMode) -> str:
    """The state of dense parameters, and of experts' where they are shared out otherwise."""
    dense, routed = memory.numbers_on_device(kind, mode)
    if mode.state_parts(routed=True) == mode.state_parts(routed=False) or not routed.held:
        both = memory.Numbers(False, dense.held + routed.held, dense.trained + routed.trained)
        return _numbers_text(both, "", training, mode)
    texts = (_numbers_text(dense, "", training, mode), _numbers_text(routed, " of experts", training, mode))
    return " + ".join(texts)


def _numbers_text(numbers: memory.Numbers, whose: str, training: Training, mode: LayerMode) -> str:
    shards = mode.state_parts(numbers.routed)

    def share(of: Sharding) -> str:
        return f"/{shards:g}" if shards > 1 and mode.sharding >= of else ""

    optimizer = 0.0 if mode.optimizer_shards == ALL_REPLICAS else training.optimizer_bytes
    weights = f"{training.weight_bytes:g}{share(Sharding.WEIGHTS)} weights"
    gradients = f"{training.gradient_bytes:g}{share(Sharding.GRADIENTS)} gradients"
    of_trained = f"{gradients} + {optimizer:g}{share(Sharding.OPTIMIZER)} optimizer"
    if numbers.trained == numbers.held:
        return f"{numbers.held:,.0f} parameters{whose} x ({weights} + {of_trained})"
    return f"{numbers.held:,.0f} parameters{whose} x {weights} + {numbers.trained:,.0f} trained x ({of_trained})"


def _memory_lines(result: Estimate, kind: LayerKind, mode: LayerMode) -> Iterator[str]:
    """What b is for, and what the backward pass holds besides a and b."""
    states = [
        (name, memory.state_bytes(kind, mode, training))
        for name, training in _parts_of(result.setting.training).items()
    ]
    yield ", ".join(f"{name} {size:,.0f} bytes" for name, size in states)
    traits = result.setting.stack.traits
    again, gradients = memory.transient_bytes(kind, mode, traits), memory.backward_bytes(kind, mode, traits.loss)
    made = f" and {again:,.0f} made again or brought back" if again else ""
    yield f"in its backward pass at worst {gradients:,.0f} bytes of gradients and gathered inputs{made}"


def _parts_of(training: Training) -> dict[str, Training]:
    """Each with one of the states alone."""
    nothing = Training(weight_bytes=0.0, gradient_bytes=0.0, optimizer_bytes=0.0)
    return {
        "weights": nothing.model_copy(update={"weight_bytes": training.weight_bytes}),
        "gradients": nothing.model_copy(update={"gradient_bytes": training.gradient_bytes}),
        "optimizer state": nothing.model_copy(update={"optimizer_bytes": training.optimizer_bytes}),
    }


def _edge_text(result: Estimate, kind: LayerKind, mode: LayerMode) -> str:
    output, setting = kind.value(kind.output), result.setting
    gathers = mode.degree > 1 and not mode.sequence_parallel
    return (
        f"c = {kind.output} / {setting.largest_degree} = {edge_bytes(output, setting):,.0f} bytes to each layer that "
        f"reads it; bw = {output:,.0f} / {mode.devices} - c{' + gathering' if gathers else ''} = "
        f"{sync_bytes(output, mode.degree, mode, setting):,.0f} bytes; fw the same of what it reads"
    )


def _kept_text(result: Estimate, kind: LayerKind, mode: LayerMode) -> str:
    traits = result.setting.stack.traits
    if mode.recomputation == Recomputation.FULL:
        listed = [(kind.checkpoint, mode.parts(Split.SEQUENCE), 1.0)]
    else:
        saved = [(operator, item) for operator in kind.operators for item in operator.saved]
        listed = [
            (item.bytes, memory.kept_parts(operator, item, mode), memory.share_kept(operator, item, kind, traits))
            for operator, item in saved
            if not mode.does_again(item)
        ]
    terms = [
        f"{kind.value(formula):,.0f}"
        + (f" / {parts:g}" if parts != 1 else "")
        + (f" x {share:g}" if share != 1.0 else "")
        for formula, parts, share in listed
    ]
    total = f"{' + '.join(terms) or '0'} = {memory.kept_bytes(kind, mode, traits):,.0f} bytes"
    return f"0; in host memory {total}" if mode.offload else total


def _offload_text(result: Estimate, kind: LayerKind, mode: LayerMode, costs: LayerCosts) -> str:
    gpu = result.setting.gpu
    rate = f"{given_size_text(gpu.host_bytes_per_s)}/s x {gpu.host_fraction:g}"
    kept = memory.kept_bytes(kind, mode, result.setting.stack.traits)
    moved_s = kept / (gpu.host_bytes_per_s * gpu.host_fraction)
    return (
        f"{kept:,.0f} bytes / ({rate}) = {time_text(moved_s, 4)} a pass, less the pass, and "
        f"through the GPU's memory: {time_text(costs.offload_s, 4)}"
    )


def _synchronised_text(result: Estimate, mode: LayerMode, costs: LayerCosts) -> str:
    setting = result.setting
    gradient_bytes = setting.stack.software.reduced_bytes(setting.stack.precision, setting.training)
    weight, shards = f"{setting.training.weight_bytes:g} of a weight gathered", mode.optimizer_shards
    gradient = f"{gradient_bytes:g} of a gradient"
    if mode.sharding is Sharding.OPTIMIZER:
        return f"{costs.trained:,.0f} x ({gradient} scattered + {weight}) / 2"
    if mode.sharding is Sharding.GRADIENTS:
        return f"{costs.trained:,.0f} x ({weight} / 2 + {gradient} / {shards})"
    if mode.sharding is Sharding.WEIGHTS:
        return f"{costs.trained:,.0f} x {gradient} / {shards}, among groups that share weights,"
    return f"{costs.trained:,.0f} x {gradient_bytes:g}"


def _time_terms(costs: LayerCosts) -> str:
    passes = costs.passes
    terms = [
        ("forward", passes.forward_s),
        ("backward", passes.backward_s),
        ("again", passes.again_s),
        ("exchanges", passes.talk.all_s),
        ("offload", costs.offload_s),
        ("waiting for the host", passes.idle_forward_s + passes.idle_backward_s),
        ("gathering sharded weights", costs.gather_forward_s + costs.gather_backward_s),
    ]
    return " + ".join(f"{name} {time_text(seconds, 4)}" for name, seconds in terms if seconds or name == "forward")


def _excess_text(result: Estimate, costs: LayerCosts) -> str:
    if not costs.excess_bytes:
        return ""
    return f" + {costs.transient_bytes:,.0f} in its backward pass - {result.setting.workspace_bytes:,.0f} set aside"
