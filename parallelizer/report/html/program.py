"""What a plan says of a model, on a page: its parameters and modules with the rules that reached them, and
the rules' text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parallelizer.compiler.parameter_shards import ParameterShard
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.diagnostics.units import size
from parallelizer.report.html.markup import Markup, join, tag
from parallelizer.report.html.sources import Sources
from parallelizer.report.html.table import table
from parallelizer.report.rows.buffers import buffer_rows, dealt_out
from parallelizer.report.rows.modules import module_rows
from parallelizer.report.rows.parameters import mesh_axes, parameter_rows, shape, uses_by_name
from parallelizer.styles.application import Program


def section(program: Program, shards: Sequence[ParameterShard], sources: Sources) -> Markup:
    """The tables of parameters, modules and buffers, with a box that filters them."""
    return join(
        _search(),
        _parameters(program, shards, sources),
        _modules(program, sources),
        _buffers(program, sources),
    )


def rules(program: Program, sources: Sources) -> Markup:
    """The text of all that the program was compiled from, each line with what it did."""
    notes = _notes(program, sources)
    for placement in program.plan.layouts.values():
        if placement.span:
            sources.anchor(placement.span)
    return sources.listing(notes, {program.plan.file, *(r.span.file for r in program.plan.rules)})


def _search() -> Markup:
    """Shown by the script, without which it could do nothing."""
    box = tag(
        "input",
        type="search",
        id="filter",
        autocomplete="off",
        spellcheck="false",
        placeholder="layers.7.attention, colwise, shard(1) …",
        aria_describedby="matches",
    )
    count = tag("output", id="matches", for_="filter", aria_live="polite")
    return tag(
        "form", tag("label", "Filter", for_="filter"), box, count, class_="search", role="search", hidden=True
    )


def _parameters(program: Program, shards: Sequence[ParameterShard], sources: Sources) -> Markup:
    uses, axes = uses_by_name(program), mesh_axes(shards)
    heads = ["parameter", "#count", *axes, "global", "local", "#bytes", "*style and rule"]
    reasons = any(s.reason for s in shards)
    rows = []
    for row in parameter_rows(shards, apart=lambda shard: uses.get(shard.name, ())):
        shard = row.shard
        by = [_use(style, span, sources) for style, span in uses.get(shard.name, ())]
        rows.append([
            _paths(row.paths),
            f"{len(row.names):,}",
            *(_placement(shard.placements.get(axis, "replicate")) for axis in axes),
            _shape(shard.global_shape),
            _shape(shard.local_shape),
            size(row.bytes),
            by or _quiet("no style"),
            *([_quiet(shard.reason or "")] if reasons else []),
        ])  # fmt: skip
    heads += ["*whole because"] if reasons else []
    return table("Parameters; names in braces stand for many", heads, rows, searched=True, axes=axes)


def _modules(program: Program, sources: Sources) -> Markup | None:
    """Styles that do not show in the parameters' table."""
    rows = []
    for row in module_rows(program):
        flows = "; ".join(f"{option} {', '.join(flows)}" for option, flows in row.flows)
        rows.append([
            _paths(row.paths),
            f"{len(row.modules):,}",
            row.axis,
            tag("code", flows) if flows else Markup(),
            _use(row.style, row.span, sources),
        ])  # fmt: skip
    heads = ["module", "#count", "axis", "*layouts", "*style and rule"]
    return (
        table("Modules that a style acts on beside their parameters", heads, rows, searched=True)
        if rows
        else None
    )


def _buffers(program: Program, sources: Sources) -> Markup | None:
    found = buffer_rows(program)
    if not found:
        return None
    rows = [[tag("code", row.name), row.owner, row.split, sources.link(row.span)] for row in found]
    caption = f"Tensors split over cp={program.mesh.sizes['cp']}, {dealt_out(program)}"
    return table(caption, ["buffer", "of the", "split", "rule"], rows)


def _notes(program: Program, sources: Sources) -> dict[tuple[str, int], str]:
    """What each line did, by file and line: the modules that a rule reached, or the options of styles that
    were set there.
    """
    reached: dict[tuple[str, int], set[str]] = {}
    for rule in program.plan.rules:
        reached[rule.span.file, rule.span.line] = set()
    for a in program:
        reached.setdefault((a.rule.span.file, a.rule.span.line), set()).add(a.module)
    options: dict[tuple[str, int], set[str]] = {}
    for a in program:
        for option, span in a.spans.items():
            if (span.file, span.line) not in reached:
                sources.anchor(span)
                options.setdefault((span.file, span.line), set()).add(f"{a.style}: {option}")
    notes = {place: ", ".join(sorted(names)) for place, names in options.items()}
    for place, modules in reached.items():
        notes[place] = (
            f"{len(modules):,} module{'s' if len(modules) > 1 else ''}" if modules else "does nothing here"
        )
    return notes


def _paths(globs: Iterable[str]) -> list[Markup]:
    """Folded paths, one a line; the script unfolds them again to search."""
    return [tag("code", glob, class_="path") for glob in globs]


def _use(style: str, span: Span, sources: Sources) -> Markup:
    return tag("span", style, " ", sources.link(span), class_="use")


def _placement(placement: str) -> Markup:
    return _quiet("whole") if placement == "replicate" else tag("code", placement)


def _shape(sizes: tuple[int, ...]) -> Markup:
    return tag("code", shape(sizes, " × "))


def _quiet(text: str) -> Markup:
    return tag("span", text, class_="quiet")
