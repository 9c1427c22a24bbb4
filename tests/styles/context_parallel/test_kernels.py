from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from parallelizer.styles.context_parallel import efficient, kernels
from parallelizer.styles.context_parallel.kernels import block_backward, block_forward, merge
from tests.styles.context_parallel.reference import plain_attention, relative_error

SCALE = 0.3
SHAPES = [  # heads, kv heads, queries, keys, size of q and k, size of v, causal
    (4, 4, 7, 7, 8, 8, True),
    (4, 2, 7, 21, 8, 8, False),
    (8, 1, 33, 33, 5, 5, True),
    (8, 1, 3, 600, 16, 16, False),
    (4, 2, 6, 9, 8, 5, False),
    (4, 2, 6, 6, 8, 12, True),
]
Forward = Callable[..., Any]


def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    heads, kv_heads, rows, columns, size, v_size, _ = shape
    torch.manual_seed(0)
    sizes = [
        (heads, rows, size),
        (kv_heads, columns, size),
        (kv_heads, columns, v_size),
        (heads, rows, v_size),
    ]
    return tuple(torch.randn(2, *s).to(dtype) for s in sizes)


def expected(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    q, k, v, grad_out = tensors(shape, dtype)
    inputs: Any = [t.double().clone().requires_grad_() for t in (q, k, v)]
    out, lse = plain_attention(*inputs, is_causal=bool(shape[-1]), scale=SCALE)
    return (out, lse, *torch.autograd.grad(out, inputs, grad_out.double()))


def plain_forward(q: Any, k: Any, v: Any, *, is_causal: bool, scale: float) -> Any:
    return kernels._plain_forward(q, k, v, is_causal, scale)


def plain_backward(grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **how: Any) -> Any:
    return kernels._plain_backward(grad_out, q, k, v, out, lse, **how)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("forward", "backward"),
    [(block_forward, block_backward), (plain_forward, plain_backward)],
    ids=["chosen", "plain"],
)
def test_block_equals_plain_attention(
    forward: Forward, backward: Forward, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    q, k, v, grad_out = tensors(shape, dtype)
    how: Any = {"is_causal": bool(shape[-1]), "scale": SCALE}
    out, lse = forward(q, k, v, **how)
    grads = backward(grad_out, q, k, v, out, lse, **how)
    assert [t.dtype for t in (out, *grads)] == [dtype] * 4
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    bound = {torch.float64: 1e-14, torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for value, right in zip((out, lse, *grads), expected(shape, dtype), strict=True):
        assert relative_error(value, right) < bound


@pytest.mark.parametrize("keys", [[5, 7], [1, 3, 2, 6], [12]])
@pytest.mark.parametrize("plain", [False, True])
def test_blocks_merge_to_the_whole_and_their_gradients_add_up(keys: list[int], plain: bool) -> None:
    shape = (4, 2, 7, 12, 8, 8, False)
    forward, backward = (plain_forward, plain_backward) if plain else (block_forward, block_backward)
    q, k, v, grad_out = tensors(shape, torch.float64)
    pieces = list(zip(k.split(keys, dim=2), v.split(keys, dim=2), strict=True))
    out, lse = forward(q, *pieces[0], is_causal=False, scale=SCALE)
    for piece in pieces[1:]:
        out, lse = merge(out, lse, *forward(q, *piece, is_causal=False, scale=SCALE))
    grads = [backward(grad_out, q, *piece, out, lse, is_causal=False, scale=SCALE) for piece in pieces]
    grad_q, grad_k, grad_v = zip(*grads, strict=True)
    merged = (out, lse, sum(grad_q), torch.cat(grad_k, dim=2), torch.cat(grad_v, dim=2))
    for value, right in zip(merged, expected(shape, torch.float64), strict=True):
        assert relative_error(value, right) < 1e-14


def test_merge_survives_large_far_apart_and_empty_sides() -> None:
    ones, twos = torch.ones(1, 1, 1, 2), torch.full((1, 1, 1, 2), 2.0)

    def lse(value: float) -> torch.Tensor:
        return torch.full((1, 1, 1), value)

    nothing = float("-inf")
    for a, b, out, total in [
        (1e4, -1e4, 1.0, 1e4),
        (-1e4, 1e4, 2.0, 1e4),
        (3e38, 3e38, 1.5, 3e38),
        (nothing, 5.0, 2.0, 5.0),
        (5.0, nothing, 1.0, 5.0),
        (nothing, nothing, 1.5, nothing),
    ]:
        merged, merged_lse = merge(ones, lse(a), twos, lse(b))
        assert torch.equal(merged, torch.full_like(merged, out))
        assert torch.equal(merged_lse, lse(total))


def test_merge_of_low_precision_is_kept_in_float32() -> None:
    out, lse = merge(*[torch.ones(1, 1, 1, 2, dtype=torch.bfloat16), torch.zeros(1, 1, 1)] * 2)
    assert out.dtype == lse.dtype == torch.float32


def test_any_strides_are_read_right() -> None:
    shape = (4, 2, 7, 7, 8, 8, True)
    q, k, v, _ = tensors(shape, torch.float64)
    how: Any = {"is_causal": True, "scale": SCALE}
    out, lse = block_forward(q, k, v, **how)
    scalar = torch.ones((), dtype=torch.float64).expand_as(out)
    right = block_backward(scalar.contiguous(), q, k, v, out, lse, **how)
    heads_last: Any = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    size_first: Any = [t.transpose(1, 3).contiguous().transpose(1, 3) for t in (q, k, v)]
    for inputs in (heads_last, size_first):
        values: Any = block_forward(*inputs, **how)
        grads = block_backward(scalar, *inputs, *values, **how)
        for value, expected_value in zip((*values, *grads), (out, lse, *right), strict=True):
            assert relative_error(value, expected_value) < 1e-14


def test_autocast_does_not_reach_into_a_block() -> None:
    shape = (4, 2, 7, 9, 8, 5, False)  # two head sizes: the plain path
    q, k, v, grad_out = tensors(shape, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = block_forward(q, k, v, is_causal=False, scale=SCALE)
        grads = block_backward(grad_out, q, k, v, out, lse, is_causal=False, scale=SCALE)
    for value, right in zip((out, lse, *grads), expected(shape, torch.float32), strict=True):
        assert relative_error(value, right) < 3e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [8, 5, 264])
@pytest.mark.parametrize("v_size", [None, 16])
@pytest.mark.parametrize("device", ["meta", "fake cpu", "fake cuda"])
def test_shapes_are_known_without_data(
    device: str, size: int, v_size: int | None, dtype: torch.dtype
) -> None:
    def shapes() -> list[Any]:
        where = device.removeprefix("fake ")
        q = torch.empty(2, 4, 6, size, dtype=dtype, device=where)
        k = torch.empty(2, 2, 12, size, dtype=dtype, device=where)
        v = torch.empty(2, 2, 12, v_size or size, dtype=dtype, device=where)
        out, lse = block_forward(q, k, v, is_causal=False, scale=SCALE)
        grads = block_backward(out, q, k, v, out, lse, is_causal=False, scale=SCALE)
        merged, _ = merge(out, lse, out, lse)
        return [(tuple(t.shape), t.dtype, t.device.type) for t in (out, lse, *grads, merged)]

    with FakeTensorMode() if device.startswith("fake") else contextlib.nullcontext():
        result = shapes()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v, out = (2, 4, 6, size), (2, 2, 12, size), (2, 2, 12, v_size or size), (2, 4, 6, v_size or size)
    kinds = [(out, dtype), ((2, 4, 6), wide), (q, dtype), (k, dtype), (v, dtype), (out, wide)]
    assert result == [(*kind, device.removeprefix("fake ")) for kind in kinds]


HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)


@pytest.mark.parametrize(
    ("generation", "dtype", "sizes", "masked", "kernel"),
    [
        (HOPPER, torch.bfloat16, (128, 128), False, "cudnn"),
        (HOPPER, torch.float16, (192, 128), False, "cudnn"),
        (HOPPER, torch.bfloat16, (256, 256), False, "cudnn"),
        (HOPPER, torch.bfloat16, (264, 264), False, "efficient"),
        (HOPPER, torch.bfloat16, (68, 68), False, "efficient"),
        (HOPPER, torch.bfloat16, (66, 66), False, "plain"),
        (HOPPER, torch.bfloat16, (128, 128), True, "efficient"),
        (HOPPER, torch.float32, (128, 128), False, "efficient"),
        (HOPPER, torch.float64, (128, 128), False, "plain"),
        (HOPPER, torch.float64, (128, 128), True, "plain"),
        (None, torch.bfloat16, (128, 128), False, "cudnn"),  # planned on a machine without a GPU
        (AMPERE, torch.bfloat16, (128, 128), False, "flash"),
        (AMPERE, torch.float16, (192, 128), False, "efficient"),
        (AMPERE, torch.bfloat16, (128, 128), True, "efficient"),
        ((12, 0), torch.bfloat16, (128, 128), False, "flash"),
        (TURING, torch.float16, (128, 128), False, "efficient"),
    ],
)
def test_on_cuda_a_block_takes_the_fastest_kernel_that_its_device_has(
    generation: tuple[int, int] | None,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    masked: bool,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeTensorMode():
        q, v = (torch.empty(2, 4, 6, size, dtype=dtype, device="cuda") for size in sizes)
        mask = torch.empty(1, 1, 6, 6, device="cuda") if masked else None
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: generation is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: generation)
    assert kernels._kernel(q, v, mask) == kernel
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    without = "efficient" if sizes == (192, 128) else "flash"
    assert kernels._kernel(q, v, mask) == (without if kernel == "cudnn" else kernel)


def test_planned_for_cuda_blocks_of_a_cpu_store_what_those_of_cuda_store() -> None:
    half, wide, double = (
        torch.empty(2, 4, 6, 64, dtype=t) for t in (torch.bfloat16, torch.float32, torch.float64)
    )
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    with efficient.planned():
        assert kernels._kernel(half, half, mask) == "efficient"
        assert kernels._kernel(wide, wide, None) == "efficient"
        assert (
            kernels._kernel(half, half, None) == "cpu"
        )  # whose results are those of cuDNN and FlashAttention
        assert kernels._kernel(double, double, mask) == "cpu"  # CUDA has no kernel
    assert kernels._kernel(half, half, mask) == kernels._kernel(wide, wide, None) == "cpu"
