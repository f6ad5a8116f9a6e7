"""One process, of whichever version of piper_ray PYTHONPATH names: it solves files and prints each answer as a line.

Stands alone and asks for nothing that earlier versions lack. Its only argument says the files, schedules and threads.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any


def main() -> None:
    order: dict[str, Any] = json.loads(sys.argv[1])
    import piper_ray

    for case in order["cases"]:
        instance = piper_ray.load(case["file"])
        for schedule in case["schedules"]:
            for threads in order["threads"]:
                options = piper_ray.SolveOptions(threads=threads)
                found: dict[str, Any] = {"id": f"{case['id']}, {schedule}, threads {threads}"}
                try:
                    found |= _answer(piper_ray.solve(instance, schedule=schedule, options=options))
                    if case["devices"] is not None and schedule in ("2bw", "1f1b") and threads == 1:
                        first, last = case["devices"]
                        points = piper_ray.frontier(
                            instance, devices=range(first, last + 1), schedule=schedule, options=options
                        ).points()
                        found["frontier"] = [_answer(point) for point in points]
                except Exception as error:  # noqa: BLE001 - a refusal is an answer, too
                    found["refused"] = f"{type(error).__name__}: {error}"
                print(json.dumps(found, sort_keys=True), flush=True)


def _answer(found: Any) -> dict[str, Any]:
    plan, stats = getattr(found, "plan", None), getattr(found, "stats", None)
    return {
        "status": str(getattr(found.status, "value", found.status)),
        "value": _exactly(found.time_per_sample_s),
        "bound": _exactly(found.lower_bound_s),
        "plan": None if plan is None else plan.to_dict(),
        "thresholds": [
            f"{_exactly(one.threshold_s)} {one.feasible}" for one in getattr(stats, "evaluations", ()) if stats
        ],
    }


def _exactly(number: float | None) -> str | None:
    return None if number is None else "inf" if math.isinf(number) else float(number).hex()


if __name__ == "__main__":
    main()
