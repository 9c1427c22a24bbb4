"""The values of styles' options: one converter for each declared kind, from a node to a checked value."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from parallelizer.diagnostics.diagnostic import Findings
from parallelizer.diagnostics.nearest import did_you_mean, nearest
from parallelizer.language import foreign_words
from parallelizer.language.placement import RESERVED, PlacementError, parse_flow, parse_placement
from parallelizer.language.plan import AXES, EXPERT, MESH_KEYS, Flow, Placement
from parallelizer.language.styles import OptionKind
from parallelizer.language.yaml_nodes import MappingNode, Node, Scalar, SequenceNode, kind

PLACEMENT_HELP = "a placement is replicate, shard(0), shard(1), ..., partial, or the name of a layout"
_WORD = re.compile(r"(\w+)\s*(?:[(\[{]\s*([0-9]*)\s*[)\]}])?")
"""A word with or without a number behind it: `shrad(1)`, `shard[1]`, `shard`."""

_ARGUMENT_SIZE = re.compile(r"(\w+)\.shape\[(-?[0-9])\]")

DTYPES = ("float32", "bfloat16", "float64")
"""The dtypes that parameters and gradients may have. `float16` is not one of them: see `gradient-underflow`."""

_WHOLE = re.compile(r"0|[1-9][0-9]{0,2}(_[0-9]{3}){1,5}|[1-9][0-9]{0,17}")


def parse(declared: OptionKind, node: Node, findings: Findings) -> Any:
    """The value of an option. A node of the wrong form adds a diagnostic, and the value means nothing."""
    return _CONVERTERS[declared.kind](declared, node, findings)


def argument_size(text: str) -> tuple[str, int] | None:
    """The argument and the dimension of a size as in `x.shape[-1]`; None for another text."""
    found = _ARGUMENT_SIZE.fullmatch(text)
    return (found[1], int(found[2])) if found and found[1].isidentifier() else None


def boolean(node: Node, findings: Findings) -> bool:
    """`true` or `false`."""
    value = _truth(node)
    if value is None:
        findings.error("wrong-type", f"{kind(node)} is not true or false", node.span, "write true or false")
    return bool(value)


def whole_number(node: Node) -> int | None:
    """The number that a scalar's digits spell, as in 1000000 or 1_000_000; None for everything else."""
    return int(node.text) if isinstance(node, Scalar) and _WHOLE.fullmatch(node.text) else None


def integer(node: Node) -> int | None:
    """As `whole_number`, with a sign or without."""
    text = node.text if isinstance(node, Scalar) else ""
    return int(text) if _WHOLE.fullmatch(text.removeprefix("-")) else None


def check_key(key: Scalar, findings: Findings) -> None:
    """Report a key that YAML would not read as text."""
    if key.yaml_type == "str":
        return
    if key.text:
        read_as = _READ_AS.get(key.yaml_type, key.yaml_type)
        message = f"YAML reads the key `{key.text}` as {read_as}, not as text"
        findings.error("yaml-retyped", message, key.span, f'put it in quotes: "{key.text}"')
    else:
        findings.error("yaml-retyped", "there is no key before the colon", key.span, '"" is the root module')


_READ_AS = {
    "bool": "a boolean",
    "int": "a number",
    "float": "a number",
    "null": "null",
    "merge": "a merge",
    "timestamp": "a date",
    "value": "a default value",
}


def _truth(node: Node) -> bool | None:
    return {"true": True, "false": False}.get(node.text.lower()) if isinstance(node, Scalar) else None


def _bool(declared: OptionKind, node: Node, findings: Findings) -> bool:
    return boolean(node, findings)


def _int(declared: OptionKind, node: Node, findings: Findings) -> int | None:
    number = whole_number(node)
    if number is None:
        help_text = "write digits, as in 1000000 or 1_000_000"
        findings.error("wrong-type", f"{kind(node)} is not a whole number", node.span, help_text)
    return number


def _bool_or_int(declared: OptionKind, node: Node, findings: Findings) -> bool | int | None:
    truth = _truth(node)
    value = whole_number(node) if truth is None else truth
    if value is None:
        message = f"{kind(node)} is not true, false or a whole number"
        findings.error("wrong-type", message, node.span, "write true, false, or a number of ranks")
    return value


def _bool_or_name(declared: OptionKind, node: Node, findings: Findings) -> bool | str | None:
    truth = _truth(node)
    if truth is None and isinstance(node, Scalar) and _is_dotted(node.text):
        return node.text
    if truth is None:
        message = f"{kind(node)} is not true, false or an attribute name"
        findings.error(
            "wrong-type", message, node.span, "write true, or a name as in config.num_key_value_heads"
        )
    return truth


def _choice(declared: OptionKind, node: Node, findings: Findings) -> str | None:
    return _one_of(node, declared.choices, "unknown-value", "value", findings)


def _dtype(declared: OptionKind, node: Node, findings: Findings) -> str | None:
    if isinstance(node, Scalar) and node.text == "float16":
        # A step scales losses by a constant below 1, so that sums do not overflow. The gradients of single tokens
        # are then below the smallest number of float16, and no inf or NaN shows it.
        message = "float16 rounds small gradients to zero, and there is no loss scaling"
        help_text = "write bfloat16, which has the range of float32"
        findings.error("gradient-underflow", message, node.span, help_text)
        return None
    return _one_of(node, DTYPES, "unknown-value", "dtype", findings)


def _axis(declared: OptionKind, node: Node, findings: Findings) -> str | None:
    return _axis_name(node, findings)


def _axis_name(node: Node, findings: Findings) -> str | None:
    if isinstance(node, Scalar) and node.text == EXPERT:
        message = "`ep` is no axis of its own: it is taken out of the ranks of dp_shard, cp and tp"
        help_text = (
            "give the module that computes the experts the style `experts`; for a second axis that splits tensors, write "
            "tp_outer here and in `mesh`"
        )
        findings.error("folded-axis", message, node.span, help_text)
        return None
    return _one_of(node, AXES, "unknown-axis", "axis", findings)


def _one_of(node: Node, names: Sequence[str], code: str, what: str, findings: Findings) -> str | None:
    if isinstance(node, Scalar) and node.text in names:
        return node.text
    text = node.text if isinstance(node, Scalar) else ""
    message, help_text = f"{kind(node)} is no {what}", did_you_mean(text, names, "there are")
    findings.error(code if isinstance(node, Scalar) else "wrong-type", message, node.span, help_text)
    return None


def _names(declared: OptionKind, node: Node, findings: Findings) -> tuple[str, ...]:
    items = node.items if isinstance(node, SequenceNode) else (node,)
    names = []
    for item in items:
        if isinstance(item, Scalar) and _is_dotted(item.text):
            names.append(item.text)
        else:
            help_text = "write the names of attributes of the module, as in [num_heads] or [config.num_heads]"
            findings.error("wrong-type", f"{kind(item)} is not an attribute name", item.span, help_text)
    return tuple(names)


def _numbers(declared: OptionKind, node: Node, findings: Findings) -> tuple[str, ...]:
    items = node.items if isinstance(node, SequenceNode) else (node,)
    names = []
    for item in items:
        if isinstance(item, Scalar) and (_is_dotted(item.text) or argument_size(item.text)):
            names.append(item.text)
        else:
            help_text = (
                "write the names of attributes of the module, as in [num_heads] or [config.num_heads], "
                'or sizes of arguments of its forward, as in ["x.shape[-1]"]'
            )
            findings.error("wrong-type", f"{kind(item)} is not an attribute name", item.span, help_text)
    return tuple(names)


def _parts(declared: OptionKind, node: Node, findings: Findings) -> tuple[int | str, ...] | None:
    help_text = "as in [1, 1] or [q_size, kv_size, kv_size]"
    if not isinstance(node, SequenceNode) or len(node.items) < 2:
        findings.error("wrong-type", "`packed` takes a list of at least two parts", node.span, help_text)
        return None
    parts: list[int | str] = []
    for item in node.items:
        if number := whole_number(item):
            parts.append(number)
        elif isinstance(item, Scalar) and _is_dotted(item.text):
            parts.append(item.text)
        else:
            message = f"{kind(item)} is not a ratio or an attribute name"
            findings.error("wrong-type", message, item.span, help_text)
    return tuple(parts)


def _parts_by_param(
    declared: OptionKind, node: Node, findings: Findings
) -> tuple[int | str, ...] | dict[str, tuple[int | str, ...]] | None:
    """One list of parts for every parameter, or a map of lists by parameter."""
    if not isinstance(node, MappingNode):
        return _parts(declared, node, findings)
    if not node.entries:
        help_text = "write packed: {gate_up_proj: [1, 1]}"
        findings.error("wrong-type", "an empty map names no parameter", node.span, help_text)
    for key, _ in node:
        check_key(key, findings)
    return {key.text: _parts(declared, value, findings) or () for key, value in node}


def _is_dotted(text: str) -> bool:
    """Whether a text is the name of an attribute, or of one of what an attribute holds."""
    return all(part.isidentifier() for part in text.split("."))


def _size(declared: OptionKind, node: Node, findings: Findings) -> int | str | None:
    if number := whole_number(node):
        return number
    if isinstance(node, Scalar) and _is_dotted(node.text):
        return node.text
    message = f"{kind(node)} is not a positive number or an attribute name"
    findings.error("wrong-type", message, node.span, "as in 64 or qk_rope_head_dim")
    return None


def _placement(declared: OptionKind, node: Node, findings: Findings) -> Placement | None:
    return placement(node, findings)


def placement(node: Node, findings: Findings) -> Placement | None:
    """One placement; None with a diagnostic for anything else."""
    if not isinstance(node, Scalar):
        message = f"write one placement here, not {kind(node)}"
        findings.error("wrong-type", message, node.span, PLACEMENT_HELP)
        return None
    try:
        return parse_placement(node.text, node.part)
    except PlacementError as error:
        span = node.part(error.start, error.end)
        findings.error(
            "unknown-placement", str(error), span, _placement_help(node.text[error.start : error.end])
        )
        return None


def _placement_help(text: str) -> str:
    meant = foreign_words.placement(text)
    if meant is None and (written := _WORD.fullmatch(text.strip())):
        word, number = nearest(written[1], RESERVED, 1), written[2]
        if word == ["shard"]:
            return f"did you mean shard({number or '<dimension>'})? {PLACEMENT_HELP}"
        if word and not number:
            return f"did you mean {word[0]}? {PLACEMENT_HELP}"
    return f"a plan writes it `{meant}`" if meant else PLACEMENT_HELP


def _input(declared: OptionKind, node: Node, findings: Findings) -> dict[str, Flow]:
    """By parameter name of forward; a bare flow stands under `""`."""
    if isinstance(node, MappingNode):
        for key, _ in node:
            if not key.text.isidentifier():
                help_text = "write the name that the parameter has in `def forward`"
                findings.error("wrong-type", f"{kind(key)} is not a parameter name", key.span, help_text)
            else:
                check_key(key, findings)
    return _flows(node, findings, output=False)


def _output(declared: OptionKind, node: Node, findings: Findings) -> dict[str, Flow]:
    """By index or key; a bare flow stands under `""`."""
    if isinstance(node, MappingNode):
        for key, _ in node:
            if whole_number(key) is None:
                check_key(key, findings)
    return _flows(node, findings, output=True)


def _flows(node: Node, findings: Findings, *, output: bool) -> dict[str, Flow]:
    entries = [(k.text, v) for k, v in node] if isinstance(node, MappingNode) else [("", node)]
    if not entries:
        findings.error("wrong-type", "the map is empty", node.span, PLACEMENT_HELP)
    flows = {}
    for name, value in entries:
        if not isinstance(value, Scalar):
            message = f"write one placement here, or two with an arrow between them, not {kind(value)}"
            findings.error("wrong-type", message, value.span, PLACEMENT_HELP)
            continue
        try:
            flows[name] = parse_flow(value.text, output=output, place=value.part)
        except PlacementError as error:
            span = value.part(error.start, error.end)
            help_text = _placement_help(value.text[error.start : error.end])
            findings.error("unknown-placement", str(error), span, help_text)
    return flows


def _params(declared: OptionKind, node: Node, findings: Findings) -> dict[str, dict[str, Placement]]:
    """By parameter and axis.

    A bare placement stands on the style's axis, written as the axis `""`; a rule whose glob names a parameter
    gives placements without a name, written as the parameter `""`.
    """
    if not isinstance(node, MappingNode) or any(key.text in MESH_KEYS for key, _ in node):
        return {"": _by_axis(node, findings)}
    if not node.entries:
        help_text = "write params: {weight: shard(0)}"
        findings.error("wrong-type", "an empty map names no parameter", node.span, help_text)
    for key, _ in node:
        check_key(key, findings)
    return {key.text: _by_axis(value, findings) for key, value in node}


def _by_axis(node: Node, findings: Findings) -> dict[str, Placement]:
    if not isinstance(node, MappingNode):
        here = placement(node, findings)
        return {"": here} if here else {}
    placements = {}
    for key, value in node:
        axis = _axis_name(key, findings)
        here = placement(value, findings)
        if axis and here:
            placements[axis] = here
    return placements


def _argument(declared: OptionKind, node: Node, findings: Findings) -> str | None:
    if isinstance(node, Scalar) and node.text.isidentifier():
        return node.text
    help_text = "write the name that forward has for it, as in hidden_states"
    findings.error("wrong-type", f"{kind(node)} is not the name of an argument", node.span, help_text)
    return None


_CONVERTERS: dict[str, Callable[[OptionKind, Node, Findings], Any]] = {
    "argument": _argument,
    "bool": _bool,
    "int": _int,
    "bool-or-int": _bool_or_int,
    "bool-or-name": _bool_or_name,
    "choice": _choice,
    "dtype": _dtype,
    "axis": _axis,
    "names": _names,
    "numbers": _numbers,
    "parts": _parts,
    "parts-by-param": _parts_by_param,
    "size": _size,
    "placement": _placement,
    "input": _input,
    "output": _output,
    "params": _params,
}
