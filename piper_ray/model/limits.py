"""Limits on the size of an input. A larger file is refused, so that it does not exhaust the machine that reads it."""

from __future__ import annotations

FILE_BYTES = 256 * 2**20
LAYERS = 50_000
EDGES = 500_000
CONFIGURATIONS = 1_000_000  # TMPCs, over all layers and degrees
SYNC_FIGURES = 10_000_000  # fw and bw entries, over all TMPCs
DEVICES = 100_000
MICROBATCHES = 1_000_000_000
# Sums of LAYERS such figures, divided by B and N, stay far from overflow, so no time is ever infinite or NaN.
FIGURE = 1e30
LEAST_RATE = 1e-30
ID = 2**53  # in absolute value: every JSON reader keeps integers up to this one exact
