"""Experts that are shared out: which rank holds which, what dispatch sends under the assumed routing, and the peak of memory
under others.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import EXPERT, EXPERT_SHARDS
from parallelizer.language.routing import BALANCED, Routing
from parallelizer.report.rows.mesh_axes import group_of
from parallelizer.simulate.record.trace import Recipe, Trace, trace
from parallelizer.styles.application import Program

SLOT = "experts"
"""The slot of the style."""

WORST = Routing(worst=True)


@dataclass(frozen=True)
class Sharing:
    """`modules` have `count` experts each, by folded path. `held` are the first and the last expert of each rank of the `group`
    of `ep` that is shown, in its order; `shards` ranks share each of these. `routing` is what a dry run assumes.

    The rest is of a step of the rank that is shown: the rows' bytes that it `sent` by phase of the step, and the peaks of memory
    in bytes by assumed routing.
    """

    modules: tuple[tuple[str, int], ...]
    group: tuple[int, ...]
    held: tuple[tuple[tuple[int, int], ...], ...]
    shards: int
    routing: str
    sent: tuple[tuple[str, int], ...] = ()
    peaks: tuple[tuple[str, int], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The documented form."""
        return {
            "modules": dict(self.modules),
            "ranks": [
                {
                    "rank": rank,
                    "experts": {module: list(own[at]) for own, (module, _) in self._each()},
                }
                for at, rank in enumerate(self.group)
            ],
            "shards": self.shards,
            "routing": self.routing,
            "sent": dict(self.sent),
            "peaks": dict(self.peaks),
        }

    def _each(self) -> Any:
        return zip(self.held, self.modules, strict=True)


def sharing(
    program: Program, model: nn.Module, step: Trace | None, recipe: Recipe | None = None, rank: int = 0
) -> Sharing | None:
    """How a program shares experts out; None if it does not. With a `recipe`, the step is also followed under the routings
    `balanced` and `worst`, the latter as the rank that then gets all tokens, in child processes.
    """
    applications = program.of_slot(SLOT)
    if not applications:
        return None
    by_count: dict[int, list[str]] = {}
    for a in applications:
        name, by_axis = next(iter(a.params.items()))
        shape = model.get_parameter(f"{a.module}.{name}".lstrip(".")).shape
        by_count.setdefault(shape[by_axis[EXPERT].dim or 0], []).append(a.module)
    modules = tuple((path, count) for count, paths in by_count.items() for path in fold_paths(paths))
    mesh = program.mesh
    held = tuple(
        tuple((i * count // mesh.ep, (i + 1) * count // mesh.ep - 1) for i in range(mesh.ep))
        for _, count in modules
    )
    group = group_of(mesh, (EXPERT,), rank)
    found = Sharing(modules, tuple(group), held, mesh.size_of(EXPERT_SHARDS), str(program.routing))
    if step is None:
        return found
    sent: dict[str, int] = {}
    for entry in step.ledger:
        if entry.axis == EXPERT and entry.kind != "all_reduce":  # which is the norm's
            sent[entry.phase] = sent.get(entry.phase, 0) + entry.wire_bytes
    peaks = [(str(program.routing), step.memory.peak)]
    if recipe is not None:
        every = {str(routing): routing for routing in (program.routing, BALANCED, WORST)}
        peaks = []
        for name, routing in every.items():
            at = group[0] if name == str(WORST) else rank
            known = name == str(program.routing) and at == rank
            followed = (
                step if known else trace(dataclasses.replace(program, routing=routing), model, recipe, at)
            )
            peaks.append((name, followed.memory.peak))
    return dataclasses.replace(found, sent=tuple(sent.items()), peaks=tuple(peaks))
