"""`float8`: the matrix products of a linear, or of stacked experts, in float8, with the casts of torchao.

Weights stay in their own dtype: names, checkpoints and the optimizer see what they saw before. Each product casts both of
its factors to float8, with scales from their largest values. Under tensor parallelism the casts run on DTensors, so that a
scale is that of the whole tensor. The tokens that share a scale are those of one microbatch on one data rank.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.diagnostics.extras import installed_by
from parallelizer.language.styles import OptionKind, StyleDeclaration, declare
from parallelizer.styles.float8.recipes import (
    CAPABILITY,
    REFUSED,
    TORCHAO_NAMES,
    no_kernels,
    recipe_of,
    stacked_weights,
)
from parallelizer.styles.registry import applies, exports, implements, prepares
from parallelizer.styles.statements import Statement, calls
from parallelizer.styles.target import Sharding, StyleError

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.diagnostics.diagnostic import Span
    from parallelizer.styles.application import Application, Exporting, Live
    from parallelizer.styles.target import Target


declare(
    StyleDeclaration(
        "float8",
        "precision",
        None,
        "compute the matrix products of a linear, or of the experts of a mixture, in float8",
        {
            "recipe": OptionKind(
                "choice",
                "tensorwise: one scale for each tensor; rowwise: one for each row; rowwise-gw-hp: rowwise, with the "
                "gradient of the weight in the weight's own dtype",
                (*TORCHAO_NAMES, *REFUSED),
            ),
            "emulate": OptionKind(
                "bool", "round to float8 and multiply in float32, for devices without kernels for float8"
            ),
            "pad": OptionKind(
                "bool",
                "fill up the tokens to a multiple of 16 for the gradient of the weight, for experts that are linears of their "
                "own; the rows of stacked experts are always filled up",
            ),
        },
        defaults={"recipe": "tensorwise", "emulate": "on a CPU", "pad": "false"},
    )
)


@implements("float8")
def float8(target: Target) -> Sharding:
    """Checks what one module can tell. Raises StyleError."""
    recipe = target.options.get("recipe", "tensorwise")
    if recipe in REFUSED:
        raise StyleError(
            "precision-recipe",
            f"the recipe {recipe} is not supported: {REFUSED[recipe]}",
            "use tensorwise or rowwise",
            "recipe",
        )
    _check_module(target)
    if importlib.util.find_spec("torchao") is None:
        raise StyleError(
            "precision-torchao",
            "float8 needs the package torchao, which is not installed",
            installed_by("float8"),
        )
    return Sharding(None, (), stacked=stacked_weights(target.module))


def _check_module(target: Target) -> None:
    """Only a linear whose forward is `nn.Linear`'s can be given another one."""
    from torch import nn

    module = target.module
    name, where = type(module).__name__, target.path or "the root"
    unlike = _unlike_linear(module) if isinstance(module, nn.Linear) else None
    if isinstance(module, nn.Linear) and unlike is None:
        return
    inside = [n for n, m in module.named_modules() if n and isinstance(m, nn.Linear)]
    stacked = stacked_weights(module)
    if stacked and not inside:
        _check_experts(target)
        return
    linears = ", ".join(f"{target.path}.{n}".lstrip(".") for n in inside[:4]) + (
        ", ..." if inside[4:] else ""
    )
    if stacked:
        help_text = f"for its experts, move {', '.join(stacked)} to a module without other linears, and name that module"
    elif inside:
        help_text = f"name the linears in it: {linears}"
    else:
        help_text = "leave it out of the glob"
    raise StyleError(
        "precision-module",
        f"float8 is for nn.Linear and for modules of stacked experts; {where} is of the class {name}"
        + (f", {unlike}" if unlike else f", which holds other linears too: {linears}" if stacked else ""),
        help_text,
    )


def _unlike_linear(module: nn.Linear) -> str | None:
    """How a linear differs from one that computes `nn.Linear`'s forward of a weight of its own."""
    from torch import nn

    # An attention of torch reads the weight of this class, and never calls it.
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "whose weight an attention reads without calling it"
    if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
        return "with a forward of its own"
    if "weight" not in dict(module.named_parameters(recurse=False)):
        return "whose weight is computed from other parameters"
    return None


def _check_experts(target: Target) -> None:
    """A grouped product has kernels for scales of rows alone."""
    where = target.path or "the root"
    if target.options.get("recipe", "tensorwise") == "tensorwise":
        raise StyleError(
            "precision-experts",
            f"the experts of {where} cannot be in float8 by the recipe tensorwise: kernels for grouped products take one scale "
            "for each row, and gradients in the format of weights only",
            "write `recipe: rowwise`, or rowwise-gw-hp",
            "recipe" if "recipe" in target.options else None,
        )


def _check_device(recipe: str, span: Span) -> None:
    """Raises PlanError for a GPU that has no kernels for the recipe."""
    import torch

    if not torch.cuda.is_available():
        return
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITY[recipe]:
        raise PlanError([no_kernels(torch.cuda.get_device_name(), capability, recipe, span)])


@prepares("float8")
def prepare(application: Application, module: nn.Module, live: Live) -> None:
    """Give the module a forward in float8, before other styles wrap it."""
    from parallelizer.styles.float8.experts import run_experts_in_float8
    from parallelizer.styles.float8.linear import run_in_float8

    recipe = recipe_of(application)
    emulate = application.options.get("emulate", live.mesh.device_type == "cpu")
    if not emulate:
        _check_device(recipe, application.rule.span)
    if application.stacked:
        run_experts_in_float8(
            module,
            TORCHAO_NAMES[recipe],
            emulate=emulate,
            error=functools.partial(_unknown_product, application),
        )
        return
    pad = bool(application.options.get("pad"))
    run_in_float8(module, TORCHAO_NAMES[recipe], emulate=emulate, pad=pad)


def _unknown_product(application: Application, message: str) -> PlanError:
    """The error for a forward that multiplies the weights of experts otherwise, at the rule."""
    help_text = (
        "multiply by torch.nn.functional.grouped_mm, or by linear with the weights of one expert; for a model of transformers "
        "write model.experts=grouped_mm"
    )
    where = application.module or "the root"
    return PlanError(
        [Diagnostic("precision-experts", f"{where}: {message}", application.rule.span, help_text)]
    )


@applies("float8")
def apply(application: Application, module: nn.Module, live: Live) -> None:
    """Nothing: the module has its forward already."""


@exports("float8")
def export(application: Application, exporting: Exporting) -> Iterator[Statement]:
    """The same call."""
    from parallelizer.styles.float8.experts import run_experts_in_float8
    from parallelizer.styles.float8.linear import run_in_float8

    recipe = f'"{TORCHAO_NAMES[recipe_of(application)]}"'
    emulate = f"""emulate={application.options.get("emulate", 'mesh.device_type == "cpu"')}"""
    if application.stacked:
        yield calls(run_experts_in_float8, recipe, emulate)
        return
    pad = ["pad=True"] if application.options.get("pad") else []
    yield calls(run_in_float8, recipe, emulate, *pad)
