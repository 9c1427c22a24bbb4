"""The JSON Schema of plan files and of presets, made from the table of styles, so that editors check them.

Draft 7, which every version of yaml-language-server reads. It says what can be said of form: names, types and
patterns. What takes counting or comparing (two styles for one slot, an undefined layout, whether a
glob matches anything) is left to `validate`. It refuses nothing that the parser accepts, but for texts that
YAML itself retypes.
"""

from __future__ import annotations

from collections.abc import Mapping

from parallelizer.language.glob import MAX_LENGTH
from parallelizer.language.parse_plan import KEYS, MADE_BUFFERS
from parallelizer.language.parse_rule import MAX_RULES
from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.settings import BALANCES
from parallelizer.language.placement import RESERVED
from parallelizer.language.plan import AXES, AXIS_MEANINGS, MESH_KEYS, SLOTS
from parallelizer.language.schema.preset_keys import PARALLEL_KEYS
from parallelizer.language.schema.schema_patterns import (
    FLOW,
    GLOB,
    LAYOUT_NAME,
    PLACEMENT,
    PLAIN_PLACEMENT,
    SIGNED,
)
from parallelizer.language.schema.schema_values import (
    KEY,
    Schema,
    closed,
    matching,
    one_of,
    option_schema,
    or_interpolated,
    or_null,
    ref,
    text_of,
    whole,
)
from parallelizer.language.styles import StyleDeclaration

DIALECT = "http://json-schema.org/draft-07/schema#"

_SLOTS = {
    "precision": "float8",
    "params": "shard-params, colwise, rowwise, sequence, replicate",
    "io": "prepare-input, prepare-output, prepare-io",
    "random": "local-random",
}
_REDISTRIBUTE = {
    "greedy": "axis by axis, from the outermost one in",
    "min-cost": "in the order that sends least, where torch's planner knows it",
}
_PLACEMENTS = ["replicate", "shard(0)", "shard(1)", "shard(-1)", "partial"]
_NEEDED = {"shard-params": ("params", "divide", "divide_groups")}
"""Styles that mean nothing without one of these options, so that their name alone is no rule."""


def plan_schema(styles: Mapping[str, StyleDeclaration]) -> Schema:
    """The schema of a plan file that may use these styles."""
    detailed = {
        **closed(
            {
                "dim": {**whole(), "description": "The dimension that counts tokens."},
                "pad": {
                    "anyOf": [{"type": "integer"}, {"type": "string", "pattern": SIGNED}],
                    "description": "What it is filled up with where its length does not divide.",
                },
                "documents": {
                    "enum": [True, False, "true", "false"],
                    "description": "Whether it numbers packed documents.",
                },
            }
        ),
        "required": ["dim"],
    }
    batch = {"anyOf": [whole(), {"enum": list(MADE_BUFFERS)}, detailed]}
    properties: Schema = {
        "version": {"enum": [1, "1"], "description": "The version of the plan language."},
        "extends": {
            "description": "The name or path of the plan whose rules come before this file's own.",
            "type": "string",
            **KEY,
            "minLength": 1,
        },
        "layouts": _layouts(ref("layout")),
        "rules": or_null(_rules()),
        "buffers": {
            **or_null(closed({})),
            "description": "The tensors whose sequence dimension context parallelism splits.",
            "properties": {
                "batch": _entries(
                    batch, "Batch entries: the dimension that counts tokens, or what is made as that entry."
                ),
                "model": _entries(whole(), "Buffers of the model, by glob: the dimension of the positions."),
            },
        },
    }
    return {
        "$schema": DIALECT,
        "title": "A parallelizer plan",
        "description": "Rules from globs over module paths to styles; layouts; buffers.",
        **closed({key: properties[key] for key in KEYS}),
        "anyOf": [
            {"required": ["extends"]},
            {"required": ["rules"], "properties": {"rules": {"type": "object", "minProperties": 1}}},
        ],
        "definitions": _definitions(styles),
    }


def preset_schema(styles: Mapping[str, StyleDeclaration]) -> Schema:
    """The schema of a preset, a file of the configuration group `parallel`, which may hold interpolations."""
    sizes = {
        axis: {
            **or_interpolated({"type": "integer", "minimum": 1}, {"const": -1}),
            "description": f"{AXIS_MEANINGS[axis]}; -1 is what the others leave of the ranks",
        }
        for axis in MESH_KEYS
    }
    defaults = {
        name: {**or_null(closed(_option_defaults(s))), "description": f"{s.doc}; null switches it off"}
        for name, s in styles.items()
    }
    line = {
        "type": "string",
        **matching(r":(\s|$)", "a rule is `glob: style`, a blank behind the colon"),
        "description": "A rule, `glob: style`, in quotes.",
    }
    properties: Schema = {
        "defaults": {"type": "array", "description": "Hydra's defaults list: what this preset starts from."},
        "mesh": {**or_null(closed(sizes)), "description": "The size of each axis, 1 unless said."},
        "layouts": {
            **_layouts(or_interpolated(ref("layout"))),
            "description": "Layouts of the plan set anew.",
        },
        "rules": {
            "type": ["array", "null"],
            "description": "Rules behind the plan's own.",
            "items": {"anyOf": [line, {**_rules(), "minProperties": 1}]},
        },
        "styles": {
            **or_null(closed(defaults)),
            "description": "Defaults of styles' options; a style set to null is switched off.",
        },
        "redistribute": {
            **or_interpolated(one_of(_REDISTRIBUTE)),
            "description": "How tensors on several axes move.",
        },
        "pipeline": {
            **or_null(closed(_pipeline())),
            "description": "How the stages of the axis pp take turns. Without pp nothing of it is used.",
        },
        "routing": {
            "anyOf": [
                {"type": ["string", "null"]},
                closed(
                    {
                        "skew": {
                            "type": "number",
                            "minimum": 1,
                            "description": "The busiest rank of ep over the mean.",
                        }
                    }
                ),
            ],
            "description": "How many tokens dry runs take to go to which expert: balanced, worst, {skew: 1.3}, or a file.",
        },
        "max_unsharded": {
            **or_interpolated({"type": ["number", "null"], "minimum": 0, "maximum": 1}),
            "description": "The share of parameters that may lie whole on every rank without a rule that says so.",
        },
    }
    return {
        "$schema": DIALECT,
        "title": "A parallelizer preset",
        "description": "Axis sizes, and what holds at them: layouts, more rules, defaults of styles.",
        **closed({key: properties.get(key, {}) for key in ("defaults", *PARALLEL_KEYS)}),
        "definitions": _definitions(styles),
    }


def _pipeline() -> Schema:
    number = {"type": ["integer", "null"], "minimum": 1}
    layers = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 1}}
    return {
        "schedule": {
            **or_interpolated(one_of({name: schedule.doc for name, schedule in SCHEDULES.items()})),
            "description": "The order in which ranks run the stages and microbatches.",
        },
        "microbatches": {
            **or_interpolated(number),
            "description": "The parts that a data rank's rows are cut into; null: 2 x pp.",
        },
        "stages_per_rank": {
            **or_interpolated(number),
            "description": "The stages that each rank of pp has; null: as many as the schedule takes by default.",
        },
        "balance": {
            **or_interpolated(one_of(BALANCES), layers),
            "description": "What all stages have the same of, or the number of layers of each stage.",
        },
        "csv": {
            "type": ["string", "null"],
            "description": "A file with an order of actions, in PyTorch's format, in place of `schedule`.",
        },
    }


def _definitions(styles: Mapping[str, StyleDeclaration]) -> Schema:
    alone = [name for name in styles if name not in _NEEDED]
    item = [ref("style-name"), ref("style-map")]
    return {
        "layout": text_of(PLAIN_PLACEMENT, _PLACEMENTS, "A placement."),
        "placement": text_of(PLACEMENT, _PLACEMENTS, "A placement, or the name of a layout."),
        "flow": text_of(
            FLOW,
            [*_PLACEMENTS, "shard(1) -> replicate", "replicate -> shard(1)"],
            "A placement, or two with an arrow between: how it is, and how it is wanted.",
        ),
        "axis": one_of({axis: AXIS_MEANINGS[axis] for axis in AXES}),
        "slot": one_of({slot: _SLOTS.get(slot, slot) for slot in SLOTS}),
        "style-name": {
            "type": "string",
            **one_of({**{name: styles[name].doc for name in alone}, "none": "no style in any slot"}),
        },
        "rule": {"anyOf": [*item, {"type": "array", "minItems": 1, "items": {"anyOf": item}}]},
        "style-map": _style_map(styles),
        **{f"style-{name}": _style(declared) for name, declared in styles.items()},
        "style-none": closed({"style": True, "optional": True}),
    }


def _style_map(styles: Mapping[str, StyleDeclaration]) -> Schema:
    """A map with `style` and its options, or with `none`. `if` and `then`, because editors explain a branch
    that is taken, and not one of a dozen that all failed.
    """
    names = {**{name: s.doc for name, s in styles.items()}, "none": "no style in any slot"}
    emptied = {"anyOf": [ref("slot"), {"type": "array", "minItems": 1, "items": ref("slot")}]}
    optional = {"type": "boolean", "description": "whether the rule may match nothing"}
    only_none = closed({"none": True, "optional": True})
    branches = [
        {
            "if": {"required": ["style"], "properties": {"style": {"const": name}}},
            "then": ref(f"style-{name}"),
        }
        for name in names
    ]
    return {
        "type": "object",
        "properties": {
            "style": {"type": "string", **one_of(names)},
            "none": {**emptied, "description": "the slots that are left without a style"},
            "optional": optional,
        },
        "anyOf": [{"required": ["style"]}, {"required": ["none"]}],
        "allOf": [*branches, {"if": {"required": ["none"]}, "then": only_none}],
    }


def _style(declared: StyleDeclaration) -> Schema:
    options = {name: option_schema(option) for name, option in declared.options.items()}
    needed = [{"required": [name]} for name in _NEEDED.get(declared.name, ())]
    schema = {**closed({"style": True, "optional": True, **options}), "description": declared.doc}
    return {**schema, "anyOf": needed} if needed else schema


def _option_defaults(declared: StyleDeclaration) -> Schema:
    """Options as a preset sets them: null leaves one as it is."""
    return {
        name: {**or_interpolated(option_schema(option), {"type": "null"}), "description": option.doc}
        for name, option in declared.options.items()
    }


def _rules() -> Schema:
    return {
        "type": "object",
        "description": "Globs over module paths, each with a style or a list of styles; later ones win.",
        "propertyNames": {**matching(GLOB, "this is no glob over module paths"), "maxLength": MAX_LENGTH},
        "maxProperties": MAX_RULES,
        "additionalProperties": ref("rule"),
    }


def _layouts(value: Schema) -> Schema:
    return {
        **or_null({"type": "object"}),
        "description": "Placements with names, so that one word switches each of them everywhere.",
        "propertyNames": {
            **matching(LAYOUT_NAME, "a layout's name has letters, digits, _ and -"),
            "not": {"enum": list(RESERVED)},
        },
        "additionalProperties": value,
    }


def _entries(value: Schema, description: str) -> Schema:
    return {
        **or_null({"type": "object"}),
        "description": description,
        "propertyNames": KEY,
        "additionalProperties": value,
    }
