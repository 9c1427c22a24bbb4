"""Where models get positions from, found without looking at a name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallelizer.compiler.observe.position_reads import LENGTHS, PositionSource, position_sources
from parallelizer.language.workload import Entry, Workload
from tests.findings import on_meta
from tests.runtime.test_step import llama

IDS = Entry(("batch", "sequence"), range=(0, 32))
WORK = Workload({"input_ids": IDS, "labels": IDS}, 2, 64)


class Model(nn.Module):
    """Tokens to activations [B, S, 8], and one thing done with them and the length."""

    def __init__(self, use: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(32, 8), nn.Embedding(64, 8)
        self.angles: Tensor
        self.hidden: Tensor
        self.register_buffer("angles", torch.empty(64, 8))
        self.register_buffer("hidden", torch.empty(1, 1, 64, 64))
        self.learned = nn.Parameter(torch.empty(64, 8))
        self.use = use

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.use(self, self.embed(input_ids))


def sources(use: Callable[[Model, Tensor], Tensor], work: Workload = WORK) -> list[PositionSource]:
    return list(position_sources(on_meta(lambda: Model(use)), work))


def length(x: Tensor) -> int:
    return x.shape[1]


def scores(x: Tensor) -> Tensor:
    return (x @ x.transpose(1, 2))[:, None]


ARANGE = PositionSource("made", "torch.arange", "")
CASES: list[tuple[str, Callable[[Model, Tensor], Tensor], list[PositionSource]]] = [
    ("nothing", lambda m, x: x * 2, []),
    ("a sum over tokens", lambda m, x: x - x.mean(1, keepdim=True), []),
    ("positions that nothing uses", lambda m, x: (torch.arange(length(x), device=x.device), x)[1], []),
    ("zeros of the length", lambda m, x: x + torch.zeros(length(x), 8, device=x.device), []),
    ("counted", lambda m, x: x * torch.arange(length(x), device=x.device)[:, None], [ARANGE]),
    (
        "looked up",
        lambda m, x: x + m.places(torch.arange(length(x), device=x.device)),
        [ARANGE, PositionSource("parameter", "places.weight", "places", 0, 64)],
    ),
    (
        "a table of angles",
        lambda m, x: x * m.angles[: length(x)],
        [PositionSource("buffer", "angles", "", 0, 64)],
    ),
    (
        "a narrowed table",
        lambda m, x: x * m.angles.narrow(0, 0, length(x)),
        [PositionSource("buffer", "angles", "", 0, 64)],
    ),
    (
        "a table of angles at positions that are counted",
        lambda m, x: x * m.angles[torch.arange(length(x), device=x.device)],
        [PositionSource("buffer", "angles", "", 0, 64), ARANGE],
    ),
    (
        "a learned table",
        lambda m, x: x + m.learned[: length(x)],
        [PositionSource("parameter", "learned", "", 0, 64)],
    ),
    (
        "a mask that is kept",
        lambda m, x: scores(x).masked_fill(m.hidden[:, :, : length(x), : length(x)] > 0, -1.0),
        [PositionSource("buffer", "hidden", "", 2, 64)],
    ),
    (
        "a mask that is made",
        lambda m, x: F.scaled_dot_product_attention(
            x, x, x, torch.ones(length(x), length(x), device=x.device).tril().bool()
        ),
        [PositionSource("made", "Tensor.tril", "")],
    ),
    ("a mask that torch makes", lambda m, x: F.scaled_dot_product_attention(x, x, x, is_causal=True), []),
    (
        "angles that are worked out",
        lambda m, x: x * torch.outer(torch.arange(length(x), device=x.device) * 1.0, m.angles[0]).cos(),
        [ARANGE],
    ),
    (
        "tokens counted up",
        lambda m, x: x + torch.ones(2, length(x), device=x.device, dtype=torch.int64).cumsum(1)[..., None],
        [PositionSource("made", "Tensor.cumsum", "")],
    ),
]


@pytest.mark.parametrize(("use", "found"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_gives_activations_their_positions(
    use: Callable[[Model, Tensor], Tensor], found: list[PositionSource]
) -> None:
    assert sources(use) == found


def test_a_llama_reads_two_tables() -> None:
    found = position_sources(on_meta(llama(max_seq_len=64)), WORK)
    assert [(s.kind, s.name, s.dim, s.rows) for s in found] == [
        ("buffer", "rope.cos", 0, 64),
        ("buffer", "rope.sin", 0, 64),
    ]


def test_positions_that_are_given_are_told_apart() -> None:
    class Given(Model):
        def forward(self, input_ids: Tensor, places: Tensor) -> Tensor:  # type: ignore[override]
            return self.embed(input_ids) + self.places(places)

    model = on_meta(lambda: Given(lambda m, x: x))
    assert [s.kind for s in position_sources(model, WORK, ["places"])] == ["given", "parameter"]


def test_rows_that_the_batch_picks_are_no_reads_by_position() -> None:
    class Picked(Model):
        def forward(self, input_ids: Tensor, places: Tensor) -> Tensor:  # type: ignore[override]
            return self.embed(input_ids) * self.angles[places] * self.angles.index_select(0, places[0])

    work = Workload({"input_ids": IDS, "places": IDS}, 2, 64)
    model = on_meta(lambda: Picked(lambda m, x: x))
    assert position_sources(model, work) == ()
    assert {s.kind for s in position_sources(model, work, ["places"])} == {"given", "buffer"}


def test_a_model_that_does_not_run_on_meta_tells_nothing() -> None:
    assert sources(lambda m, x: x if x.sum().item() > 0 else -x) == []


def test_no_length_may_be_one_of_the_models_own() -> None:
    short = Workload({"input_ids": Entry(("batch", "sequence"), range=(0, 2))}, 2, 2)
    assert sources(lambda m, x: x * m.angles[: length(x)], short) == []
    own = Workload({**WORK.entries, "other": Entry(("batch", LENGTHS[0]))}, 2, 64)
    assert sources(lambda m, x: x * m.angles[: length(x)], own) == [
        PositionSource("buffer", "angles", "", 0, 64)
    ]


def test_the_model_is_left_as_it_is() -> None:
    model = on_meta(lambda: Model(lambda m, x: x))
    position_sources(model, WORK)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
