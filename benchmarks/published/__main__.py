"""Predict training runs that others published, and print how far off the predictions are.

    python -m benchmarks.published [FILE] [--plot FILE.svg] [--cache FOLDER] [--fit]

FILE has the form of benchmarks/published/runs.yaml, which is the default. Each run is composed as an ordinary configuration,
traced, and priced. `--fit` fits the constants to the rows and cross-validates them by source instead.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.published import fit, show
from benchmarks.published.compose import left_out
from benchmarks.published.predictions import Prediction, predict_row, prepare
from benchmarks.published.rows import OURS, read
from parallelizer.diagnostics.diagnostic import PlanError


def main(arguments: list[str]) -> int:
    """Returns the exit status: 1 when a row could not be traced."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("file", nargs="?", type=Path, default=OURS)
    parser.add_argument("--plot", type=Path, help="write predicted against published throughput as SVG")
    parser.add_argument("--cache", type=Path, help="keep dry runs in this folder")
    parser.add_argument(
        "--fit", action="store_true", help="fit the constants, and cross-validate them by source"
    )
    options = parser.parse_args(arguments)
    rows = read(options.file)
    reasons: dict[str, int] = {}
    prepared, failed = [], 0
    for row in rows:
        if (why := left_out(row)) is not None:
            reasons[why] = reasons.get(why, 0) + 1
            continue
        try:
            prepared.append(prepare(row, options.cache))
        except PlanError as error:
            failed += 1
            print(f"{row.id}: not traced: {error}", file=sys.stderr)
    if options.fit:
        # A pipeline has no line that could be thinned; its runs test the constants and do not make them.
        thin = [(fit.thinned(p), fit.layers(p)) for p in prepared if p.traced.pipeline is None]
        print(fit.fit(thin))
        show.cross_validation(fit.cross_validated(thin, print))
        return 0
    predictions: list[Prediction] = []
    for one in prepared:
        predictions.append(predict_row(one))
        show.row(predictions[-1])
    show.sources(predictions)
    left = ", ".join(f"{count} for {why}" for why, count in reasons.items())
    print(f"\nleft out: {sum(reasons.values())} of {len(rows)} rows{f': {left}' if left else ''}")
    if options.plot:
        options.plot.write_text(show.plot(predictions))
    show.totals(predictions)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
