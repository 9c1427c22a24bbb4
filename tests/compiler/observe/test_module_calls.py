"""What one forward on meta tells of how modules call each other."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from parallelizer.compiler.observe.equal_layers import longest_run
from parallelizer.compiler.observe.module_calls import Journey, Passage, observe
from parallelizer.language.workload import Entry, Workload
from parallelizer.styles.application import ModuleCall
from tests.simulate.setups import GPT, LLAMA, setup_of

WORKLOAD = Workload({"x": Entry(("batch", "sequence", 8), "float32")}, 2, 4)


class Inner(nn.Module):
    def forward(
        self, x: Tensor, scale: float, *more: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return x * scale, x


class Outer(nn.Module):
    """Calls `inner` by position and keyword, then one linear twice in different ways, then another that reads
    nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.twice, self.last, self.unused = (
            Inner(),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.inner(x, 2.0, x, mask=x)
        y = self.twice(y) + self.twice(input=y)
        return self.last(y)


def on_meta(build: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def test_arguments_are_named_by_the_signature() -> None:
    calls = observe(on_meta(Outer), WORKLOAD)
    assert calls is not None
    assert calls.by_module["inner"] == ModuleCall(
        (("x", True), ("scale", False), ("", True)), {"mask": True}, 2
    )
    assert calls.by_module["last"] == ModuleCall((("input", True),), {}, None)
    assert calls.by_module["twice"] is None  # called in two ways
    assert "unused" not in calls.by_module


def test_a_tensor_is_followed_from_module_to_module() -> None:
    calls = observe(on_meta(Outer), WORKLOAD)
    assert calls is not None
    journeys = {journey.passages[0]: journey for journey in calls.journeys}
    given = journeys[Passage("", False, "x")]
    assert [str(p.module) for p in given.passages] == ["", "inner", "inner", "inner", "inner"]
    assert given.read_in == {"inner"}
    between = journeys[Passage("inner", True, "0")]
    assert [p.module for p in between.passages] == ["inner", "twice", "twice"]
    assert between.read_in == {"twice"}
    assert calls.returned_by == ("last", "")


def test_the_model_is_left_as_it_is() -> None:
    model = on_meta(Outer)
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    observe(model, WORKLOAD)
    assert {path: vars(module) for path, module in model.named_modules()} == before


class ByValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x


def test_a_model_whose_course_depends_on_values_tells_nothing() -> None:
    assert observe(on_meta(ByValue), WORKLOAD) is None


@pytest.mark.parametrize("configured", [LLAMA, GPT], ids=["llama", "gpt"])
def test_a_few_layers_stand_for_all_of_a_run(configured: tuple[str, ...]) -> None:
    depth = "model.depth=9" if configured is GPT else "model.n_layers=9"
    setup = setup_of(*configured, depth)
    model = setup.build_model()
    run = longest_run((), model)
    assert run is not None
    whole, few = observe(model, setup.workload), observe(model, setup.workload, run)
    assert whole is not None and few is not None
    assert few.by_module == whole.by_module
    assert few.returned_by == whole.returned_by
    assert Counter(map(by_border, few.journeys)) == Counter(map(by_border, whole.journeys))


def by_border(journey: Journey) -> tuple[object, ...]:
    """A journey without the order of its borders where it goes through many layers."""
    return frozenset(journey.passages), journey.read_in
