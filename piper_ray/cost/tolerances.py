"""How exactly the solver computes: its tolerances for equal, zero and proved. ``evaluate`` has its own."""

PROOF = 1e-9
"""Relative. A plan is optimal if none faster than (1 - PROOF) of its value exists."""

RESOLUTION = 1e-100
"""Smaller values count as zero. It keeps divisions by a threshold finite."""

THRESHOLD_TOLERANCE = 1e-10
"""Relative. A plan of time lambda is found at threshold lambda although its stages' sums round differently from
``evaluate``'s."""

MEMORY_TOLERANCE = 5e-10
"""Relative. Differences of prefix sums round differently from sums over a stage; ``evaluate`` allows twice as much."""
