"""Parts that JSON Schemas of plans and presets are made of, and the schema of every kind of option."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from parallelizer.language.parse_options import DTYPES
from parallelizer.language.plan import MESH_KEYS
from parallelizer.language.schema.schema_patterns import DOTTED, IDENTIFIER, NUMBER, TEXT, WHOLE, WHOLE_FROM_1
from parallelizer.language.styles import OptionKind

Schema = dict[str, Any]


def closed(properties: Schema) -> Schema:
    """A map with these keys and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def or_null(schema: Schema) -> Schema:
    """What the schema accepts, or null."""
    return {**schema, "type": [schema["type"], "null"]}


def or_interpolated(*schemas: Schema) -> Schema:
    """What one of the schemas accepts, or a text with an interpolation."""
    return {"anyOf": [*schemas, {"type": "string", "pattern": r"\$\{"}]}


def whole(digits: str = WHOLE) -> Schema:
    """A whole number, or a text that spells one, as 1_000 is to YAML 1.2."""
    least = 1 if digits == WHOLE_FROM_1 else 0
    return {"anyOf": [{"type": "integer", "minimum": least}, {"type": "string", "pattern": digits}]}


def matching(pattern: str, otherwise: str) -> Schema:
    """A pattern, and what an editor says of a text that is not of it."""
    return {"pattern": pattern, "patternErrorMessage": otherwise}


def one_of(meanings: Mapping[str, str]) -> Schema:
    """One of some names, each with a line for the editor's list."""
    return {"enum": list(meanings), "enumDescriptions": list(meanings.values())}


KEY: Schema = matching(TEXT, "a plan has no interpolations and no keys of Hydra's")
"""Of a key without `type`: editors take `0:` for a number."""


def text_of(pattern: str, examples: list[str], description: str) -> Schema:
    """A text of a pattern. The examples are what an editor proposes."""
    return {
        "description": description,
        "type": "string",
        "anyOf": [{"enum": examples}, {"pattern": pattern}],
    }


def ref(name: str) -> Schema:
    """One of the definitions."""
    return {"$ref": f"#/definitions/{name}"}


def option_schema(option: OptionKind) -> Schema:
    """The schema of an option's value; of a kind that is not known here anything passes."""
    return {**_KINDS.get(option.kind, lambda _: {})(option), "description": option.doc}


def _placements_by_axis() -> Schema:
    return {"type": "object", "propertyNames": ref("axis"), "additionalProperties": ref("placement")}


def _params(option: OptionKind) -> Schema:
    """Placements by parameter, each a placement or a map by axis; or, for a rule that names a parameter, one of
    these.
    """
    by_axis = _placements_by_axis()
    of_parameter = {"anyOf": [ref("placement"), by_axis]}
    names = {**KEY, "not": {"enum": list(MESH_KEYS)}}
    by_name = {
        "type": "object",
        "minProperties": 1,
        "propertyNames": names,
        "additionalProperties": of_parameter,
    }
    return {"anyOf": [ref("placement"), {**by_axis, "minProperties": 1}, by_name]}


def _flows(names: Schema) -> Schema:
    by_name = {
        "type": "object",
        "minProperties": 1,
        "propertyNames": names,
        "additionalProperties": ref("flow"),
    }
    return {"anyOf": [ref("flow"), by_name]}


def _names(option: OptionKind) -> Schema:
    name = {"type": "string", **matching(DOTTED, "this is not an attribute name")}
    return {"anyOf": [name, {"type": "array", "items": name}]}


def _numbers(option: OptionKind) -> Schema:
    name = {"type": "string", **matching(NUMBER, "this is no attribute name, and no size as in x.shape[-1]")}
    return {"anyOf": [name, {"type": "array", "items": name}]}


def _parts(option: OptionKind) -> Schema:
    part = {
        "anyOf": [whole(WHOLE_FROM_1), {"type": "string", "pattern": DOTTED}],
        "description": "a ratio, or an attribute of the module or of one around it, as in config.num_heads",
    }
    return {"type": "array", "minItems": 2, "items": part}


def _parts_by_param(option: OptionKind) -> Schema:
    parts = _parts(option)
    by_name = {
        "type": "object",
        "minProperties": 1,
        "propertyNames": KEY,
        "additionalProperties": parts,
    }
    return {"anyOf": [parts, by_name]}


def _size() -> Schema:
    return {"anyOf": [whole(WHOLE_FROM_1), {"type": "string", "pattern": DOTTED}]}


def _choice(option: OptionKind) -> Schema:
    """The choices, digits also without quotes."""
    numbers = [int(choice) for choice in option.choices if choice.isdigit()]
    return {"enum": [*option.choices, *numbers]}


_KINDS: dict[str, Callable[[OptionKind], Schema]] = {
    "argument": lambda _: {
        "type": "string",
        **matching(IDENTIFIER, "this is no parameter name of a forward"),
    },
    "bool": lambda _: {"type": "boolean"},
    "int": lambda _: whole(),
    "bool-or-int": lambda _: {"anyOf": [{"type": "boolean"}, whole()]},
    "bool-or-name": lambda _: {
        "anyOf": [
            {"type": "boolean"},
            {"type": "string", **matching(DOTTED, "this is neither true nor an attribute name")},
        ]
    },
    "choice": _choice,
    "dtype": lambda _: {"enum": list(DTYPES)},
    "axis": lambda _: ref("axis"),
    "names": _names,
    "numbers": _numbers,
    "parts": _parts,
    "parts-by-param": _parts_by_param,
    "size": lambda _: _size(),
    "placement": lambda _: ref("placement"),
    "input": lambda _: _flows(matching(IDENTIFIER, "this is no parameter name of a forward")),
    "output": lambda _: _flows(KEY),
    "params": _params,
}
"""The schema of an option's value, by its declared kind."""
