"""The claims about `search`, measured, a table for each.

    python -m benchmarks.search [--only PART] [--case TEXT] [--kept FILE] [--write docs/search.md]
    python -m benchmarks.search --picture docs/pictures/search.svg

The parts: `time` and memory of large searches; `exhaustive`, against the dry run of every candidate; `large`,
against all candidates of large spaces, priced without bounds; `published`, against the
meshes of published runs; `valid`, whether random searches emit valid presets; `here`, found presets run on this machine.
Exit status 1 where a claim does not hold. The parts take hours together: `--kept` keeps each outcome.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.search import exhaustive, here, published, seconds, valid
from benchmarks.search.kept import Kept
from benchmarks.search.picture import picture
from benchmarks.search.tables import Table, write

PARTS: dict[str, Callable[[Kept, str], Table]] = {
    "time": seconds.measure,
    "exhaustive": exhaustive.measure,
    "large": exhaustive.measure_large,
    "published": published.measure,
    "valid": valid.measure,
    "here": here.measure,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the parts that are asked for. Returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.search", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; may be given again (all)")
    parser.add_argument("--case", default="", metavar="TEXT", help="only cases whose name contains this")
    parser.add_argument("--cases", type=int, metavar="N", help="how many random searches `valid` makes (200)")
    parser.add_argument(
        "--kept", type=Path, metavar="FILE", help="keep outcomes here, and measure only others"
    )
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="the page that the tables are written into"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw one search instead, as SVG")
    asked = parser.parse_args(argv)
    if asked.picture:
        asked.picture.write_text(picture())
        return 0
    if asked.write and asked.case:
        parser.error("--write takes whole tables, and --case makes a part of one")
    kept, tables = Kept(asked.kept), []
    if kept.stale:
        print(
            f"{len(kept.stale)} kept outcomes are of another version of the package: delete their lines in {asked.kept} "
            "to measure them again"
        )
    for name in asked.only or PARTS:
        if name == "valid" and asked.cases is not None:
            made = valid.measure(kept, asked.case, asked.cases)
        else:
            made = PARTS[name](kept, asked.case)
        tables.append(made)
        print(f"\n{made.markdown()}\n", flush=True)
    if asked.write:
        try:
            write(asked.write, tables)
        except (OSError, ValueError) as error:
            print(error, file=sys.stderr)
            return 1
    return 1 if any(one.wrong for one in tables) else 0


if __name__ == "__main__":
    sys.exit(main())
