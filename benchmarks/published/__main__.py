"""Predict training runs that others published, and print how far off the predictions are.

    python -m benchmarks.published [FILE] [--only TEXT] [--plot FILE.svg] [--cache FOLDER] [--fit]

FILE has the form of benchmarks/published/runs.yaml, which is the default. Each run is composed as an ordinary configuration,
traced, and priced. A run that cannot be composed or traced is named, and skipped. `--fit` fits the constants to the rows, and
predicts each row with constants that were fitted without its source.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from benchmarks.published import fit, show
from benchmarks.published.compose import left_out
from benchmarks.published.predictions import Prediction, Prepared, predict_row, prepare
from benchmarks.published.rows import OURS, Row, read

One, Other = TypeVar("One", Row, Prepared), TypeVar("Other")


def main(arguments: list[str]) -> None:
    """Print the rows, the errors by source, the plot, and the totals on the last lines."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("file", nargs="?", type=Path, default=OURS)
    parser.add_argument("--only", default="", help="rows with this in their id")
    parser.add_argument("--plot", type=Path, help="write predicted against published throughput as SVG")
    parser.add_argument("--cache", type=Path, help="keep dry runs in this folder")
    parser.add_argument(
        "--fit", action="store_true", help="fit the constants, and cross-validate them by source"
    )
    options = parser.parse_args(arguments)
    rows = [row for row in read(options.file) if options.only in row.id]
    kept = []
    for row, why in _tried(rows, lambda row: row.id, left_out):
        if why is None:
            kept.append(row)
        else:
            print(f"{row.id}: left out: {why}")
    prepared = [
        found for _, found in _tried(kept, lambda row: row.id, lambda row: prepare(row, options.cache))
    ]
    predictions: list[Prediction]
    if options.fit:
        prepared = [one for one, _ in _tried(prepared, lambda one: one.row.id, predict_row)]
        fitted = fit.fit(prepared, print)
        print(f"fitted to {len(prepared)} rows: {fit.constants_of(fitted.solved())}, "
              f"reserved memory {fit.reserved_share(prepared):.3f}")  # fmt: skip
        predictions = fit.cross_validated(prepared, fitted, print)
        for one in predictions:
            show.row(one)
        print(f"\nspread: {show.spread(predictions):.3f}. Each row was predicted with constants that were fitted without its "
              f"source, and its memory with the share of other sources.")  # fmt: skip
    else:
        predictions = []
        for _, predicted in _tried(prepared, lambda one: one.row.id, predict_row):
            predictions.append(predicted)
            show.row(predicted)
    show.sources(predictions)
    print(f"\npredicted: {len(predictions)} of {len(rows)} rows")
    print(show.text_plot(predictions))
    if options.plot:
        options.plot.write_text(show.plot(predictions))
    show.totals(predictions)


def _tried(
    items: Iterable[One], name: Callable[[One], str], do: Callable[[One], Other]
) -> Iterable[tuple[One, Other]]:
    """What comes of each item; one that fails in any way is named on stderr and skipped."""
    for item in items:
        try:
            yield item, do(item)
        except Exception as error:  # other people's rows: each failure is reported, and the rest goes on
            print(f"{name(item)}: skipped: {type(error).__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
