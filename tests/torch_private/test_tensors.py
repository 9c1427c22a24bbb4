"""Trees of arguments."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from parallelizer.torch_private import tree_leaves

Pair = namedtuple("Pair", "first second")


@dataclass
class Unknown:
    """No node of any tree."""

    value: int


ONE, TWO = torch.zeros(1), nn.Parameter(torch.zeros(2))
TREES: dict[str, Any] = {
    "a tensor": ONE,
    "arguments of an operator": ((ONE, [TWO, None], 3, (True, 0.5)), {"dim": 1, "dtype": torch.float32}),
    "nothing": ((), {}, []),
    "no tree": Unknown(1),
    "a dictionary, not in order of its keys": {"b": [ONE], "a": {"d": 1, "c": TWO}},
    "other nodes inside": [Pair(ONE, (1, Unknown(2))), OrderedDict(b=ONE, a=[TWO]), torch.Size([1, 2])],
}


@pytest.mark.parametrize("name", TREES)
def test_leaves_are_those_of_torch(name: str) -> None:
    ours, theirs = tree_leaves(TREES[name]), _pytree.tree_leaves(TREES[name])
    assert [id(leaf) for leaf in ours] == [id(leaf) for leaf in theirs]
