"""One number for many bytes: equal for equal ones, and another for whatever else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelizer import torch_private
from parallelizer.runtime.guards.checksum import BLOCK, checksum

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.int64, torch.float16)


def flip(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    """A copy with one bit changed."""
    changed = tensor.contiguous().clone()
    changed.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    return changed


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_one_bit_counts(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([d for d in DTYPES if d is not torch.bool]))
    length = data.draw(st.sampled_from([1, 2, 3, 7, 8, 9, 1000, 8 * BLOCK + 3]))
    tensor = (torch.randn(length, generator=torch.Generator().manual_seed(length)) * 50).to(dtype)
    bit = data.draw(st.integers(0, 8 * tensor.nbytes - 1))
    assert checksum(flip(tensor, bit)) != checksum(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_of_the_elements_in_their_order_wherever_they_lie(dtype: torch.dtype) -> None:
    numbers = torch.randn(33, 17, generator=torch.Generator().manual_seed(1)) * 50
    whole = (numbers > 0) if dtype is torch.bool else numbers.to(dtype)
    for part in (whole, whole[1:], whole[:, 3:9], whole.t(), whole[2], whole[5, 5], whole[:0]):
        assert checksum(part) == checksum(part.contiguous().clone())
    assert checksum(whole[0]) != checksum(whole[1]) and checksum(whole) != checksum(whole.flip(0))


def test_two_flipped_signs_two_swapped_elements_and_negative_zero_are_seen() -> None:
    tensor = torch.randn(4 * BLOCK, generator=torch.Generator().manual_seed(2))
    told = checksum(tensor)
    for i, j in ((1, 3), (0, 2 * BLOCK), (5, 4 * BLOCK - 1), (2, 2 + 2 * BLOCK)):
        signs, swapped = tensor.clone(), tensor.clone()
        signs[[i, j]] *= -1
        swapped[[i, j]] = swapped[[j, i]]
        assert checksum(signs) != told and checksum(swapped) != told
    assert checksum(torch.zeros(3)) != checksum(-torch.zeros(3))


def test_nine_elements_of_two_values_make_512_sums() -> None:
    every = torch.tensor(list(itertools.product((0.0, 1.0), repeat=9)))
    assert len({int(checksum(one)) for one in every}) == 512


def test_a_gpu_launches_few_kernels_for_many_bytes() -> None:
    class Launches(torch_private.TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += not func.is_view
            return func(*args, **(kwargs or {}))

    state = torch.empty(300_000_000, device="meta")  # which has the blocks of a GPU
    checksum(state[:1])  # makes the keys
    with Launches() as launches:
        checksum(state)
    # 12,880 for 12 GB. With blocks of a CPU's size there are 16 times as many.
    assert launches.count <= 1_300
