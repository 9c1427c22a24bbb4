"""Families of models with their own way of calling, initialising and checking, such as those of
`transformers`.

A family is one module with the functions of `Family`, and one line in `FAMILIES`. No other code contains its
name. Its module is imported at the first use of a model, so it imports nothing heavy until a function is
called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from parallelizer.compiler.compilation import Compilation
    from parallelizer.diagnostics.diagnostic import Diagnostic
    from parallelizer.styles.application import Program
    from parallelizer.styles.context_parallel.sequence import CurrentOrder

FAMILIES = ("parallelizer.hugging_face.family",)
"""The modules of all families."""


class NoPlan(NamedTuple):
    """Why a model config leads to no plan: what a diagnostic says, and the key of the model config that it is about."""

    code: str
    message: str
    help: str
    key: str


class Family(Protocol):
    """What a family's module offers. Where it says None or yields nothing, the model is treated as any other."""

    def is_model(self, model: nn.Module) -> bool:
        """Whether the model is one of this family. Must be cheap, and import nothing."""

    def inputs(self, model: nn.Module, taken: dict[str, Any]) -> dict[str, Any]:
        """What forward is called with, from the batch entries that it takes; labels are not among them."""

    def outcome(self, model: nn.Module, batch: Mapping[str, Any], call: Callable[..., Any]) -> Any:
        """`call(model, batch)`, the logits, or a `Routed` with them where the model asks for a balancing loss."""

    def initializer(self, model: nn.Module) -> Callable[[nn.Module], None] | None:
        """What fills one module's own parameters and buffers; None where each module fills its own."""

    def fed(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """The `batch` and `loss` of a model config, where those that it has are not of such a model."""

    def vocabulary(self, model: nn.Module) -> int | None:
        """How many tokens the model has an embedding for."""

    def longest(self, model: nn.Module) -> int | None:
        """The longest sequence that the model says it takes."""

    def position_table(self, model: nn.Module) -> tuple[str, int] | None:
        """The name of a table with a row for each position, and how many positions it has; None where the model computes
        positions.
        """

    def check(self, state: Compilation) -> Iterator[Diagnostic]:
        """What is wrong with a plan for such a model that no other check knows."""

    def checks_positions(self, state: Compilation) -> bool:
        """Whether `check` has told what is wrong with positions or masks, so that others stay silent."""

    def after_apply(
        self, model: nn.Module, program: Program, mesh: DeviceMesh, sequence: CurrentOrder
    ) -> None:
        """What is still to do to a model that has been made parallel."""

    def plan_name(self, config: Mapping[str, Any]) -> str | None:
        """The name of the plan for a model config that names none."""

    def why_no_plan(self, config: Mapping[str, Any]) -> NoPlan | None:
        """Why there is none."""


def families() -> tuple[Family, ...]:
    """Every family, imported."""
    return tuple(cast(Family, importlib.import_module(name)) for name in FAMILIES)


def family_of(model: nn.Module) -> Family | None:
    """The family that a model is of; None for any other model."""
    return next((family for family in families() if family.is_model(model)), None)


def initializer_of(model: nn.Module) -> Callable[[nn.Module], None] | None:
    """What fills one module's own parameters and buffers; None where each module fills its own."""
    family = family_of(model)
    return family.initializer(model) if family is not None else None


def vocabulary_of(model: nn.Module, config: Mapping[str, Any]) -> int | None:
    """How many tokens a model, which may be on meta, has an embedding for; None where nothing says so.

    A family of models knows; of others the argument `vocab_size` of the model config is taken at its word.
    """
    family = family_of(model)
    if family is not None:
        return family.vocabulary(model)
    said = config.get("vocab_size")
    return said if isinstance(said, int) else None


def family_check(state: Compilation) -> Iterable[Diagnostic]:
    """What the model's family finds wrong."""
    family = family_of(state.model)
    return family.check(state) if family is not None else ()
