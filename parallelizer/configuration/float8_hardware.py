"""Whether the configured hardware has units for float8, and kernels for the recipes that are asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.styles.float8.recipes import CAPABILITY, no_kernels, no_units, recipe_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from parallelizer.styles.application import Application, Program


def float8_hardware(program: Program, hardware: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """An error at each rule that asks for float8 on a device whose file has no speed for it, or whose `capability` is below that
    of the recipe.
    """
    by_rule: dict[object, Application] = {}
    for application in program.of_slot("precision"):
        if not application.options.get("emulate"):
            by_rule.setdefault((application.rule.span, recipe_of(application)), application)
    name, given = str(hardware.get("name", "the device")), hardware.get("capability")
    for application in by_rule.values():
        span, recipe = application.spans.get("recipe", application.rule.span), recipe_of(application)
        if hardware.get("bf16_tflops") and not hardware.get("fp8_tflops"):
            yield no_units(name, application.rule.span)
            continue
        if given is None:
            continue
        capability = _capability(given)
        if capability is None:
            yield Diagnostic(
                "precision-hardware",
                f"hardware.capability={given} is no compute capability, and the recipe {recipe} needs one",
                span,
                "write it as `capability: 9.0`",
            )
        elif capability < CAPABILITY[recipe]:
            yield no_kernels(name, capability, recipe, span)


def _capability(given: object) -> tuple[int, int] | None:
    """The two numbers of a capability; None for another text."""
    read = re.fullmatch(r"(\d{1,3})\.(\d)", str(given))
    return (int(read[1]), int(read[2])) if read else None
