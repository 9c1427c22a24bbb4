"""The lint of tensors that move between placements in several hops: by which path, what it sends, and whether
another order of the hops would send less.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics import Diagnostic, Span
from parallelizer.fold import fold_paths
from parallelizer.program import Program
from parallelizer.redistribution import Move, Path, sent
from parallelizer.units import size

if TYPE_CHECKING:
    from parallelizer.traced import Traced


def multi_hop_redistributions(traced: Traced) -> Iterator[Diagnostic]:
    """A tensor sharded over several axes is moved on one after the other; the order decides what is sent. A
    note where that is the cheapest, a warning where another is.
    """
    groups: dict[tuple[object, ...], list[Move]] = {}
    for move in traced.trace.moves:
        ways = _steps(move.path), _steps(move.cheaper or ())
        key = (_rule(traced.program, move), move.phase, move.before, move.after, *ways)
        groups.setdefault(key, []).append(move)
    for moves in groups.values():
        yield _finding(moves, _rule(traced.program, moves[0]))


def _finding(moves: list[Move], span: Span | None) -> Diagnostic:
    first = moves[0]
    paths = fold_paths(dict.fromkeys(m.module for m in moves))
    where = ", ".join(p or "the root" for p in paths[:2]) + (
        f" and {len(paths) - 2} more" if paths[2:] else ""
    )
    message = (
        f"in {first.phase} of {where} a tensor moves from {first.before} to {first.after} in "
        f"{len(first.path)} hops, {_said(first.path)}: {len(moves):,} a step, "
        f"{size(sum(sent(m.path) for m in moves))} sent"
    )
    if first.cheaper is None:
        help_text = "torch's planner knows no order that sends less"
        return Diagnostic("multi-hop-redistribution", message, span, help_text, "note")
    less = size(sum(sent(m.cheaper or ()) for m in moves))
    return Diagnostic(
        "costly-redistribution",
        f"{message}, where {_said(first.cheaper)} would send {less}",
        span,
        "parallel.redistribute=min-cost takes that path in the run",
        "warning",
    )


def _rule(program: Program, move: Move) -> Span | None:
    """Where the rule stands for the nearest module around that has parameters or tensors placed."""
    path = move.module
    by_module = {
        a.module: a.rule.span for a in program.of_slot("io", "params") if set(a.axes) & set(move.axes)
    }
    while path and path not in by_module:
        path = path.rpartition(".")[0]
    return by_module.get(path)


def _steps(path: Path) -> tuple[tuple[str, str], ...]:
    return tuple((hop.kind, hop.axis) for hop in path)


def _said(path: Path) -> str:
    """`all_reduce over ep, all_gather over tp`."""
    return ", then ".join(f"{hop.kind} over {hop.axis}" for hop in path)
