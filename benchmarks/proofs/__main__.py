"""A table of proofs: the shipped Llamas on every preset that fits (llama), every other shipped model (families), every shipped
model under every pipeline schedule (pipelines), every mixture of transformers with its experts shared out (experts), or every
recipe of float8 (precision).

    python -m benchmarks.proofs [llama|families|pipelines|experts|precision] [--full-mesh] [--only TEXT] [--json] [--write PAGE]
        [--cells FILE]

Exit status 0: every cell is proven, or refused with a finding by `pipelines`. 1: one is not, or the page has no place for the
table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from benchmarks.proofs import experts, families, matrix, pipelines, precision
from parallelizer.diagnostics import render
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.report.documents import verify_document

MATRICES = ("llama", "families", "pipelines", "experts", "precision")
KEPT = ("pipelines", "experts", "precision")
"""Those whose outcomes a file can keep."""


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
    parser.add_argument(
        "--cells",
        metavar="FILE",
        help="keep the outcomes here, and run only cells that it lacks (pipelines, experts, precision)",
    )
    parser.add_argument(
        "--kept",
        action="store_true",
        help="run nothing, and show the cells that --cells has (pipelines, experts, precision)",
    )
    asked = parser.parse_args(argv)
    if asked.full_mesh and asked.matrix != "llama":
        parser.error(f"{asked.matrix} takes no --full-mesh")
    if (asked.cells or asked.kept) and asked.matrix not in KEPT:
        parser.error(f"{asked.matrix} takes no --cells and no --kept")
    if asked.kept and not asked.cells:
        parser.error("--kept takes a file of cells, --cells")
    if asked.only and asked.write:
        parser.error("--write takes a whole table, and --only makes a part of one")
    try:
        if asked.matrix == "families":
            return families.run(only=asked.only, as_json=asked.json, page=asked.write)
        if asked.matrix in KEPT:
            kept = {"pipelines": pipelines, "experts": experts, "precision": precision}[asked.matrix]
            return kept.run(
                only=asked.only,
                as_json=asked.json,
                page=asked.write,
                cells=asked.cells,
                run_missing=not asked.kept,
            )
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
