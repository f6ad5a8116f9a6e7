"""The paper's own dynamic program, plainly written: an oracle for tests and a yardstick for benchmarks.

Shares no code with the solver. Numba is loaded when a table is first filled.
"""
