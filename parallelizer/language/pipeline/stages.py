"""How a model is cut into stages: which modules run on each, and which tensors cross from one to the next. No torch here."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallelizer.language.pipeline.actions import Order, stages_of
from parallelizer.language.pipeline.settings import Pipeline, order_of, stage_rank


@dataclass(frozen=True, order=True)
class UnitOutput:
    """A tensor that a unit returned: the `leaf`-th of the output of its `call`-th call in one forward."""

    unit: str
    call: int
    leaf: int

    def __str__(self) -> str:
        return (
            self.unit
            if self.call == self.leaf == 0
            else f"{self.unit} (call {self.call}, output {self.leaf})"
        )


@dataclass(frozen=True)
class Stage:
    """What runs on one stage.

    A unit is a module that no cut divides. `units` run here and on no other stage. `recomputed` have no
    parameters and read nothing but the batch, such as a rotary embedding: every stage that needs what they
    return runs them. `parameters` belong to modules that cuts divide, and are read here. `receives` are the
    tensors that come from the stage before, `sends` those that go on to the next, each in an order of its own.
    The stage ends behind the call of a unit that is `last`; the last stage, where it is None, ends with the forward.
    `elsewhere` are the calls of its units, by index, that other stages run: several stages hold such a unit.
    """

    units: frozenset[str]
    recomputed: frozenset[str]
    parameters: frozenset[str]
    receives: tuple[UnitOutput, ...]
    sends: tuple[UnitOutput, ...]
    last: tuple[str, int] | None
    elsewhere: frozenset[tuple[str, int]] = frozenset()


@dataclass(frozen=True)
class Stages:
    """The stages of a model, in order. `first` is the module before which each begins; the first stage begins with the
    batch. `divided` are the modules that cuts divide: their own code runs on every stage. `shared` are the groups of
    names of parameters that several stages hold: each holds a copy, and their gradients are summed. `parameters` is the
    number of parameters of the whole model. `rewritten` are outputs of units that the code of divided modules writes to in
    place.
    """

    pipeline: Pipeline
    stages: tuple[Stage, ...]
    first: tuple[str, ...]
    divided: frozenset[str]
    shared: tuple[tuple[str, ...], ...] = ()
    parameters: int = 0
    rewritten: frozenset[UnitOutput] = frozenset()

    @property
    def ranks(self) -> int:
        """The ranks on `pp`."""
        return len(self.stages) // (self.pipeline.stages_per_rank or 1)

    @property
    def order(self) -> Order:
        """The actions of each rank on `pp` in a part of a step."""
        return order_of(self.pipeline, self.ranks)

    def on_rank(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank on `pp`."""
        return stages_of(stage_rank(self.pipeline, self.ranks), rank)

    def copies(self, name: str) -> tuple[int, ...]:
        """The stages that hold a parameter under any of its names."""
        group = next((g for g in self.shared if name in g), (name,))
        return tuple(sorted({stage for one in group for stage in self.holding(one)}))

    def __len__(self) -> int:
        return len(self.stages)

    def holding(self, name: str, *, buffer: bool = False) -> tuple[int, ...]:
        """The stages that hold a parameter or a buffer, by its name; the first stage for one that no forward uses."""
        path = name.rpartition(".")[0]
        if path in self.divided:
            found = [i for i, stage in enumerate(self.stages) if buffer or name in stage.parameters]
        else:
            parts = path.split(".")
            above = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
            found = sorted({i for unit in above for i in self._by_unit.get(unit, ())})
        return tuple(found) or (0,)

    @functools.cached_property
    def _by_unit(self) -> Mapping[str, Sequence[int]]:
        """The stages that a unit runs on."""
        found: dict[str, list[int]] = {}
        for i, stage in enumerate(self.stages):
            for unit in stage.units | stage.recomputed:
                found.setdefault(unit, []).append(i)
        return found
