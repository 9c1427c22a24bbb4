"""The recipes of float8 by name, and what is gathered in float8. No torch: plans are read with this file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic, Span
from parallelizer.language.plan import full_name

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.styles.application import Application, Program

TORCHAO_NAMES = {
    "tensorwise": "tensorwise",
    "rowwise": "rowwise",
    "rowwise-gw-hp": "rowwise_with_gw_hp",
}
"""Torchao's name of each recipe."""

REFUSED = {
    "mxfp8": "it needs a GPU of compute capability 10.0 (Blackwell), scales of 32 neighbouring values, and all "
    "collectives in the parameters' own dtype",
    "nvfp4": "it needs a GPU of compute capability 10.0 (Blackwell), and scales of 16 neighbouring values with one of the tensor",
}
"""The recipes that are known and cannot be used, with what they need."""

DIVISOR = 16
"""What the kernels for float8 demand: both dimensions of each factor are multiples of it."""

CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise-gw-hp": (9, 0)}
"""The compute capability from which on a GPU has kernels for a recipe."""


def no_units(device: str, span: Span | None) -> Diagnostic:
    """The error for a device that cannot multiply in float8, at the rule that asks for it."""
    return Diagnostic(
        "precision-hardware",
        f"{device} has no units for float8",
        span,
        "use a GPU of compute capability 8.9 (tensorwise) or 9.0 (rowwise) and above, or write `emulate: true`, "
        "which only rounds, and is slower than without float8",
    )


def no_kernels(device: str, capability: tuple[int, int], recipe: str, span: Span | None) -> Diagnostic:
    """The error for a device of a capability below that of a recipe, at the place that asks for it."""
    if capability < min(CAPABILITY.values()):
        return no_units(device, span)
    least = ".".join(map(str, CAPABILITY[recipe]))
    return Diagnostic(
        "precision-hardware",
        f"{device} has compute capability {'.'.join(map(str, capability))}, and kernels for the recipe {recipe} need {least}",
        span,
        f"use the recipe tensorwise or a GPU of compute capability {least} and above, or write `emulate: true`, which only "
        "rounds, and is slower than without float8",
    )


def recipe_of(application: Application) -> str:
    """The recipe of an application of `float8`."""
    recipe: str = application.options.get("recipe", "tensorwise")
    return recipe


def stacked_weights(module: nn.Module) -> tuple[str, ...]:
    """The parameters of a module that are the weights of many experts, [experts, ...]."""
    # A convolution's weight has three dims too, and the forward of a list that is looped over is not called.
    if type(module).__module__.startswith("torch.nn.") or getattr(module, "in_loop", False):
        return ()
    return tuple(name for name, param in module.named_parameters(recurse=False) if param.ndim == 3)


def rows_matter(application: Application) -> bool:
    """Whether kernels ask for a number of rows: they are what the product for the gradient of the weight is summed over. Groups
    of stacked experts are filled up in any case.
    """
    options, in_float8 = application.options, recipe_of(application) != "rowwise-gw-hp"
    return in_float8 and not (application.stacked or options.get("pad") or options.get("emulate"))


def weights_in_float8(unit: Application, program: Program) -> list[str]:
    """The weights that an FSDP unit gathers in float8, by name inside it."""
    if unit.options.get("gather") != "float8":
        return []
    weights = {full_name(a.module, "weight") for a in program.of_slot("precision")}
    return [n for n in unit.params if n not in unit.reasons and full_name(unit.module, n) in weights]


def casts_inputs(application: Application) -> bool:
    """Whether an application gathers inputs in float8, on this mesh."""
    return application.slot == "io" and application.options.get("cast") == "float8" and bool(application.axes)
