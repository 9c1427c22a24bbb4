"""Positions that a model computes or looks up itself: there must be enough of them, and under context
parallelism each rank must get the positions of its own part of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.compiler.observe.families import Family, family_of
from parallelizer.compiler.observe.position_reads import PositionSource, position_sources
from parallelizer.diagnostics.diagnostic import HERE, Diagnostic, Related
from parallelizer.language.fold import fold_paths
from parallelizer.language.glob import parse_glob

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.compiler.compilation import Compilation
    from parallelizer.diagnostics.diagnostic import Span
    from parallelizer.styles.application import Application


def positions(state: Compilation) -> Iterator[Diagnostic]:
    """Tables have a row for each token of the sequence; with cp above 1 they are split with it, and nothing is made
    from the length that a rank sees.
    """
    work, family = state.workload, family_of(state.model)
    if (
        work is None
        or (family is not None and family.checks_positions(state))
        or not any(p.is_meta for p in state.parameters.values())
    ):
        return
    given = [name for name, buffer in state.plan.batch.items() if buffer.make == "positions"]
    sources = position_sources(state.model, work, given, state.applications)
    buffers = [name for name, _ in state.model.named_buffers()]
    listed = {name for glob in state.plan.buffers for name in parse_glob(glob).select(buffers)}
    yield from _too_short(sources, listed, work.seq_len, work.spans.get("seq_len"))
    if family is not None and work.has_sequence():
        known = {s.name for s in sources if s.rows is not None and s.rows < work.seq_len}
        yield from _beyond(family, state.model, known, work.seq_len, work.spans.get("seq_len"))
    attention = next((a for a in state.applications if a.slot == "attention"), None)
    # Where a rule splits the sequence somewhere inside, forward begins with all of it.
    inside = any(a.splits_sequence() for a in state.applications)
    if state.mesh.sizes["cp"] > 1 and attention is not None and not inside:
        # A glob that matches no buffer is reported, and may be meant for one of these.
        if all(parse_glob(glob).select(buffers) for glob in state.plan.buffers):
            yield from _unlisted(sources, listed, attention, state.plan.file)
        yield from _local(sources, attention)


def _too_short(
    sources: tuple[PositionSource, ...], listed: set[str], seq_len: int, span: Span | None
) -> Iterator[Diagnostic]:
    """Tables that the check of the plan's `buffers` does not see."""
    short = {
        s.name: s.rows for s in sources if s.rows is not None and s.rows < seq_len and s.name not in listed
    }
    for name, rows in short.items():
        yield _too_few(name, rows, seq_len, span)


def _beyond(
    family: Family, model: nn.Module, known: set[str], seq_len: int, span: Span | None
) -> Iterator[Diagnostic]:
    """What the model says of its longest sequence, where `known`, the tables that are reported, do not show it."""
    longest, table = family.longest(model), family.position_table(model)
    if table is not None:
        name, rows = table
        if rows < seq_len and name not in known:
            yield _too_few(name, rows, seq_len, span)
    elif longest is not None and longest < seq_len and not known:
        yield Diagnostic(
            "sequence-too-long",
            f"the model's configuration says {longest:,} positions, but the sequence has {seq_len:,}",
            span,
            "the model computes positions and runs, but pretrained weights know only the first: shorten train.seq_len to "
            f"{longest:,} at most, or configure the model for longer sequences (max_position_embeddings, rope scaling)",
            "warning",
        )


def _too_few(name: str, rows: int, seq_len: int, span: Span | None) -> Diagnostic:
    return Diagnostic(
        "sequence-too-long",
        f"{name} has {rows:,} positions, but the sequence has {seq_len:,}",
        span,
        f"shorten train.seq_len to {rows:,} at most, or give the model a longer table",
    )


def _unlisted(
    sources: tuple[PositionSource, ...], listed: set[str], attention: Application, file: str
) -> Iterator[Diagnostic]:
    by_dim: dict[int, dict[str, None]] = {}
    for source in sources:
        if source.kind == "buffer" and source.name not in listed and source.dim is not None:
            by_dim.setdefault(source.dim, {})[source.name] = None
    for dim, names in by_dim.items():
        folded = fold_paths(names)
        entries = ", ".join(f'`"{name}": {dim}`' for name in folded)
        yield Diagnostic(
            "unlisted-buffer",
            f"forward reads {', '.join(folded)} by position, but no entry of `buffers` splits "
            f"{'it' if len(names) == 1 else 'them'} "
            "with the sequence",
            attention.rule.span,
            f"add {entries} to buffers.model of {file}",
        )


def _local(sources: tuple[PositionSource, ...], attention: Application) -> Iterator[Diagnostic]:
    for source in sources:
        where = source.module or "the model's forward"
        if source.kind == "made":
            message = f"{where} builds positions or a mask from the length of one rank's part ({source.name})"
            help_text = (
                "pass positions to forward and write `<its name>: positions` in buffers.batch; "
                "use `is_causal` for a causal mask"
            )
        elif source.kind == "parameter" and not any(s.kind in ("made", "given") for s in sources):
            message = f"{where} reads the first rows of {source.name}, for every part of the sequence"
            help_text = "look the rows up by positions that are passed to forward: `<its name>: positions` in buffers.batch"
        else:
            continue
        written = (Related(source.written, HERE),) if source.written else ()
        yield Diagnostic("local-positions", message, attention.rule.span, help_text, related=written)
