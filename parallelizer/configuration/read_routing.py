"""A preset's key `routing`: what dry runs assume of the tokens of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parallelizer.configuration.reading import Reading
from parallelizer.diagnostics.diagnostic import quoted
from parallelizer.language.plan import Mesh
from parallelizer.language.routing import BALANCED, ROUTINGS, Routing

KEY = "parallel.routing"

HELP = "write balanced, worst, {skew: 1.3} (the busiest rank over the mean), or the path of a file that a run wrote"


def read_routing(reading: Reading, mesh: Mesh) -> Routing:
    """The routing on a mesh; a mistake is reported."""
    value = reading.get(KEY, ROUTINGS[0])
    if value is None or value == "balanced":
        return BALANCED
    if value == "worst":
        return Routing(worst=True)
    if isinstance(value, dict) and list(value) == ["skew"]:
        skew = value["skew"]
        if isinstance(skew, int | float) and not isinstance(skew, bool) and skew >= 1:
            if 1 < mesh.ep < skew:
                most = f"skew is {skew:g}, and the busiest of ep={mesh.ep} ranks gets at most {mesh.ep} times the mean"
                reading.error(
                    "unknown-value",
                    most,
                    f"{KEY}.skew",
                    "write `routing: worst` if all tokens go to one rank",
                )
            return Routing(skew=float(skew))
        reading.error("wrong-type", f"skew is {quoted(str(skew))}", f"{KEY}.skew", "a number from 1")
        return BALANCED
    if isinstance(value, str):
        return _of_file(reading, value)
    reading.error("unknown-value", f"there is no routing {quoted(str(value))}", KEY, HELP)
    return BALANCED


def _of_file(reading: Reading, name: str) -> Routing:
    path = next((p for folder in (Path(), *reading.origins.folders) if (p := folder / name).is_file()), None)
    if path is None:
        reading.error(
            "unknown-value", f"there is no routing {quoted(name)}, and no file of that name", KEY, HELP
        )
        return BALANCED
    try:
        return Routing(counted=_counts(json.loads(path.read_text())), file=name, span=reading.span(KEY))
    except (OSError, ValueError) as error:
        message = f"{name} has no counts of experts: {error}"
        reading.error(
            "unknown-value",
            message,
            KEY,
            'its form is {"layers.0.mlp.experts": [[[rows to each expert] for each rank] for each call]}',
        )
        return BALANCED


def _counts(read: Any) -> dict[str, list[list[list[int]]]]:
    """The counts by module. Raises ValueError for another form."""
    if not isinstance(read, dict) or not read:
        raise ValueError("it is not an object with the modules' paths")
    for path, calls in read.items():
        tables = calls if isinstance(calls, list) else []
        rows = [row for table in tables for row in (table if isinstance(table, list) else [None])]
        lengths = {len(row) if isinstance(row, list) else -1 for row in rows}
        numbers = [n for row in rows if isinstance(row, list) for n in row]
        # A rank of another stage has no rows.
        if len(lengths - {0}) != 1 or -1 in lengths or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"{path} is not a list of tables of whole numbers")
    return read
