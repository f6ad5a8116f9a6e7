"""Ranks as processes that begin as copies of one which has imported what they run, as imports take longer than a job.

    python -m tests.ranks DESCRIPTOR

Reads jobs from stdin, each a line of JSON: MODULE, JOB.json, the number of ranks, and whether warnings are errors. Each
rank runs ``main(JOB.json, RANK)`` of ``tests.MODULE``. Writes to the descriptor a line with the group of a job's
processes, and one with 0 if all ranks end with 0.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import traceback
import warnings
from importlib import import_module


def main(descriptor: int) -> None:
    for common in ("piper_ray.run.rank", "piper_ray.workloads.measure.operators"):
        import_module(common)
    with os.fdopen(descriptor, "w") as replies:
        for line in sys.stdin:
            process = os.fork()
            if process == 0:
                os.setsid()
                os._exit(run(*json.loads(line)))
            print(process, file=replies, flush=True)
            print(os.waitpid(process, 0)[1], file=replies, flush=True)


def run(module: str, job_file: str, ranks: int, strict: bool) -> int:
    if strict:
        warnings.simplefilter("error")
    of_rank = import_module(f"tests.{module}").main
    assert threading.active_count() == 1, f"no copy would have the other threads: {threading.enumerate()}"
    gc.freeze()  # so that collections in copies leave the pages alone that they share
    processes = []
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                of_rank(job_file, rank)
                code = 0
            except BaseException:  # noqa: BLE001 - nothing of it may go on as the original does
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        processes.append(process)
    ends = [os.waitpid(process, 0)[1] for process in processes]
    return int(any(ends))


if __name__ == "__main__":
    main(int(sys.argv[1]))
