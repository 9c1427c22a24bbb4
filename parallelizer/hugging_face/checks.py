"""A transformers model whose sequence is cut: what makes its masks, and where its positions and documents come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic, Related
from parallelizer.hugging_face import layout
from parallelizer.hugging_face.architecture import is_model

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation
    from parallelizer.styles.application import Application

POSITIONS, MASK = "position_ids", "attention_mask"


def pretrained(state: Compilation) -> Iterator[Diagnostic]:
    """Attention that knows the sequence's order, positions of the whole sequence, masks of whole columns."""
    if not is_model(state.model):
        return
    context, stream = _cuts(state)
    yield from _implementation(state, context, stream)
    yield from _positions(state, context, stream)
    yield from _window(state)
    if context is not None:
        yield from _documents(state, context)
        yield from _mask(state)


def lacks_positions(state: Compilation) -> bool:
    """Whether `pretrained` says that positions are missing."""
    if not is_model(state.model):
        return False
    return any(_positions(state, *_cuts(state)))


def masks_refused(state: Compilation) -> bool:
    """Whether `pretrained` says that the model's masks are made for a part of the sequence: then so are their positions."""
    return is_model(state.model) and any(_implementation(state, *_cuts(state)))


def _cuts(state: Compilation) -> tuple[Application | None, Application | None]:
    """What splits the sequence over cp, and what splits the embedded tokens over tp."""
    context = layout.splits_context(state.applications) if state.mesh.sizes["cp"] > 1 else None
    return context, layout.splits_stream(state.applications, layout.embedding(state.model))


def _implementation(
    state: Compilation, context: Application | None, stream: Application | None
) -> Iterator[Diagnostic]:
    if context is None and stream is None:
        return
    name, model = layout.implementation(state.model), state.model
    settable = layout.is_settable(model)
    if name == layout.IMPLEMENTATION or (name == layout.PLAIN and settable):
        return
    if context is not None:
        seen = f"the tokens of one rank of cp={state.mesh.sizes['cp']} alone"
    else:
        seen = "a rank's part of the stream, which the embedding hands on split over tp"
    help_text = 'call `model.set_attn_implementation("sdpa")` first, or leave out model.attention'
    if not settable:
        help_text = "write `layouts: {stream: replicate}`"
        if context is not None:
            help_text = "take a mesh with cp=1, or split the sequence inside the model, as `init` proposes it"
    elif layout.needs_ours(model) or not layout.supports_plain(model):
        help_text = (
            "call `parallelizer.hugging_face.register()` and `model.set_attn_implementation("
            f'"{layout.IMPLEMENTATION}")` first, or leave out model.attention'
        )
    cut = context or stream
    yield Diagnostic(
        "attention-implementation",
        f"{type(model).__name__} has transformers' attention `{name}`, "
        f"{'' if settable else 'cannot be given another, '}and its masks are made for {seen}",
        cut.rule.span if cut else None,
        help_text,
    )


def _positions(
    state: Compilation, context: Application | None, stream: Application | None
) -> Iterator[Diagnostic]:
    plan, entries = state.plan, state.workload.entries if state.workload else {}
    if POSITIONS in plan.batch or POSITIONS in entries or not layout.takes_positions(state.model):
        return
    path = layout.embedding(state.model)
    if context is not None and not plan.buffers:
        cut, where = context, "a rank's part of the sequence"
    elif stream is not None and path is not None and layout.counts_behind(state.model, path):
        cut, where = stream, "what its embedding hands on, which is a part of the sequence"
    else:
        return
    yield Diagnostic(
        "local-positions",
        f"{type(state.model).__name__} counts positions from 0 in {where}",
        cut.rule.span,
        f"add `{POSITIONS}: positions` to buffers.batch of {plan.file}",
    )


def _documents(state: Compilation, context: Application) -> Iterator[Diagnostic]:
    own, mask = state.plan.batch.get(POSITIONS), state.plan.batch.get(MASK)
    entries = state.workload.entries if state.workload else {}
    if own is None or own.make is not None or mask is not None or MASK in entries:
        return  # with a mask, transformers does not look at positions
    yield Diagnostic(
        "lost-documents",
        f"{POSITIONS} are the batch's own: transformers takes their jumps for the beginnings of documents, and a rank of "
        "cp would see other jumps",
        own.span,
        f"write `{POSITIONS}: positions` where a sequence is one document; for packed ones, let an entry number them, "
        f"`documents: {{dim: 1, documents: true}}`, and add `{MASK}: document-mask`",
        related=(Related(context.rule.span, "this rule splits the sequence"),),
    )


def _mask(state: Compilation) -> Iterator[Diagnostic]:
    mask = state.plan.batch.get(MASK)
    if mask is None or mask.make is not None or mask.dim == 2:
        return
    yield Diagnostic(
        "split-mask",
        f"{MASK} is split in dimension {mask.dim}, and says of all keys whether they are padding: attention on a rank sees "
        "all of them",
        mask.span,
        f"leave {MASK} out of buffers.batch: it stays whole (a mask of four dimensions is split in its rows, dimension 2)",
    )


def _window(state: Compilation) -> Iterator[Diagnostic]:
    mask = state.plan.batch.get(MASK)
    if mask is not None and mask.make is not None and layout.has_windows(state.model):
        yield Diagnostic(
            "lost-window",
            f"{type(state.model).__name__} has layers with a window, and lays none over a mask of four dimensions: they "
            "would see whole documents",
            mask.span,
            f"leave out `{MASK}: {mask.make}`, and pack no documents; or set sliding_window=null in model.config",
        )
