"""The compiler's output: applications of styles to modules, and the data to apply and export them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelizer.diagnostics.diagnostic import Diagnostic, Span
from parallelizer.language.fold import fold_paths
from parallelizer.language.pipeline.stages import Stages
from parallelizer.language.plan import (
    Flow,
    Mesh,
    Placement,
    Plan,
    Rule,
    full_name,
)
from parallelizer.language.routing import BALANCED, Routing
from parallelizer.styles.target import ParamPlacements

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from parallelizer.styles.packing import Packing


Slot = tuple[str, str | None]
"""A slot of a module; the second part is the axis for `io`, the parameter's name for a rule that names
one.
"""


@dataclass(frozen=True)
class Application:
    """One style applied to one module, with its rule.

    `options` are the values, including defaults and resolved layouts; `spans` are the places where they
    were written. `params` are the placements of parameters, named relative to the module; for fsdp they are
    under the folded axis, and `reasons` says why a parameter stays whole. `buffers` are the placements of
    buffers of which a rank sees its slice. `divided` has the undivided values of attributes that the style
    divides. `arrives` has the placements that inputs are expected to have on `axis`, the axis of the style.
    `act` is the ParallelStyle of a tensor style. `stacked` are the parameters with the weights of many experts, of experts in
    float8.
    """

    module: str
    slot: str
    style: str
    axes: tuple[str, ...]
    rule: Rule
    options: Mapping[str, Any] = field(default_factory=dict)
    spans: Mapping[str, Span] = field(default_factory=dict)
    params: ParamPlacements = field(default_factory=dict)
    buffers: ParamPlacements = field(default_factory=dict)
    packed: Mapping[str, Packing] = field(default_factory=dict)
    divided: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    arrives: Mapping[str, Placement] = field(default_factory=dict)
    axis: str | None = None
    act: ParallelStyle | None = None
    stacked: tuple[str, ...] = ()

    def splits_sequence(self) -> bool:
        """Whether it splits a sequence over `cp` that was whole, because the batch is not split."""
        if self.slot != "io" or "cp" not in self.axes:
            return False
        arriving, leaving = (self.options.get(name) or {} for name in ("input", "output"))
        splits = [any(_wants_part(flow) for flow in flows.values()) for flows in (arriving, leaving)]
        return splits[0] or (splits[1] and not arriving)


def _wants_part(flow: Flow) -> bool:
    return flow.wanted is not None and flow.wanted.dim is not None


@dataclass(frozen=True)
class Program:
    """The compiler's output: the applications in order, and the plan, model and mesh they were compiled
    from.

    `diagnostics` contains warnings and notes; errors are raised. `redistribute` is `greedy` or `min-cost`:
    see `redistribution.py`. `stages` says how the model is cut, if the mesh has several ranks on `pp`. `routing` is what dry
    runs assume of the tokens of experts.
    """

    plan: Plan
    mesh: Mesh
    applications: tuple[Application, ...]
    diagnostics: tuple[Diagnostic, ...] = ()
    redistribute: str = "greedy"
    stages: Stages | None = None
    routing: Routing = BALANCED

    def __iter__(self) -> Iterator[Application]:
        return iter(self.applications)

    def require_stages(self) -> Stages:
        """The stages of a program that has some. Raises ValueError for any other."""
        if self.stages is None:
            raise ValueError(f"{self.plan.file} on {self.mesh} has no stages")
        return self.stages

    def __str__(self) -> str:
        """A table: which rule gives which style to which modules, over which axes."""
        groups: dict[tuple[str, str, str, str], list[str]] = {}
        for a in self.applications:
            place = f"{Path(a.rule.span.file).name}:{a.rule.span.line}"
            groups.setdefault((a.style, "+".join(a.axes), a.rule.key or '""', place), []).append(a.module)
        rows = [("modules", "style", "axes", "rule", "where")]
        for (style, axes, key, place), modules in groups.items():
            paths = fold_paths([m for m in modules if m])
            rows.append((", ".join(([] if all(modules) else ["(root)"]) + paths), style, axes, key, place))
        widths = [max(len(row[at]) for row in rows) for at in range(4)]
        lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, (*widths, 0), strict=True)) for row in rows]
        return "\n".join([f"{self.plan.file} on {self.mesh}", *(f"  {line.rstrip()}" for line in lines)])

    def __len__(self) -> int:
        return len(self.applications)

    def of_slot(self, *slots: str) -> list[Application]:
        """The applications of one slot or several, in order."""
        return [a for a in self.applications if a.slot in slots]


def tensor_placements(
    applications: list[Application] | tuple[Application, ...],
) -> dict[str, dict[str, Placement]]:
    """Placements that tensor styles give, by full parameter name and axis."""
    found: dict[str, dict[str, Placement]] = {}
    for application in applications:
        if application.slot in ("params", "experts"):
            for name, by_axis in application.params.items():
                found.setdefault(full_name(application.module, name), {}).update(by_axis)
    return found


@dataclass(frozen=True)
class Live:
    """The model that a program is being applied to. `meta`: its parameters have no values yet; `sequence`, a `CurrentOrder`
    of context_parallel/, is how its sequence lies over cp, which all its modules share; `others` are parameters that belong
    to another stage of a pipeline on this rank. `routing` is what a fake world assumes of the tokens of experts.
    """

    model: nn.Module
    mesh: DeviceMesh
    sequence: Any
    meta: bool
    others: frozenset[nn.Parameter] = frozenset()
    routing: Routing = BALANCED
    _submeshes: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, init=False, repr=False)

    def submesh(self, axes: tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh of some axes, one object for all modules. Compiled code guards on which meshes are the same object:
        with an object for each module, equal layers would not share their code.
        """
        from parallelizer.mesh import submesh

        if axes not in self._submeshes:
            self._submeshes[axes] = submesh(self.mesh, axes)
        return self._submeshes[axes]


@dataclass(frozen=True)
class ModuleCall:
    """How a module is called: each argument's name in forward's signature, and whether it is a tensor. The
    first of `*args` is called `""`, as in plans, the others `*`. `outputs` is None for a tensor, the length
    of a tuple, and -1 for anything else."""

    positional: tuple[tuple[str, bool], ...]
    keywords: Mapping[str, bool]
    outputs: int | None


@dataclass(frozen=True)
class Exporting:
    """What the lines of one application depend on beside it.

    `mesh` is the variable that holds the mesh of the application's axes. `called` says how the module is called; it is None
    where it is unknown, or where something else is hooked onto the module too. `precision` is the MixedPrecisionPolicy, as
    text, that all FSDP units share and that has a variable of its own. `gathered` names the weights that a unit gathers in
    float8.
    """

    mesh: str
    called: ModuleCall | None = None
    precision: str | None = None
    gathered: Sequence[str] = ()
