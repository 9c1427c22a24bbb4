"""The dry run of packed documents for CUDA: no mask, and what FlashAttention allocates inside itself."""

from __future__ import annotations

import pytest
import torch

from parallelizer.configuration.read_setup import from_overrides
from parallelizer.simulate.record.kernel_scratch import CudaScratch
from parallelizer.simulate.record.planned import plan_step


def peak(model: str, axes: str) -> float:
    """In MiB."""
    sizes = ["train.seq_len=8192", "model.max_seq_len=8192", "train.batch_size=1", "train.dtype=bfloat16"]
    setup = from_overrides([f"model={model}", "device=cuda", *sizes, axes])
    built = setup.build_model()
    return plan_step(setup.compile(built), built, setup.recipe()).peak / 2**20


@pytest.mark.parametrize(
    "axes", [pytest.param("parallel=single", marks=pytest.mark.slow), "parallel.mesh.cp=2"]
)
def test_packed_documents_need_little_more_than_one_document(axes: str) -> None:
    # A mask of 8,192 tokens would have 64 MiB, 32 MiB of them on each of two ranks.
    assert peak("llama_packed", axes) == pytest.approx(peak("llama_debug", axes), abs=1.0)


@pytest.mark.parametrize(
    ("heads", "expected"), [(4, 100 * 8 * 96 * 4 + 2 * 300 * 8 * 72 * 2), (8, 100 * 8 * 96 * 4)]
)
def test_flash_attentions_backward_makes_wide_gradients_and_those_of_every_query_head(
    heads: int, expected: int
) -> None:
    q, k = (
        torch.empty(rows, n, 72, dtype=torch.bfloat16, device="meta") for rows, n in ((100, 8), (300, heads))
    )
    func = torch.ops.aten._flash_attention_backward.default
    assert CudaScratch().bytes_of(func, (q, q, k, k, q), {}, None) == expected
