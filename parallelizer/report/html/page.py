"""The dry run as one page that needs no network: the mesh, the memory over the step, what is sent, and every
rule behind it.
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import nn

from parallelizer.compiler.parameter_shards import ParameterShard, parameter_shards
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, counts, in_order
from parallelizer.diagnostics.units import size
from parallelizer.report.capacity import capacity
from parallelizer.report.html import memory, mesh, rehearsal, stages, traffic
from parallelizer.report.html import program as plan
from parallelizer.report.html import time as show_time
from parallelizer.report.html.markup import Child, Markup, data, join, tag
from parallelizer.report.html.sources import Sources
from parallelizer.report.rows.parameters import parameter_total
from parallelizer.report.rows.rehearsal import Compared
from parallelizer.report.rows.stages import summary
from parallelizer.simulate.record.trace import Trace
from parallelizer.simulate.time.predict import StepTime
from parallelizer.styles.application import Program


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
    time: StepTime | None = None,
    rehearsed: Sequence[Compared] = (),
) -> None:
    """Write the page. Without a trace it has no memory and no collectives.

    `diagnostics` are the program's unless given, and `rehearsed` are ranks that `rehearse` ran.
    The file appears whole or not at all. Raises PlanError when it cannot be written.
    """
    text = page(
        program,
        model,
        trace,
        device=device,
        hardware=hardware,
        diagnostics=diagnostics,
        rank=rank,
        time=time,
        rehearsed=rehearsed,
    )
    # A module's name may hold what is no character at all.
    save(text.encode("utf-8", "replace"), path)


def save(content: bytes, path: str | Path) -> None:
    """Put a file in place at once: written under another name beside it, then renamed. Raises PlanError, and
    leaves nothing.
    """
    try:
        target = os.path.realpath(path)
        if os.path.lexists(target) and not os.path.isfile(target):
            raise OSError(0, "it is there and is not a file")
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
        advice = "name a file in a folder that exists and that you may write to"
        raise PlanError(
            [Diagnostic("file-unwritable", f"cannot write {path}: {reason}", None, advice)]
        ) from None


def page(
    program: Program,
    model: nn.Module,
    trace: Trace | None,
    *,
    device: str,
    hardware: Mapping[str, Any] | None = None,
    diagnostics: Iterable[Diagnostic] | None = None,
    rank: int = 0,
    time: StepTime | None = None,
    rehearsed: Sequence[Compared] = (),
) -> str:
    """The page as text."""
    sources = Sources()
    for rule in program.plan.rules:
        sources.anchor(rule.span)  # the plan's own text comes first
    found = in_order(program.diagnostics if diagnostics is None else diagnostics)
    shards = parameter_shards(program, model, rank)
    hardware = hardware or {}
    ones = [a for a, n in program.mesh.every.items() if n == 1]
    sections: list[tuple[str, str, str, Markup]] = []
    if rehearsed:
        on = f"one step of a rank at a time on {rehearsed[0].rehearsal.device}, without its peers"
        sections.append(("rehearsal", "Rehearsal", on, rehearsal.section(rehearsed)))
    axes = f"{', '.join(ones)}: size 1" if ones else "every axis is above 1"
    sections.append(("mesh", "Mesh", axes, mesh.section(program, trace, hardware, rank, sources)))
    if program.stages is not None:
        cuts = trace.cuts if trace is not None else ()
        sections.append(("stages", "Stages", summary(program), stages.section(program, model, cuts)))
    if trace is not None:
        of_step = f"of rank {rank}, in one step"
        sections.append(("memory", "Memory", of_step, memory.section(trace, hardware)))
        if time is not None:
            sections.append(("time", "Time", f"of rank {rank}'s step, predicted", show_time.section(time)))
        sections.append(("communication", "Communication", of_step, traffic.section(trace, sources)))
    tables = plan.section(program, shards, sources)
    sections.append(("parameters", "Parameters and modules", f"as rank {rank} holds them", tables))
    if found:
        # Notes can wait; what is wrong comes before everything else.
        at = len(sections) if all(d.severity == "note" for d in found) else 0
        sections.insert(at, ("findings", "Findings", counts(found), _findings(found, sources)))
    texts = plan.rules(program, sources)  # last, when all that points at a text has been made
    sections.append(("rules", "Rules", "every line that the program was compiled from", texts))

    style, script = (
        files("parallelizer.report.html").joinpath(name).read_text("utf-8")
        for name in ("page.css", "page.js")
    )
    numbers = {"course": memory.numbers(trace), "layers": traffic.numbers(trace)} if trace is not None else {}
    links = [tag("li", tag("a", title, href=f"#{key}")) for key, title, _, _ in sections]
    body = join(
        tag("a", "Skip to the content", href="#content", class_="skip"),
        _header(program, model, trace, shards, found, device, hardware, rank),
        tag("nav", tag("ul", links), aria_label="Sections"),
        tag("main", [_section(*section) for section in sections], id="content"),
        _footer(trace, device),
        data("data", numbers),
        tag("script", Markup(script)),
    )
    head = join(
        tag("meta", charset="utf-8"),
        tag("title", f"{program.plan.name} on {program.mesh}, parallelizer"),
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


def _section(key: str, title: str, line: str, content: Markup) -> Markup:
    return tag("section", tag("header", tag("h2", title), tag("p", line)), content, id=key, aria_label=title)


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
    sizes, world = program.mesh.sizes, program.mesh.world_size
    total = parameter_total(shards, program)
    axes = " × ".join(f"{n:,} {a}" for a, n in sizes.items() if n > 1) or "no axis above 1"
    facts: list[tuple[str, Child, str | None]] = [
        ("Ranks", f"{world:,}", axes),
        ("Parameters", _count(total.whole), f"{_count(total.held)} on rank {rank}, {size(total.bytes)}"),
    ]
    if trace is not None:
        fit = capacity(trace, hardware)
        usage, sent = trace.memory, sum(e.wire_bytes for e in trace.ledger)
        facts.append(("Peak memory", size(usage.peak), str(fit) if fit else memory.peak_place(usage)))
        facts.append(("Sent in a step", size(sent), f"in {len(trace.ledger):,} collectives"))
    summary = tag("a", counts(found), href="#findings") if found else "none"
    facts.append(("Findings", summary, None if trace is not None else "the step was not traced"))
    cells = [
        tag("div", tag("dt", term), tag("dd", value), tag("dd", more, class_="more") if more else None)
        for term, value, more in facts
    ]
    return tag(
        "header",
        tag("p", "parallelizer dry run", class_="eyebrow"),
        tag("h1", program.plan.name, " ", tag("span", "on "), str(program.mesh).replace(" x ", " × ")),
        tag(
            "p",
            f"{type(model).__name__}, as rank {rank} of {world:,} sees it; operators as on {device}",
            class_="lead",
        ),
        tag("dl", cells, class_="facts"),
        class_="top",
    )


def _findings(found: Sequence[Diagnostic], sources: Sources) -> Markup:
    items = [
        tag(
            "li",
            tag("p", tag("b", d.severity), " ", tag("code", d.code), " ", sources.link(d.span)),
            tag("p", _prose(d.message)),
            tag("p", _prose(d.help), class_="quiet") if d.help else None,
            [tag("p", r.label, " ", sources.link(r.span), class_="quiet") for r in d.related],
            class_=f"finding {d.severity}",
        )
        for d in found
    ]
    return tag("ul", items, class_="findings")


def _prose(text: str) -> Markup:
    """A message with what stands between backticks as code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return join(text)
    return join([tag("code", part) if i % 2 else part for i, part in enumerate(parts)])


def _footer(trace: Trace | None, device: str) -> Markup:
    if trace is None:
        return tag(
            "footer", tag("p", "The step was not traced. Shapes and placements follow from the plan alone.")
        )
    ran = f"One training step ran on fake tensors with the operators of {device}."
    run = trace.folded
    alike = (
        f" Of {run.count:,} equal layers in {run.container or 'the root'} a few ran, for all."
        if run
        else None
    )
    return tag("footer", tag("p", ran, alike))


def _count(number: int) -> str:
    """`405.9 B`, `1.6 M`, `512`."""
    for unit, name in ((10**9, "B"), (10**6, "M")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number:,}"
