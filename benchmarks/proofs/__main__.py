"""A table of proofs: the shipped Llamas on every preset that fits (llama), or every other shipped model (families).

    python -m benchmarks.proofs [llama|families] [--full-mesh] [--only TEXT] [--json] [--write PAGE]

Exit status 0: every cell is proven. 1: one is not, or the page has no place for the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from benchmarks.proofs import families, matrix
from parallelizer.diagnostics import render
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.report.documents import verify_document

MATRICES = ("llama", "families")


def main(argv: Sequence[str] | None = None) -> int:
    """Prove what the command line asks for, and print it. Returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.proofs", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "matrix", nargs="?", choices=MATRICES, default=MATRICES[0], help="which table (llama)"
    )
    parser.add_argument(
        "--full-mesh",
        action="store_true",
        help="keep the meshes of presets of up to 16 ranks (axes above 2 become 2)",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only cells whose name contains this")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")
    parser.add_argument("--write", metavar="PAGE", help="the page that the table is written into")
    asked = parser.parse_args(argv)
    if asked.full_mesh and asked.matrix == "families":
        parser.error("families takes no --full-mesh")
    if asked.only and asked.write:
        parser.error("--write takes a whole table, and --only makes a part of one")
    try:
        if asked.matrix == "families":
            return families.run(only=asked.only, as_json=asked.json, page=asked.write)
        return matrix.run(full_mesh=asked.full_mesh, only=asked.only, as_json=asked.json, page=asked.write)
    except PlanError as error:
        if asked.json:
            json.dump(verify_document(None, tuple(error.diagnostics)), sys.stdout, indent=1)
            sys.stdout.write("\n")
        else:
            render.write(error.diagnostics, sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
