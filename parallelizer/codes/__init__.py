"""Every code that a diagnostic may carry: what it means, why, and the smallest thing that triggers it.

One file per family. The tests hold this to the sources: a code that is reported and not listed fails, one that
is listed and not reported, and an example that does not trigger its code. No torch is imported.
"""

from __future__ import annotations

from parallelizer.codes import (
    composition,
    configuration,
    constraints,
    flow,
    language,
    matching,
    mesh,
    running,
    survival,
    watching,
    weights,
)
from parallelizer.codes.declare import Code, Example, Family

__all__ = ["CODES", "FAMILIES", "Code", "Example", "Family"]

FAMILIES: tuple[Family, ...] = (
    Family("language", "What a plan may say, and how it is written.", language.CODES),
    Family("matching", "Rules and the modules, parameters and buffers that they name.", matching.CODES),
    Family("mesh", "Sizes of axes, and the number of ranks.", mesh.CODES),
    Family("constraints", "Sizes that must divide or suffice.", constraints.CODES),
    Family("composition", "Styles, parameters and buffers that must go together.", composition.CODES),
    Family("layout flow", "How tensors lie on their way through forward and backward.", flow.CODES),
    Family("configuration", "Presets, overrides, and what they name.", configuration.CODES),
    Family("running", "What is known only when something runs.", running.CODES),
    Family("survival", "Checkpoints, faults, and what changes under a run.", survival.CODES),
    Family("watching", "What a run that goes is compared with, and whom it tells.", watching.CODES),
    Family("weights", "Pretrained weights: read, fitted to the model, saved.", weights.CODES),
)
"""In the order in which a plan is read, compiled and run."""

CODES: dict[str, Code] = {code.name: code for family in FAMILIES for code in family.codes}
"""Every code by its name."""
