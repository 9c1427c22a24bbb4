"""Tables of which every rank takes the first rows for its part of the sequence."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from tests.simulate.checks.test_local_positions import CONTEXT, PLAN, found, gpt
from tests.simulate.gpt import Gpt


class Sliced(Gpt):
    """As Gpt, with the first rows of its table of positions."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def test_a_table_of_positions_that_is_not_listed_is_named(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("".join(line for line in PLAN.open() if "rope" not in line))
    (diagnostic,) = found("parallel=cp2", f"plan={plan}")
    assert diagnostic.code == "missing-buffers"
    assert diagnostic.help is not None and "add `rope.cos: 0, rope.sin: 0`" in diagnostic.help


def test_a_table_that_is_a_parameter_is_named(tmp_path: Path) -> None:
    (diagnostic,) = found(*gpt(tmp_path, CONTEXT + "}\n", Sliced), "parallel=cp2", small=False)
    assert "the first rows of positions.weight" in diagnostic.message
