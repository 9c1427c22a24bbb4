"""What a style is given and what it gives back, and the registry of what styles do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from parallelizer.diagnostics import Span
from parallelizer.plan import Flow, Placement
from parallelizer.styles.declare import OptionKind, StyleDeclaration, declare
from parallelizer.styles.packing import Packing

ParamPlacements = Mapping[str, Mapping[str, Placement]]
"""Placements by parameter name (relative to the module) and axis; an axis left out is replicated."""


@dataclass(frozen=True)
class Target:
    """One module that a style is to be applied to. Nothing of it may be changed while compiling.

    `options` are checked values with defaults filled in and layouts resolved; `param` is set when the rule's
    glob named a parameter; `sizes` has every axis of the mesh. `around` are the modules that this one lies in, from the
    inside out.
    """

    module: nn.Module
    path: str
    param: str | None
    options: Mapping[str, Any]
    axis: str
    sizes: Mapping[str, int]
    around: tuple[nn.Module, ...] = ()

    @property
    def degree(self) -> int:
        """The size of the axis the style stands on."""
        return self.sizes[self.axis]


@dataclass(frozen=True)
class Sharding:
    """What a style does to one module: parameters' placements, and the ParallelStyle that brings it about.

    `axes` are the axes of the mesh that the ParallelStyle is applied with, none when it has nothing to do on
    this mesh; `buffers` are the placements of buffers, which stay whole and are seen so; `divided` has the
    attributes that it divides, with their whole values. `arrives` says how plain tensors are taken to lie on the
    style's axis when they come in, by the names of forward's parameters; the first is called `""` too.
    """

    style: ParallelStyle
    axes: tuple[str, ...]
    params: ParamPlacements = field(default_factory=dict)
    buffers: ParamPlacements = field(default_factory=dict)
    packed: Mapping[str, Packing] = field(default_factory=dict)
    divided: Mapping[str, int] = field(default_factory=dict)
    arrives: Mapping[str, Placement] = field(default_factory=dict)


class StyleError(Exception):
    """A style cannot stand on this module.

    `option` names the option that is wrong, if one is; `part` a key in its value, or the place of something in it.
    """

    def __init__(
        self,
        code: str,
        message: str,
        help_text: str | None = None,
        option: str | None = None,
        part: str | Span | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.help, self.option, self.part = code, message, help_text, option, part


StyleFunction = Callable[[Target], Sharding | ParallelStyle]

FUNCTIONS: dict[str, StyleFunction] = {}
"""The functions behind the styles that change parameters or inputs and outputs."""


def implements(name: str) -> Callable[[StyleFunction], StyleFunction]:
    """Register the function behind a declared style."""

    def register(function: StyleFunction) -> StyleFunction:
        FUNCTIONS[name] = function
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
    """Add a style of one's own: a decorator on a function from a Target to a torch ParallelStyle.

    Return a `Sharding` instead to tell the tables and checks how parameters are placed. `slot` is `params` or
    `io`. Raises ValueError when the name is taken or the slot cannot be filled from outside.

        @style("scaled", options={"by": OptionKind("int", "the factor")})
        def scaled(target):
            return MyParallelStyle(target.options.get("by", 2))
    """
    if slot not in ("params", "io"):
        raise ValueError(f"a style of one's own fills `params` or `io`, not {slot!r}")

    def register(function: StyleFunction) -> StyleFunction:
        doc = (function.__doc__ or "").strip().split("\n")[0]
        every = {**(options or {}), "axis": OptionKind("axis", "the mesh axis it stands on")}
        declare(StyleDeclaration(name, slot, axis, doc, every, takes_parameters))
        return implements(name)(function)

    return register


def forward_names(module: nn.Module) -> tuple[str, ...] | None:
    """The parameter names of a module's forward, or None when it takes anything (`*args`, `**kwargs`)."""
    named, anything = _forward_signature(module)
    return None if anything else named


def named_inputs(target: Target) -> dict[str, Flow]:
    """The `input` option with a bare placement bound to the first parameter of forward: `""` if it has
    `*args` only.

    Raises StyleError on names that forward cannot take.
    """
    flows: Mapping[str, Flow] = target.options.get("input") or {}
    named, anything = _forward_signature(target.module)
    bound = {}
    for name, flow in flows.items():
        if name == "":
            name = named[0] if named else ""
        elif name not in named and not anything:
            raise StyleError(
                "unknown-input",
                f"forward of {target.path or 'the root'} ({type(target.module).__name__}) has no parameter {name!r}",
                f"it takes {', '.join(named) or 'nothing'}",
                "input",
                name,
            )
        bound[name] = flow
    return bound


def _forward_signature(module: nn.Module) -> tuple[tuple[str, ...], bool]:
    """The names of forward's parameters, and whether it takes others too."""
    parameters = inspect.signature(module.forward).parameters.values()
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind not in open_ended), any(
        p.kind in open_ended for p in parameters
    )
