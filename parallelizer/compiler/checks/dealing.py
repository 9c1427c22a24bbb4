"""Checks the distribution of the sequence over cp: the inputs of `balance` exist, and padding does not count."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic, Related, Span, quoted

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation
    from parallelizer.language.plan import Buffer
    from parallelizer.styles.application import Application


def dealing(state: Compilation) -> Iterator[Diagnostic]:
    """One balance for all attention, the entries that it goes by, and padding that the loss ignores."""
    attention = [a for a in state.applications if a.slot == "attention"]
    if attention:
        yield from _one_balance(attention)
        yield from _goes_by(state, attention[0])
    yield from _ignored(state)


def _one_balance(attention: list[Application]) -> Iterator[Diagnostic]:
    first, *others = attention
    for other in others:
        if _balance(other) != _balance(first):
            span = other.spans.get("balance") or other.rule.span
            there = first.spans.get("balance") or first.rule.span
            yield Diagnostic(
                "mixed-balance",
                f"{other.module} has `balance: {_balance(other)}`, but {first.module} has `balance: {_balance(first)}`",
                span,
                "a batch is distributed in one way only: write the same `balance` in every rule",
                related=(Related(there, "the other `balance`"),),
            )
            return


def _balance(application: Application) -> str:
    return str(application.options.get("balance", "auto"))


def _goes_by(state: Compilation, first: Application) -> Iterator[Diagnostic]:
    plan, balance = state.plan, _balance(first)
    documents = next((b for b in plan.batch.values() if b.documents), None)
    span = first.spans.get("balance") or first.rule.span
    entries = state.workload.entries if state.workload else {}
    masks = [
        n for n, b in plan.batch.items()
        if b.dim is not None and n in entries and entries[n].dtype == "bool" and len(entries[n].shape) > 2
    ]  # fmt: skip
    if balance == "per-document" and documents is None:
        yield _lacking(
            "`balance: per-document` needs the documents of the batch, but no batch entry numbers them", span
        )
    elif balance == "by-cost" and documents is None and not (masks or not entries):
        yield _lacking(
            "`balance: by-cost` needs documents or a boolean mask, but the batch has neither", span
        )
    elif balance == "per-document" and plan.buffers and _rows(state) > 1:
        buffer = next(iter(plan.buffers.values()))
        yield Diagnostic(
            "order-by-row",
            f"`balance: per-document` distributes each row of the batch in its own order, but the model's buffers "
            f"{quoted(buffer.name)} have one order for all rows",
            span,
            "write `balance: by-cost`, or give the model `positions` in the batch instead of a table",
            related=(Related(buffer.span, "these buffers have one order"),),
        )
    for entry in plan.batch.values():
        if entry.make == "document-mask" and documents is None:
            yield _lacking(
                f"{quoted(entry.name)} is a mask of documents, but no batch entry numbers the documents",
                entry.span,
            )


def _lacking(message: str, span: Span) -> Diagnostic:
    help_text = "name the entry: `document_ids: {dim: 1, documents: true}` in buffers.batch"
    return Diagnostic("no-documents", message, span, help_text)


def _rows(state: Compilation) -> int:
    """Rows of the batch that a rank has at a time."""
    work = state.workload
    return (
        1
        if work is None
        else work.batch_size // work.accumulate // state.mesh.size("dp_replicate", "dp_shard")
    )


def _ignored(state: Compilation) -> Iterator[Diagnostic]:
    """What the loss would count of the padding."""
    entries = state.workload.entries if state.workload else {}
    padded = [b for b in state.plan.batch.values() if b.pad is not None]
    if not padded or not entries or not _divides_not(state):
        return
    for name, entry in entries.items():
        buffer: Buffer | None = state.plan.batch.get(name)
        if entry.ignore is None or buffer is None or buffer.pad == entry.ignore:
            continue
        said = f"is padded with {buffer.pad}" if buffer.pad is not None else "is padded with 0"
        yield Diagnostic(
            "padding-counts",
            f"{quoted(name)} {said}, but the loss ignores only {entry.ignore} and would count the padding",
            buffer.span,
            f"write `{name}: {{dim: {buffer.dim}, pad: {entry.ignore}}}`",
        )
    if all(entry.ignore is None for entry in entries.values()):
        yield Diagnostic(
            "padding-counts",
            "sequences may be padded, but no batch entry of the model has a value that the loss ignores",
            padded[0].span,
            "add it to the model's configuration: `labels: {..., ignore: -100}`, or remove `pad`",
        )


def _divides_not(state: Compilation) -> bool:
    cp, tp = state.mesh.sizes["cp"], state.mesh.sizes["tp"]
    return cp > 1 and state.workload is not None and state.workload.seq_len % math.lcm(2 * cp, cp * tp) != 0
