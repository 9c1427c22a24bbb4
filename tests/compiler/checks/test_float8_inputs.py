"""`cast: float8` is refused where an input in float8 could not serve, at the option."""

from __future__ import annotations

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from parallelizer.diagnostics.diagnostic import PlanError
from tests.findings import findings, marked, mesh_of
from tests.simulate.setups import CAST, llama, traced

pytest.importorskip("torchao", reason="float8 needs torchao")

WIDTH = 32


class Two(nn.Module):
    """Two linears that take one input."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.left(x)) * self.right(x)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.two = Two()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(x)
        return out


def prepared(more: str = "", flow: str = "shard(1) -> replicate") -> str:
    return f"two: {{style: prepare-input, input: {{x: {flow}}}, cast: float8{more}}}"


BOTH = "'two.{left,right}': [colwise, float8]"


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (f"{BOTH}, {prepared()}", None),
        (prepared(), "no linear in two is in float8, so that its input cannot be"),
        (
            f"two.left: float8, two.right: {{style: float8, recipe: rowwise}}, {prepared()}",
            "two.right is in float8 by the recipe rowwise, and an input that is cast once has one scale",
        ),
        (
            f"two.left: float8, two.right: {{style: float8, emulate: true}}, {prepared()}",
            "some linears in two are emulated and some are not, and they would share an input",
        ),
        (
            f"{BOTH}, {prepared(flow='replicate')}",
            "nothing can be cast to float8 for `replicate`, which gathers nothing",
        ),
        (
            f"{BOTH}, {prepared(', local: true')}",
            "nothing can be cast to float8 with `local: true`, since a linear could not tell the scale of a plain tensor",
        ),
        (
            f"{BOTH}, {prepared(', axis: cp')}",
            "nothing can be cast to float8 over cp, where ranks exchange keys and values, and no tensor in float8",
        ),
    ],
)
def test_what_cannot_be_cast_is_refused_at_the_option(rules: str, said: str | None) -> None:
    text = f"rules: {{{rules}}}"
    found = [d for d in findings(text, Around, mesh_of(tp=2, cp=2)) if d.code == "precision-cast"]
    assert [d.message for d in found] == ([said] if said else [])
    assert all(marked(text, d) == "cast" for d in found)


def test_what_takes_the_input_without_float8_is_found_in_the_dry_run() -> None:
    rules = f"rules=['layers.*.feed_forward.w[12]: float8', '{CAST.replace('{attention,feed_forward}', 'feed_forward')}']"
    setup = llama("parallel=tp2", "model.n_layers=1", rules)
    with pytest.raises(PlanError) as raised:
        traced(setup)
    (found,) = raised.value.diagnostics
    assert (found.code, found.severity) == ("precision-cast", "error")
    assert found.message == (
        "the input of layers.0.feed_forward is in float8, and layers.0.feed_forward.w3 uses it, which is no linear in "
        "float8"
    )
