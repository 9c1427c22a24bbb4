"""`python -m tests.fuzz --cases 10000 --seed 0`: exit status 1 when a case fails."""

from __future__ import annotations

import argparse
import sys
import time

from tests.fuzz.campaign import campaign, report


def main() -> int:
    """Run a campaign and print what came of it."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description="Fuzz plans, presets and overrides.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", type=int, action="append", help="run the case of this number alone")
    parser.add_argument(
        "--apart-every",
        type=int,
        default=200,
        help="each such case in a process of its own too (200; 0 for none)",
    )
    options = parser.parse_args()
    began = time.perf_counter()
    indices = options.only or range(options.start, options.start + options.cases)
    tally = campaign(options.seed, indices, options.apart_every)
    print(report(tally, options.seed))
    print(f"  {time.perf_counter() - began:.0f} s")
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
