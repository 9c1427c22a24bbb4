"""`python -m tests.typos`: exit status 1 when fewer than 99 % of the typos are caught."""

from __future__ import annotations

import argparse
import sys

from tests.typos.sweep import shipped, sweep
from tests.typos.table import named, shares, table
from tests.typos.words import CLAIMED


def main() -> int:
    """Check every typo, and print the table and what survives."""
    parser = argparse.ArgumentParser(
        "python -m tests.typos", description="Typos that validate does not tell."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=2, help="substitutions and insertions at each place (2)")
    parser.add_argument("--cases", type=int, help="so many of them, drawn by the seed")
    parser.add_argument("--plan", action="append", help="the plan of this name alone")
    options = parser.parse_args()
    files = [path for path in shipped() if not options.plan or path.stem in options.plan]
    results = list(sweep(files, options.seed, options.draws, options.cases))
    print(table(results))
    print("not told by the right code at the right line:")
    print(named(results))
    every, harmful = shares(results)
    print(f"right code at the right line: {every:.2%} of the typos in {', '.join(CLAIMED)}")
    print(f"and {harmful:.2%} of those among them that change what the plan means")
    return int(harmful < 0.99)


if __name__ == "__main__":
    sys.exit(main())
