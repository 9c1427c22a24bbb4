"""The conversions of tensors at the inputs and outputs of modules, as placements: actual and desired."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from parallelizer.language.placement import from_torch
from parallelizer.language.plan import PARTIAL, REPLICATE, Flow, Placement, shard
from parallelizer.styles.application import Application
from parallelizer.styles.layouts import Layouts, PrepareIO
from parallelizer.styles.placed_parameters import ShardParams


@dataclass(frozen=True)
class Conversion:
    """One tensor laid out anew on one axis: an output (`leaves`) or an input of the application's module.

    `name` is the input's in forward's signature, or the output's index or key; empty for the first or only
    one.
    """

    application: Application
    leaves: bool
    name: str
    before: Placement
    after: Placement

    @property
    def axis(self) -> str:
        """The axis it happens on."""
        return "+".join(self.application.axes)

    @property
    def kind(self) -> str:
        """`gather`, `reduce` (a sum that is whole afterwards), `split`, or empty for anything else."""
        to_whole = self.after.kind == "replicate"
        if to_whole and self.before.kind in ("shard", "partial"):
            return "gather" if self.before.kind == "shard" else "reduce"
        return "split" if self.before.kind == "replicate" and self.after.kind == "shard" else ""


def conversions(application: Application) -> Iterator[Conversion]:
    """Every tensor that an application lays out anew; nothing for styles of the user's own, of which nothing
    is known."""
    act = application.act
    if isinstance(act, ColwiseParallel | RowwiseParallel):
        yield from _of_torch(application, act)
        return
    layouts: Layouts | None = act.layouts if isinstance(act, ShardParams | PrepareIO) else None
    if layouts is not None:
        for leaves, flows in ((False, layouts.input), (True, layouts.output)):
            for name, flow in flows.items():
                yield Conversion(application, leaves, name, *_sides(flow))


def _of_torch(application: Application, act: ColwiseParallel | RowwiseParallel) -> Iterator[Conversion]:
    """The two classes bring an input to what they compute on, and hand on what comes out of it."""
    (arrives,), (leaves,) = act.input_layouts, act.output_layouts
    if isinstance(act, ColwiseParallel):
        wanted, comes_out = REPLICATE, shard(-1)
    else:  # a linear's weight is sharded by input feature; an embedding's by row, and looks up whole indices
        by_row = any(p.dim == 0 for by_axis in application.params.values() for p in by_axis.values())
        wanted, comes_out = REPLICATE if by_row else shard(-1), PARTIAL
    yield Conversion(application, False, "", from_torch(arrives), wanted)
    yield Conversion(application, True, "", comes_out, from_torch(leaves))


def _sides(flow: Flow) -> tuple[Placement, Placement]:
    before = flow.arrives or REPLICATE
    return before, flow.wanted or before
