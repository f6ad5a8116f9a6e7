"""The event loop; ``tests/simulate_twin.py`` has a plain version of it. Also a search for cycles in a small graph whose
arcs gain or lose (Bellman and Ford)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from piper_ray.compiled.jit import inner_kernel, kernel

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_F, _W = 0, 3


class Program(NamedTuple):
    """The input of the event loop. Where each rank holds one stage, ranks are numbered stage by stage, then by replica.

    first: int64[ranks + 1], the rank's first action. kind, stage, microbatch: int64[actions], rank after rank.
    duration_s: float64[actions]. stage_rank: int64[stages], the rank of the stage's first replica; replicas:
    int64[stages], their number; replica k mod replicas runs microbatch k. microbatches: their number.
    hop_source, hop_target: int64[hops], stages. hop_forward_s, hop_backward_s: float64[hops], on the sender's link.
    latency_s: of each transfer between ranks. joined: bool[actions], passes that begin when they and the next pass can
    begin, and send when both have ended. waited_for: bool[actions], passes whose sends must finish before the rank's
    next pass begins.
    """

    first: Integers
    kind: Integers
    stage: Integers
    microbatch: Integers
    duration_s: Floats
    stage_rank: Integers
    replicas: Integers
    microbatches: int
    hop_source: Integers
    hop_target: Integers
    hop_forward_s: Floats
    hop_backward_s: Floats
    latency_s: float
    joined: npt.NDArray[np.bool_]
    waited_for: npt.NDArray[np.bool_]


class Events(NamedTuple):
    """The result of the event loop: int64 or float64[actions]. A pass that never ran has start NaN.

    cause: the action whose end, or whose message's arrival, set this action's start; -1 at the very start.
    transit_s: how long before the start only a message on its way was missing.
    run: the number of actions that ran.
    """

    start_s: Floats
    end_s: Floats
    cause: Integers
    transit_s: Floats
    run: int


@inner_kernel
def _hops_by_stage(stage: Integers, stages: int) -> tuple[Integers, Integers]:
    """Hops grouped by one of their stages: int64[stages + 1], the start of each group; int64[hops], the hops by
    group."""
    start = np.zeros(stages + 1, np.int64)
    for value in stage:
        start[value + 1] += 1
    start = np.cumsum(start)
    fill = start[:-1].copy()
    order = np.empty(len(stage), np.int64)
    for hop in range(len(stage)):
        order[fill[stage[hop]]] = hop
        fill[stage[hop]] += 1
    return start, order


@kernel
def simulate_events(program: Program) -> Events:
    """Runs every rank's actions in order, each as soon as the one before has ended and its inputs have arrived.

    An arriving message wakes the rank that it is for, so each action is examined only a few times.
    """
    actions, ranks, stages = len(program.kind), len(program.first) - 1, len(program.replicas)
    hops, m = len(program.hop_source), program.microbatches
    start_s = np.full(actions, np.nan)
    end_s = np.full(actions, np.nan)
    cause = np.full(actions, -1, np.int64)
    transit_s = np.zeros(actions)
    into, into_hop = _hops_by_stage(program.hop_target, stages)
    out, out_hop = _hops_by_stage(program.hop_source, stages)
    # By [hop, microbatch], forwards and backwards: when a message arrives; NaN before it is sent.
    arrival = np.full((2, hops, m), np.nan)
    # By [forward or backward, stage, microbatch]: the action that ran it, -1 before.
    ran = np.full((2, stages, m), -1, np.int64)
    way_out_free_s = np.zeros(ranks)
    position = program.first[:-1].copy()
    queue = np.empty(ranks, np.int64)
    queued = np.ones(ranks, np.bool_)
    for rank in range(ranks):
        queue[rank] = ranks - 1 - rank
    waiting, run = ranks, 0
    while waiting > 0:
        waiting -= 1
        rank = queue[waiting]
        queued[rank] = False
        while position[rank] < program.first[rank + 1]:
            action = position[rank]
            behind = action + (2 if program.joined[action] else 1)
            ready, at_s, produced_s, because = True, 0.0, 0.0, -1
            if action > program.first[rank]:
                at_s = end_s[action - 1]
                produced_s = at_s
                because = action - 1
                if program.waited_for[action - 1]:
                    at_s = max(at_s, way_out_free_s[rank])
            for one in range(action, behind):
                kind, stage, k = program.kind[one], program.stage[one], program.microbatch[one]
                if kind == _W:
                    ready = ready and ran[1, stage, k] >= 0
                    continue
                direction = 0 if kind == _F else 1
                if direction == 1 and ran[0, stage, k] < 0:
                    ready = False
                groups, members = (into, into_hop) if direction == 0 else (out, out_hop)
                for index in range(groups[stage], groups[stage + 1]):
                    hop = members[index]
                    arrived_s = arrival[direction, hop, k]
                    if np.isnan(arrived_s):
                        ready = False
                        break
                    other = program.hop_source[hop] if direction == 0 else program.hop_target[hop]
                    sender = ran[direction, other, k]
                    produced_s = max(produced_s, end_s[sender])
                    if arrived_s > at_s:
                        at_s = arrived_s
                        because = sender
            if not ready:
                break
            transit_s[action] = at_s - produced_s
            for one in range(action, behind):
                start_s[one] = at_s
                end_s[one] = at_s + program.duration_s[one]
                at_s = end_s[one]
                cause[one] = because
                because = one
            run += behind - action
            position[rank] = behind
            for one in range(action, behind):
                kind, stage, k = program.kind[one], program.stage[one], program.microbatch[one]
                if kind == _W:
                    continue
                direction = 0 if kind == _F else 1
                ran[direction, stage, k] = one
                groups, members = (out, out_hop) if direction == 0 else (into, into_hop)
                for index in range(groups[stage], groups[stage + 1]):
                    hop = members[index]
                    other = program.hop_target[hop] if direction == 0 else program.hop_source[hop]
                    receiver = program.stage_rank[other] + k % program.replicas[other]
                    arrival_s = at_s
                    if receiver != rank:
                        out_s = program.hop_forward_s[hop] if direction == 0 else program.hop_backward_s[hop]
                        if out_s > 0.0:
                            way_out_free_s[rank] = max(way_out_free_s[rank], arrival_s) + out_s
                            arrival_s = way_out_free_s[rank]
                        arrival_s += program.latency_s
                    arrival[direction, hop, k] = arrival_s
                    if receiver != rank and not queued[receiver]:
                        queued[receiver] = True
                        queue[waiting] = receiver
                        waiting += 1
    return Events(start_s, end_s, cause, transit_s, run)


class OneStream(NamedTuple):
    """Lists with sends and receives, which share one stream on each rank. item_first: int64[ranks + 1]; item: int64, an
    action or ~transfer. need_first: int64[actions + 1], need: int64, the transfers that an action receives.
    sender: int64[transfers], actions. sender_rank, receiver_rank: int64[transfers]; seconds: float64[transfers].
    """

    item_first: Integers
    item: Integers
    need_first: Integers
    need: Integers
    sender: Integers
    sender_rank: Integers
    receiver_rank: Integers
    seconds: Floats


@kernel
def simulate_one_stream(duration_s: Floats, first: Integers, lists: OneStream) -> Events:
    """Runs every rank's list. A pass begins when the one before it and the transfers that it receives have ended. A
    transfer begins when, on both ranks, the passes before it and the transfer before it have ended.

    duration_s: float64[actions]. first: int64[ranks + 1], the rank's first action.
    """
    actions, ranks, count = len(duration_s), len(first) - 1, len(lists.seconds)
    start_s = np.full(actions, np.nan)
    end_s = np.full(actions, np.nan)
    cause = np.full(actions, -1, np.int64)
    transit_s = np.zeros(actions)
    # For each transfer: when both ranks let it begin, when it arrived, the conditions still open, its followers by
    # rank.
    begin_s = np.zeros(count)
    arrived_s = np.full(count, np.nan)
    open_sides = np.full(count, 4, np.int64)  # on each of two ranks: the list reaches it, the one before it has ended
    follower = np.full((2, count), -1, np.int64)
    last = np.full(ranks, -1, np.int64)
    free_s = np.zeros(ranks)
    ran = np.full(ranks, -1, np.int64)
    position = lists.item_first[:-1].copy()
    queue = np.empty(ranks, np.int64)
    queued = np.ones(ranks, np.bool_)
    for rank in range(ranks):
        queue[rank] = ranks - 1 - rank
    stack = np.empty(count + 1, np.int64)
    waiting, run = ranks, 0
    while waiting > 0:
        waiting -= 1
        rank = queue[waiting]
        queued[rank] = False
        while position[rank] < lists.item_first[rank + 1]:
            item = lists.item[position[rank]]
            if item >= 0:
                ready, at_s, produced_s, because = True, free_s[rank], free_s[rank], ran[rank]
                for index in range(lists.need_first[item], lists.need_first[item + 1]):
                    need = lists.need[index]
                    if np.isnan(arrived_s[need]):
                        ready = False
                        break
                    produced_s = max(produced_s, end_s[lists.sender[need]])
                    if arrived_s[need] > at_s:
                        at_s = arrived_s[need]
                        because = lists.sender[need]
                if not ready:
                    break
                start_s[item] = at_s
                end_s[item] = at_s + duration_s[item]
                cause[item] = because
                transit_s[item] = at_s - produced_s
                free_s[rank] = end_s[item]
                ran[rank] = item
                run += 1
                position[rank] += 1
                continue
            transfer = ~item
            position[rank] += 1
            begin_s[transfer] = max(begin_s[transfer], free_s[rank])
            open_sides[transfer] -= 1
            before = last[rank]
            last[rank] = transfer
            if before < 0:
                open_sides[transfer] -= 1
            elif not np.isnan(arrived_s[before]):
                begin_s[transfer] = max(begin_s[transfer], arrived_s[before])
                open_sides[transfer] -= 1
            else:
                follower[0 if lists.sender_rank[before] == rank else 1, before] = transfer
            depth = 0
            if open_sides[transfer] == 0:
                stack[0] = transfer
                depth = 1
            while depth > 0:
                depth -= 1
                done = stack[depth]
                arrived_s[done] = begin_s[done] + lists.seconds[done]
                for side in range(2):
                    other = lists.sender_rank[done] if side == 0 else lists.receiver_rank[done]
                    if not queued[other] and other != rank:
                        queued[other] = True
                        queue[waiting] = other
                        waiting += 1
                    behind = follower[side, done]
                    if behind >= 0:
                        begin_s[behind] = max(begin_s[behind], arrived_s[done])
                        open_sides[behind] -= 1
                        if open_sides[behind] == 0:
                            stack[depth] = behind
                            depth += 1
    return Events(start_s, end_s, cause, transit_s, run)


@kernel
def gaining_circle(source: Integers, target: Integers, gain: Floats, nodes: int) -> Integers:
    """int64[arcs of the cycle]: a cycle whose arcs gain more than they lose, last arc first; empty if there is none.

    source, target: int64[arcs], nodes from 0. gain: float64[arcs].
    """
    best = np.zeros(nodes)
    by = np.full(nodes, -1, np.int64)
    changed = -1
    for _ in range(nodes + 1):
        changed = -1
        for arc in range(len(source)):
            reached = best[source[arc]] + gain[arc]
            if reached > best[target[arc]]:
                best[target[arc]] = reached
                by[target[arc]] = arc
                changed = target[arc]
        if changed < 0:
            return np.empty(0, np.int64)
    # A node that still improves after this many rounds is reached from a cycle; going back far enough ends on the
    # cycle.
    for _ in range(nodes):
        changed = source[by[changed]]
    circle = np.empty(nodes, np.int64)
    length, at = 0, changed
    while length == 0 or at != changed:
        circle[length] = by[at]
        length += 1
        at = source[by[at]]
    return circle[:length]
