"""The tables that an evaluation reads: TMPC options, sums over downsets, and both on a cluster."""
