"""One measured process, of whichever version of piper_ray PYTHONPATH names: it solves a file and prints what it took.

Stands alone and asks for nothing that earlier versions lack. ``run.py`` says what it is given and what it prints.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

TIMED_S = 2.0
"""A solve is repeated for about this long, but MOST_ROUNDS times at most."""
MOST_ROUNDS = 15


def main() -> None:
    order: dict[str, Any] = json.loads(sys.argv[1])
    import piper_ray

    answer: dict[str, Any] = {"package": str(Path(piper_ray.__file__).resolve().parent)}
    piper_ray.solve(order["warm_up"], options=piper_ray.SolveOptions(threads=order["threads"]))
    instance = piper_ray.load(order["file"])
    try:
        if order["forecast"]:
            answer |= _forecast(instance)
        elif order["devices"] is not None:
            answer |= _frontier(instance, order)
        else:
            answer |= _solves(instance, order)
    except piper_ray.LimitError as refusal:
        answer |= {"refused": str(refusal)}
    print(json.dumps(answer | {"peak_bytes": _peak_bytes()}))


def _solves(instance: Any, order: dict[str, Any]) -> dict[str, Any]:
    import piper_ray

    options = piper_ray.SolveOptions(threads=order["threads"], time_limit_s=order["limit_s"])
    walls_s: list[float] = []
    cpus_s: list[float] = []
    while not walls_s or (sum(walls_s) < TIMED_S and len(walls_s) < MOST_ROUNDS):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        solution = piper_ray.solve(instance, options=options)
        walls_s.append(time.perf_counter() - began_s)
        cpus_s.append(time.process_time() - began_cpu_s)
    stats = solution.stats
    return {
        "wall_s": statistics.median(walls_s),
        "cpu_s": statistics.median(cpus_s),
        "rounds": len(walls_s),
        "answers": [_answer(solution)],
        "listed": stats.downsets,
        "live": max((evaluation.live_downsets for evaluation in stats.evaluations), default=0),
        "evaluations": len(stats.evaluations),
        "evaluations_s": sum(evaluation.seconds for evaluation in stats.evaluations),
        "lattice_s": stats.lattice_s + stats.stage_costs_s,
    }


def _frontier(instance: Any, order: dict[str, Any]) -> dict[str, Any]:
    import piper_ray

    options = piper_ray.SolveOptions(threads=order["threads"], time_limit_s=order["limit_s"])
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    found = piper_ray.frontier(instance, devices=range(order["devices"][0], order["devices"][1] + 1), options=options)
    return {
        "wall_s": time.perf_counter() - began_s,
        "cpu_s": time.process_time() - began_cpu_s,
        "rounds": 1,
        "answers": [_answer(point) for point in found.points()],
        "listed": found.stats.downsets,
        "live": None,
        "evaluations": found.stats.evaluations,
        "evaluations_s": None,
        "lattice_s": None,
    }


def _answer(found: Any) -> dict[str, Any]:
    lower_s = found.lower_bound_s
    return {
        "status": str(getattr(found.status, "value", found.status)),
        "time_per_sample_s": found.time_per_sample_s,
        "lower_bound_s": lower_s if math.isfinite(lower_s) else None,
    }


def _forecast(instance: Any) -> dict[str, Any]:
    from piper_ray.engine.preview import forecast_solve  # not public, but everywhere

    expected = forecast_solve(instance)
    return {"downsets": expected.downsets, "seconds": expected.seconds}


def _peak_bytes() -> int:
    """Resident memory, the most so far. Linux counts the parent's towards ru_maxrss, but not here."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
