"""How exactly the solver computes: what it takes for equal, for nothing, and for proved. ``evaluate`` has its own."""

PROOF = 1e-9
"""Relative. A plan is optimal when nothing faster than (1 - PROOF) of its value exists."""

RESOLUTION = 1e-100
"""What is smaller counts as nothing, and keeps divisions by a threshold finite."""

THRESHOLD_TOLERANCE = 1e-10
"""Relative. A plan of time lambda is found at lambda although its stages' sums round otherwise than ``evaluate``'s."""

MEMORY_TOLERANCE = 5e-10
"""Relative. Sums of prefix differences round otherwise than sums over a stage; ``evaluate`` allows twice as much."""
