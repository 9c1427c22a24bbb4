"""`other-size`: a forward takes the size of a rank's part for that of the whole model, or the other way round."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from parallelizer.diagnostics.diagnostic import HERE, Diagnostic, Related
from parallelizer.simulate.checks.followed_step import OPTIONS, Followed
from parallelizer.simulate.checks.grouped import grouped
from parallelizer.simulate.follow.beside import OtherSize


def other_size(followed: Followed) -> Iterator[Diagnostic]:
    """Calls that make no part of what the model makes before anything is split, and whose result comes into the loss."""

    def alike(one: OtherSize) -> Hashable:
        return one.function, one.shape, one.whole, one.written

    for same in grouped(followed.flow.other_sizes, alike):
        first, axes = same[0], " and ".join(same[0].axes)
        call = f"`{first.function.strip('_')}` in {followed.folded(one.module for one in same)}"
        if isinstance(first.shape, tuple):
            message = (
                f"{call} makes {_shape(first.shape)} on a rank of {axes}, and {_shape(first.whole)} in the whole model, "
                "of which this is no part"
            )
            help_text = (
                "the forward takes a size of the whole model for that of a rank's part, or the other way round: name the "
                "attribute that holds it in `divide`, or take the size from a tensor (`-1`)"
            )
        else:
            message = f"{call} computes with {first.shape:g} on a rank of {axes}, and with {first.whole:g} in the whole model"
            help_text = (
                "a rank's tensor does not have the size of the whole model: read the size from the configuration, or gather the "
                "tensor first"
            )
        span = next((s for axis in first.axes if (s := followed.span(first.module, axis, OPTIONS))), None)
        yield Diagnostic(
            "other-size",
            message,
            span or followed.span_inside(first.module),
            help_text,
            related=(Related(first.written, HERE),) if first.written else (),
        )


def _shape(shape: object) -> str:
    return f"[{', '.join(map(str, shape))}]" if isinstance(shape, tuple) else str(shape)
