"""Nodes to a plan: every mistake of form becomes a diagnostic at its place, all of a file's at once."""

from __future__ import annotations

from parallelizer.diagnostics.diagnostic import Findings, quoted
from parallelizer.diagnostics.nearest import did_you_mean
from parallelizer.language import parse_options as options
from parallelizer.language.parse_rule import data_only, parse_rules, read_glob
from parallelizer.language.placement import RESERVED, is_layout_name
from parallelizer.language.plan import Buffer, Placement, Plan
from parallelizer.language.yaml_nodes import MappingNode, Node, Scalar, kind

KEYS = ("version", "extends", "layouts", "rules", "buffers")
MADE_BUFFERS = ("positions", "document-mask")
BUFFER_KEYS = ("dim", "pad", "documents")
"""Batch entries that are made for each rank instead of split."""


def parse_plan(node: MappingNode, parent: Plan, findings: Findings) -> Plan:
    """A file's part of a plan, put behind what it extends; `parent` has the name and file of the result."""
    kept = data_only(node, findings, maps=3)
    node = kept if isinstance(kept, MappingNode) else node
    for key, _ in node:
        if key.text not in KEYS:
            help_text = did_you_mean(key.text, KEYS, "a plan has")
            findings.error("unknown-key", f"a plan has no key {quoted(key.text)}", key.span, help_text)
    version = node.get("version")
    if version is not None and not (isinstance(version, Scalar) and version.text == "1"):
        message = f"{kind(version)} is not a version of the plan language"
        help_text = "write `version: 1`"
        if (
            isinstance(version, Scalar)
            and version.text.lstrip("0") not in ("", "1")
            and version.text.isdecimal()
        ):
            help_text = "this parallelizer reads only `version: 1`; a newer one may read it"
        findings.error("plan-version", message, version.span, help_text)
    batch, model = _buffers(section(node, "buffers", findings), findings)
    return Plan(
        parent.name,
        parent.file,
        parent.rules + parse_rules(section(node, "rules", findings), findings),
        {**parent.layouts, **parse_layouts(section(node, "layouts", findings), findings)},
        {**parent.batch, **batch},
        {**parent.buffers, **model},
    )


def section(node: MappingNode, key: str, findings: Findings) -> MappingNode:
    """The map under a key; an empty one when nothing stands there, or something else (which is reported)."""
    value = node.get(key)
    if isinstance(value, MappingNode):
        return value
    if value is not None and not (isinstance(value, Scalar) and value.plain and value.yaml_type == "null"):
        help_text = "write `glob: style` lines below it, without dashes" if key == "rules" else None
        help_text = help_text or "write `key: value` lines below it"
        if isinstance(value, Scalar) and value.plain and ":" in value.text:
            help_text = f"write a blank after the colon; {help_text}"
        findings.error("wrong-type", f"`{key}` takes a map, not {kind(value)}", value.span, help_text)
    return MappingNode((), node.span)


def parse_layouts(node: MappingNode, findings: Findings) -> dict[str, Placement]:
    """Names to placements. A layout is no name of another layout."""
    layouts = {}
    for key, value in node:
        options.check_key(key, findings)
        if not is_layout_name(key.text):
            message = f"a layout cannot be called {quoted(key.text)}"
            help_text = f"letters, digits, `_` and `-`; not {', '.join(RESERVED)}"
            findings.error("bad-layout-name", message, key.span, help_text)
            continue
        placement = options.placement(value, findings)
        if placement is None:
            continue
        if placement.kind == "layout":
            message = f"{quoted(str(placement))} is not a placement"
            help_text = did_you_mean(
                str(placement), ("replicate", "partial", "shard(0)", "shard(1)"), "write"
            )
            findings.error("unknown-placement", message, placement.span or value.span, help_text)
            continue
        layouts[key.text] = placement
    return layouts


def _buffers(node: MappingNode, findings: Findings) -> tuple[dict[str, Buffer], dict[str, Buffer]]:
    sections = ("batch", "model")
    for key, _ in node:
        if key.text not in sections:
            message = f"`buffers` has no key {quoted(key.text)}"
            findings.error("unknown-key", message, key.span, did_you_mean(key.text, sections, "it has"))
    found: list[dict[str, Buffer]] = []
    for name in sections:
        entries = section(node, name, findings)
        read = [_buffer(key, value, name == "batch", findings) for key, value in entries]
        found.append({buffer.name: buffer for buffer in read if buffer is not None})
    return found[0], found[1]


def _buffer(key: Scalar, value: Node, batch: bool, findings: Findings) -> Buffer | None:
    options.check_key(key, findings)
    if not batch and read_glob(key, findings) is None:
        return None
    dim = options.whole_number(value)
    if dim is not None:
        return Buffer(key.text, key.span, dim=dim)
    if batch and isinstance(value, Scalar) and value.text in MADE_BUFFERS:
        return Buffer(key.text, key.span, make=value.text)
    if batch and isinstance(value, MappingNode):
        return _detailed_buffer(key, value, findings)
    wanted = " or ".join(("a dimension (0, 1, ...)", *(MADE_BUFFERS if batch else ())))
    message = f"a buffer takes {wanted}, not {kind(value)}"
    findings.error("wrong-type", message, value.span, "the dimension is the one that counts tokens")
    return None


def _detailed_buffer(key: Scalar, node: MappingNode, findings: Findings) -> Buffer | None:
    """`{dim: 1, pad: -100}`, `{dim: 1, documents: true}`."""
    for name, _ in node:
        if name.text not in BUFFER_KEYS:
            message = f"a buffer has no key {quoted(name.text)}"
            findings.error("unknown-key", message, name.span, did_you_mean(name.text, BUFFER_KEYS, "it has"))
            return None
    dim_node, pad_node, documents_node = (node.get(name) for name in BUFFER_KEYS)
    dim = options.whole_number(dim_node) if dim_node is not None else None
    if dim is None:
        at = dim_node.span if dim_node is not None else key.span
        findings.error("wrong-type", "a buffer takes its `dim`, a number from 0", at, "write {dim: 1, ...}")
        return None
    pad = None
    if pad_node is not None:
        pad = options.integer(pad_node)
        if pad is None:
            message = f"`pad` takes a whole number, not {kind(pad_node)}"
            findings.error(
                "wrong-type", message, pad_node.span, "labels take the value that the loss ignores: -100"
            )
            return None
    documents = False
    if documents_node is not None:
        if not (isinstance(documents_node, Scalar) and documents_node.text in ("true", "false")):
            message = f"`documents` takes true or false, not {kind(documents_node)}"
            findings.error(
                "wrong-type",
                message,
                documents_node.span,
                "true means that the entry numbers packed documents",
            )
            return None
        documents = documents_node.text == "true"
    return Buffer(key.text, key.span, dim=dim, pad=pad, documents=documents)
