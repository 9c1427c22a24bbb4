"""Outputs whose gradients are terms of a sum, in whole or in their last features, and inputs that become terms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parallelizer.language.plan import Mesh
from tests.findings import finding, marked
from tests.parity import Case, Errors, assert_exact, compare, plan
from tests.styles.models import WIDTH, around

LATENT, ROPE, HEADS, SIZE = 6, 2, 2, 4


class Latent(nn.Module):
    """As in multi-head latent attention: one projection makes a latent, which a colwise linear reads, and features that
    every head reads as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rope_size = ROPE
        self.down = nn.Linear(WIDTH, LATENT + ROPE)
        self.up = nn.Linear(LATENT, HEADS * SIZE)
        self.out = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        latent, shared = self.down(x).split([LATENT, ROPE], dim=-1)
        heads = self.up(latent).unflatten(-1, (-1, SIZE))
        mixed = torch.tanh(heads * shared.sum(-1)[..., None, None])
        y: Tensor = self.out(mixed.flatten(-2))
        return y


class Shared(nn.Module):
    """One linear whose whole output every head reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.heads, self.out = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.tanh(self.heads(x)) * self.scale(x))
        return y


class WithIdentity(nn.Module):
    """A sum of an MLP that is split over ranks and of its input as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.same = (
            nn.Linear(WIDTH, 12, bias=False),
            nn.Linear(12, WIDTH, bias=False),
            nn.Identity(),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x))) + 3 * self.same(x)
        return y


LATENT_PLAN = """
rules:
  inner.down: {style: prepare-output, output: replicate, grad: partial, grad_last: rope_size}
  inner.up: colwise
  inner.out: rowwise
"""
SHARED_PLAN = """
rules:
  inner.scale: {style: prepare-output, output: replicate, grad: partial}
  inner.heads: colwise
  inner.out: rowwise
"""
IDENTITY_PLAN = """
rules:
  inner: {style: prepare-io, input: replicate, output: partial -> replicate, local_input: true, grad: partial}
  inner.up: {style: shard-params, params: {weight: shard(0)}}
  inner.down: {style: shard-params, params: {weight: shard(1)}}
  inner.same: {style: prepare-input, input: replicate -> partial, local: true}
"""


def case(name: str, text: str, inner: type[nn.Module]) -> Case:
    return Case(name, plan(text), {"tp": 2}, around(inner))


CASES = [
    case("the last features, by the name that the module around it has", LATENT_PLAN, Latent),
    case("the last features, by number", LATENT_PLAN.replace("rope_size", str(ROPE)), Latent),
    case("all features", SHARED_PLAN, Shared),
    case("terms of a sum", IDENTITY_PLAN, WithIdentity),
    case("left out", LATENT_PLAN.replace(", grad: partial, grad_last: rope_size", ""), Latent),
]


@pytest.fixture(scope="module")
def results() -> dict[str, Errors | str]:
    return compare(CASES)


@pytest.mark.ranks
@pytest.mark.parametrize("name", [case.name for case in CASES[:-1]])
def test_gradients_are_those_of_one_process(name: str, results: dict[str, Errors | str]) -> None:
    assert_exact(results[name])


@pytest.mark.ranks
def test_left_out_the_gradient_is_wrong(results: dict[str, Errors | str]) -> None:
    errors = results["left out"]
    assert not isinstance(errors, str) and max(errors.values()) > 1e-3


@pytest.mark.parametrize(
    ("rule", "code", "mark"),
    [
        ("inner.down: {style: prepare-output, output: replicate, grad: partial, grad_last: x}", "unknown-attribute", "grad_last"),
        ("inner.down: {style: prepare-output, output: shard(-1), grad: partial}", "wrong-layout", "grad"),
        ("inner.down: {style: prepare-output, output: replicate, grad: partial, local: false}", "wrong-layout", "grad"),
        ("inner.down: {style: prepare-input, input: replicate -> partial}", "unknown-placement", "partial"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(rule: str, code: str, mark: str) -> None:
    text = f"rules:\n  {rule}\n"
    found = finding(text, around(Latent), Mesh({"tp": 2}))
    assert (found.code, marked(text, found)) == (code, mark)


def test_a_name_is_looked_for_among_those_of_the_modules_around() -> None:
    rule = "inner.down: {style: prepare-output, output: replicate, grad: partial, grad_last: rope_siz}"
    found = finding(f"rules:\n  {rule}\n", around(Latent), Mesh({"tp": 2}))
    assert found.help and "rope_size" in found.help
