"""What the table says that kernels take for themselves is what the CPU allocator hands out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelizer import torch_private
from parallelizer.simulate.record.kernel_scratch import LARGEST, Scratch

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def taken(func: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
    """What a call takes beside its results by the table, and by the allocator."""
    results: list[Any] = []
    total, top = 0, 0
    for change in torch_private.allocations(lambda: results.append(func(*args, **kwargs))):
        total += change
        top = max(top, total)
    result = results[0]
    known = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
    parts = result if isinstance(result, tuple) else (result,)
    made = sum(
        t.untyped_storage().nbytes()
        for t in parts
        if t is not None and t.untyped_storage()._cdata not in known
    )
    scratch = Scratch()
    scratch.bytes_of(func, args, kwargs, result)
    scratch.measure()
    return scratch.bytes_of(func, args, kwargs, result), top - made


@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2)]),
    rows=st.sampled_from([1, 7, 31, 32, 33, 191, 192, 200, 768]),
    more_keys=st.sampled_from([0, 1, 500]),
    size=st.sampled_from([4, 16, 40]),
    causal=st.booleans(),
)
def test_attention_forward_and_backward(
    dtype: torch.dtype, heads: tuple[int, int], rows: int, more_keys: int, size: int, causal: bool
) -> None:
    keys = rows if causal else rows + more_keys
    # As models have them: [batch, rows, heads, size], transposed.
    q, k, v = (
        torch.zeros(1, n, h, size, dtype=dtype).transpose(1, 2)
        for n, h in zip((rows, keys, keys), (heads[0], heads[1], heads[1]), strict=True)
    )
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    table, allocator = taken(forward, q, k, v, 0.0, causal, scale=1.0)
    assert table == allocator
    out, lse = forward(q, k, v, 0.0, causal, scale=1.0)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    for grad in (torch.zeros_like(out), torch.zeros(out.shape, dtype=dtype)):
        table, allocator = taken(backward, grad, q, k, v, out, lse, 0.0, causal, scale=1.0)
        assert table == allocator


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, *FLOATS])
def test_sums_in_another_dtype(dtype: torch.dtype) -> None:
    x = torch.ones(6, 50).to(dtype)
    for args, kwargs in (((), {}), ((), {"dtype": torch.float32}), ((), {"dtype": torch.float64})):
        table, allocator = taken(aten.sum.default, x, *args, **kwargs)
        assert table == allocator
    table, allocator = taken(aten.sum.dim_IntList, x, [0], dtype=torch.float32)
    assert table == allocator
    if dtype.is_floating_point:
        assert len(set(taken(aten.mean.dim, x, [-1], True))) == 1


@settings(max_examples=40, deadline=None)
@given(
    func=st.sampled_from([aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.div.Tensor]),
    left=st.sampled_from(FLOATS),
    right=st.sampled_from([*FLOATS, 2, 0.5]),
    small=st.booleans(),
)
def test_operands_of_two_dtypes_and_numbers(func: Any, left: torch.dtype, right: Any, small: bool) -> None:
    x = torch.ones(8, 100, dtype=left)
    other = (
        torch.ones((100,) if small else (8, 100), dtype=right) if isinstance(right, torch.dtype) else right
    )
    table, allocator = taken(func, x, other)
    assert table == allocator


@pytest.mark.parametrize("name", ["mul", "div", "add", "sub"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_where_the_operator_takes_one(name: str, dtype: torch.dtype) -> None:
    table, allocator = taken(getattr(aten, name).Scalar, torch.ones(50, dtype=dtype), 0.5)
    assert table == allocator


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    chunks=st.sampled_from([1, 2, 3, 4]),
    dtypes=st.tuples(
        st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([torch.float32, torch.bfloat16])
    ),
)
def test_gradients_on_their_way_to_the_data_ranks(
    rows: list[int], chunks: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    import torch.distributed.fsdp

    tensors = [torch.ones(n, 6, dtype=dtypes[0]) for n in rows]
    out = torch.empty(chunks, sum(-(-n // chunks) * 6 for n in rows), dtype=dtypes[1])
    results: list[Any] = []
    func = torch.ops.fsdp.chunk_cat.default
    total, top = 0, 0
    for change in torch_private.allocations(lambda: results.append(func(tensors, 0, chunks, out=out))):
        total += change
        top = max(top, total)
    assert Scratch().bytes_of(func, (tensors, 0, chunks), {"out": out}, None) == top


@pytest.mark.parametrize("transposed", [False, True])
def test_products_in_16_bits_are_watched(transposed: bool) -> None:
    a, b = torch.ones(64, 48, dtype=torch.bfloat16), torch.ones(32, 48, dtype=torch.bfloat16)
    left, right = (a, b.t()) if transposed else (a.t().contiguous().t(), b.t().contiguous())
    table, allocator = taken(aten.mm.default, left, right)
    assert table == allocator
    bias = torch.ones(32, dtype=torch.bfloat16)
    table, allocator = taken(aten.addmm.default, bias, left, right)
    assert table == allocator


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "strided", "depthwise", "transposed", "along a line", "pointwise"])
def test_convolutions_forward_and_backward(kind: str, dtype: torch.dtype) -> None:
    groups = 8 if kind == "depthwise" else 1
    dims = 1 if kind == "along a line" else 2
    transposed = kind == "transposed"
    x = torch.ones(2, 8, *([12] * dims), dtype=dtype)
    size = 1 if kind == "pointwise" else 3
    weight = torch.ones(8 if groups > 1 else 16, 8 // groups, *([size] * dims), dtype=dtype)
    weight = weight.transpose(0, 1).contiguous() if transposed else weight
    bias = torch.ones(weight.size(1 if transposed else 0), dtype=dtype)
    steps = [2 if kind in ("strided", "transposed") else 1] * dims
    form = (steps, [size // 2] * dims, [1] * dims, transposed, [0] * dims, groups)
    table, allocator = taken(aten.convolution.default, x, weight, bias, *form)
    assert table == allocator
    y = aten.convolution.default(x, weight, bias, *form)
    backward = aten.convolution_backward.default
    for grad in (torch.ones_like(y), y.new_ones(()).expand(y.shape)):
        for mask in ([True, True, True], [False, True, True]):
            table, allocator = taken(backward, grad, x, weight, [bias.numel()], *form, mask)
            assert table == allocator


X = torch.linspace(-1, 1, 2 * 8 * 6 * 6).view(2, 8, 6, 6)
ROW = torch.ones(8)
OTHERS: dict[str, tuple[Any, ...]] = {
    "sort": (aten.sort.default, X),
    "cumsum along the first dimension": (aten.cumsum.default, X, 0),
    "roll over two dimensions": (aten.roll.default, X, [1, 2], [2, 3]),
    "repeat": (aten.repeat.default, X, [2, 1, 1, 2]),
    "logsumexp": (aten.logsumexp.default, X, [1]),
    "standard deviation": (aten.std.correction, X),
    "spectrum": (aten._fft_r2c.default, X, [2], 0, True),
    "batch norm": (aten.native_batch_norm.default, X, ROW, ROW, None, None, True, 0.1, 1e-5),
    "gradient of batch norm": (
        aten.native_batch_norm_backward.default, X, X, ROW, None, None, ROW, ROW, True, 1e-5, [True, True, True],
    ),
    "gradient of group norm": (
        aten.native_group_norm_backward.default, X, X, torch.ones(2, 2), torch.ones(2, 2), ROW, 2, 8, 36, 2, [True] * 3,
    ),
    "gradient of layer norm": (
        aten.native_layer_norm_backward.default, X, X, [6], torch.ones(2, 8, 6, 1), torch.ones(2, 8, 6, 1), torch.ones(6),
        torch.ones(6), [True] * 3,
    ),
    "a larger image": (aten.upsample_bilinear2d.default, X, [12, 12], False),
    "rows by strided numbers": (aten.index_select.default, X, 0, torch.zeros(6, dtype=torch.int64)[::2]),
    "rows by a list of numbers": (aten.index.Tensor, X, [None, torch.tensor([1, 0])]),
    "a strided product": (aten.mm.default, torch.ones(8, 12)[:, ::2], torch.ones(6, 4)),
    "a value in place": (aten.index_put_.default, X.clone(), [torch.tensor([1])], ROW[:1]),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_operators_without_a_figure_are_watched(what: str) -> None:
    func, *args = OTHERS[what]
    table, allocator = taken(func, *args)
    assert table == allocator


def test_what_cannot_be_watched_is_named() -> None:
    scratch = Scratch()
    large = torch.empty(2048, 2048, device="meta")
    scratch.bytes_of(aten.sort.default, (large,), {}, large)
    scratch.bytes_of(aten.mm.default, (large, large), {}, large)  # dense and in 32 bits: nothing
    scratch.bytes_of(aten.cat.default, ([large, large],), {}, large)
    scratch.bytes_of(aten.t.default, (large,), {}, large.t())
    assert scratch.uncounted == {"sort"}
    scratch.bytes_of(aten.masked_select.default, (X, X > 0), {}, X)  # its size depends on values
    small = torch.ones(3, dtype=torch.float16)
    scratch.bytes_of(aten.cumsum.default, (small, 7), {}, small)  # there is no such dimension
    assert scratch.uncounted == {"sort", "masked_select", "cumsum"}
    scratch.measure()
    assert scratch.uncounted == {"sort", "masked_select", "cumsum"}
    assert scratch.bytes_of(aten.cumsum.default, (small, 7), {}, small) == 0


def test_a_product_counts_from_its_measurement_on_and_a_huge_one_never() -> None:
    scratch = Scratch()
    a = torch.ones(64, 64, dtype=torch.bfloat16)
    assert scratch.bytes_of(aten.mm.default, (a, a), {}, a) == 0
    assert len(scratch.unknown) == 1
    side = int(LARGEST**0.5)
    huge = torch.empty(side, side, dtype=torch.bfloat16, device="meta")
    assert scratch.bytes_of(aten.mm.default, (huge, huge), {}, huge) == 0
    assert len(scratch.unknown) == 1
    scratch.measure()
    assert not scratch.unknown and len(scratch.watched) == 1
    assert scratch.uncounted == {"mm"}


def test_products_in_32_bits_and_plain_copies_take_nothing() -> None:
    a = torch.ones(64, 64)
    for func, args in (
        (aten.mm.default, (a, a)),
        (aten.clone.default, (a,)),
        (aten.silu.default, (a,)),
        (aten.cat.default, ([a, a],)),
    ):
        assert taken(func, *args) == (0, 0)
