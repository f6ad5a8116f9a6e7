"""``scripts/docs``: builds the site; or writes the pictures, the notebook or the output of examples anew."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts.documentation.build import ROOT, build


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/docs", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs", help="folder of the site")
    parser.add_argument(
        "--update", action="store_true", help="write the reference, and what all examples and the notebook print, anew"
    )
    parser.add_argument("--pictures", action="store_true", help="draw the pictures of docs/pictures anew")
    wanted = parser.parse_args()
    if wanted.update:
        from scripts.documentation import examples, generated, notebook

        generated.update()
        examples.update()
        notebook.update()
    if wanted.pictures:
        from scripts.documentation.pictures import draw_all

        draw_all(ROOT / "docs" / "pictures")
    if wanted.update or wanted.pictures:
        return 0
    code = build(wanted.out)
    if code == 0:
        print(wanted.out / "index.html")
    return code


if __name__ == "__main__":
    sys.exit(main())
