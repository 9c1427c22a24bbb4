"""A mask without elements: attention is that under the mask and makes nothing of its size, and all else sees the mask."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelizer import torch_private
from parallelizer.runtime.pipeline.microbatches import microbatches
from parallelizer.styles.context_parallel.buffers import shard_tokens
from parallelizer.styles.context_parallel.dealing import by_cost, document_mask, per_document
from parallelizer.styles.context_parallel.document_mask import DocumentMask, dense, made
from parallelizer.styles.context_parallel.masked import attend
from parallelizer.styles.context_parallel.order import Contiguous, Order, padded
from tests.parity import plan
from tests.styles.context_parallel.reference import masked_attention, relative_error

Tensor = torch.Tensor
CPU = torch.device("cpu")
BUFFERS = "buffers: {batch: {ids: {dim: 1, documents: true}, mask: document-mask}}"


def documents(batch: int, rows: int, seed: int = 0, most: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, most, (batch, rows), generator=generator).sort(1).values


def inputs(batch: int, rows: int, keys: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries of four heads, keys and values of two, and a gradient."""
    generator = torch.Generator().manual_seed(rows)
    shapes = ((4, rows), (2, keys), (2, keys), (4, rows))
    return [
        torch.randn(batch, heads, length, 8, dtype=torch.float64, generator=generator).to(dtype)
        for heads, length in shapes
    ]


def compared(found: Tensor, leaves: list[Tensor], grad: Tensor, mask: Tensor, bound: float) -> None:
    wide = [t.detach().double().requires_grad_() for t in leaves]
    right = masked_attention(*wide, mask=mask, is_causal=False, scale=0.3)
    pairs = zip(
        (found, *torch.autograd.grad(found, leaves, grad)),
        (right, *torch.autograd.grad(right, wide, grad.double())),
        strict=True,
    )
    # A gradient may be 0: a row that sees one key has no gradient by its query.
    assert all(float((a.double() - b).detach().norm() / (1 + b.detach().norm())) < bound for a, b in pairs)


@settings(deadline=None)  # the machine may be busy
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(0, 999))
def test_every_ranks_outputs_and_gradients_are_those_under_the_mask_in_every_order(
    ranks: int, batch: int, real: int, seed: int
) -> None:
    ids = documents(batch, real, seed)
    rows = -(-real // (2 * ranks)) * 2 * ranks
    cost = padded(document_mask(ids, torch.arange(real)), 2, rows).sum((0, 1, 3))
    for order in (
        Order(ranks, real), Contiguous(ranks, real), per_document(padded(ids, 1, rows), ranks, real),
        by_cost(cost, ranks, real),
    ):  # fmt: skip
        for rank in range(ranks):
            mask = made(ids, order.positions(rows, rank), CPU)
            assert isinstance(mask, DocumentMask)
            *leaves, grad = inputs(batch, rows // ranks, real)
            leaves = [t.requires_grad_() for t in leaves]
            out = attend(*leaves, mask=mask, is_causal=False, scale=0.3)
            compared(out, leaves, grad, document_mask(ids, order.positions(rows, rank)), 1e-13)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_torchs_own_attention_function_computes_the_same(dtype: torch.dtype, bound: float) -> None:
    ids = documents(2, 33)
    *leaves, grad = inputs(2, 33, 33, dtype)
    leaves = [t.requires_grad_() for t in leaves]
    mask = made(ids, torch.arange(33), CPU)
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, scale=0.3, enable_gqa=True)
    compared(out, leaves, grad, document_mask(ids, torch.arange(33)), bound)
    assert isinstance(mask, DocumentMask) and mask._dense is None


class Largest(torch_private.TorchDispatchMode):
    """The bytes of the largest tensor that an operator makes, and the operators whose results the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.reads = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(torch_private.is_made_of_tensors, types)):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.reads += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        for tensor in torch_private.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kernel", ["blocks", "cuda's in a dry run"])
def test_nothing_is_larger_than_the_keys_and_the_host_reads_nothing(
    ranks: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 1024
    ids = documents(1, rows)
    mask = made(ids, per_document(ids, ranks).positions(rows, 0), CPU)
    dtype = torch.float32
    if kernel != "blocks":
        mask, dtype = (
            made(ids.to("meta"), per_document(ids, ranks).positions(rows, 0), torch.device("meta")),
            torch.bfloat16,
        )
    assert isinstance(mask, DocumentMask)
    mask.calls()  # reads the documents, on the host

    def read(*_: Any) -> Any:
        raise AssertionError("the host reads a tensor")

    monkeypatch.setattr(Tensor, "tolist", read)
    *leaves, grad = (t.to(mask.device, dtype) for t in inputs(1, rows // ranks, rows))
    leaves = [t.requires_grad_() for t in leaves]
    with Largest() as largest:
        out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
        torch.autograd.grad(out, leaves, grad)
    # Queries of four heads of eight float32 numbers. The mask would have 1 MiB, and its bias in bfloat16 2 MiB.
    assert largest.bytes <= rows * 4 * 8 * 4 and largest.reads == 0
    assert mask._dense is None


def test_all_else_sees_the_elements_and_cannot_write_into_them() -> None:
    ids = documents(2, 9)
    mask, right = made(ids, torch.arange(9), CPU), document_mask(ids, torch.arange(9))
    assert mask.shape == right.shape and mask.dtype == right.dtype and mask.device == right.device
    assert (
        torch.equal(mask & True, right) and torch.equal(~mask, ~right) and int(mask.sum()) == int(right.sum())
    )
    assert torch.equal(mask[1, 0, 3:5], right[1, 0, 3:5])
    assert dense(mask) is dense(mask)
    for write in (lambda: mask.logical_not_(), lambda: torch.logical_not(right, out=mask)):
        with pytest.raises(TypeError, match="writes into a DocumentMask"):
            write()
    scores = torch.zeros(2, 1, 9, 9)
    assert torch.equal(scores.masked_fill_(mask, 1.0), right.float())


@pytest.mark.parametrize(
    "write",
    [
        lambda mask: mask[:, :, :, 0].fill_(True),
        lambda mask: mask.squeeze(1)[1].fill_(True),
        lambda mask: mask[:, :, :3].logical_not_(),
        lambda mask: mask.view(-1)[:6].fill_(True),
    ],
)
def test_what_is_written_through_a_view_counts(write: Any) -> None:
    ids, at = documents(2, 9), torch.arange(9)
    mask, right = made(ids, at, CPU), document_mask(ids, at)
    write(mask)
    write(right)
    q, k, v = torch.randn(3, 2, 1, 9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, right))


def test_a_mask_is_that_of_the_documents_when_it_was_made() -> None:
    ids, at = documents(2, 9), torch.arange(9)
    mask, right = made(ids, at, CPU), document_mask(ids, at)
    ids.fill_(0)
    assert torch.equal(dense(mask), right)


@pytest.mark.parametrize(
    "made_twice",
    [
        lambda mask: pickle.loads(pickle.dumps(mask)),
        lambda mask: mask.to("meta").to("cpu"),
        copy.deepcopy,
        lambda mask: mask.detach().clone(),
        lambda mask: mask[:, :, :, :16],
    ],
)
def test_copies_and_rows_of_the_batch_have_no_elements_either(made_twice: Any) -> None:
    ids = documents(4, 16)
    order = per_document(ids, 2)
    mask = made_twice(made(ids, order.positions(16, 1), CPU))
    right = document_mask(ids, order.positions(16, 1))
    part = mask.narrow(0, 1, 2)
    assert isinstance(mask, DocumentMask) and isinstance(part, DocumentMask)
    assert torch.equal(dense(mask), right) and torch.equal(dense(part), right[1:3])
    shared = made(ids, torch.arange(16), CPU)[2:]
    assert isinstance(shared, DocumentMask) and shared.shape == (2, 1, 16, 16)


def test_microbatches_share_nothing_of_a_masks_size() -> None:
    rules = plan(f'rules: {{"": fsdp}}\n{BUFFERS}')
    batch = shard_tokens({"ids": documents(4, 8)}, rules, None)
    parts = microbatches(batch, rules, 2)
    assert [type(part["mask"]) for part in parts] == [DocumentMask, DocumentMask]
    assert torch.equal(torch.cat([dense(part["mask"]) for part in parts]), dense(batch["mask"]))


def test_documents_that_go_on_later_and_compiled_plans_get_a_mask_with_elements() -> None:
    later = torch.tensor([[0, 1, 0, 1]])
    mask = shard_tokens({"ids": later}, plan(f'rules: {{"": fsdp}}\n{BUFFERS}'), None)["mask"]
    assert type(mask) is Tensor and torch.equal(mask, document_mask(later, torch.arange(4)))
    compiled = shard_tokens({"ids": documents(1, 4)}, plan(f'rules: {{"": compile}}\n{BUFFERS}'), None)[
        "mask"
    ]
    assert type(compiled) is Tensor


@pytest.mark.parametrize("what", ["dropout", "heads that are broadcast"])
def test_what_the_calls_cannot_say_is_left_to_torch_under_the_mask(what: str) -> None:
    mask, (q, k, v, _) = made(documents(1, 8), torch.arange(8), CPU), inputs(1, 8, 8)
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    right: dict[str, Any] = {}
    if what == "dropout":
        right = {"dropout_p": 0.5}
    else:
        q = q[:, :1]
    found = []
    for given_mask in (mask, dense(mask)):
        torch.manual_seed(0)
        found.append(F.scaled_dot_product_attention(q, k, v, attn_mask=given_mask, **right))
    assert torch.equal(*found)


def test_compiled_code_makes_the_mask_where_it_reads_it() -> None:
    ids = documents(2, 8)
    leaves = inputs(2, 8, 8)[:3]

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True) * 2

    mask = made(ids, torch.arange(8), CPU)
    found = torch.compile(function, backend="aot_eager", fullgraph=True)(*leaves, mask)
    right = (
        masked_attention(*leaves, mask=document_mask(ids, torch.arange(8)), is_causal=False, scale=0.3) * 2
    )
    assert relative_error(found, right) < 1e-14
