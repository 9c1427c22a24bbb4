"""What fake tensors stand in for where torch itself does not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallelizer.torch_private import FakeTensors, GroupedProducts

Forms = list[tuple[tuple[int, ...], torch.dtype]]


def products(dtype: torch.dtype, width: int, device: str = "cpu") -> Forms:
    """The forms of a product of groups and of its gradients."""
    rows = torch.zeros(12, width, dtype=dtype, device=device, requires_grad=True)
    weights = torch.zeros(3, width, 16, dtype=dtype, device=device, requires_grad=True)
    result = F.grouped_mm(rows, weights, offs=torch.tensor([5, 5, 12], dtype=torch.int32, device=device))
    (result * torch.ones_like(result)).sum().backward()
    return [(tuple(t.shape), t.dtype) for t in (result, rows.grad, weights.grad) if t is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_of_groups_have_the_forms_of_real_ones(dtype: torch.dtype) -> None:
    real = products(dtype, 8)
    with FakeTensors():
        assert products(dtype, 8) == real
    with GroupedProducts():
        assert products(dtype, 8, "meta") == real


def test_products_of_groups_that_no_kernel_takes_are_refused_alike() -> None:
    with pytest.raises(RuntimeError, match="strides should be multiple of 16 bytes"):
        products(torch.float32, 6)
    with FakeTensors(), pytest.raises(RuntimeError, match="strides should be multiple of 16 bytes"):
        products(torch.float32, 6)
