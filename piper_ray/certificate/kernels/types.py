"""The records that the check's kernels read.

Sizes: m downsets, n vertices, e edges that cost something, h tensors, r ways of running a stage, q degrees d, g kinds
of devices. Seconds are for one device: a stage of d replicas takes a d-th. Budgets include the margins for rounding,
sums do not. Devices of several kinds are added up at prices, a number for each kind; with one kind it is 1.

A tail has a *front*: g times the kind of its first stage, and the kind of the stage in front of it. The last stage has
one of its own kind behind it. The *place* of a downset with a front is m times the front, and the downset.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.certificate.kernels.downsets import Bits, Floats, Ints

FITS, UNFIT, TOO_HARD = 1, 0, 2

_MOST_CHOICES = 1_000_000
"""Largest number of choices of a stage's first layers to compare. Room for them costs nothing until it is used."""


class Graph(NamedTuple):
    """tail, head: int64[e]. tensors: uint64[h, words], their ends; tensor_s: float64[h], the cost of cutting one."""

    tail: Ints
    head: Ints
    tensors: Bits
    tensor_s: Floats


class Budgets(NamedTuple):
    """devices: int64[g]. prices: float64[g], of a device; worth: of all devices. budget_s: of each stage. degrees:
    int64[q], d, ascending.

    products: d t of all ways, at prices, ascending, each once. rounding: the largest error of sums of ``worth``.
    """

    devices: Ints
    prices: Floats
    worth: float
    budget_s: float
    degrees: Ints
    products: Floats
    rounding: float


class Ways(NamedTuple):
    """degree: int64[r], t. kind, behind, ahead: int64[r], the kinds of the stage and of its neighbours. memory_bytes:
    float64[r], of each device. first, end: int64[r], the degrees d of way r are degrees[first] .. degrees[end - 1].

    resync_s: float64[r, q], for each byte of weights. The options of vertex v are start[r, v] .. start[r, v + 1] - 1.
    Their charges (seconds) are for each of the vertex's edges in ``edge``, from edge_start (int64[n + 1]) on, in the
    same order from charge_start[option] on.
    """

    degree: Ints
    kind: Ints
    behind: Ints
    ahead: Ints
    memory_bytes: Floats
    first: Ints
    end: Ints
    resync_s: Floats
    start: Ints
    time_s: Floats
    weights_bytes: Floats
    a_bytes: Floats
    b_bytes: Floats
    shared_bytes: Floats
    charge_start: Ints
    charge_s: Floats
    edge_start: Ints
    edge: Ints


class Least(NamedTuple):
    """The least over all choices, summed over downsets: float64[r, m] each, and the possible errors of differences.

    into_s: of edges from outside. missing: int64[r, m], vertices that cannot be run in the way. incoming_s, outgoing_s:
    float64[r, e], in the stage of the edge's head and of its tail. rounding_s, rounding_weights, rounding_bytes:
    float64[r]; the last for each microbatch in flight.
    """

    time_s: Floats
    weights_bytes: Floats
    a_bytes: Floats
    b_bytes: Floats
    shared_bytes: Floats
    into_s: Floats
    missing: Ints
    incoming_s: Floats
    outgoing_s: Floats
    rounding_s: Floats
    rounding_weights: Floats
    rounding_bytes: Floats


class ClaimedTails(NamedTuple):
    """Downsets by rising ``worth``, and the claim for each: the states of a place are from its start on, by price.

    worth: float64[m], the least price of its layers' devices. room: float64[m], sum_limit: int64[m], the most that a
    plan's tail may take and leave room for the layers in front. devices: int64[states, g]. spent: float64[states], at
    prices. live: the places with states.
    """

    bits: Bits
    worth: Floats
    room: Floats
    sum_limit: Ints
    start: Ints
    devices: Ints
    spent: Floats
    data_parallel_sum: Ints
    live: Ints


class Claim(NamedTuple):
    """Everything that the check reads."""

    graph: Graph
    cluster: Budgets
    ways: Ways
    least: Least
    tails: ClaimedTails


class ThreadScratch(NamedTuple):
    """The scratch of one thread. gap: int64[4], the first stage that leads to a tail not listed: J's place, I's, way,
    degree's."""

    crossing: Ints  # int64[e]
    item: Ints  # int64[n + 1], starts of the stage's options
    time: Floats  # float64[options of the way with the most], shares of the budget
    memory: Floats
    price: Floats  # float64[r, q], the one that settled the last stage
    rest: Floats  # float64[3, n]
    room_time: Floats  # float64[3, room], choices
    room_memory: Floats
    gap: Ints
    tested: Ints  # int64[2]: pairs of downsets, choices


def make_scratch(claim: Claim) -> ThreadScratch:
    """Returns scratch for one thread."""
    ways, vertices = claim.ways, claim.ways.edge_start.size - 1
    most = int((ways.start[:, -1] - ways.start[:, 0]).max(initial=0))
    return ThreadScratch(
        crossing=np.empty(claim.graph.tail.size, np.int64),
        item=np.empty(vertices + 1, np.int64),
        time=np.empty(most),
        memory=np.empty(most),
        rest=np.empty((3, max(1, vertices))),
        room_time=np.empty((3, _MOST_CHOICES)),
        room_memory=np.empty((3, _MOST_CHOICES)),
        price=np.ones((ways.degree.size, claim.cluster.degrees.size)),
        gap=np.full(4, -1, np.int64),
        tested=np.zeros(2, np.int64),
    )
