"""A setup without float8, to compare with."""

from __future__ import annotations

import dataclasses

from parallelizer.configuration.setup import Setup
from parallelizer.language.plan import Option, Rule, StyleDefaults, StyleUse

TRAVELS = ("gather", "cast")
"""The options of other styles that send something in float8."""


def without_float8(setup: Setup) -> Setup:
    """The setup with every linear in its own dtype, and with nothing sent in float8."""
    plan = dataclasses.replace(setup.plan, rules=tuple(map(_without, setup.plan.rules)))
    defaults = {
        style: dataclasses.replace(given, options=_kept(given)) for style, given in setup.defaults.items()
    }
    return dataclasses.replace(setup, plan=plan, defaults=defaults)


def _without(rule: Rule) -> Rule:
    uses = [dataclasses.replace(use, options=_kept(use)) for use in rule.uses if use.style != "float8"]
    return dataclasses.replace(rule, uses=tuple(uses))


def _kept(given: StyleUse | StyleDefaults) -> dict[str, Option]:
    return {name: option for name, option in given.options.items() if name not in TRAVELS}
