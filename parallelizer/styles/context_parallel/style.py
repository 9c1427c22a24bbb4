"""`context-parallel`: exact attention over a sequence that is split over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.language.styles import OptionKind, StyleDeclaration, declare
from parallelizer.styles.options import AXIS
from parallelizer.styles.registry import applies, exports
from parallelizer.styles.statements import MODULE, Statement

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.styles.application import Application, Exporting, Live

declare(
    StyleDeclaration(
        "context-parallel",
        "attention",
        "cp",
        "exact attention over a sequence that is split over ranks",
        {
            "axis": AXIS,
            "method": OptionKind(
                "choice",
                "how queries reach all keys; auto takes the method that sends least",
                ("all-gather", "ring", "ulysses", "ulysses-ring", "auto"),
            ),
            "ulysses_degree": OptionKind(
                "int",
                "the number of ranks over which ulysses-ring splits heads; by default the number that sends least",
            ),
            "balance": OptionKind(
                "choice",
                "which rows each rank gets, the same in all rules; auto: head-tail, or per-document if the batch has documents",
                ("auto", "head-tail", "per-document", "by-cost", "none"),
            ),
            "keep_gathered": OptionKind("bool", "keep the gathered keys and values for backward"),
        },
        defaults={"method": "all-gather", "balance": "auto", "keep_gathered": "false"},
    )
)


@applies("context-parallel")
def apply(application: Application, module: nn.Module, live: Live) -> None:
    """From now on the attention calls under the module's forward see the whole sequence."""
    from parallelizer.styles.context_parallel.intercept import ContextOptions, wrap

    written = application.options
    options = ContextOptions(
        keep_gathered=bool(written.get("keep_gathered")),
        method=str(written.get("method", "all-gather")),
        ulysses_degree=written.get("ulysses_degree"),
    )
    mesh = live.mesh[application.axes[0]]
    wrap(module, mesh, options, name=application.module, sequence=live.sequence)


@exports("context-parallel")
def export(application: Application, exporting: Exporting) -> Iterator[Statement]:
    """The same call, on this package's runtime: torch's own is experimental."""
    written, given = application.options, []
    if written.get("keep_gathered"):
        given.append("keep_gathered=True")
    if written.get("method", "all-gather") != "all-gather":
        given.append(f'method="{written["method"]}"')
    if written.get("ulysses_degree"):
        given.append(f"ulysses_degree={written['ulysses_degree']}")
    options = [f"ContextOptions({', '.join(given)})"] if given else []
    yield Statement("wrap", (MODULE, exporting.mesh, *options, "sequence=sequence"))
