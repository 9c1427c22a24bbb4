"""The dry run as one page that needs no network: the mesh, the memory over the step, what is sent, and every rule behind it."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import nn

from parallelizer.compiler import Program
from parallelizer.diagnostics import Diagnostic, PlanError, Span, counts, in_order
from parallelizer.fold import fold_paths
from parallelizer.plan import full_name
from parallelizer.shards import ParameterShard, parameter_shards
from parallelizer.show import html_mesh, html_step
from parallelizer.show.html_table import table
from parallelizer.show.markup import Child, Markup, data, join, tag
from parallelizer.show.plan import size
from parallelizer.show.sources import Sources
from parallelizer.simulate.trace import Trace


def write(
    program: Program,
    model: nn.Module,
    trace: Trace | None,
    path: str | Path,
    *,
    device: str,
    hardware: Mapping[str, Any] | None = None,
    diagnostics: Iterable[Diagnostic] | None = None,
    rank: int = 0,
) -> None:
    """Write the page. Without a trace it has no memory and no collectives.

    `diagnostics` are the program's unless given. The file appears whole or not at all. Raises PlanError when it cannot be written.
    """
    text = page(program, model, trace, device=device, hardware=hardware, diagnostics=diagnostics, rank=rank)
    # A module's name may hold what is no character at all.
    save(text.encode("utf-8", "replace"), path)


def save(content: bytes, path: str | Path) -> None:
    """Put a file in place at once: written under another name beside it, then renamed. Raises PlanError, and leaves nothing."""
    try:
        target = os.path.realpath(path)
        if os.path.lexists(target) and not os.path.isfile(target):
            raise OSError(0, "it is there and is no file")
        handle, beside = tempfile.mkstemp(prefix=".", suffix=".html", dir=os.path.dirname(target))
        try:
            with open(handle, "wb") as stream:
                stream.write(content)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(beside, 0o666 & ~mask)  # as `open` would have made it
            os.replace(beside, target)
        except BaseException:
            os.unlink(beside)
            raise
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise PlanError([
            Diagnostic("file-unwritable", f"cannot write {path}: {reason}", None, "name a file in a folder that exists and is yours")
        ]) from None


def page(
    program: Program,
    model: nn.Module,
    trace: Trace | None,
    *,
    device: str,
    hardware: Mapping[str, Any] | None = None,
    diagnostics: Iterable[Diagnostic] | None = None,
    rank: int = 0,
) -> str:
    """The page as text."""
    sources = Sources()
    found = in_order(program.diagnostics if diagnostics is None else diagnostics)
    shards = parameter_shards(program, model, rank)
    hardware = hardware or {}
    name = f"{program.plan.name} on {program.mesh}"
    # In this order: what is made first is listed first among the sources.
    parameters = _parameters(program, shards, sources)
    modules = _modules(program, sources)
    sections = [
        ("findings", "Findings", _findings(found, sources), counts(found)),
        ("mesh", "Mesh", html_mesh.section(program, trace, hardware, rank, sources), _mesh_line(program)),
        ("memory", "Memory", trace and html_step.memory(trace, hardware), f"of rank {rank}, over one step"),
        ("communication", "Communication", trace and html_step.communication(trace, sources), f"of rank {rank}, in one step"),
        ("parameters", "Parameters and modules", join(_search(), parameters, modules, _buffers(program, sources)),
         f"as rank {rank} holds them"),
        ("rules", "Rules", sources.listing(_notes(program)), "every line that the program was compiled from"),
    ]  # fmt: skip
    shown = [s for s in sections if s[2]]
    style, script = (files("parallelizer.show").joinpath(f).read_text("utf-8") for f in ("page.css", "page.js"))
    body = join(
        tag("a", "Skip to the content", href="#content", class_="skip"),
        _header(program, model, trace, shards, found, device, hardware, rank),
        tag("nav", tag("ul", [tag("li", tag("a", title, href=f"#{key}")) for key, title, _, _ in shown]), aria_label="Sections"),
        tag(
            "main",
            [
                tag("section", tag("header", tag("h2", title), tag("p", line)), content, id=key, aria_label=title)
                for key, title, content, line in shown
            ],
            id="content",
        ),
        _footer(trace, device),
        data("data", html_step.numbers(trace) if trace else {}),
        tag("script", Markup(script)),
    )
    head = join(
        tag("meta", charset="utf-8"),
        tag("title", f"{name}, parallelizer"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("style", Markup(style)),
    )
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', body), lang='en')}\n"


def _policy(script: str) -> str:
    """Nothing is loaded, and nothing runs but the page's own script."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _header(
    program: Program,
    model: nn.Module,
    trace: Trace | None,
    shards: Sequence[ParameterShard],
    found: Sequence[Diagnostic],
    device: str,
    hardware: Mapping[str, Any],
    rank: int,
) -> Markup:
    mesh = program.mesh
    whole, held = (sum(math.prod(shape) for shape in shapes) for shapes in
                   ([s.global_shape for s in shards], [s.local_shape for s in shards]))  # fmt: skip
    facts: list[tuple[str, Child, Child]] = [
        ("Ranks", f"{mesh.world_size:,}", _axes(mesh.sizes)),
        ("Parameters", _count(whole), f"{_count(held)} on rank {rank}, {size(sum(s.bytes for s in shards))}"),
    ]
    if trace:
        sent = sum(e.wire_bytes for e in trace.ledger)
        facts.append(("Peak memory", size(trace.memory.peak), html_step.fit(trace, hardware) or html_step.peak_place(trace.memory)))
        facts.append(("Sent in a step", size(sent), f"in {len(trace.ledger):,} collectives"))
    summary = tag("a", counts(found), href="#findings") if found else "none"
    facts.append(("Findings", summary, None if trace else "the step could not be traced"))
    described = f"{type(model).__name__}, as rank {rank} of {mesh.world_size:,} sees it; operators as on {device}"
    return tag(
        "header",
        tag("p", "parallelizer dry run", class_="eyebrow"),
        tag("h1", program.plan.name, " ", tag("span", "on "), str(mesh).replace(" x ", " × ")),
        tag("p", described, class_="lead"),
        tag("dl", [tag("div", tag("dt", term), tag("dd", value), tag("dd", more, class_="more") if more else None)
                   for term, value, more in facts], class_="facts"),
        class_="top",
    )  # fmt: skip


def _axes(sizes: Mapping[str, int]) -> str:
    return " × ".join(f"{n:,} {a}" for a, n in sizes.items() if n > 1) or "no axis above 1"


def _mesh_line(program: Program) -> str:
    ones = [a for a, n in program.mesh.sizes.items() if n == 1]
    return f"{', '.join(ones)}: size 1" if ones else "every axis is above 1"


def _footer(trace: Trace | None, device: str) -> Markup:
    folded = trace.folded if trace else None
    return tag(
        "footer",
        tag("p", f"{folded.count:,} equal layers of {folded.container} are traced once and counted {folded.count:,} times. "
                 if folded else None,
            f"The step ran on fake tensors with the operators of {device}." if trace else "Shapes and placements follow from the plan alone."),
    )  # fmt: skip


def _findings(found: Sequence[Diagnostic], sources: Sources) -> Markup | None:
    if not found:
        return None
    return tag(
        "ul",
        [
            tag(
                "li",
                tag("p", tag("b", d.severity), " ", tag("code", d.code), " ", sources.link(d.span)),
                tag("p", d.message),
                tag("p", d.help, class_="quiet") if d.help else None,
                [tag("p", r.label, " ", sources.link(r.span), class_="quiet") for r in d.related],
                class_=f"finding {d.severity}",
            )
            for d in found
        ],
        class_="findings",
    )


def _search() -> Markup:
    """Shown by the script, without which it could do nothing."""
    return tag(
        "form",
        tag("label", "Filter", for_="filter"),
        tag("input", type="search", id="filter", autocomplete="off", spellcheck="false",
            placeholder="layers.7.attention, colwise, shard(1) …", aria_describedby="matches"),
        tag("output", id="matches", for_="filter", aria_live="polite"),
        class_="search", role="search", hidden=True,
    )  # fmt: skip


@dataclass(frozen=True)
class _Row:
    """What parameters of one kind have in common, and their names."""

    shard: ParameterShard
    uses: tuple[tuple[str, Span], ...]
    names: list[str] = field(default_factory=list)


def _parameters(program: Program, shards: Sequence[ParameterShard], sources: Sources) -> Markup:
    uses: dict[str, list[tuple[str, Span]]] = {}
    for application in program.of_slot("params", "fsdp"):
        for name in application.params:
            uses.setdefault(full_name(application.module, name), []).append((application.style, application.rule.span))
    rows: dict[tuple[object, ...], _Row] = {}
    for s in shards:
        by = tuple(uses.get(s.name, ()))
        key = (s.dtype, s.global_shape, s.local_shape, tuple(s.placements.items()), s.reason, by)
        rows.setdefault(key, _Row(s, by)).names.append(s.name)
    axes = list(shards[0].placements) if shards else []
    return table(
        "Parameters; names in braces stand for many",
        ["parameter", "#count", *axes, "global", "local", "#bytes", "style and rule"],
        [
            [
                _names(row.names),
                f"{len(row.names):,}",
                *(_placement(row.shard.placements.get(axis, "replicate")) for axis in axes),
                _shape(row.shard.global_shape),
                _shape(row.shard.local_shape),
                size(row.shard.bytes * len(row.names)),
                [_use(style, span, sources) for style, span in row.uses] or tag("span", "no rule", class_="quiet"),
            ]
            for row in rows.values()
        ],
        searched=True,
        axes=axes,
    )


def _modules(program: Program, sources: Sources) -> Markup | None:
    """Styles that do not show in the parameters' table."""
    groups: dict[tuple[str, str, str, Span], list[str]] = {}
    for application in program:
        if application.slot == "params":
            continue
        flows = [
            f"{option} {', '.join(f'{k}: {f}' if k else str(f) for k, f in application.options[option].items())}"
            for option in ("input", "output")
            if application.options.get(option)
        ]
        key = (application.style, "+".join(application.axes), "; ".join(flows), application.rule.span)
        groups.setdefault(key, []).append(application.module)
    if not groups:
        return None
    return table(
        "Modules that a style acts on beside their parameters",
        ["module", "#count", "axis", "layouts", "style and rule"],
        [
            [_names(modules), f"{len(modules):,}", axes, tag("code", flows) if flows else "", _use(style, span, sources)]
            for (style, axes, flows, span), modules in groups.items()
        ],
        searched=True,
    )


def _buffers(program: Program, sources: Sources) -> Markup | None:
    plan, cp = program.plan, program.mesh.sizes["cp"]
    entries = [("batch", b) for b in plan.batch.values()] + [("model", b) for b in plan.buffers.values()]
    if cp == 1 or not entries:
        return None
    return table(
        f"Tensors split over cp={cp}, the head and tail of the sequence paired",
        ["buffer", "of the", "split", "rule"],
        [
            [tag("code", b.name), whose, f"made: {b.make}" if b.make else f"dimension {b.dim}", sources.link(b.span)]
            for whose, b in entries
        ],
    )


def _notes(program: Program) -> dict[tuple[str, int], str]:
    """What each rule did, by file and line."""
    reached: dict[tuple[str, int], set[str]] = {}
    for rule in program.plan.rules:
        reached.setdefault((rule.span.file, rule.span.line), set())
    for application in program:
        span = application.rule.span
        reached.setdefault((span.file, span.line), set()).add(application.module)
    return {
        place: f"{len(modules):,} module{'s' if len(modules) > 1 else ''}" if modules else "does nothing here"
        for place, modules in reached.items()
    }


def _names(names: Sequence[str]) -> list[Markup]:
    """Folded paths, one a line; the script unfolds them again to search."""
    return [tag("code", glob or "(root)", class_="path") for glob in fold_paths(names)]


def _use(style: str, span: Span, sources: Sources) -> Markup:
    return tag("span", style, " ", sources.link(span), class_="use")


def _placement(placement: str) -> Markup:
    if placement == "replicate":
        return tag("span", "whole", class_="quiet")
    return tag("code", placement)


def _shape(shape: tuple[int, ...]) -> Markup:
    return tag("code", " × ".join(map(str, shape)) or "scalar")


def _count(number: int) -> str:
    for unit, name in ((10**9, " B"), (10**6, " M")):
        if number >= unit:
            return f"{number / unit:,.1f}{name}"
    return f"{number:,}"
