"""Cross entropy of logits that lie sharded over the vocabulary, against torch's on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from parallelizer import cross_entropy
from parallelizer.styles import sharded_logits
from parallelizer.styles.sharded_logits import plain, taken_sharded
from parallelizer.torch_private import TorchDispatchMode, tree_leaves
from tests.ranks import run_ranks

IGNORED = -100
NONE_VALID = [IGNORED] * 6


def given(columns: int, labels: list[int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits [2, 3, columns], large ones among them, and labels [2, 3]."""
    logits = torch.randn(2, 3, columns, generator=torch.Generator().manual_seed(columns), dtype=torch.float64)
    logits[0, 1] *= 300  # exp overflows without the maximum
    logits[1, 0, : columns // 2] = -torch.inf  # as a mask over a padded vocabulary leaves it
    return logits.to(dtype), torch.tensor(labels).view(2, 3)


def expected(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Torch's own loss and gradient, computed wide."""
    wide = logits.double().requires_grad_()
    total = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    total.backward()
    assert wide.grad is not None
    return total.detach(), wide.grad


CASES = [
    (columns, labels, dtype)
    for columns in (8, 7, 3, 1)  # over three ranks: uneven, and ranks without a column
    for labels in ([0, columns - 1, IGNORED, columns - 1, columns // 2, IGNORED], NONE_VALID)
    for dtype in (torch.float64, torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_vocabulary_and_dtype_gives_the_loss_and_gradient_of_one_process(ranks: int) -> None:
    def worker() -> None:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        for columns, labels, dtype in CASES:
            logits, targets = given(columns, labels, dtype)
            loss, gradient = expected(logits, targets)
            leaf = distribute_tensor(logits, mesh, [Shard(-1)]).requires_grad_()
            total = cross_entropy(leaf, targets)
            total.backward()
            assert not isinstance(total, DTensor)
            assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            exact = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-6}[dtype]
            assert torch.allclose(total.double(), loss, rtol=exact, atol=exact)
            assert isinstance(leaf.grad, DTensor) and leaf.grad.dtype == dtype
            exact = 4e-3 if dtype == torch.bfloat16 else exact  # gradients travel in the logits' dtype
            assert torch.allclose(leaf.grad.full_tensor().double(), gradient, rtol=exact, atol=exact)

    run_ranks(worker, ranks)


@pytest.mark.parametrize(
    "piece", [1, 14, 16, 2**26]
)  # logits: more pieces than rows, uneven pieces, even ones, one
def test_computed_in_pieces_the_loss_and_gradient_are_those_of_all_at_once(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_logits, "PIECE", piece)

    def worker() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for columns, labels, dtype in CASES:
            logits, targets = given(columns, labels, dtype)
            loss, gradient = expected(logits, targets)
            for leaf in (
                logits.detach().clone().requires_grad_(),
                distribute_tensor(logits.detach(), mesh, [Shard(-1)]).requires_grad_(),
            ):
                total = cross_entropy(leaf, targets)
                (total / 8).backward()
                exact = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-6}[dtype]
                assert torch.allclose(total.double(), loss, rtol=exact, atol=exact)
                assert leaf.grad is not None
                exact = 4e-3 if dtype == torch.bfloat16 else exact
                assert torch.allclose(plain(leaf.grad).double(), gradient / 8, rtol=exact, atol=exact)

    run_ranks(worker, 2)


@pytest.mark.parametrize("sharded", [False, True])
def test_in_16_bits_no_tensor_of_all_logits_is_made_in_float32(
    sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A rank's own logits are as large with either; between its pieces stand all-reduces of a number for each token.
    monkeypatch.setattr(sharded_logits.dist, "all_reduce", lambda *args, **kwargs: None)
    tokens = torch.zeros(2**10, dtype=torch.int64, device="meta")
    logits = torch.zeros(2**10, 2**17, dtype=torch.bfloat16, device="meta", requires_grad=True)

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.dtype == torch.float32:
                    self.bytes = max(self.bytes, leaf.nbytes)
            return result

    with Largest() as forward:
        if sharded:
            loss = sharded_logits._VocabularyParallel.apply(logits, tokens, 0, 2**18, IGNORED, None)
        else:
            loss = cross_entropy(logits, tokens)
    with Largest() as backward:
        loss.backward()
    assert forward.bytes == backward.bytes == 4 * sharded_logits.PIECE == logits.nbytes


def test_logits_that_lie_otherwise_are_laid_out_first() -> None:
    logits, targets = given(8, [1, IGNORED, 7, 4, 5, 4])
    loss, gradient = expected(logits, targets)
    ways: list[list[Placement]] = [
        [Replicate(), Shard(2)], [Shard(2), Replicate()], [Shard(0), Shard(2)], [Shard(1), Shard(0)],
        [Replicate(), Replicate()], [Shard(2), Shard(2)], [Replicate(), Partial()],
    ]  # fmt: skip

    def worker() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp_outer", "tp"))
        for way in ways:
            leaf = distribute_tensor(logits, mesh, [Replicate(), Replicate()]).requires_grad_()
            if any(isinstance(p, Partial) for p in way):
                local = leaf.to_local() / 2
                lying = DTensor.from_local(local, mesh, way, run_check=False)
            else:
                lying = leaf.redistribute(placements=way)
            total = cross_entropy(lying, targets)
            total.backward()
            assert leaf.grad is not None
            if not any(isinstance(p, Partial) for p in way):
                assert torch.allclose(plain(leaf.grad), gradient, rtol=1e-14, atol=1e-14), way
            assert torch.allclose(total, loss.where(loss.isfinite(), loss), rtol=1e-14), way

    run_ranks(worker, 4)


def test_a_label_that_is_no_column_is_refused_as_torch_refuses_it() -> None:
    logits, targets = given(8, [8, 0, 0, 0, 0, 0])
    with pytest.raises(IndexError, match="out of bounds"):
        cross_entropy(logits, targets)

    def worker() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for wrong in (8, -1):
            targets[0, 0] = wrong
            with pytest.raises(RuntimeError, match="a label is no column of the logits"):
                cross_entropy(distribute_tensor(logits, mesh, [Shard(-1)]), targets)

    run_ranks(worker, 2)


def test_a_loss_of_torchs_own_takes_sharded_logits_inside() -> None:
    logits, targets = given(7, [1, IGNORED, 6, 4, 5, 4])
    logits[1, 0] = 0.5
    loss, gradient = expected(logits, targets)

    def worker() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        leaf = distribute_tensor(logits, mesh, [Shard(-1)]).requires_grad_()
        with taken_sharded(leaf):
            total = plain(F.cross_entropy(leaf.flatten(0, 1), targets.flatten(), reduction="sum"))
            total.backward()
        assert isinstance(leaf.grad, DTensor)
        assert torch.allclose(total, loss, rtol=1e-14)
        assert torch.allclose(leaf.grad.full_tensor(), gradient, rtol=1e-14, atol=1e-14)

    run_ranks(worker, 2)
