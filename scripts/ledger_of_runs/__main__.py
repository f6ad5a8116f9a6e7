"""Makes docs/ledger.md, and docs/ledger/ with workload, plan and certificate of each row: ``scripts/ledger [RUN ...]``.

Rows that are kept are not made again, but for runs that are named.
"""

from __future__ import annotations

import argparse
import sys
import time

from piper_ray.calibrate.layouts import NotExpressible
from piper_ray.model.errors import PiperRayError
from piper_ray.workloads.estimate.hardware import load_hardware
from scripts.ledger_of_runs.page import write_pages
from scripts.ledger_of_runs.rows import FOLDER, TABLE, read_rows, row_of, runs_with_pipelines, write_rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/ledger", description=__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="rows to make again")
    given = parser.parse_args()
    hardware = load_hardware()
    runs = {run.id: run for run in runs_with_pipelines()}
    unknown = [name for name in given.runs if name not in runs]
    if unknown:
        parser.error(f"{unknown[0]}: no published run with a pipeline has that name")
    rows = {row.run: row for row in read_rows(TABLE)}
    FOLDER.mkdir(exist_ok=True)
    for name in given.runs or [name for name in runs if name not in rows]:
        began_s = time.process_time()
        try:
            row = rows[name] = row_of(runs[name], hardware)
        except (NotExpressible, PiperRayError) as error:
            print(f"{name}: no row: {error}", file=sys.stderr)
            continue
        write_rows(rows.values(), TABLE)
        print(
            f"{name}: {row.behind:+.1%} behind, error {row.error:+.1%}, gap {row.gap:.2%}, "
            f"{time.process_time() - began_s:.1f} s of CPU",
            flush=True,
        )
    write_pages(read_rows(TABLE))
    return 0


if __name__ == "__main__":
    sys.exit(main())
