"""Which forwards treat equal layers alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from parallelizer.compiler.observe.equal_layers import Run
from parallelizer.compiler.observe.treated_alike import treated_alike
from parallelizer.language.workload import Entry, Workload
from tests.findings import on_meta
from tests.simulate.stack import Layer

LAYERS = 9
WORK = Workload({"x": Entry(("batch", "sequence", 4), "float32")}, batch_size=2, seq_len=8)
RUN = Run("layers", 0, LAYERS)
Forward = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """Layers, and a forward that somebody wrote."""

    def __init__(self, way: Forward) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(4, 8, i) for i in range(LAYERS))
        self.last = nn.Linear(4, 4)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def one_by_one(model: Model, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return model.last(x)


def from_the_start(model: Model, x: Tensor) -> Tensor:
    start = x
    for layer in model.layers:
        x = layer(x) + start
    return model.last(x)


def from_the_first_layer(model: Model, x: Tensor) -> Tensor:
    first = x = model.layers[0](x)
    for layer in model.layers[1:]:
        x = layer(x) + first
    return model.last(x)


def first_and_last_are_special(model: Model, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x.sin() if i == 0 else x)
    return model.last(x.cos())


def over_the_layer_before(model: Model, x: Tensor) -> Tensor:
    before = x
    for layer in model.layers:
        before, x = x, layer(x) + before
    return model.last(x)


def all_of_them_behind(model: Model, x: Tensor) -> Tensor:
    seen = []
    for layer in model.layers:
        seen.append(x := layer(x))
    return model.last(torch.stack(seen).sum(0))


ALIKE = [one_by_one, from_the_start, from_the_first_layer, first_and_last_are_special, all_of_them_behind]


def one_has_more(model: Model, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x).sin() if i == 4 else layer(x)
    return model.last(x)


def every_second_has_more(model: Model, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x).sin() if i % 2 else layer(x)
    return model.last(x)


def one_is_kept(model: Model, x: Tensor) -> Tensor:
    kept = x
    for i, layer in enumerate(model.layers):
        x = layer(x)
        kept = x if i == 4 else kept
    return model.last(x + kept)


def one_gets_what_another_got(model: Model, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        if i == 3:
            kept = x
        x = layer(x + x) if i != 6 else layer(x + kept)
    return model.last(x)


def the_sequence_shrinks(model: Model, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x)[:, : 8 if i < 4 else 4]
    return model.last(x)


def one_is_left_out(model: Model, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        x = x if i == 4 else layer(x)
    return model.last(x)


def backwards(model: Model, x: Tensor) -> Tensor:
    for i in reversed(range(LAYERS)):
        x = model.layers[i](x)
    return model.last(x)


def twice(model: Model, x: Tensor) -> Tensor:
    return one_by_one(model, one_by_one(model, x))


def a_value_decides(model: Model, x: Tensor) -> Tensor:
    return one_by_one(model, x if x.sum() > 0 else -x)


OTHERWISE = [
    one_has_more,
    every_second_has_more,
    one_is_kept,
    one_gets_what_another_got,
    the_sequence_shrinks,
]
OTHERWISE += [one_is_left_out, backwards, twice, a_value_decides]
OTHERWISE += [
    over_the_layer_before
]  # it could be folded, but the last layer's second source is not looked at so closely


@pytest.mark.parametrize("way", [*ALIKE, *OTHERWISE], ids=lambda way: way.__name__)
def test_a_forward_is_looked_at(way: Forward) -> None:
    assert treated_alike(on_meta(lambda: Model(way)), WORK, RUN) is (way in ALIKE)


def test_a_layer_may_count_itself() -> None:
    class Counts(Layer):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x.sin() if self.index % 3 == 0 else x

    model = on_meta(lambda: Model(one_by_one))
    model.layers = on_meta(lambda: nn.ModuleList(Counts(4, 8, i) for i in range(LAYERS)))
    assert not treated_alike(model, WORK, RUN)


def test_constants_made_without_a_device_do_not_matter() -> None:
    def masked(model: Model, x: Tensor) -> Tensor:
        return one_by_one(model, x * torch.ones(8, 1))

    assert treated_alike(on_meta(lambda: Model(masked)), WORK, RUN)
