"""The paper's own dynamic program, plainly written: an oracle for tests and a yardstick for benchmarks.

Shares no code with the solver. Numba is loaded when a table is first filled.
"""

from __future__ import annotations

from piper_ray.planners.published.paper_table import PaperTableResult, TmpcChoice, paper_table

__all__ = ["PaperTableResult", "TmpcChoice", "paper_table"]
