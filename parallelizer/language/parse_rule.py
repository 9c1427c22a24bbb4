"""One line of a plan, `glob: what for`, from nodes to a rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from parallelizer.diagnostics.diagnostic import Findings, PlanError, Related, Span, quoted
from parallelizer.diagnostics.nearest import did_you_mean, nearest
from parallelizer.language import foreign_words
from parallelizer.language import parse_options as options
from parallelizer.language.glob import Glob, GlobError, parse_glob
from parallelizer.language.plan import SLOTS, Option, Rule, StyleUse
from parallelizer.language.styles import STYLES
from parallelizer.language.yaml_nodes import MappingNode, Node, Scalar, SequenceNode, kind, read_inside

MAX_RULES = 1000
"""The most rules in one file; each may expand to thousands of patterns."""

RULE_HELP = "a rule is `glob: style`, `glob: {style: colwise, ...}` or `glob: [style, ...]`"


def parse_rules(node: MappingNode, findings: Findings) -> tuple[Rule, ...]:
    """The rules of a map, in order; those with a mistake are reported and left out."""
    if len(node.entries) > MAX_RULES:
        findings.error(
            "plan-limit", f"more than {MAX_RULES:,} rules", node.entries[MAX_RULES][0].span, "use globs"
        )
    rules = []
    for key, value in node.entries[:MAX_RULES]:
        rule = _parse_rule(key, value, findings)
        if rule is not None:
            rules.append(rule)
    return tuple(rules)


def parse_rule_item(node: Node, findings: Findings) -> tuple[Rule, ...]:
    """The rules of an item of a list, as a preset or the command line writes them: a text, or a map."""
    if isinstance(node, Scalar):
        try:
            written = read_inside(node)
        except PlanError as error:
            findings.items.extend(error.diagnostics)
            return ()
    else:
        written = node
    before = len(findings.items)
    written = data_only(written, findings, maps=1) if written is not None else None
    if isinstance(written, MappingNode) and written.entries:
        return parse_rules(written, findings)
    if len(findings.items) == before:
        help_text = RULE_HELP
        if isinstance(node, Scalar) and ":" in node.text:
            help_text = f"write a blank after the colon; {RULE_HELP}"
        findings.error("wrong-type", f"{kind(node)} is not a rule", node.span, help_text)
    return ()


def data_only(node: Node, findings: Findings, maps: int = 0) -> Node | None:
    """The node without what would make a plan more than data; what is left out is reported.

    These are interpolations, keys of Hydra's and OmegaConf's, and characters that cannot be printed. The
    outer `maps` levels of maps lose the entry alone; anything further in is left out whole, because half of a
    rule is another rule.
    """
    if isinstance(node, Scalar):
        return node if _is_data(node, findings) else None
    if isinstance(node, SequenceNode):
        items = [data_only(item, findings) for item in node.items]
        kept = tuple(item for item in items if item is not None)
        return node if len(kept) == len(items) else None
    entries = []
    for key, value in node:
        kept_value = data_only(value, findings, max(maps - 1, 0))
        if _is_data_key(key, findings) and kept_value is not None:
            entries.append((key, kept_value))
    return replace(node, entries=tuple(entries)) if maps or len(entries) == len(node.entries) else None


def _is_data(text: Scalar, findings: Findings) -> bool:
    at = text.text.find("${")
    if at >= 0:
        end = text.text.find("}", at)
        span = text.part(at, end + 1 if end >= 0 else len(text.text))
        help_text = "a plan is data: write the value itself"
        findings.error("interpolation", "plans and rules have no interpolations", span, help_text)
    elif not text.text.isprintable():
        message = f"{quoted(text.text)} holds a character that cannot be printed"
        findings.error("yaml-syntax", message, text.span, "write it in one line, in printable characters")
    return at < 0 and text.text.isprintable()


def _is_data_key(key: Scalar, findings: Findings) -> bool:
    if len(key.text) > 2 and key.text.startswith("_") and key.text.endswith("_"):
        help_text = "a plan is data; register your own style in Python and name its module in `imports`"
        findings.error("not-data", f"{quoted(key.text)} has no meaning in a plan", key.span, help_text)
        return False
    return _is_data(key, findings)


def quoted_rules(key: str, rules: str) -> str:
    """How a list of rules is typed, so that both the shell and Hydra leave them alone; some if `rules` is
    empty.
    """
    if '"' in rules or "'" in rules or not rules:
        rules = "layers.*: checkpoint"
    return f"'{key}=[\"{rules}\"]'"


def slot_of(use: StyleUse) -> tuple[str, str | None]:
    """The slot a style fills; `io` is one slot for each axis."""
    declaration = STYLES[use.style]
    if declaration.slot != "io":
        return declaration.slot, None
    axis = use.options.get("axis")
    return "io", axis.value if axis else declaration.axis


def _parse_rule(key: Scalar, value: Node, findings: Findings) -> Rule | None:
    before = len(findings.items)
    options.check_key(key, findings)
    glob = read_glob(key, findings)
    body = _Body(findings)
    body.read(value)
    body.check_slots()
    if glob is None or len(findings.items) > before:
        return None
    return Rule(glob, tuple(body.uses), key.span, frozenset(body.empties), body.optional)


def read_glob(key: Scalar, findings: Findings) -> Glob | None:
    """The glob that a key is; None, reported at the narrowest wrong place, when it does not parse."""
    try:
        return parse_glob(key.text)
    except GlobError as error:
        span = key.part(error.offset, error.offset + error.length)
        findings.error("bad-glob", error.message, span, error.help)
        return None


class _Body:
    """What stands behind a rule's colon: a style, a map with one, `none`, or a list of these."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.uses: list[StyleUse] = []
        self.empties: dict[str, Span] = {}
        self.optional = False

    def read(self, node: Node) -> None:
        """Take in one node; a list's items one by one."""
        if isinstance(node, Scalar):
            self._style(node, ())
        elif isinstance(node, MappingNode):
            self._map(node)
        elif not node.items:
            self.findings.error(
                "missing-style", "the list of styles is empty", node.span, "`none` empties every slot"
            )
        else:
            for item in node.items:
                if isinstance(item, SequenceNode):
                    message = "there is a list inside the list of styles"
                    self.findings.error(
                        "wrong-type", message, item.span, "write one list of all the rule's styles"
                    )
                else:
                    self.read(item)

    def check_slots(self) -> None:
        """Report styles that fill the same slot, or one that the same rule empties by name."""
        taken: dict[tuple[str, str | None], StyleUse] = {}
        for use in self.uses:
            slot = slot_of(use)
            first = taken.setdefault(slot, use)
            if first is not use:
                message = f"{use.style} and {first.style} fill the same slot, `{slot[0]}`"
                self._slot_twice(message, use.span, first.span)
            elif slot[0] in self.empties and len(self.empties) < len(SLOTS):
                message = f"{use.style} fills the slot `{slot[0]}` that the same rule empties"
                self._slot_twice(message, use.span, self.empties[slot[0]])

    def _slot_twice(self, message: str, span: Span, other: Span) -> None:
        related = [Related(other, "the other one")]
        self.findings.error(
            "slot-twice", message, span, "a slot takes one style: keep one of the two", related
        )

    def _map(self, node: MappingNode) -> None:
        rest = []
        for key, value in node:
            if key.text == "optional":
                self.optional = options.boolean(value, self.findings)
            elif key.text not in ("style", "none"):
                rest.append((key, value))
        style, emptied = node.get("style"), node.get("none")
        if isinstance(style, Scalar) and emptied is None:
            self._style(style, rest)
        elif style is not None and emptied is not None:
            help_text = "write a list: [{none: fsdp}, {style: colwise}]"
            self.findings.error("wrong-type", "`style` and `none` are in one map", node.span, help_text)
        elif style is not None:
            help_text = "write one style, or a list of maps: [{style: colwise}, fsdp]"
            self.findings.error(
                "wrong-type", f"`style` takes a name, not {kind(style)}", style.span, help_text
            )
        elif emptied is not None:
            self._none(emptied)
            self._no_options("`none`", rest)
        else:
            self._missing_style(node)

    def _missing_style(self, node: MappingNode) -> None:
        help_text = "write {style: colwise, ...}"
        for key, _ in node:
            if key.text in STYLES:
                help_text = f"write {{style: {key.text}, ...}}"
            elif nearest(key.text, ["style"]):
                help_text = f"did you mean style instead of {key.text}?"
        self.findings.error("missing-style", "the rule names no style", node.span, help_text)

    def _none(self, emptied: Node) -> None:
        slots_help = f"the slots are {', '.join(SLOTS)}"
        names = emptied.items if isinstance(emptied, SequenceNode) else (emptied,)
        if not names:
            self.findings.error("unknown-slot", "the list of slots is empty", emptied.span, slots_help)
        for name in names:
            if isinstance(name, Scalar) and name.text in SLOTS:
                self.empties[name.text] = name.span
            else:
                help_text = (
                    did_you_mean(name.text, SLOTS, "the slots are")
                    if isinstance(name, Scalar)
                    else slots_help
                )
                self.findings.error("unknown-slot", f"{kind(name)} is no slot", name.span, help_text)

    def _no_options(self, what: str, rest: Iterable[tuple[Scalar, Node]]) -> None:
        for key, _ in rest:
            message = f"{what} has no option {quoted(key.text)}"
            self.findings.error("unknown-option", message, key.span, "it takes `optional` and nothing else")

    def _style(self, name: Scalar, written: Iterable[tuple[Scalar, Node]]) -> None:
        if name.text == "none":
            self.empties.update(dict.fromkeys(SLOTS, name.span))
            self._no_options("`none`", written)
            return
        declaration = STYLES.get(name.text)
        if declaration is None:
            self._unknown_style(name)
            return
        read: dict[str, Option] = {}
        for key, value in written:
            declared = declaration.options.get(key.text)
            if declared is None:
                help_text = did_you_mean(key.text, (*declaration.options, "optional"), "it has")
                if meant := foreign_words.option(key.text):
                    help_text = f"a plan writes it `{meant}`; {help_text}"
                message = f"{name.text} has no option {quoted(key.text)}"
                self.findings.error("unknown-option", message, key.span, help_text)
            else:
                read[key.text] = Option(
                    options.parse(declared, value, self.findings), key.span, _key_spans(value)
                )
        if name.text == "shard-params" and not {"params", "divide", "divide_groups"} & read.keys():
            message = "shard-params names no parameters"
            self.findings.error("missing-option", message, name.span, "write params: {weight: shard(0)}")
        self.uses.append(StyleUse(name.text, read, name.span))

    def _unknown_style(self, name: Scalar) -> None:
        known = (*STYLES, "none")
        if name.yaml_type != "str":
            message = f"write the name of a style here, not {kind(name)}"
            self.findings.error(
                "missing-style", message, name.span, did_you_mean(name.text, known, "the styles are")
            )
            return
        help_text = did_you_mean(name.text, known, "the styles are")
        if meant := foreign_words.style(name.text):
            help_text = f"a plan writes it `{meant}`"
        elif "." in name.text:
            help_text = "a plan has no import paths: register your own style in Python and name its module in `imports`"
        self.findings.error("unknown-style", f"there is no style {quoted(name.text)}", name.span, help_text)


def _key_spans(node: Node, inside: str = "") -> dict[str, Span]:
    """Where the keys of a map stand, those of maps in it as `outer.inner`."""
    spans = {}
    for key, value in node if isinstance(node, MappingNode) else ():
        spans[inside + key.text] = key.span
        spans.update(_key_spans(value, f"{inside}{key.text}."))
    return spans
