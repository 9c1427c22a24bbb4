"""`local-statistics`: a model computes something of the tokens of a batch, of which each rank has a part."""

from __future__ import annotations

from collections.abc import Iterator

from parallelizer.diagnostics.diagnostic import Diagnostic, Related
from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import DATA_AXES
from parallelizer.simulate.checks.grouped import grouped
from parallelizer.simulate.follow.statistics import FollowedStatistics
from parallelizer.styles.application import Program


def local_statistics(program: Program, statistics: FollowedStatistics) -> Iterator[Diagnostic]:
    """Each line of a model that does."""
    mesh = program.mesh
    axes = [a for a in DATA_AXES if mesh.sizes[a] > 1]
    of = f"one rank of {', '.join(f'{a}={mesh.sizes[a]}' for a in axes)}" if axes else "one part of the batch"
    related = tuple(
        Related(mesh.spans[a], f"{a}={mesh.sizes[a]} is set here") for a in axes if a in mesh.spans
    )
    for same in grouped(statistics.found, lambda s: (s.written, s.buffer.rpartition(".")[2], s.operator)):
        first = same[0]
        where = _folded([path for s in same for path in statistics.paths(s.module)]) or ""
        if first.buffer:
            buffers = _folded([path for s in same for path in statistics.paths(s.buffer)])
            message = (
                f"{where or 'the model'} updates {buffers} from the tokens of {of} alone, so each rank comes to other "
                "values"
            )
        else:
            message = (
                f"`{first.operator}`{f' in {where}' if where else ''} takes a sum over the tokens of {of} for that of the "
                "whole batch: what it computes is another number on every mesh"
            )
        yield Diagnostic(
            "local-statistics",
            message,
            first.written,
            "sum over all ranks first: s = parallelizer.sum_over_batch(s), of the sums and of the number of tokens; or take "
            "each row, or each token, by itself",
            "warning",
            related=related,
        )


def _folded(paths: list[str]) -> str:
    folded = fold_paths(dict.fromkeys(path for path in paths if path))
    return ", ".join(folded[:3]) + (f" and {len(folded) - 3} more" if folded[3:] else "")
