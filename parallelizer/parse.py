"""Nodes to a plan: every mistake of form becomes a diagnostic at its place, and all of a file's come at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallelizer import options
from parallelizer.diagnostics import Diagnostic, PlanError, Related, Span
from parallelizer.glob import GlobError, parse_glob
from parallelizer.placement import PlacementError, parse_placement
from parallelizer.plan import SLOTS, Buffer, Option, Placement, Plan, Rule, StyleUse
from parallelizer.source import MappingNode, Node, Scalar, SequenceNode, read, read_file, shown_path
from parallelizer.styles.declare import STYLES
from parallelizer.suggest import nearest

MAX_EXTENDS = 8
KEYS = ("version", "extends", "layouts", "rules", "buffers")

Find = Callable[[str, Span | None], str]
"""Turns the name of a plan into a path, or raises PlanError."""


@dataclass
class Findings:
    """Collects diagnostics while a file is read on."""

    items: list[Diagnostic] = field(default_factory=list)

    def error(self, code: str, message: str, span: Span, help_text: str | None = None, related: Sequence[Related] = ()) -> None:
        self.items.append(Diagnostic(code, message, span, help_text, related=tuple(related)))


def load(name: str, find: Find, span: Span | None = None) -> Plan:
    """Read a plan by name or path, with everything that it extends.

    `span` is where the name was written. Raises PlanError with every diagnostic of every file.
    """
    findings = Findings()
    plan = _load(name, find, span, (), findings)
    if not plan.rules and not findings.items:
        findings.error("no-rules", "the plan has no rules", Span(plan.file), "add `rules:` with at least one line")
    if findings.items:
        raise PlanError(findings.items)
    return plan


def parse_rule_text(text: str, file: str, origin: Span | None = None) -> tuple[Rule, ...]:
    """Rules from one string `glob: style`, as a preset or the command line writes them. Raises PlanError."""
    findings = Findings()
    node = read(text, file, origin)
    whole = origin or Span(file, 1, 1, len(text) + 1)
    if not isinstance(node, MappingNode) or not node.entries:
        raise PlanError(
            [Diagnostic("wrong-type", f"{text!r} is not a rule", whole, "a rule is `glob: style` or `glob: {style: ...}`")]
        )
    rules = _rules(node, findings)
    if findings.items:
        raise PlanError(findings.items)
    return rules


def find_along(folders: Iterable[Path]) -> Find:
    """A `Find` that looks for `plans/<name>.yaml` along folders; what ends in .yaml or has a slash is a path."""
    roots = list(folders)

    def find(name: str, span: Span | None) -> str:
        if name.endswith((".yaml", ".yml")) or os.sep in name:
            if os.path.isfile(name):
                return name
            raise PlanError([Diagnostic("plan-not-found", f"there is no plan file {name}", span, f"looked in {os.getcwd()}")])
        for root in roots:
            path = root / "plans" / f"{name}.yaml"
            if path.is_file():
                return shown_path(path)
        known = sorted({p.stem for root in roots for p in (root / "plans").glob("*.yaml")})
        hint = f"the plans are {', '.join(known) or 'none'}"
        if near := nearest(name, known, 1):
            hint = f"did you mean {near[0]}? {hint}"
        raise PlanError([Diagnostic("plan-not-found", f"there is no plan named {name!r}", span, hint)])

    return find


def _load(name: str, find: Find, span: Span | None, children: tuple[tuple[str, Span | None], ...], findings: Findings) -> Plan:
    path = find(name, span)
    real = os.path.realpath(path)
    chain = (*children, (real, span))
    if any(real == other for other, _ in children):
        raise PlanError([Diagnostic("extends-cycle", f"{path} extends itself", span, "remove one `extends` of the circle")])
    if len(chain) > MAX_EXTENDS:
        raise PlanError([Diagnostic("extends-depth", f"plans extend each other more than {MAX_EXTENDS} deep", span)])
    node = read_file(path, path)
    stem = Path(path).stem
    if node is None:
        findings.error("empty-file", "the file is empty", Span(path), "a plan has at least `rules:` or `extends:`")
        return Plan(stem, path)
    if not isinstance(node, MappingNode):
        findings.error("wrong-type", "a plan is a map of version, extends, layouts, rules and buffers", node.span)
        return Plan(stem, path)
    for key, _ in node:
        if key.text not in KEYS:
            findings.error("unknown-key", f"a plan has no key {key.text!r}", key.span, _did_you_mean(key.text, KEYS))
    parent = Plan(stem, path)
    extends = node.get("extends")
    if isinstance(extends, Scalar) and extends.text:
        parent = _load(extends.text, find, extends.span, chain, findings)
    elif extends is not None:
        findings.error("wrong-type", "`extends` takes one name or path", extends.span)
    version = node.get("version")
    if version is not None and not (isinstance(version, Scalar) and version.text == "1"):
        findings.error("plan-version", "this version of the plan language is unknown", version.span, "write `version: 1`")
    rules = _section(node, "rules", findings)
    buffers = _section(node, "buffers", findings)
    batch, model = _buffers(buffers, findings)
    return Plan(
        stem,
        path,
        parent.rules + _rules(rules, findings),
        {**parent.layouts, **parse_layouts(_section(node, "layouts", findings), findings)},
        {**parent.batch, **batch},
        {**parent.buffers, **model},
    )


def _section(node: MappingNode, key: str, findings: Findings) -> MappingNode:
    value = node.get(key)
    if value is None or (isinstance(value, Scalar) and value.plain and value.text in ("", "null", "~")):
        return MappingNode((), node.span)
    if isinstance(value, MappingNode):
        return value
    findings.error("wrong-type", f"`{key}` takes a map", value.span, "write `key: value` lines below it")
    return MappingNode((), node.span)


def parse_layouts(node: MappingNode, findings: Findings) -> dict[str, Placement]:
    """Names to placements. A layout is no name of another layout."""
    layouts = {}
    for key, value in node:
        _check_key(key, findings)
        if not isinstance(value, Scalar):
            findings.error("wrong-type", "a layout is one placement", value.span, "replicate, shard(0), shard(1), ...")
            continue
        try:
            placement = parse_placement(value.text, value.span)
        except PlacementError as error:
            findings.error("unknown-placement", str(error), value.span, options.PLACEMENT_HELP)
            continue
        if placement.kind == "layout":
            hint = _did_you_mean(value.text, ("replicate", "partial", "shard(0)", "shard(1)"))
            findings.error("unknown-placement", f"{value.text!r} is no placement", value.span, hint)
            continue
        layouts[key.text] = placement
    return layouts


def _check_key(key: Scalar, findings: Findings) -> None:
    if key.yaml_type != "str":
        findings.error("yaml-retyped", f"YAML reads the key {key.text} as {_article(key.yaml_type)}, not as text", key.span,
                       f'put it in quotes: "{key.text}"')


def _article(kind: str) -> str:
    names = {"bool": "a boolean", "int": "a number", "float": "a number", "null": "null", "merge": "a merge", "timestamp": "a date"}
    return names.get(kind, kind)


def _rules(node: MappingNode, findings: Findings) -> tuple[Rule, ...]:
    rules = []
    for key, value in node:
        _check_key(key, findings)
        try:
            glob = parse_glob(key.text)
        except GlobError as error:
            quote = 0 if key.plain else 1
            start = key.span.column + quote + error.offset
            span = Span(key.span.file, key.span.line, start, start + max(error.length, 1))
            findings.error("bad-glob", error.message, span, error.help)
            continue
        rule = _Body(findings)
        rule.read(value)
        if rule.uses or rule.empties:
            rules.append(Rule(glob, tuple(rule.uses), key.span, frozenset(rule.empties), rule.optional))
    return tuple(rules)


class _Body:
    """What stands behind a rule's colon: one style or a list of them."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.uses: list[StyleUse] = []
        self.empties: set[str] = set()
        self.optional = False

    def read(self, node: Node) -> None:
        if isinstance(node, SequenceNode):
            if not node.items:
                self.findings.error("wrong-type", "a rule without a style", node.span, "`none` takes every style away")
            for item in node.items:
                if isinstance(item, SequenceNode):
                    self.findings.error("wrong-type", "a list inside a list of styles", item.span)
                else:
                    self.read(item)
        elif isinstance(node, Scalar):
            self._style(node, {})
        else:
            self._map(node)
        self._slots_once()

    def _map(self, node: MappingNode) -> None:
        style = node.get("style")
        emptied = node.get("none")
        if emptied is not None and style is None:
            self._none(node, emptied)
            return
        if not isinstance(style, Scalar):
            span = style.span if style is not None else node.span
            self.findings.error("missing-style", "a rule names no style", span, "write {style: colwise, ...}")
            return
        written = {}
        for key, value in node:
            if key.text == "style":
                continue
            if key.text == "optional":
                self.optional = options.boolean(value, self.findings)
                continue
            written[key.text] = (key, value)
        self._style(style, written)

    def _none(self, node: MappingNode, emptied: Node) -> None:
        names = emptied.items if isinstance(emptied, SequenceNode) else (emptied,)
        for name in names:
            if isinstance(name, Scalar) and name.text in SLOTS:
                self.empties.add(name.text)
            else:
                text = name.text if isinstance(name, Scalar) else "this"
                self.findings.error("unknown-slot", f"{text!r} is no slot", name.span, f"the slots are {', '.join(SLOTS)}")
        for key, value in node:
            if key.text == "optional":
                self.optional = options.boolean(value, self.findings)
            elif key.text != "none":
                self.findings.error("unknown-option", f"`none` has no option {key.text!r}", key.span)

    def _style(self, name: Scalar, written: dict[str, tuple[Scalar, Node]]) -> None:
        if name.text == "none" and not written:
            self.empties.update(SLOTS)
            return
        declaration = STYLES.get(name.text)
        if declaration is None:
            if name.yaml_type != "str":
                what = "nothing" if name.text == "" else f"{name.text!r}"
                self.findings.error("wrong-type", f"a style's name is wanted here, not {what}", name.span,
                                    f"the styles are {', '.join(STYLES)}, none")
                return
            self.findings.error("unknown-style", f"there is no style {name.text!r}", name.span, _did_you_mean(name.text, (*STYLES, "none")))
            return
        read: dict[str, Option] = {}
        for key, value in written.values():
            kind = declaration.options.get(key.text)
            if kind is None:
                self.findings.error("unknown-option", f"{name.text} has no option {key.text!r}", key.span,
                                    _did_you_mean(key.text, (*declaration.options, "optional")))
                continue
            before = len(self.findings.items)
            parsed: Any = options.parse(kind, value, self.findings)
            if len(self.findings.items) == before:
                read[key.text] = Option(parsed, key.span)
        if name.text == "shard-params" and not any(key == "params" for key in written):
            self.findings.error("missing-option", "shard-params does not say which parameters", name.span,
                                "write params: {weight: shard(0)}")
        self.uses.append(StyleUse(name.text, read, name.span))

    def _slots_once(self) -> None:
        taken: dict[tuple[str, str | None], StyleUse] = {}
        for use in self.uses:
            slot = slot_of(use)
            if slot in taken and taken[slot] is not use:
                self.findings.error("slot-twice", f"{use.style} and {taken[slot].style} fill the same slot `{slot[0]}`", use.span,
                                    "one style per slot: keep one of the two", [Related(taken[slot].span, "the other stands here")])
            taken.setdefault(slot, use)


def slot_of(use: StyleUse) -> tuple[str, str | None]:
    """The slot a style fills; `io` is one slot for each axis."""
    declaration = STYLES[use.style]
    if declaration.slot != "io":
        return declaration.slot, None
    axis = use.options.get("axis")
    return "io", axis.value if axis else declaration.axis


def _buffers(node: MappingNode, findings: Findings) -> tuple[dict[str, Buffer], dict[str, Buffer]]:
    found: dict[str, dict[str, Buffer]] = {"batch": {}, "model": {}}
    for section, entries in node:
        if section.text not in found:
            findings.error("unknown-key", f"`buffers` has no key {section.text!r}", section.span, _did_you_mean(section.text, found))
            continue
        if not isinstance(entries, MappingNode):
            findings.error("wrong-type", f"`{section.text}` takes a map of names to dimensions", entries.span)
            continue
        for key, value in entries:
            _check_key(key, findings)
            buffer = _buffer(key, value, section.text == "batch", findings)
            if buffer is not None:
                found[section.text][key.text] = buffer
    return found["batch"], found["model"]


def _buffer(key: Scalar, value: Node, batch: bool, findings: Findings) -> Buffer | None:
    if isinstance(value, Scalar) and value.yaml_type == "int" and value.text.isdigit():
        return Buffer(key.text, key.span, dim=int(value.text))
    if batch and isinstance(value, Scalar) and value.text == "positions":
        return Buffer(key.text, key.span, make="positions")
    wanted = "a dimension (0, 1, ...) or positions" if batch else "a dimension (0, 1, ...)"
    findings.error("wrong-type", f"a buffer takes {wanted}", value.span, "the dimension is the one that counts tokens")
    return None


def _did_you_mean(text: str, names: Iterable[str]) -> str:
    known = list(names)
    near = nearest(text, known, 1)
    return (f"did you mean {near[0]}? " if near else "") + f"there are {', '.join(known)}"
