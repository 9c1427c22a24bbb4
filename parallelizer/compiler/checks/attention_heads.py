"""Checks that a rank holds whole heads: features that divide are not enough, because heads are split by
splitting features.

Where the projections around a call are split over tp, query and key heads must divide by tp. Where Ulysses
distributes heads, the heads that remain on a rank of tp must divide by the number of ranks that Ulysses uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from parallelizer.compiler.observe.attention_calls import (
    AttentionCall,
    attention_calls,
    is_inside,
    projection_of,
    split_projections,
)
from parallelizer.diagnostics.diagnostic import Diagnostic, Related
from parallelizer.language.plan import Mesh

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation
    from parallelizer.styles.application import Application


def attention_heads(state: Compilation) -> Iterator[Diagnostic]:
    """Query and key-value heads must divide by tp where projections are split over it."""
    tp = state.mesh.sizes["tp"]
    split = split_projections(state.applications)
    dealt_out = {
        a.module: (a, ranks) for a in state.applications if (ranks := _dealt_out_to(a, state.mesh)) > 1
    }
    if (
        ((tp == 1 or not split) and not dealt_out)
        or state.workload is None
        or not any(p.is_meta for p in state.parameters.values())
    ):
        return
    wrong: dict[tuple[str, int, int], list[tuple[str, Application]]] = {}
    not_dealt: dict[tuple[str, int, int], list[tuple[str, Application]]] = {}
    for call, layers in attention_calls(state.applications, state.model, state.workload):
        projection = projection_of(call, state.modules, split) if tp > 1 else None
        each = tp if projection else 1
        rule, ranks = _around(call, dealt_out)
        for what, heads in (("query", call.queries), ("key-value", call.keys)):
            replicated = what == "key-value" and each % heads == 0 and _replicates(state, call)
            here = 1 if replicated else heads // each
            if rule is not None and (replicated or heads % each == 0) and here % ranks:
                not_dealt.setdefault((what, heads, each), []).extend([(call.path, rule)] * len(layers))
            if projection is not None and heads % tp and not replicated:
                wrong.setdefault((what, heads, call.queries), []).extend(
                    [(call.path, projection)] * len(layers)
                )
    for (what, heads, each), places in not_dealt.items():
        yield _cannot_be_dealt_out(what, heads, each, places, state.mesh)
    for (what, heads, queries), places in wrong.items():
        if what == "key-value" and ("query", heads, queries) in wrong:
            continue  # as many of both: one finding
        path, projection = places[0]
        more = f" ({len(places) - 1} more like it)" if len(places) > 1 else ""
        legal = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        more_ranks = ""
        shared = [str(n) for n in range(2 * heads, queries + 1, heads) if queries % n == 0]
        if what == "key-value" and shared:
            more_ranks = (
                f"; or {', '.join(shared)} with `replicate_kv: true` on the projections to keys and values"
            )
        span = state.mesh.spans.get("tp")
        yield Diagnostic(
            "heads-not-divisible",
            f"{path} has {heads} {what} heads, which tp={tp} does not divide{more}",
            span,
            f"tp can be {', '.join(legal)}{more_ranks}",
            related=(Related(projection.rule.span, "this rule splits its projections"),),
        )


def _replicates(state: Compilation, call: AttentionCall) -> bool:
    """Whether what made the keys of a call gives each head to a group of ranks."""
    ran = {p for p, begun in call.begun.items() if begun >= call.begun[_owner(state, call.path)]}
    return any(
        a.options.get("replicate_kv") and a.style == "colwise" and a.module in ran for a in state.applications
    )


def _owner(state: Compilation, path: str) -> str:
    """The nearest module around that has parameters."""
    while path and not any(True for _ in state.modules[path].parameters()):
        path = path.rpartition(".")[0]
    return path


def _dealt_out_to(a: Application, mesh: Mesh) -> int:
    """Over how many ranks an application has heads dealt out; 1 where it takes what fits, or the ranks are wrong already."""
    if a.slot != "attention":
        return 1
    method, degree = a.options.get("method"), a.options.get("ulysses_degree")
    if method == "ulysses":
        return mesh.sizes["cp"]
    return degree if method == "ulysses-ring" and degree and mesh.sizes["cp"] % degree == 0 else 1


def _around(
    call: AttentionCall, dealt_out: Mapping[str, tuple[Application, int]]
) -> tuple[Application | None, int]:
    inside = (found for module, found in dealt_out.items() if is_inside(call.path, module))
    return next(inside, (None, 1))


def _cannot_be_dealt_out(
    what: str, heads: int, tp: int, places: list[tuple[str, Application]], mesh: Mesh
) -> Diagnostic:
    """Ulysses gives each rank of cp whole heads, of those that a rank of tp has."""
    path, rule = places[0]
    more = f" ({len(places) - 1} more like it)" if len(places) > 1 else ""
    shared = f" ({tp} ranks of tp share them)" if tp > 1 else ""
    ranks = _dealt_out_to(rule, mesh)
    to, help_text, span = (
        f"ulysses_degree={ranks}",
        "choose a degree that divides the number of heads, or remove the option",
        None,
    )
    if rule.options["method"] == "ulysses":
        to, span = f"cp={ranks}", mesh.spans.get("cp")
        help_text = (
            "choose `method: all-gather` or `ring`, or `auto`, which chooses ulysses only for numbers of "
            "heads that divide"
        )
    return Diagnostic(
        "heads-not-divisible",
        f"{path} has {heads} {what} heads{shared}, which ulysses cannot distribute over {to}{more}",
        rule.spans.get("ulysses_degree" if "degree" in to else "method", rule.rule.span),
        help_text,
        related=(Related(span, f"cp={ranks} is set here"),) if span else (),
    )
