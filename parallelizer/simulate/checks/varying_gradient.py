"""`varying-gradient`: a parameter that every rank of an axis holds whole gets another gradient on each, and nothing sums
them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from parallelizer.compiler.match import taken_away
from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import TENSOR_AXES
from parallelizer.simulate.checks.followed_step import OPTIONS, Followed
from parallelizer.simulate.checks.grouped import grouped
from parallelizer.simulate.follow.flow import FollowedStep


@dataclass(frozen=True)
class Unreduced:
    """A parameter that every rank of `axis` holds whole, and whose gradient varies over it. `since` is where its
    module's input began to vary, None if the input does not.
    """

    parameter: str
    axis: str
    since: str | None


def varying_gradient(followed: Followed) -> Iterator[Diagnostic]:
    """Gradients that nothing sums. The rule of the module says how to sum them; without one, a rule like that of similar
    modules is proposed.
    """

    def alike(u: Unreduced) -> Hashable:
        module = u.parameter.rpartition(".")[0]
        own = followed.application(module, u.axis)
        kind = type(followed.model.get_submodule(followed.one(module)))
        return u.axis, u.since is None, own and id(own.rule), kind

    for same in grouped(unreduced(followed.flow), alike):
        yield _finding(followed, same)


def unreduced(flow: FollowedStep) -> Iterator[Unreduced]:
    """Gradients that vary over an axis after backward, of parameters that are neither sharded over it nor summed."""
    for gradient in flow.gradients:
        for axis in sorted(TENSOR_AXES):
            if axis in gradient.varies and axis not in gradient.partial | gradient.sharded:
                yield Unreduced(gradient.parameter, axis, gradient.arrived.get(axis))


def _finding(followed: Followed, same: list[Unreduced]) -> Diagnostic:
    first, axis = same[0], same[0].axis
    names = followed.folded(u.parameter for u in same)
    modules = fold_paths(p for u in same for p in followed.flow.paths(u.parameter.rpartition(".")[0]))
    module = first.parameter.rpartition(".")[0]
    own = followed.application(module, axis)
    message = (
        f"every rank of {axis} holds the whole of {names} but computes a different gradient for it, and no rule sums "
        "these gradients"
    )
    if first.since is not None:
        message += f"; the module's input is split since {followed.folded([first.since]) or 'the root'}"
    related = followed.since(first.since, axis) if first.since is not None else ()
    if own is not None:
        help_text = "write `grad: partial`, which sums the gradients"
        if own.style == "sequence":
            help_text = "write `layout: shard(1)`, because the module runs on a part of the sequence"
        span = followed.span(module, axis, ("grad", "layout"))
        return Diagnostic("varying-gradient", message, span, help_text, related=related)
    style = _style_of_like(followed, module, axis)
    help_text = f"add the rule `{modules[0]}: {style}`, which sums the gradients" + (
        f", and the same for {', '.join(modules[1:])}" if modules[1:] else ""
    )
    span = related[0].span if related else followed.span(module, axis, OPTIONS)
    others = tuple(r for r in related if r.span != span)
    taken = taken_away(followed.program.plan.rules, [followed.one(module)])
    return Diagnostic("varying-gradient", message, span, help_text, related=others + taken)


def _style_of_like(followed: Followed, module: str, axis: str) -> str:
    """The style of a module of the same class that keeps its parameters whole; `replicate` if there is none."""
    kind = type(followed.model.get_submodule(followed.one(module)))
    for a in followed.program.of_slot("params"):
        if a.style == "sequence" and axis in a.axes and type(followed.model.get_submodule(a.module)) is kind:
            return "sequence"
    return "replicate"
