"""State dicts in the model's own layout, whatever the plan has done to a parameter."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import parallelizer as pz
from parallelizer.language.plan import Mesh
from tests.parity import plan
from tests.ranks import run_ranks
from tests.styles.models import FusedAttention, around

PACKED = plan(
    "rules:\n"
    "  inner.qkv: {style: colwise, packed: [q_heads, kv_heads, kv_heads]}\n"
    "  inner: {style: shard-params, divide: [heads, kv_heads]}\n"
    '  inner.out: rowwise\n  "": fsdp\n'
)


def model() -> nn.Module:
    torch.manual_seed(0)
    return around(FusedAttention)()


def parallel(sizes: dict[str, int]) -> nn.Module:
    return pz.parallelize(copy.deepcopy(model()), PACKED, pz.build_mesh(Mesh(sizes), "cpu"))


@pytest.mark.ranks
def test_a_packed_parameter_comes_out_and_goes_in_as_the_model_has_it() -> None:
    def worker() -> None:
        plain = model().state_dict()
        split = parallel({"dp_shard": 2, "tp": 2})
        with pytest.warns(UserWarning, match=r"inner\.qkv\.\{weight,bias\} in the order of the ranks of tp"):
            packed = split.state_dict()
        assert not torch.equal(packed["inner.qkv.weight"].full_tensor(), plain["inner.qkv.weight"])
        torch.testing.assert_close(pz.whole_state_dict(split), plain, rtol=0, atol=0)
        other = {name: tensor + 1 for name, tensor in plain.items()}
        pz.load_whole_state_dict(split, other)
        torch.testing.assert_close(pz.whole_state_dict(split), other, rtol=0, atol=0)

    run_ranks(worker, 4)


def test_a_state_that_does_not_fit_is_refused_before_anything_is_filled() -> None:
    split = model()
    before = pz.whole_state_dict(split)
    other = {name: tensor + 1 for name, tensor in before.items()}
    first = next(iter(other))
    with pytest.raises(ValueError, match=f"{first} is missing; the model has no else"):
        pz.load_whole_state_dict(
            split, {**{n: t for n, t in other.items() if n != first}, "else": other[first]}
        )
    with pytest.raises(ValueError, match=r"is \[1\], in the model"):
        pz.load_whole_state_dict(split, {**other, first: torch.zeros(1)})
    torch.testing.assert_close(pz.whole_state_dict(split), before, rtol=0, atol=0)
