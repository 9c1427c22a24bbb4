"""`gather: float8` is refused where a gathered weight could not serve, at the option."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from tests.findings import findings, marked, mesh_of

pytest.importorskip("torchao", reason="float8 needs torchao")

WIDTH = 32


class Tied(nn.Module):
    """Two linears, and a third that shares the weight of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(self.first(x)))
        return out


GATHERED = "{style: fsdp, gather: float8}"


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (f"first: [float8, {GATHERED}]", None),
        (f"first: {GATHERED}", "no linear in first is in float8, so that nothing can be gathered in float8"),
        (
            f"first: [{{style: float8, recipe: rowwise}}, {GATHERED}]",
            "first.weight is in float8 by the recipe rowwise, which scales it once for each of two products: "
            "one gather cannot serve both",
        ),
        (
            f"'{{second,head}}': float8, '': {GATHERED}",
            "second.weight is shared with head.weight, and only a weight of one module can be gathered in float8",
        ),
        (
            "first: [float8, {style: fsdp, gather: float8, reshard_after_forward: 2}]",
            "reshard_after_forward=2 keeps shards of what was gathered, which FSDP cannot for float8",
        ),
        (
            "first: [float8, {style: fsdp, gather: float8, cpu_offload: true}]",
            "shards in host memory are copied to the device in their own dtype, and cannot be gathered in float8",
        ),
    ],
)
def test_what_cannot_be_gathered_is_refused_at_the_option(rules: str, said: str | None) -> None:
    text = f"rules: {{{rules}}}"
    found = [d for d in findings(text, Tied, mesh_of(dp_shard=4)) if d.code == "precision-gather"]
    assert [d.message for d in found] == ([said] if said else [])
    assert all(marked(text, d) == "gather" for d in found)


def test_a_preset_s_gather_holds_where_there_is_something_to_gather() -> None:
    text = f"rules: {{first: [float8, {GATHERED}], '{{second,head}}': fsdp}}"
    assert not [d for d in findings(text, Tied, mesh_of(dp_shard=2)) if d.code.startswith("precision")]
