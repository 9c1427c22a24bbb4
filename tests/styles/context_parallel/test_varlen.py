"""Sequences of several lengths, one after another, against each of them alone in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallelizer import torch_private
from parallelizer.styles.context_parallel import varlen
from parallelizer.styles.context_parallel.varlen import Sequences
from tests.styles.context_parallel.reference import masked_scores, relative_error

Tensor = torch.Tensor
QUERIES, KEYS = (3, 1, 4, 1), (3, 5, 9, 1)


def sequences(queries: tuple[int, ...] = QUERIES, keys: tuple[int, ...] = KEYS) -> Sequences:
    begins = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (queries, keys)]
    return Sequences(queries, keys, *begins)


def inputs(dtype: torch.dtype, groups: int, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(groups)
    shapes = [(sum(QUERIES), 4), (sum(KEYS), 4 // groups), (sum(KEYS), 4 // groups), (sum(QUERIES), 4)]
    return [torch.randn(*shape, size, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def defined(
    q: Tensor, k: Tensor, v: Tensor, begins: tuple[Tensor, Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """out and lse in float64, sequence by sequence; a query sees the keys up to as many before the last as there are queries
    behind it.
    """
    outs, lses = [], []
    for (a, b), (c, d) in zip(*(zip(x.tolist(), x.tolist()[1:], strict=False) for x in begins), strict=True):
        one = [t.double().transpose(0, 1).unsqueeze(0) for t in (q[a:b], k[c:d], v[c:d])]
        behind = (b - a) - 1 - torch.arange(b - a)
        mask = torch.arange(d - c) <= (d - c) - 1 - behind.unsqueeze(1)
        scores = masked_scores(one[0], one[1], mask=mask, is_causal=False, scale=scale)
        values = one[2].repeat_interleave(q.size(1) // k.size(1), dim=1)
        outs.append((scores.softmax(-1) @ values)[0].transpose(0, 1))
        lses.append(scores.logsumexp(-1)[0])
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_outputs_and_gradients_are_those_of_each_sequence_alone(
    dtype: torch.dtype, bound: float, groups: int
) -> None:
    q, k, v, grad = inputs(dtype, groups)
    of, scale = sequences(), 0.3
    out, lse = varlen.forward(q, k, v, of, scale)
    grads = varlen.backward(grad, q, k, v, out, lse, of, scale)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    right, right_lse = defined(*leaves, (of.query_begins, of.key_begins), scale)
    rights = torch.autograd.grad(right, leaves, grad.double())
    assert out.dtype == dtype and out.shape == right.shape
    for found, expected in zip((out, lse, *grads), (right, right_lse, *rights), strict=True):
        assert relative_error(found, expected.detach()) < bound


def test_cudas_kernel_gets_the_begins_the_longest_and_never_one_query_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []

    def kernel(*args: Any) -> tuple[Tensor, Tensor]:
        *tensors, query_begins, key_begins, longest, scale = args
        given.append((query_begins.tolist(), key_begins.tolist(), longest))
        return defined(tensors[0], tensors[1], tensors[2], (query_begins, key_begins), scale)

    monkeypatch.setattr(varlen, "takes_flash", lambda q, v: True)
    monkeypatch.setattr(torch_private, "flash_attention_of_sequences", kernel)
    q, k, v, _ = inputs(torch.float64, 2)
    found = varlen.forward(q, k, v, sequences(), 0.3)
    monkeypatch.undo()
    for a, b in zip(found, varlen.forward(q, k, v, sequences(), 0.3), strict=True):
        assert relative_error(a, b) < 1e-14
    assert given == [([0, 3, 4, 8, 9], [0, 3, 8, 17, 18], (4, 9))]
    assert sequences((1, 1), (5, 3)).longest() == (2, 5)


@pytest.mark.parametrize("size", [8, 64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_dry_run_in_16_bits_sees_one_call_of_cudas_kernel(dtype: torch.dtype, size: int) -> None:
    q, k, v, grad = (t.to("meta") for t in inputs(dtype, 2, size))
    seen: list[str] = []

    class Watch(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    of = sequences()
    with Watch():
        out, lse = varlen.forward(q, k, v, of, 0.3)
        grads = varlen.backward(grad, q, k, v, out, lse, of, 0.3)
    assert [name for name in seen if "attention" in name] == [
        "aten::_flash_attention_forward",
        "aten::_flash_attention_backward",
    ]
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (4, sum(QUERIES)), torch.float32)
    assert [t.shape for t in grads] == [q.shape, k.shape, v.shape]
