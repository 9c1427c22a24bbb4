"""`needs-whole`: an operator needs the whole of what each rank has a part of."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from parallelizer.diagnostics.diagnostic import HERE, Diagnostic, Related
from parallelizer.simulate.checks.followed_step import Followed
from parallelizer.simulate.checks.grouped import grouped
from parallelizer.simulate.follow.whole import WholeNeeded


def needs_whole(followed: Followed) -> Iterator[Diagnostic]:
    """Operators that look along a dimension which is cut, or use a sum before its terms are added up, and whose result
    comes into the loss.
    """

    def alike(w: WholeNeeded) -> Hashable:
        return followed.rule_of(w.since, w.axis), w.axis, w.operator, w.dim, w.written

    for same in grouped(followed.flow.wholes, alike):
        first, where = same[0], followed.folded(w.module for w in same)
        shape = f"[{', '.join(map(str, first.shape))}]"
        if first.dim is None:
            message = (
                f"`{first.operator}` in {where} uses a sum over {first.axis}, but each rank holds only its "
                "own term of the sum"
            )
            help_text = (
                f"add the terms up first: `input: partial -> replicate` with `axis: {first.axis}` on the "
                "module that comes next"
            )
        else:
            message = (
                f"`{first.operator}` in {where} needs all of dimension {first.dim} of {shape}, but each rank of "
                f"{first.axis} has only a part of it"
            )
            help_text = _whole_before(followed, first)
        began = followed.since(first.since, first.axis)
        around = followed.span(first.module, first.axis, ("input", "layout"))
        span = around or (began[0].span if began else followed.context_span())
        written = (Related(first.written, HERE),) if first.written else ()
        related = tuple(r for r in began if r.span != span)
        yield Diagnostic("needs-whole", message, span, help_text, related=(*written, *related))


def _whole_before(followed: Followed, needed: WholeNeeded) -> str:
    if needed.axis == "cp":
        dims = (entry.dim for entry in followed.program.plan.batch.values() if entry.dim is not None)
        dim = next(dims, 1)
        rule = f"{{style: prepare-io, axis: cp, input: shard({dim}) -> replicate, output: replicate -> shard({dim})}}"
        return (
            "context parallelism exchanges data between ranks for attention only: on the module that contains this "
            f"operator, write `{rule}`, with the sequence's dimension in its input and output"
        )
    lies = f"shard({needed.dim}) -> replicate"
    began = followed.folded([needed.since]) or "the root"
    return f"let {began} return the whole tensor (`output: replicate`), or gather it before the operator (`{lies}`)"
