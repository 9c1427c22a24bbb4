"""The loss against a sum written by hand."""

from __future__ import annotations

import pytest
import torch

from parallelizer.losses import cross_entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_and_the_count_are_over_valid_labels(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    labels = torch.tensor([[1, -100, 4], [0, 2, -100]])
    expected = 0.0
    for b in range(2):
        for s in range(3):
            if labels[b, s] >= 0:
                exps = logits[b, s].double().exp()
                expected -= float((exps[labels[b, s]] / exps.sum()).log())
    total, count = cross_entropy(logits, {"labels": labels})
    assert total.dtype == torch.float32
    assert float(total) == pytest.approx(expected, rel=1e-6)
    assert int(count) == 4


def test_nothing_valid_gives_zero_and_gradients_of_zero() -> None:
    logits = torch.randn(1, 3, 5, requires_grad=True)
    total, count = cross_entropy(logits, {"labels": torch.full((1, 3), -100)})
    total.backward()
    assert (float(total.detach()), int(count)) == (0.0, 0)
    assert logits.grad is not None and not logits.grad.any()
