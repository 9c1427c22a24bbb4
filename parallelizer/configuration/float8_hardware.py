"""Whether the configured hardware has units for float8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.styles.float8.recipes import no_units

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from parallelizer.styles.application import Program


def float8_hardware(program: Program, hardware: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """An error at each rule that asks for float8 on a device whose file has no speed for it."""
    if not hardware.get("bf16_tflops") or hardware.get("fp8_tflops"):
        return
    rules = {a.rule.span: a for a in program.of_slot("precision") if not a.options.get("emulate")}
    for application in rules.values():
        yield no_units(str(hardware.get("name", "the device")), application.rule.span)
