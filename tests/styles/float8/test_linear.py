"""A linear in float8 computes what torchao's does, and stays what it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelizer.proof.float8_reference import RECIPES, round_linears
from parallelizer.proof.float8_tokens import LowPrecision
from parallelizer.proof.modes import Float64
from parallelizer.styles.float8.linear import run_in_float8
from parallelizer.styles.float8.recipes import TORCHAO_NAMES

pytest.importorskip("torchao", reason="float8 needs torchao")

from parallelizer.styles.float8.torchao_private import linear_config, products_in_float64


class Scaled(nn.Linear):
    """A class of the user's own, with nn.Linear's forward."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.5)


def linear(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(32, 48, bias=bias).to(dtype)


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output and every gradient of its weighted sum."""
    x = x.clone().requires_grad_()
    out = module(x)
    (out * torch.linspace(-1, 3, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("recipe", TORCHAO_NAMES)
def test_it_computes_what_torchao_does_to_the_bit(recipe: str) -> None:
    from torchao.float8 import convert_to_float8_training

    ours, theirs = linear(), linear()
    theirs = convert_to_float8_training(theirs, config=linear_config(TORCHAO_NAMES[recipe], True))
    run_in_float8(ours, TORCHAO_NAMES[recipe], emulate=True)
    x = torch.randn(2, 8, 32)
    for mine, other in zip(gradients(ours, x), gradients(theirs, x), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("recipe", TORCHAO_NAMES)
def test_it_differs_from_full_precision_by_what_float8_rounds(recipe: str) -> None:
    full, rounded = linear(), linear()
    run_in_float8(rounded, TORCHAO_NAMES[recipe], emulate=True)
    x = torch.randn(2, 8, 32)
    out, *found = [
        (a - b).norm() / b.norm() for a, b in zip(gradients(rounded, x), gradients(full, x), strict=True)
    ]
    assert 0.01 < out < 0.1
    of_input, of_weight, of_bias = found
    assert 0.01 < of_input < 0.15 and of_bias == 0
    assert (of_weight == 0) == (recipe == "rowwise-gw-hp") and of_weight < 0.15


@pytest.mark.parametrize("recipe", TORCHAO_NAMES)
@pytest.mark.parametrize("bias", [True, False])
def test_the_reference_of_proofs_computes_the_same_in_float64(recipe: str, bias: bool) -> None:
    ours, reference = linear(torch.float64, bias), nn.Sequential(linear(torch.float64, bias))
    run_in_float8(ours, TORCHAO_NAMES[recipe], emulate=True)
    round_linears(reference, LowPrecision({"0": recipe}, 1, 1, 1, "auto", 8))
    x = torch.randn(2, 8, 32, dtype=torch.float64)
    with products_in_float64(), Float64():
        for mine, other in zip(gradients(ours, x), gradients(reference, x), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("recipe", TORCHAO_NAMES)
@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
def test_an_expert_without_tokens_has_gradients_of_zero(recipe: str, shape: tuple[int, ...]) -> None:
    module = linear()
    run_in_float8(module, TORCHAO_NAMES[recipe], emulate=True)
    out, of_input, *of_params = gradients(module, torch.empty(shape))
    assert out.shape == (*shape[:-1], 48) and of_input.shape == shape
    assert len(of_params) == 2 and not any(bool(p.any()) for p in of_params)


def test_torchao_s_own_emulation_would_not_do_for_a_proof() -> None:
    ours, exact = linear(torch.float64), linear(torch.float64)
    for one in (ours, exact):
        run_in_float8(one, "tensorwise", emulate=True)
    x = torch.randn(2, 8, 32, dtype=torch.float64)
    with products_in_float64():
        wanted = gradients(exact, x)[0]
    assert 1e-9 < ((gradients(ours, x)[0] - wanted).norm() / wanted.norm()) < 1e-6


def test_every_recipe_has_a_reference() -> None:
    assert list(RECIPES) == list(TORCHAO_NAMES)


@pytest.mark.parametrize("recipe", TORCHAO_NAMES)
def test_the_kernels_of_this_device_agree_with_the_emulation(recipe: str) -> None:
    real, emulated = linear(torch.bfloat16, bias=False), linear(torch.bfloat16, bias=False)
    run_in_float8(real, TORCHAO_NAMES[recipe])
    run_in_float8(emulated, TORCHAO_NAMES[recipe], emulate=True)
    x = torch.randn(2, 8, 32, dtype=torch.bfloat16)
    for mine, other in zip(gradients(real, x), gradients(emulated, x), strict=True):
        assert (mine - other).norm() <= 0.01 * other.norm()


@pytest.mark.parametrize("recipe", TORCHAO_NAMES)
def test_tokens_that_are_filled_up_change_nothing(recipe: str) -> None:
    padded, emulated = linear(torch.bfloat16, bias=False), linear(torch.bfloat16, bias=False)
    run_in_float8(padded, TORCHAO_NAMES[recipe], pad=True)
    run_in_float8(emulated, TORCHAO_NAMES[recipe], emulate=True)
    x = torch.randn(7, 32, dtype=torch.bfloat16)
    for mine, other in zip(gradients(padded, x), gradients(emulated, x), strict=True):
        assert mine.shape == other.shape and (mine - other).norm() <= 0.01 * other.norm()


def test_the_module_stays_what_it_is() -> None:
    module = Scaled(16, 16)
    before = {name: (id(p), tuple(p.shape)) for name, p in module.named_parameters()}
    run_in_float8(module, "rowwise", emulate=True)
    assert type(module) is Scaled
    assert {name: (id(p), tuple(p.shape)) for name, p in module.named_parameters()} == before
    assert list(module.state_dict()) == ["weight", "bias"]
    module.reset_parameters()
    assert bool((module.weight == 0.5).all())


def test_a_copy_computes_with_its_own_weight() -> None:
    module = linear()
    run_in_float8(module, "tensorwise", emulate=True)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.zero_()
    x = torch.randn(4, 32)
    assert not twin(x).any() and bool(module(x).any())


@pytest.mark.parametrize("recipe", TORCHAO_NAMES)
def test_scales_stay_in_float32_in_a_proof_also_under_modes_of_styles(recipe: str) -> None:
    """A style's mode, as of context parallelism, stands between torchao and the mode that lifts casts to float64."""

    class OfAStyle(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    module, x = linear(torch.float64), torch.randn(2, 8, 32, dtype=torch.float64)
    run_in_float8(module, TORCHAO_NAMES[recipe], emulate=True)
    with products_in_float64(), Float64():
        plain = module(x)
        with OfAStyle():
            assert torch.equal(module(x), plain)
