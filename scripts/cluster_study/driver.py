"""The sweep's driver, on the head of the cluster: ``python -m scripts.cluster_study.driver SWEEP STORAGE ADDRESS``.

It says in JSON, a line each, how the sweep stands whenever a point is done, and what it is warned of.
"""

from __future__ import annotations

import json
import sys

from piper_ray.sweep.point import Progress
from piper_ray.sweep.run import run_sweep

_TOLD = ("points", "recorded", "done", "left", "workers", "start_s", "run_s", "worker_s", "solving_s", "cpu_s")


def main(sweep: str, storage: str, address: str) -> None:
    done = -1

    def listen(progress: Progress) -> None:
        nonlocal done
        if progress.done > done or not progress.left:
            done = progress.done
            told = (
                "points",
                "recorded",
                "done",
                "left",
                "workers",
                "start_s",
                "run_s",
                "worker_s",
                "solving_s",
                "cpu_s",
            )
            say(**{name: getattr(progress, name) for name in told})

    run_sweep(sweep, storage, resume=True, address=address, listener=listen, on_warning=lambda text: say(warning=text))


def say(**word: object) -> None:
    sys.stdout.write(json.dumps(word) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
