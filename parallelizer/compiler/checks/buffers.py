"""Checks the plan's `buffers`: which tensors have the sequence dimension that context parallelism splits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic, Related
from parallelizer.diagnostics.nearest import nearest
from parallelizer.language.glob import parse_glob
from parallelizer.language.plan import Buffer
from parallelizer.language.suggest import suggest
from parallelizer.styles.context_parallel.buffers import WHOLE
from parallelizer.styles.target import forward_names

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation
    from parallelizer.language.workload import Workload


def buffers(state: Compilation) -> Iterator[Diagnostic]:
    """Names exist, dimensions exist, and under cp every batch entry with the sequence in its shape is
    listed.
    """
    yield from _model_buffers(state)
    entries = state.workload.entries if state.workload else None
    for name, buffer in state.plan.batch.items():
        if entries is not None and buffer.make is None and name not in entries:
            near = nearest(name, entries, 1)
            yield Diagnostic(
                "unknown-buffer",
                f"the batch has no entry {name!r}",
                buffer.span,
                f"did you mean {near[0]}?" if near else f"it has {', '.join(entries)}",
            )
        elif entries is not None and buffer.dim is not None and buffer.dim >= len(entries[name].shape):
            yield Diagnostic(
                "unknown-dim",
                f"{name} has {len(entries[name].shape)} dimensions, not one of number {buffer.dim}",
                buffer.span,
                f"its shape is [{', '.join(map(str, entries[name].shape))}]",
            )
    if state.mesh.sizes["cp"] == 1 or any(a.splits_sequence() for a in state.applications):
        return
    attention = next((a for a in state.applications if a.slot == "attention"), None)
    if attention is None:
        return
    if not state.plan.batch:
        yield Diagnostic(
            "missing-buffers",
            "the plan uses context parallelism, but splits no batch entry",
            attention.rule.span,
            "add buffers: {batch: {input_ids: 1, labels: 1}}",
        )
        return
    for name, entry in (entries or {}).items():
        dim = entry.sequence_dim()
        if name in WHOLE and len(entry.shape) == 2:
            continue
        if dim is not None and name not in state.plan.batch:
            yield Diagnostic(
                "missing-buffers",
                f"the batch entry {name!r} has a sequence dimension, but the plan does not split it",
                attention.rule.span,
                f"add `{name}: {dim}` to buffers.batch of {state.plan.file}",
            )
            continue
        split = state.plan.batch[name] if dim is not None else None
        if split is not None and split.dim is not None and dim != split.dim < len(entry.shape):
            yield Diagnostic(
                "wrong-dim",
                f"{name} is split in dimension {split.dim}, but its sequence is in dimension {dim}",
                split.span,
                f"write `{name}: {dim}`: its shape is [{', '.join(map(str, entry.shape))}]",
            )
    inputs = forward_names(state.model)
    if state.plan.buffers and inputs is not None and not any(n in inputs for n in state.plan.batch):
        first: Buffer = next(iter(state.plan.batch.values()))
        yield Diagnostic(
            "unknown-buffer",
            "none of the split batch entries is a parameter of the model's forward",
            first.span,
            f"forward takes {', '.join(inputs)}",
        )


def _model_buffers(state: Compilation) -> Iterator[Diagnostic]:
    own = dict(state.model.named_buffers())
    for name, buffer in state.plan.buffers.items():
        matched = parse_glob(name).select(list(own))
        if not matched:
            near = suggest(name, list(own))
            yield Diagnostic(
                "unknown-buffer",
                f"`{name}` matches no buffer of the model",
                buffer.span,
                f"did you mean `{near[0][0]}`?" if near else f"it has {', '.join(list(own)[:8]) or 'none'}",
            )
        for path in matched:
            if buffer.dim is not None and buffer.dim >= own[path].ndim:
                yield Diagnostic(
                    "unknown-dim",
                    f"{path} has {own[path].ndim} dimensions, not one of number {buffer.dim}",
                    buffer.span,
                    f"its shape is {list(own[path].shape)}",
                )
            elif (
                buffer.dim is not None
                and state.workload
                and own[path].shape[buffer.dim] < state.workload.seq_len
            ):
                yield _too_short(name, path, tuple(own[path].shape), buffer, state.workload)


def _too_short(
    name: str, path: str, shape: tuple[int, ...], buffer: Buffer, workload: Workload
) -> Diagnostic:
    """A buffer without a position for every token: the wrong dimension of it, or a sequence that is too long."""
    dim, length = buffer.dim or 0, workload.seq_len
    sequence = workload.spans.get("seq_len")
    enough = [d for d, size in enumerate(shape) if size >= length]
    if not enough or buffer.span is None:
        message = f"{path} has {shape[dim]:,} positions, but the sequence has {length:,}"
        return Diagnostic("sequence-too-long", message, sequence, "shorten train.seq_len")
    message = (
        f"{path} {list(shape)} is split in dimension {dim}, which has {shape[dim]:,} positions, "
        f"but the sequence has {length:,}"
    )
    sizes = ", ".join(f"dimension {d} has {shape[d]:,}" for d in enough)
    help_text = f"{sizes}: write `{name}: {enough[0]}`, or shorten train.seq_len"
    related = (Related(sequence, "the sequence"),) if sequence else ()
    return Diagnostic("sequence-too-long", message, buffer.span, help_text, related=related)
