"""Attention as CUDA chooses it, in a dry run: right values, and what it stores."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parallelizer.simulate.record.cuda_operators import CudaOperators
from parallelizer.simulate.record.trace import trace
from tests.simulate.setups import llama, setup_of, traced


@pytest.mark.parametrize("kind", ["full", "causal", "mask"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_it_computes_attention(kind: str, dtype: torch.dtype, bound: float) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 6, 8, generator=generator).to(dtype).requires_grad_()
    k, v = (torch.randn(2, 2, 6, 8, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    mask = torch.ones(6, 6, dtype=torch.bool).tril() if kind == "mask" else None
    words = {"attn_mask": mask, "is_causal": kind == "causal", "enable_gqa": True}
    with CudaOperators():
        out = F.scaled_dot_product_attention(q, k, v, **words)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    right = F.scaled_dot_product_attention(*wide, **words)
    out.double().square().sum().backward()
    right.square().sum().backward()
    for found, expected in zip((out, q.grad, k.grad, v.grad), (right, *(t.grad for t in wide)), strict=True):
        assert found is not None and expected is not None
        assert float((found.double() - expected).detach().norm() / expected.detach().norm()) < bound


def peak(*words: str) -> int:
    setup = llama("parallel=single", "model.n_layers=1", "train.seq_len=256", *words)
    model = setup.build_model()
    return trace(setup.compile(model), model, setup.recipe()).memory.peak


def test_grouped_heads_hold_their_scores_on_cuda_in_float32_alone() -> None:
    half, wide = (f"train.dtype={dtype}" for dtype in ("bfloat16", "float32"))
    assert peak("device=cuda", half) <= peak("device=cpu", half)
    assert peak("device=cuda", wide) > 1.2 * peak("device=cpu", wide)


def test_blocks_under_a_mask_are_attended_to_in_float32_on_cuda_with_a_bias_in_float32() -> None:
    small = (
        "model=alibi_tiny",
        "model.dim=32",
        "model.n_layers=1",
        "train.seq_len=512",
        "train.batch_size=1",
    )
    step = traced(setup_of(*small, "parallel=cp2", "train.dtype=bfloat16", "device=cuda"))
    assert {o.dtype for o, _ in step.operators() if o.kind == "attention"} == {"float32"}
    scores = 8 * 256 * 512  # of a rank's rows
    # The mask in 16 bits, in 32 bits, and again with aligned rows; beside it queries, keys, values, results and weights.
    assert 10 * scores < step.memory.peak < 12 * scores
