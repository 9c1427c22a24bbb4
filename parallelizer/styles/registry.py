"""The registry of each style's check, application and export.

A style is one file of this folder: it declares itself (`language/styles.py`), and registers up to three
functions under its name. This file and the top level of those files import no torch, so that plans are read
without it.

    @implements("name")   Target -> Sharding         while compiling: checks, and gives the placements of parameters
    @applies("name")      Application, module, Live  changes the module; by default the Sharding's ParallelStyle is applied
    @exports("name")      Application, Exporting     the style as lines of plain Python
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from parallelizer.language.styles import OptionKind, StyleDeclaration, declare
from parallelizer.styles.application import Exporting, Live
from parallelizer.styles.target import Target

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor.parallel import ParallelStyle

    from parallelizer.styles.application import Application
    from parallelizer.styles.statements import Statement
    from parallelizer.styles.target import Sharding


StyleFunction = Callable[[Target], "Sharding | ParallelStyle"]
ApplyFunction = Callable[["Application", "nn.Module", Live], None]
ExportFunction = Callable[["Application", Exporting], "Iterable[Statement]"]

FUNCTIONS: dict[str, StyleFunction] = {}
"""What the styles that change parameters or inputs and outputs check and say while compiling."""

APPLY: dict[str, ApplyFunction] = {}
"""What styles do to a module, where no ParallelStyle does it."""

PREPARE: dict[str, ApplyFunction] = {}
"""What styles do to a module before any style is applied to the model."""

EXPORT: dict[str, ExportFunction] = {}
"""What styles are in plain Python, where their ParallelStyle does not say it."""

F = TypeVar("F", bound=Callable[..., Any])


def implements(name: str) -> Callable[[StyleFunction], StyleFunction]:
    """Register what a declared style checks, and how it places parameters and tensors."""
    return _registers(FUNCTIONS, name)


def applies(name: str) -> Callable[[ApplyFunction], ApplyFunction]:
    """Register what a declared style does to a module. It is called for each application, in the program's order."""
    return _registers(APPLY, name)


def prepares(name: str) -> Callable[[ApplyFunction], ApplyFunction]:
    """Register what a declared style does before any style is applied."""
    return _registers(PREPARE, name)


def exports(name: str) -> Callable[[ExportFunction], ExportFunction]:
    """Register how a declared style is written as plain Python."""
    return _registers(EXPORT, name)


def _registers(table: dict[str, Any], name: str) -> Callable[[F], F]:
    def register(function: F) -> F:
        table[name] = function
        return function

    return register


def style(
    name: str,
    *,
    slot: str = "params",
    axis: str = "tp",
    options: Mapping[str, OptionKind] | None = None,
    takes_parameters: bool = False,
) -> Callable[[StyleFunction], StyleFunction]:
    """Add a style of your own: a decorator on a function from a Target to a torch ParallelStyle.

    Return a `Sharding` instead, so that tables and checks know the placement of parameters. `slot` is
    `params` or `io`. Raises ValueError if the name exists already or the slot is another one.

        @style("scaled", options={"by": OptionKind("int", "the factor")})
        def scaled(target):
            return MyParallelStyle(target.options.get("by", 2))
    """
    if slot not in ("params", "io"):
        raise ValueError(f"a style of your own fills `params` or `io`, not {slot!r}")

    def register(function: StyleFunction) -> StyleFunction:
        doc = (function.__doc__ or "").strip().split("\n")[0]
        every = {**(options or {}), "axis": OptionKind("axis", "the mesh axis that the style uses")}
        declare(StyleDeclaration(name, slot, axis, doc, every, takes_parameters))
        return implements(name)(function)

    return register
