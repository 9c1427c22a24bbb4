"""Which unit gathers which parameter, and on which dimension each is sharded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from parallelizer.language.plan import REPLICATE, shard
from parallelizer.styles.fsdp import Assignment, assign, changes_precision_or_place, units


class Nested(nn.Module):
    """a.inner has 6 parameters, a 2 of its own, b 6, the root 1."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(2, 2)
        self.a = nn.Module()
        self.a.inner = nn.Linear(2, 2)
        self.a.scale = nn.Parameter(torch.ones(2))
        self.top = nn.Parameter(torch.ones(1))


def param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))


def test_a_parameter_belongs_to_the_innermost_unit_around_it() -> None:
    assert units(Nested(), {"": {}, "a": {}, "a.inner": {}}) == {
        "a.inner": ["a.inner.weight", "a.inner.bias"],
        "a": ["a.scale"],
        "": ["top", "b.weight", "b.bias"],
    }


def test_units_come_innermost_first_and_then_in_the_models_order() -> None:
    assert list(units(Nested(), {"": {}, "a": {}, "a.inner": {}, "b": {}})) == ["a.inner", "b", "a", ""]


def test_without_a_root_unit_the_rest_belongs_to_none() -> None:
    assert units(Nested(), {"b": {}}) == {"b": ["b.weight", "b.bias"]}


def test_a_small_module_is_left_to_the_unit_around_it() -> None:
    few = {"min_params": 7}
    assert list(units(Nested(), {"": few, "a": few, "a.inner": few, "b": few})) == ["a", ""]
    assert units(Nested(), {"": few, "a": few, "a.inner": few})["a"] == [
        "a.scale",
        "a.inner.weight",
        "a.inner.bias",
    ]
    # There is none around it.
    assert list(units(Nested(), {"a.inner": few})) == ["a.inner"]


def test_a_prefix_of_a_name_is_no_module_around_it() -> None:
    model = nn.Module()
    model.layer, model.layer2 = nn.Linear(1, 1), nn.Linear(1, 1)
    assert units(model, {"layer": {}}) == {"layer": ["layer.weight", "layer.bias"]}


@pytest.mark.parametrize(
    ("shape", "options", "tensor", "ranks", "expected"),
    [
        ((4, 8), {}, {}, 2, Assignment(shard(0))),
        ((3, 8), {}, {}, 2, Assignment(shard(0))),  # uneven on dimension 0 is fine
        ((4, 8), {}, {"tp": shard(0)}, 2, Assignment(shard(0))),
        ((), {}, {}, 2, Assignment(REPLICATE, "a scalar")),
        ((4, 8), {"min_size": 33}, {}, 2, Assignment(REPLICATE, "too small")),
        ((4, 8), {"min_size": 32}, {}, 2, Assignment(shard(0))),
        ((4, 8), {"shard_dim": "largest"}, {}, 2, Assignment(shard(1))),
        ((8, 8), {"shard_dim": "largest"}, {}, 2, Assignment(shard(0))),
        ((4, 9), {"shard_dim": "largest"}, {}, 2, Assignment(shard(0))),
        ((4, 8), {"shard_dim": "largest"}, {"tp": shard(1)}, 2, Assignment(shard(0))),
        ((4, 8), {"shard_dim": "largest"}, {"tp": shard(1), "tp_outer": shard(0)}, 2,
         Assignment(REPLICATE, "every dimension is sharded already")),
        ((3, 5), {"shard_dim": "largest"}, {}, 2, Assignment(REPLICATE, "no dimension left divides by 2")),
    ],
)  # fmt: skip
def test_the_dimension(shape: tuple, options: dict, tensor: dict, ranks: int, expected: Assignment) -> None:
    assert assign(param(*shape), options, tensor, ranks) == expected


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 12), max_size=4), st.integers(1, 8), st.sampled_from(["0", "largest"]), st.integers(0, 200),
    st.dictionaries(st.sampled_from(["tp_outer", "tp"]), st.integers(0, 3)),
)  # fmt: skip
def test_what_is_sharded_can_be(
    shape: list[int], ranks: int, dim: str, min_size: int, used: dict[str, int]
) -> None:
    tensor = {axis: shard(d) for axis, d in used.items() if d < len(shape)}
    result = assign(param(*shape), {"shard_dim": dim, "min_size": min_size}, tensor, ranks)
    assert (result.placement == REPLICATE) == (result.reason is not None)
    if result.placement.dim:  # torch wants even shards on any dimension but the first
        assert shape[result.placement.dim] % ranks == 0
        assert result.placement.dim not in {p.dim for p in tensor.values()}


@pytest.mark.parametrize(
    ("options", "dtype", "expected"),
    [
        ({}, torch.float32, False),
        ({"param_dtype": "float32"}, torch.float32, False),
        ({"param_dtype": "float32"}, torch.float64, True),
        ({"param_dtype": "bfloat16"}, torch.float32, True),
        ({"param_dtype": "bfloat16"}, torch.bfloat16, False),
        ({"reduce_dtype": "bfloat16"}, torch.float32, False),
        ({"cpu_offload": True}, torch.float32, True),
        ({"cpu_offload": False}, torch.float32, False),
    ],
)
def test_a_single_rank_has_only_precision_and_place_to_change(
    options: dict, dtype: torch.dtype, expected: bool
) -> None:
    assert changes_precision_or_place(options, [nn.Parameter(torch.empty(1, dtype=dtype))]) is expected
