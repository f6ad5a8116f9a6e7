"""What the check's kernels read.

Sizes: m downsets, n vertices, e edges that cost something, h tensors, r ways of running a stage, q degrees d. Seconds
are of one device: a stage of d replicas takes a d-th. Budgets have the margins for rounding in them, sums have not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_ray.certificate.kernels.downsets import Bits, Floats, Ints

FITS, UNFIT, TOO_HARD = 1, 0, 2

_MOST_CHOICES = 1_000_000
"""Of a stage's first layers, to compare. Room for them costs nothing until it is used."""


class Graph(NamedTuple):
    """tail, head: int64[e]. tensors: uint64[h, words], their ends; tensor_s: float64[h], what cutting one takes."""

    tail: Ints
    head: Ints
    tensors: Bits
    tensor_s: Floats


class Budgets(NamedTuple):
    """budget_s: of each stage. memory_bytes: of each device. degrees: int64[q], d, ascending.

    products: d t of all ways, ascending, each once. rounding_devices: by which sums of ``worth`` may be off.
    """

    devices: int
    budget_s: float
    memory_bytes: float
    degrees: Ints
    products: Ints
    rounding_devices: float


class Ways(NamedTuple):
    """degree: int64[r], t. first, end: int64[r], the degrees d that it has are degrees[first] .. degrees[end - 1].

    resync_s: float64[r, q], for each byte of weights. The options of vertex v are start[r, v] .. start[r, v + 1] - 1,
    with charges (seconds) of each of the vertex's edges in ``edge``: edge_start int64[n + 1], in the same order from
    charge_start[option] on.
    """

    degree: Ints
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
    """What any choice takes at least, summed over downsets: float64[r, m] each, and how far off a difference may be.

    into_s: of edges from outside. missing: int64[r, m], vertices that cannot be run in the way. incoming_s, outgoing_s:
    float64[r, e], in the stage of the edge's head and of its tail. rounding_s, rounding_weights, rounding_bytes:
    float64[r]; of bytes for each microbatch in flight.
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
    """Downsets by rising ``worth``, and what is claimed of each: its states are start .. start + states.

    worth: float64[m], devices that its layers take at least. device_limit, sum_limit: int64[m], what a plan's tail may
    take so that the layers in front find room. live: those with states.
    """

    bits: Bits
    worth: Floats
    device_limit: Ints
    sum_limit: Ints
    start: Ints
    devices: Ints
    data_parallel_sum: Ints
    live: Ints


class Claim(NamedTuple):
    """All that the check reads."""

    graph: Graph
    cluster: Budgets
    ways: Ways
    least: Least
    tails: ClaimedTails


class ThreadScratch(NamedTuple):
    """One thread's. gap: int64[4], the first stage that leads out of what is listed: J's place, I's, way, degree's."""

    crossing: Ints  # int64[e]
    item: Ints  # int64[n + 1], starts of the stage's options
    time: Floats  # float64[options of the way with the most], shares of the budget
    memory: Floats
    price: Floats  # float64[r, q], that which settled the last stage
    rest: Floats  # float64[3, n]
    room_time: Floats  # float64[3, room], choices
    room_memory: Floats
    gap: Ints
    tested: Ints  # int64[2]: pairs of downsets, choices


def make_scratch(claim: Claim) -> ThreadScratch:
    """For one thread."""
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
