"""Prints the tables, or some rows of them: ``scripts/delivered [MODEL ...]``."""

from __future__ import annotations

import argparse

from scripts.delivery.table import CHUNKED_HEAD, HEAD, MODELS, chunked_row, row


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/delivered", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of inputs/, as {', '.join(MODELS)}; all if none")
    wanted = parser.parse_args().models or MODELS
    print("\n".join(HEAD))
    for name in wanted:
        print(row(name), flush=True)
    print("\n".join(["", *CHUNKED_HEAD]))
    for name in wanted:
        print(chunked_row(name), flush=True)


main()
