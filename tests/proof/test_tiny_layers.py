"""One layer of every kind is in the small form."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from parallelizer.configuration.read_setup import from_overrides
from parallelizer.language.workload import Entry, Workload
from parallelizer.proof.tiny import shrink
from parallelizer.proof.tiny_layers import MOST_LAYERS, LayerKinds, layer_kinds, with_stages

MODEL = """
from torch import nn

class Layer(nn.Module):
    def __init__(self, dim, flips):
        super().__init__()
        self.up, self.flips, self.sorts = nn.Linear(dim, dim), flips, dim > 40

    def forward(self, x):
        x = x.sort(1)[0] if self.sorts else x
        return x + self.up(x.flip(1) if self.flips else x)

class Net(nn.Module):
    def __init__(self, dim, n_layers, flips=-1, rolls=-1):
        super().__init__()
        self.embed, self.rolls = nn.Embedding(32, dim), rolls
        self.layers = nn.ModuleList(Layer(dim, i == flips) for i in range(n_layers))
        self.head = nn.Linear(dim, 32)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == self.rolls:
                x = x.roll(1, 1)
        return self.head(x)
"""

CONFIG = """
_target_: net_of_kinds.Net
dim: 32
n_layers: 10
plan: net_of_kinds
loss: parallelizer.losses.cross_entropy
batch:
  input_ids: {shape: [batch, sequence], dtype: int64, range: [0, 32]}
  labels: {shape: [batch, sequence], dtype: int64, range: [0, 32], ignore: -100}
tiny: {dim: 8, n_layers: 2}
"""

PLAN = "version: 1\nbuffers: {batch: {input_ids: 1, labels: {dim: 1, pad: -100}}}\nrules: {'': fsdp}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "net_of_kinds.py").write_text(MODEL)
    for name, text in (("model", CONFIG), ("plans", PLAN)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "net_of_kinds.yaml").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield str(tmp_path)
    sys.modules.pop("net_of_kinds", None)


@pytest.mark.parametrize(
    ("overrides", "layers", "lost"),
    [
        ([], 2, None),
        (["++model.flips=6"], 7, None),
        (["++model.rolls=6"], 8, None),
        (["++model.rolls=9"], 10, None),  # behind the last layer
        (
            ["++model.flips=40", "model.n_layers=60"],
            2,
            "layers.40 left out, no layer of the small model does the same",
        ),
        (
            ["++model.rolls=40", "model.n_layers=60"],
            2,
            "what runs behind layers.40 left out, nothing in the small model does the same",
        ),
        (["model.dim=48"], 2, "a part of layers.0 left out, with its small sizes it runs other operators"),
    ],
)
def test_the_small_form_has_a_layer_of_every_kind_or_says_which_it_lacks(
    folder: str, overrides: list[str], layers: int, lost: str | None
) -> None:
    setup = from_overrides(["model=net_of_kinds", "parallel=fsdp2", *overrides], config_dir=folder)
    small, changes = shrink(setup)
    assert small.model["n_layers"] == layers <= MOST_LAYERS
    left_out = [change for change in changes if "left out" in change]
    assert left_out == ([lost] if lost else [])


class Windows(nn.Module):
    """Layers that a constant tells apart; their operators are the same."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.AvgPool1d(size, 1) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return sum((layer(x)[..., :4] for layer in self.layers), torch.zeros((), device=x.device))


WORKLOAD = Workload({"x": Entry(("batch", 2, 16), "float32")}, batch_size=2, seq_len=1)


def kinds_of(model: nn.Module) -> LayerKinds:
    [found] = layer_kinds([model.to("meta")], WORKLOAD)
    assert found is not None
    return found["layers"]


def test_layers_of_the_same_operators_differ_by_their_constants_where_these_are_few() -> None:
    small = kinds_of(Windows([2, 2]))
    assert [first.layer for first in kinds_of(Windows([2, 2, 2, 5, 2, 2])).missing_in(small)] == [3]
    assert not kinds_of(Windows([2] * 6)).missing_in(small)
    assert not kinds_of(Windows([2, 3, 4, 5, 6, 7])).missing_in(small)  # the constant counts the layers


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


def test_a_model_whose_values_decide_its_course_has_no_kinds() -> None:
    assert layer_kinds([Branches().to("meta")], WORKLOAD) == [None]


STAGED = """
from torch import nn

class Staged(nn.Module):
    def __init__(self, dim, depth, heads=2, kinds=(), most=99):
        super().__init__()
        assert depth <= most and len(kinds) in (0, depth)
        self.embed = nn.Embedding(32, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim, bias=not kinds or kinds[i]) for i in range(depth))
        self.more = nn.ModuleList(nn.Linear(dim, dim) for _ in range(heads - 2))

    def forward(self, input_ids):
        return self.embed(input_ids)
"""


@pytest.mark.parametrize(
    ("given", "wanted", "grown"),
    [
        ([], 2, {}),  # it has as many
        ([], 5, {"depth": 5}),
        (["+model.kinds=[true,false]"], 5, {"depth": 5, "kinds": [True, False, True, False, True]}),
        (["+model.most=3"], 8, {}),  # 8 layers cannot be built
        (["+model.tiny={dim: 4}"], 4, {"depth": 4}),
    ],
)
def test_numbers_of_layers_grow_until_a_cut_fits_before_each_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], wanted: int, grown: dict[str, object]
) -> None:
    (tmp_path / "net_of_stages.py").write_text(STAGED)
    for folder, name, text in (
        ("model", "staged", CONFIG.replace("net_of_kinds.Net", "net_of_stages.Staged")),
        ("plans", "net_of_kinds", PLAN.replace("{'': fsdp}", "{'layers.*': stage, '': fsdp}")),
    ):
        (tmp_path / folder).mkdir()
        config = text.replace("n_layers: 10", "depth: 2").replace("tiny: {dim: 8, n_layers: 2}\n", "")
        (tmp_path / folder / f"{name}.yaml").write_text(config)
    monkeypatch.syspath_prepend(str(tmp_path))
    setup = from_overrides(["model=staged", *given], config_dir=str(tmp_path))
    tiny = setup.model.get("tiny") or {}
    assert with_stages(setup, tiny, wanted) == {**tiny, **grown}
