"""Tensors that move between placements of several axes, hop by hop: those that move alike, and how that reads."""

from __future__ import annotations

from collections.abc import Hashable

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.diagnostics.units import size
from parallelizer.language.fold import fold_paths
from parallelizer.runtime.redistribution import Move, Path, sent
from parallelizer.simulate.checks.grouped import grouped
from parallelizer.simulate.checks.traced_step import Traced
from parallelizer.styles.application import Program


def moved_alike(traced: Traced) -> list[tuple[list[Move], Span | None]]:
    """The moves of a step in groups of one rule, phase and path, each with the place of the rule."""

    def alike(move: Move) -> Hashable:
        ways = _steps(move.path), _steps(move.cheaper or ())
        return _rule(traced.program, move), move.phase, move.before, move.after, *ways

    return [(same, _rule(traced.program, same[0])) for same in grouped(traced.trace.moves, alike)]


def moves_text(moves: list[Move]) -> str:
    """Which tensor moves from where to where, by which hops, and what that sends."""
    first = moves[0]
    paths = fold_paths(dict.fromkeys(m.module for m in moves))
    where = ", ".join(p or "the root" for p in paths[:2]) + (
        f" and {len(paths) - 2} more" if paths[2:] else ""
    )
    return (
        f"in {first.phase} of {where} a tensor moves from {first.before} to {first.after} in "
        f"{len(first.path)} hops, {path_text(first.path)}: {len(moves):,} a step, "
        f"{size(sum(sent(m.path) for m in moves))} sent"
    )


def path_text(path: Path) -> str:
    """`all_reduce over tp_outer, then all_gather over tp`."""
    return ", then ".join(f"{hop.kind} over {hop.axis}" for hop in path)


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
