"""Modules that call `flex_attention` run split over ranks, and are compared with attention written from index grids."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
    noop_mask,
)
from torch.utils.checkpoint import checkpoint

from parallelizer.styles.context_parallel import balance, flex
from parallelizer.styles.context_parallel.choice import Heads
from parallelizer.styles.context_parallel.dealing import by_cost, per_document
from parallelizer.styles.context_parallel.intercept import ContextOptions, ContextParallelError, wrap
from parallelizer.styles.context_parallel.order import Contiguous, Order, padded
from parallelizer.styles.context_parallel.sequence import CurrentOrder
from parallelizer.styles.context_parallel.ulysses import fits
from parallelizer.torch_private import FlexAnswer, FlexCall
from tests.chosen import SHARE
from tests.ranks import run_ranks
from tests.styles.context_parallel.reference import relative_error

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]

NAME = "layers.0.attention.inner"
BATCH, TOKENS, SIZE, V_SIZE, HEADS = 2, 16, 8, 8, 4
SCALE = 0.3
generator = torch.Generator().manual_seed(0)
DOCUMENT = (torch.rand(BATCH, TOKENS, generator=generator) < 0.3).cumsum(1)
SLOPES = torch.rand(HEADS, generator=generator).double()
TABLE = torch.randn(HEADS, 2 * TOKENS, generator=generator).double().requires_grad_()

Function = Callable[..., Tensor]

# Each is given numbers by `flex_attention`, and grids of all positions by the reference.
MASKS: dict[str, Function | None] = {
    "none": None,
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i >= j) & (i - j < 3),
    "prefix": lambda b, h, i, j: (i >= j) | (j < 5),
    "documents": lambda b, h, i, j: (DOCUMENT[b, i] == DOCUMENT[b, j]) & (i >= j),
    "by head": lambda b, h, i, j: (i - j).abs() <= 3 * h,
    "blind rows": lambda b, h, i, j: (i >= j) & (i != 0) & (i != 11),
}
SCORES: dict[str, Function | None] = {
    "none": None,
    "alibi": lambda s, b, h, i, j: s - SLOPES[h] * (i - j),
    "learned": lambda s, b, h, i, j: s + TABLE[h, i - j + TOKENS],
    "capped": lambda s, b, h, i, j: 2 * torch.tanh(s / 2) * torch.where(b == 0, 1.0, 0.5),
}
CASES = [
    *itertools.product(MASKS, ("none",), (Heads(4, 4), Heads(4, 2), Heads(4, 1))),
    *itertools.product(("none", "documents", "blind rows"), ("alibi", "learned", "capped"), (Heads(4, 2),)),
    ("causal", "learned", Heads(4, 4)),
]


class Flex(nn.Module):
    """Calls attention as it was imported by name."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return flex_attention(q, k, v, enable_gqa=True, **options)


class ByModule(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return torch.nn.attention.flex_attention.flex_attention(
            value=v, key=k, query=q, enable_gqa=True, **options
        )


class Within(nn.Module):
    """Calls it from a module within a module, as it is imported there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Flex()

    def forward(self, *tensors: Tensor, **options: Any) -> Any:
        from torch.nn.attention.flex_attention import flex_attention as local

        return (self.inner(*tensors, **options) + local(*tensors, enable_gqa=True, **options)) / 2


def draw(heads: Heads) -> list[Tensor]:
    """q, k, v and a gradient of the result."""
    own = torch.Generator().manual_seed(1)
    shapes = [(heads.queries, SIZE), (heads.keys, SIZE), (heads.keys, V_SIZE), (heads.queries, V_SIZE)]
    return [torch.randn(BATCH, h, TOKENS, d, generator=own, dtype=torch.float64) for h, d in shapes]


def reference(
    q: Tensor, k: Tensor, v: Tensor, mask: str, score: str, scale: float = SCALE
) -> tuple[Tensor, Tensor]:
    """out and log-sum-exp over the whole sequence, in float64; rows that see nothing get zeros and -inf."""
    group = q.size(1) // k.size(1)
    scores = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(group, dim=1)) * scale
    grid = torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")
    if (change := SCORES[score]) is not None:
        scores = change(scores, *grid)
    seen = torch.ones_like(scores, dtype=torch.bool) if MASKS[mask] is None else MASKS[mask](*grid)  # type: ignore[misc]
    weights = torch.where(seen, scores, 0.0).exp() * seen
    total = weights.sum(dim=-1, keepdim=True)
    out = weights / torch.where(total == 0, 1.0, total) @ v.repeat_interleave(group, dim=1)
    return out, total.squeeze(-1).log()


def options_of(mask: str, score: str, length: int = TOKENS) -> dict[str, Any]:
    options: dict[str, Any] = {"scale": SCALE, "score_mod": SCORES[score]}
    if (function := MASKS[mask]) is not None:
        by_head = HEADS if mask == "by head" else None
        rows = BATCH if mask == "documents" else None
        options["block_mask"] = create_block_mask(
            function, rows, by_head, length, length, device="cpu", BLOCK_SIZE=4
        )
    return options


def wrapped(
    group: dist.ProcessGroup,
    method: str = "auto",
    module: nn.Module | None = None,
    order: Order | None = None,
) -> nn.Module:
    module = module or Flex()
    sequence = CurrentOrder(order) if order else None
    wrap(module, group, ContextOptions(method=method), name=NAME, sequence=sequence)
    return module


def alone(group: dist.ProcessGroup) -> Function:
    """On one rank nothing is wrapped; what would run is."""

    def run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        sequence = CurrentOrder(Order(1))
        region = SimpleNamespace(name=NAME, group=group, options=ContextOptions(), sequence=sequence)
        mask, score = options.get("block_mask"), options["score_mod"]
        return flex.attention(region, FlexCall(q, k, v, score, mask, SCALE, False), q, k, v, (0, 0)).out

    return run


def errors(
    group: dist.ProcessGroup, run: Function, mask: str, score: str, heads: Heads, order: Order | None = None
) -> list[float]:
    """Relative errors of the output and of the gradients of q, k, v, and of the learned table."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    order = order or Order(ranks)
    length = order.length or TOKENS

    def dealt(tensor: Tensor) -> Tensor:
        return order.split(padded(tensor, 2, TOKENS), 2, rank)

    *tensors, grad = (t[:, :, :length] for t in draw(heads))
    learned = [TABLE] if score == "learned" else []
    inputs = [t.clone().requires_grad_() for t in tensors]
    right, _ = reference(*inputs, mask, score)
    rights = torch.autograd.grad(right, [*inputs, *learned], grad)
    mine = [dealt(t).detach().requires_grad_() for t in tensors]
    out = run(*mine, **options_of(mask, score, length))
    found = torch.autograd.grad(out, [*mine, *learned], dealt(grad))
    real = order.positions(TOKENS, rank).lt(length).unsqueeze(-2).unsqueeze(-1)
    result = []
    for value, whole in zip((out * real, *found[:3]), (right, *rights[:3]), strict=True):
        # Of the whole: a rank's rows may see one key each, and then their gradient is nothing but rounding.
        result.append(((value - dealt(whole)).norm() / whole.norm()).item())
    if learned:
        dist.all_reduce(found[3], group=group)
        result.append(relative_error(found[3], rights[3]))
    return result


def on_four_ranks() -> dict[Any, Any]:
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in (1, 2, 4)}
    found: dict[Any, Any] = {}
    for ranks, group in groups.items():
        if dist.get_rank() >= ranks:
            continue
        for case in CASES[::SHARE]:
            run = alone(group) if ranks == 1 else wrapped(group)
            found[ranks, "auto", *case] = errors(group, run, *case)
        for method, case in itertools.product(
            ("all-gather", "ulysses"), CASES[:: 4 * SHARE] if ranks > 1 else ()
        ):
            if method != "ulysses" or fits(*case[2], ranks):
                found[ranks, method, *case] = errors(group, wrapped(group, method), *case)
        found |= in_every_order(group) if ranks > 1 else {}
    return found


def in_every_order(group: dist.ProcessGroup) -> dict[Any, Any]:
    """The sequence dealt out in other ways than head-tail, and padded; a mask takes the ring too."""
    ranks = dist.get_world_size(group)
    orders = {
        "none": Contiguous(ranks),
        "per-document": per_document(DOCUMENT, ranks),
        "by-cost": by_cost(torch.arange(TOKENS), ranks, chunk=2),
        "padded": Order(ranks, TOKENS - 3),
        "padded per document": per_document(DOCUMENT, ranks, TOKENS - 3),
    }
    found: dict[Any, Any] = {}
    every = itertools.product(
        orders.items(), ("all-gather", "ulysses", "ring", "ulysses-ring"), ("none", "learned")
    )
    for (name, order), method, score in itertools.islice(every, 0, None, SHARE):
        if fits(4, 4, ranks) and ("ring" not in method or score == "none"):
            run = wrapped(group, method, order=order)
            found[ranks, method, name, score] = errors(group, run, "documents", score, Heads(4, 4), order)
    return found


def test_outputs_and_gradients_are_those_of_the_whole_sequence() -> None:
    found = run_ranks(on_four_ranks, 4)
    wrong = {
        (rank, *case): e
        for rank, of_rank in enumerate(found)
        for case, e in of_rank.items()
        if not max(e) < 1e-12
    }
    assert wrong == {}
    assert {case[0] for case in found[0]} == {1, 2, 4} and len(found[0]) > 25


def statistics(group: dist.ProcessGroup) -> dict[str, Any]:
    """The log-sum-exp of this rank's rows, its gradient, and the largest scores."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    *tensors, _ = draw(Heads(4, 2))
    inputs = [t.clone().requires_grad_() for t in tensors]
    _, right = reference(*inputs, "documents", "alibi")
    rights = torch.autograd.grad(right.square().sum(), inputs[:2])
    mine = [balance.split(t, 2, ranks, rank).detach().requires_grad_() for t in tensors]
    options = options_of("documents", "alibi")
    out, lse = wrapped(group)(*mine, return_lse=True, **options)
    grads = torch.autograd.grad(lse.square().sum(), mine[:2])
    results: dict[str, Any] = {"lse": relative_error(lse, balance.split(right, 2, ranks, rank))}
    for name, value, whole in zip("qk", grads, rights, strict=True):
        results[name] = relative_error(value, balance.split(whole, 2, ranks, rank))
    again, aux = wrapped(group)(*mine, return_aux=AuxRequest(lse=True, max_scores=True), **options)
    results["out"], results["aux"] = relative_error(again, out), relative_error(aux.lse, lse)
    # A row's softmax has its largest weight where its largest score is.
    results["largest"] = 0.0 if bool((aux.max_scores <= aux.lse + 1e-12).all()) else 1.0
    return results


def styles(group: dist.ProcessGroup) -> dict[str, Any]:
    case = ("documents", "learned", Heads(4, 2))
    results: dict[str, Any] = {}
    for module in (ByModule(), Within()):
        results[type(module).__name__] = errors(group, wrapped(group, module=module), *case)
    run = partial(checkpoint, wrapped(group), use_reentrant=False)
    results["checkpoint"] = errors(group, run, *case)
    with torch.autocast("cpu", torch.bfloat16):
        q, k, v, _ = (balance.split(t, 2, 2, dist.get_rank(group)).float() for t in draw(Heads(4, 2)))
        results["autocast"] = [0.0 if wrapped(group)(q, k, v).dtype == torch.bfloat16 else 1.0]
    return results


def meshes() -> dict[str, Any]:
    """Two meshes at once, and heads and batch entries of DTensors under their own indices in the whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    results: dict[str, Any] = {"styles": styles(mesh.get_group("cp"))}
    one, two = wrapped(mesh.get_group("cp")), wrapped(mesh.get_group("tp"))
    tensors = draw(Heads(4, 2))[:3]
    right, _ = reference(*tensors, "documents", "alibi")

    def outer(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return one(q, k, v, **options), two(*other, **options)

    cp, tp = mesh.get_local_rank("cp"), mesh.get_local_rank("tp")
    other = [balance.split(t, 2, 2, tp).requires_grad_() for t in tensors]
    a, b = outer(
        *(balance.split(t, 2, 2, cp).requires_grad_() for t in tensors), **options_of("documents", "alibi")
    )
    results["first"] = relative_error(a, balance.split(right, 2, 2, cp))
    results["second"] = relative_error(b, balance.split(right, 2, 2, tp))
    results["statistics"] = max(statistics(mesh.get_group("tp")).values())
    for dim, mask, score in itertools.product((0, 1), ("documents", "by head"), ("none", "learned")):
        right, lse = reference(*tensors, mask, score)
        inputs = [distribute_tensor(balance.split(t, 2, 2, cp), mesh["tp"], [Shard(dim)]) for t in tensors]
        out, aux = one(*inputs, return_aux=AuxRequest(lse=True), **options_of(mask, score))
        results[f"{mask} {score} shard({dim})"] = max(
            relative_error(out.full_tensor(), balance.split(right, 2, 2, cp)),
            relative_error(aux.lse.full_tensor(), balance.split(lse, 2, 2, cp)),
        )
    return results


def test_every_way_to_call_it_two_meshes_statistics_and_dtensors() -> None:
    for result in run_ranks(meshes, 4):
        of_styles = {name: max(found) for name, found in result.pop("styles").items()}
        assert {case: e for case, e in {**of_styles, **result}.items() if not e < 1e-12} == {}
        assert len(of_styles) == 4 and len(result) == 11


def message(call: Callable[[], Any], kind: type[Exception] = ContextParallelError) -> str | None:
    """What the exception of exactly this type says; None without one."""
    try:
        call()
    except Exception as error:
        if type(error) is kind:
            return str(error)
        raise
    return None


class Recovers(nn.Module):
    """Lets flex_attention fail, and compiles something behind it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, int]:
        compiled: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            compiled.append(graph)
            return graph.forward

        with torch.no_grad(), pytest.raises(ValueError, match="same number of heads"):
            flex_attention(q, k[:, :1], v[:, :1])
        double = torch.compile(lambda x: 2 * x, backend=backend)
        with torch._C.DisableTorchFunction():
            q = double(q)
        return flex_attention(q, k, v), len(compiled)


def refusals() -> dict[str, Any]:
    q = torch.randn(BATCH, HEADS, TOKENS // 2, SIZE, requires_grad=True)
    group = dist.group.WORLD
    assert group is not None
    causal = MASKS["causal"]
    assert causal is not None

    def mask(rows: int, keys: int) -> BlockMask:
        return create_block_mask(causal, None, None, rows, keys, device="cpu", BLOCK_SIZE=4)

    def fails(*_: Tensor) -> Tensor:
        raise KeyError("from the user's function")

    some = mask(TOKENS, TOKENS)
    blocks = BlockMask.from_kv_blocks(
        some.kv_num_blocks, some.kv_indices, BLOCK_SIZE=4, seq_lengths=(TOKENS, TOKENS)
    )
    calls: dict[str, Callable[[], Any]] = {
        "local": lambda: module(q, q, q, block_mask=mask(TOKENS // 2, TOKENS // 2)),
        "other": lambda: module(q, q, q, block_mask=mask(TOKENS, 2 * TOKENS)),
        "blocks": lambda: module(q, q, q, block_mask=blocks),
        "ring score": lambda: wrapped(group, "ring")(q, q, q, score_mod=SCORES["alibi"]),
        "heads": lambda: wrapped(group, "ulysses")(q[:, :3], q[:, :3], q[:, :3], score_mod=lambda s, *_: s),
        "partly": lambda: module(q.half(), q, q),
        "compiled": lambda: wrapped(group, module=Compiled())(q, q, q),
        "padding": lambda: unknown(q, q, q),
    }
    module, unknown = wrapped(group), Flex()
    sequence = CurrentOrder(Order(2))
    sequence.known = False
    wrap(unknown, group, name=NAME, sequence=sequence)
    results: dict[str, Any] = {}
    results["KeyError"] = message(lambda: module(q, q, q, score_mod=fails), KeyError)
    for name, call in calls.items():
        results[name] = message(call)
        # Torch's own answer again, and no compiler that calls through: nothing stayed behind.
        outside = message(lambda: flex_attention(q, q, q), NotImplementedError)
        left = torch._guards.TracingContext.try_get() or flex_module._WARNINGS_SHOWN or None
        results[f"after {name}"] = outside is not None and "backward on CPU" in outside and left is None
    results["recovers"] = wrapped(group, module=Recovers())(q, q, q)[1]
    full = create_block_mask(noop_mask, None, None, TOKENS, TOKENS, device="cpu")
    results["noop"] = torch.equal(module(q, q, q, block_mask=full), module(q, q, q))

    flex._said = False
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            module(q, q, q)
    results["said"] = [str(w.message) for w in said if NAME in str(w.message)]
    return results


class Compiled(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.compile(flex_module.flex_attention, backend="eager")(q, k, v)


def test_what_cannot_be_exact_is_refused_and_leaves_nothing_behind() -> None:
    for rank, result in enumerate(run_ranks(refusals, 2)):
        assert all(holds for name, holds in result.items() if name.startswith("after "))
        assert "user's function" in result["KeyError"]
        assert result["recovers"] == 1 and result["noop"]
        for name, words in {
            "local": "those of one rank, and the sequence has 16 and 16: make it with create_block_mask(mask_mod, B, H, 16, 16)",
            "other": "block_mask was made for 16 rows and 32 keys, and the sequence has 16 and 16",
            "blocks": "has no mask_mod",
            "ring score": "ring takes no score_mod",
            "heads": "3 query and 3 key heads cannot be dealt out to 2 ranks",
            "partly": "one floating dtype",
            "compiled": "flex_attention in a compiled function",
            "padding": "its padding would be seen; a copy does not store its order",
        }.items():
            assert words in result[name] and result[name].startswith(f"{NAME}: "), (name, result[name])
        assert len(result["said"]) == (1 if rank == 0 else 0)


def test_a_function_is_asked_about_every_pair_and_only_what_differs_is_kept() -> None:
    asked = MASKS["window"]
    assert asked is not None
    rows = torch.tensor([3, 0, 9])
    found = flex.evaluated(asked, (BATCH, HEADS), (0, 0), rows, TOKENS)
    assert found.shape == (1, 1, 3, TOKENS)
    assert torch.equal(found[0, 0], asked(None, None, rows.unsqueeze(1), torch.arange(TOKENS)))
    by_head = flex.evaluated(MASKS["by head"], (BATCH, HEADS), (0, 2), rows, TOKENS)  # type: ignore[arg-type]
    assert by_head.shape == (1, HEADS, 3, TOKENS)
    assert torch.equal(by_head[0, 0], (rows.unsqueeze(1) - torch.arange(TOKENS)).abs() <= 6)


def test_rows_that_see_nothing_have_zeros_and_finite_gradients() -> None:
    q, k, v, grad = draw(Heads(4, 2))
    q.requires_grad_()
    answer: FlexAnswer = flex.plain_attention(
        q, k, v, None, lambda b, h, i, j: i + j < 3, SCALE, torch.arange(TOKENS)
    )
    assert answer.lse is not None
    assert answer.out[:, :, 3:].count_nonzero() == 0 and (answer.lse[:, :, 3:] == -torch.inf).all()
    (found,) = torch.autograd.grad(answer.out, q, grad)
    assert found.isfinite().all() and found[:, :, 3:].count_nonzero() == 0 and found[:, :, :2].all()


@given(st.data())
def test_functions_are_asked_with_positions_in_the_whole(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([1, 2, 3, 4]))
    rows = data.draw(st.integers(1, 3)) * 2 * ranks
    keys = data.draw(st.integers(1, 9))
    first = (data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2)))
    sizes = (data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3)))
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    table = torch.rand(4, 5, rows, keys, generator=seed)
    b, h = (slice(at, at + size) for at, size in zip(first, sizes, strict=True))
    for rank in range(ranks):
        positions = balance.local_positions(rows, ranks, rank)
        here = table[b, h, positions]
        mask = flex.evaluated(lambda *at: table[at] < 0.5, sizes, first, positions, keys)
        assert torch.equal(mask.expand_as(here), here < 0.5)
        scores = torch.rand(here.shape, generator=seed)
        changed = flex.evaluated(lambda s, *at: s * table[at], sizes, first, positions, keys, scores)
        assert torch.equal(changed, scores * here)
