"""Numbers that know which attributes they are made of."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import torch
from torch import nn

from parallelizer.propose.from_forward.stated import Stated, names_in, stated


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.size, self.flag = 4, 8, True
        self.config = SimpleNamespace(groups=2)


def test_products_and_sums_of_attributes_know_all_of_them() -> None:
    model = nn.Sequential(Holder())
    with stated(model):
        holder = model[0]
        total = holder.heads * holder.size + holder.config.groups * holder.size
        assert total == 48
        assert names_in(total) == {("0", "heads"): 4, ("0", "size"): 8, ("", "config.groups"): 2}
        assert names_in(slice(None, holder.heads)) == {("0", "heads"): 4}
        assert names_in([1, (holder.size, -1)]) == {("0", "size"): 8}


def test_what_is_mixed_with_a_size_of_a_tensor_is_a_plain_number() -> None:
    model = Holder()
    with stated(model):
        assert names_in(torch.zeros(3, 2).shape[0] * model.heads) == {}
        assert names_in(model.heads // 2) == {("", "heads"): 2}
        assert names_in(model.heads // 3) == {}
        assert type(model.flag) is bool


def test_afterwards_they_are_what_they_were_and_copies_are_plain() -> None:
    model = Holder()
    with stated(model):
        assert isinstance(model.heads, Stated)
        assert type(copy.deepcopy(model.heads)) is int
        assert type(pickle.loads(pickle.dumps(model.heads))) is int
    assert type(model.heads) is int
    assert type(model.config.groups) is int


def test_a_view_takes_such_numbers() -> None:
    model = Holder()
    with stated(model):
        assert torch.zeros(2, 32).view(2, model.heads, model.size).shape == (2, 4, 8)


def test_a_quotient_knows_what_was_divided_by_what() -> None:
    model = Holder()
    with stated(model):
        size = (model.heads * model.size) // model.heads
        assert size == 8
        assert dict(size.names) == {("", "heads"): 4, ("", "size"): 8}
        assert dict(size.over) == {("", "heads"): 4}
        assert names_in(size) == {}  # it counts neither
        assert type(size * model.heads) is int
