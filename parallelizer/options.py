"""The values of styles' options: one converter for each declared kind, from a node to a checked value."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from parallelizer.placement import PlacementError, parse_flow, parse_placement
from parallelizer.plan import AXES, Flow, Placement
from parallelizer.source import MappingNode, Node, Scalar, SequenceNode
from parallelizer.styles.declare import OptionKind
from parallelizer.suggest import nearest

if TYPE_CHECKING:
    from parallelizer.parse import Findings

PLACEMENT_HELP = "a placement is replicate, shard(0), shard(1), ..., partial, or the name of a layout"
DTYPES = ("float32", "bfloat16", "float16", "float64")


def parse(kind: OptionKind, node: Node, findings: Findings) -> Any:
    """The value of an option; a node of the wrong form adds a diagnostic and gives None."""
    if isinstance(node, Scalar) and "${" in node.text:
        findings.error("interpolation", "an interpolation inside a rule", node.span, "a plan is data: write the value itself")
        return None
    return _CONVERTERS[kind.kind](kind, node, findings)


def boolean(node: Node, findings: Findings) -> bool:
    """`true` or `false`."""
    if isinstance(node, Scalar) and node.text in ("true", "false", "True", "False"):
        return node.text.lower() == "true"
    findings.error("wrong-type", f"{_text(node)} is neither true nor false", node.span, "write true or false")
    return False


def _bool(kind: OptionKind, node: Node, findings: Findings) -> bool:
    return boolean(node, findings)


def _int(kind: OptionKind, node: Node, findings: Findings) -> int | None:
    if isinstance(node, Scalar):
        digits = node.text.replace("_", "")
        if digits.isdigit() and (digits == "0" or not digits.startswith("0")):
            return int(digits)
    findings.error("wrong-type", f"{_text(node)} is no whole number", node.span, "write digits, as in 1000000 or 1_000_000")
    return None


def _bool_or_int(kind: OptionKind, node: Node, findings: Findings) -> bool | int | None:
    if isinstance(node, Scalar) and node.text.isdigit():
        return _int(kind, node, findings)
    if isinstance(node, Scalar) and node.text in ("true", "false", "True", "False"):
        return boolean(node, findings)
    findings.error("wrong-type", f"{_text(node)} is neither true, false nor a number", node.span)
    return None


def _choice(kind: OptionKind, node: Node, findings: Findings) -> str | None:
    return _one_of(node, kind.choices, "unknown-value", "value", findings)


def _dtype(kind: OptionKind, node: Node, findings: Findings) -> str | None:
    return _one_of(node, DTYPES, "unknown-value", "dtype", findings)


def _axis(kind: OptionKind, node: Node, findings: Findings) -> str | None:
    return _one_of(node, AXES, "unknown-axis", "axis", findings)


def _one_of(node: Node, names: tuple[str, ...], code: str, what: str, findings: Findings) -> str | None:
    if isinstance(node, Scalar) and node.text in names:
        return node.text
    near = nearest(node.text, names, 1) if isinstance(node, Scalar) else []
    hint = (f"did you mean {near[0]}? " if near else "") + f"there are {', '.join(names)}"
    findings.error(code, f"there is no {what} {_text(node)}", node.span, hint)
    return None


def _names(kind: OptionKind, node: Node, findings: Findings) -> tuple[str, ...]:
    items = node.items if isinstance(node, SequenceNode) else (node,)
    names = []
    for item in items:
        if isinstance(item, Scalar) and item.text.isidentifier():
            names.append(item.text)
        else:
            findings.error("wrong-type", f"{_text(item)} is no attribute name", item.span)
    return tuple(names)


def _parts(kind: OptionKind, node: Node, findings: Findings) -> tuple[int | str, ...] | None:
    if not isinstance(node, SequenceNode) or len(node.items) < 2:
        findings.error("wrong-type", "`packed` takes a list of at least two parts", node.span, "as in [1, 1] or [q_size, kv_size, kv_size]")
        return None
    parts: list[int | str] = []
    for item in node.items:
        if isinstance(item, Scalar) and item.text.isdigit() and int(item.text) > 0:
            parts.append(int(item.text))
        elif isinstance(item, Scalar) and item.text.isidentifier():
            parts.append(item.text)
        else:
            findings.error("wrong-type", f"{_text(item)} is neither a ratio nor an attribute name", item.span)
    return tuple(parts)


def _placement(kind: OptionKind, node: Node, findings: Findings) -> Placement | None:
    if not isinstance(node, Scalar):
        findings.error("wrong-type", "one placement is wanted here", node.span, PLACEMENT_HELP)
        return None
    try:
        return parse_placement(node.text, node.span)
    except PlacementError as error:
        findings.error("unknown-placement", str(error), node.span, PLACEMENT_HELP)
        return None


def _flows(output: bool) -> Callable[[OptionKind, Node, Findings], dict[str, Flow]]:
    def convert(kind: OptionKind, node: Node, findings: Findings) -> dict[str, Flow]:
        entries = [(k.text, v) for k, v in node] if isinstance(node, MappingNode) else [("", node)]
        flows = {}
        for name, value in entries:
            if not isinstance(value, Scalar):
                findings.error("wrong-type", "a placement, or two with an arrow between them, is wanted here", value.span, PLACEMENT_HELP)
                continue
            try:
                flows[name] = parse_flow(value.text, output=output, span=value.span)
            except PlacementError as error:
                findings.error("unknown-placement", str(error), value.span, PLACEMENT_HELP)
        return flows

    return convert


def _params(kind: OptionKind, node: Node, findings: Findings) -> dict[str, dict[str, Placement]]:
    """By parameter and axis. A bare placement stands on the style's axis, written as the axis `""`; a rule whose glob names a
    parameter gives the placement without the name, written as the parameter `""`."""
    if isinstance(node, MappingNode) and not any(k.text in AXES for k, _ in node):
        return {k.text: _by_axis(v, findings) for k, v in node}
    return {"": _by_axis(node, findings)}


def _by_axis(node: Node, findings: Findings) -> dict[str, Placement]:
    if not isinstance(node, MappingNode):
        placement = _placement(OptionKind("placement", ""), node, findings)
        return {"": placement} if placement else {}
    placements = {}
    for key, value in node:
        if key.text not in AXES:
            _one_of(key, AXES, "unknown-axis", "axis", findings)
            continue
        placement = _placement(OptionKind("placement", ""), value, findings)
        if placement:
            placements[key.text] = placement
    return placements


def _text(node: Node) -> str:
    if isinstance(node, Scalar):
        return repr(node.text)
    return "a map" if isinstance(node, MappingNode) else "a list"


_CONVERTERS: dict[str, Callable[[OptionKind, Node, Any], Any]] = {
    "bool": _bool,
    "int": _int,
    "bool-or-int": _bool_or_int,
    "choice": _choice,
    "dtype": _dtype,
    "axis": _axis,
    "names": _names,
    "parts": _parts,
    "placement": _placement,
    "input": _flows(output=False),
    "output": _flows(output=True),
    "params": _params,
}
