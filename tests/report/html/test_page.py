"""The page says what the dry run found, links every row to its rule, runs no script but its own, and is
written whole or not.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from parallelizer.commands import main as cli
from parallelizer.compiler.compile import compile as compile_plan
from parallelizer.compiler.parameter_shards import parameter_shards
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.step_time import step_time
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Related, Span
from parallelizer.diagnostics.units import size
from parallelizer.language.load import load_plan
from parallelizer.language.plan import AXES, EXPERT, EXPERT_SHARDS, Mesh
from parallelizer.report.html import charts, memory, mesh
from parallelizer.report.html import page as html
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.memory import CATEGORIES, Point, Usage
from parallelizer.simulate.record.trace import Trace, trace
from parallelizer.styles.application import Program

VOID = {"meta", "input", "br", "path", "link"}


@dataclass
class Element:
    """One element of a parsed page."""

    name: str
    attributes: dict[str, str | None]
    children: list[Element | str] = field(default_factory=list)

    def all(self, name: str | None = None, **attributes: str) -> list[Element]:
        """Every element below this one with a name and attributes; `class_` is one of the classes."""
        found = []
        for child in self.children:
            if isinstance(child, str):
                continue
            classes = (child.attributes.get("class") or "").split()
            wanted = {k.replace("_", "-"): v for k, v in attributes.items() if k != "class_"}
            if (
                (name is None or child.name == name)
                and ("class_" not in attributes or attributes["class_"] in classes)
                and all(child.attributes.get(k) == v for k, v in wanted.items())
            ):
                found.append(child)
            found += child.all(name, **attributes)
        return found

    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text() for c in self.children)


class Page(HTMLParser):
    """A parsed page; raises where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("#root", {})
        self.open = [self.root]
        self.feed(text)
        self.close()
        assert self.open == [self.root], f"never closed: {self.open[-1].name}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute occurs twice in {tag}"
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].name == tag, f"</{tag}> closes {self.open[-1].name}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


@dataclass
class Case:
    """A traced program, its page as text and parsed."""

    program: Program
    model: nn.Module
    trace: Trace
    text: str
    page: Element


def _setup(*overrides: str) -> tuple[Program, nn.Module, Any]:
    setup = from_config(*compose_config(list(overrides)))
    model = setup.build_model()
    return setup.compile(model), model, setup


@pytest.fixture(scope="module")
def case() -> Case:
    """The demonstration on 16 ranks, with a rule and an option from the command line."""
    program, model, setup = _setup(
        "parallel=tp8_cp2",
        'rules=["layers.1: checkpoint"]',
        "++parallel.styles.fsdp.reshard_after_forward=false",
    )
    step = trace(program, model, setup.recipe())
    text = html.page(program, model, step, device="cpu")
    return Case(program, model, step, text, Page(text).root)


def _point(total: int, phase: str = "forward", module: str = "") -> Point:
    return Point(phase, module, total, dict.fromkeys(CATEGORIES, 0) | {"activations": total})


def _trace(course: list[Point], ledger: tuple[Collective, ...] = ()) -> Trace:
    top = max(course, key=lambda p: p.total)
    return Trace(0, ledger, Usage(top.total, top.phase, top.module, top.by_category, tuple(course)))


def _entry(
    module: str, axis: str = "tp", phase: str = "forward", sent: int = 7, rule: Any = None
) -> Collective:
    return Collective(phase, "all_gather", axis, 2, 2 * sent, sent, "float32", module, rule, False)


# The page as a document


def test_the_page_is_well_formed_and_refers_to_nothing_outside_itself(case: Case) -> None:
    (title,) = case.page.all("title")
    assert title.text() == "llama on cp=2 x tp=8, parallelizer"
    for element in case.page.all():
        assert "src" not in element.attributes and not any(
            name.startswith("on") for name in element.attributes
        )
        assert (element.attributes.get("href") or "#").startswith("#")
    assert not case.page.all("link") and not case.page.all("iframe") and not case.page.all("img")
    assert "http://" not in case.text and "https://" not in case.text
    assert "url(" not in case.text and "@import" not in case.text
    assert len(case.text.encode()) < 150_000


def test_every_link_ends_at_an_element_and_identifiers_are_unique(case: Case) -> None:
    counted = Counter(e.attributes["id"] for e in case.page.all() if "id" in e.attributes)
    assert max(counted.values()) == 1
    links = [a.attributes["href"] for a in case.page.all("a")]
    assert len(links) > 30
    assert not [href for href in links if (href or "").removeprefix("#") not in counted]


def test_tables_are_described_and_have_heads_for_columns_and_rows(case: Case) -> None:
    described = [t for t in case.page.all("table") if t.attributes.get("role") != "presentation"]
    assert len(described) >= 7
    for table in described:
        assert len(table.all("caption")) == 1
        assert table.all("th", scope="col") and table.all("th", scope="row")
    for plot in case.page.all("div", class_="plot"):
        assert plot.attributes.get("aria-label") and plot.attributes["role"] == "img"
    (html_element,) = case.page.all("html")
    assert html_element.attributes["lang"] == "en"
    assert case.page.all("main") and case.page.all("nav", aria_label="Sections")


def test_only_the_pages_own_script_may_run(case: Case) -> None:
    import base64
    import hashlib

    (policy,) = [
        m.attributes["content"] or "" for m in case.page.all("meta", http_equiv="Content-Security-Policy")
    ]
    scripts = [s for s in case.page.all("script") if s.attributes.get("type") != "application/json"]
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].text().encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy


# Every row and its rule


def _source_line(page: Element, anchor: str) -> str:
    (row,) = page.all("tr", id=anchor.removeprefix("#"))
    return row.all("td", class_="text")[0].text()


def test_every_row_of_parameters_and_modules_links_to_the_text_of_its_rules(case: Case) -> None:
    lines = {(a.style, a.rule.span.line, a.rule.span.file) for a in case.program}
    found = set()
    for table in case.page.all("table", class_="searched"):
        for row in table.all("tbody")[0].all("tr"):
            uses = row.all("span", class_="use")
            assert uses, row.text()
            for use in uses:
                (link,) = use.all("a")
                style = use.text().split()[0]
                line = _source_line(case.page, link.attributes["href"] or "")
                matching = [a.rule for a in case.program if a.style == style and (a.rule.key or '""') in line]
                assert matching, (style, line)
                found.add((style, matching[0].span.line, matching[0].span.file))
    assert found == lines


def test_rules_of_presets_and_of_the_command_line_are_shown_with_what_they_did(case: Case) -> None:
    notes = {row.all("td", class_="text")[0].text(): row.all("td", class_="note")[0].text() for row in case.page.all("tr")
             if row.all("td", class_="note")}  # fmt: skip
    assert notes['rules=["layers.1: checkpoint"]'] == "1 module"
    assert notes["++parallel.styles.fsdp.reshard_after_forward=false"] == "fsdp: reshard_after_forward"
    assert notes["mesh: {cp: 2, tp: 8}"] == ""
    (qkv,) = [note for text, note in notes.items() if text.lstrip().startswith("layers.*.attention.w[qkv]")]
    assert qkv == "6 modules"


def test_the_parameters_table_holds_every_parameter_and_its_bytes(case: Case) -> None:
    (table,) = [t for t in case.page.all("table", class_="searched") if "Parameters" in t.text()]
    rows = table.all("tbody")[0].all("tr")
    shards = parameter_shards(case.program, case.model)
    counts = [int(row.all("td", data_label="count")[0].text()) for row in rows]
    assert sum(counts) == len(shards)
    (wq,) = [row for row in rows if "wq" in row.all("th")[0].text()]
    of_wq = [s for s in shards if ".wq." in s.name]
    assert wq.all("td", data_label="bytes")[0].text() == size(sum(s.bytes for s in of_wq))
    assert wq.all("td", data_label="local")[0].text() == " × ".join(map(str, of_wq[0].local_shape))
    assert wq.all("td", data_label="tp")[0].text() == of_wq[0].placements["tp"] == "shard(0)"


def test_a_rule_without_effect_is_shown_as_such_and_one_rank_needs_no_picture() -> None:
    program, model, _ = _setup("parallel=single")
    page = Page(html.page(program, model, _trace([_point(1)]), device="cpu")).root
    notes = {row.all("td", class_="note")[0].text() for row in page.all("tr") if row.all("td", class_="note")}
    assert "does nothing here" in notes
    assert not page.all("div", class_="picture")
    assert "there is only one rank" in page.text()


def test_without_a_trace_what_needs_none_is_shown_with_the_reason(case: Case) -> None:
    reason = Diagnostic(
        "trace-failed", "the step cannot run on fake tensors: aten.item", None, None, "warning"
    )
    page = Page(html.page(case.program, case.model, None, device="cpu", diagnostics=[reason])).root
    assert {s.attributes["id"] for s in page.all("section")} == {"findings", "mesh", "parameters", "rules"}
    assert "trace-failed" in page.text() and "aten.item" in page.text()


def test_findings_link_to_their_lines(case: Case) -> None:
    key = next(a.rule for a in case.program if a.style == "rowwise")
    finding = Diagnostic(
        "some-code", "a message", key.span, "a way out", "warning", (Related(key.span, "see here"),)
    )
    unknown = Diagnostic("other-code", "no place", Span("gone.yaml", 7), None, "error")
    page = Page(html.page(case.program, case.model, None, device="cpu", diagnostics=[finding, unknown])).root
    (item,) = page.all("li", class_="warning")
    hrefs = [a.attributes["href"] or "" for a in item.all("a")]
    assert len(hrefs) == 2 and all(key.key in _source_line(page, h) for h in hrefs)
    (lost,) = page.all("li", class_="error")
    assert not lost.all("a") and "gone.yaml:7" in lost.text()
    assert page.all("a", href="#findings")[0].text() == "1 error, 1 warning"


def test_errors_and_warnings_come_first_and_notes_before_the_rules(case: Case) -> None:
    note = Diagnostic("n", "say `output: shard(-1)` or ` alone", None, None, "note")
    warning = Diagnostic("w", "write `local: false`", None, None, "warning")
    for found, place in (([note], -2), ([note, warning], 0)):
        page = Page(html.page(case.program, case.model, None, device="cpu", diagnostics=found)).root
        assert [s.attributes["id"] for s in page.all("section")][place] == "findings"
    assert [c.text() for c in page.all("ul", class_="findings")[0].all("code")] == ["n", "w", "local: false"]
    assert note.message in page.text()


def test_a_long_plan_is_shown_around_the_lines_that_matter(tmp_path: Path) -> None:
    plan = tmp_path / "long.yaml"
    plan.write_text("version: 1\nrules:\n" + "".join(f'  "a{i}": {{style: colwise, optional: true}}\n' for i in range(2)) +
                    "# filler\n" * 5000 + "  b: colwise\n")  # fmt: skip
    model = nn.Sequential()
    model.add_module("b", nn.Linear(4, 4))
    program = compile_plan(load_plan(str(plan)), model, Mesh({"tp": 2}))
    text = html.page(program, model, None, device="cpu")
    page = Page(text).root
    assert _source_line(page, f"s0-{5005}").strip() == "b: colwise"
    assert text.count("# filler") < 20


# Strangers' texts


HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Program, nn.Module, str]:
    plan = tmp_path_factory.mktemp("hostile") / "<img src=x onerror=alert(2)>\"'.yaml"
    plan.write_text(
        f'version: 1\nrules:\n  "{HOSTILE}": colwise  # --> ]]> </code></script><script>alert(3)\n  "": fsdp\n'
    )
    model = nn.Sequential()
    model.add_module(HOSTILE, nn.Linear(4, 4))
    model.add_module('"><svg onload=alert(4)>', nn.Linear(4, 4))
    model.add_module("\ud800", nn.Linear(4, 4))
    program = compile_plan(load_plan(str(plan)), model, Mesh({"dp_shard": 2, "tp": 2}))
    rule = program.applications[0].rule
    entries = (
        _entry(HOSTILE, rule=(rule.key, rule.span.file, rule.span.line)),
        _entry("x", axis="<b>", phase="<i>"),
    )
    step = _trace([_point(5, "forward", HOSTILE), _point(3, "<u>", "</script><b>")], entries)
    findings = [
        Diagnostic(
            "<b>", HOSTILE, Span(f"<override rules=[{HOSTILE}]>"), "<a href=javascript:alert(5)>", "warning"
        ),
        Diagnostic("b", "x", Span("<configuration>"), None, "note"),
    ]
    hardware = {"memory_gib": 1, "name": HOSTILE}
    return (
        program,
        model,
        html.page(program, model, step, device=HOSTILE, hardware=hardware, diagnostics=findings),
    )


def test_names_and_texts_of_strangers_never_become_markup(hostile: tuple[Program, nn.Module, str]) -> None:
    _, _, text = hostile
    page = Page(text).root
    kinds = [s.attributes.get("type") for s in page.all("script")]
    assert kinds == ["application/json", None]
    for name in ("img", "b", "i", "u", "svg", "a"):
        for element in page.all(name):
            assert not any(key.startswith("on") for key in element.attributes)
            assert "alert" not in str(element.attributes.get("href"))
            assert name != "img"
    assert HOSTILE in page.text()
    assert text.lower().count("</script") == 2


def test_data_for_the_script_survives_what_would_end_it(hostile: tuple[Program, nn.Module, str]) -> None:
    _, _, text = hostile
    (block,) = Page(text).root.all("script", type="application/json")
    data = json.loads(block.text())
    assert data["course"]["modules"] == [HOSTILE, "</script><b>"]
    assert data["layers"]["names"] == [HOSTILE, "x"]


def test_a_name_that_is_no_text_can_be_written(
    hostile: tuple[Program, nn.Module, str], tmp_path: Path
) -> None:
    program, model, _ = hostile
    html.write(program, model, None, tmp_path / "page.html", device="cpu")
    Page((tmp_path / "page.html").read_text("utf-8"))


# Memory


phases = st.sampled_from(["", "forward", "loss", "backward", "clip", "optimizer"])
points = st.builds(
    lambda phase, layer, held: Point(
        phase, f"layers.{layer}", sum(held), dict(zip(CATEGORIES, held, strict=True))
    ),
    phases,
    st.integers(0, 5),
    st.lists(st.integers(0, 10**12), min_size=len(CATEGORIES), max_size=len(CATEGORIES)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(points, min_size=1, max_size=120), st.integers(1, 40))
def test_fewer_columns_keep_every_maximum(course: list[Point], limit: int) -> None:
    parts = charts.stretches(course)
    shown = charts.columns(parts, limit)
    assert [p for part in parts for p in part.points] == course
    edges = [c.left for c in shown] + [shown[-1].right]
    assert edges[0] == 0 and edges[-1] == pytest.approx(1) and edges == sorted(edges)
    assert [c.right for c in shown[:-1]] == pytest.approx(edges[1:-1])
    for part in parts:
        inside = [c.point.total for c in shown if part.left - 1e-9 <= c.left < part.right - 1e-9]
        assert max(inside) == max(p.total for p in part.points)
    highest: dict[str, int] = defaultdict(int)
    for p in course:
        highest[p.phase] = max(highest[p.phase], p.total)
    assert max(highest.values()) == max(c.point.total for c in shown)


def test_a_long_course_becomes_about_six_hundred_columns_with_equal_layers_alike() -> None:
    one = [3, 9, 4, 1, 7] * 75
    course = [_point(h, "forward", f"layers.{i}.x") for i in range(126) for h in one]
    shown = charts.columns(charts.stretches(course))
    assert 500 < len(shown) < 700
    by_layer = [[c.point.total for c in shown if c.point.module == f"layers.{i}.x"] for i in range(126)]
    assert len({tuple(x) for x in by_layer}) == 1


def test_short_phases_stay_visible_and_what_lies_between_phases_belongs_to_the_one_before() -> None:
    course = [
        _point(1, ""),
        *[_point(2, "forward")] * 5000,
        _point(9, ""),
        _point(3, "loss"),
        *[_point(4, "backward")] * 9000,
    ]
    parts = charts.stretches(course)
    assert [(p.phase, len(p.points)) for p in parts] == [("forward", 5002), ("loss", 1), ("backward", 9000)]
    assert parts[1].right - parts[1].left == pytest.approx(charts.NARROWEST)


def test_many_accumulated_parts_still_fit() -> None:
    course = [_point(i + 1, phase) for i in range(64) for phase in ("forward", "loss", "backward")]
    parts = charts.stretches(course)
    assert len(parts) == 192 and parts[-1].right == pytest.approx(1)


def test_the_chart_draws_the_peak_where_and_as_high_as_it_is(case: Case) -> None:
    usage = case.trace.memory
    (label,) = case.page.all("p", class_="peak-label")
    assert label.text() == f"Peak {size(usage.peak)} {usage.phase}, {usage.module or '(root)'}"
    (block,) = case.page.all("script", type="application/json")
    course = json.loads(block.text())["course"]
    sums = [sum(row[3:]) for row in course["rows"]]
    assert max(sums) == usage.peak
    at = sums.index(usage.peak)
    assert course["phases"][course["rows"][at][1]] == usage.phase
    assert dict(zip(course["kinds"], course["rows"][at][3:], strict=True)) == dict(usage.at_peak)
    # The outermost path is the whole stack: its highest point is the peak, just below the upper edge of the
    # plot.
    paths = case.page.all("figure", id="course")[0].all("path")
    tops = [min(int(y) for y in re.findall(r"V(\d+)", p.attributes["d"] or "")) for p in paths]
    assert tops[0] == min(tops) == charts.HEIGHT - round(charts.HEIGHT / 1.02)
    left = float(
        re.findall(r"left:([\d.]+)%", case.page.all("span", class_="peak-line")[0].attributes["style"] or "")[
            0
        ]
    )
    assert course["rows"][at][0] * 100 <= left <= [*(r[0] for r in course["rows"]), 1][at + 1] * 100


def test_every_kind_of_memory_has_a_colour_and_a_meaning() -> None:
    style = (Path(html.__file__).parent / "page.css").read_text()
    assert set(memory.MEANING) == set(CATEGORIES) == set(memory.KINDS)
    for kind in CATEGORIES:
        assert style.count(f"--{kind}:") == 2 and f".{kind} {{ --c:" in style
    for axis in (*AXES, EXPERT, EXPERT_SHARDS):
        assert style.count(f"--{axis}:") == 2 and f".x-{axis} {{ --c:" in style


@pytest.mark.parametrize(
    ("gib", "said"),
    [(80, "toy, 80.0 GiB: fits, "), (1, "toy, 1.0 GiB: does not fit, 1.0 GiB too much")],
)
def test_the_verdict_on_the_hardware_has_its_margin(case: Case, gib: int, said: str) -> None:
    step = _trace([_point(2 << 30)])
    text = html.page(
        case.program, case.model, step, device="cpu", hardware={"memory_gib": gib, "name": "toy"}
    )
    assert said in Page(text).root.text()


@given(st.integers(1, 2**50), st.integers(1, 8))
def test_ticks_are_round_and_few(top: int, most: int) -> None:
    found = charts.ticks(top, most)
    assert found[0] == 0 and found[-1] <= top and len(found) <= most + 1
    step = found[1] if len(found) > 1 else top
    assert step & (step - 1) == 0 or len(found) == 1
    assert top - found[-1] < step or len(found) == 1


# Communication


def test_the_table_of_totals_is_that_of_the_ledger(case: Case) -> None:
    (table,) = [
        t
        for t in case.page.all("table")
        if t.all("caption") and t.all("caption")[0].text().startswith("Totals")
    ]
    shown = [
        [cell.text() for cell in row.all("th") + row.all("td")][:6] for row in table.all("tbody")[0].all("tr")
    ]
    of = defaultdict(list)
    for one in case.trace.ledger:
        of[one.phase, one.axis, one.kind].append(one)
    assert shown == [
        [
            *key,
            f"{len(ones):,}",
            size(sum(one.payload_bytes for one in ones)),
            size(sum(one.wire_bytes for one in ones)),
        ]
        for key, ones in of.items()
    ]


def test_many_layers_get_a_bar_each_and_one_row_for_equals(case: Case) -> None:
    ledger = tuple(
        _entry(f"layers.{i}.wq", axis, phase, 100 << 20)
        for i in range(20)
        for axis in ("tp", "dp_shard+cp")
        for phase in ("forward", "backward")
    )
    page = Page(html.page(case.program, case.model, _trace([_point(1)], ledger), device="cpu")).root
    (strip,) = page.all("figure", id="layers")
    assert [p.attributes["class"] for p in strip.all("path")] == ["axis x-tp", "axis x-dp_shard"]
    assert (strip.all("path")[0].attributes["d"] or "").count("M") == 40
    assert "layers 0–19" in strip.text()
    (row,) = [r for r in page.all("tr") if "layers.{0..19}" in r.text()]
    assert row.all("td", data_label="all axes")[0].text() == "400.0 MiB"


# The mesh


sizes = st.fixed_dictionaries({axis: st.sampled_from([1, 1, 2, 3, 4, 8, 16]) for axis in AXES})


@settings(max_examples=60, deadline=None)
@given(sizes, st.sampled_from([4, 8]), st.data())
def test_the_picture_shows_both_ends_and_the_ranks_own_node_and_stays_small(
    axes: dict[str, int], node: int, data: st.DataObject
) -> None:
    grid = Mesh(axes)
    rank = data.draw(st.integers(0, grid.world_size - 1))
    shown = mesh.shown_nodes(grid, node, rank)
    assert {0, rank // node, (grid.world_size - 1) // node} <= set(shown)
    assert shown == sorted(set(shown)) and len(shown) <= 3**6
    drawn = Page(mesh.picture(grid, node, rank)).root
    cells = drawn.all("td", class_="rank")
    numbers = [int(c.text()) for c in cells]
    assert numbers == [r for n in shown for r in range(n * node, min((n + 1) * node, grid.world_size))]
    (own,) = drawn.all("td", class_="self")
    assert int(own.text()) == rank
    where = grid.coordinate(rank)
    for cell, number in zip(cells, numbers, strict=True):
        differs = [a for a in AXES if grid.coordinate(number)[a] != where[a]]
        if len(differs) == 1:
            assert f"x-{differs[0]}" in (cell.attributes["class"] or "")
    widths = {
        sum(int(c.attributes.get("colspan") or 1) for c in r.all("th") + r.all("td"))
        for r in drawn.all("thead")[0].all("tr")
    }
    assert len(widths) == 1


def test_sixteen_thousand_ranks_are_a_few_rows() -> None:
    grid = Mesh({"dp_shard": 1024, "cp": 2, "tp": 8})
    assert mesh.shown_nodes(grid, 8, 0) == [0, 1, 2, 3, 2046, 2047]
    assert mesh.shown_nodes(grid, 8, 16 * 500 + 3) == [0, 1, 2, 3, 1000, 1001, 2046, 2047]
    program, model, _ = _setup("parallel=fsdp1024_cp2_tp8", "train.batch_size=1024")
    page = Page(html.page(program, model, None, device="cpu")).root
    text = page.all("section", id="mesh")[0].text()
    assert "2,042 more nodes" in text
    assert "0–7, inside one node" in text and "0, 8, across 2 nodes" in text
    assert "0, 16, … 16368, across 1,024 nodes" in text and "0, 8, … 16376, across 2,048 nodes" in text


def test_a_page_of_126_layers_is_under_400_kilobytes() -> None:
    program, model, _ = _setup(
        "model=llama3_405b", "parallel=fsdp1024_cp2_tp8", "train.seq_len=8192", "train.batch_size=1024"
    )
    generator = torch.Generator().manual_seed(0)
    held = torch.randint(10**9, 10**11, (70_000, len(CATEGORIES)), generator=generator).tolist()
    course = [
        Point(
            "forward" if i < 25_000 else "backward",
            f"layers.{i // 556}.feed_forward.w2",
            sum(h),
            dict(zip(CATEGORIES, h, strict=True)),
        )
        for i, h in enumerate(held)
    ]
    ledger = tuple(
        _entry(f"layers.{i % 126}", axis, phase, 10**8 + i)
        for i in range(900) for axis in ("tp", "cp", "dp_shard+cp") for phase in ("forward", "backward")
    )  # fmt: skip
    text = html.page(program, model, _trace(course, ledger), device="cpu")
    assert len(text.encode()) < 400_000


# The file


def _failing(case: Case, path: str | Path) -> Diagnostic:
    with pytest.raises(PlanError) as caught:
        html.write(case.program, case.model, None, path, device="cpu")
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "file-unwritable" and diagnostic.severity == "error" and diagnostic.help
    return diagnostic


def test_a_place_that_cannot_be_written_is_one_diagnostic(case: Case, tmp_path: Path) -> None:
    assert "No such file or directory" in _failing(case, tmp_path / "missing" / "page.html").message
    (tmp_path / "file").write_text("")
    assert "Not a directory" in _failing(case, tmp_path / "file" / "page.html").message
    assert "not a file" in _failing(case, tmp_path).message
    assert "null" in _failing(case, f"{tmp_path}/a\0b").message
    _failing(case, tmp_path / ("x" * 300) / "page.html")
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_a_device_is_not_replaced_by_a_page(case: Case) -> None:
    assert "not a file" in _failing(case, "/dev/null").message
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_when_the_disk_is_full_the_old_page_stays_and_nothing_else(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")

    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    assert "No space left" in _failing(case, target).message
    assert os.listdir(tmp_path) == ["page.html"] and target.read_text() == "old"


def test_the_file_is_made_as_open_would_make_it_and_a_link_stays_a_link(case: Case, tmp_path: Path) -> None:
    real, link, plain = tmp_path / "real.html", tmp_path / "link.html", tmp_path / "plain"
    link.symlink_to(real)
    html.write(case.program, case.model, None, link, device="cpu")
    plain.write_text("")
    assert link.is_symlink() and real.read_text().startswith("<!doctype html>")
    assert real.stat().st_mode == plain.stat().st_mode


def test_the_command_writes_the_page_and_says_when_it_cannot(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "page.html"
    assert cli.main(["plan", "parallel=tp2", "--html", str(target)]) == 0
    assert Page(target.read_text()).root.all("figure", id="course")
    assert "collectives" in capfd.readouterr().out
    assert cli.main(["plan", "parallel=tp2", "--json", "--html", str(tmp_path / "no" / "page.html")]) == 1
    out, err = capfd.readouterr()
    assert [d["code"] for d in json.loads(out)["diagnostics"] if d["severity"] == "error"] == [
        "file-unwritable"
    ]
    assert "Traceback" not in err


# In a browser


class Browser:
    """Chromium through its driver, spoken to over the WebDriver protocol."""

    def __init__(self, profile: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = subprocess.Popen(
            ["chromedriver", f"--port={self.port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.session = ""
        flags = [
            "headless",
            "no-sandbox",
            "disable-gpu",
            "disable-quic",
            "no-first-run",
            "disable-background-networking",
        ]
        flags += ["disable-component-update", "disable-sync", f"user-data-dir={profile}"]
        options = {"args": [f"--{f}" for f in flags]}
        wanted = {
            "browserName": "chrome",
            "goog:loggingPrefs": {"browser": "ALL"},
            "goog:chromeOptions": options,
        }
        for _ in range(100):
            try:
                answer = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
                break
            except urllib.error.URLError:
                time.sleep(0.1)
        self.session = f"/session/{answer['sessionId']}"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{self.session}{path}", data, headers, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def run(self, script: str, *arguments: Any) -> Any:
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def width(self, pixels: int) -> None:
        metrics = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call(
            "POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics}
        )

    def scheme(self, name: str) -> None:
        features = {"features": [{"name": "prefers-color-scheme", "value": name}]}
        self.call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": features})

    def log(self) -> list[Any]:
        return list(self.call("POST", "/se/log", {"type": "browser"}))

    def close(self) -> None:
        try:
            if self.session:
                self.call("DELETE", "")
        finally:
            self.process.terminate()
            self.process.wait(10)


missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
in_browser = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def opened(browser: Browser, case: Case, tmp_path: Path) -> Browser:
    path = tmp_path / "page.html"
    path.write_text(case.text)
    browser.width(1200)
    browser.log()
    browser.call("POST", "/url", {"url": path.as_uri()})
    return browser


FILTER = """
const box = document.getElementById("filter");
box.value = arguments[0];
box.dispatchEvent(new Event("input"));
return [[...document.querySelectorAll("table.searched tbody tr")].filter((row) => row.offsetParent !== null)
  .map((row) => row.querySelector("th").innerText), document.getElementById("matches").textContent];
"""


@in_browser
def test_the_browser_has_nothing_to_complain_of_in_either_scheme(opened: Browser) -> None:
    assert opened.run("return document.title") == "llama on cp=2 x tp=8, parallelizer"
    colours = set()
    for scheme in ("light", "dark"):
        opened.scheme(scheme)
        colours.add(opened.run("return getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2
    assert opened.log() == []


@in_browser
@pytest.mark.parametrize("pixels", [1200, 400])
def test_nothing_stands_out_over_the_side(opened: Browser, pixels: int) -> None:
    opened.width(pixels)
    scroll, client = opened.run("const e = document.documentElement; return [e.scrollWidth, e.clientWidth]")
    assert scroll <= client and pixels - 20 <= client <= pixels


@pytest.fixture(scope="module")
def timed(case: Case) -> str:
    """The page of the demonstration with the time that it takes on H100s."""
    setup = from_config(*compose_config(["parallel=tp8_cp2", "hardware=h100"]))
    time = step_time(setup, case.trace)
    assert time is not None
    return html.page(case.program, case.model, case.trace, device="cpu", time=time)


LANES = """
return [...document.querySelectorAll("#time .time-line")].map((line) => {
  const plot = line.querySelector("svg").getBoundingClientRect();
  const labels = [...line.querySelectorAll(".lanes span")].map((s) => s.getBoundingClientRect());
  const figure = line.closest("figure").getBoundingClientRect();
  return [plot.width / figure.width, Math.max(...labels.map((l) => l.right)) - plot.left,
          labels.map((l, i) => Math.abs((l.top + l.bottom) / 2 - plot.top - plot.height * (i + 0.5) / labels.length))];
});
"""


@in_browser
@pytest.mark.parametrize("pixels", [1200, 600, 400])
def test_the_time_line_fills_the_page_with_its_lanes_beside_their_names(
    browser: Browser, timed: str, tmp_path: Path, pixels: int
) -> None:
    path = tmp_path / "timed.html"
    path.write_text(timed)
    browser.width(pixels)
    browser.log()
    browser.call("POST", "/url", {"url": path.as_uri()})
    found = browser.run(LANES)
    assert len(found) == 3, "the step, and a layer in each direction"
    for share, overlap, apart in found:
        assert share > 0.7 and overlap <= 0 and max(apart) < 2
    scroll, client = browser.run("const e = document.documentElement; return [e.scrollWidth, e.clientWidth]")
    assert scroll <= client and browser.log() == []


@in_browser
def test_the_filter_finds_every_parameter_by_its_full_name(opened: Browser, case: Case) -> None:
    everything, said = opened.run(FILTER, "")
    assert len(everything) > 10 and said == ""
    for name in dict(case.model.named_parameters()):
        rows, said = opened.run(FILTER, name)
        assert any(row == name or row.endswith(f"among them {name}") for row in rows), (name, rows)
        assert said.startswith(f"{len(rows)} of ") and len(rows) <= 2
    assert opened.run(FILTER, "colwise wq")[0] == ["layers.{0,1}.attention.wq.weight"]
    assert opened.run(FILTER, "no such thing")[0] == []
    assert opened.run(FILTER, "")[0] == everything


@in_browser
def test_following_a_link_marks_the_line_of_the_rule(opened: Browser) -> None:
    text, marked = opened.run("""
        const use = [...document.querySelectorAll(".use")].find((use) => use.textContent.startsWith("colwise"));
        use.querySelector("a").click();
        const line = document.querySelector(":target");
        return [line.querySelector(".text").textContent, getComputedStyle(line).backgroundColor];
    """)
    assert "colwise" in text and marked != "rgba(0, 0, 0, 0)"
    assert opened.log() == []


@in_browser
def test_the_chart_can_be_read_by_pointer_and_by_keys(opened: Browser, case: Case) -> None:
    read = """
        const figure = document.getElementById("course"), plot = figure.querySelector(".plot");
        const box = plot.getBoundingClientRect(), peak = figure.querySelector(".peak-line").getBoundingClientRect();
        plot.dispatchEvent(new PointerEvent("pointermove", {clientX: peak.left + 0.2, clientY: box.top + 9, bubbles: true}));
        const readout = figure.querySelector(".readout"), pointed = readout.textContent;
        plot.dispatchEvent(new KeyboardEvent("keydown", {key: "Home", bubbles: true, cancelable: true}));
        return [pointed, readout.textContent, plot.getAttribute("role"), plot.getAttribute("aria-valuenow")];
    """
    pointed, first, role, now = opened.run(read)
    usage = case.trace.memory
    peak = f"{usage.phase}, {usage.module or '(root)'}: {usage.peak / 2**20:.1f} MiB. "
    assert pointed.startswith(peak)
    assert first != pointed and role == "slider" and now == "0"


@in_browser
def test_a_hostile_page_runs_nothing(
    browser: Browser, hostile: tuple[Program, nn.Module, str], tmp_path: Path
) -> None:
    path = tmp_path / "hostile.html"
    path.write_bytes(hostile[2].encode("utf-8", "replace"))
    browser.log()
    browser.call("POST", "/url", {"url": path.as_uri()})
    assert browser.run("return document.scripts.length") == 2
    rows, _ = browser.run(FILTER, HOSTILE.lower())
    assert rows and HOSTILE in rows[0]
    assert browser.log() == []
