"""`attention-shape`: attention on a rank is called with other sizes than those of its heads and rows."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.simulate.checks.followed_step import Followed
from parallelizer.simulate.checks.grouped import grouped
from parallelizer.simulate.follow.attention_shapes import OtherShape
from parallelizer.simulate.whole_numbers import advised, heads_read

_OTHERWISE = (
    "tensor parallelism splits heads, context parallelism splits rows: check how forward reshapes features into heads, and "
    "which rules split its projections"
)


def attention_shape(followed: Followed) -> Iterator[Diagnostic]:
    """Attention calls that are not a rank's part of the calls of the model as it was."""

    def alike(o: OtherShape) -> Hashable:
        return followed.rule_of(o.module, "tp"), o.seen, o.whole

    for same in grouped(followed.flow.shapes, alike):
        first, where = same[0], followed.folded(o.module for o in same)
        path = followed.one(first.module)
        module, tp = followed.model.get_submodule(path), followed.program.mesh.sizes["tp"]
        numbers = heads_read(path, module, first.heads, first.whole.size, tp)
        help_text, near = advised(followed.program, numbers, _OTHERWISE)
        around = followed.span(first.module, None, ()) or followed.span_inside(path)
        yield Diagnostic(
            "attention-shape",
            f"attention in {where} {first.described()}",
            near.rule.span if near else around,
            help_text,
        )
