"""Ranks as processes that begin as copies of one which has imported what they run, as imports take longer than a job.

    python -m tests.ranks MODULE JOB.json RANKS

Each runs ``main(JOB.json, RANK)`` of ``tests.MODULE``. Ends with 0 if all of them do.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from importlib import import_module


def main(module: str, job_file: str, ranks: int) -> int:
    run = import_module(f"tests.{module}").main
    assert threading.active_count() == 1, f"no copy would have the other threads: {threading.enumerate()}"
    gc.freeze()  # so that collections in copies leave the pages alone that they share
    processes = []
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                run(job_file, rank)
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
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
