"""What one forward on meta tells of how modules call each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from parallelizer.calls import Call, Passage, observe
from parallelizer.workload import Entry, Workload

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
    assert calls.by_module["inner"] == Call((("x", True), ("scale", False), ("", True)), {"mask": True}, 2)
    assert calls.by_module["last"] == Call((("input", True),), {}, None)
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
