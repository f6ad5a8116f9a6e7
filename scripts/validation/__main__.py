"""Prices published runs in their own layouts, and prints predicted and measured steps: scripts/validate_estimates."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from piper_ray.calibrate.runs import read_runs
from piper_ray.model.errors import PiperRayError, UsageError
from piper_ray.workloads.estimate.hardware import load_hardware
from scripts.validation.errors import run_lines, table_lines
from scripts.validation.order import layouts_by_source, order_lines
from scripts.validation.page import made_texts
from scripts.validation.price import outcome_of
from scripts.validation.proof import proof_lines, proofs
from scripts.validation.sources import errors_by_source, source_lines

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "tests" / "data" / "runs"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/validate_estimates", description=__doc__)
    parser.add_argument(
        "--runs",
        metavar="FILE",
        action="append",
        help="runs in the form of tests/data/runs, or a list of such; may be given again; without it those are taken",
    )
    parser.add_argument("--hardware", metavar="FILE", help="a TOML file of constants over those of the built-in table")
    parser.add_argument("--json", action="store_true", help="one list of objects on stdout, and nothing else")
    parser.add_argument(
        "--update",
        action="store_true",
        help="write what is made of these runs: docs/estimates.md, README.md, doubt.toml, estimate_errors.jsonl",
    )
    arguments = parser.parse_args()
    if arguments.update and (arguments.runs or arguments.hardware):
        parser.error("--update: expected neither --runs nor --hardware")
    try:
        hardware = load_hardware(arguments.hardware)
        paths = arguments.runs or [RUNS / f"{name}.json" for name in ("published", "measured", "moe", "further")]
        outcomes = [outcome_of(run, hardware) for path in paths for run in read_runs(path)]
        if not outcomes:
            raise UsageError(f"{', '.join(map(str, paths))}: no run in it; expected at least one")
    except PiperRayError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if arguments.update:
        peaks = [outcome_of(run, hardware) for run in read_runs(RUNS / "memory.json")]
        for path, text in made_texts(ROOT, outcomes, peaks, proofs(outcomes, hardware)):
            path.write_text(text, encoding="utf-8")
    elif arguments.json:
        print(json.dumps([outcome.to_dict() for outcome in outcomes], indent=1, allow_nan=False))
    else:
        print("\n".join([*run_lines(outcomes), "", *table_lines(outcomes)]))
        print("\n".join(["", *source_lines(errors_by_source(outcomes)), "", *order_lines(layouts_by_source(outcomes))]))
        proved = proofs(outcomes, hardware)
        if proved:
            print("\n".join(["", *proof_lines(proved)]))
    return 0


sys.exit(main())
