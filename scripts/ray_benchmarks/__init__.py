"""The Ray backend: its cost on one machine, and from that a model of many. ``scripts/bench_ray --help``.

cases, meter -> runner (Ray) -> results; model (no I/O) -> tables
"""
