"""Stacked experts in float8 compute what experts that are linears of their own do, by every way to multiply them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallelizer.proof.float8_experts import round_experts
from parallelizer.proof.float8_tokens import ExpertTokens, LowPrecision
from parallelizer.proof.modes import Float64
from parallelizer.styles.experts.expert_list import ExpertList
from parallelizer.styles.float8 import grouped
from parallelizer.styles.float8.recipes import TORCHAO_NAMES
from parallelizer.torch_private import scaled_grouped_mm

pytest.importorskip("torchao", reason="float8 needs torchao")

from parallelizer.styles.float8.experts import run_experts_in_float8
from parallelizer.styles.float8.linear import run_in_float8

INPUTS, OUTPUTS, EXPERTS = 32, 48, 4
COUNTS = [5, 0, 17, 2]
"""The rows of each expert: one gets none, one more than a multiple of 16."""
RECIPES = ["rowwise", "rowwise-gw-hp"]
NAMES = ("rows", "counts", "counts")


class Transposed(nn.Module):
    """Weights as those of linears, as most experts of transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(EXPERTS, OUTPUTS, INPUTS))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return F.grouped_mm(rows, self.up.transpose(-2, -1), offs=counts.cumsum(0, dtype=torch.int32))


class Plain(Transposed):
    """Weights as factors of a product, by torch's older name of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(self.up.detach().transpose(-2, -1).contiguous())

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        made: Tensor = torch._grouped_mm(rows, self.up, offs=counts.cumsum(0, dtype=torch.int32))
        return made


class Looped(Transposed):
    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = rows.split(counts.tolist())
        return torch.cat([F.linear(part, self.up[number]) for number, part in enumerate(parts)])


class Batched(Transposed):
    """As `batched_mm` of transformers: a copy of an expert's weights for every row."""

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        chosen = torch.arange(EXPERTS).repeat_interleave(counts)
        return torch.bmm(self.up[chosen], rows.unsqueeze(-1)).squeeze(-1)


def linears(stacked: Transposed) -> nn.ModuleList:
    made = nn.ModuleList()
    weights = stacked.up.transpose(-2, -1) if isinstance(stacked, Plain) else stacked.up
    for weight in weights:
        linear = nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=weight.dtype)
        linear.weight = nn.Parameter(weight.detach().clone())
        made.append(linear)
    return made


def gradients(out: Tensor, rows: Tensor, weight: Tensor) -> list[Tensor]:
    """The output, and the gradients of its weighted sum."""
    factors = torch.linspace(-1, 3, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * factors).sum(), [rows, weight])]


def of_stacked(module: Transposed, rows: Tensor) -> list[Tensor]:
    rows = rows.clone().requires_grad_()
    out, of_rows, of_weight = gradients(module(rows, torch.tensor(COUNTS)), rows, module.up)
    return [out, of_rows, of_weight.transpose(-2, -1) if isinstance(module, Plain) else of_weight]


def of_linears(listed: nn.ModuleList, rows: Tensor) -> list[Tensor]:
    rows = rows.clone().requires_grad_()
    parts = rows.split(COUNTS)
    out = torch.cat([linear(part) for linear, part in zip(listed, parts, strict=True)])
    factors = torch.linspace(-1, 3, out.numel(), dtype=out.dtype).view_as(out)
    of_rows, *of_weights = torch.autograd.grad((out * factors).sum(), [rows, *listed.parameters()])
    return [out.detach(), of_rows, torch.stack(of_weights)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [Transposed, Plain, Looped])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_compute_what_linears_in_float8_do_to_the_bit(
    recipe: str, kind: type[Transposed], dtype: torch.dtype
) -> None:
    stacked = kind().to(dtype)
    listed = linears(stacked)
    run_experts_in_float8(stacked, TORCHAO_NAMES[recipe], emulate=True)
    for linear in listed:
        run_in_float8(linear, TORCHAO_NAMES[recipe], emulate=True)
    rows = torch.randn(sum(COUNTS), INPUTS, dtype=dtype)
    for mine, other in zip(of_stacked(stacked, rows), of_linears(listed, rows), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [Transposed, Plain, Looped])
def test_the_reference_of_proofs_computes_the_same_in_float64(recipe: str, kind: type[Transposed]) -> None:
    ours = kind().double()
    reference = nn.Sequential(copy.deepcopy(ours))
    run_experts_in_float8(ours, TORCHAO_NAMES[recipe], emulate=True)
    # The groups are one group of all rows: where forward takes no tokens with experts, they are not asked for.
    precision = LowPrecision({"0": "rowwise-gw-hp"}, 1, 1, 1, "auto", 8, {"0": ExpertTokens(NAMES)})
    rows = torch.randn(sum(COUNTS), INPUTS, dtype=torch.float64)
    with Float64():
        if recipe == "rowwise-gw-hp":
            round_experts(reference, precision)
            (theirs,) = reference
            assert isinstance(theirs, Transposed)
            expected = of_stacked(theirs, rows)
        else:
            expected = of_products(ours, rows)
        for mine, other in zip(of_stacked(ours, rows), expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-14, atol=1e-14)


def of_products(module: Transposed, rows: Tensor) -> list[Tensor]:
    """By the products of the reference, one for each expert."""
    from parallelizer.proof.float8_reference import RECIPES, round_product

    rows = rows.clone().requires_grad_()
    weights = module.up.transpose(-2, -1) if isinstance(module, Plain) else module.up
    parts = zip(rows.split(COUNTS), weights.unbind(0), strict=True)
    out = torch.cat([round_product(x[None], w, RECIPES["rowwise"]).squeeze(0) for x, w in parts])
    return gradients(out, rows, weights)


def standing_in(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, *, fast: bool
) -> Tensor:
    """What the kernel is documented to compute, of what it takes: its own checks of layouts are those on meta."""
    shape = scaled_grouped_mm(*(t.to("meta") for t in (a, b, scale_a, scale_b, ends)), fast=fast).shape
    stops = ends.tolist()
    assert all(stop % 16 == 0 for stop in stops)
    spans = list(zip([0, *stops], stops, strict=False))
    left, right = a.double(), b.double()
    if b.ndim == 3:
        made = left.new_full(shape, torch.nan)  # the kernel leaves what no group has as it was
        for number, (begin, end) in enumerate(spans):
            of_rows, of_columns = scale_a[begin:end, None], scale_b[number]
            made[begin:end] = left[begin:end] @ right[number] * of_rows * of_columns
    else:
        groups = (scale_a.view(len(stops), -1, 1), scale_b.view(len(stops), 1, -1))
        made = torch.stack([left[:, i:j] @ right[i:j] for i, j in spans]) * groups[0] * groups[1]
    return made.to(torch.bfloat16)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [Transposed, Plain, Looped])
def test_groups_are_filled_up_for_kernels_and_nothing_else_changes(
    recipe: str, kind: type[Transposed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "scaled_grouped_mm", standing_in)
    by_kernels, emulated = kind().bfloat16(), kind().bfloat16()
    run_experts_in_float8(by_kernels, TORCHAO_NAMES[recipe])
    run_experts_in_float8(emulated, TORCHAO_NAMES[recipe], emulate=True)
    rows = torch.randn(sum(COUNTS), INPUTS, dtype=torch.bfloat16)
    for mine, other in zip(of_stacked(by_kernels, rows), of_stacked(emulated, rows), strict=True):
        assert mine.shape == other.shape and (mine - other).norm() <= 0.01 * other.norm()


def test_where_rows_lie_once_groups_are_filled_up() -> None:
    ends = torch.tensor([5, 5, 22, 24], dtype=torch.int32)
    places, padded_ends, length = grouped.padding(ends, 24)
    assert padded_ends.tolist() == [16, 16, 48, 64] and padded_ends.dtype == torch.int32
    assert places.tolist() == [*range(5), *range(16, 33), 48, 49]
    assert length >= 64 and length % 16 == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_list_of_experts_computes_what_its_linears_do(recipe: str) -> None:
    """Biases too, which are no factors of a product."""

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(INPUTS, OUTPUTS), nn.Linear(OUTPUTS, INPUTS, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(torch.tanh(self.up(x)))
            return out

    torch.manual_seed(0)
    experts = [Expert() for _ in range(EXPERTS)]
    stacked = ExpertList(experts)
    experts = [Expert() for _ in range(EXPERTS)]
    for number, expert in enumerate(experts):
        for name, param in expert.named_parameters():
            param.data = getattr(stacked, name.replace(".", "_"))[number].detach().clone()
        for linear in (expert.up, expert.down):
            run_in_float8(linear, TORCHAO_NAMES[recipe], emulate=True)
    run_experts_in_float8(stacked, TORCHAO_NAMES[recipe], emulate=True)
    x = torch.randn(10, INPUTS)
    ids = torch.arange(10).remainder(3).unsqueeze(-1)  # the last expert gets no row
    out = stacked(x, ids, torch.ones(10, 1))
    expected = torch.stack(
        [experts[n](row[None])[0] for n, row in zip(ids.flatten().tolist(), x, strict=True)]
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    out.square().sum().backward()
    assert stacked.up_weight.grad is not None and not stacked.up_weight.grad[3].any()


@pytest.mark.slow
def test_compiled_code_around_them_changes_nothing() -> None:
    module = Transposed()
    run_experts_in_float8(module, "rowwise", emulate=True)
    rows, counts = torch.randn(sum(COUNTS), INPUTS), torch.tensor(COUNTS)

    def around(rows: Tensor) -> Tensor:
        return torch.tanh(module(rows * 2, counts))

    x = rows.clone().requires_grad_()
    plain = gradients(around(x), x, module.up)
    compiled = gradients(torch.compile(around, backend="aot_eager")(x), x, module.up)
    for mine, other in zip(compiled, plain, strict=True):
        assert torch.equal(mine, other)


def test_another_product_is_an_error() -> None:
    module = Batched()
    run_experts_in_float8(module, "rowwise", emulate=True)
    with pytest.raises(RuntimeError, match="multiplies up by neither grouped_mm nor linear"):
        module(torch.randn(sum(COUNTS), INPUTS), torch.tensor(COUNTS))


def test_what_is_no_expert_stays_in_its_own_dtype() -> None:
    class WithRouter(Transposed):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Parameter(torch.ones(INPUTS, INPUTS))

        def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
            return super().forward(F.linear(rows, self.scores), counts)

    seen: list[Tensor] = []
    module = WithRouter()
    run_experts_in_float8(module, "rowwise", emulate=True)
    rows, right = torch.randn(sum(COUNTS), INPUTS), grouped.largest_along

    def watched(tensor: Tensor, dim: int) -> Tensor:
        seen.append(tensor)
        return right(tensor, dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "largest_along", watched)
        module(rows, torch.tensor(COUNTS))
    assert torch.equal(seen[0], F.linear(rows, module.scores)) and len(seen) == 2


def test_the_module_stays_what_it_is_and_a_copy_has_its_own_weights() -> None:
    module = Transposed()
    run_experts_in_float8(module, "rowwise", emulate=True)
    assert type(module) is Transposed and list(module.state_dict()) == ["up"]
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.up.zero_()
    inputs: tuple[Any, ...] = (torch.randn(sum(COUNTS), INPUTS), torch.tensor(COUNTS))
    assert not twin(*inputs).any() and bool(module(*inputs).any())
