"""A list of experts with stacked weights computes what an `nn.ModuleList` does, and loads what one saved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from parallelizer.runtime.constructor_values import without_initializer
from parallelizer.styles.experts.expert_list import ExpertList
from tests.findings import compiled, mesh_of
from tests.styles.experts.models import EXPERTS, Called, Looped
from tests.styles.models import WIDTH, Mlp, around


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def grads(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The output, and the gradients of the input and of the parameters."""
    x = x.clone().requires_grad_()
    made = model(x)
    made.square().sum().backward()
    assert x.grad is not None
    return made.detach(), x.grad, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("stacked", [Called, lambda: Looped(ExpertList)], ids=["one call", "a loop"])
def test_it_computes_what_a_module_list_does(stacked: type[nn.Module]) -> None:
    torch.manual_seed(1)
    listed, other = Looped(), stacked()
    assert set(dict(other.named_parameters())) == {
        "gate.weight", *(f"experts.{a}_{b}" for a in ("up", "down") for b in ("weight", "bias"))
    }  # fmt: skip
    other.load_state_dict(listed.state_dict())
    x = torch.randn(3, 5, WIDTH)
    made, of_x, expected = grads(listed, x)
    also, of_x_too, found = grads(other, x)
    torch.testing.assert_close(also, made)
    torch.testing.assert_close(of_x_too, of_x)
    torch.testing.assert_close(found["gate.weight"], expected["gate.weight"])
    for leaf, name in (("up_weight", "up.weight"), ("down_bias", "down.bias")):
        one_by_one = torch.stack([expected[f"experts.{n}.{name}"] for n in range(EXPERTS)])
        torch.testing.assert_close(found[f"experts.{leaf}"], one_by_one)


def test_it_takes_the_values_that_its_experts_have() -> None:
    experts = [Mlp() for _ in range(3)]
    weight = experts[2].up.weight.detach().clone()
    made = ExpertList(experts)
    assert torch.equal(made.up_weight[2], weight)
    assert len(made) == 3 and str(made) == "ExpertList(3 x Mlp)"
    with pytest.raises(IndexError, match="none of number 3"):
        made[3]


def test_it_fills_each_expert_by_itself_and_all_of_it() -> None:
    with torch.device("meta"):
        made = ExpertList(Mlp() for _ in range(3))
    made.to_empty(device="cpu").reset_parameters()
    assert made.up_weight.isfinite().all() and not torch.equal(made.up_weight[0], made.up_weight[1])


class Raw(nn.Module):
    """Filled by its constructor alone."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))


def test_experts_without_a_method_that_fills_them_are_built_whole() -> None:
    model = nn.ModuleDict({"experts": ExpertList(Raw(float(n)) for n in range(3))})
    assert model.experts.weight.tolist() == [[0.0] * 2, [1.0] * 2, [2.0] * 2]
    assert without_initializer(model.to("meta")) == ["experts"]


def test_training_reaches_the_experts() -> None:
    made = ExpertList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0)) for _ in range(2))
    rows, ids, weights = torch.randn(5, 4), torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1)
    assert not made(rows, ids, weights).any()
    assert made.eval()(rows, ids, weights).all()


@pytest.mark.parametrize(
    ("experts", "why"),
    [
        ([], "needs experts"),
        ([nn.Linear(2, 2), Mlp()], "expert 1 is a Mlp and expert 0 a Linear"),
        ([nn.Linear(2, 2), nn.Linear(2, 3)], "expert 1 have other names or shapes"),
        ([nn.BatchNorm1d(2)] * 2, "has a buffer"),
        (
            [nn.Sequential(nn.Linear(2, 2), nn.Dropout(p)) for p in (0.1, 0.2)],
            "expert 1.1 has p=0.2 and expert 0 0.1",
        ),
        (
            [nn.Sequential(nn.Linear(2, 2), act) for act in (nn.ReLU(), nn.GELU())],
            "expert 1.1 is a GELU, and that of expert 0 a ReLU",
        ),
    ],
)
def test_what_it_refuses(experts: list[nn.Module], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ExpertList(experts)


def test_it_is_shared_out_like_any_stacked_module() -> None:
    program = compiled('rules: {inner.experts: experts, "": fsdp}', around(Called), mesh_of(dp_shard=2, ep=2))
    (experts,) = program.of_slot("experts")
    assert set(experts.params) == {"up_weight", "up_bias", "down_weight", "down_bias"}
