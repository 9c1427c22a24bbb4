"""Whole numbers of a module, and of what it holds: read, and written without changing what others hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from parallelizer.styles import attributes


@dataclass
class Inner:
    heads: int = 4


@dataclass(frozen=True)
class Frozen:
    heads: int = 4
    text: Inner = field(default_factory=Inner)


class Slotted:
    __slots__ = ("heads",)

    def __init__(self) -> None:
        self.heads = 4


class Module(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.heads, self.flag, self.child = config, 8, True, nn.Linear(2, 6)

    @property
    def computed(self) -> int:
        return self.heads


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (Inner(), "config.heads"),
        (Frozen(), "config.heads"),
        (Frozen(), "config.text.heads"),
        (Slotted(), "config.heads"),
        (SimpleNamespace(heads=4, text=SimpleNamespace(heads=4)), "config.text.heads"),
    ],
)
def test_a_number_is_written_in_copies_of_what_leads_to_it(config: Any, name: str) -> None:
    one, other = Module(config), Module(config)
    assert attributes.read(one, name) == 4 and attributes.is_writable(one, name)
    attributes.write(one, name, 2)
    assert (attributes.read(one, name), attributes.read(other, name)) == (2, 4)
    assert other.config is config and one.config is not config and type(one.config) is type(config)


def test_a_number_of_the_module_is_written_in_it() -> None:
    module = Module(None)
    attributes.write(module, "heads", 4)
    assert module.heads == 4 and attributes.is_writable(module, "heads")


@pytest.mark.parametrize(
    "name", ["flag", "nobody", "config", "config.nobody", "heads.real.nobody", "child.bias"]
)
def test_what_is_no_whole_number_is_none(name: str) -> None:
    assert attributes.read(Module(Inner()), name) is None


@pytest.mark.parametrize("name", ["computed", "child.out_features"])
def test_what_is_computed_or_another_modules_is_not_to_be_written(name: str) -> None:
    module = Module(Inner())
    assert attributes.read(module, name) is not None
    assert not attributes.is_writable(module, name)


def test_a_tuple_with_names_is_not_to_be_written() -> None:
    from typing import NamedTuple

    class Sizes(NamedTuple):
        heads: int

    assert not attributes.is_writable(Module(Sizes(4)), "config.heads")


def test_numbers_are_those_of_the_module_and_of_what_it_holds() -> None:
    assert attributes.numbers(Module(Frozen())) == ["heads", "config.heads"]


def test_a_number_of_a_layer_of_einops_is_read_and_set() -> None:
    layer = pytest.importorskip("einops.layers.torch").Rearrange("b n (h d) -> b h n d", h=4)
    assert attributes.read(layer, "_axes_lengths.h") == 4 and attributes.is_writable(layer, "_axes_lengths.h")
    assert attributes.read(layer, "_axes_lengths.d") is None
    attributes.divide(layer, "_axes_lengths.h", 2)
    assert layer(torch.zeros(1, 3, 8)).shape == (1, 2, 3, 4)


class Refusing:
    """Says no to a question, as the configuration of a model whose layers differ does."""

    heads = 4

    @property
    def width(self) -> int:
        raise RuntimeError("it differs from layer to layer")


def test_what_an_object_refuses_to_say_is_no_number() -> None:
    module = nn.Linear(2, 2)
    module.config = Refusing()  # type: ignore[assignment]
    assert attributes.read(module, "config.width") is None
    assert attributes.read(module, "config.heads") == 4
