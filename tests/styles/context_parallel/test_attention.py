"""Every case runs in one start of four ranks, on the sub-groups of its first one to four; the tests look
results up."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from parallelizer.styles.context_parallel import balance
from parallelizer.styles.context_parallel.attention import context_attention
from parallelizer.styles.context_parallel.gathering import (
    backward_blocks,
    forward_blocks,
    gather,
    scatter_sum,
)
from parallelizer.styles.context_parallel.order import Order
from parallelizer.styles.context_parallel.ulysses import fits
from tests.ranks import run_ranks
from tests.styles.context_parallel.reference import plain_attention, relative_error

Tensor = torch.Tensor

RANKS = (1, 2, 3, 4)
HEADS = ((4, 4), (4, 2), (8, 1))
CAUSAL = (True, False)
METHODS = ("ring", "ulysses", "ulysses-ring")
"""The other methods. Under four ranks the last is one of the others for two key heads."""
NAMES = ("out", "lse", "grad_q", "grad_k", "grad_v")
SIZE = 8
SCALE = SIZE**-0.5

pytestmark = pytest.mark.ranks


def draw(seed: int, heads: tuple[int, int], seq_len: int, v_size: int = SIZE) -> Any:
    """q, k, v and a gradient of the output, in float64, the same on every rank; sizes of neighbours
    differ."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads[0], SIZE), (heads[1], SIZE), (heads[1], v_size), (heads[0], v_size)]
    return [torch.randn(2, n, seq_len, size, generator=generator).double() for n, size in shapes]


def whole(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, *, is_causal: bool = True) -> Any:
    """out, lse and the gradients of the unsplit sequence."""
    inputs: Any = [t.double().clone().requires_grad_() for t in (q, k, v)]
    out, lse = plain_attention(*inputs, is_causal=is_causal, scale=SCALE)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, grad_out.double())]


class Local:
    """One rank's part of a case: splits tensors, runs attention forward and backward."""

    def __init__(self, group: dist.ProcessGroup, method: str = "all-gather") -> None:
        self.method = method
        self.group, self.ranks, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def split(self, tensor: Tensor) -> Tensor:
        return balance.split(tensor, 2, self.ranks, self.rank)

    def inputs(self, *tensors: Tensor) -> Any:
        return [self.split(t).detach().clone().requires_grad_() for t in tensors]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True, **options: Any) -> Tensor:
        return context_attention(
            q, k, v, group=self.group, is_causal=is_causal, method=self.method, **options
        )

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, *, is_causal: bool = True, **options: Any
    ) -> Any:
        inputs = self.inputs(q, k, v)
        out = self.attention(*inputs, is_causal=is_causal, **options)
        return [out.detach(), *torch.autograd.grad(out, inputs, self.split(grad_out))]

    def lse(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        q, k, v = (self.split(t) for t in (q, k, v))
        plan = balance.blocks(q.size(2), self.ranks, self.rank, is_causal=is_causal)
        return forward_blocks(q, *gather(k, v, self.group, Order(self.ranks)), plan, SCALE)[1]


def float64_errors(
    local: Local, is_causal: bool, heads: tuple[int, int], v_size: int = SIZE
) -> dict[str, float]:
    tensors = draw(0, heads, 2 * local.ranks * 5, v_size)
    out, *grads = local.run(*tensors, is_causal=is_causal)
    values = (out, local.lse(*tensors[:3], is_causal=is_causal), *grads)
    rights = whole(*tensors, is_causal=is_causal)
    return {n: relative_error(a, local.split(b)) for n, a, b in zip(NAMES, values, rights, strict=True)}


def low_precision_errors(
    local: Local, dtype: torch.dtype, is_causal: bool, heads: tuple[int, int]
) -> list[Any]:
    """Per tensor: the squared error of this rank's rows, and the unsharded kernel's squared error over all
    rows."""
    q, k, v, grad_out = (t.to(dtype) for t in draw(1, heads, 2 * local.ranks * 33))
    values = local.run(q, k, v, grad_out, is_causal=is_causal)
    inputs: Any = [t.clone().requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(
        inputs[0], inputs[1], inputs[2], is_causal=is_causal, enable_gqa=True
    )
    unsharded = [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]
    right, _, *right_grads = whole(q, k, v, grad_out, is_causal=is_causal)
    return [
        (
            value.dtype == dtype,
            (value.double() - local.split(r)).square().sum().item(),
            (one.double() - r).square().sum().item(),
        )
        for value, one, r in zip(values, unsharded, [right, *right_grads], strict=True)
    ]


def checkpointed(local: Local) -> dict[str, bool]:
    """Whether gradients under each kind of activation checkpoint equal, bit by bit, those without."""
    q, k, v, grad_out = draw(2, (4, 2), 8 * local.ranks)
    plain = local.run(q, k, v, grad_out)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def save_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op == kernel else CheckpointPolicy.PREFER_RECOMPUTE

    def same(**options: Any) -> bool:
        inputs = local.inputs(q, k, v)
        out = checkpoint(partial(local.attention, is_causal=True), *inputs, **options)
        values = [out.detach(), *torch.autograd.grad(out, inputs, local.split(grad_out))]
        return all(map(torch.equal, values, plain))

    def saved(attention: Any) -> list[Any]:
        tensors: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            attention(*local.inputs(q, k, v), is_causal=True)
        return sorted(t.shape for t in tensors)

    unsharded = partial(F.scaled_dot_product_attention, enable_gqa=True)
    selective = partial(create_selective_checkpoint_contexts, save_attention)
    return {
        "full": same(use_reentrant=False),
        "no early stop": same(use_reentrant=False, early_stop=False),
        "selective": same(use_reentrant=False, context_fn=selective),
        "plain attention cannot pass for it": saved(local.attention) != saved(unsharded),
        "keep_gathered": all(map(torch.equal, local.run(q, k, v, grad_out, keep_gathered=True), plain)),
    }


def autograd_facts(local: Local) -> dict[str, bool]:
    q, k, v, grad_out = draw(3, (4, 2), 8 * local.ranks)
    right, _, *right_grads = whole(q, k, v, grad_out)
    rights = [local.split(t) for t in (right, *right_grads)]

    def near(values: Any, expected: Any) -> bool:
        return all(relative_error(a, b) < 1e-12 for a, b in zip(values, expected, strict=True))

    facts = {}
    # The usual layouts: heads behind rows, and q, k, v as views of one projection.
    base: Any = [t.transpose(1, 2).contiguous().requires_grad_() for t in local.inputs(q, k, v)]
    base = [t.detach().requires_grad_() for t in base]
    out = local.attention(*(t.transpose(1, 2) for t in base))
    facts["gradients through views"] = near(
        [g.transpose(1, 2) for g in torch.autograd.grad(out, base, local.split(grad_out))], rights[1:]
    )
    fused = torch.cat(local.inputs(q, k, v), dim=1).detach().requires_grad_()
    out = local.attention(*fused.split([4, 2, 2], dim=1))
    (grad,) = torch.autograd.grad(out, fused, local.split(grad_out))
    facts["gradients of one fused tensor"] = near([grad], [torch.cat(rights[1:], dim=1)])

    inputs = local.inputs(q, k, v)
    twice = local.attention(*inputs) + local.attention(*inputs)
    facts["two calls add up"] = near(
        torch.autograd.grad(twice, inputs, local.split(grad_out)), [2 * g for g in rights[1:]]
    )
    inputs = local.inputs(q, k, v)
    out = local.attention(*inputs)
    first = torch.autograd.grad(out, inputs, local.split(grad_out), retain_graph=True)
    facts["backward runs twice"] = all(
        map(torch.equal, first, torch.autograd.grad(out, inputs, local.split(grad_out)))
    )
    ones = whole(q, k, v, torch.ones_like(grad_out))[2:]
    facts["a scalar's expanded gradient"] = near(
        torch.autograd.grad(local.attention(*inputs).sum(), inputs), [local.split(g) for g in ones]
    )
    shared = local.inputs(k)[0]
    (grad,) = torch.autograd.grad(local.attention(shared, shared, shared), shared, local.split(k))
    facts["one tensor as q, k and v"] = near(
        [grad], [local.split(sum(whole(k, k, k, k)[2:], torch.zeros_like(k)))]
    )
    only_q: Any = [t.requires_grad_(i == 0) for i, t in enumerate(map(torch.Tensor.detach, inputs))]
    (grad,) = torch.autograd.grad(local.attention(*only_q), only_q[0], local.split(grad_out))
    facts["only q wants a gradient"] = near([grad], rights[1:2])
    inputs = local.inputs(q, k, v)
    inputs[0].requires_grad_(False)
    grads = torch.autograd.grad(local.attention(*inputs), inputs[1:], local.split(grad_out))
    facts["q wants no gradient"] = near(grads, rights[2:])

    with torch.no_grad():
        out = local.attention(*inputs)
    facts["no_grad records nothing"] = not out.requires_grad and near([out], rights[:1])
    before = [t.detach().clone() for t in inputs]
    out = local.attention(*inputs)
    with torch.no_grad():
        out.detach().fill_(0.0)
    facts["inputs are not aliased"] = all(map(torch.equal, before, inputs))

    torch.set_default_dtype(torch.float64)
    with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", dtype=torch.bfloat16):
        elsewhere = local.run(q, k, v, grad_out)
    torch.set_default_dtype(torch.float32)
    same = all(map(torch.equal, elsewhere, local.run(q, k, v, grad_out)))
    # What Ulysses runs is torch's own attention, which these settings are for.
    facts["process-wide settings change no bit"] = same or (
        local.method.startswith("ulysses") and near(elsewhere, local.run(q, k, v, grad_out))
    )
    scaled = local.attention(*map(local.split, (2.0 * q, k, v)), scale=SCALE / 2)
    facts["scale is honoured"] = near([scaled], rights[:1])
    return facts


def wire(local: Local, **options: Any) -> dict[str, list[Any]]:
    """Name and bytes sent to other ranks of each collective, forward and backward, of K bytes of keys and
    values."""
    seen: list[Any] = []
    originals = {name: getattr(dist, name) for name in ("all_gather_single", "all_to_all_single")}

    def counted(name: str, output: Tensor, source: Tensor, **kwargs: Any) -> Any:
        received = output.numel() * output.element_size() * (local.ranks - 1) // local.ranks
        seen.append((name, received))
        return originals[name](output, source, **kwargs)

    inputs = [
        t.bfloat16().detach().requires_grad_() for t in local.inputs(*draw(4, (8, 2), 8 * local.ranks)[:3])
    ]
    for name in originals:
        setattr(dist, name, partial(counted, name))
    out = local.attention(*inputs, **options)
    forward = list(seen)
    seen.clear()
    out.sum().backward()
    for name, function in originals.items():
        setattr(dist, name, function)
    return {"forward": forward, "backward": list(seen), "K": [sum(t.numel() * 2 for t in inputs[1:])]}


def refusals(local: Local) -> dict[str, str]:
    q, k, v = (t.detach() for t in local.inputs(*draw(5, (4, 2), 8 * local.ranks)[:3]))
    wrong = {
        "three dimensions": (q[0], k[0], v[0]),
        "rows of q and k": (q[:, :, :2], k, v),
        "heads": (q[:, :3], k, v),
        "size": (q[..., :4], k, v),
        "rows of k and v": (q, k, v[:, :, :2]),
        "dtypes": (q, k.float(), v),
        "integers": (q.long(), k.long(), v.long()),
        "odd rows": (q[:, :, :3], k[:, :, :3], v[:, :, :3]),
    }
    messages = {}
    for name, tensors in wrong.items():
        try:
            local.attention(*tensors, is_causal=name == "rows of q and k")
        except ValueError as error:
            messages[name] = str(error)
    inputs = local.inputs(q, k, v)
    try:
        torch.autograd.grad(local.attention(*inputs).sum(), inputs, create_graph=True)
    except RuntimeError as error:
        messages["twice"] = str(error)
    return messages


def added_up(local: Local) -> dict[str, Any]:
    """Gradients 256, 1, 1, 1 from four ranks: 259, and 256 if they were added in bfloat16."""
    grads = torch.full((1, 1, 2 * local.ranks, 2), 1.0 if local.rank else 256.0)
    k, v = scatter_sum(grads, -grads, torch.bfloat16, local.group, Order(local.ranks))
    return {"sums": torch.stack([k, v]).unique().tolist(), "dtypes": [k.dtype, v.dtype], "shape": k.shape}


def worker() -> dict[Any, Any]:
    rank = dist.get_rank()
    groups = {ranks: dist.new_group(range(ranks)) for ranks in RANKS}
    results: dict[Any, Any] = {}
    for ranks, group in groups.items():
        if rank >= ranks:
            continue
        local = Local(group)
        for is_causal, heads in itertools.product(CAUSAL, HEADS):
            results["float64", ranks, is_causal, heads] = float64_errors(local, is_causal, heads)
            for dtype in (torch.float32, torch.bfloat16):
                results[str(dtype), ranks, is_causal, heads] = low_precision_errors(
                    local, dtype, is_causal, heads
                )
        for method in METHODS:
            other = Local(group, method)
            if method != "ulysses" or fits(4, 2, ranks):
                results[f"facts, {method}", ranks] = autograd_facts(other)
            heads = (6, 3) if ranks == 3 else (4, 2) if method == "ulysses-ring" else (4, 4)
            for dtype in (torch.float32, torch.bfloat16):
                results[str(dtype), ranks, method] = low_precision_errors(other, dtype, True, heads)
        results["two sizes", ranks] = float64_errors(local, True, (4, 2), v_size=5)
        results["checkpoint", ranks] = checkpointed(local)
        results["facts", ranks] = autograd_facts(local)
        results["wire", ranks] = wire(local)
        results["wire, kept", ranks] = wire(local, keep_gathered=True)
    results["refusals"] = refusals(Local(groups[4]))
    results["added up"] = added_up(Local(groups[4]))
    if rank > 0:
        try:
            context_attention(*[torch.zeros(1, 1, 2, 2)] * 3, group=groups[1], is_causal=True)
        except ValueError as error:
            results["outside"] = str(error)
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[Any, Any]]:
    return run_ranks(worker, max(RANKS))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("is_causal", CAUSAL)
@pytest.mark.parametrize("ranks", RANKS)
def test_float64_equals_unsplit_attention(
    results: Any, ranks: int, is_causal: bool, heads: tuple[int, int]
) -> None:
    for rank in range(ranks):
        errors = results[rank]["float64", ranks, is_causal, heads]
        assert set(errors) == set(NAMES)
        assert max(errors.values()) < 1e-12, (rank, errors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("is_causal", CAUSAL)
@pytest.mark.parametrize("ranks", RANKS)
def test_low_precision_errs_at_most_twice_as_the_unsharded_kernel(
    results: Any, ranks: int, is_causal: bool, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    by_rank = [results[rank][str(dtype), ranks, is_causal, heads] for rank in range(ranks)]
    for name, parts in zip(("out", *NAMES[2:]), zip(*by_rank, strict=True), strict=True):
        assert all(right_dtype for right_dtype, _, _ in parts)
        sharded, unsharded = sum(part[1] for part in parts) ** 0.5, parts[0][2] ** 0.5
        assert 0 < sharded < 2 * unsharded, (name, sharded / unsharded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", RANKS)
def test_low_precision_of_the_other_methods_too(
    results: Any, ranks: int, method: str, dtype: torch.dtype
) -> None:
    by_rank = [results[rank][str(dtype), ranks, method] for rank in range(ranks)]
    for name, parts in zip(("out", *NAMES[2:]), zip(*by_rank, strict=True), strict=True):
        assert all(right_dtype for right_dtype, _, _ in parts)
        sharded, unsharded = sum(part[1] for part in parts) ** 0.5, parts[0][2] ** 0.5
        assert 0 < sharded < 2 * unsharded, (name, sharded / unsharded)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("method", METHODS)
def test_autograd_of_the_other_methods(results: Any, ranks: int, method: str) -> None:
    if method != "ulysses" or fits(4, 2, ranks):
        for rank in range(ranks):
            held = results[rank][f"facts, {method}", ranks]
            assert {fact for fact, holds in held.items() if not holds} == set()


@pytest.mark.parametrize("ranks", RANKS)
def test_values_may_have_another_size_than_keys(results: Any, ranks: int) -> None:
    for rank in range(ranks):
        assert max(results[rank]["two sizes", ranks].values()) < 1e-12


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", ["checkpoint", "facts"])
def test_autograd(results: Any, ranks: int, kind: str) -> None:
    for rank in range(ranks):
        assert {fact for fact, holds in results[rank][kind, ranks].items() if not holds} == set()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kept", [False, True])
def test_bytes_on_the_wire(results: Any, ranks: int, kept: bool) -> None:
    for rank in range(ranks):
        seen = results[rank]["wire, kept" if kept else "wire", ranks]
        one_way = (ranks - 1) * seen["K"][0]
        gathered, reduced = ("all_gather_single", one_way), ("all_to_all_single", one_way)
        if ranks == 1:
            assert seen["forward"] == seen["backward"] == []
        else:
            assert seen["forward"] == [gathered]
            assert seen["backward"] == ([reduced] if kept else [gathered, reduced])


def test_what_travels_in_bfloat16_is_added_in_float32(results: Any) -> None:
    right = torch.tensor(259.0).bfloat16().item()
    for result in results:
        assert result["added up"]["sums"] == [-right, right]
        assert result["added up"]["dtypes"] == [torch.bfloat16] * 2
        assert result["added up"]["shape"] == (1, 1, 2, 2)


@pytest.mark.parametrize(("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_blocks_are_added_in_the_accumulation_dtype(dtype: torch.dtype, wide: torch.dtype) -> None:
    q, k, v, grad_out = (t.to(dtype) for t in draw(6, (4, 2), 16))
    plan = balance.blocks(8, 2, 1, is_causal=True)
    grad_rows, q_rows = balance.split(grad_out, 2, 2, 1), balance.split(q, 2, 2, 1)
    out, lse = forward_blocks(q_rows, k, v, plan, SCALE)
    grads = backward_blocks(grad_rows, q_rows, k, v, out, lse, plan, SCALE)
    assert (out.dtype, lse.dtype) == (dtype, wide)
    assert [g.dtype for g in grads] == [dtype, wide, wide]
    assert [g.shape for g in grads] == [q_rows.shape, k.shape, v.shape]


def test_what_does_not_fit_is_refused_in_words(results: Any) -> None:
    for result in results:
        messages = result["refusals"]
        for name, words in {
            "three dimensions": "must be [batch, heads, rows, size]",
            "rows of q and k": "2 rows of queries and 8 of keys; under a causal mask",
            "heads": "3 query heads are not a multiple of 2",
            "size": "do not fit together",
            "rows of k and v": "do not fit together",
            "dtypes": "one floating dtype",
            "integers": "floating dtype",
            "odd rows": "12 rows cannot be cut into 8 equal chunks",
            "twice": "differentiated once",
        }.items():
            assert words in messages[name]
    assert all("not in the process group" in result["outside"] for result in results[1:])


def fake_world(device: str) -> list[Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)
    with FakeTensorMode():
        # Autograd has no fake CUDA device where torch was built without one.
        needs = device != "cuda"
        q = torch.empty(1, 8, 128, 16, dtype=torch.bfloat16, device=device, requires_grad=needs)
        k = torch.empty(1, 2, 128, 16, dtype=torch.bfloat16, device=device, requires_grad=needs)
        out = context_attention(q, k, k, group=dist.group.WORLD, is_causal=True)  # type: ignore[arg-type]
        grads = torch.autograd.grad(out.sum(), [q, k]) if needs else (q, k)
        return [tuple(t.shape) for t in (out, *grads)]


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_shapes_propagate_on_a_fake_world(device: str) -> None:
    (shapes,) = run_ranks(fake_world, 1, device)
    assert shapes == [(1, 8, 128, 16), (1, 8, 128, 16), (1, 2, 128, 16)]
