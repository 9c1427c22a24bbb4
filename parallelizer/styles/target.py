"""The input and the result of a style's compilation. No torch at import."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.plan import Flow, Placement

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor.parallel import ParallelStyle

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

    `style` is None where `applies` says what is done. `axes` are the axes of the mesh that it is applied with, none when it
    has nothing to do on this mesh; `buffers` are the placements of buffers, which stay whole and are seen so; `divided` has the
    attributes that it divides, with their whole values. `arrives` says how plain tensors are taken to lie on the
    style's axis when they come in, by the names of forward's parameters; the first is called `""` too. `stacked` are the
    parameters with the weights of many experts, for a style that computes with them.
    """

    style: ParallelStyle | None
    axes: tuple[str, ...]
    params: ParamPlacements = field(default_factory=dict)
    buffers: ParamPlacements = field(default_factory=dict)
    packed: Mapping[str, Packing] = field(default_factory=dict)
    divided: Mapping[str, int] = field(default_factory=dict)
    arrives: Mapping[str, Placement] = field(default_factory=dict)
    stacked: tuple[str, ...] = ()


class StyleError(Exception):
    """A style cannot stand on this module.

    `option` names the option that is wrong, if one is; `part` a key in its value, or the place of something in it. `divided`
    has an axis and the sizes that it must divide, if that is what is wrong.
    """

    def __init__(
        self,
        code: str,
        message: str,
        help_text: str | None = None,
        option: str | None = None,
        part: str | Span | None = None,
        divided: tuple[str, tuple[int, ...]] | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.help, self.option, self.part = code, message, help_text, option, part
        self.divided = divided


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
