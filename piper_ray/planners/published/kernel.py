"""The table dp[I][k][s] of the paper, compiled (Piper, NeurIPS 2021, section 4: the dynamic program over downsets).

Also an instance as flat arrays for the compiled table, and its downsets, by plain enumeration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from piper_ray.compiled.arrays import stable_order
from piper_ray.compiled.jit import inner_kernel, kernel
from piper_ray.model.constraints import Recompute, Restrictions
from piper_ray.model.errors import UsageError
from piper_ray.model.instance import Instance, Tmpc

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Arrays(NamedTuple):
    """Layers are numbered as in the instance, options (TMPCs) by degree, layer, and order in the file.

    degrees: int64[degrees], tensor-parallel degrees, ascending.
    option_start: int64[degrees * layers + 1]; options of layer v at degrees[i] start at [i * layers + v].
    time_s, weights_bytes, activation_bytes, fixed_bytes, shared_bytes: float64[options].
    least_degree: int64[options], the least data-parallel degree that the option needs.
    allowed: bool[modes, options]; a stage takes all its options from one mode.
    neighbour_start: int64[layers + 1]; neighbour: int64[2 * edges], the layers that layer v has edges from and to.
    crossing_start: int64[options]; crossing_bytes[crossing_start[o] + j]: float64, 2 * (c + fw or bw), what option o
    of layer v pays when its j-th neighbour is outside the stage.
    member: bool[downsets, layers]. size: int64[downsets].
    tensor_end: bool[tensors, layers]. tensor_bytes: float64[tensors], both passes: what a stage with some ends pays.
    """

    degrees: Integers
    option_start: Integers
    time_s: Floats
    weights_bytes: Floats
    activation_bytes: Floats
    fixed_bytes: Floats
    shared_bytes: Floats
    least_degree: Integers
    allowed: NDArray[np.bool_]
    neighbour_start: Integers
    neighbour: Integers
    crossing_start: Integers
    crossing_bytes: Floats
    member: NDArray[np.bool_]
    size: Integers
    tensor_end: NDArray[np.bool_]
    tensor_bytes: Floats


def flatten(instance: Instance, downsets: Sequence[int], restrictions: Restrictions) -> Arrays:
    """An instance and its downsets (bit masks) as arrays, with the TMPCs that the restrictions allow."""
    layers = instance.layers
    position = {layer.id: i for i, layer in enumerate(layers)}
    # For each layer its edges: the other end's id, c, and whether the edge comes in.
    incident: list[list[tuple[int, float, bool]]] = [[] for _ in layers]
    for edge in instance.edges:
        incident[position[edge.target]].append((edge.source, edge.communication_bytes, True))
        incident[position[edge.source]].append((edge.target, edge.communication_bytes, False))

    degrees = [t for t in instance.degrees if restrictions.admits_tensor_parallel_degree(t)]
    options: list[Tmpc] = []
    option_start, crossing_start = [0], []
    crossing: list[float] = []
    modes: list[list[bool]] = [[] for _ in _modes(restrictions.recompute)]
    for t in degrees:
        for layer, ends in zip(layers, incident, strict=True):
            tmpcs = layer.tmpcs.get(t, ())
            for mode, role in zip(modes, _modes(restrictions.recompute), strict=True):
                has_choice = len({tmpc.recompute for tmpc in tmpcs}) > 1
                mode += [role is None or not has_choice or tmpc.recompute == role for tmpc in tmpcs]
            for tmpc in tmpcs:
                options.append(tmpc)
                crossing_start.append(len(crossing))
                for other, c, incoming in ends:
                    extra = tmpc.forward_sync_bytes if incoming else tmpc.backward_sync_bytes
                    crossing.append(2.0 * (c + extra.get(other, 0.0)))
            option_start.append(len(options))

    return Arrays(
        degrees=np.array(degrees, dtype=np.int64),
        option_start=np.array(option_start, dtype=np.int64),
        time_s=np.array([tmpc.time_per_sample_s for tmpc in options], dtype=np.float64),
        weights_bytes=np.array([tmpc.weights_bytes for tmpc in options], dtype=np.float64),
        activation_bytes=np.array([tmpc.activation_bytes for tmpc in options], dtype=np.float64),
        fixed_bytes=np.array([tmpc.fixed_bytes for tmpc in options], dtype=np.float64),
        shared_bytes=np.array([tmpc.shared_bytes for tmpc in options], dtype=np.float64),
        least_degree=np.array([tmpc.least_data_parallel_degree for tmpc in options], dtype=np.int64),
        allowed=np.array(modes, dtype=np.bool_).reshape(len(modes), len(options)),
        neighbour_start=np.cumsum([0, *(len(ends) for ends in incident)], dtype=np.int64),
        neighbour=np.array([position[other] for ends in incident for other, _, _ in ends], dtype=np.int64),
        crossing_start=np.array(crossing_start, dtype=np.int64),
        crossing_bytes=np.array(crossing, dtype=np.float64),
        member=np.array([[downset >> i & 1 for i in range(len(layers))] for downset in downsets], dtype=np.bool_),
        size=np.array([downset.bit_count() for downset in downsets], dtype=np.int64),
        tensor_end=np.array(
            [[layer.id in tensor.layers for layer in layers] for tensor in instance.tensors], dtype=np.bool_
        ).reshape(len(instance.tensors), len(layers)),
        tensor_bytes=np.array([t.forward_bytes + t.backward_bytes for t in instance.tensors], dtype=np.float64),
    )


def _modes(recompute: Recompute) -> tuple[bool | None, ...]:
    """The recomputation roles that a stage may take as a whole; None leaves each layer free."""
    if recompute is Recompute.AUTO:
        return (None,)
    if recompute is Recompute.ALL_OR_NONE:
        return (False, True)
    if recompute not in (Recompute.ALWAYS, Recompute.NEVER):
        raise UsageError(f"the paper's table knows no recomputation {recompute.value}; expected all-or-none, say")
    return (recompute is Recompute.ALWAYS,)


def enumerate_downsets(instance: Instance, most: int) -> list[int]:
    """All downsets as bit masks (bit i is ``instance.layers[i]``), by size, then by value; the empty set comes first.

    A downset grows by a layer all of whose successors are in it; going level by level finds each, as every downset
    loses its front-most layer to one of the level before. Stops after the level that makes them more than ``most``.
    """
    position = {layer.id: i for i, layer in enumerate(instance.layers)}
    successors = [0] * len(instance.layers)
    for edge in instance.edges:
        successors[position[edge.source]] |= 1 << position[edge.target]
    downsets = [0]
    level = [0]
    while level and len(downsets) <= most:
        level = sorted(
            {
                downset | 1 << i
                for downset in level
                for i, needed in enumerate(successors)
                if not downset >> i & 1 and downset & needed == needed
            }
        )
        downsets += level
    return downsets


# Costs closer than this, relative to the stage's cost, count as equal when fronts are pruned: sums of the same layers'
# costs in another order must not multiply the states.
_SAME_COST = 1e-13

ANY_DEGREE = 2**62  # above every data-parallel degree


class Constants(NamedTuple):
    """The constants of one instance. data_parallel_degrees: int64[...], the divisors of N to try, ascending.

    memory_bytes: M, with the tolerance included.
    """

    devices: int
    data_parallel_limit: int
    microbatches: int
    memory_bytes: float
    bandwidth_bytes_per_s: float
    data_parallel_degrees: Integers


class Choosing(NamedTuple):
    """How TMPCs are chosen. exact: False takes the greedy choice, upstream's.

    lower_s, upper_s: bounds on the optimum. A stage that is at most lower_s as it is need not become faster, and one
    that must be above upper_s is in no best plan: neither needs the exact choice.
    """

    exact: bool
    lower_s: float
    upper_s: float


@inner_kernel
def greedy_choice(start: Integers, cost: Floats, memory: Floats, limit: float, chosen: Integers) -> tuple[float, float]:
    """Upstream's heuristic: from the fastest option of each layer, the cheapest swaps by cost per byte saved.

    start: int64[layers + 1], options of layer i are start[i]..start[i+1]. cost, memory: float64[options].
    chosen: int64[layers], the fastest options, which do not fit; becomes the choice.
    Returns its cost (inf if nothing fits) and the last swap's ratio.
    """
    used, least = 0.0, 0.0
    for i in range(len(chosen)):
        used += memory[chosen[i]]
        least += memory[start[i] : start[i + 1]].min()
    if least > limit:
        return np.inf, 0.0
    layer_of = np.empty(len(cost), dtype=np.int64)
    ratios = np.full(len(cost), np.inf)
    for i in range(len(chosen)):
        for option in range(start[i], start[i + 1]):
            layer_of[option] = i
            saved = memory[chosen[i]] - memory[option]
            if saved > 0.0:
                ratios[option] = (cost[option] - cost[chosen[i]]) / saved
    ratio = 0.0
    for option in stable_order(ratios, ratios.size):
        i = layer_of[option]
        saved = memory[chosen[i]] - memory[option]
        if saved > 0.0:
            used -= saved
            chosen[i] = option
            ratio = ratios[option]
            if used <= limit:
                break
    total = 0.0
    for i in range(len(chosen)):
        total += cost[chosen[i]]
    return total, ratio


@inner_kernel
def exact_choice(
    start: Integers, cost: Floats, memory: Floats, limit: float, price: float, best: float, chosen: Integers
) -> float:
    """The cheapest choice that fits, if it costs less than ``best``; else returns ``best`` and leaves ``chosen``.

    Keeps the Pareto front of (memory, cost) over the layers so far. A state is dropped when the rest cannot fit or
    cannot beat ``best``: by Lagrange, for any price >= 0 per byte, no completion of a state costs less than
    its cost + price * (its memory - limit) + sum over the rest of min(cost + price * memory).
    """
    layers = len(start) - 1
    rest_memory = np.zeros(layers + 1)
    rest_priced = np.zeros(layers + 1)
    for i in range(layers - 1, -1, -1):
        rest_memory[i] = rest_memory[i + 1] + memory[start[i] : start[i + 1]].min()
        priced = cost[start[i] : start[i + 1]] + price * memory[start[i] : start[i + 1]]
        rest_priced[i] = rest_priced[i + 1] + priced.min()
    same = _SAME_COST * best

    front_memory = np.zeros(1)
    front_cost = np.zeros(1)
    front_node = np.zeros(1, dtype=np.int64)
    # The tree of all states kept: its parent, and the option that led to it.
    parents = [-1]
    taken = [-1]
    for i in range(layers):
        options = start[i + 1] - start[i]
        count = len(front_cost) * options
        grown_memory = np.empty(count)
        grown_cost = np.empty(count)
        for o in range(options):
            for j in range(len(front_cost)):
                grown_memory[o * len(front_cost) + j] = front_memory[j] + memory[start[i] + o]
                grown_cost[o * len(front_cost) + j] = front_cost[j] + cost[start[i] + o]
        next_memory = np.empty(count)
        next_cost = np.empty(count)
        next_node = np.empty(count, dtype=np.int64)
        kept = 0
        cheapest = np.inf
        for g in stable_order(grown_memory, count):
            if grown_memory[g] + rest_memory[i + 1] > limit:
                break
            bound = grown_cost[g] + price * (grown_memory[g] - limit) + rest_priced[i + 1]
            if grown_cost[g] < cheapest - same and bound < best - same:
                cheapest = grown_cost[g]
                next_memory[kept] = grown_memory[g]
                next_cost[kept] = grown_cost[g]
                next_node[kept] = len(parents)
                parents.append(front_node[g % len(front_cost)])
                taken.append(start[i] + g // len(front_cost))
                kept += 1
        front_memory = next_memory[:kept]
        front_cost = next_cost[:kept]
        front_node = next_node[:kept]
    if len(front_cost) == 0:
        return best
    # Costs fall as memory grows: the last state is the cheapest.
    node = front_node[-1]
    for i in range(layers - 1, -1, -1):
        chosen[i] = taken[node]
        node = parents[node]
    return float(front_cost[-1])


@kernel
def choose(start: Integers, cost: Floats, memory: Floats, limit: float, choosing: Choosing, chosen: Integers) -> float:
    """The stage's time when the fastest options, ``chosen``, do not fit; writes what fits instead there.

    inf if nothing fits or, for an exact choice, matters.
    """
    time, price = greedy_choice(start, cost, memory, limit, chosen)
    # A price of zero: the swaps came for nothing, and nothing is faster.
    if not choosing.exact or time <= choosing.lower_s or price <= 0.0 or time == np.inf:
        return time
    bound = -price * limit
    for i in range(len(chosen)):
        bound += (cost[start[i] : start[i + 1]] + price * memory[start[i] : start[i + 1]]).min()
    if bound > choosing.upper_s:
        return np.inf
    return exact_choice(start, cost, memory, limit, price, time, chosen)


@inner_kernel
def gather(
    arrays: Arrays, big: int, small: int, degree: int, mode: int, d: int
) -> tuple[Integers, Integers, NDArray[np.float64]]:
    """Options of the layers of stage big \\ small at degrees[degree] that d replicas may run: start, option numbers,
    bytes over the cut. The first layer's options hold those of the tensors, which all choices cost.

    ``start`` has length 1 when some layer has none.
    """
    layers = arrays.member.shape[1]
    start = np.zeros(layers + 1, dtype=np.int64)
    most = arrays.option_start[(degree + 1) * layers] - arrays.option_start[degree * layers]
    options = np.empty(most, dtype=np.int64)
    cut_bytes = np.zeros(most)
    stage_layers = 0
    count = 0
    for v in range(layers):
        if not arrays.member[big, v] or arrays.member[small, v]:
            continue
        for option in range(arrays.option_start[degree * layers + v], arrays.option_start[degree * layers + v + 1]):
            if arrays.allowed[mode, option] and arrays.least_degree[option] <= d:
                options[count] = option
                for j in range(arrays.neighbour_start[v + 1] - arrays.neighbour_start[v]):
                    other = arrays.neighbour[arrays.neighbour_start[v] + j]
                    if not arrays.member[big, other] or arrays.member[small, other]:
                        cut_bytes[count] += arrays.crossing_bytes[arrays.crossing_start[option] + j]
                count += 1
        stage_layers += 1
        start[stage_layers] = count
        if start[stage_layers] == start[stage_layers - 1]:
            return start[:1], options[:0], cut_bytes[:0]
    if stage_layers > 0:
        cut_bytes[: start[1]] += tensor_bytes(arrays, big, small)
    return start[: stage_layers + 1], options[:count], cut_bytes[:count]


@inner_kernel
def tensor_bytes(arrays: Arrays, big: int, small: int) -> float:
    """What stage big \\ small sends and receives of tensors with ends in it and outside."""
    total = 0.0
    for tensor in range(arrays.tensor_end.shape[0]):
        inside, outside = False, False
        for v in range(arrays.member.shape[1]):
            if arrays.tensor_end[tensor, v]:
                if arrays.member[big, v] and not arrays.member[small, v]:
                    inside = True
                else:
                    outside = True
        if inside and outside:
            total += arrays.tensor_bytes[tensor]
    return total


@inner_kernel
def option_costs_s(arrays: Arrays, options: Integers, cut_bytes: Floats, d: int, constants: Constants) -> Floats:
    """What each option adds to its stage's time at data-parallel degree d, in s per sample."""
    resync = 4.0 * (d - 1) / d / (constants.microbatches * constants.bandwidth_bytes_per_s)
    return (
        arrays.time_s[options] / d
        + cut_bytes / (d * constants.bandwidth_bytes_per_s)
        + arrays.weights_bytes[options] * resync
    )


@inner_kernel
def fastest_options(start: Integers, cost: Floats) -> Integers:
    """int64[layers]: the first option of least cost of each layer, whose options begin at ``start``."""
    fastest = np.empty(len(start) - 1, dtype=np.int64)
    for i in range(len(fastest)):
        fastest[i] = start[i] + np.argmin(cost[start[i] : start[i + 1]])
    return fastest


class StageOptions(NamedTuple):
    """The options of a stage at one degree. start: int64[layers + 1], options of layer i are start[i]..start[i+1].

    options: int64[..], their numbers in ``Arrays``. cost: float64[..], s. fastest: int64[layers].
    """

    start: Integers
    options: Integers
    cost: Floats
    fastest: Integers


@inner_kernel
def stage_time(
    arrays: Arrays, stage: StageOptions, y: int, d: int, limit: float, choosing: Choosing, chosen: Integers
) -> float:
    """The stage's time with up to y microbatches in flight, and in ``chosen`` the option of each layer."""
    start, options, cost, fastest = stage
    time = 0.0
    used = 0.0
    for i in range(len(fastest)):
        chosen[i] = fastest[i]
        time += cost[fastest[i]]
        option = options[fastest[i]]
        used += arrays.activation_bytes[option] * y + arrays.fixed_bytes[option] + arrays.shared_bytes[option] / d
    if used <= limit:
        return time
    memory = arrays.activation_bytes[options] * y + arrays.fixed_bytes[options] + arrays.shared_bytes[options] / d
    return choose(start, cost, memory, limit, choosing, chosen)


@inner_kernel
def stage_times(
    arrays: Arrays, stage: StageOptions, d: int, constants: Constants, choosing: Choosing, most_y: int
) -> Floats:
    """float64[y + 1]: the stage's time on d replicas with up to y microbatches in flight, for y = 1.. as long as
    anything fits.
    """
    times = np.empty(most_y + 1)
    times[0] = np.inf
    chosen = np.empty_like(stage.fastest)
    for y in range(1, most_y + 1):
        times[y] = stage_time(arrays, stage, y, d, constants.memory_bytes, choosing, chosen)
        # What does not fit, or is too slow to matter, is so for every larger y.
        if times[y] == np.inf:
            return times[:y]
    return times


@inner_kernel
def is_subset(arrays: Arrays, small: int, big: int) -> bool:
    """Whether downset ``small`` lies within downset ``big``."""
    for v in range(arrays.member.shape[1]):  # noqa: SIM110 - all() is no numba
        if arrays.member[small, v] and not arrays.member[big, v]:
            return False
    return True


@inner_kernel
def update(rows: NDArray[np.float64], rest_rows: NDArray[np.float64], devices: int, d: int, by_sum: Floats) -> None:
    """One stage before the rest: dp[I][k][s] = min(dp[I][k][s], max(dp[I'][k - devices][s - d], T(s)))."""
    stage = by_sum[d:]
    for k in range(devices, rows.shape[0]):
        rest = rest_rows[k - devices]
        if rest[-1] == np.inf:
            continue
        row = rows[k, d : d + len(stage)]
        for i in range(len(stage)):
            row[i] = min(row[i], max(stage[i], rest[i]))


@kernel
def fill(arrays: Arrays, table: NDArray[np.float64], constants: Constants, choosing: Choosing) -> int:
    """Fills float64[downsets, K + 1, S + 1]: the least max-time in s for at most k devices and degrees summing to at
    most s. Returns how many pairs of nested downsets there are.
    """
    table[:] = np.inf
    table[0] = 0.0
    most_s = constants.data_parallel_limit
    any_least = np.any(arrays.least_degree > 1)
    pairs = 0
    for big in range(1, len(arrays.size)):
        for small in range(big):
            if not is_subset(arrays, small, big):
                continue
            pairs += 1
            for degree in range(len(arrays.degrees)):
                t = arrays.degrees[degree]
                # No stage of this degree can hold these layers, or none can in any mode: modes keep one option a layer.
                for mode in range(len(arrays.allowed)):
                    start, options, cut_bytes = gather(arrays, big, small, degree, mode, ANY_DEGREE)
                    if len(start) == 1:
                        break
                    for d in constants.data_parallel_degrees:
                        if t * d > constants.devices:
                            break
                        if any_least:
                            start, options, cut_bytes = gather(arrays, big, small, degree, mode, d)
                            if len(start) == 1:
                                continue
                        cost = option_costs_s(arrays, options, cut_bytes, d, constants)
                        stage = StageOptions(start, options, cost, fastest_options(start, cost))
                        times = stage_times(arrays, stage, d, constants, choosing, -(-most_s // d))
                        if len(times) == 1:
                            continue
                        by_sum = np.empty(min(most_s, (len(times) - 1) * d) + 1)
                        for s in range(d, len(by_sum)):
                            by_sum[s] = times[-(-s // d)]
                        update(table[big], table[small], t * d, d, by_sum)
        # "At most": more devices or a larger sum never hurt.
        for k in range(table.shape[1]):
            for s in range(table.shape[2]):
                if k > 0:
                    table[big, k, s] = min(table[big, k, s], table[big, k - 1, s])
                if s > 0:
                    table[big, k, s] = min(table[big, k, s], table[big, k, s - 1])
    return pairs


@kernel
def find_stage(
    arrays: Arrays, table: NDArray[np.float64], cell: tuple[int, int, int], constants: Constants, choosing: Choosing
) -> tuple[int, int, int, Integers]:
    """The first stage of a plan that attains dp[I][k][s], for a (k, s) that no smaller one attains.

    Returns I', the degree's index, d and the options chosen, in the order of the layers.
    """
    big, k, s = cell
    target = table[big, k, s]
    for small in range(big):
        if not is_subset(arrays, small, big):
            continue
        for degree in range(len(arrays.degrees)):
            t = arrays.degrees[degree]
            for mode in range(len(arrays.allowed)):
                for d in constants.data_parallel_degrees:
                    if t * d > k or d > s:
                        break
                    if table[small, k - t * d, s - d] > target:
                        continue
                    start, options, cut_bytes = gather(arrays, big, small, degree, mode, d)
                    if len(start) == 1:
                        continue
                    chosen = np.empty(len(start) - 1, dtype=np.int64)
                    cost = option_costs_s(arrays, options, cut_bytes, d, constants)
                    stage = StageOptions(start, options, cost, fastest_options(start, cost))
                    time = stage_time(arrays, stage, -(-s // d), d, constants.memory_bytes, choosing, chosen)
                    if time <= target:
                        return small, degree, d, options[chosen]
    raise AssertionError("a finite cell of the table has no first stage")
